"""`mtplx inspect`: what a model is, and whether it runs here."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mtplx.cli import options, show

if TYPE_CHECKING:
    from mtplx.inspection import Inspection, MtpLayers


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A built-in name, a directory, a .gguf file or a hub id (downloaded first).",
        ),
    ],
    head: options.Head = None,
    json: options.Json = False,
) -> None:
    """Say what a model is, which MTP layers it has, and whether it can run here."""
    with show.waiting(f"looking at {model} …"):
        from mtplx.inspection import inspect as look

        found = look(model, head)
    if json:
        print(json_format.dumps(found.to_dict(), ensure_ascii=False))
        return
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows(found):
        table.add_row(name, value)
    Console(highlight=False, markup=False, soft_wrap=True).print(table)


def rows(found: Inspection) -> list[tuple[str, str]]:
    """The findings in words."""
    stored = ", ".join(
        f"{kind} ({count / max(found.parameters, 1):.0%})" for kind, count in found.dtypes.items()
    )
    shape = [
        f"{count:,} {what}"
        for count, what in (
            (found.layers, "layers"),
            (found.hidden_size, "wide"),
            (found.vocab_size, "tokens in the vocabulary"),
        )
        if count is not None
    ]
    sampling = ", ".join(f"{name} {value}" for name, value in found.sampling.items())
    return [
        ("model", found.name),
        ("where", found.path),
        ("architecture", f"{found.architecture}, {found.format}"),
        ("size", f"{quantity(found.parameters)} parameters, {quantity(found.bytes)}B: {stored}"),
        ("shape", ", ".join(shape)),
        ("context", "not stated" if found.context is None else f"{found.context:,} tokens"),
        ("chat template", "yes" if found.chat_template else "no"),
        ("sampling", sampling or "no settings of its own"),
        ("MTP", mtp_words(found.mtp)),
        *(("note", note) for note in found.notes),
        ("runs here", "yes" if found.runs else "no"),
        *(("because", problem) for problem in found.problems),
    ]


def mtp_words(mtp: MtpLayers) -> str:
    """Which MTP layers there are, and of which kind."""
    size = f"{quantity(mtp.parameters)} parameters, {quantity(mtp.bytes)}B"
    match mtp.kind:
        case "native":
            return f"{mtp.layers} native layer(s) in the model's own files, {size}"
        case "attached":
            depth = "" if mtp.depth is None else f", recommends depth {mtp.depth}"
            return f"an attached EAGLE-3 head, {size}{depth}: {mtp.where}"
        case "missing":
            return f"{mtp.layers} layer(s) promised by the config and missing from the files"
        case "none":
            return "none"


def quantity(number: float) -> str:
    """A number with a unit prefix: 134.5 M."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.1f}{unit}" if unit else f"{number:.0f} "
        number /= 1000
    return f"{number:.1f} T"
