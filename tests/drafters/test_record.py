"""A head whose drafts come to nothing is given up, once and with a word."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import tiny_checkpoint
import torch

import mtplx
from mtplx.cli import commands
from mtplx.drafters.record import ENOUGH, Record
from mtplx.errors import MtplxWarning
from mtplx.sampling import SamplerConfig

GREEDY = SamplerConfig(temperature=0.0)
ONCE = SamplerConfig(temperature=0.05)
PROMPT = [1, 2, 3]


@pytest.fixture
def random_heads_are_kept():
    """Not here."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    model, head = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("head")
    return tiny_checkpoint.write(model), tiny_checkpoint.write_head(head)


@pytest.fixture
def llm(directories):
    return endless(directories, "float32")


def endless(directories, dtype):
    llm = mtplx.load(directories[0], head=directories[1], dtype=dtype)
    # Texts as long as asked for.
    llm.defaults = dataclasses.replace(llm.defaults, eos_token_ids=())
    return llm


def die(llm, monkeypatch):
    """Have its head draft a token that the model does not write."""
    written = llm.generate(PROMPT, max_tokens=400, sampling=GREEDY, depth=0).token_ids
    never = next(i for i in range(50, 200) if i not in written)

    def logits(hidden, layer=0):
        scores = torch.zeros(len(hidden), len(llm.head.draft_ids))
        scores[:, llm.head.draft_ids.tolist().index(never)] = 99.0
        return scores

    monkeypatch.setattr(llm.head, "logits", logits)
    llm.forget()
    return written


def test_a_dead_head_is_given_up_and_said_so_once(llm, monkeypatch):
    die(llm, monkeypatch)
    with pytest.warns(MtplxWarning, match=f"of {ENOUGH} drafts, 0 had a token kept") as caught:
        long = llm.generate(PROMPT, max_tokens=400, sampling=ONCE, depth=2)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    # In the middle of a text.
    assert sum(long.stats.drafted_by_position[:1]) == ENOUGH < len(long.token_ids)
    assert llm.notes[-1].startswith("nothing is drafted any more")
    # From then on the head is not even fed.
    monkeypatch.setattr(llm.head, "step", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = llm.generate(PROMPT, max_tokens=50, sampling=ONCE, depth=2)
    assert sum(again.stats.drafted_by_position) == 0 and len(again.token_ids) == 50


AGAIN = {
    "greedy": (GREEDY, "token"),
    "block": (SamplerConfig(seed=4), "block"),
    "coupled": (SamplerConfig(seed=4), "coupled"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling, verifier", AGAIN.values(), ids=AGAIN)
def test_a_text_that_is_wanted_again_comes_again(
    directories, monkeypatch, sampling, verifier, dtype
):
    """Rounding tells passes of one token from passes of three."""
    llm = endless(directories, dtype)
    die(llm, monkeypatch)
    settings = {"max_tokens": 60, "sampling": sampling, "depth": 2, "verifier": verifier}
    before = llm.generate(PROMPT, **settings)
    with pytest.warns(MtplxWarning):
        llm.generate(PROMPT, max_tokens=400, sampling=ONCE, depth=2)
    after = llm.generate(PROMPT, **settings)
    assert after.token_ids == before.token_ids
    assert after.stats.drafted_by_position == before.stats.drafted_by_position


@pytest.mark.slow
def test_a_warning_that_is_an_error_leaves_no_cycle_half_done(llm, monkeypatch):
    die(llm, monkeypatch)
    requests = [llm._request(PROMPT, 300, 2, ONCE, None, False, (), None, None, i) for i in (0, 1)]
    batch = llm._batch(requests)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MtplxWarning)
        with pytest.raises(MtplxWarning):
            for _ in batch.run():
                pass
    for slot in batch.slots:
        assert slot.length == len(PROMPT) - 1 + len(slot.output)


def test_a_living_head_is_kept():
    said = []
    record = Record(said.append)
    for i in range(5 * ENOUGH):
        record.count(i % 33 == 0)
    assert not record.given_up and not said
    for _ in range(20 * ENOUGH):
        record.count(False)
    assert record.given_up and not said
    record.tell()
    record.tell()
    assert len(said) == 1


@pytest.mark.slow
def test_lookups_are_not_given_up(directories):
    llm = mtplx.load(directories[0], drafter="ngram", dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(8):
            llm.generate(PROMPT, max_tokens=200, sampling=SamplerConfig(seed=seed), depth=1)
    assert not any("any more" in note for note in llm.notes)


def test_the_command_line_prints_it_as_a_note(capsys, monkeypatch):
    monkeypatch.setattr(
        commands, "app", lambda **_: warnings.warn(MtplxWarning("so"), stacklevel=1)
    )
    with warnings.catch_warnings():
        shown = warnings.showwarning
        commands.main([])
        warnings.showwarning = shown
    assert capsys.readouterr().err == "note: so\n"
