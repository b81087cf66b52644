"""Quantised checkpoints, trunk and MTP layers, beside plain ones of the weights they stand for."""

from __future__ import annotations

import json
from functools import partial

import drafters.families.test_mimo as mimo
import drafters.families.test_qwen as qwen
import pytest
import tiny_native
import torch
from family_proof import (
    PROMPTS,
    SAMPLED,
    decode,
    load,
    read_tensors,
    watch_drafts,
    write_checkpoint,
)
from quantised import FORMATS, quantise

from mtplx import MtplxError, kernels
from mtplx.drafters.native import load_native_head
from mtplx.inspection import inspect
from mtplx.models.blocks import Blocks
from mtplx.models.checkpoint import Checkpoint, load_model, load_rounded
from mtplx.models.fused import FusedTrunk
from mtplx.models.linear import KernelLinear, hand_over, linear_layers, tiles
from mtplx.models.rounding import rounded
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk

needs_kernels = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")

LAYER = f"model.layers.{tiny_native.TRUNK_LAYERS}."


class Experts(qwen.TestQwen35Moe):
    """Experts apart, as in the quantised files."""

    moe = moe_mtp = False


def checkpoint(family, directory, sizes=None):
    """The config and tensors of a plain checkpoint in float32."""
    if family in tiny_native.FAMILIES:
        tiny_native.write(directory, family, config=sizes)
        return json.loads((directory / "config.json").read_text()), read_tensors(directory)
    proof = {"qwen3_5": qwen.TestQwen35, "qwen3_5_moe": Experts}[family]()
    return proof.config, {name: tensor.float() for name, tensor in proof.tensors().items()}


def is_mtp(name):
    return name.startswith((LAYER, "mtp."))


def write(directory, family, format, leave=lambda name: False, settings=None, sizes=None):
    """A quantised checkpoint and the plain one of the same weights; returns their directories."""
    config, tensors = checkpoint(family, directory / "source", sizes)
    stored, plain = quantise(tensors, format, leave)
    assert len(stored) > len(plain)
    quantisation = {"quantization_config": settings or FORMATS[format][1]}
    return (
        write_checkpoint(directory / "quantised", config | quantisation, stored),
        write_checkpoint(directory / "plain", config, plain),
    )


def same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7)


def same_drafts(one, other):
    """The text and the drafts of two, each a trunk and its head."""
    texts, cycles = [], ([], [])
    for seen, (trunk, head) in zip(cycles, (one, other), strict=True):
        texts.append(decode(trunk, head, PROMPTS, 3, watch=partial(watch_drafts, seen))[0])
    assert texts[0] == texts[1]
    for (_, known, mine, logits), (_, same, theirs, expected) in zip(*cycles, strict=True):
        assert (known, mine.tolist()) == (same, theirs.tolist())
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    return texts[0]


CASES = [
    *(("glm4_moe", format) for format in FORMATS),
    *(
        pytest.param(family, format, marks=pytest.mark.slow)
        for family in ("deepseek_v3", "qwen3_5", "qwen3_5_moe")
        for format in ("fp8", "packed with zeros", "gptq", "awq")
    ),
]


@pytest.mark.parametrize("family, format", CASES)
def test_trunk_and_head_are_those_of_the_plain_weights(tmp_path, family, format):
    stored, plain = write(tmp_path, family, format)
    trunk, head, notes = load(stored)
    expected, theirs, _ = load(plain)
    assert notes == () and head is not None
    same_weights(trunk.model, expected.model)
    same_weights(head.model, theirs.model)
    assert not hasattr(trunk.model.config, "quantization_config")
    texts = same_drafts((trunk, head), (expected, theirs))
    assert texts == decode(trunk, None, PROMPTS, 0)[0]


@pytest.mark.parametrize("format", ["fp8", "gptq"])
def test_weights_are_rounded_once_to_the_type_asked_for(tmp_path, format):
    stored, plain = write(tmp_path, "glm4_moe", format)
    (trunk, head, _), (expected, theirs, _) = (load(at, torch.bfloat16) for at in (stored, plain))
    same_weights(trunk.model, expected.model)
    same_weights(head.model, theirs.model)


MIXED = {
    # The config's lists name modules that no file has, or all of them: the tensors decide.
    "plain layer": (is_mtp, {"modules_to_not_convert": ["mtp", "model.mtp.0.fc"], "ignore": []}),
    "plain trunk": (lambda name: not is_mtp(name), {"modules_to_not_convert": ["re:.*mtp.*"]}),
    "plain attention": (lambda name: "self_attn" in name, {"modules_to_not_convert": None}),
    "some experts plain": (lambda name: "experts.2." in name, {"modules_to_not_convert": ["mlp"]}),
}


