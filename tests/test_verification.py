"""Batched verification against the scalar law, decision for decision."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mtplx import verification
from mtplx.randomness import Purpose, exponentials, uniforms
from mtplx.sampling import block_acceptance
from mtplx.shaping import Distributions
from mtplx.speculative import verify_draft_block, verify_draft_coupled, verify_draft_token
from mtplx.verification import Draft, Noise, draw, verify

CPU = torch.device("cpu")
LAST_BELOW_ONE = 1 - 2.0**-53


class Given(Noise):
    """Noise with uniforms that a test chose."""

    def __init__(self, accept, emit, block=None):
        self.accept = torch.as_tensor(accept, dtype=torch.float64)
        self.emit = torch.as_tensor(emit, dtype=torch.float64)
        self.token = torch.ones(len(self.emit), dtype=torch.bool)
        self.block, self.coupled = block, None


class Script:
    """A generator for the scalar law that answers with the batch's uniforms.

    The token rule asks for the acceptance of each position in turn, and once more where it stops.
    """

    def __init__(self, accept, emit, p, q, draft):
        self.accept, self.emit = accept, emit
        self.keeps = [
            u < (min(1.0, p[i][t] / q[i][t]) if q[i][t] else float(p[i][t] > 0))
            for i, (u, t) in enumerate(zip(accept, draft, strict=True))
        ]
        self.position, self.decided = 0, False

    def random(self):
        i = self.position
        if i == len(self.accept) or self.decided:
            return self.emit[i]
        if self.keeps[i]:
            self.position += 1
        else:
            self.decided = True
        return self.accept[i]


class BlockScript:
    """The same for the block rule, which asks about every position before it stops at one."""

    def __init__(self, accept, emit, p, q, draft):
        _, h = block_acceptance(list(p[: len(draft) + 1]), list(q), list(draft))
        kept = max((i + 1 for i, u in enumerate(accept) if u < h[i]), default=0)
        self.numbers = iter([*accept, emit[kept]])

    def random(self):
        return next(self.numbers)


def simplex(rng, *shape):
    """Distributions of few values: exact in float32, with zeros, and often equal to each other."""
    eighths = rng.multinomial(8, np.full(shape[-1], 1 / shape[-1]), size=shape[:-1])
    return eighths / 8


def cases(rng, batch, depth, vocab, width):
    """p, q and what they are aligned by; q over `width` of the tokens."""
    ids = np.sort(rng.permutation(vocab)[:width])
    p = simplex(rng, batch, depth + 1, vocab)
    q = simplex(rng, batch, depth, width)
    if width == vocab and depth:
        same = rng.random((batch, depth)) < 0.2
        q[same] = p[:, :depth][same]
    return p, q, ids


def on_its_support(rows, vocab):
    """Rows [..., V] as the filters leave them: what is possible, ascending, then no token's id."""
    width = max(1, int((rows > 0).sum(-1).max(initial=0)))
    ids = np.where(rows > 0, np.arange(vocab), vocab)
    order = ids.argsort(-1, kind="stable")[..., :width]
    ids = np.take_along_axis(ids, order, -1)
    p = np.where(ids < vocab, np.take_along_axis(rows, order, -1), 0.0)
    return Distributions(torch.tensor(p, dtype=torch.float32), torch.tensor(ids))


def whole(rows, ids=None):
    ids = None if ids is None else torch.tensor(ids)
    return Distributions(torch.tensor(rows, dtype=torch.float32), ids)


FORMS = ("whole", "own", "p own", "q own")


