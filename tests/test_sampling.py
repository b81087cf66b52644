"""The law: distributions held to transformers' own processors, acceptance to its theorem."""

import copy
import dataclasses
import itertools
import math
import pickle
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMixin

from mtplx import sampling
from mtplx.sampling import (
    SamplerConfig,
    SpeculativeDecision,
    acceptance_probability,
    block_acceptance,
    block_residual_distribution,
    check_logits,
    distribution_from_logits,
    exponential_race,
    residual_distribution,
    sample_from_distribution,
    speculative_output_marginal,
    verify_one_token,
)


class Scripted:
    """Stands in for a generator: `random()` returns the given numbers in turn."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


LAST_BELOW_ONE = 1 - 2.0**-53  # the largest number Generator.random() returns


# --- SamplerConfig --------------------------------------------------------------------------------


def test_the_defaults_change_nothing():
    logits = np.random.default_rng(0).normal(size=(5, 40)) * 4
    expected = torch.tensor(logits).softmax(-1).numpy()
    history = {"prompt_ids": [1, 2, 3], "output_ids": [3, 3, 39]}
    for keywords in ({}, history):
        got = distribution_from_logits(logits, SamplerConfig(), **keywords)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_a_config_is_immutable_hashable_and_copies():
    config = SamplerConfig(temperature=1, top_k=None, logit_bias={7: 2, 3: -math.inf}, seed=4)
    assert config.temperature == 1.0 and isinstance(config.temperature, float)
    assert config.top_k == 0
    assert config.logit_bias == ((3, -math.inf), (7, 2.0))
    assert config.bias == {3: -math.inf, 7: 2.0}
    same = SamplerConfig(logit_bias=[(3, -math.inf), (np.int64(7), np.float32(2))], seed=4)
    assert same == config and hash(same) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, top_p=0.5).logit_bias == config.logit_bias
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_p = 0.5
    config.bias[1] = 1.0
    assert 1 not in config.bias
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(config, top_p=2)
    lists = SamplerConfig(banned_tokens=[7, np.int64(3), 7], forced_tokens=[5, 2, 5])
    assert (lists.banned_tokens, lists.forced_tokens) == ((3, 7), (5, 2, 5))
    assert hash(lists) == hash(SamplerConfig(banned_tokens=(7, 3), forced_tokens=(5, 2, 5)))
    assert SamplerConfig(no_repeat_ngram=None, min_tokens=None) == SamplerConfig()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": "1"},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_k": True},
        {"top_p": -0.01},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_p": False},
        {"min_p": -0.01},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"typical_p": 0},
        {"typical_p": 1.01},
        {"typical_p": math.nan},
        {"no_repeat_ngram": -1},
        {"no_repeat_ngram": 2.0},
        {"min_tokens": -1},
        {"min_tokens": True},
        {"suppress_stop": 1},
        {"suppress_stop": None},
        {"banned_tokens": [-1]},
        {"banned_tokens": [1.0]},
        {"banned_tokens": [True]},
        {"banned_tokens": 5},
        {"banned_tokens": np.array(5)},
        {"forced_tokens": {5, 6}},
        {"banned_tokens": "5"},
        {"banned_tokens": None},
        {"forced_tokens": [3, -1]},
        {"forced_tokens": {5: 1.0}},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.0},
        {"seed": True},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {True: 0.0}},
        {"logit_bias": {"5": 0.0}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {5: True}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": [(5, 1.0), (5, 2.0)]},
        {"logit_bias": [5]},
        {"logit_bias": 5},
        {"logit_bias": None},
    ],
    ids=str,
)
def test_a_bad_setting_is_one_line_that_names_it(setting):
    with pytest.raises(ValueError, match=next(iter(setting))) as caught:
        SamplerConfig(**setting)
    assert "\n" not in str(caught.value)


def test_the_edges_of_every_range_are_allowed():
    for setting in (
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"top_p": 0},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"temperature": 0},
        {"top_k": np.int64(3)},
        {"presence_penalty": -2},
        {"typical_p": 1},
        {"typical_p": 1e-9},
        {"no_repeat_ngram": 1},
        {"min_tokens": np.int64(3)},
        {"suppress_stop": True},
        {"banned_tokens": ()},
        {"forced_tokens": (0, 0)},
    ):
        ((name, value),) = setting.items()
        assert getattr(SamplerConfig(**setting), name) == value


def test_a_stop_of_minus_1_is_no_token():
    config = SamplerConfig(suppress_stop=True, min_tokens=1)
    np.testing.assert_allclose(
        distribution_from_logits(np.zeros(4), config, stop_ids=[-1, 1, 9]), [1 / 3, 0, 1 / 3, 1 / 3]
    )


# --- distribution_from_logits, against transformers -----------------------------------------------


class Generate(GenerationMixin):
    """As much of a model as generate()'s own builder of processors wants to see."""

    config = types.SimpleNamespace(is_encoder_decoder=False)