@pytest.mark.parametrize("leave, lists", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe"])
def test_what_the_file_has_plain_is_taken_so_whatever_the_config_lists(
    tmp_path, family, leave, lists
):
    stored, plain = write(tmp_path, family, "fp8", leave, FORMATS["fp8"][1] | lists)
    (trunk, head, _), (expected, theirs, _) = load(stored), load(plain)
    same_weights(trunk.model, expected.model)
    same_weights(head.model, theirs.model)
    found = inspect(stored)
    assert found.mtp.usable
    assert any("quantised (fp8) and are read as plain ones" in note for note in found.notes)


@pytest.mark.parametrize("missing", ["weight_scale_inv", "weight"])
def test_a_tensor_without_its_other_half_is_one_line_that_names_it(tmp_path, missing):
    name = f"{LAYER}eh_proj.{missing}"
    config, tensors = checkpoint("deepseek_v3", tmp_path / "source")
    stored, _ = quantise(tensors, "fp8")
    del stored[name]
    write_checkpoint(tmp_path, config | {"quantization_config": FORMATS["fp8"][1]}, stored)
    with pytest.raises(MtplxError, match=f"{LAYER}eh_proj.weight_scale_inv") as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_layers_that_a_quantised_file_lost_are_a_note(tmp_path):
    """As files of tools have it that know only the trunk: nothing is drafted, and nothing drawn."""
    config, tensors = checkpoint("deepseek_v3", tmp_path / "source")
    tensors = {name: tensor for name, tensor in tensors.items() if not is_mtp(name)}
    stored, _ = quantise(tensors, "awq")
    write_checkpoint(tmp_path, config | {"quantization_config": FORMATS["awq"][1]}, stored)
    _, head, (note,) = load(tmp_path)
    assert head is None and "promises 1 MTP layer(s), but the weight files hold none" in note
    found = inspect(tmp_path)
    assert (found.mtp.kind, found.mtp.usable) == ("missing", False)


def test_a_quantised_tensor_that_no_layer_has_is_named(tmp_path):
    config, tensors = checkpoint("glm4_moe", tmp_path / "source")
    tensors[f"{LAYER}self_attn.gate_proj.weight"] = torch.zeros(32, 32)
    stored, _ = quantise(tensors, "gptq")
    write_checkpoint(tmp_path, config | {"quantization_config": FORMATS["gptq"][1]}, stored)
    with pytest.raises(MtplxError, match=f"no place for .*{LAYER}self_attn.gate_proj.weight"):
        load(tmp_path)


@pytest.mark.parametrize("of_mtp", [True, False])
def test_formats_that_are_not_read_leave_the_layers_that_are_plain(tmp_path, of_mtp):
    """The trunk's weights do not matter for the answer."""
    config, tensors = checkpoint("deepseek_v3", tmp_path / "source")
    trunk, _, _ = load(write_checkpoint(tmp_path / "plain", config, tensors))
    name = f"{LAYER if of_mtp else 'model.layers.0.'}self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.uint8)
    config |= {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    stored = write_checkpoint(tmp_path / "stored", config, tensors)
    head, notes = load_native_head(Checkpoint("tiny", stored), trunk)
    assert inspect(stored).mtp.usable == (not of_mtp)
    if of_mtp:
        (note,) = notes
        assert head is None and "quantised in bitsandbytes format, which is not read here" in note
    else:
        assert head is not None and notes == ()


# --- rounded layers --------------------------------------------------------------------------

WIDE = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "v_head_dim": 8,
}
"""Sizes of which the kernels' groups of 32 make up every row."""


def wide(family):
    return {key: size for key, size in WIDE.items() if key in tiny_native.FAMILIES[family]}


def steps(head, layer=0):
    """The logits of a text of made-up states, the same for every head."""
    noise = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 5, tiny_native.HIDDEN, generator=noise)
    span = Span.after([0], 5, hidden.device)
    states = head.step(torch.tensor([[3, 1, 4, 1, 5]]), hidden, span, head.new_cache(8), layer)
    return head.logits(states, layer)


