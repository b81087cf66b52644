"""The laws that draws are held against."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from mtplx.audit.analysis import partition
from mtplx.audit.engines import stage
from mtplx.audit.law import Text, TrunkLaws
from mtplx.audit.numerics import rounding
from mtplx.sampling import SamplerConfig, distribution_from_logits

VOCAB = 5
SETTINGS = [
    SamplerConfig(temperature=0.7),
    SamplerConfig(temperature=1.2, top_k=3, top_p=0.9),
    SamplerConfig(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: -1.0}),
]


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(VOCAB, seed=3)


@functools.cache
def direct(trunk, sampling, prompt, output):
    """One law, from a pass over the whole text."""
    with torch.inference_mode():
        logits = trunk.model(torch.tensor([[*prompt, *output]])).logits[0, -1]
    return distribution_from_logits(
        logits.numpy(), sampling, prompt_ids=prompt, output_ids=list(output)
    )


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("prompt", [(4,), (1, 4, 0, 2)])
def test_every_spot_is_that_of_a_pass_of_its_own(trunk, sampling, prompt):
    texts = [Text(0, t, (None,) * 3) for t in itertools.product(range(VOCAB), repeat=3)]
    told = []
    TrunkLaws(trunk, sampling, prompt, 0.0).read(texts, told.append)
    assert told == sorted(told) and told[-1] == len(texts)
    for text in texts[::7]:
        for i, (token, spot) in enumerate(zip(text.tokens, text.spots, strict=True)):
            p = direct(trunk, sampling, prompt, text.tokens[:i])
            order = np.argsort(-p, kind="stable").tolist()
            rank = order.index(token)
            assert spot.p == pytest.approx(p[token], abs=1e-5)
            assert spot.above == pytest.approx(p[order[:rank]].sum(), abs=1e-5)
            assert spot.before == pytest.approx(p[:token].sum(), abs=1e-5)
            assert spot.highest == pytest.approx(p.max(), abs=1e-5)
            assert spot.likeliest == (rank == 0)
            assert (spot.surprise, spot.variance, spot.skew) == pytest.approx(
                surprise(p, token), abs=1e-4
            )


def surprise(p, token):
    """From the definitions."""
    information = -np.log(np.where(p > 0, p, 1))
    off = information - stats.entropy(p)
    mine = off[token] if p[token] else np.inf
    return mine, (p * off**2).sum(), (p * off**3).sum()


def test_texts_are_read_in_passes_of_no_more_than_so_many_logits(trunk, monkeypatch):
    texts = [Text(0, t, (None,) * 3) for t in itertools.product(range(VOCAB), repeat=3)]
    TrunkLaws(trunk, SETTINGS[0], (1,), 0.0).read(texts)
    at_once = [text.spots for text in texts]
    shapes = []

    class Watched(TrunkLaws):
        def _logits(self, rows):
            logits = super()._logits(rows)
            shapes.append(tuple(logits.shape))
            return logits

    for most, rows in ((4 * 3 * VOCAB, 4), (1, 1)):
        monkeypatch.setattr("mtplx.audit.law.LOGITS", most)
        shapes.clear()
        Watched(trunk, SETTINGS[0], (1,), 0.0).read(texts)
        assert max(shapes) == (rows, 3, VOCAB)
        for text, spots in zip(texts, at_once, strict=True):
            assert np.allclose(text.spots, spots, atol=1e-5)


def test_equally_likely_tokens_have_places_of_their_own(trunk, monkeypatch):
    laws = TrunkLaws(trunk, SamplerConfig(), (1,), 0.0)
    monkeypatch.setattr(laws, "_logits", lambda rows: torch.zeros(len(rows), 1, VOCAB))
    texts = [Text(0, (token,), (None,)) for token in range(VOCAB)]
    laws.read(texts)
    assert [t.spots[0].above for t in texts] == pytest.approx(np.arange(VOCAB) / VOCAB)
    assert [t.spots[0].likeliest for t in texts] == [True] + [False] * (VOCAB - 1)


@pytest.mark.parametrize("count", [20, 400])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_partition_has_all_texts_and_their_probabilities(trunk, sampling, count):
    prompt, length = (2, 0), 3
    laws = TrunkLaws(trunk, sampling, prompt, 5 / count)
    cells = partition(laws.after, count, length)
    assert sum(cells.values()) == pytest.approx(1)
    mass = dict.fromkeys(cells, 0.0)
    for text in itertools.product(range(VOCAB), repeat=length):
        p = math.prod(direct(trunk, sampling, prompt, text[:i])[text[i]] for i in range(length))
        mass[next(text[:i] for i in range(length, -1, -1) if text[:i] in cells)] += p
        assert (text in cells) == (p * count >= 5)
    for cell, p in cells.items():
        assert mass[cell] == pytest.approx(p, abs=1e-5)


def test_what_is_settled_before_a_draw():
    assert [stage(i, 3, "token") for i in range(4)] == [
        "after 0 kept",
        "after 1 kept",
        "after 2 kept",
        "bonus",
    ]
    assert [stage(i, 3, "block") for i in range(4)] == ["after 0 kept", None, None, "bonus"]
    assert stage(0, 0, "token") is None


class Shaky:
    """A trunk whose wide passes round badly."""

    def __init__(self, trunk, error):
        self.trunk, self.error = trunk, error

    def __getattr__(self, name):
        return getattr(self.trunk, name)

    def forward(self, tokens, *args, **options):
        output = self.trunk.forward(tokens, *args, **options)
        if tokens.shape[1] > 1 and output.logits is not None:
            noise = torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(0))
            output = dataclasses.replace(output, logits=output.logits + self.error * noise)
        return output


def test_rounding_is_measured_between_narrow_and_wide_passes(trunk):
    sampling, prompts = SamplerConfig(top_p=0.9), [(2, 0), (1,)]
    texts = [
        Text(i, t, (None,) * 3) for i in range(2) for t in itertools.product((0, 3, 4), repeat=3)
    ]
    none, little, much = (
        rounding(Shaky(trunk, error), sampling, prompts, texts, 4) for error in (0, 0.1, 2.0)
    )
    assert (none.width, none.texts, none.places) == (4, 9, 2 * 9 * 3)  # last tokens are not read
    assert none.distance < 1e-6 and none.flips == 0
    assert 0.005 < little.distance < little.largest < 0.3
    assert 0.1 < much.distance < much.largest <= 1
    assert much.flips > 0.2 and much.outside > little.outside > 0
    narrow = rounding(Shaky(trunk, 2.0), sampling, prompts, texts, 1)
    assert narrow.distance == narrow.flips == 0
