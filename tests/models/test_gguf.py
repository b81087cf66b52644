"""GGUF files: tiny ones written here from random transformers models, and the default model."""

import json
import random
from pathlib import Path
from unittest.mock import Mock

import gguf as gguf_package
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from mtplx import kernels
from mtplx.errors import MtplxError
from mtplx.models import checkpoint, gguf, gguf_families
from mtplx.models.blocks import from_gguf
from mtplx.models.blocks import quantize as quantized
from mtplx.models.fused import FusedTrunk, misfit
from mtplx.models.gguf_tokenizer import load_tokenizer
from mtplx.models.gguf_weights import load_layers, load_model
from mtplx.models.linear import linear_layers, tiles
from mtplx.models.rounding import Rounder
from mtplx.models.slots import Span

MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# A byte-level vocabulary: every byte, a few merges, then the tokens that are no text.
MERGES = [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll")]
WHOLE_WORD = "world"  # in the vocabulary, but no merges lead to it
VOCABULARY = [
    *sorted(ByteLevel.alphabet()),
    *(left + right for left, right in MERGES),
    WHOLE_WORD,
    "<|end|>",
    "<|begin|>",
    "<think>",
]
END, BEGIN, THINK = (VOCABULARY.index(token) for token in ("<|end|>", "<|begin|>", "<think>"))
TYPES = [{END: 3, BEGIN: 3, THINK: 4}.get(index, 1) for index in range(len(VOCABULARY))]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": END,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny(architecture="llama", *, theta=100_000.0, seed=0, **changes):
    """A small random transformers model of the family; no norm or bias is left at 1 or 0."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[architecture]
    rope = {"rope_type": "default", "rope_theta": theta}
    config = config_class(**{**SIZES, "rope_parameters": rope, **changes})
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def interleave(rows, heads):
    """Row order of llama.cpp's q and k: row 2i of a head is transformers' i, 2i+1 its i + half."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + i + side * half
        for head in range(heads)
        for i in range(half)
        for side in (0, 1)
    ]
    return rows[order]


def write(path, model, architecture="llama", *, kind=Kind.F32, metadata=None, skip=(), extra=None):
    """Writes the model as llama.cpp's converter would; matrices as `kind`, vectors as float32.

    `metadata` adds keys, replaces them, or removes them (None).
    """
    config = model.config
    writer = gguf_package.GGUFWriter(path, architecture)
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    fields = {f"{architecture}.{key}": value for key, value in fields.items()}
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.bos_token_id": BEGIN,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
    }
    for key, value in (fields | (metadata or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = dict(extra or {})
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, leaf = name.rsplit(".", 1)
        block = f"blk.{module.split('.')[2]}." if ".layers." in module else ""
        short = MODULES[module.split(".")[-1] if block else module]
        values = weight.numpy()
        if architecture == "llama" and short in heads:
            values = interleave(values, heads[short])
        tensors[f"{block}{short}.{leaf}"] = values
    for name, values in tensors.items():
        if name not in skip:
            stored = kind if values.ndim > 1 else Kind.F32
            writer.add_tensor(name, gguf_package.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.read_gguf(path)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, tiny())
    return path


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_logits(one, other):
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        return torch.equal(one(ids).logits, other(ids).logits)


# --- the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_comes_back_as_it_was_written(tmp_path, architecture, tied):
    original = tiny(architecture, tie_word_embeddings=tied)
    file = write(tmp_path / "m.gguf", original, architecture)
    model = load_model(file, torch.float32)
    assert type(model) is type(original)
    assert same_weights(model, original)
    assert same_logits(model, original)
    for field in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "eos_token_id"):
        assert getattr(model.config, field) == getattr(original.config, field), field
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_llama_with_biases(tmp_path):
    original = tiny(attention_bias=True)
    model = load_model(write(tmp_path / "m.gguf", original), torch.float32)
    assert same_weights(model, original)
    assert same_logits(model, original)


def test_logits_tell_whether_the_rows_of_q_and_k_are_in_order(tmp_path, monkeypatch):
    original = tiny()
    file = write(tmp_path / "m.gguf", original)
    monkeypatch.setattr(gguf_families, "_halves", lambda rows, heads: rows)
    assert not same_logits(load_model(file, torch.float32), original)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda k: k.name
)
def test_quantised_weights_equal_the_reference_decoder(tmp_path, kind):
    original = tiny()
    model = load_model(write(tmp_path / "m.gguf", original, kind=kind), torch.float32)
    for name, weight in original.state_dict().items():
        expected = weight.numpy()
        if weight.ndim > 1:  # quantised along rows, so the order of rows does not matter
            expected = gguf_package.dequantize(gguf_package.quantize(expected, kind), kind)
        assert np.array_equal(model.state_dict()[name].numpy(), expected), name