def rounded_as(bits, head, whole):
    """Put the numbers that a rounded head's layers stand for into a whole one."""
    layers = dict(linear_layers(whole.model))
    for name, layer in layers.items():
        mine = head.model.get_submodule(name)
        assert isinstance(mine, KernelLinear)
        blocks = rounded(layer.weight, bits)
        if isinstance(blocks, Blocks):
            assert mine.bits == bits and torch.equal(mine.data, tiles(blocks))
            layer.weight.data = blocks.dequantize()
        else:
            assert mine.bits is None and torch.equal(mine.data, layer.weight)
    assert sum(head.model.get_submodule(name).bits == bits for name in layers) >= 4


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_5_moe"])
def test_beside_a_trunk_in_few_bits_a_head_is_in_as_many(tmp_path, family, bits):
    directory = write_checkpoint(tmp_path / "it", *checkpoint(family, tmp_path / "source"))
    found = Checkpoint("tiny", directory)
    model = load_model(found, torch.float32)
    for name, layer in linear_layers(model):
        narrow = layer is model.get_output_embeddings()
        weight = layer.weight.bfloat16() if narrow else rounded(layer.weight, bits)
        hand_over(model, name, kernels.find(), weight, layer.bias)
    trunk = Trunk(model)
    head, notes = load_native_head(found, trunk)
    assert notes == () and not linear_layers(head.model)
    _, whole, _ = load(directory)
    distance = (steps(head) - steps(whole)).norm() / steps(whole).norm()
    assert 0 < distance < (0.03 if bits == 8 else 0.5)
    rounded_as(bits, head, whole)
    # What is left is the kernels' own rounding, and the trunk's output head in bfloat16.
    torch.testing.assert_close(steps(head), steps(whole), rtol=0.02, atol=0.02)
    texts, _ = decode(trunk, head, PROMPTS, 2)
    assert texts == decode(trunk, None, PROMPTS, 0)[0]
    _, stats = decode(trunk, head, PROMPTS, 2, SAMPLED)
    assert sum(sum(s.accepted_by_position) for s in stats)


@needs_kernels
def test_beside_a_whole_pass_of_the_kernels_too(tmp_path):
    """Of which other weights are in bfloat16, where the kernels' results are float32."""
    proof = mimo.TestMiMo()
    found = Checkpoint("tiny", write_checkpoint(tmp_path, proof.config, proof.tensors()))
    trunk = FusedTrunk(load_rounded(found, kernels.find(), "int4"), kernels.find())
    assert trunk.dtype == torch.bfloat16
    head, _ = load_native_head(found, trunk)
    assert {part.dtype for part in head.model.parameters()} == {torch.float32}
    assert not linear_layers(head.model)
    _, stats = decode(trunk, head, PROMPTS, 3, SAMPLED)
    assert sum(sum(s.accepted_by_position) for s in stats)
    assert decode(trunk, head, PROMPTS, 3)[0] == decode(trunk, None, PROMPTS, 0)[0]


@needs_kernels
@pytest.mark.parametrize("format", ["fp8", "packed", "gptq"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_quantised_checkpoints_are_rounded_from_what_they_stand_for(tmp_path, family, format):
    """Once, from float32: the layers are those of the plain checkpoint."""
    models, heads = [], []
    for directory in write(tmp_path, family, format, sizes=wide(family)):
        found = Checkpoint("tiny", directory)
        models.append(load_rounded(found, kernels.find(), "int8").float())
        trunk = Trunk(models[-1])
        heads.append(load_native_head(found, trunk)[0])
        texts, _ = decode(trunk, heads[-1], PROMPTS, 2)
        assert texts == decode(trunk, None, PROMPTS, 0)[0]
    for one, other in (models, [head.model for head in heads]):
        same_weights(one, other)
        count = 0
        for name, layer in one.named_modules():
            if isinstance(layer, KernelLinear):
                assert torch.equal(layer.data, other.get_submodule(name).data)
                count += 1
        assert count > 4


@needs_kernels
@pytest.mark.parametrize("wrong", ["missing", "misshapen", "left over"])
def test_a_head_to_be_rounded_is_as_complete_as_any(tmp_path, wrong):
    name = f"{LAYER}self_attn.o_proj.weight"

    def change(tensors):
        if wrong == "missing":
            del tensors[name]
        elif wrong == "misshapen":
            tensors[name] = tensors[name][:, :16].clone()
        else:
            tensors[name.replace("o_proj", "p_proj")] = tensors[name].clone()

    tiny_native.write(tmp_path, "glm4_moe", config=wide("glm4_moe"), change=change)
    found = Checkpoint("tiny", tmp_path)
    trunk = Trunk(load_rounded(found, kernels.find(), "int8").float())
    named = name.replace("o_proj", "p_proj") if wrong == "left over" else name
    with pytest.raises(MtplxError, match=f": {named};"):
        load_native_head(found, trunk)
