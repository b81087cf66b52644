"""Engines on the same prompts, in turn, and what their figures come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mtplx.bench.machine import Machine
from mtplx.bench.prompts import Prompt
from mtplx.bench.split import Split
from mtplx.sampling import SamplerConfig

WARM_UP_TOKENS = 8

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is, of how much."""


@dataclass(frozen=True)
class Task:
    """What every engine is given alike.

    Attributes:
        prompt: token ids.
        max_tokens: most tokens to write.
        sampling: temperature, top-p, top-k and a seed; nothing else.
        stop_ids: tokens that end the text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplerConfig
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Decoded:
    """What an engine did with a task.

    Attributes:
        tokens: written.
        timed_tokens: of those, the ones that came in `decode_seconds`; an engine that reads the
            prompt and writes its first token in one pass does not count that one.
        cycles: passes of the model in that time.
        decode_seconds: wall clock, without the reading of the prompt.
        prefill_seconds: wall clock of that.
        decided_by_position: drafted tokens on which it was decided, by place in the draft.
        accepted_by_position: of those, how many were kept.
    """

    tokens: int
    timed_tokens: int
    cycles: int
    decode_seconds: float
    prefill_seconds: float
    decided_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


class Engine(Protocol):
    """One row of the table.

    Attributes:
        name: for the table; several rows of an engine differ in their depths.
        depth: tokens drafted per cycle; None where there is no such setting.
        settings: in words.
    """

    name: str
    depth: int | None
    settings: str

    def generate(self, task: Task) -> Decoded: ...

    def cycle_bytes(self, context: float) -> float:
        """Bytes that a cycle reads at a context of so many tokens."""
        ...


@dataclass(frozen=True)
class Run:
    """One engine on one prompt.

    Attributes:
        engine, depth, temperature: what ran.
        prompt: Spec-Bench's number of the question.
        category: of it.
        prompt_tokens, tokens, timed_tokens, cycles: numbers of them; see `Decoded`.
        decode_seconds, prefill_seconds: wall clock.
        tokens_per_second: decoding only; None if nothing was decoded in time.
        prompt_tokens_per_second: of reading the prompt.
        tokens_per_cycle: None likewise.
        share_of_limit: the time that reading a cycle's bytes takes at the copy bandwidth, over the
            time that a cycle took; None likewise.
        decided_by_position, accepted_by_position: see `Decoded`.
    """

    engine: str
    depth: int | None
    temperature: float
    prompt: int
    category: str
    prompt_tokens: int
    tokens: int
    timed_tokens: int
    cycles: int
    decode_seconds: float
    prefill_seconds: float
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    tokens_per_cycle: float | None
    share_of_limit: float | None
    decided_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Of a figure over prompts.

    Attributes:
        median: the figure itself.
        low, high: its quartiles.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        low, median, high = np.percentile(values, [25, 50, 75]).tolist()
        return cls(median, low, high)


@dataclass(frozen=True)
class Row:
    """One engine at one temperature, over prompts.

    Attributes:
        engine, depth, temperature: what ran.
        category: of the prompts; None for all.
        prompts: on how many.
        tokens_per_second, prompt_tokens_per_second, milliseconds_per_cycle, share_of_limit: see
            `Run`; medians over the prompts.
        ratio: of its tokens per second to those of the first engine on the same prompt.
        tokens_per_cycle: of all prompts together.
        acceptance_by_position: share of drafts kept where those before them were.
    """

    engine: str
    depth: int | None
    temperature: float
    category: str | None
    prompts: int
    tokens_per_second: Spread | None
    prompt_tokens_per_second: Spread | None
    milliseconds_per_cycle: Spread | None
    share_of_limit: Spread | None
    ratio: Spread | None
    tokens_per_cycle: float | None
    acceptance_by_position: tuple[float, ...]


@dataclass
class Bench:
    """All there is to report."""

    machine: Machine
    settings: dict[str, Any]
    engines: list[dict[str, Any]]
    runs: list[Run] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)

    def rows(self, category: str | None = None) -> list[Row]:
        """A row for each engine and temperature, in the order in which they were given."""
        runs = [run for run in self.runs if category in (None, run.category)]
        first = (self.engines[0]["engine"], self.engines[0]["depth"])
        keys = [
            (engine["engine"], engine["depth"], temperature)
            for temperature in dict.fromkeys(run.temperature for run in runs)
            for engine in self.engines
        ]
        return [_row(runs, key, (*first, key[2]), category) for key in keys]

    @property
    def categories(self) -> list[str]:
        """Those of the runs."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine.to_dict(),
            "settings": self.settings,
            "engines": self.engines,
            "runs": [asdict(run) for run in self.runs],
            "rows": [
                asdict(row) for category in (None, *self.categories) for row in self.rows(category)
            ],
            "splits": [split.to_dict() for split in self.splits],
        }