def test_weights_are_rounded_once_from_float32(tmp_path):
    file = write(tmp_path / "m.gguf", tiny(), kind=Kind.Q8_0)
    full, half = (load_model(file, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.dtype == half.config.dtype == torch.bfloat16
    assert same_weights(full.to(torch.bfloat16), half)


def test_the_model_does_not_lean_on_the_file(tmp_path):
    """A mapped weight would change with the file, and crash where the file shrinks."""
    original = tiny()
    path = tmp_path / "m.gguf"
    model = load_model(write(path, original), torch.float32)
    with path.open("r+b") as stream:
        stream.write(bytes(path.stat().st_size))
    assert same_weights(model, original)


def test_a_loaded_model_can_be_saved_and_loaded(tmp_path):
    file = write(tmp_path / "m.gguf", tiny(), kind=Kind.Q4_0)
    model = load_model(file, torch.float32)
    model.save_pretrained(tmp_path / "saved")
    load_tokenizer(file).save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same_weights(again, model)
    assert same_logits(again, model)
    text = "hello  12 <think>world"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer(text).input_ids == load_tokenizer(file)(text).input_ids


def test_linear_rope_scaling(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    original = tiny(rope_parameters=rope)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model = load_model(write(tmp_path / "m.gguf", original, metadata=scaling), torch.float32)
    assert model.config.rope_parameters == rope
    assert same_logits(model, original)


def rope_factors(model, theta):
    plain = theta ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    return (plain / model.model.rotary_emb.inv_freq).float().numpy()


def test_llama_3_rope_is_found_again_from_its_factors(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny(rope_parameters=rope, max_position_embeddings=131_072)
    factors = rope_factors(original, 500_000.0)
    assert len(set(factors.round(3))) > 2  # high, low and in between
    file = write(tmp_path / "m.gguf", original, extra={"rope_freqs.weight": factors})
    model = load_model(file, torch.float32)
    assert model.config.rope_parameters == rope
    assert same_logits(model, original)

    factors[3] *= 1.01
    file = write(tmp_path / "other.gguf", original, extra={"rope_freqs.weight": factors})
    with pytest.raises(MtplxError, match=r"other\.gguf: .* not Llama 3's"):
        load_model(file, torch.float32)


def in_float32(file):
    return load_model(file, torch.float32)


def in_tiles(file):
    return load_layers(file, Rounder(kernels.find(), None).take, as_stored=True)


needs_kernels = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"llama.block_count": None}}, "lacks the metadata key 'llama.block_count'"),
        (
            {"metadata": {"llama.feed_forward_length": 80}},
            r"6 weights do not fit .* model.layers.0.mlp.down_proj.weight .*96\] instead of .*80\]",
        ),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling of type 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rotates 8 of 16 dimensions"),
        (
            {"skip": ("blk.1.attn_v.weight",)},
            "1 weights are missing, first model.layers.1.self_attn.v",
        ),
        ({"skip": ("token_embd.weight",)}, "lacks the tensor 'token_embd.weight'"),
        (
            {"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 64), np.float32)}},
            "'blk.0.ffn_gate_exps.weight' is not part of a llama model",
        ),
        (
            {"extra": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}},
            "no place for 1 of its weights, first model.layers.0.self_attn.q_norm.weight",
        ),
    ],
    ids=[
        "metadata",
        "shape",
        "yarn",
        "partial-rotary",
        "weight",
        "embedding",
        "experts",
        "unexpected",
    ],
)
@pytest.mark.parametrize("load", [in_float32, pytest.param(in_tiles, marks=needs_kernels)])
def test_a_file_that_is_not_the_model_it_says_is_refused(tmp_path, options, message, load):
    file = write(tmp_path / "m.gguf", tiny(), **options)
    with pytest.raises(MtplxError, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("key", ["head_count", "head_count_kv"])
def test_numbers_that_differ_from_layer_to_layer_are_refused(tmp_path, key):
    several = {f"llama.attention.{key}": [4, 2]}
    file = write(tmp_path / "m.gguf", tiny(), metadata=several)
    with pytest.raises(MtplxError, match=rf"m\.gguf: attention\.{key} differs from layer to layer"):
        gguf_families.load_config(file)


def test_an_undecodable_block_format_is_named(tmp_path, monkeypatch):
    with pytest.raises(NotImplementedError):
        gguf.GgufTensor((2, 256), Kind.Q8_K, np.zeros((2, 292), np.uint8)).dequantize()
    file = write(tmp_path / "m.gguf", tiny(), kind=Kind.Q8_0)
    monkeypatch.setattr(gguf_package, "dequantize", Mock(side_effect=NotImplementedError))
    with pytest.raises(MtplxError, match=r"m\.gguf: .*weight is of type Q8_0"):
        load_model(file, torch.float32)


# --- the container ---------------------------------------------------------------------------


def test_metadata_reads_as_written(tmp_path):
    expected = {
        "a.flag": True,
        "a.count": 7,
        "a.epsilon": 1e-5,
        "a.name": "café",
        "a.numbers": [1, -2, 3],
        "a.shares": [0.5, 0.25],
        "a.words": ["one", "", "two"],
    }
    file = write(tmp_path / "m.gguf", tiny(), metadata=expected)
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.architecture == "llama"


def test_a_vocabulary_of_100_000_strings_is_read_quickly(tmp_path):
    from time import process_time

    words = [f"word{index}" for index in range(100_000)]
    file = write(tmp_path / "m.gguf", tiny(), metadata={"a.words": words})
    start = process_time()
    assert gguf.read_gguf(file.path).metadata["a.words"] == words
    assert process_time() - start < 2.0  # gguf.GGUFReader needs about 5


def test_a_truncated_file_says_so_wherever_it_ends(tiny_file, tmp_path):
    content = tiny_file.read_bytes()
    path = tmp_path / "cut.gguf"
    ends = random.Random(0).sample(range(4, len(content) - 1), 60)
    for end in [4, 8, 24, *ends, len(content) - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(MtplxError, match=r"cut\.gguf: .*truncated"):
            gguf.read_gguf(path)


def test_flipped_header_bytes_never_raise_anything_else(tiny_file, tmp_path):
    content = tiny_file.read_bytes()
    path = tmp_path / "flipped.gguf"
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[rng.randrange(4, 9000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            gguf.read_gguf(path)
        except MtplxError as error:
            refused += 1
            assert "flipped.gguf" in str(error) and "\n" not in str(error)
    assert refused > 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1 "),
    ],
    ids=["empty", "zip", "big-endian", "version-1"],
)
def test_other_files_are_told_apart(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(MtplxError, match=message):
        gguf.read_gguf(path)


def test_one_part_of_a_split_model_is_refused(tmp_path):
    with pytest.raises(MtplxError, match="one of 3 parts"):
        write(tmp_path / "m.gguf", tiny(), metadata={"split.count": 3})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MtplxError, match=r"none\.gguf: cannot be read \(No such file"):
        gguf.read_gguf(tmp_path / "none.gguf")


@needs_kernels
def test_what_cannot_be_rounded_is_said(tmp_path):
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    file = write(tmp_path / "m.gguf", model)
    with pytest.raises(MtplxError, match=r"layers.1.mlp.up_proj cannot be quantised: its weights"):
        checkpoint.load_rounded(checkpoint.locate(file.path), kernels.find(), "int8")


@needs_kernels
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_layers_are_read_one_by_one(tmp_path, bits, monkeypatch):
    """And rounded from what the file's numbers stand for."""
    path = tmp_path / "m.gguf"
    write(path, tiny("llama"), kind=Kind.Q8_0)
    reads = []
    dequantize, take = gguf.GgufTensor.dequantize, Rounder.take

    def counted(tensor):
        reads.append(tensor)
        return dequantize(tensor)

    def watched(self, model, name, weight, bias):
        assert len(reads) == isinstance(weight, torch.Tensor) == (bits is not None)
        reads.clear()
        take(self, model, name, weight, bias)

    monkeypatch.setattr(gguf.GgufTensor, "dequantize", counted)
    monkeypatch.setattr(Rounder, "take", watched)
    quantize = "file" if bits is None else f"int{bits}"
    seen = []
    model = checkpoint.load_rounded(
        checkpoint.locate(path), kernels.find(), quantize, lambda *now: seen.append(now)
    )
    # All but norms and the embedding.
    assert len(reads) == 2 * len(model.model.layers) + 2
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    own = gguf.read_gguf(path).tensors["blk.1.ffn_up.weight"]
    blocks = from_gguf(own.data, "Q8_0", own.shape)
    if bits:
        blocks = quantized(blocks.dequantize(), bits)
    assert torch.equal(model.model.layers[1].mlp.up_proj.data, tiles(blocks))


# --- the tokenizer ---------------------------------------------------------------------------

TEXTS = [
    "hello world",
    "  two  spaces\tand\ttabs \n\n new\r\nlines   ",
    "In 1984, 3.14 and x²=½ or ٣٤",
    "def f(x):\n    return x ** 2  # don't, won't, I'LL\n",
    "Ünïcödé 中文字符 日本語 한국어 العربية",
    "emoji 👩‍🚀🇫🇷 and e\u0301 a\u200bb \x00\x7f",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_file):
    return load_tokenizer(gguf.read_gguf(tiny_file))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_are_single_ids(tokenizer):
    assert tokenizer("he<|end|>ll<think>").input_ids == [
        VOCABULARY.index("he"),
        END,
        VOCABULARY.index("ll"),
        THINK,
    ]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (END, BEGIN)
    # A control token is left out of the text, a user-defined one is part of it.
    assert tokenizer.decode([END, THINK], skip_special_tokens=True) == "<think>"
    assert len(tokenizer) == len(VOCABULARY)


def test_the_chat_template_comes_along(tokenizer):
    messages = [{"role": "user", "content": "hell"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hell<|end|>"
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize("add", [True, False])
def test_a_bos_token_is_added_where_the_file_says_so(tmp_path, add):
    file = write(tmp_path / "m.gguf", tiny(), metadata={"tokenizer.ggml.add_bos_token": add})
    assert load_tokenizer(file)("he").input_ids == [BEGIN] * add + [VOCABULARY.index("he")]


def pieces(tmp_path, pre, text):
    file = write(tmp_path / f"{pre}.gguf", tiny(), metadata={"tokenizer.ggml.pre": pre})
    split = load_tokenizer(file).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [piece for piece, _ in split]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ1234", "'ll", "ĠI", "'", "LL"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "3", "4", "'ll", "ĠI", "'", "LL"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "3", "4", "'ll", "ĠI", "'LL"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "123", "4", "'ll", "ĠI", "'LL"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, pre, expected):
    assert pieces(tmp_path, pre, "a  1234'll I'LL") == expected


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe"])
def test_patterns_cut_as_those_of_transformers_do(tmp_path, pre):
    from tokenizers import Regex, pre_tokenizers

    reference = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in TEXTS:
        expected = [piece for piece, _ in reference.pre_tokenize_str(text)]
        assert pieces(tmp_path, pre, text) == expected


def test_llama_3_takes_whole_words_and_qwen2_composes(tmp_path):
    ids = {}
    for pre in ("llama-bpe", "qwen2"):
        file = write(tmp_path / f"{pre}.gguf", tiny(), metadata={"tokenizer.ggml.pre": pre})
        ids[pre] = load_tokenizer(file)
    word = VOCABULARY.index(WHOLE_WORD)
    assert ids["llama-bpe"](WHOLE_WORD).input_ids == [word]
    assert word not in ids["qwen2"](WHOLE_WORD).input_ids
    assert ids["qwen2"]("e\u0301").input_ids == ids["qwen2"]("\u00e9").input_ids


def test_an_unknown_split_is_refused_and_not_guessed(tmp_path):
    file = write(tmp_path / "m.gguf", tiny(), metadata={"tokenizer.ggml.pre": "runes"})
    with pytest.raises(MtplxError, match=r"'runes'.*known: .*smollm"):
        load_tokenizer(file)


def test_what_lies_beside_a_file_does_not_matter(tmp_path, monkeypatch):
    """transformers' own loaders, which are used for what is not known here, read neighbours."""
    mark = tmp_path / "code-was-run"
    (tmp_path / "custom.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        auto_map = {"AutoConfig": "custom.C", "AutoTokenizer": ["custom.T", "custom.T"]}
        (tmp_path / name).write_text(json.dumps({"model_type": "x", "auto_map": auto_map}))
    model = tiny("qwen2")
    file = write(tmp_path / "m.gguf", model, "qwen2", metadata={"tokenizer.ggml.pre": "tekken"})
    monkeypatch.delitem(gguf_families.FAMILIES, "qwen2")
    monkeypatch.setattr("builtins.input", Mock(side_effect=AssertionError("asked")))
    assert gguf_families.load_config(file).model_type == "qwen2"
    seen = {}

    def load(pretrained_model_name_or_path, **settings):
        files = [path.name for path in Path(pretrained_model_name_or_path).iterdir()]
        seen.update(settings, files=files)
        return model

    # The real one wants another package.
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    assert load_model(file, torch.float32) is model
    assert (seen["files"], seen["trust_remote_code"]) == (["m.gguf"], False)
    tokenizer = load_tokenizer(file)
    assert tokenizer.decode(tokenizer("hello 12").input_ids) == "hello 12"
    assert not mark.exists()


def test_a_split_that_only_transformers_knows_goes_through_it(tmp_path):
    file = write(tmp_path / "m.gguf", tiny(), metadata={"tokenizer.ggml.pre": "tekken"})
    assert load_tokenizer(file).decode(load_tokenizer(file)("hello 12").input_ids)


# --- how to run it ---------------------------------------------------------------------------


def test_the_file_names_its_end_tokens_and_its_sampling(tmp_path):
    plain = write(tmp_path / "plain.gguf", tiny())
    assert gguf.eos_token_ids(plain) == (END,)
    assert gguf.sampling(plain) == {}
    opinionated = write(
        tmp_path / "m.gguf",
        tiny(),
        metadata={
            "tokenizer.ggml.eot_token_id": BEGIN,
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
        },
    )
    assert gguf.eos_token_ids(opinionated) == (END, BEGIN)
    assert gguf.sampling(opinionated) == {"temperature": 0.6, "top_k": 20}


# --- the default model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_file():
    return gguf.read_gguf(checkpoint.locate("smollm2-135m").path)


@pytest.fixture(scope="module")
def default_tokenizer(default_file):
    return load_tokenizer(default_file)


@pytest.mark.slow
@pytest.mark.model
def test_default_weights_equal_an_independent_reading(default_file):
    model = load_model(default_file, torch.float32)
    reference = {
        tensor.name: tensor for tensor in gguf_package.GGUFReader(default_file.path).tensors
    }
    assert len(reference) == len(dict(model.named_parameters())) == 272
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for name, tensor in reference.items():
        *block, module, _ = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        weight = model.get_parameter(f"{prefix}{names[module]}.weight").detach().numpy()
        if module in ("attn_q", "attn_k"):
            weight = interleave(weight, 9 if module == "attn_q" else 3)
        values = gguf_package.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(weight, values), name


@pytest.mark.model
def test_default_config(default_file):
    config = gguf_families.load_config(default_file)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.tie_word_embeddings
    assert gguf.eos_token_ids(default_file) == (2,)


@pytest.mark.model
def test_default_model_knows_the_capital_of_france(default_file, default_tokenizer):
    model = load_model(default_file, torch.float32)
    ids = default_tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert default_tokenizer.decode(best) == " Paris"


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_default_tokenizer_round_trips(default_tokenizer, text):
    assert default_tokenizer.decode(default_tokenizer(text).input_ids) == text


@pytest.mark.model
def test_default_chat_template(default_tokenizer):
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    text = default_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = default_tokenizer(text).input_ids
    assert ids == default_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert default_tokenizer.eos_token == default_tokenizer.pad_token == "<|im_end|>"


@pytest.mark.model
def test_default_token_ids_are_those_of_transformers_but_before_digits(
    default_file, default_tokenizer
):
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(default_file.path)[:2])
    for text in TEXTS:
        if not any(character.isnumeric() for character in text):
            assert default_tokenizer(text).input_ids == theirs.encode(text).ids, text
    # Digits are cut off first, so the blanks before them stay together, as this model writes
    # them itself; transformers does not know this splitter and takes GPT-2's.
    tokens = default_tokenizer.tokenize("List:\n\n12  34")
    assert tokens == ["List", ":", "ĊĊ", "1", "2", "ĠĠ", "3", "4"]
    assert theirs.encode("List:\n\n12").tokens == ["List", ":", "Ċ", "Ċ", "1", "2"]


@pytest.mark.model
def test_default_model_itself_writes_blanks_before_digits_our_way(default_file, default_tokenizer):
    """The splitting shows in the model's own habits: two newlines before a list are one token."""
    model = load_model(default_file, torch.float32)
    prompt = "Here are three tips for better sleep:"
    ids = default_tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    one, two = default_tokenizer.convert_tokens_to_ids(["Ċ", "ĊĊ"])
    assert logits[two] > logits[one]


# --- in tiles --------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16], ids=lambda k: k.name)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_file_in_tiles_is_the_model_it_is_otherwise(tmp_path, architecture, kind, tied):
    file = write(
        tmp_path / "m.gguf", tiny(architecture, tie_word_embeddings=tied), architecture, kind=kind
    )
    # Blocks that the kernels have are exact; others are rounded to bfloat16.
    rounded = load_model(file, torch.bfloat16 if kind is Kind.F16 else torch.float32)
    model = in_tiles(file).eval()
    assert not linear_layers(model) and misfit(model) is None
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        expected, logits = rounded.float()(ids).logits, model(ids).logits
        fused = FusedTrunk(model, kernels.find())
        span = Span.after([0, 0], 20, ids.device)
        quick = fused.forward(ids, span, fused.new_cache(20)).logits
    limit = 0.02 if kind is Kind.F16 else 1e-3  # of the embedding, which stays as it is
    assert (logits - expected).norm() < limit * expected.norm()
    assert (quick - logits).norm() < 0.02 * logits.norm()  # the cache's own rounding
