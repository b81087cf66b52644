"""Layers rounded while a checkpoint is read, against the same ones rounded afterwards."""

import json
import re
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
)

from mtplx import MtplxError, kernels
from mtplx.models import checkpoint as loading
from mtplx.models.checkpoint import load_model, load_rounded, locate
from mtplx.models.linear import KernelLinear, linear_layers
from mtplx.models.rounding import Rounder

pytestmark = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")

SIZES = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama with biases": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES, query_pre_attn_scalar=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    # Of text and images: its vision tower gives first values to what it finds in layers below.
    "gemma3": Gemma3Config(
        text_config={**SIZES, "query_pre_attn_scalar": 16},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
}


@pytest.fixture(params=CONFIGS)
def directory(request, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_are_those_rounded_afterwards(directory, bits):
    seen = []
    found = load_rounded(
        locate(directory), kernels.find(), f"int{bits}", lambda *now: seen.append(now)
    )
    expected = load_model(locate(directory), torch.bfloat16)
    count = len(linear_layers(expected))
    Rounder(kernels.find(), bits).take_all(expected)
    assert type(found) is type(expected) and not linear_layers(found)
    assert seen == [(done, count) for done in range(1, count + 1)]
    ours, theirs = (
        {name: part for name, part in model.named_modules() if isinstance(part, KernelLinear)}
        for model in (found, expected)
    )
    assert list(ours) == list(theirs) and len(ours) == count
    for name, layer in ours.items():
        assert torch.equal(layer.data, theirs[name].data)
        assert (layer.bias is None) == (theirs[name].bias is None)
        assert layer.bias is None or torch.equal(layer.bias, theirs[name].bias)
    ours, theirs = found.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(found.float()(ids).logits, expected.float()(ids).logits)


def test_no_layer_is_read_before_the_last_one_is_taken(directory, monkeypatch):
    taken, take = [], Rounder.take

    def watched(self, model, name, weight, bias):
        head = model.get_output_embeddings()
        assert all(
            layer.weight.is_meta for _, layer in linear_layers(model) if layer is not head
        ), name
        assert not weight.is_meta
        taken.append(name)
        take(self, model, name, weight, bias)

    monkeypatch.setattr(Rounder, "take", watched)
    model = load_rounded(locate(directory), kernels.find(), "int8")
    assert len(taken) == len(set(taken)) > 5
    # What remains is a plain model, which does not call itself quantised.
    assert not model.is_quantized and not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")


def test_what_the_report_raises_comes_back(directory):
    class Enough(Exception):
        pass

    def report(done, total):
        if done == 3:
            raise Enough

    with pytest.raises(Enough):
        load_rounded(locate(directory), kernels.find(), "int8", report)


def changed(directory, change):
    """The checkpoint with one shard's tensors changed: the first that has a layer's gate."""
    for shard in sorted(directory.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in list(tensors):
            if name.endswith("layers.1.self_attn.o_proj.weight"):
                change(tensors, name)
                save_file(tensors, shard, metadata={"format": "pt"})
                return name
    raise AssertionError


def of_another_shape(tensors, name):
    tensors[name] = tensors[name][:, :-1].contiguous()


def not_finite(tensors, name):
    tensors[name][3, 5] = torch.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, name: tensors.pop(name),
            r"1 weights are missing, first \S*{}.weight: ",
        ),
        (of_another_shape, r"1 weights do not fit the config, first \S*{}.weight with shape"),
        (not_finite, r"{} cannot be quantised: its weights are not finite"),
    ],
    ids=["missing", "shape", "not finite"],
)
def test_what_is_wrong_with_a_checkpoint_is_said(directory, change, message):
    name = changed(directory, change)
    index = directory / "model.safetensors.index.json"
    if change not in (of_another_shape, not_finite):
        listed = json.loads(index.read_text())
        del listed["weight_map"][name]
        index.write_text(json.dumps(listed))
    for bits in (4, 8):
        with pytest.raises(MtplxError) as caught:
            load_rounded(locate(directory), kernels.find(), f"int{bits}")
        # Models of text and images call their layers otherwise than their files do.
        assert re.search(message.format(r"layers\.1\.self_attn\.o_proj"), str(caught.value))


def test_a_checkpoint_in_a_format_of_others_is_read_before_it_is_rounded(directory, monkeypatch):
    """What transformers makes of it is rounded: no weight is one that is read."""
    edited = json.loads((directory / "config.json").read_text())
    edited["quantization_config"] = {"quant_method": "bitsandbytes"}
    (directory / "config.json").write_text(json.dumps(edited))
    asked = []

    def load(checkpoint, dtype):
        asked.append(dtype)
        raise MtplxError("read by its own loader")

    monkeypatch.setattr(loading, "load_model", load)
    with suppress(MtplxError):
        load_rounded(locate(directory), kernels.find(), "int8")
    assert asked == [torch.bfloat16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "1 weights are missing, first {name}: download"),
        (
            lambda tensors, name: tensors.update({name: tensors[name][:-1].contiguous()}),
            "1 weights do not fit the config, first {name} with shape [31] instead of [32]",
        ),
    ],
    ids=["missing", "shape"],
)
def test_what_is_wrong_with_a_bias_is_said(tmp_path, change, message):
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2, tied"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors, name = (
        load_file(tmp_path / "model.safetensors"),
        "model.layers.1.self_attn.q_proj.bias",
    )
    change(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MtplxError) as caught:
        load_rounded(locate(tmp_path), kernels.find(), "int8")
    assert message.format(name=name) in str(caught.value)
