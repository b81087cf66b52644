"""The public face: prompts in, results out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

import mtplx
from mtplx import SamplerConfig, kernels
from mtplx.drafters.pace import Pace
from mtplx.errors import MtplxError
from mtplx.models.blocks import quantize
from mtplx.models.checkpoint import load_rounded, locate
from mtplx.models.fused import FusedTrunk
from mtplx.models.linear import KernelLinear, linear_layers, tiles
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk

END = 256
# This random model likes to end its text at once; forbidden to, it goes on.
GREEDY = SamplerConfig(temperature=0, logit_bias={END: -float("inf")})


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("llm")
    return tiny_checkpoint.write(root / "model"), tiny_checkpoint.write_head(root / "head")


@pytest.fixture(scope="module")
def llm(directories: tuple[Path, Path]) -> mtplx.LLM:
    model, head = directories
    return mtplx.load(model, head=head, dtype="float32", device="cpu")


def greedy_by_transformers(llm: mtplx.LLM, ids: list[int], tokens: int) -> list[int]:
    out = llm.trunk.model.generate(
        torch.tensor([ids]),
        do_sample=False,
        max_new_tokens=tokens,
        suppress_tokens=[END],
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


# --- prompts ---------------------------------------------------------------------------------


def test_a_string_is_one_user_message(llm: mtplx.LLM) -> None:
    encode = llm.tokenizer
    assert llm.encode("hi") == encode("<|user|>hi<|end|><|assistant|>")["input_ids"]
    assert llm.encode("hi") == llm.encode([{"role": "user", "content": "hi"}])


def test_raw_text_and_ids_are_taken_as_they_are(llm: mtplx.LLM) -> None:
    assert llm.encode("hi", raw=True) == llm.tokenizer("hi")["input_ids"]
    assert llm.encode([5, 6, 7]) == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "no tokens"),
        ([1, "a"], "'a', which is no integer"),
        ([1, True], "True, which is no integer"),
        (["a", 1], "a list of chat messages or a list of token ids; got a list with a str"),
        ([{"role": "user"}], "needs a role and a content"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: mtplx.LLM, prompt: object, complaint: str) -> None:
    with pytest.raises(mtplx.MtplxError, match=complaint):
        llm.encode(prompt)  # type: ignore[arg-type]


def test_numpy_ids_are_ids(llm: mtplx.LLM) -> None:
    assert llm.encode(np.array([5, 6])) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"role": "user", "content": "hi"}, "got a dict"),
        (b"ab", "got a bytes"),
        (7, "got a int"),
        (np.array(7), "got a ndarray"),
        ({1, 2}, "got a set"),
        ((p for p in ["a"]), "got a generator"),
        ([bytearray(b"hi")], "a list with a bytearray"),
        ("a\ud800b", "lone surrogate"),
        ([1, "a"], "'a', which is no integer"),
        ([{"role": "user", "content": "hi"}, 3], "a list with a int"),
    ],
)
def test_generate_refuses_what_is_no_prompt(llm: mtplx.LLM, prompt: Any, complaint: str) -> None:
    with pytest.raises(mtplx.MtplxError, match=complaint):
        llm.generate(prompt)


def test_stop_tokens_are_ids(llm: mtplx.LLM) -> None:
    with pytest.raises(mtplx.MtplxError, match="stop_token_ids holds '</s>'"):
        llm.generate("hi", stop_token_ids=["</s>"])  # type: ignore[list-item]
    with pytest.raises(mtplx.MtplxError, match="must be a list of token ids, got 5"):
        llm.generate("hi", stop_token_ids=5)  # type: ignore[arg-type]
    with pytest.raises(mtplx.MtplxError, match="stop_token_ids holds -1: token ids are integers"):
        llm.generate("hi", stop_token_ids=[-1])


def test_stop_tokens_may_come_from_anywhere_and_hold_for_every_row(llm: mtplx.LLM) -> None:
    all_of_them: Any = iter(range(llm.trunk.vocab_size))
    results = llm.generate(["a", "b", "c"], max_tokens=5, stop_token_ids=all_of_them)
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("stop", 1)] * 3


def test_an_end_token_of_minus_1_is_none(tmp_path: Path) -> None:
    """Some checkpoints say so; read as an index it would be the vocabulary's last token."""
    model = tiny_checkpoint.write(tmp_path, generation={"eos_token_id": -1})
    llm = mtplx.load(model, dtype="float32")
    last = llm.trunk.vocab_size - 1
    wanted = SamplerConfig(logit_bias={last: 1e3}, suppress_stop=True, min_tokens=4, seed=1)
    assert llm.generate("hi", max_tokens=4, sampling=wanted).token_ids == [last] * 4


