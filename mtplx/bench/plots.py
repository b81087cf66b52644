"""The figures as pictures; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mtplx.bench.run import Bench, Row
from mtplx.bench.split import PARTS

WIDTH, HEIGHT, DPI = 7.0, 4.2, 120


def write(bench: Bench, directory: Path) -> list[Path]:
    """Draw what there is to draw, a PNG each.

    Returns:
        The files: `tokens_per_second.png`, `acceptance.png` where anything was drafted,
        `cycle_time.png`.
    """
    return [
        path
        for draw, name in (
            (_speed, "tokens_per_second"),
            (_acceptance, "acceptance"),
            (_cycles, "cycle_time"),
        )
        if draw(bench, path := directory / f"{name}.png")
    ]


def _figure(bench: Bench, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{bench.settings['model']}: {title}", loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    return figure, axes


def _speed(bench: Bench, path: Path) -> bool:
    """By depth, beside the others, and beside what the memory allows."""
    figure, axes = _figure(bench, "decoding speed")
    rows = [row for row in bench.rows() if row.tokens_per_second]
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    for i, temperature in enumerate(temperatures):
        at = [row for row in rows if row.temperature == temperature]
        own = sorted((row for row in at if row.depth is not None), key=lambda row: row.depth or 0)
        depths = [row.depth for row in own]
        _line(axes, depths, own, f"C{i}", f"mtplx, temperature {temperature:g}")
        limits = [_limit(bench, row) for row in own]
        axes.plot(
            depths, limits, ":", color=f"C{i}", label=f"memory's limit, temperature {temperature:g}"
        )
    # Others hardly depend on the temperature.
    others = [row for row in rows if row.depth is None and row.temperature == temperatures[0]]
    for i, row in enumerate(others):
        assert row.tokens_per_second is not None
        colour = f"C{i + len(temperatures)}"
        axes.axhline(row.tokens_per_second.median, linestyle="--", color=colour, label=row.engine)
    axes.set_xlabel("tokens drafted per cycle")
    axes.set_xticks(sorted({row.depth for row in rows if row.depth is not None}))
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return True


def _line(axes: Any, depths: Sequence[Any], rows: Sequence[Row], colour: str, label: str) -> None:
    spreads = [row.tokens_per_second for row in rows if row.tokens_per_second]
    below = [s.median - s.low for s in spreads]
    above = [s.high - s.median for s in spreads]
    axes.errorbar(
        depths,
        [s.median for s in spreads],
        yerr=[below, above],
        marker="o",
        capsize=3,
        color=colour,
        label=label,
    )


def _limit(bench: Bench, row: Row) -> float:
    """Tokens per second if a cycle took as long as its bytes; the median over prompts."""
    return median(
        run.tokens_per_second / run.share_of_limit
        for run in bench.runs
        if (run.engine, run.depth, run.temperature) == (row.engine, row.depth, row.temperature)
        and run.tokens_per_second
        and run.share_of_limit
    )


def _acceptance(bench: Bench, path: Path) -> bool:
    """By place in the draft, of the deepest drafts."""
    drafted = [row for row in bench.rows() if row.acceptance_by_position]
    if not drafted:
        return False
    deepest = max(row.depth or 0 for row in drafted)
    figure, axes = _figure(bench, f"drafts kept, depth {deepest}")
    for row in drafted:
        if row.depth == deepest:
            places = range(1, len(row.acceptance_by_position) + 1)
            axes.plot(
                places,
                row.acceptance_by_position,
                marker="o",
                label=f"temperature {row.temperature:g}",
            )
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("kept, where those before it were")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return True


def _cycles(bench: Bench, path: Path) -> bool:
    """Stacked, by depth."""
    figure, axes = _figure(bench, "where a cycle's time goes")
    splits = bench.splits
    places = range(len(splits))
    bottom = [0.0] * len(splits)
    for part in PARTS:
        heights = [getattr(split, part) for split in splits]
        axes.bar(places, heights, 0.6, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(split.depth) for split in splits])
    axes.set_xlabel("tokens drafted per cycle")
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return True
