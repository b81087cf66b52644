"""The examples run, and say what they promise."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "promise"),
    [("basic.py", "tokens per cycle:"), ("chat.py", "> Which"), ("batch.py", "(seed 9, ")],
)
def test_examples_with_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    promise: str,
) -> None:
    tiny_checkpoint.write(tmp_path)
    run(monkeypatch, name, "--model", str(tmp_path), "--max-tokens", "6")
    assert promise in capsys.readouterr().out


@pytest.mark.slow
def test_the_reference_agrees_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "reference_sampling.py")
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:19].strip(): line[19:].strip().strip("[]").split() for line in lines}
    target, theory, counted = (
        np.array(rows[name], dtype=float)
        for name in ("target p", "emitted, in theory", "emitted, counted")
    )
    assert np.array_equal(theory, target)
    assert np.abs(counted - target).max() < 0.03


def test_every_example_is_run_here() -> None:
    tree = ast.parse(Path(__file__).read_text())
    mentioned = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {file.name for file in EXAMPLES.glob("*.py")} <= mentioned