def drafts(seed, depth, vocab, width, from_q, form):
    rng = np.random.default_rng(seed)
    batch = 32
    p, q, ids = cases(rng, batch, depth, vocab, width)
    # Drafts come from q; drawn from elsewhere they also meet q = 0.
    columns = rng.integers(width, size=(batch, depth))
    if from_q and depth:
        columns = draw(whole(q.reshape(-1, width)), torch.tensor(rng.random(batch * depth)))
        columns = columns.view(batch, depth).numpy()
    depths = rng.integers(0, depth + 1, size=batch)
    wide_q = np.zeros((batch, depth, vocab))
    wide_q[:, :, ids] = q
    q_rows = whole(q, None if width == vocab else ids)
    if form in ("own", "q own"):
        q_rows = on_its_support(wide_q, vocab)
    p_rows = on_its_support(p, vocab) if form in ("own", "p own") else whole(p)
    draft = Draft(torch.tensor(ids[columns]), q_rows)
    return rng, p, wide_q, depths, p_rows, draft


def torch_too(test):
    """A case of a hypothesis test, decided once more without the kernels."""

    @functools.wraps(test)
    def both(*case, **named):
        test(*case, **named)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "_kernels", lambda *rows: None)
            test(*case, **named)

    return both


seeds, sizes = st.integers(0, 2**32 - 1), st.integers(1, 6)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    sizes,
    sizes,
    st.booleans(),
    st.sampled_from(FORMS),
)
@torch_too
def test_the_token_rule_decides_as_the_law(seed, depth, vocab, width, from_q, form):
    width = min(width, vocab)
    rng, p, wide_q, depths, p_rows, draft = drafts(seed, depth, vocab, width, from_q, form)
    # Sixteenths meet the edges of acceptance and of the cumulative sums.
    accept = rng.integers(16, size=(32, depth)) / 16
    emit = rng.integers(16, size=(32, depth + 1)) / 16
    verdict = verify(p_rows, draft, torch.tensor(depths), Given(accept, emit))
    for b, k in enumerate(depths):
        tokens = draft.tokens[b, :k].tolist()
        q = wide_q[b, :k]
        script = Script(accept[b, :k], emit[b, : k + 1], p[b], q, tokens)
        expected = verify_draft_token(list(p[b, : k + 1]), list(q), tokens, script)
        kept = int(verdict.accepted[b])
        assert [*tokens[:kept], int(verdict.token[b])] == expected
        for i in range(min(kept + 1, k)):
            p_i, q_i = p[b, i, tokens[i]], q[i, tokens[i]]
            expected_probability = min(1.0, p_i / q_i) if q_i else float(p_i > 0)
            assert float(verdict.probability[b, i]) == np.float32(expected_probability)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    sizes,
    sizes,
    st.booleans(),
    st.sampled_from(FORMS),
)
@torch_too
def test_the_block_rule_decides_as_the_law(seed, depth, vocab, width, from_q, form):
    width = min(width, vocab)
    rng, p, wide_q, depths, p_rows, draft = drafts(seed, depth, vocab, width, from_q, form)
    accept, emit = rng.random((32, depth)), rng.random((32, depth + 1))
    every = torch.ones(32, dtype=torch.bool)
    verdict = verify(p_rows, draft, torch.tensor(depths), Given(accept, emit, every))
    for b, k in enumerate(depths):
        tokens = draft.tokens[b, :k].tolist()
        q = wide_q[b, :k]
        script = BlockScript(accept[b, :k], emit[b, : k + 1], p[b], q, tokens)
        expected = verify_draft_block(list(p[b, : k + 1]), list(q), tokens, script)
        kept = int(verdict.accepted[b])
        assert [*tokens[:kept], int(verdict.token[b])] == expected
        # That a prefix is kept at least so far is the product of what is told of each token.
        _, h = block_acceptance(list(p[b, : k + 1]), list(q), tokens)
        told = np.cumprod(verdict.probability[b, :k].double().numpy())
        at_least = [1 - np.prod(1 - h[i:]) for i in range(k)]
        np.testing.assert_allclose(told, at_least, atol=1e-6)


