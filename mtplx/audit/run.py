"""The audit: draw, look up the laws, test, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mtplx import __version__
from mtplx.audit import statistics
from mtplx.audit.analysis import (
    BINS,
    FEWEST,
    PLAIN,
    SPECULATION,
    After,
    Group,
    Test,
    by_prompt,
    impossible,
    pooled,
)
from mtplx.audit.engines import BONUS, Engine
from mtplx.audit.law import Laws, Text, TrunkLaws
from mtplx.audit.numerics import Rounding, rounding
from mtplx.errors import MtplxError
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig

PROMPTS = ("When I was young,", "Names: Anna,", "Yesterday I", "A list of words: tree,")
"""Short, since they are only read. Their continuations are open, and yet now and then guessed: a
rule's fault does not show where a draft is sure to be kept, nor where it has no chance."""

ALPHA = 0.001
"""Probability with which an exact engine fails an audit, or a little more where texts are few: the
tails of counts in bins that five draws each are expected in are not known so far out."""

ENDED = 0.01
"""Share of texts that may end early; more draws missing at their ends could pass for a fault."""

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


@dataclass
class Audit:
    """What came of it.

    Attributes:
        engine: whose texts they were.
        model: its name.
        settings: depth, verifier, sampler, seed, prompts and whatever else the texts depend on.
        fault: planted, or None.
        length: tokens of each text.
        texts: how many, by sample.
        impossible: draws of probability 0, by sample.
        groups: of draws.
        tests: all that were made.
        rounding: how far passes of different width disagree; None where no pass can be made.
        tokens_per_cycle: mean, where the engine tells.
        notes: what else to know.
        seconds: that it took.
        alpha: probability with which an exact engine fails.
    """

    engine: str
    model: str
    settings: dict[str, Any]
    fault: str | None
    length: int
    texts: dict[str, int]
    impossible: dict[str, int]
    groups: list[Group]
    tests: list[Test]
    rounding: Rounding | None
    tokens_per_cycle: float | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    alpha: float = ALPHA

    @property
    def failures(self) -> list[Test]:
        """Significant tests, the clearest first."""
        failed = [test for test in self.tests if test.adjusted < self.alpha]
        return sorted(failed, key=lambda test: test.p_value)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def main(self) -> str:
        """The sample that the audit is about; the other one, if there is one, is its control."""
        return SPECULATION if SPECULATION in self.texts else PLAIN

    @property
    def smallest_seen(self) -> float:
        """Distance that would have been found, 9 times in 10, at whichever position it was.

        Over bins of likelihood, see `Group`. 1 where no position has draws enough.
        """
        positions = (
            group.smallest_seen
            for group in self.groups
            if group.sample == self.main and group.name.startswith("position")
        )
        return max(positions, default=1.0)

    @property
    def verdict(self) -> str:
        """In one line."""
        if self.passed:
            return (
                f"PASS: {self.texts[self.main]} texts follow the exact law in {len(self.tests)} "
                f"tests; {self.smallest_seen:.3f} of the mass moved between likelier and rarer "
                "tokens, at any one position, would be found 9 times in 10"
            )
        worst = self.failures[0]
        failed = {test.sample for test in self.failures}
        why = ""
        if failed == {SPECULATION, PLAIN}:
            why = "; plain decoding leaves it too, so the verifier alone is not the cause"
        elif failed == {SPECULATION} and PLAIN in self.texts:
            why = "; plain decoding follows it"
        elif SPECULATION in self.texts:
            why = "; speculation was not seen to leave it"
        # Batches of another size round differently again than what was measured, and a small
        # temperature makes much of it.
        if PLAIN in failed and self.rounding and not self.settings.get("deterministic"):
            why += "; rounding may be: try float32, or this engine's deterministic mode"
        return (
            f"FAIL: {worst.sample} leaves the exact law, most clearly at {worst.group} "
            f"({worst.name}, {_p_words(worst.adjusted)}){why}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        answer = asdict(self)
        for group, found in zip(answer["groups"], self.groups, strict=True):
            group["distance"] = found.distance._asdict()
        return {
            "mtplx": __version__,
            "verdict": self.verdict,
            "passed": self.passed,
            "smallest_seen": self.smallest_seen,
            **answer,
        }


def _p_words(p: float) -> str:
    return f"p = {p:.0e}" if p > 1e-99 else "p < 1e-99"


def _quiet(what: str, done: int, total: int) -> None:
    pass


def audit(
    engine: Engine,
    trunk: Trunk | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplerConfig,
    *,
    model: str,
    depth: int,
    samples: int,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    fault: str | None = None,
    progress: Progress = _quiet,
) -> Audit:
    """Audit an engine.

    Args:
        engine: that draws.
        trunk: whose law it should follow; None for an endpoint, which brings its own.
        prompts: those of the engine, as token ids; not looked at without a trunk.
        sampling: those of the engine.
        model: its name, for the report.
        depth: of a draft. The texts are three tokens longer: beside a whole draft and its bonus
            they hold what follows those, and one token more.
        samples: texts, as many of each prompt; of an engine that speculates so many under
            speculation, and half as many without.
        seed: of the texts, and of the tests' own randomness.
        settings: for the report.
        fault: planted, for the report.
        progress: is told how far it is.
    Raises:
        MtplxError: too few samples, greedy settings, a prompt that leaves the model's context no
            room, texts that end early, or whatever the engine raises.
    """
    started = time.perf_counter()
    count, length = samples // len(prompts), depth + 3
    if count < FEWEST:
        raise MtplxError(
            f"{samples} texts of {len(prompts)} prompts are too few to say anything; draw "
            f"{FEWEST * len(prompts)} or more"
        )
    if sampling.temperature == 0:
        raise MtplxError(
            "at temperature 0 nothing is drawn, so there is no distribution to audit; "
            "give a temperature above 0"
        )
    for i, prompt in enumerate(prompts):
        if trunk is not None and len(prompt) + length > trunk.context:
            raise MtplxError(
                f"prompt {i + 1} has {len(prompt)} tokens; with {length} more it does not fit into "
                f"the model's context of {trunk.context}"
            )
    kinds = [SPECULATION, PLAIN] if engine.speculates else [PLAIN]
    drawn = _draw(engine, kinds, len(prompts), count, length, seed, progress)
    _check_lengths(drawn, length)
    laws: list[After] = []
    measured = None
    if engine.laws is not None:
        laws = [_known(of_prompt) for of_prompt in engine.laws]
    elif trunk is not None:
        laws = _look_up(trunk, sampling, prompts, drawn, count, progress)
        width = depth + 1 if engine.speculates else length
        measured = rounding(trunk, sampling, prompts, drawn[kinds[0]], width)

    rng = np.random.default_rng([seed, 1])
    edge = measured.outside if measured else 0.0
    counts, tests = impossible(drawn, edge)
    groups: list[Group] = []
    for kind in kinds:
        found, made = pooled(kind, drawn[kind], rng)
        groups, tests = groups + found, tests + made
        for i, after in enumerate(laws):
            mine = [text for text in drawn[kind] if text.prompt == i]
            tests += by_prompt(kind, f"prompt {i + 1}", mine, after)
    for test, adjusted in zip(
        tests, statistics.holm([test.p_value for test in tests]), strict=True
    ):
        test.adjusted = adjusted
    for group in groups:
        group.smallest_seen = statistics.smallest_seen(group.draws, BINS, ALPHA / len(tests))
    return Audit(
        engine.name,
        model,
        settings or {},
        fault,
        length,
        {kind: len(texts) for kind, texts in drawn.items()},
        counts,
        groups,
        tests,
        measured,
        engine.tokens_per_cycle,
        [*engine.notes(), *_untested(drawn, groups)],
        time.perf_counter() - started,
    )


def _draw(
    engine: Engine,
    kinds: Sequence[str],
    prompts: int,
    count: int,
    length: int,
    seed: int,
    progress: Progress,
) -> dict[str, list[Text]]:
    drawn: dict[str, list[Text]] = {kind: [] for kind in kinds}
    streams = np.random.default_rng([seed, 0]).integers(2**31, size=(len(kinds), prompts))
    for kind, seeds in zip(kinds, streams.tolist(), strict=True):
        texts = drawn[kind]
        # A control need not see as much as the sample it stands beside.
        wanted = count if kind == kinds[0] else count // 2
        for prompt, own in enumerate(seeds):
            for portion in engine.draw(prompt, wanted, length, own, kind == SPECULATION):
                texts += portion
                progress(f"drawing, {kind}", len(texts), wanted * prompts)
    return drawn


def _check_lengths(drawn: dict[str, list[Text]], length: int) -> None:
    texts = [text for of_kind in drawn.values() for text in of_kind]
    ended = sum(len(text.tokens) < length for text in texts)
    if ended > ENDED * len(texts):
        raise MtplxError(
            f"{ended} of {len(texts)} texts ended before their {length} tokens, and what ended "
            "them is not known: too many to judge the others; choose prompts that go on"
        )


def _untested(drawn: dict[str, list[Text]], groups: Sequence[Group]) -> list[str]:
    """What speculation is about, and was too rare to be tested."""
    texts = drawn.get(SPECULATION, [])
    if not any(any(text.stages) for text in texts):
        return []
    if (SPECULATION, BONUS) in ((group.sample, group.name) for group in groups):
        return []
    count = sum(text.stages.count(BONUS) for text in texts)
    return [
        f"whole drafts were kept {count} times, too seldom to test the token after one by itself; "
        "draw more texts, or choose another depth, temperature or prompt"
    ]


def _look_up(
    trunk: Trunk,
    sampling: SamplerConfig,
    prompts: Sequence[Sequence[int]],
    drawn: dict[str, list[Text]],
    count: int,
    progress: Progress,
) -> list[After]:
    laws: list[After] = []
    total, before = sum(map(len, drawn.values())), 0
    for i, prompt in enumerate(prompts):
        law = TrunkLaws(trunk, sampling, prompt, statistics.LEAST_EXPECTED / count)
        mine = [text for texts in drawn.values() for text in texts if text.prompt == i]

        def report(done: int, before: int = before) -> None:
            progress("looking up the law", before + done, total)

        law.read(mine, report)
        before += len(mine)
        laws.append(law.after)
    return laws


def _known(laws: Laws) -> After:
    """Of an endpoint, whose laws are known only behind prefixes that it drew."""
    return lambda prefixes: laws
