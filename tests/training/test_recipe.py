"""`mtplx train` from nothing to a head that loads: the trunk writes, the head learns."""

from __future__ import annotations

import json
import random

import pytest
import tiny_checkpoint
from typer.testing import CliRunner

import mtplx
from mtplx.cli.commands import app
from mtplx.errors import MtplxError
from mtplx.training import loss
from mtplx.training.selfplay import Author
from mtplx.training.text import Conversations


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "_fused", lambda function: function)
    return tiny_checkpoint.write(tmp_path / "model")


@pytest.fixture
def author(model, monkeypatch):
    monkeypatch.setattr("mtplx.training.selfplay.ANSWER_TOKENS", 12)
    monkeypatch.setattr("mtplx.training.selfplay.QUESTION_TOKENS", 8)
    monkeypatch.setattr("mtplx.training.selfplay.DOCUMENT_TOKENS", (20, 40))
    llm = mtplx.load(model, dtype="float32", device="cpu")
    return Author(llm.trunk, llm.tokenizer, frozenset(llm.defaults.eos_token_ids), random.Random(0))


def silent(what: str, done: int, total: int) -> None:
    pass


def test_the_trunk_writes_conversations_in_its_template(author):
    text = author.write(12, silent)
    assert len(text) == 12
    decoded = []
    for start, length, prompt in zip(text.starts, text.lengths, text.prompt_lengths, strict=True):
        ids = text.tokens[start : start + length]
        question = author.tokenizer.decode(ids[:prompt])
        assert question.startswith("<|user|>")
        assert question.endswith("<|end|><|assistant|>")
        # An answer ends at the end token or at the budget, and holds no other.
        answer = ids[prompt:].tolist()
        ends = author.tokenizer.eos_token_id
        assert ends not in answer[:-1]
        assert answer[-1] == ends or len(answer) == 12
        decoded.append(question)
    # The last quarter are tasks about documents made of earlier answers.
    assert sum(len(q) for q in decoded[-3:]) / 3 > sum(len(q) for q in decoded[:6]) / 6
    assert Conversations(text.tokens, text.lengths, text.prompt_lengths) == text


def test_a_model_without_a_template_cannot_write(tmp_path):
    bare = tiny_checkpoint.write(tmp_path / "bare", template=None)
    llm = mtplx.load(bare, dtype="float32", device="cpu")
    with pytest.raises(MtplxError, match="no chat template"):
        Author(llm.trunk, llm.tokenizer, frozenset(), random.Random(0))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("mtplx.training.selfplay.ANSWER_TOKENS", 10)
    monkeypatch.setattr("mtplx.training.selfplay.QUESTION_TOKENS", 4)
    monkeypatch.setattr("mtplx.training.selfplay.DOCUMENT_TOKENS", (20,))


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_train_makes_a_head_that_drafts(model, tmp_path, short):
    out = tmp_path / "run"
    settings = ["--draft-vocab", 200, "--width", 16, "--rows", 64, "--dtype", "bfloat16"]
    arguments = ["train", out, "--model", model, "--write", 48, "--epochs", 1, *settings, "--json"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["head"] == str(out / "head")
    assert all(0 < a <= 1 for h in summary["held_out"] for a in h["acceptance_by_position"])
    report = json.loads((out / "head" / "report.json").read_text())
    assert report["conversations"] == 48
    assert report["steps"] > 0
    assert (out / "head" / "training.png").read_bytes().startswith(b"\x89PNG")

    llm = mtplx.load(model, head=out / "head", device="cpu")
    answer = llm.generate("Hello", max_tokens=20, depth=2)
    assert sum(answer.stats.drafted_by_position) > 0

    # A finished run is not written over by accident, and can be gone on with.
    again = run(*arguments)
    assert again.exit_code == 1
    assert "--resume" in again.stderr
    longer = run(*arguments, "--resume")
    assert longer.exit_code == 0, longer.output


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
