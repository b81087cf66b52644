"""Several tokens per forward pass, exactly the model's own.

import mtplx
llm = mtplx.load("smollm2-135m")
print(llm.generate("Why is the sky blue?", max_tokens=128).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtplx.engine.request import Stats
    from mtplx.errors import MtplxError
    from mtplx.grammar import GrammarSpec
    from mtplx.llm import LLM, Piece, Result, load
    from mtplx.sampling import SamplerConfig

__version__ = "0.1.0"
__all__ = ["LLM", "GrammarSpec", "MtplxError", "Piece", "Result", "SamplerConfig", "Stats", "load"]

_HOMES = {
    "GrammarSpec": "mtplx.grammar",
    "LLM": "mtplx.llm",
    "MtplxError": "mtplx.errors",
    "Piece": "mtplx.llm",
    "Result": "mtplx.llm",
    "SamplerConfig": "mtplx.sampling",
    "Stats": "mtplx.engine.request",
    "load": "mtplx.llm",
}


def __getattr__(name: str) -> Any:
    # Looked up when used: importing torch takes seconds, and `mtplx --help` or a script that
    # wants only the law need not wait for it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mtplx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