@pytest.mark.slow
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    sizes,
    sizes,
    st.booleans(),
    st.sampled_from(FORMS),
)
def test_the_coupled_rule_decides_as_the_law(seed, depth, vocab, width, from_q, form):
    width = min(width, vocab)
    _, p, _, depths, p_rows, draft = drafts(seed, depth, vocab, width, from_q, form)
    seeds, lengths = list(range(32)), [3 * b for b in range(32)]
    noise = Noise(seeds, lengths, ["coupled"] * 32, depth, CPU)
    verdict = verify(p_rows, draft, torch.tensor(depths), noise)
    for b, k in enumerate(depths):
        tokens = draft.tokens[b, :k].tolist()
        times = exponentials(
            torch.tensor([seeds[b], 0]),
            lengths[b] + 1 + torch.arange(k + 1),
            torch.arange(vocab),
            torch.float64,
        )
        expected = verify_draft_coupled(list(p[b, : k + 1]), tokens, times.numpy())
        kept = int(verdict.accepted[b])
        assert [*tokens[:kept], int(verdict.token[b])] == expected


@pytest.fixture(params=["in C", "in torch"])
def either(request, monkeypatch):
    """By the kernels, where they are built and take such rows, and without them."""
    if request.param == "in torch":
        monkeypatch.setattr(verification, "_kernels", lambda *rows: None)


