"""Several tokens per forward pass, exactly the model's own.

import mtplx
llm = mtplx.load("smollm2-135m")
print(llm.generate("Why is the sky blue?", max_tokens=128).text)
"""

from mtplx.engine.request import Stats
from mtplx.errors import MtplxError
from mtplx.llm import LLM, Piece, Result, load
from mtplx.sampling import SamplerConfig

__version__ = "0.1.0"
__all__ = ["LLM", "MtplxError", "Piece", "Result", "SamplerConfig", "Stats", "load"]
