"""The whole benchmark: the model loaded, its peers beside it, all in turn, and the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mtplx.bench import engines, peers
from mtplx.bench.engines import OwnEngine
from mtplx.bench.machine import describe, threads_words
from mtplx.bench.peers import Way
from mtplx.bench.prompts import Prompt, choose
from mtplx.bench.run import Bench, Engine, Progress, Task, in_turn
from mtplx.drafters.find import DrafterName
from mtplx.errors import MtplxError
from mtplx.llm import LLM, Depth, load
from mtplx.models.checkpoint import Checkpoint, Quantize, locate
from mtplx.sampling import SamplerConfig, Verifier

SPLIT_PROMPTS = 4
"""Prompts on which a cycle's time is taken apart."""

MakePeers = Callable[[Sequence[str], Checkpoint, int, int, Path], list[Engine]]


@dataclass(frozen=True)
class Plan:
    """What is asked of the benchmark.

    Attributes:
        model, head, drafter, dtype, quantize: as for `mtplx.load`, on the CPU.
        depths: of this engine, at least one, `auto` among them; the first is what the others are
            compared with.
        against: names of peers, see `peers`.
        temperatures: at least one.
        sampling: top-p, top-k and the first prompt's seed.
        verifier: the rule.
        per_category: prompts of each.
        max_tokens: of each text.
        threads: None for what torch takes, which is the physical cores.
    """

    model: str
    head: str | None = None
    drafter: DrafterName = "auto"
    dtype: str | None = None
    quantize: Quantize | None = None
    depths: tuple[Depth, ...] = (0, 1, 2, 3, "auto")
    against: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.6,)
    sampling: SamplerConfig = SamplerConfig(top_p=0.95, top_k=20, seed=0)  # noqa: RUF009
    verifier: Verifier = "block"
    per_category: int = 1
    max_tokens: int = 128
    threads: int | None = None


def bench(
    plan: Plan,
    progress: Progress = lambda what, done, total: None,
    make_peers: MakePeers | None = None,
) -> Bench:
    """Measure.

    Args:
        plan: what.
        progress: is told.
        make_peers: makes the engines beside this one; None for `engines.make`.
    Raises:
        MtplxError: a peer is not installed, the model cannot be loaded or has no head for the
            depths asked for, or no prompt fits.
    """
    checkpoint = locate(plan.model)
    ways = peers.expand(plan.against, plan.model, checkpoint.is_gguf)
    with _threads(plan.threads) as threads, tempfile.TemporaryDirectory() as directory:
        machine = describe(_versions(ways.values()))
        progress("loading", 0, 1)
        llm = load(
            plan.model,
            head=plan.head,
            drafter=plan.drafter,
            dtype=plan.dtype,
            device="cpu",
            quantize=plan.quantize,
        )
        if any(plan.depths) and llm.drafter is None:
            raise MtplxError(f"{llm.name} has no MTP head to draft with: give --depths 0")
        prompts = choose(plan.per_category, llm.encode, llm.trunk.context - plan.max_tokens)
        context = max(len(prompt.ids) for prompt in prompts) + plan.max_tokens
        kind, count = _kind(llm, plan.quantize), threads_words(threads)
        words = f"{kind}, {count}, verifier {plan.verifier}"
        own = [OwnEngine(llm, depth, plan.verifier, words) for depth in plan.depths]
        make = make_peers or engines.make
        peers_made = make(list(ways), checkpoint, threads, context, Path(directory))
        rows: list[Engine] = [*own, *peers_made]
        progress("loading", 1, 1)
        found = Bench(
            machine,
            _settings(plan, llm),
            [{"engine": e.name, "depth": e.depth, "settings": e.settings} for e in rows],
        )
        stops = frozenset(llm.defaults.eos_token_ids)
        found.runs += in_turn(
            rows,
            prompts,
            plan.temperatures,
            plan.sampling,
            plan.max_tokens,
            stops,
            machine.copy_bandwidth,
            progress,
        )
        tasks = _split_tasks(plan, prompts, stops)
        fixed = [engine for engine in own if engine.depth is not None]
        for i, engine in enumerate(fixed):
            progress("taking cycles apart", i, len(fixed))
            found.splits.append(engine.split(tasks))
        progress("taking cycles apart", len(fixed), len(fixed))
    return found


def _split_tasks(plan: Plan, prompts: Sequence[Prompt], stops: frozenset[int]) -> list[Task]:
    sampling = replace(plan.sampling, temperature=plan.temperatures[0])
    return [
        Task(prompt.ids, plan.max_tokens, sampling, stops) for prompt in prompts[:SPLIT_PROMPTS]
    ]


def _kind(llm: LLM, quantize: Quantize | None) -> str:
    if quantize in (None, "none"):
        return str(llm.trunk.dtype).removeprefix("torch.")
    return f"quantize {quantize}"


def _versions(ways: Iterable[Way]) -> dict[str, str]:
    packages = {package for way in ways for package in way.packages}
    return {package: metadata.version(package) for package in sorted(packages)}


def _settings(plan: Plan, llm: LLM) -> dict[str, Any]:
    return {
        "model": llm.name,
        "head": plan.head,
        "drafter": llm.drafts_with,
        "quantize": plan.quantize or "none",
        "dtype": str(llm.trunk.dtype).removeprefix("torch."),
        "verifier": plan.verifier,
        "temperatures": list(plan.temperatures),
        "top_p": plan.sampling.top_p,
        "top_k": plan.sampling.top_k,
        "seed": plan.sampling.seed,
        "prompts_per_category": plan.per_category,
        "max_tokens": plan.max_tokens,
    }


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Have torch, and with it the kernels, compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield count or before
    finally:
        torch.set_num_threads(before)
