"""Tables and lines for people, all of them on stderr: stdout is the model's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mtplx.sampling import SamplerConfig

if TYPE_CHECKING:
    from mtplx.engine.request import Stats, TokenLogprobs
    from mtplx.llm import LLM, Depth


def console() -> Console:
    """A console on stderr as it is now."""
    return Console(stderr=True, highlight=False)


@contextmanager
def stages(a_second: float = 10) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage of a work, on a terminal.

    Args:
        a_second: how often the bars are drawn.
    Yields:
        What is to be told of a stage: its name, how far it is, and of how much.
    """
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console(),
        disable=not sys.stderr.isatty(),
        refresh_per_second=a_second,
    )
    begun: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun[what] = bars.add_task(what, total=total)
        bars.update(begun[what], completed=done)

    with bars:
        yield report


@contextmanager
def waiting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A spinner while something takes its time; nothing where stderr is no terminal.

    Yields:
        What may be told how far it is, and of how much.
    """
    if sys.stderr.isatty():
        with console().status(what) as status:
            yield lambda done, total: status.update(f"{what} {done} of {total} layers")
    else:
        yield lambda done, total: None


def sampling_settings(sampling: SamplerConfig) -> dict[str, Any]:
    """The settings for JSON, by name."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "no_repeat_ngram": sampling.no_repeat_ngram,
        "min_tokens": sampling.min_tokens,
        "suppress_stop": sampling.suppress_stop,
        "banned_tokens": list(sampling.banned_tokens),
        "forced_tokens": list(sampling.forced_tokens),
        "logit_bias": sampling.bias,
        "seed": sampling.seed,
    }


def logprobs(tokenizer: Any, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log-probabilities for JSON. The text of a token may be a part of a character, shown as �."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "text": tokenizer.decode([token_id]), "logprob": logprob}

    return [
        entry(e.token_id, e.logprob) | {"top": [entry(*alternative) for alternative in e.top]}
        for e in entries
    ]


def sampling_words(sampling: SamplerConfig) -> str:
    """The temperature, and whatever else is not at its neutral value."""
    neutral = sampling_settings(SamplerConfig())
    return ", ".join(
        f"{name} {value}"
        for name, value in sampling_settings(sampling).items()
        if name == "temperature" or value != neutral[name]
    )


def print_stats(
    llm: LLM, depth: Depth, sampling: SamplerConfig, stats: Stats, plain: Stats | None = None
) -> None:
    """What a generation did, and with which settings; with `plain`, beside the same at depth 0."""
    dtype = str(llm.trunk.dtype).removeprefix("torch.")
    kind = f"quantize {llm.quantize}" if llm.quantize else dtype
    out = console()
    drafter = f", drafter {llm.drafts_with}" if depth else ""
    out.print(f"{llm.name}, {kind} on {llm.trunk.device}{drafter}", soft_wrap=True, markup=False)
    out.print(stats_table(depth, stats, plain))
    out.print(sampling_words(sampling), soft_wrap=True, markup=False)


def stats_table(depth: Depth, stats: Stats, plain: Stats | None = None) -> Table:
    """The figures of one run, or of two side by side."""
    runs = [stats] if plain is None else [stats, plain]
    table = Table()
    table.add_column()
    table.add_column(f"depth {depth}" if depth else "no drafting", justify="right")
    if plain is not None:
        table.add_column("no drafting", justify="right")

    table.add_row("tokens", *(str(run.tokens) for run in runs))
    table.add_row("cycles", *(str(run.cycles) for run in runs))
    table.add_row("tokens per cycle", *(f"{run.tokens_per_cycle:.2f}" for run in runs))
    if stats.drafted_by_position:
        table.add_row("acceptance by draft position", *(_acceptance(run) for run in runs))
    table.add_row("tokens/s", *(f"{run.decode_tokens_per_second:.1f}" for run in runs))
    if plain is not None and plain.decode_tokens_per_second:
        ratio = stats.decode_tokens_per_second / plain.decode_tokens_per_second
        table.add_row("speed-up", f"{ratio:.2f}x", "1.00x")
    return table


def _acceptance(stats: Stats) -> str:
    return "  ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"


def stats_line(stats: Stats) -> str:
    """The same in a few words."""
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_cycle:.2f} per cycle, "
        f"{stats.decode_tokens_per_second:.1f} tokens/s"
    )