def transformers_law(
    logits, config, prompt_ids=(), output_ids=(), stop_ids=(), dtype=torch.float64
):
    """What generate() makes of `logits` [B, V], from the processors it builds, in its order."""
    sampled = config.temperature > 0
    never = [*config.banned_tokens, *(stop_ids if config.suppress_stop else ())]
    keywords = {
        "do_sample": sampled,
        "repetition_penalty": config.repetition_penalty,
        "no_repeat_ngram_size": config.no_repeat_ngram,
        "min_new_tokens": config.min_tokens,
        "suppress_tokens": never or None,
    }
    if config.logit_bias:
        keywords["sequence_bias"] = {(token,): bias for token, bias in config.logit_bias}
    if sampled:
        keywords |= {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "typical_p": config.typical_p,
        }
    generation = GenerationConfig(**keywords)
    if stop_ids:
        generation._eos_token_tensor = torch.tensor(stop_ids)
    processors = Generate()._get_logits_processor(generation, input_ids_seq_length=len(prompt_ids))
    scores = torch.tensor(np.atleast_2d(logits), dtype=dtype)
    ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.long).expand(len(scores), -1)
    scores = processors(ids, scores)
    if not sampled:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double().numpy()
    return scores.softmax(-1).numpy()


def assert_same_law(logits, config, **history):
    got = np.atleast_2d(distribution_from_logits(logits, config, **history))
    expected = transformers_law(logits, config, **history)
    np.testing.assert_array_equal(got > 0, expected > 0, err_msg=f"kept sets, {config}")
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-300, err_msg=str(config))
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-12)


def random_config(rng):
    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    return SamplerConfig(
        temperature=maybe(float(rng.choice([0.0, 0.01, 0.3, 0.6, 1.7, 50.0])), 1.0),
        top_k=maybe(int(rng.integers(1, 80)), 0),
        top_p=maybe(float(rng.random()), 1.0),
        min_p=maybe(float(rng.random() ** 3), 0.0),
        typical_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        # transformers keeps biases in float32
        logit_bias=maybe(
            {int(t): float(np.float32(rng.normal() * 3)) for t in range(1, 12, 4)}, {}
        ),
    )


def test_random_settings_equal_transformers():
    rng = np.random.default_rng(1)
    for _ in range(400):
        logits = rng.normal(size=(3, 50)) * rng.choice([0.1, 1, 5, 30])
        logits[rng.random(logits.shape) < rng.choice([0, 0.3, 0.9])] = -np.inf
        logits[:, 11] = 0.25
        prompt, output = rng.integers(0, 60, size=6), rng.integers(0, 50, size=4)
        assert_same_law(logits, random_config(rng), prompt_ids=prompt, output_ids=output)


def test_ties_equal_transformers():
    """Whole numbers tie everywhere; torch's sort is stable on rows this short."""
    rng = np.random.default_rng(2)
    for _ in range(400):
        logits = rng.integers(-2, 3, size=(2, 12)).astype(float)
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[:, 0] = 0.0
        assert_same_law(logits, random_config(rng))


@pytest.mark.parametrize("top_p", [0.0, 1e-12, 0.25, 0.5, 0.75, 1 - 1e-12, 1.0])
def test_top_p_edges_equal_transformers(top_p):
    config = SamplerConfig(top_p=top_p)
    for logits in (
        np.zeros(8),  # every mass a multiple of 1/8: the cut is exactly on the boundary
        np.zeros(16),
        np.log([0.4, 0.12, 0.12, 0.31, 0.05]),
        np.array([0.0, -np.inf, 5.0, 5.0, -np.inf]),
        np.array([0.0, -np.inf]),
        np.array([3.0]),
        np.array([0.0, -800.0]),
    ):
        assert_same_law(logits, config)


def test_top_p_cuts_inside_a_tie_and_keeps_the_higher_ids():
    law = distribution_from_logits(np.zeros(64), SamplerConfig(top_p=0.25))
    np.testing.assert_array_equal(np.flatnonzero(law), range(48, 64))
    law = distribution_from_logits([0, 3.0, 3.0, 0], SamplerConfig(top_p=0))
    np.testing.assert_array_equal(law, [0, 0, 1, 0])
    # How many stay is transformers' answer on a long row too, where its sort is not stable.
    for top_p in (0, 0.1, 0.25, 0.7):
        config = SamplerConfig(top_p=top_p)
        kept = np.count_nonzero(distribution_from_logits(np.zeros(64), config))
        assert kept == np.count_nonzero(transformers_law(np.zeros(64), config))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6, 1000])
