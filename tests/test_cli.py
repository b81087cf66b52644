"""The command line, called as a shell would call it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import tiny_checkpoint
import tiny_native
import torch

import mtplx
from mtplx import kernels
from mtplx.cli import main, options
from mtplx.cli.chat import Conversation
from mtplx.cli.inspect import mtp_words, quantity, status_rows
from mtplx.inspection import Mtp
from mtplx.llm import DEFAULT_MODEL, DTYPES, LLM, Depth, Piece

COMMAND = [sys.executable, "-c", "from mtplx.cli import main; main()"]
SUBPROCESS = {"env": os.environ | {"PYTHONPATH": str(Path(mtplx.__file__).parent.parent)}}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `mtplx` with these arguments, in this process; stdin is bytes."""

    def call(*arguments: object, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        code = end.value.code
        assert isinstance(code, int)
        return Ended(code, out, err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write_head(tmp_path_factory.mktemp("cli") / "head")


@pytest.fixture
def tiny(model: Path, head: Path) -> list[object]:
    return ["--model", model, "--head", head, "--dtype", "float32"]


# --- the program -----------------------------------------------------------------------------


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"mtplx {mtplx.__version__}\n", "")


def test_help_names_the_commands(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("generate", "chat", "inspect", "train"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["frobnicate"], "frobnicate"),
        (["generate", "hi", "--frobnicate"], "--frobnicate"),
        (["generate", "hi", "--depth", "-1"], "'-1' is neither a number from 0 up nor auto"),
        (["generate", "hi", "--depth", "deep"], "'deep' is neither a number from 0 up nor auto"),
        (["chat", "--depth", "9" * 5000], "is neither a number from 0 up nor auto"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "hi", "--dtype", "int8"], "--dtype"),
        (["generate", "hi", "--temperature", "hot"], "--temperature"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be 0 (greedy) or more"),
        (["generate", "hi", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "hi", "--top-p", "1.5"], "top_p must be between 0 and 1"),
        (["generate", "hi", "--seed", "-1"], "seed must be between"),
        (["generate", "hi", "--typical-p", "0"], "typical_p must be above 0"),
        (["generate", "hi", "--no-repeat-ngram", "-1"], "no_repeat_ngram must be 0 (off) or more"),
        (["generate", "hi", "--min-tokens", "-1"], "min_tokens must be 0 (off) or more"),
        (["generate", "hi", "--logprobs", "-1"], "--logprobs"),
        (["generate", "hi", "--regex", "a\\"], "the regex ends in a backslash"),
        (["generate", "hi", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "hi", "--json-schema", "nowhere.json"], "--json-schema"),
        (["generate", "hi", "--json-schema", __file__], "the JSON schema is no JSON"),
        (["generate", "hi", "--json-schema", __file__, "--regex", "a"], "not both"),
        (["generate", "hi", "--file", "nowhere.txt"], "--file"),
        (["generate", "\udcff"], "not UTF-8"),
        (["generate"], "the prompt is empty"),
        (["chat", "--min-p", "2"], "min_p must be between 0 and 1"),
        (["inspect"], "MODEL"),
    ],
)
def test_wrong_usage_is_2_and_loads_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.setattr("mtplx.llm.load", None)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert complaint in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("command", [["generate", "hi", "--model"], ["chat", "--model"]])
def test_a_failure_is_1_and_one_line(run: Run, command: list[str]) -> None:
    assert run(*command, "./nowhere") == (1, "", "mtplx: nowhere: no such file or directory\n")
    code, out, err = run(*command, "no model")
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "out of memory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_happens_to_a_user_has_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("mtplx.llm.load", load)
    ended = run("generate", "hi")
    assert ended.code == code
    assert line in ended.err and ended.err.count("\n") == (1 if line else 0)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("mtplx.llm.load", load)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["generate", "hi"])


def test_the_options_agree_with_the_package() -> None:
    choices, _ = get_args(options.Dtype.__origin__)  # type: ignore[attr-defined]
    assert set(get_args(choices)) == set(DTYPES)
    assert options.DEFAULT_MODEL == DEFAULT_MODEL


# --- generate --------------------------------------------------------------------------------

