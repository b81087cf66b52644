"""`mtplx bench` as a shell calls it, on a tiny model."""

import json
import warnings

import pytest
import tiny_checkpoint
import torch

from mtplx.bench import prompts, suite
from mtplx.bench.prompts import Question
from mtplx.bench.run import Decoded
from mtplx.cli import bench as command
from mtplx.cli import main


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            main(["bench", *map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    model = tiny_checkpoint.write(directory / "model")
    head = tiny_checkpoint.write_head(directory / "head")
    return ["--model", model, "--head", head, "--dtype", "float32", "--max-tokens", "6"]


@pytest.fixture
def few(monkeypatch):
    """Two prompts, and a copy that takes no time."""
    asked = [Question(81, "writing", "Why?"), Question(201, "qa", "Who wrote it?")]
    monkeypatch.setattr(prompts, "questions", lambda: asked)
    monkeypatch.setattr("mtplx.bench.machine.COPIED", 2**16)


class Peer:
    name, depth, settings = "theirs:fast", None, "at its best"

    def generate(self, task):
        return Decoded(task.max_tokens, task.max_tokens - 1, task.max_tokens - 1, 0.5, 0.1)

    def cycle_bytes(self, context):
        return 1e6


@pytest.mark.slow
def test_tables_files_and_pictures(run, tiny, few, tmp_path, monkeypatch):
    given = []

    def make(names, checkpoint, threads, context, directory):
        given.append((names, threads, context, list(directory.iterdir())))
        return [Peer()]

    monkeypatch.setattr(suite.engines, "make", make)
    file, pictures = tmp_path / "bench.json", tmp_path / "new" / "plots"
    code, out, err = run(
        *tiny, "--depths", "0,2,auto", "--temperature", "0,0.6", "--temperature", "1",
        "--threads", 1, "--against", "transformers:bf16", "--json", file, "--plots", pictures,
    )  # fmt: skip
    assert code == 0, err
    assert torch.get_num_threads() >= 1
    ((names, threads, context, inside),) = given
    assert (names, threads, inside) == (["transformers:bf16"], 1, [])
    for words in ("tokens/s", "temperature 0.6", "theirs:fast: at its best", "writing", "GB/s"):
        assert words in out

    found = json.loads(file.read_text())
    assert set(found) == {"machine", "settings", "engines", "runs", "rows", "splits"}
    machine = found["machine"]
    assert machine["threads"] == 1 and machine["copy_bandwidth"] > 0 and machine["memory"] > 0
    assert {"python", "torch", "mtplx", "transformers"} <= set(machine["versions"])
    # 2 prompts, 3 temperatures, 2 depths, auto and a peer.
    runs = found["runs"]
    assert len(runs) == 24
    assert context == max(run["prompt_tokens"] for run in runs) + 6
    keys = {(r["engine"], r["depth"], r["temperature"], r["prompt"]) for r in runs}
    assert len(keys) == 24 and ("mtplx", 2, 0.6, 201) in keys
    assert ("mtplx, auto", None, 0.6, 81) in keys
    assert ("theirs:fast", None, 1.0, 81) in keys
    for r in runs:
        assert r["tokens"] <= 6 and r["tokens_per_second"] > 0 and r["share_of_limit"] > 0
        assert r["category"] == {81: "writing", 201: "qa"}[r["prompt"]]
    # All, and each of two categories.
    assert len(found["rows"]) == 3 * 12
    assert found["rows"][0]["ratio"]["median"] == 1
    assert [split["depth"] for split in found["splits"]] == [0, 2]
    for name in ("tokens_per_second", "acceptance", "cycle_time"):
        assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_drafted_has_no_acceptance_to_draw(run, tiny, few, tmp_path):
    code, out, _ = run(*tiny[:2], *tiny[4:], "--depths", "0", "--plots", tmp_path)
    assert code == 0 and "theirs" not in out
    assert {p.name for p in tmp_path.iterdir()} == {"tokens_per_second.png", "cycle_time.png"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--depths", "0,x"], "--depths: 'x' is neither a number from 0 up nor auto"),
        (["--depths", ""], "--depths: '' is neither"),
        (["--depths", "0,-1"], "--depths: '-1' is neither"),
        (["--depths", "1,1"], "--depths: one is given twice"),
        (["--temperature", "0.5;1"], "--temperature takes numbers with commas"),
        (["--temperature", "nan"], "--temperature: "),
        (["--temperature", "-1"], "--temperature: "),
        (["--temperature", "1", "--temperature", "1.0"], "--temperature: one is given twice"),
        (["--top-p", "2"], "top_p"),
        (["--against", "vllm"], "no engine 'vllm'; there are llama.cpp, transformers"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(run, arguments, problem, monkeypatch):
    monkeypatch.setattr(suite, "bench", None)
    monkeypatch.setenv("COLUMNS", "200")
    code, _, err = run(*arguments)
    assert code == 2 and problem in " ".join(err.replace("│", " ").split())


def test_what_cannot_be_written_is_told_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "bench", None)
    nowhere = tmp_path / "none" / "bench.json"
    code, _, err = run("--json", nowhere)
    assert code == 1 and err.startswith("mtplx: ") and str(nowhere) in err
    blocked = tmp_path / "file"
    blocked.write_text("kept")
    code, _, err = run("--plots", blocked / "plots")
    assert code == 1 and err.count("\n") == 1 and "file" in err
    monkeypatch.setattr(command, "find_spec", lambda module: None)
    code, _, err = run("--plots", tmp_path)
    assert (code, err) == (1, "mtplx: --plots needs matplotlib: pip install matplotlib\n")
    assert blocked.read_text() == "kept"


def test_what_is_missing_is_told_in_a_line(run, tiny, few, monkeypatch):
    model = tiny[:2]
    code, _, err = run(*model, "--depths", "0,1")
    assert code == 1 and "has no MTP head to draft with: give --depths 0" in err
    code, _, err = run(*model, "--against", "llama.cpp")
    assert code == 1 and "llama.cpp reads GGUF files" in err
    monkeypatch.setattr(suite.peers, "find_spec", lambda module: None)
    code, _, err = run(*model, "--against", "transformers")
    assert code == 1 and err.count("\n") == 1 and "needs transformers: pip install" in err
    code, _, err = run(*model, "--depths", "0", "--max-tokens", "600")
    assert code == 1 and "no prompt leaves room" in err


def test_other_drafters_are_measured_too(run, tiny, few, tmp_path):
    file = tmp_path / "bench.json"
    code, _, err = run(
        *tiny[:2], "--depths", "0,1", "--drafter", "ngram", "--threads", 1, "--json", file
    )
    assert code == 0, err
    assert json.loads(file.read_text())["settings"]["drafter"] == "ngram"