def test_top_k_edges_equal_transformers(top_k):
    config = SamplerConfig(top_k=top_k)
    for logits in ([1.0, 3.0, 3.0, 3.0, 0.0], [-np.inf, 1.0, -np.inf, 2.0, -np.inf], [4.0]):
        assert_same_law(np.array(logits), config)
    tied = distribution_from_logits([1.0, 3.0, 3.0, 3.0, 0.0], SamplerConfig(top_k=2))
    np.testing.assert_array_equal(np.flatnonzero(tied), [1, 2, 3])


@pytest.mark.parametrize("min_p", [0.0, 1e-9, 0.5, 1.0])
def test_min_p_edges_equal_transformers(min_p):
    for logits in ([0.0, 2.0, 2.0, 1.9], [0.0, -np.inf, -30.0], [0.0, 0.0, -1000.0]):
        assert_same_law(np.array(logits), SamplerConfig(min_p=min_p))


def test_temperature_0_is_greedy_and_gives_a_tie_to_the_lowest_id():
    logits = np.array([[0.0, 7.0, 7.0, -np.inf], [1.0, -1.0, 0.5, 1.0]])
    # Filters have nothing to say: one token is left whatever they are.
    config = SamplerConfig(temperature=0, top_k=3, top_p=0.0, min_p=0.5)
    np.testing.assert_array_equal(
        distribution_from_logits(logits, config), [[0, 1, 0, 0], [1, 0, 0, 0]]
    )
    assert_same_law(logits, config)
    # Bias and penalties do.
    config = SamplerConfig(temperature=0, repetition_penalty=2.0, logit_bias={2: 0.5})
    assert_same_law(logits, config, output_ids=[0, 3])
    law = distribution_from_logits(logits, config, output_ids=[0, 3])
    np.testing.assert_array_equal(law.argmax(-1), [2, 2])


def test_low_temperatures_tend_to_greedy_without_overflow():
    logits = np.array([1e308, -1e308, 0.0, -np.inf])
    for temperature in (1e-300, 5e-324, 1e-3):
        with np.errstate(all="raise", under="ignore"):
            law = distribution_from_logits(logits, SamplerConfig(temperature=temperature))
        np.testing.assert_array_equal(law, [1, 0, 0, 0])
    law = distribution_from_logits([1e-320, 0.0], SamplerConfig(temperature=1e308))
    np.testing.assert_array_equal(law, [0.5, 0.5])


@pytest.mark.parametrize("typical_p", [1e-9, 0.2, 0.5, 0.9, 1 - 1e-12])
def test_typical_p_edges_equal_transformers(typical_p):
    config = SamplerConfig(typical_p=typical_p)
    for logits in (
        np.zeros(8),
        np.log([0.4, 0.12, 0.12, 0.31, 0.05]),
        np.array([0.0, -np.inf, 5.0, 5.0, -np.inf]),
        np.array([0.0, -np.inf]),
        np.array([3.0]),
        np.array([0.0, -800.0]),
    ):
        assert_same_law(logits, config)


def test_the_likeliest_token_may_be_untypical():
    """The entropy is 1.57 bits: 2.32, the information of 0.2, is nearer to it than 0.74."""
    logits = np.log([0.6, 0.2, 0.1, 0.1])
    law = distribution_from_logits(logits, SamplerConfig(typical_p=0.1))
    np.testing.assert_array_equal(law, [0, 1, 0, 0])
    law = distribution_from_logits(logits, SamplerConfig(typical_p=0.3))
    np.testing.assert_allclose(law, [0.75, 0.25, 0, 0], rtol=1e-12)


@pytest.mark.slow
def test_forbidding_settings_equal_transformers():
    rng = np.random.default_rng(5)
    seen = {"banned": 0, "early": 0, "late": 0, "repeated": 0}
    for _ in range(300):
        logits = rng.normal(size=(2, 20)) * 3
        prompt = rng.integers(0, 4, size=rng.integers(1, 9)).tolist()
        output = rng.integers(0, 4, size=rng.integers(0, 9)).tolist()
        config = dataclasses.replace(
            random_config(rng),
            no_repeat_ngram=int(rng.integers(0, 5)),
            min_tokens=int(rng.integers(0, 10)),
            suppress_stop=bool(rng.random() < 0.3),
            banned_tokens=rng.integers(10, 15, size=rng.integers(0, 3)).tolist(),
        )
        stops = [15, 18]
        assert_same_law(logits, config, prompt_ids=prompt, output_ids=output, stop_ids=stops)
        law = distribution_from_logits(
            logits, config, prompt_ids=prompt, output_ids=output, stop_ids=stops
        )
        free = distribution_from_logits(logits, dataclasses.replace(config, no_repeat_ngram=0))
        seen["banned"] += bool(config.banned_tokens)
        seen["early"] += len(output) < config.min_tokens
        seen["late"] += law[:, stops].sum() > 0
        seen["repeated"] += bool((free[:, :4][law[:, :4] == 0] > 0).any())
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize(
    ("size", "prompt", "output", "banned"),
    [
        (1, [3, 1], [1, 4], {1, 3, 4}),
        (2, [3, 1], [2, 3], {1}),
        (2, [3, 1, 3], [2, 3], {1, 2}),
        (2, [3], [], set()),
        (3, [1, 2, 4, 1], [2], {4}),  # begun in the prompt, ended in the output
        (3, [1, 2, 4, 1], [1], set()),
        (3, [5, 5], [5], {5}),
        (9, [5, 5], [5], set()),
    ],
)
def test_no_sequence_comes_twice(size, prompt, output, banned):
    config = SamplerConfig(no_repeat_ngram=size)
    law = distribution_from_logits(np.zeros(7), config, prompt_ids=prompt, output_ids=output)
    assert set(np.flatnonzero(law == 0)) == banned


