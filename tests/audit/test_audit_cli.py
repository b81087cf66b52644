"""`mtplx audit` as a shell calls it, and the page it writes."""

import json
import sys
import warnings
from html.parser import HTMLParser

import pytest
import tiny_checkpoint
from test_audit_endpoint import Server

from mtplx import __version__, kernels
from mtplx.audit.faults import FAULTS
from mtplx.audit.run import PROMPTS
from mtplx.cli import main
from mtplx.llm import LLM


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            main(["audit", *map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("audit")
    model = tiny_checkpoint.write(directory / "model")
    head = tiny_checkpoint.write_head(directory / "head")
    return ["--model", model, "--head", head, "--dtype", "float32", "--depth", "1"]


class Page(HTMLParser):
    """Checks that tags match, and collects what a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.tags, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [v for k, v in attributes if k in ("src", "href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_an_exact_engine_ends_with_0_a_line_and_a_page(run, tiny, tmp_path):
    page = tmp_path / "audit.html"
    code, out, err = run(*tiny, "--samples", 400, "--html", page)
    assert code == 0 and out.count("\n") == 1 and out.startswith("PASS: 400 texts")
    assert "bonus" in err and "position 4" in err and "passes of 1 and of 2 tokens" in err
    text = page.read_text()
    parsed = Page(text)
    assert " · ".join(PROMPTS) in text
    assert parsed.references == [] and "url(" not in text and "@import" not in text
    assert parsed.tags.count("svg") >= 3
    words = " ".join(parsed.words)
    assert out.strip() in words and "block" in words and "likeliest token" in words


@pytest.mark.slow
def test_a_planted_fault_ends_with_1_and_says_so_in_json_and_page(run, tiny, tmp_path):
    page = tmp_path / "audit.html"
    code, out, _ = run(
        *tiny, "--samples", 800, "--plant", "match-then-residual", "--json", "--html", page
    )
    answer = json.loads(out)
    assert code == 1 and answer["passed"] is False
    assert answer["verdict"].startswith("FAIL: speculation")
    assert answer["fault"] == "match-then-residual"
    assert answer["settings"] == {
        "depth": 1,
        "verifier": "token",
        "temperature": 0.8,
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "head": str(tiny[3]),
        "prompts": list(PROMPTS),
    }
    assert answer["engine"] == f"mtplx {__version__}" and answer["mtplx"] == __version__
    assert answer["texts"] == {"speculation": 800, "plain": 400}
    group = answer["groups"][0]
    assert group["distance"].keys() == {"estimate", "noise", "low", "high"}
    assert sum(group["histogram"]) == group["draws"] == 800
    assert {"sample", "group", "name", "p_value", "adjusted"} == answer["tests"][0].keys()
    assert answer["rounding"]["flips"] == 0
    assert answer["length"] == 4 and answer["alpha"] == 0.001 and answer["smallest_seen"] < 0.3
    words = " ".join(Page(page.read_text()).words)
    assert "broken on purpose" in words and FAULTS["match-then-residual"] in words


def test_faults_are_listed(run):
    code, out, _ = run("--plant", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(FAULTS)


ONE_PROMPT = ("--prompt", "Once upon a time")
"""A quarter of the work."""


def test_own_prompts_are_continued_as_they_are(run, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "encode", lambda self, *args, **how: asked.append((args, how)) or [5])
    code, out, _ = run(*tiny, "--samples", 200, "--prompt", "<b>", "--prompt", " x ", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["settings"]["prompts"] == ["<b>", " x "]
    assert asked == [(("<b>",), {"raw": True}), ((" x ",), {"raw": True})]
    assert answer["texts"] == {"speculation": 200, "plain": 100}
    assert {test["group"] for test in answer["tests"] if test["name"] == "texts"} == {
        "prompt 1",
        "prompt 2",
    }


def test_deterministic_passes_differ_in_no_bit(run, tiny):
    options = ["--depth", 0, "--samples", 100, "--deterministic", "--json"]
    code, out, _ = run(*tiny[:-2], *ONE_PROMPT, *options)
    answer = json.loads(out)
    assert code == 0 and answer["settings"]["deterministic"] is True
    assert answer["rounding"]["largest"] == 0 and answer["rounding"]["places"] > 20


@pytest.mark.slow
@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_a_quantised_trunk_is_its_own_law(run, tmp_path, bits):
    model = tiny_checkpoint.write(tmp_path / "model", width=32, inner=64)
    head = tiny_checkpoint.write_head(tmp_path / "head", width=32)
    options = ["--device", "cpu", "--depth", 2, "--samples", 200, "--quantize", bits, "--json"]
    code, out, _ = run("--model", model, "--head", head, *ONE_PROMPT, *options)
    answer = json.loads(out)
    assert code == 0 and answer["passed"] and answer["settings"]["quantize"] == bits
    assert answer["texts"]["speculation"] == 200


def test_a_page_that_cannot_be_written_costs_no_verdict(run, tiny):
    code, out, err = run(*tiny, *ONE_PROMPT, "--samples", 100, "--html", "/dev/full")
    assert code == 1 and out.startswith("PASS") and err.endswith("No space left on device\n")


def test_notes_are_told(run, tiny):
    code, _, err = run(*tiny, *ONE_PROMPT, "--samples", 100, "--top-k", 1)
    assert code == 0 and "\nnote: whole drafts were kept " in err


def test_a_name_is_no_markup(run, tmp_path):
    model = tiny_checkpoint.write(tmp_path / "[bold]" / "[")
    code, _, err = run("--model", model, *ONE_PROMPT, "--samples", 100, "--dtype", "float32")
    assert code == 0 and "[bold]/[" in "".join(err.split())


def test_transformers_generate(run, tiny):
    code, out, _ = run(
        *tiny[:2], *ONE_PROMPT, "--engine", "transformers", "--samples", 200, "--json"
    )
    answer = json.loads(out)
    assert code == 0 and answer["engine"].startswith("transformers")
    assert list(answer["texts"]) == ["plain"]


@pytest.mark.slow
def test_an_assistant(run, tiny):
    code, out, _ = run(
        *tiny[:2],
        *("--engine", "transformers", "--mode", "assistant", "--assistant", tiny[1]),
        *("--samples", 100, "--depth", 1, "--json"),
        *ONE_PROMPT,
    )
    answer = json.loads(out)
    assert code == (0 if answer["passed"] else 1)
    assert answer["settings"]["assistant"] == str(tiny[1])


def test_an_endpoint(run):
    with Server() as server:
        code, out, err = run(
            *("--engine", server.address.replace("http", "HTTP"), "--temperature", 1),
            *("--samples", 200, "--depth", 0, "--prompt", "Hé", "--prompt", "two"),
        )
    assert code == 0 and out.startswith("PASS: 200 texts") and "served" in err
    assert {body["prompt"] for body in server.bodies} == {"Hé", "two"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "vllm"], "transformers or an address"),
        (["--mode", "mtp"], "for --engine transformers"),
        (["--engine", "transformers", "--mode", "assistant"], "go together"),
        (["--engine", "transformers", "--plant", "bonus-from-q"], "own verifiers"),
        (["--plant", "bonus-from-q", "--verifier", "block"], "leave out --verifier"),
        (["--html", "no/such/place/x.html"], "there is no directory"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--samples", "0"], "--samples"),
        (["--seed", str(2**64)], "--seed"),
        (["--plant", "bad-luck"], "there are raw-logits-as-q"),
        (["--prompt", "x", "--prompt", ""], "--prompt: it is empty"),
        (["--prompt", "x", "--prompt", "x"], "--prompt: one is given twice"),
        (["--prompt", "\udcff"], "--prompt: it is not UTF-8"),
        (["--engine", "http://x", "--deterministic"], "--deterministic is for models that are lo"),
        (
            ["--engine", "http://x", "--quantize", "int8"],
            "--quantize is for models that are loaded",
        ),
        (["--engine", "http://x", "--dtype", "float32"], "--dtype is for models that are loaded"),
        (["--engine", "transformers", "--deterministic"], "--deterministic is for this engine's"),
        (["--engine", "transformers", "--head", "x"], "--head is for this engine's own texts"),
    ],
)
def test_wrong_usage_is_2_and_loads_nothing(run, monkeypatch, arguments, complaint):
    monkeypatch.setattr("mtplx.llm.load", None)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert complaint in " ".join(err.replace("│", " ").split())


def test_what_cannot_be_audited_is_one_line(run, tiny):
    code, out, err = run(*tiny, "--temperature", 0)
    assert (code, out) == (1, "")
    assert err == (
        "mtplx: at temperature 0 nothing is drawn, so there is no distribution to audit; give a "
        "temperature above 0\n"
    )


def test_progress_is_shown_on_a_terminal(run, tiny, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(*tiny, *ONE_PROMPT, "--samples", 100)
    assert code == 0
    assert "drawing, speculation" in err and "looking up the law" in err and "100/100" in err
