"""`python -m mtplx` is `mtplx`."""

from mtplx.cli import main

main()