def in_turn(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    sampling: SamplerConfig,
    max_tokens: int,
    stop_ids: frozenset[int],
    bandwidth: float,
    progress: Progress = lambda what, done, total: None,
) -> Iterator[Run]:
    """Every engine on every prompt, one after another; what goes first changes each time.

    Args:
        engines: to be compared.
        prompts: each is given to all engines before the next.
        temperatures: likewise, within a prompt.
        sampling: the other settings; prompt i has its seed + i.
        max_tokens: of each text.
        stop_ids: tokens that end a text.
        bandwidth: of the machine's copies, in bytes per second.
        progress: is told.
    """
    warm_up = replace(sampling, temperature=temperatures[0])
    for i, engine in enumerate(engines):
        progress("warming up", i, len(engines))
        # The first text pays for memory and threads that later ones find ready.
        engine.generate(Task(prompts[0].ids, WARM_UP_TOKENS, warm_up, frozenset()))
    progress("warming up", len(engines), len(engines))
    total = len(prompts) * len(temperatures) * len(engines)
    turn = done = 0
    for i, prompt in enumerate(prompts):
        for temperature in temperatures:
            settings = replace(
                sampling, temperature=temperature, seed=((sampling.seed or 0) + i) % 2**64
            )
            task = Task(prompt.ids, max_tokens, settings, stop_ids)
            start = turn % len(engines)
            for engine in (*engines[start:], *engines[:start]):
                progress("measuring", done, total)
                yield _run(engine, prompt, task, engine.generate(task), bandwidth)
                done += 1
            turn += 1
    progress("measuring", total, total)


def _run(engine: Engine, prompt: Prompt, task: Task, did: Decoded, bandwidth: float) -> Run:
    rate = per_cycle = share = None
    if did.timed_tokens and did.cycles and did.decode_seconds > 0:
        rate = did.timed_tokens / did.decode_seconds
        per_cycle = did.timed_tokens / did.cycles
        # In the middle of the text the context is as long as it is on average.
        context = len(task.prompt) + did.tokens / 2
        limit = engine.cycle_bytes(context) / bandwidth
        share = limit / (did.decode_seconds / did.cycles)
    return Run(
        engine=engine.name,
        depth=engine.depth,
        temperature=task.sampling.temperature,
        prompt=prompt.question.id,
        category=prompt.question.category,
        prompt_tokens=len(task.prompt),
        tokens=did.tokens,
        timed_tokens=did.timed_tokens,
        cycles=did.cycles,
        decode_seconds=did.decode_seconds,
        prefill_seconds=did.prefill_seconds,
        tokens_per_second=rate,
        prompt_tokens_per_second=(
            len(task.prompt) / did.prefill_seconds if did.prefill_seconds > 0 else None
        ),
        tokens_per_cycle=per_cycle,
        share_of_limit=share,
        decided_by_position=did.decided_by_position,
        accepted_by_position=did.accepted_by_position,
    )


Key = tuple[str, int | None, float]
"""Engine, depth, temperature."""


def _row(runs: Sequence[Run], key: Key, first: Key, category: str | None) -> Row:
    own = [run for run in runs if _key(run) == key]
    base = {run.prompt: run.tokens_per_second for run in runs if _key(run) == first}
    rated = [run for run in own if run.tokens_per_second]
    cycles = sum(run.cycles for run in rated)
    decided, accepted = (
        [sum(counts) for counts in _columns([getattr(run, name) for run in own])]
        for name in ("decided_by_position", "accepted_by_position")
    )
    return Row(
        engine=key[0],
        depth=key[1],
        temperature=key[2],
        category=category,
        prompts=len(own),
        tokens_per_second=Spread.of([run.tokens_per_second for run in rated]),  # type: ignore[misc]
        prompt_tokens_per_second=Spread.of(
            [run.prompt_tokens_per_second for run in own if run.prompt_tokens_per_second]
        ),
        milliseconds_per_cycle=Spread.of([1e3 * run.decode_seconds / run.cycles for run in rated]),
        share_of_limit=Spread.of([run.share_of_limit for run in rated if run.share_of_limit]),
        ratio=Spread.of(
            [
                run.tokens_per_second / beside
                for run in rated
                if run.tokens_per_second and (beside := base.get(run.prompt))
            ]
        ),
        tokens_per_cycle=sum(run.timed_tokens for run in rated) / cycles if cycles else None,
        acceptance_by_position=tuple(
            kept / count if count else 0.0 for kept, count in zip(accepted, decided, strict=True)
        ),
    )


def _key(run: Run) -> Key:
    return run.engine, run.depth, run.temperature


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """By position; a text that ends early has fewer of them."""
    width = max(map(len, rows), default=0)
    return [[row[i] for row in rows if i < len(row)] for i in range(width)]