@pytest.mark.slow
def test_threads_may_share_a_model(llm: mtplx.LLM) -> None:
    def work(i: int) -> list[int]:
        prompt, depth = PAIRS[i % len(PAIRS)]
        return llm.generate(prompt, max_tokens=12, depth=depth, sampling=GREEDY).token_ids

    alone = [work(i) for i in range(3)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(24)))
    assert together == alone * 8


def test_a_stream_says_at_once_what_is_wrong(llm: mtplx.LLM) -> None:
    with pytest.raises(mtplx.MtplxError, match="leaves no room"):
        llm.stream([1] * 10_000)


def test_pieces_keep_the_figures_of_their_time(llm: mtplx.LLM) -> None:
    pieces = list(llm.stream("hi", max_tokens=12, depth=2, sampling=GREEDY))
    counts = [piece.stats.tokens for piece in pieces]
    assert counts == np.cumsum([len(piece.token_ids) for piece in pieces]).tolist()


def test_the_readers_time_is_not_decoding(llm: mtplx.LLM) -> None:
    stream = llm.stream("hi", max_tokens=3, depth=0, sampling=GREEDY)
    started = time.perf_counter()
    for last in stream:  # noqa: B007
        time.sleep(0.3)
    # Three pauses lie in this loop; decoding reports all of it but those.
    assert last.stats.decode_seconds <= time.perf_counter() - started - 0.9


def test_a_deep_wish_takes_no_more_memory_than_the_budget(llm: mtplx.LLM) -> None:
    result = llm.generate("hi", max_tokens=5, depth=10**9, sampling=GREEDY)
    assert len(result.token_ids) == 5
    assert result.token_ids == llm.generate("hi", max_tokens=5, depth=0, sampling=GREEDY).token_ids


def test_interleaved_streams_do_not_disturb_each_other(llm: mtplx.LLM) -> None:
    alone = [llm.generate(p, max_tokens=20, depth=d, sampling=GREEDY) for p, d in PAIRS]
    streams = [llm.stream(p, max_tokens=20, depth=d, sampling=GREEDY) for p, d in PAIRS]
    tokens: list[list[int]] = [[] for _ in streams]
    while streams_left := [i for i, t in enumerate(tokens) if len(t) < 20]:
        for i in streams_left:
            tokens[i] += next(streams[i]).token_ids
    assert tokens == [result.token_ids for result in alone]


PAIRS = [("hi", 3), ("what", 0), ("why", 1)]


def test_the_name_alone_does_not_import_torch() -> None:
    script = "import sys, mtplx, mtplx.cli, mtplx.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_empty_raw_text_is_refused(llm: mtplx.LLM) -> None:
    with pytest.raises(mtplx.MtplxError, match="no tokens"):
        llm.encode("", raw=True)


def test_a_template_may_refuse(tmp_path: Path) -> None:
    template = "{{ raise_exception('only one turn') }}"
    llm = mtplx.load(tiny_checkpoint.write(tmp_path, template=template), dtype="float32")
    with pytest.raises(mtplx.MtplxError, match="refused the messages: only one turn"):
        llm.encode("hi")


def test_without_template_text_is_raw_and_messages_fail(tmp_path: Path) -> None:
    llm = mtplx.load(tiny_checkpoint.write(tmp_path, template=None), dtype="float32")
    assert llm.encode("hi") == llm.encode("hi", raw=True)
    with pytest.raises(mtplx.MtplxError, match="no chat template"):
        llm.encode([{"role": "user", "content": "hi"}])


# --- generation ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_greedy_text_is_that_of_transformers(llm: mtplx.LLM, depth: int) -> None:
    ids = llm.encode("Why is the sky blue?")
    expected = greedy_by_transformers(llm, ids, 40)
    result = llm.generate("Why is the sky blue?", max_tokens=40, depth=depth, sampling=GREEDY)
    assert result.token_ids == expected and len(expected) == 40
    assert result.text == llm.tokenizer.decode(expected, skip_special_tokens=True)
    assert result.stats.tokens == len(expected)


