"""An audit as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from mtplx.audit.analysis import PLAIN, SPECULATION, Group
from mtplx.audit.faults import FAULTS
from mtplx.audit.run import Audit

COLOURS = {SPECULATION: "var(--a)", PLAIN: "var(--b)"}

STYLE = """
:root { --ink: #1c1c1e; --paper: #fff; --faint: #d8d8dc; --a: #c2410c; --b: #2563eb;
  --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e5e7; --paper: #17171a; --faint: #3f3f46;
  --a: #fb923c; --b: #60a5fa; --good: #4ade80; --bad: #f87171; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid; padding: .6rem 1rem; font-weight: 600; }
.pass { border-color: var(--good); } .fail { border-color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid var(--faint); }
td.n, th.n { text-align: right; } tr.bad td { color: var(--bad); font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif;
  fill: var(--ink); } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
"""


def html(audit: Audit) -> str:
    """The whole page."""
    kind = "pass" if audit.passed else "fail"
    parts = [
        f"<h1>Is {escape(audit.model)} exact? {escape(audit.engine)}</h1>",
        f'<p class="verdict {kind}">{escape(audit.verdict)}</p>',
        _planted(audit),
        _table(None, ((name, _word(value)) for name, value in _facts(audit))),
        "<h2>How far from the law</h2>",
        "<p>Total-variation distance between where draws lie in their laws and where they should, "
        f"over {len(audit.groups[0].histogram) if audit.groups else 0} equal bins; the distance "
        "over tokens is no smaller. A dot is the estimate, which is above 0 even for an exact "
        "engine (grey tick: its expectation then); the line covers the true distance with "
        "probability 0.95 (McDiarmid's inequality and a bound on the bias). From the open "
        "triangle on, a chi-square test would have found any distance with probability 0.9.</p>",
        _distances(audit.groups),
        "<h2>All tests</h2>",
        f"<p>{len(audit.tests)} tests. To the right of the line a test is significant although "
        f"there are so many: an exact engine gets there once in {round(1 / audit.alpha)} audits "
        "(Holm).</p>",
        _p_values(audit),
        "<h2>Where draws lie in their laws</h2>",
        "<p>Tokens in the order of their probability, the likeliest on the left; the position is "
        "made uniform by a random number within the token's own mass. Under the law all bars are "
        "equal, and within the grey band in 99 of 100 cases.</p>",
        f'<div class="plots">{"".join(map(_histogram, audit.groups))}</div>',
        "<h2>Figures</h2>",
        _group_table(audit.groups),
        "<h2>Tests, the clearest first</h2>",
        _test_table(audit),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mtplx audit: '
        f"{escape(audit.model)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n"
        "</body></html>\n"
    )


def _planted(audit: Audit) -> str:
    if audit.fault is None:
        return ""
    what = escape(f"{audit.fault}: {FAULTS[audit.fault]}")
    return f"<p>This verifier was broken on purpose. {what}.</p>"


def _facts(audit: Audit) -> Iterable[tuple[str, object]]:
    yield from audit.settings.items()
    for sample, count in audit.texts.items():
        yield f"texts, {sample}", f"{count} of {audit.length} tokens"
        yield f"draws of probability 0, {sample}", audit.impossible[sample]
    if audit.tokens_per_cycle:
        yield "tokens per cycle", f"{audit.tokens_per_cycle:.2f}"
    if audit.rounding:
        yield "rounding", rounding_words(audit)
    for note in audit.notes:
        yield "note", note
    yield "seconds", f"{audit.seconds:.0f}"


def rounding_words(audit: Audit) -> str:
    """How far passes of different width disagree."""
    r = audit.rounding
    assert r is not None
    return (
        f"passes of 1 and of {r.width} tokens a text, up to {r.texts} side by side, differ in "
        f"the likeliest token at {r.flips:.2%} of {r.places} places, and by a distance of "
        f"{r.distance:.1e} on average, {r.largest:.1e} at most"
    )


def _word(value: object) -> str:
    if isinstance(value, list):
        return " · ".join(map(_word, value))
    return escape(str(value))


def _table(
    head: Sequence[str] | None, rows: Iterable[Sequence[str]], bad: Iterable[bool] | None = None
) -> str:
    top = "" if head is None else f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"
    marks = iter(bad or ())
    lines = (
        f"<tr{' class=bad' if next(marks, False) else ''}>"
        f"{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"<table>{top}{''.join(lines)}</table>"


def _group_table(groups: Sequence[Group]) -> str:
    head = ["sample", "draws at", "number", "distance", "of an exact engine", "95% interval"]
    return _table(
        [*head, "would be seen from"],
        (
            [
                g.sample,
                g.name,
                str(g.draws),
                f"{g.distance.estimate:.4f}",
                f"{g.distance.noise:.4f}",
                f"{g.distance.low:.4f} to {g.distance.high:.4f}",
                f"{g.smallest_seen:.4f}",
            ]
            for g in groups
        ),
    )


def _test_table(audit: Audit) -> str:
    tests = sorted(audit.tests, key=lambda test: test.p_value)
    return _table(
        ["sample", "draws", "test", "p", "p, adjusted for all tests"],
        (
            [t.sample, escape(t.group), escape(t.name), f"{t.p_value:.2g}", f"{t.adjusted:.2g}"]
            for t in tests
        ),
        (test.adjusted < audit.alpha for test in tests),
    )


# --- Plots ----------------------------------------------------------------------------------------


def _svg(width: int, height: int, content: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(content)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dot(x: float, y: float, colour: str, title: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(title)}</title>'
        "</circle>"
    )


LEFT, WIDTH, ROW = 200, 860, 20


def _distances(groups: Sequence[Group]) -> str:
    largest = max((max(g.distance.high, g.smallest_seen) for g in groups), default=1.0)
    scale = (WIDTH - LEFT - 40) / largest

    def content() -> Iterable[str]:
        bottom = ROW * len(groups) + 6
        for i in range(6):
            at = largest * i / 5
            yield _line(LEFT + at * scale, 0, LEFT + at * scale, bottom, "var(--faint)")
            yield _text(LEFT + at * scale, bottom + 14, f"{at:.2f}", "middle")
        for i, g in enumerate(groups):
            y, d, colour = ROW * i + 13, g.distance, COLOURS[g.sample]
            yield _text(0, y + 4, f"{g.name}, {g.sample}")
            yield _line(LEFT + d.low * scale, y, LEFT + d.high * scale, y, colour, 2)
            noise = LEFT + d.noise * scale
            yield _line(noise, y - 6, noise, y + 6, "gray", 2)
            yield _dot(LEFT + d.estimate * scale, y, colour, f"{d.estimate:.4f}")
            x = LEFT + g.smallest_seen * scale
            yield f'<path d="M{x:.1f} {y - 4}l4 8h-8z" fill="none" stroke="{colour}"/>'

    return _svg(WIDTH, ROW * len(groups) + 26, content(), "distance from the law by group")


MOST = 20.0
"""Of -log10(p), beyond which all tests are drawn alike."""


def _p_values(audit: Audit) -> str:
    names = list(dict.fromkeys(test.name for test in audit.tests))
    scale = (WIDTH - LEFT - 40) / MOST
    threshold = -math.log10(audit.alpha / len(audit.tests))

    def content() -> Iterable[str]:
        bottom = ROW * len(names) + 6
        for power in range(0, int(MOST) + 1, 4):
            x = LEFT + power * scale
            yield _line(x, 0, x, bottom, "var(--faint)")
            more = "≤ " if power == MOST else ""
            yield _text(x, bottom + 14, f"{more}1e-{power}" if power else "p = 1", "middle")
        yield _line(LEFT + threshold * scale, 0, LEFT + threshold * scale, bottom, "var(--bad)", 2)
        for i, name in enumerate(names):
            yield _text(0, ROW * i + 17, name)
        for test in audit.tests:
            size = min(MOST, -math.log10(max(test.p_value, 1e-300)))
            y = ROW * names.index(test.name) + (10 if test.sample == SPECULATION else 16)
            title = f"{test.sample}, {test.group}: p = {test.p_value:.2g}"
            yield _dot(LEFT + size * scale, y, COLOURS[test.sample], title)

    return _svg(WIDTH, ROW * len(names) + 26, content(), "p-values of all tests")


def _histogram(group: Group) -> str:
    width, height, count = 200, 90, len(group.histogram)
    expected = group.draws / count
    spread = 2.576 * math.sqrt(expected * (1 - 1 / count))
    scale = (height - 10) / max(*group.histogram, expected + spread)

    def content() -> Iterable[str]:
        yield _text(0, 12, f"{group.name}, {group.sample}")
        base = 20 + height
        for i, n in enumerate(group.histogram):
            x, tall = width * i / count, n * scale
            yield (
                f'<rect x="{x + 0.5:.1f}" y="{base - tall:.1f}" width="{width / count - 1:.1f}" '
                f'height="{tall:.1f}" fill="{COLOURS[group.sample]}"><title>{n}</title></rect>'
            )
        top = base - (expected + spread) * scale
        yield (
            f'<rect x="0" y="{top:.1f}" width="{width}" height="{2 * spread * scale:.1f}" '
            'fill="gray" fill-opacity="0.35"/>'
        )

    return _svg(width, height + 24, content(), f"histogram, {group.name}, {group.sample}")
