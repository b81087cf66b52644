"""`mtplx bench`: how fast, beside others."""

from __future__ import annotations

import json as json_format
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtplx.bench import peers
from mtplx.cli import options, show
from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig, Verifier

if TYPE_CHECKING:
    from mtplx.bench.run import Bench, Row, Spread
    from mtplx.llm import Depth

WIDE = 140
"""Columns of a table that goes to no terminal."""


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = None,
    drafter: options.Drafter = "auto",
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    depths: Annotated[
        str,
        typer.Option(
            metavar="N,N,…",
            help="Tokens drafted per cycle, one run each; auto is one too.",
        ),
    ] = "0,1,2,3,auto",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE,…",
            help="Other engines to run beside this one: llama.cpp (the same GGUF file as it is, "
            "quantised once more to Q4_0 and to Q8_0, and with prompt lookup), transformers "
            "(bfloat16, and its own GGUF loader), or one of their ways, as llama.cpp:Q4_0, :Q8_0, "
            ":file, :lookup or transformers:bf16, :gguf. Needs pip install 'mtplx\\[bench]'. "
            "vLLM is not covered: it wants an environment of its own.",
        ),
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T,T,…",
            help="One run each; can be repeated. 0.6 if not given.",
        ),
    ] = None,
    top_p: Annotated[float, typer.Option(metavar="P", help="1 is off.")] = 0.95,
    top_k: Annotated[int, typer.Option(metavar="K", help="0 is off.")] = 20,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, metavar="S", help="Of the first prompt.")
    ] = 0,
    verifier: Annotated[Verifier, typer.Option(help="How drafts are kept.")] = "block",
    prompts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Of each of Spec-Bench's 13 categories."),
    ] = 1,
    max_tokens: options.MaxTokens = 128,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For all engines; the physical cores if not given."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, metavar="FILE", help="Write all figures here."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", file_okay=False, metavar="DIR", help="Write pictures here."),
    ] = None,
) -> None:
    """Measure decoding speed on this CPU, at several depths and beside other engines.

    All run in this process, in turn on every prompt, what goes first changing from prompt to
    prompt; the table has medians over prompts and, in brackets, quartiles. Reading the prompt is
    timed apart. The share of the limit is the time that reading a cycle's bytes takes, at the
    speed at which this machine copies, over the time the cycle took.
    """
    sampling = _sampling(top_p, top_k, seed)
    drafted = _depths(depths)
    temperatures = tuple(t for given in temperature or ["0.6"] for t in _temperatures(given))
    _check_numbers(drafted, temperatures)
    names = tuple(filter(None, (name.strip() for name in (against or "").split(","))))
    try:
        peers.check(names)
    except ValueError as error:
        raise typer.BadParameter(f"--against: {error}") from None
    _check_outputs(json, plots)

    from mtplx.bench.suite import Plan
    from mtplx.bench.suite import bench as measure

    plan = Plan(
        model=model,
        head=head,
        drafter=drafter,
        dtype=dtype,
        quantize=quantize,
        depths=drafted,
        against=names,
        temperatures=temperatures,
        sampling=sampling,
        verifier=verifier,
        per_category=prompts,
        max_tokens=max_tokens,
        threads=threads,
    )
    with show.stages(a_second=1) as report:  # drawing takes from what is measured
        found = measure(plan, report)

    # The files last: where they cannot be written, the work is not lost.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for chosen in temperatures:
        out.print(_table(found, chosen))
        if len(found.categories) > 1:
            out.print(_by_category(found, chosen))
    out.print(_splits(found))
    _print_words(out, found)
    if json is not None:
        text = json_format.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
        json.write_text(text + "\n", encoding="utf-8")
    if plots is not None:
        from mtplx.bench.plots import write

        write(found, plots)