@pytest.mark.parametrize("rules", [["token", "block", "coupled"], ["token", "block", "block"]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("either")
def test_rows_have_rules_of_their_own(form, rules):
    rules = rules * 10
    rng, *_, p, draft = drafts(5, 3, 6, 6, True, form)
    p, draft = p[:30], Draft(draft.tokens[:30], draft.q[:30])
    depths = torch.tensor(rng.integers(0, 4, size=30))
    lengths = rng.integers(100, size=30).tolist()
    mixed = verify(p, draft, depths, Noise(range(30), lengths, rules, 3, CPU))
    for rule in sorted(set(rules)):
        alike = verify(p, draft, depths, Noise(range(30), lengths, [rule] * 30, 3, CPU))
        rows = [r == rule for r in rules]
        assert mixed.accepted[rows].tolist() == alike.accepted[rows].tolist()
        assert mixed.token[rows].tolist() == alike.token[rows].tolist()
        assert mixed.probability[rows].tolist() == alike.probability[rows].tolist()


def one_row(p, q, token, accept=0.5, emit=0.5, rule="token"):
    verdict = verify(
        whole([p]),
        Draft(torch.tensor([[token]]), whole([[q]])),
        torch.tensor([1]),
        Given([[accept]], [[emit] * 2], torch.tensor([True]) if rule == "block" else None),
    )
    return int(verdict.accepted), int(verdict.token), float(verdict.probability)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("u", [0.0, 0.5, LAST_BELOW_ONE])
def test_the_edges(u, rule):
    half, bonus = [0.5, 0.5], [0.0, 1.0]
    # p = q: always kept.
    assert one_row([half, bonus], half, 0, u, u, rule) == (1, 1, 1.0)
    # Disjoint: never kept, and the correction is the target's.
    assert one_row([[0.0, 1.0], bonus], [1.0, 0.0], 0, u, u, rule) == (0, 1, 0.0)
    # A token that q says it cannot have drawn is kept where p has it, and not where it has not.
    assert one_row([half, bonus], [0.0, 1.0], 0, u, u, rule) == (1, 1, 1.0)
    assert one_row([[0.0, 1.0], bonus], [0.0, 1.0], 0, u, u, rule)[:2] == (0, 1)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_probabilities_at_the_end_of_float32(rule):
    """A quotient beyond float32 is 1, and one that float32 calls 0 still keeps what it should."""
    tiny = 1e-42  # not normal in float32
    p = [[1.0 - tiny, tiny], [0.0, 1.0]]
    assert one_row(p, [tiny, 1.0 - tiny], 0, LAST_BELOW_ONE, 0.5, rule) == (1, 1, 1.0)
    assert one_row(p, [1.0 - tiny, tiny], 1, LAST_BELOW_ONE, 0.5, rule) == (1, 1, 1.0)
    assert one_row(p, [0.0, 1.0], 1, 0.5, 0.5, rule)[:2] == (0, 0)


def test_a_block_recovers_over_weights_far_below_float32():
    # One draft position 1e-30 times as likely under the target, the next 1e30 times as likely.
    p = [[1e-30, 1.0], [1.0, 0.0], [1.0, 0.0]]
    q = [[1.0, 0.0], [1e-30, 1.0]]
    verdict = verify(
        whole([p]),
        Draft(torch.tensor([[0, 0]]), whole([q])),
        torch.tensor([2]),
        Given([[0.5, LAST_BELOW_ONE]], [[0.5] * 3], torch.tensor([True])),
    )
    assert int(verdict.accepted) == 2


def test_an_acceptance_close_to_one_is_not_rounded_up():
    # In float32 this uniform is 1; compared as such it would reject even an acceptance of 1.
    kept = one_row([[0.5, 0.5], [0.0, 1.0]], [0.5, 0.5], 0, accept=LAST_BELOW_ONE)
    assert kept[0] == 1
    # The float32 below 1 as acceptance: a uniform above it rejects.
    p = float(np.nextafter(np.float32(0.5), np.float32(0)))
    assert one_row([[p, 1 - p], [0.0, 1.0]], [0.5, 0.5], 0, accept=LAST_BELOW_ONE)[:2] == (0, 1)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("form", [whole, functools.partial(on_its_support, vocab=5)])
@pytest.mark.usefixtures("either")
def test_rows_do_not_meet(rule, form):
    rng = np.random.default_rng(0)
    p, q = form(simplex(rng, 40, 3, 5)), form(simplex(rng, 40, 2, 5))
    tokens = torch.tensor(rng.integers(5, size=(40, 2)))
    depths = torch.tensor(rng.integers(0, 3, size=40))
    lengths = rng.integers(50, size=40).tolist()
    together = verify(p, Draft(tokens, q), depths, Noise(range(40), lengths, [rule] * 40, 2, CPU))
    for b in range(40):
        r = slice(b, b + 1)
        noise = Noise([b], lengths[r], [rule], 2, CPU)
        alone = verify(p[r], Draft(tokens[r], q[r]), depths[r], noise)
        assert alone.accepted == together.accepted[b]
        assert alone.token == together.token[b]


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0]), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, LAST_BELOW_ONE]),
)
def test_draw_never_takes_a_probability_of_zero(weights, u):
    token = int(draw(whole([weights]), torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0
    cumulative = np.cumsum(np.float32(weights), dtype=np.float64)
    below = cumulative[token - 1] if token else 0.0
    assert below <= u * cumulative[-1] < cumulative[token]


def test_sums_made_in_parallel_rise_only_where_there_is_weight():
    """As a device may add them: the last digits go up and down where nothing is added."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.0, 0.5, 0.0], [0.5, 0.0, 0.25, 0.0, 0.0, 0.0]])
    sums = torch.tensor(
        [
            [1e-9, 0.25, 0.25 + 1e-8, 0.25 - 1e-8, 0.75, 0.75 + 1e-7],
            [0.5, 0.5, 0.75, 0.7, 0.8, 0.75],
        ]
    )
    flat = verification._flat(weights, sums)
    assert flat.tolist() == [
        [0, sums[0, 1], sums[0, 1], sums[0, 1], 0.75, 0.75],
        [0.5, 0.5, 0.75, 0.75, 0.75, 0.75],
    ]


# --- Noise ----------------------------------------------------------------------------------------


def test_noise_belongs_to_the_positions_after_the_pending_token():
    noise = Noise([7, 2**64 - 1], [3, 0], ["token", "coupled"], 3, CPU)
    assert noise.accept.dtype == torch.float64
    for numbers, purpose in (
        (noise.draft, Purpose.DRAFT),
        (noise.accept, Purpose.ACCEPT),
        (noise.emit, Purpose.EMIT),
    ):
        np.testing.assert_array_equal(numbers[0], uniforms(7, [4, 5, 6, 7], purpose))
        np.testing.assert_array_equal(numbers[1], uniforms(2**64 - 1, [1, 2, 3, 4], purpose))
    # At depth 0 there is nothing to draft or to accept.
    plain = Noise([7], [3], ["token"], 0, CPU)
    assert plain.accept is None
    np.testing.assert_array_equal(plain.emit[0], uniforms(7, [4], Purpose.EMIT))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_noise_of_an_adaptive_row_belongs_to_its_cycle_as_well(rule):
    rows = Noise([7, 7, 7], [3, 3, 3], [rule, "token", "block"], 3, CPU, [True, False, False])
    fixed = Noise([7], [3], ["token"], 3, CPU)
    for name in ("draft", "accept", "emit"):
        adaptive, token, block = getattr(rows, name).tolist()
        assert adaptive == block != token
        assert token == getattr(fixed, name)[0].tolist()


def test_the_noise_of_a_block_belongs_to_its_cycle_as_well():
    first, second = (Noise([7], [at], ["block"], 3, CPU) for at in (3, 4))
    for name in ("draft", "accept", "emit"):
        # The same positions in two cycles.
        assert not set(getattr(first, name)[0, 1:].tolist()) & set(
            getattr(second, name)[0].tolist()
        )
        again = getattr(Noise([7], [3], ["block"], 3, CPU), name)
        assert again.tolist() == getattr(first, name).tolist()


def test_a_race_is_won_in_proportion():
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    runs = 40_000
    noise = Noise(range(runs), [5] * runs, ["coupled"] * runs, 1, CPU)
    winners = noise.winners(whole(np.broadcast_to(p, (runs, 2, 5))))
    for column in winners.T:
        counts = np.bincount(column, minlength=5)
        assert counts[1] == 0
        kept = p > 0
        assert stats.chisquare(counts[kept], p[kept] * runs).pvalue > 0.001
    # Two positions are independent.
    table = np.zeros((5, 5))
    np.add.at(table, (winners[:, 0], winners[:, 1]), 1)
    table = table[p > 0][:, p > 0]
    assert stats.chi2_contingency(table).pvalue > 0.001


def test_a_race_does_not_depend_on_which_tokens_are_listed():
    rng = np.random.default_rng(1)
    rows = simplex(rng, 50, 2, 9)
    noise = Noise(range(50), list(range(50)), ["coupled"] * 50, 1, CPU)
    dense = noise.winners(whole(rows))
    assert noise.winners(on_its_support(rows, 9)).tolist() == dense.tolist()


def test_noise_stays_below_one_where_float32_is_the_widest(monkeypatch):
    monkeypatch.setattr(verification, "wide", lambda device: torch.float32)
    monkeypatch.setattr(
        verification, "uniforms", lambda *args: np.array([[[LAST_BELOW_ONE, 0.0, 2.0**-53]]] * 3)
    )
    got = Noise([0], [0], ["token"], 2, CPU).emit
    assert got.dtype == torch.float32
    assert (got < 1).all()
    assert draw(whole(np.full((3, 2), 0.5)), got[0]).tolist() == [1, 0, 0]


@pytest.mark.usefixtures("either")
def test_numbers_of_other_types_are_read_as_what_they_are():
    ids = torch.tensor([[1, 4]])
    for p in (torch.tensor([[0.25, 0.75]]), torch.tensor([[0.25, 0.75]], dtype=torch.float64)):
        for own in (ids, ids.int()):
            for u, expected in ((0.1, 1), (0.6, 4)):
                assert int(draw(Distributions(p, own), torch.tensor([u]).double())) == expected
