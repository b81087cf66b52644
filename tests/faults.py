"""Plausible faults, and for each the test that finds it.

Many have been shipped by somebody. A fault is planted in the package itself, mostly as a change to
one line, and a test of the suite is then run at a small budget, and must fail.

What a fault spoils decides which test that is. A race over columns instead of tokens is a fair
race, and so are numbers from a stream fair numbers: the law is kept, but the text depends on what
happens to be beside it. A token drafted beyond a row's own depth is as good as any other if it was
drawn from its q, so to count it is found only where single decisions are compared.
"""

import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
import scheduled
import test_engine
import test_law
import test_metamorphic
import test_verification
import torch
from test_metamorphic import CROWD, HEADS, TRUNK, NoTokenTwiceInARow, hot

from mtplx import verification
from mtplx.drafters.mtp import HeadSlots
from mtplx.engine.decoding import Batch
from mtplx.history import Follower, Histories
from mtplx.models.recurrent import Writes
from mtplx.models.slots import SlotCache, Span
from mtplx.randomness import Purpose
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Noise, Verdict, draw

# --- The tests ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """A test of the suite with its arguments. Called, it fails as the test does."""

    name: str
    test: Callable
    arguments: tuple

    def __call__(self):
        self.test(*self.arguments)


@functools.cache
def law(setting, depth, verifier="token", **more):
    """The joint distribution of the texts, over as many runs as the right rules pass at least."""

    def test():
        p = test_law.measure(setting, depth, verifier, 10_000, **more)
        assert p > test_law.THRESHOLD / 1000

    name = f"law of {verifier}, {setting}, depth {depth}"
    name += ", two cycles" if "length" in more else ""
    return Check(name + (", recurrent" if "quantize" in more else ""), test, ())


def law_by_ones(rule):
    """That of drafts which end because of what they hold."""

    def test():
        assert test_law.measure_by_ones("hot", rule, 800) > test_law.THRESHOLD / 1000

    return Check(f"law of {rule}, drafts that end by what they hold", test, ())


def decisions(rule):
    """Every decision as the scalar law decides."""
    decides_as_the_law = getattr(test_verification, f"test_the_{rule}_rule_decides_as_the_law")

    def test():
        for seed, form in enumerate(test_verification.FORMS):
            decides_as_the_law.hypothesis.inner_test(seed, 3, 5, 5, True, form)
            decides_as_the_law.hypothesis.inner_test(seed, 3, 5, 3, True, form)

    return Check(f"decisions of {rule}", test, ())


def unchanged(name, test, *case):
    """What leaves a text as it is, on an example that is one of the test's own."""
    return Check(name, test.hypothesis.inner_test, case)


def caches():
    with pytest.MonkeyPatch.context() as patch:
        test_engine.test_after_every_cycle_the_caches_equal_a_fresh_prefill(
            TRUNK, HEADS[0], patch, 2
        )


def postponed():
    scheduled.assert_postponed_refills_show_nowhere(TRUNK, HEADS[0], [(1, 2, 3), (4,)])


BY_ONES = {rule: law_by_ones(rule) for rule in ("token", "block")}
DECISIONS = {rule: decisions(rule) for rule in test_law.VERIFIERS}
EDGES = {
    rule: Check(f"edges of {rule}", test_verification.test_the_edges, (0.0, rule))
    for rule in ("token", "block")
}
BESIDE = {
    rule: unchanged(
        f"neighbours of {rule}",
        test_metamorphic.test_neighbours_do_not_matter,
        hot(rule),
        CROWD,
        {"token": 2, "block": 5, "coupled": 0}[rule],
    )
    for rule in test_law.VERIFIERS
}
REORDERED = unchanged(
    "order of the batch",
    test_metamorphic.test_the_order_of_a_batch_does_not_matter,
    [*enumerate(CROWD)][::-1],
)
PAUSED = unchanged(
    "a pause",
    test_metamorphic.test_a_pause_between_two_cycles_does_not_matter,
    hot("token"),
    [2],
)
OTHER_DEPTH = unchanged(
    "depth of coupled",
    test_metamorphic.test_neither_depth_nor_head_matters_to_a_coupled_request,
    hot("coupled"),
    0,
)
OTHER_DEPTH_OF_A_GRAMMAR = unchanged(
    "depth of coupled, with a grammar",
    test_metamorphic.test_neither_depth_nor_head_matters_to_a_coupled_request,
    hot("coupled", grammar=NoTokenTwiceInARow),
    0,
)
EVERY_BIT = Check(
    "the seed's last bit",
    test_metamorphic.test_every_bit_of_the_seed_does_matter,
    ("coupled", 3, 63),
)
ANY_LIST = Check(
    "a race of some tokens",
    test_verification.test_a_race_does_not_depend_on_which_tokens_are_listed,
    (),
)
ALMOST_ONE = Check(
    "an acceptance close to 1",
    test_verification.test_an_acceptance_close_to_one_is_not_rounded_up,
    (),
)
CACHES = Check("the caches", caches, ())
OWN_NOISE = Check(
    "noise of an adaptive row",
    test_verification.test_the_noise_of_an_adaptive_row_belongs_to_its_cycle_as_well,
    ("token",),
)
POSTPONED = Check("refills put off", postponed, ())

