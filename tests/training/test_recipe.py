"""`mtplx train` from nothing to a head that loads: the trunk writes, the head learns."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tiny
import tiny_checkpoint
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import mtplx
from mtplx import kernels
from mtplx.cli.commands import app
from mtplx.errors import MtplxError
from mtplx.models.eagle3 import save_head
from mtplx.models.linear import hand_over
from mtplx.training import loss, openings, recipe
from mtplx.training.recipe import train_head
from mtplx.training.selfplay import Author
from mtplx.training.text import Conversations
from mtplx.training.trainer import TrainConfig


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "_fused", lambda function: function)
    return tiny_checkpoint.write(tmp_path / "model")


@pytest.fixture
def author(model, monkeypatch):
    monkeypatch.setattr("mtplx.training.selfplay.ANSWER_TOKENS", 12)
    monkeypatch.setattr("mtplx.training.selfplay.QUESTION_TOKENS", 8)
    monkeypatch.setattr("mtplx.training.selfplay.DOCUMENT_TOKENS", 40)
    monkeypatch.setattr("mtplx.training.selfplay.EXCERPT_TOKENS", (100, 200))
    llm = mtplx.load(model, dtype="float32", device="cpu")
    return Author(llm.trunk, llm.tokenizer, frozenset(llm.defaults.eos_token_ids), random.Random(0))


def silent(what: str, done: int, total: int) -> None:
    pass


def test_the_trunk_writes_conversations_in_its_template(author):
    text = author.write(12, silent)
    assert len(text) == 12
    questions = []
    for start, length, prompt in zip(text.starts, text.lengths, text.prompt_lengths, strict=True):
        ids = text.tokens[start : start + length]
        # All behind the user's header is the trunk's own, and learnt from.
        assert author.tokenizer.decode(ids[:prompt]) == "<|user|>"
        question, answer = author.tokenizer.decode(ids[prompt:]).split("<|end|><|assistant|>")
        questions.append(question)
        # An answer ends at the end token or at the budget, and holds no other.
        written = author.tokenizer(answer, add_special_tokens=False)["input_ids"]
        ends = author.tokenizer.eos_token_id
        assert ends not in written[:-1]
        assert ids[-1] == ends or "<|end|>" not in answer
    # The last quarter are tasks about documents.
    assert sum(len(q) for q in questions[-3:]) / 3 > sum(len(q) for q in questions[:6]) / 6


def test_openings_are_whole_and_end_in_no_space():
    # Behind a lone space a model writes little but digits.
    rng = random.Random(0)
    for begin in (openings.request, openings.document):
        begun = {begin(rng) for _ in range(2000)}
        assert len(begun) > 100
        assert all(b and b == b.strip() and not set(b) & set("{}_") for b in begun)
    assert all("{document}" in task for task in openings.TASKS)


@pytest.mark.slow
def test_any_number_can_be_written(author):
    for count in (1, 2, 5):
        assert len(author.write(count, silent)) == count


def test_documents_leave_room_for_an_answer_in_the_context(author, monkeypatch):
    monkeypatch.setattr("mtplx.training.selfplay.EXCERPT_TOKENS", (5000,))
    task = author._prompt(author._task(["a longer text {with} braces"], ["why?"]))
    # As long as can be, and no longer; a character cut in two may cost a token or so.
    assert author.trunk.context - 12 - 4 <= len(task) <= author.trunk.context - 12


def test_where_no_document_can_be_had_a_question_is_asked(author):
    author.trunk.context = 14
    assert author._task(["some text"], ["why?"]) == "why?"


def test_a_model_that_answers_nothing_still_ends(author, monkeypatch):
    monkeypatch.setattr(Author, "_decoded", lambda self, ids: "")
    assert len(author.write(8, silent)) == 8


def test_a_context_too_short_to_write_in_is_said(tmp_path):
    small = tiny_checkpoint.write(tmp_path / "small", context=100)
    llm = mtplx.load(small, dtype="float32", device="cpu")
    with pytest.raises(MtplxError, match="context of 100 tokens is too short"):
        Author(llm.trunk, llm.tokenizer, frozenset(), random.Random(0))


def test_a_model_without_a_template_cannot_write(tmp_path):
    bare = tiny_checkpoint.write(tmp_path / "bare", template=None)
    llm = mtplx.load(bare, dtype="float32", device="cpu")
    with pytest.raises(MtplxError, match="no chat template"):
        Author(llm.trunk, llm.tokenizer, frozenset(), random.Random(0))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("mtplx.training.selfplay.ANSWER_TOKENS", 10)
    monkeypatch.setattr("mtplx.training.selfplay.QUESTION_TOKENS", 4)
    monkeypatch.setattr("mtplx.training.selfplay.DOCUMENT_TOKENS", 20)
    monkeypatch.setattr("mtplx.training.selfplay.EXCERPT_TOKENS", (20,))


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


SETTINGS = ("--draft-vocab", 200, "--width", 16, "--rows", 64)


@pytest.mark.slow
def test_train_makes_a_head_that_drafts(model, tmp_path, short):
    out = tmp_path / "run"
    arguments = ["train", out, "--model", model, "--write", 48, "--epochs", 1, *SETTINGS, "--json"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["head"] == str(out / "head")
    assert all(0 < a <= 1 for h in summary["held_out"] for a in h["acceptance_by_position"])
    report = json.loads((out / "head" / "report.json").read_text())
    assert report["conversations"] == 48
    assert report["steps"] > 0
    # Its own name, not the path it lay at.
    assert report["model"] == "model"
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "model"
    card = (out / "head" / "README.md").read_text()
    assert card.startswith("# EAGLE-3 head for model\n")
    assert "48 conversations" in card
    for held_out in report["held_out"]:
        row = next(line for line in card.splitlines() if f"| {held_out['sampler']} |" in line)
        shown = [float(cell) for cell in row.split("|")[2:-1]]
        wanted = [*held_out["acceptance_by_position"], held_out["expected_tokens_per_cycle"]]
        assert shown == pytest.approx(wanted, abs=0.006)
    assert str(tmp_path) not in card
    assert (out / "head" / "training.png").read_bytes().startswith(b"\x89PNG")

    llm = mtplx.load(model, head=out / "head", device="cpu")
    answer = llm.generate("Hello", max_tokens=20, depth=2)
    assert sum(answer.stats.drafted_by_position) > 0

    # A finished run is not written over by accident, and can be gone on with.
    again = run(*arguments)
    assert again.exit_code == 1
    assert "--resume" in again.stderr
    longer = run("train", out, "--model", model, "--epochs", 1.2, *SETTINGS, "--resume")
    assert longer.exit_code == 0, longer.output
    assert json.loads((out / "head" / "report.json").read_text())["steps"] > report["steps"]


@pytest.mark.slow
def test_a_head_is_gone_on_from(model, tmp_path, short):
    first = tmp_path / "first"
    shape = [*SETTINGS, "--taps", "0,1,2"]
    made = run("train", first, "--model", model, "--write", 48, "--epochs", 6, *shape, "--json")
    assert made.exit_code == 0, made.output
    text = first / "text.npz"
    again = ["train", tmp_path / "second", "--model", model, "--text", text]
    # Next to no training: what it begins as is what was given, in shape and in what it knows.
    result = run(*again, "--from", first / "head", "--epochs", 0.01, "--rows", 64, "--json")
    assert result.exit_code == 0, result.output
    before, after = (
        json.loads((tmp_path / which / "head" / "report.json").read_text())
        for which in ("first", "second")
    )
    for old, new in zip(before["held_out"], after["held_out"], strict=True):
        assert new["acceptance_by_position"] == pytest.approx(
            old["acceptance_by_position"], rel=0.02
        )
    assert after["config"]["draft_vocab_size"] == 200
    assert after["config"]["taps"] == [0, 1, 2]
    assert after["config"]["acceptance_from"] == 0
    assert after["begun_from_a_head"] and not before["begun_from_a_head"]
    # A run begun from a head goes on with that head.
    other = run(*again[:4], "--resume", "--epochs", 1)
    assert other.exit_code == 1
    assert "another --" in other.stderr
    save_head(tiny.eagle3(tiny.llama(tiny_checkpoint.VOCAB_SIZE, width=32)), tmp_path / "wide")
    misfit = run(
        *["train", tmp_path / "d", "--model", model, "--write", 48, "--from", tmp_path / "wide"]
    )
    assert misfit.exit_code == 1
    assert "hidden size" in misfit.stderr
    assert not (tmp_path / "d").exists()


class Stop(Exception):
    pass


def begin(model, out, *, write=48, text=(), resume=False, stop_at=None, **changes):
    """The recipe itself, stopped where a stage first reports."""

    def report(what, done, total):
        stages.append(what)
        if what == stop_at and done:
            raise Stop

    stages: list[str] = []
    shape = {"draft_vocab_size": 200, "intermediate_size": 16, "rows": 64, "taps": (0, 1, 2)}
    config = TrainConfig(**shape | {"epochs": 0.2} | changes)
    llm = mtplx.load(model, device="cpu")
    if stop_at:
        with pytest.raises(Stop):
            train_head(llm, out, config, write=write, text=text, resume=resume, report=report)
    else:
        train_head(llm, out, config, write=write, text=text, resume=resume, report=report)
    return stages


@pytest.mark.slow
def test_a_run_goes_on_from_every_stage(model, tmp_path, short, monkeypatch):
    monkeypatch.setattr(recipe, "ROUND", 16)
    begin(model, tmp_path / "whole")
    whole = Conversations.load(tmp_path / "whole" / "text.npz")
    out = tmp_path / "run"

    saved = []
    join = Conversations.join

    def join_twice(parts):
        if len(parts) == 3:
            raise Stop
        saved.append(sum(len(part) for part in parts))
        return join(parts)

    # Stopped in writing, after two rounds of three.
    monkeypatch.setattr(Conversations, "join", join_twice)
    with pytest.raises(Stop):
        begin(model, out)
    monkeypatch.setattr(Conversations, "join", join)
    assert saved == [16, 32]
    assert len(Conversations.load(out / "written.npz")) == 32
    with pytest.raises(MtplxError, match=r"holds a run already.*--resume"):
        begin(model, out)
    with pytest.raises(MtplxError, match=r"another --write \(48\)"):
        begin(model, out, write=60, resume=True)

    begin(model, out, resume=True, stop_at="trunk states")
    # The same text as without the stop.
    assert Conversations.load(out / "text.npz").hash() == whole.hash()
    assert not (out / "written.npz").exists()
    with pytest.raises(MtplxError, match="holds a run already"):
        begin(model, out)
    # From here on the text is there and need not be asked for.
    assert "text" not in begin(model, out, write=0, resume=True)
    assert (out / "head" / "README.md").exists()


def test_another_run_is_not_resumed(model, tmp_path, short):
    out = tmp_path / "run"
    begin(model, out, stop_at="trunk states")
    other = tiny_checkpoint.write(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    # A fine-tune: all but one matrix is the same.
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] = weights[name] + 0.1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MtplxError, match="another model"):
        begin(other, out, write=0, resume=True)
    for name, change in {
        r"--width \(16\)": {"intermediate_size": 24},
        r"--draft-vocab \(200\)": {"draft_vocab_size": 100},
        r"--taps \(\[0, 1, 2\]\)": {"taps": (0, 1, 1)},
        r"--write \(48\)": {"write": 50},
        "--text": {"text": [out / "text.npz"]},
    }.items():
        with pytest.raises(MtplxError, match=f"another {name}"):
            begin(model, out, resume=True, **{"write": 0} | change)


def test_nothing_to_resume_is_said_before_the_model_is_loaded(tmp_path):
    result = run("train", tmp_path / "none", "--model", tmp_path / "no-model", "--resume")
    assert result.exit_code == 1
    assert "nothing to resume" in result.stderr
    assert not (tmp_path / "none").exists()


def test_too_little_text_is_said_before_it_is_written(model, tmp_path, short, monkeypatch):
    monkeypatch.setattr(Author, "write", lambda *_: pytest.fail("wrote"))
    result = run("train", tmp_path / "a", "--model", model, "--write", 1)
    assert result.exit_code == 1
    assert "at least 41 conversations" in result.stderr
    assert not (tmp_path / "a").exists()


def test_text_longer_than_the_context_is_refused(model, tmp_path):
    lengths = np.full(41, 600, np.int32)
    text = Conversations(np.zeros(41 * 600, np.int32), lengths, lengths // 2)
    text.save(tmp_path / "t.npz")
    with pytest.raises(MtplxError, match=r"600 tokens, more than .* 512"):
        begin(model, tmp_path / "run", write=0, text=[tmp_path / "t.npz"])


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
def test_a_quantised_trunk_is_refused(model, tmp_path):
    llm = mtplx.load(model, dtype="float32", device="cpu")
    output = llm.trunk.model.lm_head
    hand_over(llm.trunk.model, "lm_head", kernels.find(), output.weight, output.bias)
    with pytest.raises(MtplxError, match="trunk's own weights: load the model without quantize"):
        train_head(llm, tmp_path / "run", TrainConfig(), write=48)


def test_wrong_usage_is_one_line(model, tmp_path, short):
    nothing = run("train", tmp_path / "a", "--model", model)
    assert nothing.exit_code == 1
    assert "--write N" in nothing.stderr
    assert len(nothing.stderr.strip().splitlines()) == 1
    taps = run("train", tmp_path / "b", "--model", model, "--taps", "1,2")
    assert taps.exit_code == 2
    beyond = run("train", tmp_path / "c", "--model", model, "--write", 40, "--taps", "0,1,9")
    assert beyond.exit_code == 1
    assert "2 layers" in beyond.stderr
    (tmp_path / "t.npz").write_bytes(b"nonsense")
    damaged = run("train", tmp_path / "d", "--model", model, "--text", tmp_path / "t.npz")
    assert damaged.exit_code == 1
    assert "not training text" in damaged.stderr