def test_stops_wait_for_so_many_tokens_and_may_never_come():
    stops = [2, 4, 99]

    def law(emitted, **settings):
        config = SamplerConfig(**settings)
        return distribution_from_logits(
            np.zeros(5), config, output_ids=[0] * emitted, stop_ids=stops
        )

    for emitted in range(5):
        ended = emitted >= 3
        np.testing.assert_array_equal(law(emitted, min_tokens=3)[[2, 4]] > 0, ended)
        assert not law(emitted, suppress_stop=True)[[2, 4]].any()
    assert law(0, suppress_stop=True)[[0, 1, 3]].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_begins_with_what_is_forced(temperature):
    config = SamplerConfig(
        temperature, forced_tokens=[3, 0], banned_tokens=[3], logit_bias={0: -math.inf}, top_k=1
    )
    logits = np.array([[1.0, 2.0, 3.0, -math.inf], [0.0, 0.0, 9.0, 0.0]])
    for position, token in enumerate([3, 0]):
        got = distribution_from_logits(logits, config, output_ids=[3, 0][:position])
        np.testing.assert_array_equal(got, np.eye(4)[[token, token]])
    after = distribution_from_logits(logits, config, output_ids=[3, 0])
    np.testing.assert_array_equal(after, np.eye(4)[[2, 2]])


def test_a_grammar_lets_come_what_it_allows():
    allowed = np.array([True, False, True, True])
    logits = np.array([0.0, 9.0, 1.0, 2.0])
    got = distribution_from_logits(logits, SamplerConfig(top_k=2), allowed=allowed)
    np.testing.assert_allclose(
        got,
        distribution_from_logits(logits[[0, 2, 3]], SamplerConfig(top_k=2)) @ np.eye(4)[[0, 2, 3]],
    )
    np.testing.assert_array_equal(got > 0, [False, False, True, True])


def test_leading_axes_are_rows():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, 20))
    config = SamplerConfig(0.7, top_k=9, top_p=0.8, min_p=0.05, presence_penalty=0.5)
    batch = distribution_from_logits(logits, config, output_ids=[1, 4])
    assert batch.shape == logits.shape
    for row in np.ndindex(2, 3):
        single = distribution_from_logits(logits[row], config, output_ids=[1, 4])
        np.testing.assert_array_equal(batch[row], single)
    assert distribution_from_logits(np.empty((0, 5)), config).shape == (0, 5)


def test_the_input_is_left_alone():
    logits = np.arange(6.0)
    config = SamplerConfig(0.5, 3, 0.9, 0.1, 1.3, 0.2, 0.2, {1: -math.inf})
    distribution_from_logits(logits, config, prompt_ids=[5], output_ids=[4])
    np.testing.assert_array_equal(logits, np.arange(6.0))


