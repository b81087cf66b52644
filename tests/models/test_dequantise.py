"""Quantised tensors read as plain ones, against what their formats say they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import quantised
import tiny_checkpoint
import torch
from quantised import FORMATS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import mtplx
from mtplx import MtplxError
from mtplx.models import checkpoint as loading
from mtplx.models.checkpoint import Checkpoint, plain_tensors
from mtplx.models.dequantise import plain, unpack
from mtplx.models.headers import StoredTensor

WIDE = [(32, 48), (8, 64), (24, 40)]


def read(directory, tensors, settings):
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with plain_tensors(Checkpoint("tiny", directory)) as found:
        return {name: (list(part.get_shape()), part[...]) for name, part in found.items()}


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_what_its_numbers_stand_for(tmp_path, format, shape):
    draw, settings = FORMATS[format]
    quantised.NOISE.manual_seed(3)
    parts, expected = draw(shape)
    tensors = {f"mtp.layers.0.mlp.up_proj.{part}": tensor for part, tensor in parts.items()}
    norm = torch.randn(5).bfloat16()
    found = read(tmp_path, tensors | {"mtp.norm.weight": norm}, settings)
    assert sorted(found) == ["mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"]
    told, weight = found["mtp.layers.0.mlp.up_proj.weight"]
    assert (told, weight.dtype) == (list(shape), torch.float32)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(found["mtp.norm.weight"][1], norm)


@pytest.mark.parametrize("bits", [4, 8])
def test_headers_alone_tell_of_packed_rows_what_their_scales_leave_open(bits):
    """Where the settings name both widths; a header has no values, so not those of `_shape`."""
    parts, expected = quantised.packed((16, 3 * quantised.GROUP), bits)
    widths = [{"weights": {"num_bits": n, "group_size": quantised.GROUP}} for n in (8, 4)]
    settings = {"quant_method": "compressed-tensors", "config_groups": dict(enumerate(widths))}
    kinds = {torch.int32: "i32", torch.int64: "i64"}
    headers = {
        f"a.{name}": StoredTensor(
            tuple(part.shape), kinds.get(part.dtype) or str(part.dtype)[6:], part.nbytes
        )
        for name, part in parts.items()
    }
    (weight,) = plain(headers, settings, Path("here")).values()
    assert weight.get_shape() == list(expected.shape)
    assert weight[...].is_meta and weight[...].shape == expected.shape


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_other_widths_lie_across_words(tmp_path, bits):
    for name, draw in {"packed": quantised.packed, "gptq": quantised.gptq}.items():
        quantised.NOISE.manual_seed(bits)
        parts, expected = draw((32, 96), bits)
        settings = FORMATS[name][1] | {"bits": bits}
        (found,) = read(tmp_path, {f"a.{part}": t for part, t in parts.items()}, settings).values()
        torch.testing.assert_close(found[1], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpacking_is_that_of_one_long_number(bits):
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31, (3, 5), generator=generator).to(torch.int32)
    count = 5 * 32 // bits
    for row, numbers in zip(words.tolist(), unpack(words, bits, count).tolist(), strict=True):
        long = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row))
        assert numbers == [long >> bits * i & (1 << bits) - 1 for i in range(count)]


def test_experts_that_lie_together_have_their_scales_together(tmp_path):
    weight = torch.randn(3, 32, 16).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 1)
    tensors = {"mlp.experts.gate_up_proj": weight, "mlp.experts.gate_up_proj_scale_inv": scales}
    ((name, (_, found)),) = read(tmp_path, tensors, FORMATS["fp8"][1]).items()
    assert name == "mlp.experts.gate_up_proj"
    expected = weight.float().view(3, 2, 16, 16) * scales[..., None]
    assert torch.equal(found, expected.view(3, 32, 16))


@pytest.mark.parametrize("kind", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_may_be_exponents_of_two(tmp_path, kind):
    """MXFP8, with a scale for each 32 inputs."""
    weight = torch.randn(4, 64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120, 127], [130, 121], [127, 127], [100, 128]], dtype=torch.uint8)
    tensors = {"a.weight": weight, "a.weight_scale": exponents.view(kind)}
    ((_, found),) = read(tmp_path, tensors, FORMATS["fp8 by rows"][1]).values()
    scales = (2.0 ** (exponents.double() - 127)).float()
    assert torch.equal(found, weight.float() * scales.repeat_interleave(32, 1))


def test_float8_without_a_word_in_the_config_has_its_scales_too(tmp_path):
    parts, expected = quantised.fp8_rows((8, 16))
    found = read(tmp_path, {f"a.{part}": tensor for part, tensor in parts.items()}, None)
    assert torch.equal(found["a.weight"][1], expected)


def test_what_is_plain_is_taken_as_it_is(tmp_path):
    """Whatever the config says, and though a name ends as that of a scale does."""
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 8).bfloat16(),
        "model.layers.0.router.per_expert_scale": torch.randn(3),
    }
    found = read(tmp_path, tensors, FORMATS["fp8"][1])
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name][1], tensors[name]) for name in tensors)


NEEDED = {
    "fp8": "weight_scale_inv",
    "fp8 by rows": "weight_scale",
    "int8": "weight_scale",
    "packed": "weight_shape",
    "nvfp4": "weight_scale",
    "gptq": "qzeros",
    "awq": "scales",
}


@pytest.mark.parametrize("format, part", NEEDED.items())
def test_a_missing_part_is_named(tmp_path, format, part):
    parts, _ = FORMATS[format][0]((32, 48))
    tensors = {f"mtp.fc.{name}": tensor for name, tensor in parts.items() if name != part}
    missing = "mtp.fc.weight_scale_inv" if format.startswith("fp8") else f"mtp.fc.{part}"
    with pytest.raises(MtplxError, match=f"{missing}, which tells .* is missing") as error:
        read(tmp_path, tensors, FORMATS[format][1])
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight_scale_inv", "mtp.fc.weight_scale", "mtp.fc.qzeros", "mtp.fc.g_idx"]
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_part_that_is_left_over_is_named(tmp_path, name, beside):
    tensors = {name: torch.ones(1, 1), "mtp.norm.weight": torch.ones(3)}
    if beside:
        tensors["mtp.fc.weight"] = torch.ones(2, 4)
    with pytest.raises(MtplxError, match=f"{name} is left over"):
        read(tmp_path, tensors, FORMATS["fp8"][1])


@pytest.mark.parametrize("format", ["packed", "gptq"])
def test_a_weight_that_is_there_twice_is_named(tmp_path, format):
    parts, weight = FORMATS[format][0]((32, 48))
    tensors = {f"mtp.fc.{part}": tensor for part, tensor in parts.items()}
    with pytest.raises(MtplxError, match=r"mtp.fc.weight are the same weight twice"):
        read(tmp_path, tensors | {"mtp.fc.weight": weight}, FORMATS[format][1])


MISSHAPEN = {
    "fp8": ("weight_scale_inv", (5, 3)),
    "int8": ("weight_scale", (32, 48, 1)),
    "packed": ("weight_scale", (32, 7)),
    "packed with zeros": ("weight_zero_point", (5, 6)),
    "nvfp4": ("weight_scale", (32, 7)),
    "gptq": ("qzeros", (5, 4)),
    "awq": ("qweight", (48, 7)),
}


@pytest.mark.parametrize("format, part, shape", [(f, *p) for f, p in MISSHAPEN.items()])
def test_a_part_of_another_shape_is_one_clear_line(tmp_path, format, part, shape):
    parts, _ = FORMATS[format][0]((32, 48))
    parts[part] = torch.zeros(shape, dtype=parts[part].dtype)
    tensors = {f"mtp.fc.{name}": tensor for name, tensor in parts.items()}
    with pytest.raises(MtplxError, match=r"mtp.fc.* quantised in a way that is not read here"):
        read(tmp_path, tensors, FORMATS[format][1])


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    parts, expected = quantised.gptq((32, 48))
    file = tmp_path / "model.safetensors"
    save_file({f"a.{part}": tensor for part, tensor in parts.items()}, file)
    asked = []

    class Watched:
        def __init__(self, slice, name):
            self.slice, self.name = slice, name
            self.get_shape, self.get_dtype = slice.get_shape, slice.get_dtype

        def __getitem__(self, index):
            asked.append(self.name)
            return self.slice[index]

    with safe_open(file, framework="pt") as opened:
        slices = {name: Watched(opened.get_slice(name), name) for name in list(opened.keys())}
        found = plain(slices, FORMATS["gptq"][1], Path("tiny"))
        assert asked == [] and found["a.weight"].get_shape() == [32, 48]
        torch.testing.assert_close(found["a.weight"][...], expected)
    assert sorted(asked) == sorted(slices)


@pytest.mark.parametrize("format", ["fp8", "gptq", "awq", "packed"])
def test_a_quantised_model_writes_what_the_plain_one_does(tmp_path, format):
    """By the public face, with a tokenizer; tensors in the config's own type."""
    texts = []
    tiny_checkpoint.write(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "stored")
    file = tmp_path / "plain" / "model.safetensors"
    stored, weights = quantised.quantise(load_file(file), format)
    save_file(weights, file, {"format": "pt"})
    save_file(stored, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    config["quantization_config"] = FORMATS[format][1]
    (tmp_path / "stored" / "config.json").write_text(json.dumps(config))
    for directory in ("plain", "stored"):
        llm = mtplx.load(tmp_path / directory, device="cpu", dtype="float32")
        greedy = mtplx.SamplerConfig(temperature=0.0)
        texts.append(llm.generate("abc", max_tokens=24, sampling=greedy).token_ids)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize(
    "device, answer, stays",
    [
        ("cuda", {"dequantize": False}, True),
        ("cuda", {}, True),
        ("cuda", {"dequantize": True}, False),
        ("cuda", ImportError("pip install a package"), False),
        ("cuda", RuntimeError("a newer GPU is needed"), False),
        ("cpu", {}, False),
        ("mps", {}, False),
    ],
)
def test_weights_stay_quantised_only_where_transformers_computes_with_them(
    monkeypatch, device, answer, stays
):
    """transformers' answers are made up: what it says on a GPU depends on the GPU."""

    def ask(config, own, device_map, *_):
        assert device_map == {"": torch.device(device)}
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(quantization_config=SimpleNamespace(**answer)), config, device_map

    monkeypatch.setattr("transformers.quantizers.auto.get_hf_quantizer", ask)
    assert loading._computes_quantised(LlamaConfig(), torch.device(device)) == stays
