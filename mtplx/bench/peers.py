"""The engines this one can be held against, by name. Nothing is imported before one is asked for.

A name is a library's, which stands for all its ways that can read the model, or `library:way`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from mtplx.errors import MtplxError


@dataclass(frozen=True)
class Way:
    """One of the ways in which a library runs here.

    Attributes:
        packages: that it needs, the library's own first, and the module of each.
        reads_gguf_only: whether the model has to be a GGUF file.
    """

    packages: dict[str, str]
    reads_gguf_only: bool = True


_LLAMA_CPP = {"llama-cpp-python": "llama_cpp"}
_TRANSFORMERS = {"transformers": "transformers"}

LIBRARIES = {
    "llama.cpp": {way: Way(_LLAMA_CPP) for way in ("file", "Q4_0", "Q8_0", "lookup")},
    "transformers": {
        "bf16": Way(_TRANSFORMERS, reads_gguf_only=False),
        "gguf": Way(_TRANSFORMERS | {"accelerate": "accelerate"}),
    },
}


def check(names: Sequence[str]) -> None:
    """Raises `ValueError` for a name that is none, or comes twice."""
    for name in names:
        library, colon, way = name.partition(":")
        ways = LIBRARIES.get(library)
        if ways is None:
            raise ValueError(f"no engine {library!r}; there are {', '.join(LIBRARIES)}")
        if colon and way not in ways:
            raise ValueError(f"{library} has no way {way!r}; there are {', '.join(ways)}")
        if names.count(name) > 1 or (colon and library in names):
            raise ValueError(f"{name} is named twice")


def expand(names: Sequence[str], model: str, is_gguf: bool) -> dict[str, Way]:
    """All that these names stand for, by `library:way`.

    Args:
        names: checked.
        model: for the error.
        is_gguf: whether the model is a GGUF file.
    Raises:
        MtplxError: none of a name's ways can read the model, or what one needs is not installed.
    """
    found: dict[str, Way] = {}
    for name in names:
        library, _, chosen = name.partition(":")
        able = {
            f"{library}:{way}": needs
            for way, needs in LIBRARIES[library].items()
            if chosen in ("", way) and (is_gguf or not needs.reads_gguf_only)
        }
        if not able:
            raise MtplxError(f"{name} reads GGUF files, and {model} is none: name a .gguf file")
        found |= able
    for name, way in found.items():
        for package, module in way.packages.items():
            if find_spec(module) is None:
                raise MtplxError(f"{name} needs {package}: pip install {package}")
    return found