def test_penalties_count_as_they_say():
    """OpenAI's: each token loses its count in the output times one, and the other once."""
    rng = np.random.default_rng(4)
    logits, prompt, output = rng.normal(size=10) * 3, [0, 1, 1, 2], [2, 5, 5, 5, 9]
    config = SamplerConfig(
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=-0.7,
        logit_bias={5: 2, 1: -1},
    )
    expected = logits.copy()
    expected[5] += 2
    expected[1] -= 1
    for token in {*prompt, *output}:
        expected[token] *= 1.5 if expected[token] < 0 else 1 / 1.5
    for token in set(output):
        expected[token] -= 0.4 - 0.7 * output.count(token)
    expected = np.exp(expected) / np.exp(expected).sum()
    got = distribution_from_logits(logits, config, prompt_ids=prompt, output_ids=output)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_bias_of_minus_infinity_forbids():
    law = distribution_from_logits([9.0, 1.0, 1.0], SamplerConfig(logit_bias={0: -math.inf}))
    np.testing.assert_array_equal(law, [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, math.nan, 1.0], "logits have nan at token 1:"),
        ([[0.0, 1.0], [2.0, math.inf]], "logits have inf at row 1, token 1:"),
        ([[-math.inf, 1.0], [-math.inf, -math.inf]], "logits are -inf at row 1, every token:"),
        ([-math.inf], "logits are -inf at every token:"),
        (np.full((2, 1, 3), math.nan), "logits have nan at row 0, 0, token 0:"),
        (3.0, r"shape \[..., V\] with V >= 1, got \[\]"),
        ([], r"got \[0\]"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_bad_logits_are_named_by_position(logits, message, temperature):
    config = SamplerConfig(temperature=temperature, top_k=1, top_p=0.5, min_p=0.5)
    with pytest.raises(ValueError, match=message):
        distribution_from_logits(logits, config)
    with pytest.raises(ValueError, match=message):
        check_logits(logits)


@pytest.mark.parametrize(
    ("setting", "history", "message"),
    [
        ({"logit_bias": {3: 1.0}}, {}, "logit_bias names token 3, but there are 3 tokens"),
        ({"banned_tokens": [4]}, {}, "banned_tokens names token 4, but there are 3 tokens"),
        ({"forced_tokens": [0, 3]}, {}, "forced_tokens names token 3, but there are 3 tokens"),
        ({"banned_tokens": [0, 1, 2]}, {}, "logits after banned_tokens are -inf at every token"),
        (
            {"no_repeat_ngram": 1, "banned_tokens": [2]},
            {"prompt_ids": [0], "output_ids": [1]},
            "logits after banned_tokens are -inf",
        ),
        ({"min_tokens": 1, "top_k": 1}, {"stop_ids": [0, 1, 2]}, "after min_tokens are -inf"),
        ({"suppress_stop": True}, {"stop_ids": [0, 1, 2]}, "after suppress_stop are -inf"),
        ({}, {"allowed": np.zeros(3, dtype=bool)}, "after the grammar are -inf"),
        (
            {"logit_bias": dict.fromkeys(range(3), -math.inf)},
            {},
            "after bias and penalties are -inf",
        ),
        ({"logit_bias": {1: 1.7e308}}, {}, "after bias and penalties have inf at token 1"),
        ({"repetition_penalty": 1e-200}, {"prompt_ids": [1]}, "have inf at token 1"),
        ({}, {"output_ids": [-1]}, "output_ids holds -1"),
        ({}, {"prompt_ids": [0.5]}, "prompt_ids must be one row of integers"),
        ({}, {"prompt_ids": [[1, 2]]}, r"of shape \[1, 2\]"),
        ({}, {"prompt_ids": [True]}, "got bool"),
    ],
)
def test_bad_biases_and_histories_are_named(setting, history, message):
    with pytest.raises(ValueError, match=message):
        distribution_from_logits([0.0, 1e308, 0.0], SamplerConfig(**setting), **history)


def test_float32_generate_keeps_the_same_tokens():
    """The real generate() of a small random model, in its float32, from its raw logits."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=1.0,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    prompt = [3, 14, 15, 9, 26]
    config = SamplerConfig(
        0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, logit_bias={5: 1.5, 6: -2.0}
    )
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=20,
        do_sample=True,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        sequence_bias={(5,): 1.5, (6,): -2.0},
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = out.sequences[0, len(prompt) :].tolist()
    supports = set()
    for step, (raw, processed) in enumerate(zip(out.logits, out.scores, strict=True)):
        got = distribution_from_logits(
            raw[0].numpy(), config, prompt_ids=prompt, output_ids=output[:step]
        )
        expected = processed[0].softmax(-1).numpy()
        np.testing.assert_array_equal(got > 0, expected > 0)
        np.testing.assert_allclose(got, expected, rtol=1e-4)
        supports.add(int((got > 0).sum()))
    assert len(supports) > 3  # the filters were at work, not one of them alone


# --- Drawing --------------------------------------------------------------------------------------


def test_sampling_inverts_the_cumulative_sum():
    p = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    below = math.nextafter(0.25, 0)
    for u, token in ((0.0, 1), (below, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (LAST_BELOW_ONE, 4)):
        assert sample_from_distribution(p, Scripted(u)) == token


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 0.1, 1 / 3, 1.0, 3.0]), min_size=1, max_size=40),
    st.sampled_from([0.0, 2.0**-53, 0.5, LAST_BELOW_ONE]),
)
def test_no_token_of_probability_0_is_ever_drawn(weights, u):
    assume(sum(weights) > 0)
    p = np.array(weights) / sum(weights)
    token = sample_from_distribution(p, Scripted(u))
    assert type(token) is int
    assert p[token] > 0


def test_a_sum_rounded_off_1_leaves_no_gap_at_the_end():
    for p in ([1 - 5e-7, 0.0], [0.5 + 4e-7, 0.5, 0.0], [0.1] * 10 + [0.0]):
        token = sample_from_distribution(p, Scripted(LAST_BELOW_ONE))
        assert token == len(p) - 2


def test_draws_follow_the_distribution():
    p = np.array([0.05, 0.0, 0.35, 0.6])
    rng = np.random.default_rng(5)
    counts = np.bincount([sample_from_distribution(p, rng) for _ in range(20_000)], minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-3


def test_without_a_generator_draws_differ():
    p = np.full(1000, 1e-3)
    assert len({sample_from_distribution(p) for _ in range(20)}) > 1
    assert len({verify_one_token(p, np.eye(1000)[0], 0).token_id for _ in range(20)}) > 1


# --- Accepting and correcting ---------------------------------------------------------------------


def test_acceptance_is_the_ratio_capped_at_1():
    p, q = [0.5, 0.3, 0.2, 0.0, 0.0], [0.25, 0.6, 0.0, 0.15, 0.0]
    expected = [1.0, 0.5, 1.0, 0.0, 0.0]
    assert [acceptance_probability(p, q, token) for token in range(5)] == expected
    assert acceptance_probability([1e-300, 1.0], [1.0, 0.0], np.int64(0)) == 1e-300
    assert acceptance_probability([1.0, 0.0], [1e-320, 1.0], 0) == 1.0


def test_the_residual_is_what_the_target_has_more_of():
    np.testing.assert_allclose(
        residual_distribution([0.5, 0.3, 0.2], [0.25, 0.7, 0.05]), [0.625, 0, 0.375]
    )
    np.testing.assert_array_equal(residual_distribution([1, 0], [0, 1]), [1, 0])
    tiny = residual_distribution([1.0, 0.0, 1e-310], [1.0, 1e-310, 0.0])
    np.testing.assert_array_equal(tiny, [0, 0, 1])
    p = np.array([0.25, 0.75])
    same = residual_distribution(p, p.copy())
    np.testing.assert_array_equal(same, p)
    assert same is not p


def test_verify_keeps_below_the_acceptance_and_corrects_from_it_on():
    p, q = [0.3, 0.7], [0.6, 0.4]
    kept = verify_one_token(p, q, 0, Scripted(math.nextafter(0.5, 0)))
    assert kept == SpeculativeDecision(accepted=True, token_id=0, acceptance_prob=0.5)
    corrected = verify_one_token(p, q, 0, Scripted(0.5, 0.0))
    assert corrected == SpeculativeDecision(accepted=False, token_id=1, acceptance_prob=0.5)
    assert verify_one_token(p, q, np.int64(1), Scripted(LAST_BELOW_ONE)) == (True, 1, 1.0)
    assert all(type(x) in (bool, int, float) for x in (*kept, *corrected))


def test_probability_0_is_never_accepted_and_probability_1_always():
    never = verify_one_token([0.0, 1.0], [1.0, 0.0], 0, Scripted(0.0, 0.5))
    assert never == (False, 1, 0.0)
    always = verify_one_token([0.5, 0.5], [0.5, 0.5], 0, Scripted(LAST_BELOW_ONE))
    assert always == (True, 0, 1.0)


WEIGHTS = st.one_of(
    st.sampled_from([0.0, 0.0, 1e-300, 1e-320, 1e-17, 1.0]),
    st.floats(0, 1),
    st.integers(1, 5).map(float),
)


@st.composite
def families(draw):
    """Distributions over one vocabulary: unlike, disjoint, one-hot, nearly equal."""
    size = draw(st.integers(1, 8))
    rows = st.lists(WEIGHTS, min_size=size, max_size=size).map(np.array)
    family = [draw(rows) for _ in range(4)]
    part = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    family += [family[0] * part, family[0] * ~part, family[1] * (1 + 1e-15 * np.arange(size))]
    family.append(np.eye(size)[draw(st.integers(0, size - 1))])
    return [row / row.sum() for row in family if row.sum() > 1e-200]


@settings(max_examples=100, deadline=None)
@given(families())
@example([np.array([1.0, 1e-300]), np.array([1e-300, 1.0]), np.array([1.0, 0.0])])
def test_the_emitted_token_follows_the_target(family):
    """Up to 64 pairs an example, a distribution with itself among them."""
    for p, q in itertools.product(family, repeat=2):
        np.testing.assert_allclose(speculative_output_marginal(p, q), p, rtol=0, atol=1e-15)
        # The parts keep their promises on the way.
        residual = residual_distribution(p, q)
        assert abs(residual.sum() - 1) < 1e-12
        assert (p[residual > 0] > 0).all()
        for token in range(p.size):
            acceptance = acceptance_probability(p, q, token)
            assert 0 <= acceptance <= 1
            assert (acceptance == 0) == (p[token] == 0)
            assert (acceptance == 1) == (p[token] > 0 and p[token] >= q[token])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_in_rational_arithmetic_it_is_the_target_exactly(data):
    size = data.draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 10**12) | st.just(0), min_size=size, max_size=size)
    rows = data.draw(st.lists(counts.filter(any), min_size=4, max_size=4))
    family = [[Fraction(count, sum(row)) for count in row] for row in rows]
    for p, q in itertools.product(family, repeat=2):
        marginal = speculative_output_marginal(p, q)
        assert list(marginal) == p
        assert all(isinstance(mass, Fraction) for mass in marginal)


def test_tiny_masses_keep_their_relative_size():
    p, q = np.array([0.5, 0.5, 1e-300, 3e-300]), np.array([1.0, 1e-300, 0.0, 1e-300])
    np.testing.assert_allclose(speculative_output_marginal(p, q), p, rtol=1e-14)


def test_a_wrong_residual_shows_in_the_marginal(monkeypatch):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    monkeypatch.setattr(sampling, "residual_distribution", lambda p, q: p)
    assert np.abs(speculative_output_marginal(p, q) - p).max() > 0.05


def test_a_wrong_acceptance_shows_in_the_marginal(monkeypatch):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    monkeypatch.setattr(sampling, "acceptance_probability", lambda p, q, token: p[token])
    assert np.abs(speculative_output_marginal(p, q) - p).max() > 0.05


def test_the_marginal_is_what_verify_one_token_draws():
    p, q = np.array([0.5, 0.0, 0.3, 0.2]), np.array([0.1, 0.4, 0.3, 0.2])
    rng = np.random.default_rng(6)
    emitted = [
        verify_one_token(p, q, sample_from_distribution(q, rng), rng).token_id
        for _ in range(20_000)
    ]
    counts = np.bincount(emitted, minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([0.5, 0.6], "sums to 1.1"),
        ([0.0, 0.0], "sums to 0.0, not to 1"),
        ([1.1, -0.1], "has -0.1 at token 1"),
        ([0.5, math.nan], "has nan at token 1"),
        ([math.inf, 0.0], "sums to inf"),
        ([[0.5, 0.5]], r"shape \[V\] with V >= 1, got \[1, 2\]"),
        ([], r"got \[0\]"),
        (1.0, r"got \[\]"),
    ],
)
def test_what_is_no_distribution_is_refused_everywhere(probabilities, message):
    good = [0.5, 0.5]
    with pytest.raises(ValueError, match=f"probabilities.*{message}"):
        sample_from_distribution(probabilities)
    for p, q, name in ((probabilities, good, "target_p"), (good, probabilities, "draft_q")):
        for call in (
            lambda p, q: acceptance_probability(p, q, 0),
            residual_distribution,
            lambda p, q: verify_one_token(p, q, 0),
            speculative_output_marginal,
        ):
            with pytest.raises(ValueError, match=f"{name}.*{message}"):
                call(p, q)


def test_vocabularies_must_match_and_hold_the_token():
    with pytest.raises(ValueError, match="target_p has 2 tokens and draft_q 3"):
        residual_distribution([0.5, 0.5], [0.5, 0.5, 0.0])
    for token in (-1, 2):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 2"):
            verify_one_token([0.5, 0.5], [0.5, 0.5], token)


# --- A whole draft at once ------------------------------------------------------------------------


def test_block_acceptance_by_hand():
    p = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0]]
    q = [[0.8, 0.1, 0.1], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]]
    weights, chances = block_acceptance(p, q, [0, 1, 2])
    # 5/8; 5/8 * 3 is past 1; 6 more. Behind the first, 5/8 * 0.6 - 0.2 is left at token 1 alone.
    np.testing.assert_allclose(weights, [1, 0.625, 1, 1], rtol=1e-15)
    np.testing.assert_allclose(chances, [0.175 / (0.175 + 0.375), 1, 1], rtol=1e-14)
    assert weights.dtype == chances.dtype == np.float64
    # Cut short, the draft is a draft of its own, whose last chance is its weight.
    weights, chances = block_acceptance(p[:2], q[:1], np.array([0]))
    np.testing.assert_allclose(weights, [1, 0.625])
    np.testing.assert_allclose(chances, [0.625])
    weights, chances = block_acceptance(p[:1], [], [])
    assert weights.tolist() == [1] and chances.shape == (0,)


def test_block_acceptance_where_masses_are_0():
    row, none, sure = [0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]
    # A token the target forbids ends it, whatever comes behind.
    weights, chances = block_acceptance([row, row, row], [none, row], [2, 0])
    assert weights.tolist() == [1, 0, 0] and chances.tolist() == [0, 0]
    # A token that q says it cannot have drawn is kept where p has it ...
    weights, chances = block_acceptance([row, row], [none], [0])
    assert weights.tolist() == [1, 1] and chances.tolist() == [1]
    # ... but not in neither, nor where nothing of the weight is left.
    assert block_acceptance([sure, row], [none], [1])[0].tolist() == [1, 0]
    assert block_acceptance([row, row, row], [none, none], [2, 0])[0].tolist() == [1, 0, 0]
    # Equal rows leave nothing for a correction: 0 / 0, and nothing is ever rejected.
    weights, chances = block_acceptance([row] * 4, [row] * 3, [0, 1, 0])
    assert weights.tolist() == [1] * 4 and chances.tolist() == [1] * 3


def test_block_acceptance_survives_tiny_masses():
    p, q = [1e-300, 1.0], [1.0, 1e-300]
    weights, chances = block_acceptance([p, p, p], [q, q], [0, 1])
    np.testing.assert_array_equal(weights, [1, 1e-300, 1])
    # Of the first weight q leaves nothing: 1e-300 * 1 - 1e-300.
    np.testing.assert_array_equal(chances, [0, 1])


def test_block_acceptance_is_exact_in_fractions():
    half, skew = [Fraction(1, 2)] * 2, [Fraction(1, 4), Fraction(3, 4)]
    weights, chances = block_acceptance([half] * 3, [skew] * 2, [1, 1])
    assert weights.tolist() == [1, Fraction(2, 3), Fraction(4, 9)]
    assert chances.tolist() == [Fraction(1, 5), Fraction(4, 9)]
    residual = block_residual_distribution(half, skew, Fraction(2, 3))
    assert residual.tolist() == [1, 0]
    assert all(isinstance(mass, Fraction) for mass in [*weights[1:], *chances, *residual])


def test_the_weighted_residual():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.1, 0.65])
    np.testing.assert_array_equal(block_residual_distribution(p, q, 1), residual_distribution(p, q))
    np.testing.assert_allclose(
        block_residual_distribution(p, q, 0.6), [0.05 / 0.13, 0.08 / 0.13, 0]
    )
    for weight in (0, 0.2):  # nothing is left
        np.testing.assert_array_equal(block_residual_distribution(p, q, weight), p)
    for weight in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"weight must be between 0 and 1, got {weight}"):
            block_residual_distribution(p, q, weight)


def test_a_bad_draft_is_refused():
    row = [0.5, 0.5]
    with pytest.raises(ValueError, match=r"a draft of 2 tokens needs .* got 1 and 2"):
        block_acceptance([row, row], [row], [0, 0])
    with pytest.raises(ValueError, match="token 2 is outside the vocabulary of 2"):
        block_acceptance([row, row], [row], [2])
    with pytest.raises(ValueError, match=r"target_p sums to 0\.5"):
        block_acceptance([[0.5], row], [row], [0])
    with pytest.raises(ValueError, match="target_p has 2 tokens and draft_q 1"):
        block_acceptance([row, row], [[1.0]], [0])


# --- The race -------------------------------------------------------------------------------------


def test_the_first_to_arrive_wins():
    assert exponential_race([0.5, 0.3, 0.2], [1.0, 0.5, 0.5]) == 1
    assert exponential_race([0.5, 0.25, 0.25], [1.0, 0.5, 0.5]) == 0  # a tie
    assert exponential_race([0.25, 0.25, 0.5], [0.0, 0.0, 0.0]) == 0
    fractions = [Fraction(1, 3), Fraction(2, 3)]
    assert exponential_race(fractions, [Fraction(1, 2), Fraction(1)]) == 0
    assert exponential_race(fractions, [Fraction(1, 2), Fraction(999, 1000)]) == 1
    assert type(exponential_race(np.array([1.0]), np.array([1.0]))) is int


def test_a_token_of_probability_0_never_arrives():
    assert exponential_race([0.0, 1.0, 0.0], [0.0, 50.0, 0.0]) == 1
    with np.errstate(all="raise"):
        assert exponential_race([0.0, 5e-324, 1.0], [1.0, 30.0, 40.0]) == 2


def test_what_is_no_race_is_refused():
    with pytest.raises(ValueError, match=r"probabilities sums to 1\.1"):
        exponential_race([0.5, 0.6], [1.0, 1.0])
    for times, shape in (([1.0], [1]), ([[1.0, 1.0]], [1, 2]), (1.0, [])):
        with pytest.raises(ValueError, match=r"exponentials must have shape \[2\]") as caught:
            exponential_race([0.5, 0.5], times)
        assert str(caught.value).endswith(f"got {shape}")
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"exponentials has {wrong} at token 1"):
            exponential_race([0.5, 0.5], [1.0, wrong])
