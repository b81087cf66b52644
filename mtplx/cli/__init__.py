"""The command line: a thin skin over `mtplx.load` and its neighbours."""

from mtplx.cli.commands import app, main

__all__ = ["app", "main"]
