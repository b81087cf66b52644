"""Batched verification against the scalar law, decision for decision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtplx import verification
from mtplx.randomness import Purpose, uniforms
from mtplx.speculative import verify_draft
from mtplx.verification import Draft, draw, noise, verify

CPU = torch.device("cpu")
LAST_BELOW_ONE = 1 - 2.0**-53


class Script:
    """A generator for the scalar law that answers with the batch's uniforms.

    The law asks for the acceptance of each position in turn, and once more where it stops.
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


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
)
def test_verify_decides_as_the_law(seed, depth, vocab, width, from_q):
    rng = np.random.default_rng(seed)
    batch, width = 32, min(width, vocab)
    p, q, ids = cases(rng, batch, depth, vocab, width)
    # Drafts come from q; drawn from elsewhere they also meet q = 0.
    columns = rng.integers(width, size=(batch, depth))
    if from_q and depth:
        columns = draw(torch.tensor(q).flatten(0, 1), torch.tensor(rng.random(batch * depth)))
        columns = columns.view(batch, depth).numpy()
    depths = rng.integers(0, depth + 1, size=batch)
    # Sixteenths meet the edges of acceptance and of the cumulative sums.
    accept = rng.integers(16, size=(batch, depth)) / 16
    emit = rng.integers(16, size=(batch, depth + 1)) / 16

    draft = Draft(
        torch.tensor(ids[columns]),
        torch.tensor(columns),
        torch.tensor(q, dtype=torch.float32),
        None if width == vocab else torch.tensor(ids),
    )
    verdict = verify(
        torch.tensor(p, dtype=torch.float32),
        draft,
        torch.tensor(depths),
        torch.tensor(accept),
        torch.tensor(emit),
    )

    for b, k in enumerate(depths):
        wide_q = np.zeros((k, vocab))
        wide_q[:, ids] = q[b, :k]
        tokens = ids[columns[b, :k]]
        script = Script(accept[b, :k], emit[b, : k + 1], p[b], wide_q, tokens)
        expected = verify_draft(list(p[b, : k + 1]), list(wide_q), list(tokens), script)
        kept = int(verdict.accepted[b])
        assert [*tokens[:kept], int(verdict.token[b])] == expected
        for i in range(min(kept + 1, k)):
            p_i, q_i = p[b, i, tokens[i]], wide_q[i, tokens[i]]
            expected_probability = min(1.0, p_i / q_i) if q_i else float(p_i > 0)
            assert float(verdict.probability[b, i]) == np.float32(expected_probability)


def one_row(p, q, token, accept=0.5, emit=0.5):
    p, q = torch.tensor([p]), torch.tensor([[q]])
    column = torch.tensor([[token]])
    verdict = verify(
        p,
        Draft(column, column, q, None),
        torch.tensor([1]),
        torch.tensor([[accept]], dtype=torch.float64),
        torch.tensor([[emit] * 2], dtype=torch.float64),
    )
    return int(verdict.accepted), int(verdict.token), float(verdict.probability)


@pytest.mark.parametrize("u", [0.0, 0.5, LAST_BELOW_ONE])
def test_the_edges(u):
    half, bonus = [0.5, 0.5], [0.0, 1.0]
    # p = q: always kept.
    assert one_row([half, bonus], half, 0, u, u) == (1, 1, 1.0)
    # Disjoint: never kept, and the correction is the target's.
    assert one_row([[0.0, 1.0], bonus], [1.0, 0.0], 0, u, u) == (0, 1, 0.0)
    # A token that q says it cannot have drawn is kept where p has it, and not where it has not.
    assert one_row([half, bonus], [0.0, 1.0], 0, u, u) == (1, 1, 1.0)
    assert one_row([[0.0, 1.0], bonus], [0.0, 1.0], 0, u, u)[:2] == (0, 1)


def test_an_acceptance_close_to_one_is_not_rounded_up():
    # In float32 this uniform is 1; compared as such it would reject even an acceptance of 1.
    kept = one_row([[0.5, 0.5], [0.0, 1.0]], [0.5, 0.5], 0, accept=LAST_BELOW_ONE)
    assert kept[0] == 1
    # The float32 below 1 as acceptance: a uniform above it rejects.
    p = float(np.nextafter(np.float32(0.5), np.float32(0)))
    assert one_row([[p, 1 - p], [0.0, 1.0]], [0.5, 0.5], 0, accept=LAST_BELOW_ONE)[:2] == (0, 1)


def test_rows_do_not_meet():
    rng = np.random.default_rng(0)
    p = torch.tensor(simplex(rng, 40, 3, 5), dtype=torch.float32)
    q = torch.tensor(simplex(rng, 40, 2, 5), dtype=torch.float32)
    columns = torch.tensor(rng.integers(5, size=(40, 2)))
    accept, emit = torch.tensor(rng.random((40, 2))), torch.tensor(rng.random((40, 3)))
    depths = torch.tensor(rng.integers(0, 3, size=40))
    together = verify(p, Draft(columns, columns, q, None), depths, accept, emit)
    for b in range(40):
        r = slice(b, b + 1)
        alone = verify(
            p[r], Draft(columns[r], columns[r], q[r], None), depths[r], accept[r], emit[r]
        )
        assert alone.accepted == together.accepted[b]
        assert alone.token == together.token[b]


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0]), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, LAST_BELOW_ONE]),
)
def test_draw_never_takes_a_probability_of_zero(weights, u):
    p = torch.tensor([weights])
    token = int(draw(p, torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0
    cumulative = np.cumsum(np.float32(weights), dtype=np.float64)
    below = cumulative[token - 1] if token else 0.0
    assert below <= u * cumulative[-1] < cumulative[token]


def test_noise_belongs_to_the_positions_after_the_pending_token():
    got = noise([7, 2**64 - 1], [3, 0], 4, Purpose.ACCEPT, CPU)
    assert got.dtype == torch.float64
    np.testing.assert_array_equal(got[0], uniforms(7, [4, 5, 6, 7], Purpose.ACCEPT))
    np.testing.assert_array_equal(got[1], uniforms(2**64 - 1, [1, 2, 3, 4], Purpose.ACCEPT))
    assert noise([7], [3], 0, Purpose.ACCEPT, CPU).shape == (1, 0)


def test_noise_stays_below_one_where_float32_is_the_widest(monkeypatch):
    monkeypatch.setattr(verification, "wide", lambda device: torch.float32)
    monkeypatch.setattr(
        verification, "uniforms", lambda *args: np.array([[LAST_BELOW_ONE, 0.0, 2.0**-53]])
    )
    got = noise([0], [0], 3, Purpose.EMIT, CPU)
    assert got.dtype == torch.float32
    assert (got < 1).all()
    assert draw(torch.full((3, 2), 0.5), got[0]).tolist() == [1, 0, 0]
