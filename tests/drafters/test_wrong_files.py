"""Files that are wrong in ways that were met or thought of: one line each, and never a guess."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoint
import tiny_native
import torch
from family_proof import load, write_checkpoint
from safetensors.torch import save_file

import mtplx
from mtplx.errors import MtplxError
from mtplx.models.checkpoint import Checkpoint, generation_defaults, load_tokenizer, locate

LAYER = f"model.layers.{tiny_native.TRUNK_LAYERS}."


def complaint(directory):
    """What loading says of it, which is one line and not a long one."""
    with pytest.raises(MtplxError) as error:
        locate(directory)
        load(directory)
    text = str(error.value)
    assert "\n" not in text and len(text) < 1500
    return text


@pytest.mark.parametrize("count", ["one", [1], {"a": 1}, float("nan"), -1, 1.5, True])
def test_a_promise_that_is_no_number(tmp_path, count):
    tiny_native.write(tmp_path, "glm4_moe", config={"num_nextn_predict_layers": count})
    assert "num_nextn_predict_layers" in complaint(tmp_path)


def renumbered(number):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(LAYER)]:
            tensors[name.replace(LAYER, f"model.layers.{number}.")] = tensors.pop(name)

    return change


@pytest.mark.parametrize("number", [7, 2002, 100000001])
def test_a_layer_number_that_leaves_out_some(tmp_path, number):
    tiny_native.write(tmp_path, "glm4_moe", change=renumbered(number))
    said = complaint(tmp_path)
    assert "numbers leave out some before them" in said and f"model.layers.{number}." in said


def test_many_tensors_are_not_all_named(tmp_path):
    def strip(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name and LAYER in name]:
            del tensors[name]
        for name in [name for name in tensors if name.startswith(f"{LAYER}self_attn")]:
            del tensors[name]

    tiny_native.write(tmp_path, "deepseek_v3", change=strip)
    assert " more; take the checkpoint" in complaint(tmp_path)


def test_the_same_tensor_under_two_prefixes(tmp_path):
    def double(tensors):
        name = f"{LAYER}enorm.weight"
        tensors[f"language_model.{name}"] = tensors[name] + 1

    tiny_native.write(tmp_path, "glm4_moe", change=double)
    assert f"more than once: language_model.{LAYER}enorm.weight" in complaint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight", f"{LAYER}enorm.weight"])
def test_whole_numbers_without_a_format(tmp_path, name, dtype):
    def whole(tensors):
        tensors[name] = tensors[name].to(dtype)

    tiny_native.write(tmp_path, "glm4_moe", change=whole)
    assert f"{name} is of type" in complaint(tmp_path)


@pytest.mark.parametrize("settings", [[1], "x", 3])
def test_quantisation_settings_that_are_none(tmp_path, settings):
    tiny_native.write(tmp_path, "glm4_moe", config={"quantization_config": settings})
    complaint(tmp_path)


def test_a_layer_of_weights_that_the_index_does_not_list(tmp_path):
    tiny_native.write(tmp_path, "glm4_moe", mtp_layers=0, promised=1)
    save_file({f"{LAYER}enorm.weight": torch.ones(3)}, tmp_path / "mtp.safetensors")
    (note,) = load(tmp_path)[2]
    assert "hold none (mtp.safetensors beside them is not in their index)" in note


@pytest.mark.parametrize("file", [".", "../other.safetensors"])
def test_an_index_that_lists_no_file(tmp_path, file):
    directory = tiny_native.write(tmp_path / "model", "glm4_moe")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["x"] = file
    path.write_text(json.dumps(index))
    assert "which is no weight file" in complaint(directory)


@pytest.mark.parametrize("tokens", ["x", ["a"], [None], [[1]], True])
def test_end_tokens_that_are_none(tmp_path, tokens):
    tiny_native.write(tmp_path, "glm4_moe")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    with pytest.raises(MtplxError, match=r"eos_token_id holds .*, which is no token id"):
        generation_defaults(Checkpoint("tiny", tmp_path))


@pytest.mark.parametrize("text", [None, {}])
def test_a_language_model_of_which_nothing_is_said(tmp_path, text):
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    write_checkpoint(
        tmp_path, config | {"text_config": text}, {"mtp.fc.weight": torch.ones(2)}, False
    )
    assert "text_config is empty" in complaint(tmp_path)


def test_a_config_of_images_by_the_name_of_its_text(tmp_path):
    config = {"model_type": "qwen3_5_text", "text_config": {"model_type": "qwen3_5_text"}}
    write_checkpoint(tmp_path, config, {"mtp.fc.weight": torch.ones(2)}, False)
    complaint(tmp_path)


def test_a_window_that_ends_texts_is_noted(tmp_path):
    tiny_checkpoint.write(tmp_path)
    path = tmp_path / "config.json"
    changes = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 20,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    llm = mtplx.load(tmp_path, deterministic=True, dtype="float32")
    assert llm.trunk.context == 20
    assert any("20 tokens, which is the model's sliding window: leave" in n for n in llm.notes)
    assert not mtplx.load(tmp_path, dtype="float32").notes


def test_a_directory_without_a_tokenizer(tmp_path):
    """Of some types transformers makes one that knows no token."""
    from families.test_qwen import TestQwen35

    proof = TestQwen35()
    write_checkpoint(tmp_path, proof.config, proof.tensors())
    with pytest.raises(MtplxError, match="no tokenizer files there"):
        load_tokenizer(Checkpoint("tiny", tmp_path))