def _sampling(top_p: float, top_k: int, seed: int) -> SamplerConfig:
    try:
        return SamplerConfig(top_p=top_p, top_k=top_k, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--temperature takes numbers with commas, got {text!r}") from None


def _depths(text: str) -> tuple[Depth, ...]:
    try:
        return tuple(options.read_depth(part.strip()) for part in text.split(","))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--depths: {error}") from None


def _check_numbers(depths: tuple[Depth, ...], temperatures: tuple[float, ...]) -> None:
    for temperature in temperatures:
        try:
            SamplerConfig(temperature=temperature)
        except ValueError as error:
            raise typer.BadParameter(f"--temperature: {error}") from None
    for name, values in (("--depths", depths), ("--temperature", temperatures)):
        if len(set(values)) < len(values):
            raise typer.BadParameter(f"{name}: one is given twice")


def _check_outputs(json: Path | None, plots: Path | None) -> None:
    """Find out now what would be a pity to find out after minutes of measuring."""
    if json is not None:
        new = not json.exists()
        try:
            # Appending nothing leaves what is there as it is.
            with json.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise MtplxError(f"{json}: cannot be written ({error.strerror})") from None
        if new:
            json.unlink()
    if plots is not None:
        if find_spec("matplotlib") is None:
            raise MtplxError("--plots needs matplotlib: pip install matplotlib")
        plots.mkdir(parents=True, exist_ok=True)


def _table(found: Bench, temperature: float) -> Table:
    rows = [row for row in found.rows() if row.temperature == temperature]
    title = f"{found.settings['model']}, temperature {temperature:g}, {rows[0].prompts} prompts"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("engine", no_wrap=True)
    for name in (
        "depth",
        "tokens/s",
        f"times {_name(rows[0])}",
        "tokens/cycle",
        "ms/cycle",
        "share of limit",
        "prompt tokens/s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            "" if row.depth is None else str(row.depth),
            _words(row.tokens_per_second, ".1f"),
            _words(row.ratio, ".2f"),
            "" if row.tokens_per_cycle is None else f"{row.tokens_per_cycle:.2f}",
            _words(row.milliseconds_per_cycle, ".1f"),
            _words(row.share_of_limit, ".0%"),
            _words(row.prompt_tokens_per_second, ".0f", False),
        )
    return table


def _by_category(found: Bench, temperature: float) -> Table:
    table = Table(title=f"tokens/s by category, temperature {temperature:g}", title_justify="left")
    table.add_column("category", no_wrap=True)
    for i, category in enumerate(found.categories):
        rows = [row for row in found.rows(category) if row.temperature == temperature]
        if i == 0:
            for row in rows:
                table.add_column(_name(row), justify="right")
        table.add_row(category, *(_words(row.tokens_per_second, ".0f", False) for row in rows))
    return table


def _splits(found: Bench) -> Table:
    table = Table(title="ms/cycle, taken apart in runs of their own", title_justify="left")
    for name in ("depth", "draft", "verify", "sample", "host"):
        table.add_column(name, justify="right")
    for split in found.splits:
        parts = (split.draft, split.verify, split.sample, split.host)
        table.add_row(str(split.depth), *(f"{part:.2f}" for part in parts))
    return table


def _print_words(out: Console, found: Bench) -> None:
    """What the figures are of."""
    machine = found.machine
    lines = [
        f"{machine.cpu}, {machine.cores} cores, threads: {machine.threads}, "
        f"{machine.memory / 2**30:.0f} GiB, copies {machine.copy_bandwidth / 1e9:.1f} GB/s "
        "(read and written)",
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
    ]
    told = dict.fromkeys((e["engine"], e["settings"]) for e in found.engines)
    lines += [f"{engine}: {settings}" for engine, settings in told]
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)


def _name(row: Row) -> str:
    return row.engine if row.depth is None else f"depth {row.depth}"


def _words(spread: Spread | None, form: str, with_quartiles: bool = True) -> str:
    if spread is None:
        return "-"
    median = format(spread.median, form)
    if not with_quartiles:
        return median
    return f"{median} ({spread.low:{form}}-{spread.high:{form}})"