@pytest.mark.parametrize("depth", [0, 3])
def test_the_pieces_of_a_stream_are_the_result(llm: mtplx.LLM, depth: int) -> None:
    sampling = SamplerConfig(temperature=1.5, seed=11)
    whole = llm.generate("tell", max_tokens=50, depth=depth, sampling=sampling)
    pieces = list(llm.stream("tell", max_tokens=50, depth=depth, sampling=sampling))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason
    assert sum(piece.drafted for piece in pieces) == sum(whole.stats.accepted_by_position)
    assert len(pieces) == whole.stats.cycles


def test_logprobs_are_the_same_drafted_or_not(llm: mtplx.LLM) -> None:
    sampling = SamplerConfig(temperature=1.2, top_k=30, seed=3)

    def run(depth: int, logprobs: int | None = 3) -> mtplx.Result:
        return llm.generate("hi", max_tokens=25, depth=depth, sampling=sampling, logprobs=logprobs)

    plain, deep = run(0), run(3)
    assert run(0, None).logprobs is None
    assert plain.logprobs and deep.logprobs
    assert [entry.token_id for entry in plain.logprobs] == plain.token_ids == deep.token_ids
    for one, other in zip(plain.logprobs, deep.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        assert one.top[0][1] >= one.top[1][1] >= one.top[2][1] >= other.top[2][1] - 1e-4
    pieces = list(llm.stream("hi", max_tokens=25, depth=3, sampling=sampling, logprobs=3))
    assert [entry for piece in pieces for entry in piece.logprobs or []] == deep.logprobs
    assert all(len(piece.logprobs or []) == len(piece.token_ids) for piece in pieces)


def test_at_least_so_many_tokens_come(llm: mtplx.LLM) -> None:
    likely = SamplerConfig(seed=1, logit_bias={END: 20.0}, min_tokens=9)
    for depth in (0, 3):
        result = llm.generate("hi", max_tokens=30, depth=depth, sampling=likely)
        assert result.token_ids.index(END) == 9
        never = replace(likely, suppress_stop=True)
        endless = llm.generate("hi", max_tokens=30, depth=depth, sampling=never)
        assert END not in endless.token_ids and len(endless.token_ids) == 30


def test_a_batch_is_its_rows_with_seeds_counted_up(llm: mtplx.LLM) -> None:
    prompts = ["one", "a longer second prompt", "3"]
    batch = llm.generate(prompts, max_tokens=24, depth=2, sampling=SamplerConfig(seed=5))
    for row, (prompt, result) in enumerate(zip(prompts, batch, strict=True)):
        alone = llm.generate(prompt, max_tokens=24, depth=2, sampling=SamplerConfig(seed=5 + row))
        assert result.token_ids == alone.token_ids
        assert result.sampling.seed == 5 + row


def test_a_list_of_one_is_a_batch_and_none_is_none(llm: mtplx.LLM) -> None:
    assert [r.token_ids for r in llm.generate([[65, 66]], max_tokens=2, sampling=GREEDY)] == [
        llm.generate([65, 66], max_tokens=2, sampling=GREEDY).token_ids
    ]
    assert llm.generate([]) == []


def test_a_seed_is_used_once_where_depths_are_learned_and_the_rule_looks_at_them(
    llm: mtplx.LLM,
) -> None:
    """What was learned from its numbers must not meet them again."""
    seeded = SamplerConfig(seed=5, temperature=1.2)
    for verifier in ("token", "block"):
        settings: dict[str, Any] = {"max_tokens": 6, "sampling": seeded, "verifier": verifier}
        used = {llm.generate("hi", depth="auto", **settings).sampling.seed for _ in range(3)}
        assert len(used) == 3 and 5 not in used
        assert llm.generate("hi", depth=2, **settings).sampling.seed == 5
    coupled = llm.generate("hi", depth="auto", max_tokens=6, sampling=seeded)
    assert (coupled.sampling.seed, coupled.verifier) == (5, "coupled")


def test_a_drawn_seed_is_told_and_gives_the_same_text(llm: mtplx.LLM) -> None:
    first = llm.generate("hi", max_tokens=20, depth=2)
    used = {"sampling": first.sampling, "verifier": first.verifier}
    again = llm.generate("hi", max_tokens=20, depth=2, **used)  # type: ignore[call-overload]
    assert first.sampling.seed is not None
    assert again.token_ids == first.token_ids


def test_the_checkpoints_end_token_ends_the_text(llm: mtplx.LLM) -> None:
    assert llm.defaults.eos_token_ids == (END,)
    likely = SamplerConfig(seed=1, logit_bias={END: 8.0})
    result = llm.generate("hi", max_tokens=200, sampling=likely)
    assert result.finish_reason == "stop"
    assert result.token_ids.index(END) == len(result.token_ids) - 1
    assert "<|end|>" not in result.text


def test_depth_defaults_to_what_the_head_recommends_where_the_text_is_wanted_again(
    llm: mtplx.LLM,
) -> None:
    """And passes of different width may round differently, or the rule lets depth show."""
    result = llm.generate("hi", max_tokens=12, sampling=GREEDY)
    assert llm.depth == 3
    assert len(result.stats.drafted_by_position) == 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_depth_defaults_to_auto_where_it_cannot_show(
    llm: mtplx.LLM, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setattr(llm.trunk, "deterministic", deterministic)
    seeded, hot = SamplerConfig(seed=1), SamplerConfig()
    fixed = "auto" if deterministic else 3
    assert llm.default_depth(hot) == llm.default_depth(hot, "token") == "auto"
    assert llm.default_depth(seeded) == llm.default_depth(seeded, "coupled") == fixed
    assert llm.default_depth(GREEDY) == llm.default_depth(GREEDY, "block") == fixed
    assert llm.default_depth(seeded, "block") == llm.default_depth(seeded, "token") == 3


@pytest.fixture
def new_pace(llm: mtplx.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has yet to learn its pace drafts, whatever this machine's times say later."""
    monkeypatch.setattr(llm, "pace", Pace(3))


@pytest.mark.usefixtures("new_pace")
def test_auto_is_a_depth(llm: mtplx.LLM) -> None:
    sampling = SamplerConfig(seed=7, temperature=1.2, logit_bias={END: -float("inf")})
    plain = llm.generate("hello", max_tokens=60, depth=0, sampling=sampling)
    result = llm.generate("hello", max_tokens=60, depth="auto", sampling=sampling)
    assert result.token_ids == plain.token_ids
    pieces = list(llm.stream("hello", max_tokens=60, depth="auto", sampling=sampling))
    assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
    batch = llm.generate(["hello", "you"], max_tokens=20, depth="auto", sampling=sampling)
    assert batch[0].token_ids == plain.token_ids[:20]
    assert 0 < len(result.stats.drafted_by_position) <= 7


@pytest.mark.usefixtures("new_pace")
def test_a_model_learns_its_pace_over_all_its_texts(llm: mtplx.LLM) -> None:
    before = llm.pace.chance()
    llm.generate("hello", max_tokens=40, depth="auto", sampling=GREEDY)
    assert llm.pace.chance() != before
    known = llm.pace.chance()
    llm.generate("hello", max_tokens=40, depth=3, sampling=GREEDY)
    assert llm.pace.chance() == known


def test_a_stop_token_ends_the_text_and_is_emitted(llm: mtplx.LLM) -> None:
    free = llm.generate("hi", max_tokens=30, sampling=GREEDY).token_ids
    stop = free[4]
    cut = llm.generate("hi", max_tokens=30, sampling=GREEDY, stop_token_ids=[stop])
    assert cut.token_ids == free[: free.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_the_end_of_the_context_is_a_length(tmp_path: Path) -> None:
    llm = mtplx.load(tiny_checkpoint.write(tmp_path, context=16), dtype="float32")
    result = llm.generate([1, 2, 3], max_tokens=99, sampling=GREEDY)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 13


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of 1 or more, got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer of 1 or more, got 2.5"),
        ({"depth": -1}, 'depth must be an integer of 0 or more, or "auto", got -1'),
        ({"depth": True}, 'depth must be an integer of 0 or more, or "auto", got True'),
        ({"depth": "deep"}, "depth must be an integer of 0 or more, or \"auto\", got 'deep'"),
        ({"sampling": SamplerConfig(logit_bias={999: 1.0})}, "logit_bias names token 999"),
        ({"sampling": SamplerConfig(banned_tokens=[999])}, "banned_tokens names token 999"),
        ({"sampling": SamplerConfig(forced_tokens=[1, 999])}, "forced_tokens names token 999"),
        ({"sampling": {"temperature": 0}}, "sampling must be a SamplerConfig, got {'temperature"),
        ({"verifier": "Block"}, "verifier must be one of .*, got 'Block'"),
        ({"verifier": np.array(["token", "block"])}, "verifier must be one of"),
        ({"logprobs": -1}, "logprobs must be an integer from 0 to 1000, or None"),
        ({"logprobs": True}, "logprobs must be an integer from 0 to 1000, or None"),
        ({"logprobs": 1001}, "logprobs must be an integer from 0 to 1000, or None"),
    ],
)
def test_wrong_arguments_are_named(
    llm: mtplx.LLM, arguments: dict[str, object], complaint: str
) -> None:
    with pytest.raises(mtplx.MtplxError, match=complaint):
        llm.generate("hi", **arguments)  # type: ignore[arg-type]
    with pytest.raises(mtplx.MtplxError, match=complaint):
        llm.stream("hi", **arguments)  # type: ignore[arg-type]


# --- loading ---------------------------------------------------------------------------------


def test_the_checkpoints_own_sampling_is_the_default(tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    llm = mtplx.load(tiny_checkpoint.write(tmp_path, generation=own), dtype="float32")
    assert llm.default_sampling == SamplerConfig(temperature=0.6, top_k=20)
    used = llm.generate("hi", max_tokens=1).sampling
    assert (used.temperature, used.top_k) == (0.6, 20)


def test_without_head_nothing_is_drafted(directories: tuple[Path, Path]) -> None:
    llm = mtplx.load(directories[0], dtype="float32")
    assert (llm.head, llm.depth) == (None, 0)
    assert llm.generate("hi", max_tokens=4).stats.drafted_by_position == []
    assert llm.default_depth(SamplerConfig()) == 0
    assert llm.generate("hi", max_tokens=4, depth="auto").stats.drafted_by_position == []
    with pytest.raises(mtplx.MtplxError, match="no MTP head to draft with; use depth 0"):
        llm.generate("hi", depth=2)


def test_a_head_for_another_model_is_noted(directories: tuple[Path, Path], tmp_path: Path) -> None:
    model, head = directories
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/else"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
    (note,) = mtplx.load(model, head=tmp_path, dtype="float32").notes
    assert "made for someone/else" in note


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of bfloat16, float32, float16"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"head": "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    directories: tuple[Path, Path], arguments: dict[str, str], complaint: str
) -> None:
    with pytest.raises(mtplx.MtplxError, match=complaint):
        mtplx.load(directories[0], **arguments)


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_is_the_one_its_blocks_stand_for(
    tmp_path: Path, bits: Any, deterministic: bool
) -> None:
    """Twice: with heads that the kernels' attention cannot take, and with some that it can."""
    for heads, fused in ((8, False), (4, True)):
        directory = tmp_path / str(heads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=tiny_checkpoint.VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=2,
            head_dim=64 // heads,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
        model = LlamaForCausalLM(config).eval().bfloat16()
        model.save_pretrained(directory)
        tiny_checkpoint.tokenizer().save_pretrained(directory)
        llm = mtplx.load(
            directory, quantize=f"int{bits}", device="cpu", deterministic=deterministic
        )
        assert isinstance(llm.trunk, FusedTrunk) == fused
        # Its rows are computed by themselves either way, so that none has to run alone.
        assert not llm.notes
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                layer.weight.data = quantize(layer.weight.data, bits).dequantize()
        model = model.float()
        ids = torch.arange(40)[None]
        span = Span.after([0], 40, ids.device)
        with torch.inference_mode():
            expected = model(ids).logits
            logits = llm.trunk.forward(ids, span, llm.trunk.new_cache(40)).logits
        assert (logits - expected).norm() < 0.02 * expected.norm()


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads the kernels' attention can take."""
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_checkpoint.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    tiny_checkpoint.tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("computes", [False, True])
def test_bfloat16_is_the_kernels_on_a_cpu(
    wide_heads: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool, computes: bool
) -> None:
    """Whether its own instructions compute in it or not; long passes are torch's only where so."""
    monkeypatch.setattr(mtplx.llm, "computes_bfloat16", lambda device: computes)
    for dtype in (None, "bfloat16"):
        llm = mtplx.load(wide_heads, device="cpu", dtype=dtype, deterministic=deterministic)
        assert isinstance(llm.trunk, FusedTrunk) and llm.trunk.dtype is torch.bfloat16
        assert llm.trunk.deterministic == (deterministic or not computes)
        assert not llm.notes
        # The weights are there once: the kernels read the model's own.
        held = [part for part in llm.trunk.fused._held if isinstance(part, KernelLinear)]
        own = {layer.weight.data_ptr() for _, layer in linear_layers(llm.trunk.model)}
        assert len(held) == 15 and {part.data.data_ptr() for part in held} == own
    text = llm.generate("hello", max_tokens=40, raw=True)
    assert len(text.token_ids) == 40 or text.finish_reason == "stop"


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
def test_what_quantize_does_not_reach_is_noted(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=tiny_checkpoint.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_checkpoint.tokenizer().save_pretrained(tmp_path)
    (note,) = mtplx.load(tmp_path, quantize="int8", device="cpu").notes
    experts, linear = 4 * 3 * 32 * 64, 4 * 32 * 32 + 32 * tiny_checkpoint.VOCAB_SIZE
    share, words = note.split("%", 1)
    # The norms and the router are no linear layers either.
    assert 0 <= int(share) / 100 - experts / (experts + linear) < 0.02
    assert words.startswith(" of its weights are in layers that quantize does not reach")
    assert not mtplx.load(tmp_path, device="cpu").notes


@pytest.mark.parametrize("missing", ["kernels", "fit"])
def test_bfloat16_is_torchs_where_the_kernels_cannot_run_it(
    directories: tuple[Path, Path],
    wide_heads: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:
    if missing == "kernels":
        monkeypatch.setattr(kernels, "find", lambda name=None: None)
    model = wide_heads if missing == "kernels" else directories[0]
    for computes, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(mtplx.llm, "computes_bfloat16", lambda device, it=computes: it)
        trunk = mtplx.load(model, device="cpu").trunk
        assert type(trunk) is Trunk and trunk.dtype is dtype
    assert type(mtplx.load(wide_heads, device="cpu", dtype="float32").trunk) is Trunk


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_weights_are_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(tmp_path)
    found = kernels.find()
    assert found is not None
    tiled: Any = load_rounded(locate(tmp_path), found, "int8")
    weight = model.model.layers[0].mlp.down_proj.weight.detach()
    expected = tiles(quantize(weight, 8))
    assert torch.equal(tiled.model.layers[0].mlp.down_proj.data, expected)
    output = model.lm_head.weight.detach().bfloat16()
    assert torch.equal(tiled.lm_head.data, output)


def test_quantised_layers_have_their_conditions(directories: tuple[Path, Path]) -> None:
    model, _ = directories
    with pytest.raises(MtplxError, match="must be one of int8, int4, file, none, got 'int3'"):
        mtplx.load(model, quantize="int3")  # type: ignore[arg-type]
    with pytest.raises(MtplxError, match="computed in float32: leave out dtype"):
        mtplx.load(model, quantize="int8", dtype="float32", device="cpu")
    with pytest.raises(MtplxError, match="on the CPU, not on meta"):
        mtplx.load(model, quantize="int8", device="meta")
    plain = mtplx.load(model, quantize="none", dtype="float32", device="cpu")
    assert type(plain.trunk) is Trunk
    if kernels.find() is not None:
        with pytest.raises(MtplxError, match=r"no blocks of its own .*: quantize='int8' or 'int4'"):
            mtplx.load(model, quantize="file", device="cpu")
        with pytest.raises(MtplxError, match=r"cannot be quantised: \d+ inputs cannot be cut"):
            mtplx.load(model, quantize="int8", device="cpu")


def test_without_the_kernels_nothing_can_be_quantised(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find", lambda: None)
    with pytest.raises(MtplxError, match="needs the kernels, which are built where a C compiler"):
        mtplx.load(directories[0], quantize="int4", device="cpu")


def test_the_dtype_can_be_torchs(directories: tuple[Path, Path]) -> None:
    assert mtplx.load(directories[0], dtype=torch.float16).trunk.dtype == torch.float16


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_answers() -> None:
    llm = mtplx.load()
    result = llm.generate("What is the capital of France?", max_tokens=24, sampling=GREEDY)
    assert "Paris" in result.text
