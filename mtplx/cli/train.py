"""`mtplx train`: a head for a model that ships none."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mtplx.cli import options, show

if TYPE_CHECKING:
    from mtplx.training.recipe import Trained


def train(
    out: Annotated[
        Path,
        typer.Argument(
            help="Directory of this run; the head ends up in OUT/head.", file_okay=False
        ),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            "-t",
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Conversations the model wrote, an .npz; may be given several times.",
        ),
    ] = None,
    write: Annotated[
        int, typer.Option(min=0, metavar="N", help="Conversations for the model to write itself.")
    ] = 0,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            file_okay=False,
            metavar="HEAD",
            help="A head to go on from; it settles --taps, --width and --draft-vocab.",
        ),
    ] = None,
    epochs: Annotated[float, typer.Option(metavar="N", help="Passes over the text.")] = 6.0,
    minutes: Annotated[
        float, typer.Option(metavar="N", help="Time for training; ends it if it comes first.")
    ] = 110.0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in OUT, from whatever stage it came to."),
    ] = False,
    draft_vocab: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens the head can draft.")
    ] = 8192,
    width: Annotated[int, typer.Option(min=1, metavar="N", help="Of the head's MLP.")] = 2560,
    taps: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Trunk layers whose states the head is fed; low, middle and last if not given.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Answer tokens in a batch.")] = 3072,
    seed: Annotated[int, typer.Option(min=0, metavar="S")] = 0,
    dtype: options.Dtype = None,
    json: options.Json = False,
) -> None:
    """Train an MTP head on text that the model wrote, and report what it accepts.

    Runs on the CPU, whatever other devices there are.
    """
    layers = _layer_ids(taps)
    from mtplx.training.recipe import check_directory, train_head

    check_directory(out, resume)
    llm = options.load_llm(model, None, dtype, "cpu", quantize="none")
    from mtplx.training.trainer import TrainConfig

    count = llm.trunk.layers
    config = TrainConfig(
        epochs=epochs,
        minutes=minutes,
        rows=rows,
        draft_vocab_size=draft_vocab,
        intermediate_size=width,
        taps=layers or (round(count * 0.27), round(count * 0.6), count),
        seed=seed,
    )
    with _progress() as report:
        trained = train_head(
            llm,
            out,
            config,
            text=text or (),
            write=write,
            start=start,
            resume=resume,
            report=report,
        )
    if not (trained.head / "training.png").exists():
        print("note: no plot without matplotlib: pip install 'mtplx[train]'", file=sys.stderr)
    if json:
        print(json_format.dumps(_summary(trained)))
    else:
        show.console().print(_table(trained))


def _layer_ids(taps: str | None) -> tuple[int, int, int] | None:
    if taps is None:
        return None
    try:
        low, middle, high = (int(part) for part in taps.split(","))
    except ValueError:
        raise typer.BadParameter(f"--taps takes three layer numbers, got {taps!r}") from None
    return low, middle, high


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage, in the order in which they begin."""
    tasks: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=show.console(),
    ) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _summary(trained: Trained) -> dict[str, object]:
    return {
        "head": str(trained.head),
        "minutes": trained.minutes,
        "held_out": [
            {
                "sampler": a.sampler,
                "acceptance_by_position": list(a.by_position),
                "expected_tokens_per_cycle": a.tokens_per_cycle,
            }
            for a in trained.held_out
        ],
    }


def _table(trained: Trained) -> Table:
    table = Table(title=f"{trained.head}: on held-out text", title_justify="left")
    table.add_column("sampler")
    table.add_column("acceptance by position", justify="right")
    table.add_column("tokens per cycle", justify="right")
    for a in trained.held_out:
        positions = "  ".join(f"{share:.2f}" for share in a.by_position)
        table.add_row(a.sampler, positions, f"{a.tokens_per_cycle:.2f}")
    return table
