"""The sampler's settings in torch, held to the law row by row."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtplx import kernels, shaping
from mtplx.errors import MtplxError
from mtplx.history import History
from mtplx.sampling import SamplerConfig, distribution_from_logits
from mtplx.shaping import TOP_P_CANDIDATES, Distributions, Shaper

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["kernels", "torch"], autouse=True)
def by(request):
    """Everything holds for the kernels as for what stands in where they are not built."""
    if request.param == "kernels":
        if kernels.find() is None:
            pytest.skip("the kernels are not built")
        yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtplx.shaping.kernels", SimpleNamespace(find=lambda: None))
        yield request.param


SETTINGS = {
    "plain": SamplerConfig(),
    "greedy": SamplerConfig(temperature=0),
    "hot": SamplerConfig(temperature=3.5),
    "cold": SamplerConfig(temperature=0.05),
    "nearly greedy": SamplerConfig(temperature=1e-30, top_p=0.9, top_k=5, min_p=0.1),
    "one token": SamplerConfig(top_k=1),
    "top-k": SamplerConfig(temperature=0.7, top_k=5),
    "all of top-k": SamplerConfig(top_k=10**6),
    "top-p": SamplerConfig(top_p=0.8),
    "least top-p": SamplerConfig(top_p=0.0),
    "top-k and top-p": SamplerConfig(temperature=0.6, top_k=20, top_p=0.95),
    "min-p": SamplerConfig(temperature=1.5, min_p=0.1),
    "all filters": SamplerConfig(temperature=1.2, top_k=30, top_p=0.9, min_p=0.05),
    "greedy with filters": SamplerConfig(temperature=0, top_k=3, top_p=0.5, min_p=0.5),
    "bias": SamplerConfig(logit_bias={0: 2.5, 3: -np.inf, 5: -1.0}, top_p=0.9),
    "repetition": SamplerConfig(repetition_penalty=1.3),
    "typical": SamplerConfig(typical_p=0.6),
    "typical of few": SamplerConfig(temperature=1.3, top_k=9, min_p=0.02, typical_p=0.4),
    "typical of the nucleus": SamplerConfig(top_p=0.9, typical_p=0.8),
    "no repeated token": SamplerConfig(no_repeat_ngram=1, temperature=1.1),
    "no repeated pair": SamplerConfig(no_repeat_ngram=2),
    "no repeated triple": SamplerConfig(no_repeat_ngram=3, top_p=0.8),
    "stop late": SamplerConfig(min_tokens=4, top_k=7),
    "stop never": SamplerConfig(suppress_stop=True),
    "banned": SamplerConfig(banned_tokens=[0, 2], repetition_penalty=1.2),
    "forced": SamplerConfig(forced_tokens=[5, 1, 4], min_tokens=5, no_repeat_ngram=2),
    "forced and greedy": SamplerConfig(temperature=0, forced_tokens=[4]),
    "presence": SamplerConfig(presence_penalty=0.7, top_k=8),
    "frequency": SamplerConfig(frequency_penalty=-0.4),
    "everything": SamplerConfig(
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=0.8,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={1: 1.5, 2: -np.inf},
        typical_p=0.95,
        no_repeat_ngram=2,
        min_tokens=3,
        banned_tokens=[3],
        forced_tokens=[0],
    ),
    "greedy with penalties": SamplerConfig(
        temperature=0, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={4: 3.0}
    ),
}
every_setting = pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS.keys())


STOPS = [1, 4]


def history_of(shaper, prompts, outputs):
    history = shaper.begin(prompts)
    history.emit(outputs)
    return history


def shaped(logits, configs, prompts, outputs, ids=None, vocab=None):
    vocab = vocab or logits.shape[-1]
    shaper = Shaper(configs, vocab, CPU, [STOPS] * len(configs))
    history = history_of(shaper, prompts, outputs) if shaper.uses_history else None
    return shaper(torch.as_tensor(logits, dtype=torch.float32), history, ids)


def shape(logits, configs):
    nothing = [()] * len(configs)
    return shaped(logits, configs, nothing, nothing).dense(logits.shape[-1]).numpy()


def law(row, config, prompt=(), output=()):
    row = np.asarray(row, dtype=np.float32)
    return distribution_from_logits(
        row, config, prompt_ids=prompt, output_ids=output, stop_ids=STOPS
    )


def assert_follows(p, row, *arguments):
    """One row of distributions, [C], is what the law makes of logits; void where it refuses."""
    try:
        expected = law(row, *arguments)
    except ValueError as error:
        assert "are -inf at every token" in str(error)
        assert bool(p.void)
        return
    assert not p.void
    assert_same(p.dense(len(row)).numpy(), expected)


def assert_same(got, expected):
    assert got.dtype == np.float32
    # The same tokens stay; what float32 cannot hold apart from 0 may go.
    assert not got[expected == 0].any()
    assert got[expected > 1e-30].all()
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-30)


@every_setting
@pytest.mark.parametrize("vocab", [6, 50])
def test_a_row_follows_the_law(config, vocab):
    rng = np.random.default_rng(vocab)
    for scale in (0.3, 4.0):
        logits = rng.normal(size=(8, vocab)) * scale
        logits[3, rng.integers(vocab, size=vocab // 2)] = -np.inf
        prompts = rng.integers(vocab, size=(8, 4)).tolist()
        outputs = [rng.integers(vocab, size=n).tolist() for n in range(8)]
        got = shaped(logits, [config] * 8, prompts, outputs)
        for b in range(8):
            assert_follows(got[b], logits[b], config, prompts[b], outputs[b])


def test_rows_have_settings_of_their_own():
    rng = np.random.default_rng(0)
    configs = [config for config in SETTINGS.values() for _ in range(2)]
    order = rng.permutation(len(configs))
    configs = [configs[i] for i in order]
    logits = rng.normal(size=(len(configs), 40)) * 3
    prompts = rng.integers(40, size=(len(configs), 5)).tolist()
    outputs = [rng.integers(40, size=b % 6).tolist() for b in range(len(configs))]
    got = shaped(logits, configs, prompts, outputs)
    for b, config in enumerate(configs):
        assert_follows(got[b], logits[b], config, prompts[b], outputs[b])
    # And keep them when others leave.
    everything = Shaper(configs, 40, CPU, [STOPS] * len(configs))
    for rows in np.array_split(rng.permutation(len(configs)), 7):
        history = history_of(everything, prompts, outputs)
        history.keep_rows(torch.tensor(rows))
        kept = everything.keep_rows(rows)(torch.tensor(logits[rows]), history)
        for row, b in enumerate(rows):
            assert_follows(kept[row], logits[b], configs[b], prompts[b], outputs[b])


@st.composite
def tied_rows(draw):
    """Logits of few values, so that ties meet every threshold."""
    width = draw(st.integers(1, 12))
    value = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.0, 3.0])
    rows = draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=1, max_size=4))
    for row in rows:
        if max(row) == -np.inf:
            row[draw(st.integers(0, width - 1))] = 0.0
    return np.array(rows)


@st.composite
def configs(draw):
    return SamplerConfig(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=draw(st.integers(0, 13)),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
    )


@given(tied_rows(), st.lists(configs(), min_size=4, max_size=4))
def test_ties_fall_as_in_the_law(rows, settings):
    got = shape(rows, settings[: len(rows)])
    for row, config, shaped in zip(rows, settings, got, strict=False):
        assert_same(shaped, law(row, config))


@pytest.mark.parametrize("count", [2, 3, 7, 10, 20, 2000])
@pytest.mark.parametrize("top_p", [0.05, 0.1, 0.5, 0.7, 0.9, 0.95])
def test_the_edge_of_the_nucleus_falls_as_in_the_law(count, top_p):
    # All equal: the mass removed meets 1 - top_p on the nose, or misses it by a rounding.
    logits = np.zeros((1, count))
    config = SamplerConfig(top_p=top_p)
    assert_same(shape(logits, [config])[0], law(logits[0], config))


def test_greedy_gives_a_tie_to_the_lowest_id():
    logits = np.array([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-np.inf, -5.0, -np.inf, -5.0]])
    got = shape(logits, [SamplerConfig(temperature=0)] * 3)
    assert got.argmax(-1).tolist() == [1, 0, 1]
    assert got.sum() == 3


# --- Top-p over more tokens than it looks at first ------------------------------------------------


class Counted:
    """How many tokens of a row were put in order."""

    def __init__(self, monkeypatch):
        self.asked = []
        original = shaping._ascending

        def ascending(scores, count):
            self.asked.append(count)
            return original(scores, count)

        monkeypatch.setattr(shaping, "_ascending", ascending)


VOCAB = 3 * TOP_P_CANDIDATES


@pytest.mark.parametrize(
    ("scale", "top_p", "sorted_whole"),
    [
        (6.0, 0.9, False),  # peaked: a few tokens hold the mass
        (0.01, 0.9, True),  # flat: the cut lies far beyond the candidates
        (0.01, 0.1, False),  # flat, but a small nucleus
        (0.0, 0.1, True),  # all equal: the candidates cannot say which of them stay
        (0.0, 0.9, True),
    ],
)
def test_top_p_sorts_a_whole_row_only_where_it_must(monkeypatch, scale, top_p, sorted_whole):
    logits = np.random.default_rng(1).normal(size=(2, VOCAB)) * scale
    config = SamplerConfig(temperature=1.0, top_p=top_p)
    counted = Counted(monkeypatch)
    got = shape(logits, [config] * 2)
    assert counted.asked == [TOP_P_CANDIDATES] + [VOCAB] * sorted_whole
    for row, shaped in zip(logits, got, strict=True):
        assert_same(shaped, law(row, config))


def test_one_flat_row_does_not_disturb_the_others(monkeypatch):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, VOCAB)) * np.array([[6.0], [0.01], [6.0], [0.01]])
    settings = [
        SamplerConfig(top_p=0.9),
        SamplerConfig(top_p=0.8, min_p=0.5),
        SamplerConfig(top_k=40, top_p=0.7),
        SamplerConfig(),
    ]
    counted = Counted(monkeypatch)
    got = shape(logits, settings)
    assert VOCAB in counted.asked
    for row, config, shaped in zip(logits, settings, got, strict=True):
        assert_same(shaped, law(row, config))
    # A flat row without top-p is no reason to sort.
    counted.asked.clear()
    shape(logits[[0, 3]], [settings[0], settings[3]])
    assert counted.asked == [TOP_P_CANDIDATES]


def test_after_top_k_few_candidates_are_looked_at(monkeypatch, by):
    logits = np.random.default_rng(3).normal(size=(2, VOCAB)).round(4)
    settings = [SamplerConfig(top_k=20, top_p=0.95), SamplerConfig(top_k=50, top_p=0.5)]
    counted = Counted(monkeypatch)
    got = shape(logits, settings)
    assert max(counted.asked, default=0) < 150
    for row, config, shaped in zip(logits, settings, got, strict=True):
        assert_same(shaped, law(row, config))
    # Unless more tokens tie with the k-th.
    tied = np.where(np.arange(VOCAB) % 2, 1.0, 0.0)[None]
    assert_same(shape(tied, settings[:1])[0], law(tied[0], settings[0]))
    assert by == "kernels" or max(counted.asked) >= VOCAB // 2


@given(st.integers(1, 6), tied_rows(), st.lists(configs(), min_size=4, max_size=4))
def test_how_many_candidates_there_are_changes_nothing(candidates, rows, settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shaping, "TOP_P_CANDIDATES", candidates)
        got = shape(rows, settings[: len(rows)])
    for row, config, shaped in zip(rows, settings, got, strict=False):
        assert_same(shaped, law(row, config))


# --- Reduced vocabularies -------------------------------------------------------------------------


@every_setting
def test_some_columns_are_shaped_as_if_the_others_were_impossible(config):
    rng = np.random.default_rng(4)
    ids = np.array([0, 1, 4, 5, 9, 17, 30, 31])
    logits = np.full((5, 32), -np.inf)
    logits[:, ids] = rng.normal(size=(5, 8)) * 3
    prompts = rng.integers(32, size=(5, 9)).tolist()
    outputs = [rng.integers(32, size=2 * n).tolist() for n in range(5)]
    got = shaped(logits[:, ids], [config] * 5, prompts, outputs, torch.tensor(ids), vocab=32)
    for b in range(5):
        assert_follows(got[b], logits[b], config, prompts[b], outputs[b])


def test_a_draft_may_come_from_where_the_bias_allows_nothing():
    """The target forbids it, so that it is rejected; there is no reason to stop."""
    forbidden = SamplerConfig(logit_bias={0: -np.inf, 2: -np.inf}, top_p=0.9)
    logits = np.array([[1.0, 2.0], [1.0, 2.0]])
    ids = torch.tensor([0, 2])
    got = shaped(logits, [forbidden, SamplerConfig()], [()] * 2, [()] * 2, ids, vocab=4)
    dense = got.dense(4)[:, ids].numpy()
    assert_same(dense[0], law(logits[0], SamplerConfig(top_p=0.9)))
    assert_same(dense[1], law(logits[1], SamplerConfig()))
    for setting in ({"forced_tokens": [1]}, {"banned_tokens": [0, 2]}):
        elsewhere = SamplerConfig(**setting)
        p = shaped(logits, [elsewhere, SamplerConfig()], [()] * 2, [()] * 2, ids, vocab=4)
        assert p.void.tolist() == [True, False]
        assert_same(p.dense(4)[0, ids].numpy(), law(logits[0], SamplerConfig()))
    # What forbids the whole vocabulary is told, for whoever wants to emit there.
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [1.0, -torch.inf, 2.0]])
    p = Shaper([forbidden, SamplerConfig()], 3, CPU)(logits, None)
    assert p.void.tolist() == [True, False]
    assert p[1:].void.tolist() == [False] and p.view(1, 2).void.tolist() == [[True, False]]
    assert_same(p[0].dense(3).numpy(), law(logits[0], SamplerConfig(top_p=0.9)))
    assert Shaper([SamplerConfig()] * 2, 3, CPU)(logits, None).void is None


# --- Histories ------------------------------------------------------------------------------------


LOOKING_BACK = [name for name, config in SETTINGS.items() if Shaper([config], 50, CPU).uses_history]


@pytest.mark.parametrize("name", LOOKING_BACK)
def test_what_looks_back_sees_the_draft(name):
    config, rng = SETTINGS[name], np.random.default_rng(5)
    batch, depth, vocab = 3, 4, 9
    logits = rng.normal(size=(batch, depth + 1, vocab)) * 2
    prompts = [[1, 2, 2], [0], [8, 8, 8, 3]]
    outputs = [[], [4, 4, 1], [2]]
    draft = rng.integers(4, size=(batch, depth))  # few tokens: they repeat
    shaper = Shaper([config] * batch, vocab, CPU, [STOPS] * batch)
    history = history_of(shaper, prompts, outputs)
    flat = torch.tensor(logits, dtype=torch.float32).flatten(0, 1)
    along = shaper(flat, history.after(torch.tensor(draft)))
    for i in range(depth + 1):
        behind = history.after_tokens(torch.tensor(draft[:, :i]))
        here = shaper(torch.tensor(logits[:, i]), behind)
        for b in range(batch):
            grown = [*outputs[b], *draft[b, :i].tolist()]
            for p in (along[b * (depth + 1) + i], here[b]):
                assert_follows(p, logits[b, i], config, prompts[b], grown)


def test_a_long_text_is_looked_through_as_it_grows():
    rng = np.random.default_rng(6)
    configs = [SamplerConfig(no_repeat_ngram=n) for n in (1, 2, 3, 4)]
    shaper = Shaper(configs, 30, CPU)
    prompts = [rng.integers(4, size=n).tolist() for n in (1, 2, 9, 5)]
    history, outputs = shaper.begin(prompts), [[] for _ in configs]
    for _ in range(12):
        new = [rng.integers(4, size=rng.integers(0, 5)).tolist() for _ in configs]
        history.emit(new)
        for output, tokens in zip(outputs, new, strict=True):
            output += tokens
        p = shaper(torch.zeros(4, 30), history)
        for b, config in enumerate(configs):
            assert_follows(p[b], np.zeros(30), config, prompts[b], outputs[b])


@pytest.mark.parametrize("most", [50, 2**62, 2**63, 10**30])
def test_counts_beyond_any_text_cost_nothing(most):
    """No text is so long that the n-gram could repeat, or that it might end."""
    configs = [
        SamplerConfig(no_repeat_ngram=2),
        SamplerConfig(no_repeat_ngram=most),
        SamplerConfig(min_tokens=most),
    ]
    prompts = [[1, 2, 1], [3, 3, 3, 3, 3, 3], [5]]
    shaper = Shaper(configs, 7, CPU, [(0,)] * 3)
    history = shaper.begin(prompts)
    assert history.text is not None and history.text.numel() < 100
    history.emit([[4, 1], [3], [2, 0]])
    logits = torch.arange(21.0).view(3, 7) / 10
    got = shaper(logits, history).dense(7)
    expected = [{2, 4}, set(), {0}]
    for row, none in zip(got, expected, strict=True):
        assert set(np.flatnonzero(row == 0)) == none


def test_a_grammar_lets_come_what_it_allows():
    logits = np.random.default_rng(7).normal(size=(2, 6))
    allowed = torch.tensor([[True, False, True, True, False, False], [True] * 6])
    configs = [SamplerConfig(top_k=2, banned_tokens=[0]), SamplerConfig()]
    shaper = Shaper(configs, 6, CPU)
    history = dataclasses.replace(shaper.begin([()] * 2), allowed=allowed)
    p = shaper(torch.tensor(logits), history)
    for b in range(2):
        row = np.float32(logits[b])
        expected = distribution_from_logits(row, configs[b], allowed=allowed[b].numpy())
        assert_same(p[b].dense(6).numpy(), expected)
    history.allowed = torch.tensor([[True, *[False] * 5], [False] * 6])
    assert shaper(torch.tensor(logits), history).void.tolist() == [True, True]
    # A reduced vocabulary sees its own columns.
    history.allowed = allowed
    some = shaper(torch.tensor(logits[:, [1, 3]]), history, torch.tensor([1, 3]))
    assert some.dense(6)[0].tolist() == [0, 0, 0, 1, 0, 0] and some.void.tolist() == [False] * 2


def test_history_counts_what_is_emitted():
    history = History.of([[1, 1], [0, 3]], 4, CPU)
    history.emit([[2, 2, 0], []])
    history.emit([[2], [3, 3]])
    assert history.prompt.tolist() == [[False, True, False, False], [True, False, False, True]]
    assert history.output.tolist() == [[1, 0, 3, 0], [0, 0, 0, 2]]
    # Looking ahead changes nothing.
    ahead = history.after_tokens(torch.tensor([[1, 1], [2, 1]]))
    assert ahead.output.tolist() == [[1, 2, 3, 0], [0, 1, 1, 2]]
    steps = history.after(torch.tensor([[1, 1], [2, 1]])).output.tolist()
    assert steps == [
        [1, 0, 3, 0],
        [1, 1, 3, 0],
        [1, 2, 3, 0],
        [0, 0, 0, 2],
        [0, 0, 1, 2],
        [0, 1, 1, 2],
    ]
    assert history.output.tolist() == [[1, 0, 3, 0], [0, 0, 0, 2]]
    history.keep_rows(torch.tensor([1]))
    assert history.output.tolist() == [[0, 0, 0, 2]]
    history.emit([[]])
    assert history.output.tolist() == [[0, 0, 0, 2]]


# --- Errors and types -----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SamplerConfig(), SamplerConfig(temperature=0)])
@pytest.mark.parametrize(("value", "says"), [(np.nan, "row 1 has nan"), (np.inf, "row 1 has inf")])
def test_logits_that_no_softmax_takes_are_named(config, value, says):
    logits = np.zeros((3, 5))
    logits[1, 2] = value
    with pytest.raises(MtplxError, match=says):
        shape(logits, [config] * 3)
    logits[1] = -np.inf
    with pytest.raises(MtplxError, match="row 1 has nothing but -inf"):
        shape(logits, [config] * 3)


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_temperatures_beyond_float32_are_still_the_laws(temperature, top_k):
    config = SamplerConfig(temperature=temperature, top_k=top_k)
    logits = np.array([[1.0, 3.0, 2.0, 3.0, -2.0], [0.5, 0.1, 0.2, 0.3, 0.4]])
    got = shape(logits, [config, SamplerConfig()])
    assert_same(got[0], law(logits[0], config))
    assert_same(got[1], law(logits[1], SamplerConfig()))


@pytest.mark.parametrize(
    "config",
    [
        SamplerConfig(logit_bias={1: 1e39}),
        SamplerConfig(presence_penalty=1e39),
        SamplerConfig(frequency_penalty=-1e39),
        SamplerConfig(repetition_penalty=1e-40),
        SamplerConfig(logit_bias={1: 1e8}),
    ],
)
def test_settings_beyond_float32_are_refused_by_name(config):
    with pytest.raises(MtplxError, match="beyond what can be computed with"):
        Shaper([SamplerConfig(), config], 5, CPU)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_tiny_penalty_is_one(name):
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    shaper = Shaper([SamplerConfig(**{name: 1e-6})], 3, CPU)
    history = shaper.begin([[0]])
    history.emit([[2] * 1000])
    taken = 1e-6 * (1000 if name == "frequency_penalty" else 1)
    expected = torch.tensor([1.0, 2.0, 3.0 - taken], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(shaper(logits, history).p[0].double(), expected, atol=2e-7, rtol=0)


def test_a_bad_row_is_found_in_its_request_and_position():
    logits = torch.zeros(6, 4)
    logits[4, 1] = torch.nan
    with pytest.raises(MtplxError, match="row 1 has nan at position 1 of the cycle"):
        Shaper([SamplerConfig()] * 2, 4, CPU)(logits, None)


@pytest.mark.parametrize(
    "setting", [{"logit_bias": {5: 1.0}}, {"banned_tokens": [5]}, {"forced_tokens": [1, 5]}]
)
def test_a_token_outside_the_vocabulary_is_named(setting):
    (name,) = setting
    with pytest.raises(MtplxError, match=f"{name} names token 5, but there are 5 tokens"):
        Shaper([SamplerConfig(), SamplerConfig(**setting)], 5, CPU)


def test_positions_that_kept_other_tokens_stand_side_by_side():
    """One position's nucleus may need the whole vocabulary where another's does not."""
    rng = np.random.default_rng(8)
    shaper = Shaper([SamplerConfig(top_p=0.9)] * 2, VOCAB, CPU)
    rows = [shaper(torch.tensor(rng.normal(size=(2, VOCAB)) * s), None) for s in (6, 0.01, 6)]
    assert [row.ids is None for row in rows] == [False, True, False]
    for order in ([0, 1, 2], [1, 0, 2], [1, 1, 1]):
        stacked = Distributions.stack([rows[i] for i in order], VOCAB)
        expected = torch.stack([rows[i].dense(VOCAB) for i in order], 1)
        torch.testing.assert_close(stacked.dense(VOCAB), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_shaped_in_float32(dtype):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = SamplerConfig(temperature=0.7, top_p=0.9, min_p=0.01)
    got = Shaper([config] * 3, 20, CPU)(logits, None).dense(20)
    for row, shaped in zip(logits, got, strict=True):
        assert_same(shaped.numpy(), law(row.double().numpy(), config))