# --- How faults are planted -----------------------------------------------------------------------


def put(patch, owner, name, wrong):
    """In place of a function or method, wherever it has been imported to."""
    right = getattr(owner, name)
    patch.setattr(owner, name, wrong)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is right:
            patch.setattr(module, name, wrong)


def edited(owner, name, old, new):
    """Other source text in a function or method.

    What the kernels do instead for some rows is put aside. No fault is planted in C: its decisions
    are compared one by one with the law's, as these are.
    """

    def plant(patch):
        if owner in (verification, Distributions):
            patch.setattr(verification, "_kernels", lambda *rows: None)
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert old in source, f"{name} has changed and no longer says {old!r}: plant this anew"
        made = {}
        exec(source.replace(old, new), vars(sys.modules[function.__module__]), made)
        put(patch, owner, name, made[name])

    return plant


def around(owner, name):
    """A fault that calls, or does not call, the right function, which it is given first."""

    def fault(wrong):
        def plant(patch):
            right = getattr(owner, name)
            put(patch, owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

        return plant

    return fault


# --- Faults that take more than another word ------------------------------------------------------


@around(HeadSlots, "draft")
def q_from_raw_logits(right, slots, *args):
    """Draws from the filtered distribution, and reports the softmax of the logits for it."""
    raw = []
    logits = slots.head.logits

    def recorded(*of):
        raw.append(logits(*of))
        return raw[-1]

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(slots.head, "logits", recorded)
        draft = right(slots, *args)
    q = torch.stack(raw, 1).float().softmax(-1)
    return dataclasses.replace(draft, q=Distributions(q, slots.head.draft_ids))


@around(Noise, "drafted")
def likeliest_drafted(right, noise, q, *args):
    """Drafts the likeliest token, and reports what it was the likeliest of for its distribution."""
    return q.tokens(q.p.argmax(-1))


def target_shaped_by(change):
    """Verifies against a target of other settings than those the text was asked for with."""

    @around(Batch, "_target")
    def plant(right, batch, *args):
        shaper = batch.shaper
        configs = [change(config) for config in shaper.configs]
        other = Shaper(configs, shaper.vocab_size, shaper.device, shaper.stop_ids)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(batch, "shaper", other)
            return right(batch, *args)

    return plant


temperature_ignored = target_shaped_by(lambda c: dataclasses.replace(c, temperature=1.0))
filters_ignored = target_shaped_by(lambda c: dataclasses.replace(c, top_k=0, top_p=1.0))


@around(verification, "verify")
def void_drafts_kept(right, p, draft, depths, noise):
    """Goes on with the draft behind a rejected token, whose place the correction takes."""
    verdict = right(p, draft, depths, noise)
    token, accepted = verdict.token.clone(), verdict.accepted.clone()
    on = verdict.accepted < depths - 1
    for b in on.nonzero().flatten().tolist():
        first, depth = int(accepted[b]), int(depths[b])
        behind = noise.accept[b, first + 1 : depth] < verdict.probability[b, first + 1 : depth]
        kept = int(behind.long().cumprod(0).sum())
        if kept:
            # Written into the draft, the correction counts as one of its kept tokens.
            draft.tokens[b, first] = token[b]
            accepted[b] = last = first + 1 + kept
            token[b] = draw(p[b : b + 1, last], noise.emit[b, last][None])[0]
    return Verdict(accepted, token, verdict.probability)


@around(verification, "verify")
def bonus_from_q(right, p, draft, depths, noise):
    """Draws the token after a whole draft from the head's last distribution."""
    verdict = right(p, draft, depths, noise)
    if not draft.tokens.shape[1]:
        return verdict
    every, last = torch.arange(len(depths)), (depths - 1).clamp_min(0)
    bonus = draw(draft.q[every, last], noise.emit[every, depths])
    if noise.coupled is not None:
        bonus = torch.where(noise.coupled, noise.winners(draft.q)[every, last], bonus)
    whole = (verdict.accepted == depths) & (depths > 0)
    return dataclasses.replace(verdict, token=torch.where(whole, bonus, verdict.token))


def one_number_for(one, other):
    """What decides one thing decides the other too."""

    @around(verification, "uniforms")
    def plant(right, seeds, positions, purposes, *offsets):
        return right(seeds, positions, np.where(purposes == other, one, purposes), *offsets)

    return plant


@around(Histories, "along")
def drafts_left_out_of_the_history(right, histories, draft):
    """Shapes the target as if no drafted token counted for the penalties."""
    rows = right(histories, draft)
    if rows is None:
        return None
    counts = histories.history.output.repeat_interleave(draft.shape[1] + 1, 0)
    return dataclasses.replace(rows, output=counts)


@around(Histories, "along")
def drafts_left_in_the_history(right, histories, draft):
    """Has the penalties count rejected tokens for good."""
    rows = right(histories, draft)
    if rows is not None:
        histories.history.output = histories.history.after_tokens(draft).output
    return rows


@around(Follower, "emit")
def grammar_not_rolled_back(right, follower, tokens):
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(follower.constraint, "rollback", lambda count: None)
        right(follower, tokens)


def numbers_from_a_stream(patch):
    """Takes every number from the request's generator, where a draft thrown away has moved it."""
    streams = {}

    def stream(seed, purpose):
        fresh = np.random.default_rng([seed, purpose])
        return streams.setdefault((seed, purpose), fresh)

    def numbers(seeds, positions, purposes, *offsets):
        rows = list(zip(np.ravel(seeds).tolist(), positions, strict=True))
        return np.array(
            [
                [stream(seed, purpose).random(len(row)) for seed, row in rows]
                for purpose in np.ravel(purposes).tolist()
            ]
        )

    @around(Batch, "__init__")
    def begin(right, *args):
        streams.clear()
        right(*args)

    begin(patch)
    patch.setattr(verification, "uniforms", numbers)


def races_from_a_stream(patch):
    generator = torch.Generator().manual_seed(0)

    def times(seeds, positions, tokens, dtype):
        empty = torch.empty(*positions.shape, tokens.shape[-1], dtype=dtype)
        return empty.exponential_(generator=generator)

    patch.setattr(verification, "exponentials", times)


@around(Shaper, "keep_rows")
def settings_of_another_row(right, shaper, rows):
    """Packs a batch and leaves the settings where they were."""
    return right(shaper, range(len(rows)))


@around(SlotCache, "keep_rows")
def cache_of_another_row(right, cache, rows):
    """Where slots are dropped; a prompt that is read once goes to all that have it."""
    slots = {len(layer.keys) for layer in cache.slots.values()}
    drops = any(len(rows) < count for count in slots)
    right(cache, torch.arange(len(rows)) if drops else rows)


# --- The list -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable
    found_by: Check


FAULTS = [
    # What p and q are.
    Fault("q from raw logits", q_from_raw_logits, law("filtered", 1)),
    Fault("q from raw logits, penalised", q_from_raw_logits, law("penalised", 2)),
    Fault("q from raw logits, block", q_from_raw_logits, law("filtered", 2, "block")),
    Fault("the likeliest drafted, q as it was", likeliest_drafted, law("hot", 1)),
    Fault("temperature ignored", temperature_ignored, law("hot", 1)),
    Fault("temperature ignored, block", temperature_ignored, law("hot", 2, "block")),
    Fault("temperature ignored, coupled", temperature_ignored, law("hot", 1, "coupled")),
    Fault("filters ignored by the target", filters_ignored, law("filtered", 1)),
    Fault("drafts not counted", drafts_left_out_of_the_history, law("penalised", 2)),
    Fault("rejected drafts counted", drafts_left_in_the_history, law("penalised", 2)),
    Fault(
        "acceptance by the next row of p",
        edited(verification, "_of_drafted", "p[:, :depth].at", "p[:, 1:].at"),
        law("hot", 2),
    ),
    Fault(
        "last token by the row before",
        edited(verification, "verify", "p[every, kept]", "p[every, (kept - 1).clamp_min(0)]"),
        law("hot", 2),
    ),
    Fault(
        "the target sees what it is to judge",
        edited(
            Span,
            "_sight",
            "self._keys <= self._queries",
            "(self._keys <= self._queries[:, :, -1:]).expand(-1, -1, self.positions.shape[1], -1)",
        ),
        law("hot", 2),
    ),
    Fault(
        "a state keeps one token more than was accepted",
        edited(Writes, "onto", "positions >= counts", "positions > counts"),
        law("hot", 2, quantize="recurrent"),
    ),
    # The rule of one token.
    Fault(
        "kept if a sample of the target is the same",
        edited(verification, "_token_rule", "p_token / torch.maximum(p_token, q_token)", "p_token"),
        law("hot", 1),
    ),
    Fault(
        "kept at a probability of 0",
        edited(verification, "_token_rule", "accept < probability", "accept <= probability"),
        EDGES["token"],
    ),
    Fault(
        "compared in float32",
        edited(
            verification,
            "_token_rule",
            "accept < probability",
            "accept.float() < probability.float()",
        ),
        ALMOST_ONE,
    ),
    Fault(
        "padding counted",
        edited(verification, "_token_rule", " & real", ""),
        DECISIONS["token"],
    ),
    Fault(
        "one number accepts all",
        edited(verification, "_token_rule", "(accept <", "(accept[:, :1] <"),
        law("hot", 2),
    ),
    Fault("void drafts kept", void_drafts_kept, law("hot", 2)),
    # The last token.
    Fault(
        "correction from p",
        edited(verification, "verify", "torch.where(rejected[:, None], left, last.p", "(last.p"),
        law("filtered", 1),
    ),
    Fault(
        "correction from p, block",
        edited(verification, "verify", "torch.where(rejected[:, None], left, last.p", "(last.p"),
        law("hot", 2, "block"),
    ),
    Fault(
        "residual without the max",
        edited(Distributions, "minus", ".clamp_min(0)", ""),
        law("filtered", 1),
    ),
    Fault(
        "residual by the first row of q",
        edited(
            verification, "verify", "draft.q[every, kept.clamp_max(depth - 1)]", "draft.q[:, 0]"
        ),
        law("hot", 2, **test_law.TWO_CYCLES),
    ),
    Fault("bonus from q", bonus_from_q, law("filtered", 1)),
    Fault("bonus from q, block", bonus_from_q, law("hot", 2, "block")),
    Fault("bonus from q, coupled", bonus_from_q, law("hot", 2, "coupled")),
    Fault(
        "correction by the number that rejected",
        one_number_for(Purpose.ACCEPT, Purpose.EMIT),
        law("hot", 1),
    ),
    Fault(
        "accepted by the number that drafted",
        one_number_for(Purpose.DRAFT, Purpose.ACCEPT),
        law("hot", 1),
    ),
    # The rule of a block.
    Fault(
        "noise of the position alone",
        edited(
            Noise,
            "__init__",
            "np.where(by_cycle[:, None], ahead, np.uint64(0))",
            "np.uint64(0)",
        ),
        law("hot", 2, "block", **test_law.TWO_CYCLES),
    ),
    Fault(
        "weight not clamped at 1",
        edited(verification, "_block_rule", "torch.maximum(grown, q_token[:, i])", "q_token[:, i]"),
        law("filtered", 2, "block"),
    ),
    Fault(
        "chance without the weight that is missing",
        edited(
            verification, "_block_rule", "left / (left + (1 - before))", "(left > 0).to(left.dtype)"
        ),
        law("hot", 2, "block"),
    ),
    Fault(
        "chance is the weight",
        edited(verification, "_block_rule", "left / (left + (1 - before))", "before"),
        law("hot", 2, "block"),
    ),
    Fault(
        "chance of a residual of weight 1",
        edited(
            verification,
            "_block_rule",
            "minus(draft.q[:, 1:], weight[:, 1:depth])",
            "minus(draft.q[:, 1:], torch.ones_like(weight[:, 1:depth]))",
        ),
        law("hot", 2, "block"),
    ),
    Fault(
        "residual of weight 1",
        edited(
            verification,
            "_block_rule",
            "weight.gather(1, kept[:, None])[:, 0]",
            "torch.ones_like(weight[:, 0])",
        ),
        law("hot", 2, "block", **test_law.TWO_CYCLES),
    ),
    Fault(
        "residual of the weight before",
        edited(
            verification,
            "_block_rule",
            "weight.gather(1, kept[:, None])",
            "weight.gather(1, (kept - 1).clamp_min(0)[:, None])",
        ),
        law("hot", 3, "block", **test_law.TWO_CYCLES),
    ),
    Fault(
        "up to the first success",
        edited(
            verification,
            "_block_rule",
            "(succeeded * length).amax(1)",
            "torch.where(succeeded, length, depth + 1).amin(1) % (depth + 1)",
        ),
        law("hot", 2, "block"),
    ),
    Fault(
        "up to the first failure",
        edited(
            verification,
            "_block_rule",
            "(succeeded * length).amax(1)",
            "succeeded.long().cumprod(1).sum(1)",
        ),
        law("hot", 2, "block"),
    ),
    Fault(
        "kept at a chance of 0, block",
        edited(verification, "_block_rule", "accept < trial", "accept <= trial"),
        EDGES["block"],
    ),
    Fault(
        "padding counted, block",
        edited(verification, "_block_rule", "trial * real", "trial"),
        DECISIONS["block"],
    ),
    Fault(
        "a shorter draft goes on in its padding",
        edited(verification, "_block_rule", "torch.where(at_end, weight[:, 1:], trial)", "trial"),
        DECISIONS["block"],
    ),
    # Drafts that end by themselves.
    *(
        Fault(
            f"a doubted token is dropped, {rule}",
            edited(
                HeadSlots,
                "draft",
                "break",
                "rows, tokens = rows[:-1] or rows, tokens[:-1] or tokens; break",
            ),
            found_by,
        )
        for rule, found_by in BY_ONES.items()
    ),
    Fault(
        "what void drafts taught meets their noise again",
        edited(Noise, "__init__", "by_cycle |= np.array(adaptive)", "pass"),
        OWN_NOISE,
    ),
    Fault(
        "the first state of those put off",
        edited(HeadSlots, "catch_up", "[len(outputs) - 1]", "[0]"),
        POSTPONED,
    ),
    # The coupled rule.
    Fault(
        "kept though the target's winner is another",
        edited(
            verification,
            "verify",
            "_chosen(noise.coupled, reached, kept)",
            "_chosen(noise.coupled, (reached + 1).minimum(depths), kept)",
        ),
        law("hot", 1, "coupled"),
    ),
    Fault(
        "kept by chance, not by the race",
        edited(
            verification,
            "verify",
            "same.to(torch.int64).cumprod(1).sum(1)",
            "((noise.emit[:, :depth] < 0.5) & real).to(torch.int64).cumprod(1).sum(1)",
        ),
        law("hot", 2, "coupled"),
    ),
    Fault(
        "padding counted, coupled",
        edited(
            verification,
            "verify",
            "(winners[:, :depth] == draft.tokens) & real",
            "(winners[:, :depth] == draft.tokens)",
        ),
        DECISIONS["coupled"],
    ),
    Fault(
        "a race without its position",
        edited(Noise, "__init__", "positions.astype(np.int64)", "0 * positions.astype(np.int64)"),
        law("hot", 1, "coupled"),
    ),
    Fault(
        "a race of the cycle",
        edited(
            Noise,
            "__init__",
            "positions.astype(np.int64)",
            "(64 * positions + ahead).astype(np.int64)",
        ),
        OTHER_DEPTH,
    ),
    Fault(
        "a race over columns",
        edited(
            Noise,
            "winners",
            "torch.arange(width, device=self.device) if p.ids is None else p.ids",
            "torch.arange(width, device=self.device)",
        ),
        ANY_LIST,
    ),
    Fault(
        "half of the seed",
        edited(Noise, "__init__", "seed >> np.uint64(32)", "seed & np.uint64(0)"),
        EVERY_BIT,
    ),
    Fault("races from a stream", races_from_a_stream, OTHER_DEPTH),
    # Texts and their neighbours.
    Fault("numbers from a stream", numbers_from_a_stream, BESIDE["token"]),
    Fault("numbers from a stream, paused", numbers_from_a_stream, PAUSED),
    Fault(
        "seeded by the row",
        edited(Batch, "cycle", "[slot.request.seed for slot in slots]", "range(len(slots))"),
        REORDERED,
    ),
    Fault("settings of another row", settings_of_another_row, BESIDE["block"]),
    Fault("cache of another row", cache_of_another_row, BESIDE["block"]),
    # What a cycle leaves behind.
    Fault(
        "a token too many taken back",
        edited(Batch, "cycle", "slot.length += len(new)", "slot.length += kept"),
        law("hot", 1),
    ),
    Fault(
        "the head is told what was drafted",
        edited(
            Batch,
            "cycle",
            "self.drafter.refill(output, following,",
            "self.drafter.refill(output, torch.cat([draft.tokens, pending], 1),",
        ),
        CACHES,
    ),
    Fault("grammar not rolled back", grammar_not_rolled_back, OTHER_DEPTH_OF_A_GRAMMAR),
    Fault(
        "grammar not led along the draft",
        edited(Histories, "_mask", "follower.follow(tokens[row])", "pass"),
        OTHER_DEPTH_OF_A_GRAMMAR,
    ),
]
