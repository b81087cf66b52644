"""llama.cpp, through llama-cpp-python."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from mtplx.bench import traffic
from mtplx.bench.machine import threads_words
from mtplx.bench.run import Decoded, Task
from mtplx.errors import MtplxError
from mtplx.models import gguf, gguf_families
from mtplx.sampling import SamplerConfig

LOOKED_UP = 2
"""Tokens drafted by prompt lookup: what llama-cpp-python advises on a CPU."""

TRIALS, TRIAL_PROMPT, TRIAL_TOKENS = 3, 64, 16
"""With flash attention and without, to choose."""

TYPES = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """What goes wrong shows in what is returned."""


llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


class LlamaCppEngine:
    """The file as it is, quantised once more, or with prompt lookup.

    Decoding is llama.cpp's own, without what the package's higher functions add, but for prompt
    lookup, which is one of those.
    """

    depth: int | None = None

    def __init__(self, way: str, path: Path, threads: int, context: int, directory: Path) -> None:
        """
        Args:
            way: `file`, `Q4_0`, `Q8_0` or `lookup`.
            path: of the GGUF file.
            threads: to compute with.
            context: positions to have room for.
            directory: an empty one of its own.
        Raises:
            MtplxError: llama.cpp cannot read the file, or not quantise it.
        """
        self.name = f"llama.cpp:{way}"
        self.path = path
        if way in TYPES:
            self.path = directory / f"{way}.gguf"
            _quantize(path, self.path, TYPES[way], threads)
        self._lookup = _CountedLookup() if way == "lookup" else None
        self._room = max(context, TRIAL_PROMPT + TRIAL_TOKENS) + LOOKED_UP + 1
        self._threads = threads
        self.llama, flash = self._fastest()
        self.settings = (
            f"llama-cpp-python {llama_cpp.__version__}, {threads_words(threads)}, flash "
            f"attention {'on' if flash else 'off'} (the faster here)"
        )
        if self._lookup:
            self.settings += f", {LOOKED_UP} tokens looked up"
        self._weights = traffic.file_bytes(self.path)
        # In float16, llama.cpp's own choice.
        self._token = traffic.token_bytes(gguf_families.load_config(gguf.read_gguf(path)), 2)

    def _open(self, flash: bool) -> Any:
        try:
            return llama_cpp.Llama(
                str(self.path),
                n_ctx=self._room,
                n_threads=self._threads,
                n_threads_batch=self._threads,
                flash_attn=flash,
                logits_all=self._lookup is not None,
                draft_model=self._lookup,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise MtplxError(f"{self.path}: llama.cpp cannot load it ({reason})") from None

    def _fastest(self) -> tuple[Any, bool]:
        """Opened with flash attention or without, whichever decodes faster."""
        both = {flash: self._open(flash) for flash in (True, False)}
        seconds: dict[bool, list[float]] = {flash: [] for flash in both}
        task = Task((0,) * TRIAL_PROMPT, TRIAL_TOKENS, SamplerConfig(temperature=0.0), frozenset())
        for _ in range(TRIALS):
            for flash, llama in both.items():
                self.llama = llama
                seconds[flash].append(self._plain(task).decode_seconds)
        best = min(both, key=lambda flash: statistics.median(seconds[flash]))
        both[not best].close()
        return both[best], best

    def generate(self, task: Task) -> Decoded:
        return self._with_lookup(task) if self._lookup else self._plain(task)

    def _plain(self, task: Task) -> Decoded:
        llama, (*prompt, token) = self.llama, task.prompt
        llama.reset()
        with _sampler(task.sampling) as sampler:
            started = time.perf_counter()
            llama.eval(prompt)
            read = time.perf_counter()
            tokens = 0
            while tokens < task.max_tokens and (not tokens or token not in task.stop_ids):
                llama.eval([token])
                token = llama_cpp.llama_sampler_sample(sampler, llama.ctx, -1)
                tokens += 1
            ended = time.perf_counter()
        return Decoded(tokens, tokens, tokens, ended - read, read - started)

    def _with_lookup(self, task: Task) -> Decoded:
        assert self._lookup is not None
        llama, s = self.llama, task.sampling
        llama.set_seed((s.seed or 0) % 2**32)
        # Else it would not read again what it remembers of a prompt.
        llama.reset()
        self._lookup.calls = 0
        started = first = last = time.perf_counter()
        tokens = 0
        for token in llama.generate(
            list(task.prompt), temp=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=0.0
        ):
            last = time.perf_counter()
            first = first if tokens else last
            tokens += 1
            if tokens == task.max_tokens or token in task.stop_ids:
                break
        return Decoded(tokens, tokens - 1, self._lookup.calls, last - first, first - started)

    def cycle_bytes(self, context: float) -> float:
        return self._weights + context * self._token


class _CountedLookup(LlamaPromptLookupDecoding):  # type: ignore[misc]
    """Is asked for a draft before each pass but the prompt's."""

    def __init__(self) -> None:
        super().__init__(num_pred_tokens=LOOKED_UP)
        self.calls = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> np.ndarray[Any, Any]:
        self.calls += 1
        draft: np.ndarray[Any, Any] = super().__call__(input_ids, **kwargs)
        return draft


@contextmanager
def _sampler(s: SamplerConfig) -> Iterator[Any]:
    """The settings as mtplx has them: the temperature before top-p."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if s.temperature == 0:
        parts = [llama_cpp.llama_sampler_init_greedy()]
    else:
        parts = [
            llama_cpp.llama_sampler_init_temp(s.temperature),
            llama_cpp.llama_sampler_init_top_p(s.top_p, 1),
            llama_cpp.llama_sampler_init_dist((s.seed or 0) % 2**32),
        ]
        if s.top_k:
            # First: then the others have little to do, and no temperature changes which they are.
            parts.insert(0, llama_cpp.llama_sampler_init_top_k(s.top_k))
    for part in parts:
        llama_cpp.llama_sampler_chain_add(chain, part)
    try:
        yield chain
    finally:
        llama_cpp.llama_sampler_free(chain)


def _quantize(source: Path, target: Path, kind: int, threads: int) -> None:
    """Once more, from what the file has: as good as that allows, as fast as any."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread, settings.ftype, settings.allow_requantize = threads, kind, True
    code = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(settings)
    )
    if code:
        raise MtplxError(f"{source}: llama.cpp cannot quantise it once more: leave out this engine")
