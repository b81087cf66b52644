"""`mtplx inspect`: what a model is, and what of it runs here and how."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mtplx.cli import options, show

if TYPE_CHECKING:
    from mtplx.inspection import Inspection, Mtp
    from mtplx.ways import Way


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A built-in name, a directory, a .gguf file or a hub id, of which the config and "
            "the headers of the weight files are fetched.",
        ),
    ],
    head: options.Head = None,
    json: options.Json = False,
) -> None:
    """Say what a model is, which MTP layers it has, and how it would run here."""
    with show.waiting(f"looking at {model} …"):
        from mtplx.models.checkpoint import locate

        checkpoint = locate(model, weights=False)
        # After it, so that a mistyped path does not take seconds to say so.
        from mtplx.inspection import look_at

        found = look_at(checkpoint, head)
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
    where = "on the hub; its config and headers were read" if found.remote else found.path
    return [
        ("model", found.name),
        ("where", where),
        ("architecture", f"{found.architecture}, {found.format}"),
        ("size", f"{quantity(found.parameters)} parameters, {quantity(found.bytes)}B: {stored}"),
        ("shape", ", ".join(shape)),
        ("context", "not stated" if found.context is None else f"{found.context:,} tokens"),
        ("chat template", "yes" if found.chat_template else "no"),
        ("sampling", sampling or "no settings of its own"),
        ("", ""),
        ("MTP", mtp_words(found.mtp)),
        *status_rows(found.mtp),
        ("", ""),
        ("runs here", run_words(found)),
        *(("because", problem) for problem in found.problems),
        *((("no kernels", found.why_not_kernels),) if found.why_not_kernels else ()),
        *memory_rows(found),
        *(("note", note) for note in found.notes),
    ]


def mtp_words(mtp: Mtp) -> str:
    """Which MTP layers there are, and of which kind."""
    size = f"{quantity(mtp.parameters)} parameters, {quantity(mtp.bytes)}B"
    match mtp.kind:
        case "native":
            promised = mtp.promised or "none"
            return f"{mtp.found} layer(s) in the model's files, {promised} promised; {size}"
        case "attached":
            return f"an attached EAGLE-3 head, {size}: {mtp.where}"
        case "missing":
            return f"{mtp.promised} layer(s) promised by the config, none in the files"
        case "none":
            return "none"


def status_rows(mtp: Mtp) -> list[tuple[str, str]]:
    """What becomes of them."""
    if mtp.kind == "none":
        return []
    words: str = mtp.status
    if mtp.kind == "native" and mtp.family:
        words += f", of the family of {', '.join(mtp.family)}"
    rows = [("status", words)]
    if mtp.status == "unknown layout":
        more = mtp.tensors - len(mtp.seen)
        seen = [*mtp.seen, f"and {more:,} more"] if more else mtp.seen
        rows.append(("its tensors", ", ".join(seen)))
    if mtp.depths:
        least, most = mtp.depths
        rows.append(("depth", f"begin with {least} to {most}; auto, the default, finds out"))
    return rows


def run_words(found: Inspection) -> str:
    """Whether it runs, by what, and what drafts."""
    if not found.runs:
        return "no"
    usual = found.ways[0]
    if usual.engine == "kernels":
        words = f"yes, by the kernels ({found.instructions}), in {usual.dtype}"
    else:
        words = f"yes, in torch on {found.device}, in {usual.dtype}"
    drafter = {"native": "its MTP layers draft", "attached": "the attached head drafts"}
    return words + (f"; {drafter[found.drafter]}" if found.drafter else "; nothing drafts")


def memory_rows(found: Inspection) -> list[tuple[str, str]]:
    """What each way of running it takes, and whether its results are the same in any pass."""
    if not found.ways:
        return []
    usual = found.ways[0]
    bits = {
        "always": "always",
        "on request": "with --deterministic",
        "no": "no, its recurrent layers round by how passes are put together",
    }[usual.deterministic]
    if any(way.deterministic == "always" for way in found.ways[1:]):
        bits += "" if usual.deterministic == "always" else ", and always with --quantize"
    return [
        ("deterministic", bits),
        ("memory", f"{quantity(found.memory)}B here; by estimate the model takes"),
        *((f"  {_name(way)}", way_words(way)) for way in found.ways if not way.problem),
        # What is in the way of one is in that of the next as well, as a rule.
        *(
            (f"  {', '.join(_name(way) for way in found.ways if way.problem == problem)}", problem)
            for problem in dict.fromkeys(way.problem for way in found.ways)
            if problem
        ),
    ]


def _name(way: Way) -> str:
    return way.dtype if way.quantize == "none" else way.quantize


def way_words(way: Way) -> str:
    """The memory of one way."""
    words = f"{quantity(way.weights)}B"
    if way.head:
        words += f" and {quantity(way.head)}B for the head"
    if way.states:
        words += f", {quantity(way.states)}B of states for each text"
    if way.keys_and_values:
        words += f", {quantity(way.keys_and_values)}B for every 1,000 tokens"
    return words if way.fits else f"{words}: more than there is"


def quantity(number: float) -> str:
    """A number with a unit prefix: 134.5 M."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.1f}{unit}" if unit else f"{number:.0f} "
        number /= 1000
    return f"{number:.1f} T"