WARM = ["--temperature", "1.2", "--top-k", "50", "--top-p", "0.9", "--seed", "7", "-n", "30"]
SAMPLING = mtplx.SamplerConfig(temperature=1.2, top_k=50, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def llm(model: Path, head: Path) -> LLM:
    return mtplx.load(model, head=head, dtype="float32")


@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_the_text_is_that_of_the_package(
    run: Run, tiny: list[object], llm: LLM, depth: Depth
) -> None:
    expected = llm.generate("hello", max_tokens=30, depth=depth, sampling=SAMPLING)
    code, out, err = run("generate", "hello", *tiny, *WARM, "--depth", depth)
    assert (code, out, err) == (0, expected.text + "\n", "")


def test_json(run: Run, tiny: list[object], model: Path, llm: LLM) -> None:
    expected = llm.generate("hello", max_tokens=30, sampling=SAMPLING)
    code, out, err = run("generate", "hello", *tiny, *WARM, "--json")
    answer = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert answer["model"] == str(model)
    assert answer["text"] == expected.text
    assert answer["token_ids"] == expected.token_ids
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["depth"] == 3
    assert mtplx.SamplerConfig(**answer["sampling"]) == SAMPLING
    assert set(answer["stats"]) == set(expected.stats.to_dict())
    assert answer["stats"]["cycles"] == expected.stats.cycles
    assert answer["stats"]["accepted_by_position"] == expected.stats.accepted_by_position


def test_auto_in_json_and_in_the_table(run: Run, tiny: list[object], model: Path) -> None:
    # With a seed, the head's recommendation; without one, as many as pay.
    unseeded = [*WARM[: WARM.index("--seed")], "-n", "30"]
    for given, depth in ((["--depth", "auto", *WARM], "auto"), (unseeded, "auto"), (WARM, 3)):
        answer = json.loads(run("generate", "hello", *tiny, *given, "--json").out)
        assert answer["depth"] == depth
    assert "depth auto" in run("generate", "hello", *tiny, *WARM, "-k", "auto", "--stats").err
    compared = run("generate", "hello", *tiny, *WARM, "-k", "auto", "--compare").err
    assert "depth auto" in compared and "no drafting" in compared
    # Without a head nothing pays.
    code, out, _ = run("generate", "hi", "--model", model, *WARM, "--depth", "auto")
    assert code == 0 and out


def test_every_sampling_option_is_a_setting(run: Run, tiny: list[object]) -> None:
    settings = {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "no_repeat_ngram": 3,
        "min_tokens": 5,
        "seed": 7,
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    answer = json.loads(run("generate", "hi", *tiny, "-n", "8", *options, "--json").out)
    assert mtplx.SamplerConfig(**answer["sampling"]) == mtplx.SamplerConfig(**settings)


def test_logprobs_come_with_json(run: Run, tiny: list[object], llm: LLM) -> None:
    expected = llm.generate("hello", max_tokens=30, sampling=SAMPLING, logprobs=2)
    assert expected.logprobs
    answer = json.loads(run("generate", "hello", *tiny, *WARM, "--json", "--logprobs", "2").out)
    assert [entry["token_id"] for entry in answer["logprobs"]] == expected.token_ids
    for got, entry in zip(answer["logprobs"], expected.logprobs, strict=True):
        assert got["logprob"] == pytest.approx(entry.logprob, abs=1e-4)
        assert got["text"] == llm.tokenizer.decode([entry.token_id])
        assert [(a["token_id"], a["logprob"]) for a in got["top"]] == [
            (token, pytest.approx(logprob, abs=1e-4)) for token, logprob in entry.top
        ]
    assert "logprobs" not in json.loads(run("generate", "hello", *tiny, *WARM, "--json").out)


def test_an_answer_may_have_to_be_of_a_kind(run: Run, tiny: list[object], tmp_path: Path) -> None:
    _, out, _ = run("generate", "hi", *tiny, *WARM, "--regex", "[0-9]{3}")
    assert re.fullmatch("[0-9]{3}\n", out)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    _, out, _ = run("generate", "hi", *tiny, *WARM, "--json-schema", schema)
    assert json.loads(out) in ("yes", "no")
    code, out, err = run("generate", "hi", *tiny, "--regex", "(")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "the regex cannot be used" in err
    endless = ["--regex", "[ab]{3}", "--min-tokens", "9"]
    for depth in ("0", "2"):
        code, out, err = run("generate", "hi", *tiny, *WARM, *endless, "--depth", depth)
        assert (code, err.count("\n")) == (1, 1)
        assert "min_tokens and the grammar leave no token to go on with after 3" in err
        assert re.fullmatch("[ab]{3}\n", out)  # what was written, on a line of its own


def test_a_prompt_from_a_file_or_stdin_is_the_same(
    run: Run, tiny: list[object], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("schöne Grüße\n".encode())
    by_argument = run("generate", "schöne Grüße", *tiny, *WARM)
    assert run("generate", "--file", file, *tiny, *WARM) == by_argument
    assert run("generate", *tiny, *WARM, stdin=file.read_bytes()) == by_argument
    assert run("generate", "-", *tiny, *WARM, stdin=file.read_bytes()) == by_argument


@pytest.mark.parametrize("arguments", [["hi", "--file", __file__], ["-"]])
def test_two_prompts_and_broken_bytes_are_refused(run: Run, arguments: list[str]) -> None:
    assert run("generate", *arguments, stdin=b"\xff\xfe").code == 2


def test_a_terminal_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(io, "TextIOWrapper", Terminal)
    code, _, err = run("generate")
    assert code == 2
    assert "no prompt" in err


def test_raw_leaves_out_the_template(run: Run, tiny: list[object], llm: LLM) -> None:
    expected = llm.generate("hello", max_tokens=30, sampling=SAMPLING, raw=True)
    assert run("generate", "hello", *tiny, *WARM, "--raw").out == expected.text + "\n"


def test_the_checkpoints_sampling_holds_unless_overridden(run: Run, tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    model = tiny_checkpoint.write(tmp_path, generation=own)
    _, out, _ = run("generate", "hi", "--model", model, "-n", "1", "--top-k", "5", "--json")
    used = json.loads(out)["sampling"]
    assert (used["temperature"], used["top_k"]) == (0.6, 5)


def test_the_checkpoints_sampling_may_be_nonsense(run: Run, tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": -3}
    model = tiny_checkpoint.write(tmp_path, generation=own)
    code, _, err = run("generate", "hi", "--model", model)
    assert code == 1
    assert "its own sampling settings are unusable: temperature must be" in err


def test_depth_without_a_head_fails(run: Run, model: Path) -> None:
    code, out, err = run("generate", "hi", "--model", model, "--depth", "2")
    assert (code, out) == (1, "")
    assert "no MTP head to draft with; use depth 0" in err


def test_the_table_is_for_terminals_or_on_request(
    run: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_request = run("generate", "hi", *tiny, *WARM, "--stats")
    assert "tokens per cycle" in on_request.err
    assert "temperature 1.2, top_k 50, top_p 0.9, seed 7" in on_request.err
    monkeypatch.setattr("_pytest.capture.CaptureIO.isatty", lambda self: True, raising=False)
    assert "tokens per cycle" in run("generate", "hi", *tiny, *WARM).err
    assert "tokens per cycle" not in run("generate", "hi", *tiny, *WARM, "--no-stats").err


def test_compare_shows_both_ways(run: Run, tiny: list[object], llm: LLM) -> None:
    expected = llm.generate("hello", max_tokens=30, sampling=SAMPLING)
    plain = llm.generate("hello", max_tokens=30, depth=0, sampling=SAMPLING)
    code, out, err = run("generate", "hello", *tiny, *WARM, "--compare")
    assert (code, out) == (0, expected.text + "\n")
    table = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]]
        for line in err.splitlines()
        if len(cells := line.split("│")) == 5
    }
    assert table["tokens"] == [str(expected.stats.tokens), str(plain.stats.tokens)]
    assert table["cycles"] == [str(expected.stats.cycles), str(plain.stats.cycles)]
    assert table["tokens per cycle"][1] == "1.00"
    assert len(table["acceptance by draft position"][0].split()) == 3
    with_drafts, without = map(float, table["tokens/s"])
    assert float(table["speed-up"][0][:-1]) == pytest.approx(with_drafts / without, abs=0.01)


def test_compare_in_json(run: Run, tiny: list[object]) -> None:
    answer = json.loads(run("generate", "hello", *tiny, *WARM, "--compare", "--json").out)
    assert answer["stats"]["drafted_by_position"]
    assert answer["stats_without_drafting"]["drafted_by_position"] == []


def test_threads_are_those_asked_for(run: Run, tiny: list[object]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            assert run("generate", "hello", *tiny, *WARM, "--threads", threads).code == 0
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert run("generate", "hello", *tiny, "--threads", 0).code == 2


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
def test_a_quantised_model_answers(run: Run, tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path / "model", width=32, inner=64)
    options = ["--model", model, "--device", "cpu", "--quantize", "int4", *WARM]
    answer = json.loads(run("generate", "hello", *options, "--json").out)
    llm = mtplx.load(model, device="cpu", quantize="int4")
    result = llm.generate("hello", max_tokens=30, sampling=SAMPLING)
    assert answer["token_ids"] == result.token_ids and result.token_ids
    refused = run("generate", "hello", *options, "--dtype", "float32")
    assert refused.code == 1 and "quantised layers are computed in float32" in refused.err
    refused = run("generate", "hello", *options[:-8], "--quantize", "3")
    assert refused.code == 2 and "'3' is not one of" in refused.err


INTERRUPTED = """
import os, signal
# What starts tests in the background may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from mtplx.cli import main
from mtplx.llm import LLM
stream = LLM.stream
def interrupted(*args, **kwargs):
    for piece in stream(*args, **kwargs):
        yield piece
        os.kill(os.getpid(), signal.SIGINT)
LLM.stream = interrupted
main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_quietly(tiny: list[object]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "generate", "hi", *map(str, tiny), *WARM],
        capture_output=True,
        **SUBPROCESS,  # type: ignore[call-overload]
    )
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(tiny: list[object]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "hi", *map(str, tiny), "-n", "500", "--temperature", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **SUBPROCESS,  # type: ignore[call-overload]
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, b"")


# --- chat ------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_history(
    run: Run, tiny: list[object], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, str]]] = []
    stream = LLM.stream

    def listen(self: LLM, prompt: Any, **settings: Any) -> Iterator[Piece]:
        asked.append([dict(message) for message in prompt])
        return stream(self, prompt, **settings)

    monkeypatch.setattr(LLM, "stream", listen)
    said = b"hi\n\nand then?\n/reset\nagain\n/system be brief\nonce more\n/exit\nnot read\n"
    code, out, err = run("chat", *tiny, *WARM, "--no-stats", stdin=said)
    first = llm.generate("hi", max_tokens=30, sampling=SAMPLING).text
    assert code == 0
    assert out.startswith(first + "\n")
    assert asked == [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "and then?"},
        ],
        [{"role": "user", "content": "again"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "once more"}],
    ]
    assert "tokens/s" not in err


def test_broken_bytes_do_not_end_a_conversation(run: Run, tiny: list[object]) -> None:
    code, out, err = run("chat", *tiny, *WARM, stdin=b"\xff\n/help\n")
    assert (code, out) == (0, "")
    assert "not UTF-8" in err


def test_the_end_of_input_leaves(run: Run, tiny: list[object]) -> None:
    code, out, err = run("chat", *tiny, *WARM, stdin=b"hi")
    assert code == 0
    assert out and "tokens/s" in err


def test_commands(run: Run, tiny: list[object]) -> None:
    huge = b"9" * 5000
    said = (
        b"/help\n/depth 2\n/depth x\n/depth %s\n/depth\n/depth auto\n/stats\n/frobnicate\n/quit\n"
        % huge
    )
    code, out, err = run("chat", *tiny, stdin=said)
    assert (code, out) == (0, "")
    for answer in (
        "Ctrl-C stops an answer",
        "the depth is 2\n",
        "the depth is 2; /depth N takes a number from 0 up, or auto",
        "the depth is auto\n",
        "figures are hidden",
        "there is no /frobnicate",
    ):
        assert answer in err


def test_chat_says_what_a_headless_model_cannot(run: Run, model: Path) -> None:
    _, _, err = run("chat", "--model", model, stdin=b"/depth 3\n")
    assert "no MTP head to draft with" in err
    assert run("chat", "--model", model, "--depth", "3").code == 1


def test_chat_needs_a_template(run: Run, tmp_path: Path) -> None:
    code, _, err = run("chat", "--model", tiny_checkpoint.write(tmp_path, template=None))
    assert code == 1
    assert "no chat template" in err


def test_a_message_beyond_the_context_is_left_out(run: Run, tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path, context=32)
    said = b"x" * 40 + b"\nhi\n"
    code, out, err = run("chat", "--model", model, "--seed", "1", "-n", "4", stdin=said)
    assert code == 0
    assert "leaves no room to answer (/reset begins anew)" in err
    assert out != ""


def test_ctrl_c_stops_the_answer_and_keeps_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = LLM.stream

    def interrupted(self: LLM, prompt: Any, **settings: Any) -> Iterator[Piece]:
        for piece in stream(self, prompt, **settings):
            yield piece
            raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    chat = Conversation(llm, SAMPLING, 3, 30, None, stats=False)
    chat.answer("hi")
    begun = capsys.readouterr().out.removesuffix("\n")
    assert chat.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": begun},
    ]
    monkeypatch.setattr(LLM, "stream", stream)
    chat.answer("go on")
    assert len(chat.messages) == 4


def test_ctrl_c_at_the_prompt_does_not_leave(
    run: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([KeyboardInterrupt(), "/help", EOFError()])

    def keyboard(prompt: str) -> str:
        key = next(typed)
        if isinstance(key, BaseException):
            raise key
        return key

    monkeypatch.setattr("builtins.input", keyboard)
    code, _, err = run("chat", *tiny)
    assert code == 0
    assert "Ctrl-D or /exit leaves" in err and "/depth N" in err


# --- inspect ---------------------------------------------------------------------------------


def test_inspect_in_words(run: Run, model: Path, head: Path) -> None:
    code, out, err = run("inspect", model, "--head", head)
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "LlamaForCausalLM, safetensors" in words
    assert "an attached EAGLE-3 head" in words and "status works" in words
    assert "depth begin with 1 to 3; auto, the default, finds out" in words
    assert "runs here yes, " in words and "; the attached head drafts" in words
    assert "for the head" in words and "for every 1,000 tokens" in words


def test_inspect_in_words_says_why_not(run: Run, tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "abacus"}
    (model / "config.json").write_text(json.dumps(config))
    code, out, _ = run("inspect", model)
    words = " ".join(out.split())
    assert code == 0
    assert "MTP none" in words and "runs here no because" in words and "abacus" in words


def test_inspect_as_json(run: Run, model: Path) -> None:
    code, out, err = run("inspect", model, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["runs"] is True and found["problems"] == []
    assert found["mtp"]["kind"] == found["mtp"]["status"] == "none"
    assert found["drafter"] is None and found["mtp"]["depths"] is None
    assert found["ways"][0]["quantize"] == "none" and found["ways"][0]["weights"] > 0
    assert found["eos_token_ids"] == [256]


def test_inspect_a_missing_model(run: Run) -> None:
    assert run("inspect", "./nowhere") == (1, "", "mtplx: nowhere: no such file or directory\n")


@pytest.mark.parametrize(
    ("mtp", "words"),
    [
        (Mtp("none"), "none"),
        (Mtp("missing", promised=2), "2 layer(s) promised by the config, none in the files"),
        (
            Mtp("native", found=1, promised=2, parameters=2_000_000, bytes=4_000_000),
            "1 layer(s) in the model's files, 2 promised; 2.0 M parameters, 4.0 MB",
        ),
        (
            Mtp("native", found=1, parameters=2_000, bytes=4_000),
            "1 layer(s) in the model's files, none promised; 2.0 k parameters, 4.0 kB",
        ),
        (
            Mtp("attached", parameters=2_000, bytes=4_000, where="/h"),
            "an attached EAGLE-3 head, 2.0 k parameters, 4.0 kB: /h",
        ),
    ],
)
def test_mtp_layers_in_words(mtp: Mtp, words: str) -> None:
    assert mtp_words(mtp) == words


@pytest.mark.parametrize(
    ("mtp", "rows"),
    [
        (Mtp("none"), []),
        (Mtp("missing", "heads missing", promised=1), [("status", "heads missing")]),
        (
            Mtp("native", "unknown layout", 1, tensors=3, seen=("mtp.a", "mtp.b")),
            [("status", "unknown layout"), ("its tensors", "mtp.a, mtp.b, and 1 more")],
        ),
        (
            Mtp("native", "works", 1, family=("glm4_moe",), depth=1, depths=(1, 3)),
            [
                ("status", "works, of the family of glm4_moe"),
                ("depth", "begin with 1 to 3; auto, the default, finds out"),
            ],
        ),
    ],
)
def test_what_becomes_of_mtp_layers_in_words(mtp: Mtp, rows: list[tuple[str, str]]) -> None:
    assert status_rows(mtp) == rows


def test_inspect_in_words_tells_what_cannot_be_once(run: Run, tmp_path: Path) -> None:
    model = tiny_native.write(tmp_path, "glm4_moe")
    tiny_checkpoint.tokenizer().save_pretrained(model)
    _, out, _ = run("inspect", model)
    words = " ".join(out.split())
    assert "its MTP layers draft no kernels layers of type 'glm4_moe'" in words
    if kernels.find():
        assert "int8, int4 not possible: " in words and words.count("not possible") == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 "), (999, "999 "), (134_515_008, "134.5 M"), (6.8e11, "680.0 G"), (2e15, "2000.0 T")],
)
def test_quantities(number: float, words: str) -> None:
    assert quantity(number) == words


# --- the default model -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_answers_and_nothing_else_is_said() -> None:
    done = subprocess.run(
        [*COMMAND, "generate", "What is the capital of France?", "-n", "16", "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        **SUBPROCESS,  # type: ignore[call-overload]
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
