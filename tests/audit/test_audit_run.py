"""Audits of tiny models: the right rules pass, the wrong ones do not."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from mtplx.audit import engines, report, run, statistics
from mtplx.audit.analysis import PLAIN, SPECULATION, by_prompt, impossible, pooled
from mtplx.audit.engines import OwnEngine, TransformersEngine
from mtplx.audit.faults import FAULTS, planted
from mtplx.audit.law import Text, spot
from mtplx.engine import decoding
from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig

VOCAB = 11
DEPTH = 2
PROMPTS = [(1, 2, 3), (9,)]
WARM = SamplerConfig(temperature=0.8)


def model(seed=5):
    trunk = tiny.llama(VOCAB, seed=seed, layers=1, heads=1)
    return SimpleNamespace(name="tiny", trunk=trunk, head=tiny.attached(trunk, 8))


@pytest.fixture(scope="module")
def llm():
    return model()


def measure(llm, sampling=WARM, verifier="token", fault=None, depth=DEPTH, samples=600, seed=0):
    engine = OwnEngine(llm, PROMPTS, sampling, depth, verifier, fault)
    return run.audit(
        engine,
        llm.trunk,
        PROMPTS,
        sampling,
        model=llm.name,
        depth=depth,
        samples=samples,
        seed=seed,
        fault=fault,
    )


# --- exact engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_an_exact_verifier_passes(llm, verifier):
    audit = measure(llm, verifier=verifier)
    assert audit.passed and audit.verdict.startswith("PASS: 600 texts")
    assert audit.texts == {SPECULATION: 600, PLAIN: 300}
    assert audit.tokens_per_cycle > 1
    assert audit.impossible == {SPECULATION: 0, PLAIN: 0}
    assert audit.notes == []
    names = {group.name for group in audit.groups if group.sample == SPECULATION}
    assert names >= {f"position {i}" for i in range(1, DEPTH + 4)} | {"bonus", "after 0 kept"}
    assert ("after 1 kept" in names) == (verifier != "block")
    assert 0 < audit.smallest_seen < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        SamplerConfig(temperature=1.5, top_k=6, top_p=0.9),
        SamplerConfig(repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={2: 1.0}),
    ],
)
def test_filters_and_penalties_pass(llm, sampling):
    assert measure(llm, sampling).passed


def test_without_speculation_there_is_one_sample(llm):
    audit = measure(llm, depth=0)
    assert audit.passed and list(audit.texts) == [PLAIN]
    assert audit.tokens_per_cycle is None
    assert "PASS" in audit.verdict


def test_the_same_seed_gives_the_same_audit_and_another_another(llm):
    first, again, other = (measure(llm, depth=1, samples=200, seed=s) for s in (0, 0, 1))
    assert first.tests == again.tests
    assert first.tests != other.tests


@pytest.mark.parametrize("sampling", [SamplerConfig(top_k=1), SamplerConfig(temperature=1e-3)])
def test_laws_that_are_all_but_certain_are_no_cause_for_alarm(llm, sampling):
    audit = measure(llm, sampling, samples=200)
    assert audit.passed
    # Whole drafts of a random head are hardly ever kept there, and that is said.
    assert re.fullmatch(r"whole drafts were kept \d+ times, too seldom .*", audit.notes[0])


def test_a_report_of_progress_reaches_its_end(llm):
    told = {}
    engine = OwnEngine(llm, PROMPTS, WARM, 1)
    run.audit(
        engine,
        llm.trunk,
        PROMPTS,
        WARM,
        model="tiny",
        depth=1,
        samples=200,
        progress=lambda what, done, total: told.__setitem__(what, (done, total)),
    )
    assert told["drawing, speculation"] == (200, 200)
    assert told["drawing, plain"] == (100, 100)
    assert told["looking up the law"] == (300, 300)


# --- broken ones ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(llm, fault):
    audit = measure(llm, fault=fault, samples=1500)
    assert not audit.passed
    assert (
        audit.verdict.startswith("FAIL: speculation") and "plain decoding follows" in audit.verdict
    )
    assert {test.sample for test in audit.failures} == {SPECULATION}


@pytest.mark.slow
def test_a_wrong_bonus_is_found_where_it_is(llm):
    audit = measure(llm, fault="bonus-from-q", samples=1000)
    assert audit.failures[0].group == "bonus"
    groups = {g.name: g for g in audit.groups if g.sample == SPECULATION}
    assert groups["bonus"].distance.low > groups["after 0 kept"].distance.high


@pytest.mark.slow
def test_a_faulty_verifier_without_its_fault_is_the_token_rule(llm, monkeypatch):
    """What the faults are found by is the fault, and not how they are planted."""
    monkeypatch.setitem(FAULTS, "none", "")
    for sampling in (WARM, SamplerConfig(temperature=1.3, top_k=5)):
        texts = [
            [
                text
                for portion in OwnEngine(llm, PROMPTS, sampling, 3, "token", fault).draw(
                    0, 200, 7, 1, True
                )
                for text in portion
            ]
            for fault in (None, "none")
        ]
        assert texts[0] == texts[1]


def test_the_right_verifier_is_back_afterwards(llm):
    right = decoding.verify
    with planted("residual-from-p", llm.head, VOCAB, WARM):
        assert decoding.verify is not right
    assert decoding.verify is right


@pytest.mark.parametrize(
    ("fault", "sampling", "complaint"),
    [
        ("bad-luck", WARM, "there are raw-logits-as-q"),
        ("residual-from-p", SamplerConfig(temperature=0), "temperature above 0"),
        ("ignore-temperature", SamplerConfig(), "no fault at temperature 1"),
        ("raw-logits-as-q", SamplerConfig(), "no fault at temperature 1"),
    ],
)
def test_a_fault_that_would_be_none_is_refused(llm, fault, sampling, complaint):
    with pytest.raises(MtplxError, match=complaint), planted(fault, llm.head, VOCAB, sampling):
        pass


def test_raw_logits_are_a_fault_at_temperature_1_where_a_filter_is(llm):
    with planted("raw-logits-as-q", llm.head, VOCAB, SamplerConfig(top_k=3)):
        pass


def test_numerics_that_differ_show_in_plain_decoding_too(llm):
    """The law of one trunk, the texts of another."""
    engine = OwnEngine(model(seed=6), PROMPTS, WARM, DEPTH)
    audit = run.audit(engine, llm.trunk, PROMPTS, WARM, model="tiny", depth=DEPTH, samples=300)
    assert {test.sample for test in audit.failures} == {SPECULATION, PLAIN}
    assert "plain decoding leaves it too" in audit.verdict
    assert "; rounding may be" in audit.verdict
    audit.settings["deterministic"] = True
    assert "rounding" not in audit.verdict


def test_a_filter_that_is_not_applied_is_found(llm):
    asked = SamplerConfig(temperature=0.8, top_k=4)
    engine = OwnEngine(llm, PROMPTS, WARM, DEPTH)
    audit = run.audit(engine, llm.trunk, PROMPTS, asked, model="tiny", depth=DEPTH, samples=300)
    assert audit.impossible[SPECULATION] > 20
    failed = {(test.sample, test.name) for test in audit.failures}
    assert {(SPECULATION, "impossible tokens"), (PLAIN, "impossible tokens")} <= failed


def test_texts_that_are_all_impossible_are_a_failure(llm):
    asked = SamplerConfig(temperature=0.8, top_k=1)
    engine = OwnEngine(llm, PROMPTS, SamplerConfig(temperature=50.0), DEPTH)
    audit = run.audit(engine, llm.trunk, PROMPTS, asked, model="tiny", depth=DEPTH, samples=200)
    assert audit.failures[0].name == "impossible tokens"
    for groups in (audit.groups, []):
        audit.groups = groups
        json.dumps(audit.to_dict(), allow_nan=False)
        assert report.html(audit).count("<svg") >= 2
    assert audit.smallest_seen == 1


def test_rare_impossible_draws_are_rounding_unless_only_speculation_has_them():
    def texts(count, wrong):
        fine, bad = (spot(np.array([0.0, 1.0]), token) for token in (1, 0))
        return [Text(0, (1,), (None,), [bad if i < wrong else fine]) for i in range(count)]

    counts, tests = impossible({SPECULATION: texts(9000, 9), PLAIN: texts(9000, 8)}, 0.0)
    assert counts == {SPECULATION: 9, PLAIN: 8}
    assert min(test.p_value for test in tests) > 0.1
    _, tests = impossible({SPECULATION: texts(9000, 30), PLAIN: texts(9000, 0)}, 0.0)
    assert tests[-1].name.startswith("more") and tests[-1].p_value < 1e-8
    _, tests = impossible({PLAIN: texts(900, 90)}, edge=0.03)
    assert tests[0].p_value > 0.1


# --- the rate of false alarms ---------------------------------------------------------------------


def simulated(rng, laws, count, length):
    """Texts drawn from random laws, one for each prefix, without an engine."""
    texts = []
    for _ in range(count):
        tokens, spots = (), []
        for _ in range(length):
            if tokens not in laws:
                laws[tokens] = rng.dirichlet(np.full(7, 0.4))
            p = laws[tokens]
            token = min(int((rng.random() > p.cumsum()).sum()), 6)
            spots.append(spot(p, token))
            tokens = (*tokens, token)
        # Half of all draws, chosen by the token before, as a stage.
        stages = (None, *("after 0 kept" if t % 2 else "bonus" for t in tokens[:-1]))
        texts.append(Text(0, tokens, stages, spots))
    return texts


@pytest.mark.slow
def test_draws_from_the_law_fail_as_often_as_they_may():
    rng, audits, level = np.random.default_rng(0), 60, 0.1
    failed, least = 0, []
    for _ in range(audits):
        laws = {}
        texts = simulated(rng, laws, 150, 3)

        def after(prefixes, laws=laws):
            for prefix in prefixes:
                if prefix not in laws:
                    laws[prefix] = rng.dirichlet(np.full(7, 0.4))
            return {prefix: dict(enumerate(p.tolist())) for prefix, p in laws.items()}

        _, tests = pooled(PLAIN, texts, rng)
        tests += by_prompt(PLAIN, "prompt 1", texts, after)
        adjusted = statistics.holm([test.p_value for test in tests])
        failed += min(adjusted) < level
        least += [test.p_value for test in tests]
    assert failed <= level * audits + 3 * np.sqrt(level * (1 - level) * audits)
    # Nor are single tests too eager, or asleep.
    assert np.mean(np.array(least) < 0.01) < 0.016
    assert np.mean(np.array(least) < 0.1) > 0.05


def test_groups_are_in_the_order_of_their_numbers():
    texts = simulated(np.random.default_rng(1), {}, 100, 12)
    for text in texts:
        text.stages = tuple(f"after {i} kept" for i in (2, 10)) + text.stages[2:]
    groups, _ = pooled(PLAIN, texts, np.random.default_rng(2))
    stages = [f"after {i} kept" for i in (0, 2, 10)]
    names = [*(f"position {i}" for i in range(1, 13)), *stages, "bonus", "all draws"]
    assert [group.name for group in groups] == names


def test_of_too_few_draws_nothing_is_said():
    texts = simulated(np.random.default_rng(1), {}, 49, 2)
    groups, tests = pooled(PLAIN, texts, np.random.default_rng(2))
    assert groups == [] and tests == []


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_audited_is_said(llm):
    with pytest.raises(MtplxError, match=r"of 2 prompts are too few .*; draw 200 or more"):
        measure(llm, samples=199)
    with pytest.raises(MtplxError, match="temperature 0 nothing is drawn"):
        measure(llm, SamplerConfig(temperature=0))
    with pytest.raises(MtplxError, match="no MTP head"):
        OwnEngine(SimpleNamespace(name="x", head=None), PROMPTS, WARM, 1)
    with pytest.raises(MtplxError, match="and no fault"):
        OwnEngine(SimpleNamespace(name="x", head=None), PROMPTS, WARM, 0, "token", "bonus-from-q")
    with pytest.raises(MtplxError, match="give a depth"):
        OwnEngine(llm, PROMPTS, WARM, 0, "token", "bonus-from-q")
    with pytest.raises(MtplxError, match="faults of the verifier `token`"):
        OwnEngine(llm, PROMPTS, WARM, 1, "block", "bonus-from-q")


def test_a_prompt_must_leave_room(llm):
    for length, fits in ((508, True), (509, False)):
        prompts = [(1,), (1,) * length]
        engine = Silent(prompts)
        with pytest.raises(Silence if fits else MtplxError) as said:
            run.audit(engine, llm.trunk, prompts, WARM, model="x", depth=1, samples=200)
    assert str(said.value).startswith("prompt 2 has 509 tokens; with 4 more it does not fit")


class Silence(Exception):
    pass


class Silent:
    """An engine that is not to be asked."""

    speculates = False

    def __init__(self, prompts):
        self.prompts = prompts

    def draw(self, *args):
        raise Silence


# --- transformers ---------------------------------------------------------------------------------


def generated(llm, mode, sampling=WARM, samples=100, assistant=None):
    prompts = PROMPTS[:1]
    engine = TransformersEngine(llm, prompts, sampling, 1, mode, assistant)
    return run.audit(engine, llm.trunk, prompts, sampling, model="tiny", depth=1, samples=samples)


def test_plain_generate_passes(llm):
    audit = generated(llm, "plain", SamplerConfig(temperature=0.8, top_k=6, min_p=0.02), 600)
    assert audit.passed and list(audit.texts) == [PLAIN]
    assert audit.engine.startswith("transformers 5")


def test_generate_heeds_nothing_of_the_models_own_configuration(llm):
    configuration = llm.trunk.model.generation_config
    configuration.repetition_penalty = 3.0
    try:
        assert generated(llm, "plain", samples=600).passed
        assert llm.trunk.model.generation_config is configuration
    finally:
        configuration.repetition_penalty = None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prompt-lookup", "assistant"])
def test_assisted_modes_are_drawn_one_text_at_a_time(llm, mode, monkeypatch):
    calls = []
    original = TransformersEngine._generate

    def counted(self, ids, count, length, mode):
        calls.append((mode, count))
        return original(self, ids, count, length, mode)

    monkeypatch.setattr(TransformersEngine, "_generate", counted)
    assistant = model(seed=9).trunk.model if mode == "assistant" else None
    audit = generated(llm, mode, assistant=assistant)
    assert audit.texts == {SPECULATION: 100, PLAIN: 50}
    assert calls == [(mode, 1)] * 100 + [("plain", 50)]


def test_a_mode_that_a_model_has_not_is_said(llm):
    with pytest.raises(MtplxError, match="cannot do this in mode mtp"):
        generated(llm, "mtp")
    with pytest.raises(MtplxError, match="needs an assistant"):
        generated(llm, "assistant")
    with pytest.raises(MtplxError, match="leave out the other settings"):
        generated(llm, "plain", SamplerConfig(presence_penalty=1))


def test_seeds_of_neighbouring_audits_do_not_overlap():
    assert not set(engines._seeds(0, 1000)) & set(engines._seeds(1, 1000))
    assert len(set(engines._seeds(0, 1000))) == 1000


def test_texts_of_an_engine_do_not_end_at_an_end_token(llm):
    torch.manual_seed(0)
    for engine in (
        OwnEngine(llm, PROMPTS, WARM, DEPTH),
        TransformersEngine(llm, PROMPTS, WARM, DEPTH),
    ):
        for portion in engine.draw(1, 50, 5, 0, engine.speculates):
            assert {len(text.tokens) for text in portion} == {5}
