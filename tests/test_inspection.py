"""What `inspect` finds, on checkpoints written for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub
import numpy as np
import pytest
import tiny_checkpoint
import tiny_native
import torch
from family_proof import read_tensors, write_checkpoint
from gguf import GGUFWriter
from gguf_layout import write_gguf
from quantised import FORMATS, quantise
from safetensors.numpy import load_file, save_file

from mtplx import MtplxError, inspection, kernels, load


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "model")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return tiny_checkpoint.write_head(tmp_path / "head")


def change(file: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    alter(content)
    file.write_text(json.dumps(content))


def add_tensors(model: Path, *names: str) -> None:
    file = model / "model.safetensors"
    more = {name: np.zeros((3, 5), dtype=np.float32) for name in names}
    save_file(load_file(file) | more, file)


def test_the_facts_of_a_directory(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    found = inspection.inspect(model)
    assert found.format == "safetensors"
    assert found.architecture == "LlamaForCausalLM"
    assert found.parameters == sum(tensor.size for tensor in stored.values())
    assert found.bytes == sum(tensor.nbytes for tensor in stored.values())
    assert found.dtypes == {"float32": found.parameters}
    assert (found.layers, found.hidden_size, found.context) == (2, 16, 512)
    assert found.vocab_size == tiny_checkpoint.VOCAB_SIZE
    assert found.chat_template
    assert found.mtp == inspection.Mtp("none")
    assert not found.remote and found.drafter is None
    assert found.runs and not found.problems


def test_the_checkpoints_own_sampling(tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.6}
    found = inspection.inspect(tiny_checkpoint.write(tmp_path, generation=own, template=None))
    assert found.sampling == {"temperature": 0.6}
    assert not found.chat_template


def test_weights_are_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", forbidden)
    monkeypatch.setattr("safetensors.torch.load_file", forbidden)
    monkeypatch.setattr("mtplx.models.eagle3.Eagle3Head.sort_vocabulary", forbidden)
    assert inspection.inspect(model).runs


# --- MTP layers ------------------------------------------------------------------------------


def test_layers_behind_the_last_are_native_mtp_layers(model: Path) -> None:
    add_tensors(model, "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight")
    found = inspection.inspect(model)
    mtp = found.mtp
    assert (mtp.kind, mtp.found, mtp.parameters, mtp.bytes) == ("native", 2, 30, 120)
    # A Llama with such layers is not a family that ships them.
    assert (mtp.status, mtp.family, mtp.usable) == ("unknown layout", (), False)
    assert mtp.seen == ("model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight")
    assert (
        found.notes
        == load(model).notes
        == ("nothing is drafted: the MTP layers of a llama model are not run yet",)
    )


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["mtp.fc.weight", "mtp.norm.weight"], 1),
        (["mtp.layers.0.mlp.weight", "mtp.layers.1.mlp.weight"], 2),
        (["model.mtp_layers.0.a", "model.mtp_layers.0.b"], 1),
        (["model.mtp_layers.0.a", "model.mtp_layers.1.a"], 2),
        (["model.mtp_emb_norm.0.weight", "model.mtp_block.1.mlp.weight"], 2),
    ],
)
def test_modules_named_mtp_are_native_mtp_layers(
    model: Path, names: list[str], layers: int
) -> None:
    add_tensors(model, *names)
    mtp = inspection.inspect(model).mtp
    assert (mtp.kind, mtp.found) == ("native", layers)


def test_of_many_tensors_the_first_names_are_told(model: Path) -> None:
    add_tensors(model, *(f"mtp.layers.0.part{i}.weight" for i in range(9)))
    mtp = inspection.inspect(model).mtp
    assert (mtp.tensors, len(mtp.seen)) == (9, inspection.SEEN)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_families_whose_layers_draft(tmp_path: Path, family: str) -> None:
    tiny_native.write(tmp_path, family)
    tiny_checkpoint.tokenizer().save_pretrained(tmp_path)
    found = inspection.inspect(tmp_path)
    mtp = found.mtp
    assert (mtp.kind, mtp.status, mtp.found, mtp.promised) == ("native", "works", 1, 1)
    assert family in mtp.family and mtp.usable and found.drafter == "native"
    assert (mtp.depth, mtp.depths) == (1, (1, 3))
    assert mtp.parameters < found.parameters
    assert found.runs


def native(directory: Path, **changes: Any) -> Path:
    tiny_native.write(directory, "deepseek_v3", **changes)
    tiny_checkpoint.tokenizer().save_pretrained(directory)
    return directory


def test_more_layers_are_worth_as_many_tokens(tmp_path: Path) -> None:
    mtp = inspection.inspect(native(tmp_path, mtp_layers=4)).mtp
    assert (mtp.status, mtp.found, mtp.depths) == ("works", 4, (1, 4))


@pytest.mark.parametrize(
    ("promised", "status"), [(0, "works"), (1, "loads unverified"), (3, "loads unverified")]
)
def test_another_number_than_promised(tmp_path: Path, promised: int, status: str) -> None:
    found = inspection.inspect(native(tmp_path, mtp_layers=2, promised=promised))
    assert (found.mtp.status, found.mtp.found, found.mtp.promised) == (status, 2, promised)
    assert found.mtp.usable and found.notes == load(tmp_path).notes
    assert "the weight files hold 2: what they hold drafts" in found.notes[0]


def lose_norm(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.2.hnorm.weight"]


def lose_expert(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.2.mlp.experts.1.up_proj.weight"]


def widen(tensors: dict[str, Any]) -> None:
    name = "model.layers.2.eh_proj.weight"
    tensors[name] = tensors[name].mT.contiguous()


def add_another(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.shared_head.scale"] = tensors["model.norm.weight"].clone()


@pytest.mark.parametrize("damage", [lose_norm, lose_expert, widen, add_another])
def test_what_loading_refuses_is_a_problem_in_the_same_words(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    found = inspection.inspect(native(tmp_path, change=damage))
    assert (found.mtp.kind, found.mtp.status) == ("native", "unknown layout")
    assert not found.runs and not found.mtp.usable and found.mtp.depths is None
    with pytest.raises(MtplxError) as refused:
        load(tmp_path)
    assert found.problems == (str(refused.value),)


def round_some(tensors: dict[str, Any]) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.uint8)


def test_layers_in_a_format_that_is_not_read_are_not_run(tmp_path: Path) -> None:
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    found = inspection.inspect(native(tmp_path, config=settings, change=round_some))
    assert (found.mtp.status, found.mtp.usable) == ("unknown layout", False)
    assert "quantised in bitsandbytes format, which is not read here" in found.notes[0]


def quantised(source: Path, directory: Path, stored: dict[str, Any], format: str) -> Path:
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(directory, config | {"quantization_config": FORMATS[format][1]}, stored)
    tiny_checkpoint.tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_layers_are_read_as_plain_ones(tmp_path: Path, format: str) -> None:
    source = native(tmp_path / "source")
    before = inspection.inspect(source).mtp
    stored, _ = quantise(read_tensors(source), format)
    found = inspection.inspect(quantised(source, tmp_path / "it", stored, format))
    assert found.runs, found.problems
    assert (found.mtp.status, found.mtp.usable, found.mtp.found) == ("works", True, 1)
    assert found.mtp.parameters == before.parameters
    own = [name for name in stored if name.startswith("model.layers.2.")]
    assert found.mtp.tensors == len(own) > before.tensors
    assert found.mtp.bytes == sum(stored[name].nbytes for name in own) < before.bytes
    assert "are read as plain ones" in found.notes[0]


def test_a_scale_that_is_missing_is_a_problem_in_the_words_of_loading(tmp_path: Path) -> None:
    source = native(tmp_path / "source")
    stored, _ = quantise(read_tensors(source), "fp8")
    del stored["model.layers.2.eh_proj.weight_scale_inv"]
    directory = quantised(source, tmp_path / "it", stored, "fp8")
    found = inspection.inspect(directory)
    with pytest.raises(MtplxError) as refused:
        load(directory)
    assert str(refused.value) in found.problems and not found.runs and not found.mtp.usable


def test_a_vision_towers_layers_are_not_mtp_layers(model: Path) -> None:
    add_tensors(model, "vision_tower.encoder.layers.30.mlp.weight")
    assert inspection.inspect(model).mtp.kind == "none"


def test_promised_layers_that_are_missing(model: Path) -> None:
    change(model / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    found = inspection.inspect(model)
    mtp = found.mtp
    assert (mtp.kind, mtp.status, mtp.promised, mtp.found) == ("missing", "heads missing", 1, 0)
    assert found.runs and found.notes == load(model).notes
    assert "promises 1 MTP layer(s)" in found.notes[0]


def test_an_attached_head(model: Path, head: Path) -> None:
    mtp = inspection.inspect(model, head).mtp
    assert (mtp.kind, mtp.where, mtp.depth, mtp.usable) == ("attached", str(head), 3, True)
    assert (mtp.status, mtp.depths) == ("works", (1, 3))
    file = head / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert mtp.bytes == file.stat().st_size - header


def test_a_head_that_does_not_fit_is_a_problem(model: Path, head: Path) -> None:
    change(head / "config.json", lambda c: c["transformer_layer_config"].update(vocab_size=17))
    found = inspection.inspect(model, head)
    assert not found.runs and not found.mtp.usable
    assert "made for a trunk of hidden size 16 and 17 tokens" in found.problems[0]


def test_a_head_of_another_model_is_noted_as_in_loading(model: Path, head: Path) -> None:
    def name_another(config: dict[str, Any]) -> None:
        config["speculators_config"]["verifier"]["name_or_path"] = "org/another"

    change(head / "config.json", name_another)
    found = inspection.inspect(model, head)
    assert found.runs and found.notes == load(model, head=head).notes
    assert "made for org/another" in found.notes[0]


def test_a_head_that_is_not_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MtplxError, match="no head there"):
        inspection.inspect(model, tmp_path / "nowhere")


def test_a_head_with_damaged_weights(model: Path, head: Path) -> None:
    (head / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(MtplxError, match="missing or damaged"):
        inspection.inspect(model, head)


def test_a_head_is_not_a_model(head: Path) -> None:
    with pytest.raises(MtplxError, match=f"a head, not a model: .* --head {head}"):
        inspection.inspect(head)


# --- whether it runs -------------------------------------------------------------------------


def test_an_unknown_model_type_is_told_about_and_does_not_run(model: Path) -> None:
    change(model / "config.json", lambda c: c.update(model_type="abacus", architectures=["Abacus"]))
    found = inspection.inspect(model)
    assert (found.architecture, found.layers) == ("Abacus", 2)
    assert not found.runs
    assert "abacus" in found.problems[0]


def test_layers_that_the_engine_cannot_run_are_a_problem(model: Path) -> None:
    kinds = ["full_attention", "linear_attention"]
    change(model / "config.json", lambda c: c.update(model_type="olmo_hybrid", layer_types=kinds))
    found = inspection.inspect(model)
    assert not found.runs
    assert "linear_attention" in found.problems[0]


def test_a_sliding_window_is_run(model: Path) -> None:
    change(model / "config.json", lambda c: c.update(model_type="mistral", sliding_window=128))
    found = inspection.inspect(model)
    assert found.runs and found.context == 512 and not any("stated" in n for n in found.notes)


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
def test_where_the_kernels_run_it_a_sliding_window_ends_the_context(model: Path) -> None:
    changes = {"model_type": "mistral", "sliding_window": 128, "head_dim": 16}
    change(model / "config.json", lambda c: c.update(changes))
    found = inspection.inspect(model)
    assert found.runs and found.context == 128
    assert any("stated to read 512 tokens" in note for note in found.notes)


def test_a_model_larger_than_memory_is_a_problem(model: Path) -> None:
    change(model / "config.json", lambda c: c.update(hidden_size=2**20, intermediate_size=2**20))
    found = inspection.inspect(model)
    assert not found.runs
    assert "GB of memory" in found.problems[0]
    assert not found.ways[0].fits


def test_quantised_weights_are_noted(model: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    change(model / "config.json", lambda c: c.update(quantization_config=config))
    assert any("quantised (fp8)" in note for note in inspection.inspect(model).notes)


def test_a_family_that_the_engine_cannot_run_is_a_problem(model: Path) -> None:
    change(model / "config.json", lambda c: c.update(model_type="bloom"))
    found = inspection.inspect(model)
    assert not found.runs
    assert "model type 'bloom' cannot be run" in found.problems[0]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_a_usable_tokenizer_the_rest_is_told(model: Path, damage: str) -> None:
    file = model / "tokenizer.json"
    if damage == "missing":
        file.unlink()
        (model / "tokenizer_config.json").unlink()
    else:
        file.write_text("{")
    found = inspection.inspect(model)
    assert (found.layers, found.chat_template, found.runs) == (2, False, False)
    assert len(found.problems) == 1 and "transformers cannot load it" in found.problems[0]


@pytest.mark.parametrize("change_by", [{"num_attention_heads": 0}, {"hidden_act": "frown"}])
def test_a_config_that_makes_no_model_is_a_problem(model: Path, change_by: dict[str, Any]) -> None:
    change(model / "config.json", lambda c: c.update(change_by))
    found = inspection.inspect(model)
    assert not found.runs
    assert "transformers cannot load it" in found.problems[0]


def test_a_missing_model() -> None:
    with pytest.raises(MtplxError, match="no such file"):
        inspection.inspect("./nowhere")


# --- the hub ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_hub_id_no_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    directory = native(tmp_path / "repository", sharded=sharded)
    there = hub.connect(monkeypatch, directory, tmp_path / "cache")
    found = inspection.inspect(hub.REPOSITORY)
    assert there.asked[-1] == "headers" and "config.json" in there.asked
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    assert not list((tmp_path / "cache").glob("tokenizer.json"))
    local = inspection.inspect(directory).to_dict()
    mine = found.to_dict()
    assert mine.pop("remote") and not local.pop("remote")
    assert (mine.pop("path"), mine.pop("name")) == (str(tmp_path / "cache"), hub.REPOSITORY)
    del local["path"], local["name"], local["eos_token_ids"], mine["eos_token_ids"]
    assert mine["mtp"].pop("where") == hub.REPOSITORY and local["mtp"].pop("where")
    # Headers come in another order.
    assert len(mine["mtp"].pop("seen")) == len(local["mtp"].pop("seen"))
    assert mine == local


def test_what_was_downloaded_before_needs_no_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = hub.connect(monkeypatch, tmp_path / "nowhere", model)
    found = inspection.inspect(hub.REPOSITORY)
    assert there.asked == [] and not found.remote
    assert (found.name, found.path, found.runs) == (hub.REPOSITORY, str(model), True)


def test_what_an_earlier_look_left_is_no_download(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = hub.connect(monkeypatch, model, tmp_path / "cache")
    first = inspection.inspect(hub.REPOSITORY)
    assert inspection.inspect(hub.REPOSITORY) == first and first.remote
    assert there.asked.count("headers") == 2


@pytest.mark.parametrize("kept", ["generation_config.json", "chat_template.jinja"])
def test_small_files_may_be_missing_on_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    for file in model.iterdir():
        if file.name not in (kept, "config.json", "model.safetensors"):
            file.unlink()
    hub.connect(monkeypatch, model, tmp_path / "cache")
    found = inspection.inspect(hub.REPOSITORY)
    assert found.runs
    assert found.chat_template == (kept == "chat_template.jinja")


def test_without_safetensors_or_a_config_there_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.connect(monkeypatch, model, tmp_path / "cache")
    (model / "model.safetensors").unlink()
    with pytest.raises(MtplxError, match=r"tiny/model: neither model.safetensors nor its index"):
        inspection.inspect(hub.REPOSITORY)
    (model / "config.json").unlink()
    (tmp_path / "cache" / "config.json").unlink()
    with pytest.raises(MtplxError, match=r"tiny/model: no config.json there"):
        inspection.inspect(hub.REPOSITORY)


def test_a_head_on_the_hub_is_not_a_model(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.connect(monkeypatch, head, tmp_path / "cache")
    with pytest.raises(MtplxError, match="a head, not a model"):
        inspection.inspect(hub.REPOSITORY)


def test_a_repository_that_is_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.connect(monkeypatch, model, tmp_path / "cache")
    with pytest.raises(MtplxError, match="org/another: no such directory here, and no such repo"):
        inspection.inspect("org/another")


# --- GGUF ------------------------------------------------------------------------------------


def test_gguf_blocks_beyond_the_trunks_are_native_mtp_layers(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "glm4moe")
    writer.add_block_count(3)
    writer.add_embedding_length(32)
    writer.add_context_length(128)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.2.nextn.eh_proj.weight"):
        writer.add_tensor(name, np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = inspection.Checkpoint("model", file)
    facts, stored = inspection._gguf_facts(checkpoint), inspection.tensor_headers(checkpoint)
    assert (facts.layers, facts.context) == (2, 128)
    assert inspection._vocabulary(facts, stored) == 4
    found = inspection.native_layers(checkpoint, stored, facts.layers)
    mtp = inspection._native_head(found, None, None, checkpoint, stored, stored)
    assert (mtp.kind, mtp.found, mtp.promised, mtp.parameters) == ("native", 1, 1, 128)
    assert (mtp.status, mtp.usable) == ("works", False)


def gguf_of(directory: Path, **changes: Any) -> Path:
    return write_gguf(tiny_native.write(directory, "glm4_moe"), **changes)


def test_gguf_files_mtp_layers_draft(tmp_path: Path) -> None:
    found = inspection.inspect(gguf_of(tmp_path))
    assert found.runs, found.problems
    assert (found.mtp.kind, found.mtp.status, found.mtp.found) == ("native", "works", 1)
    assert found.mtp.usable and "glm4_moe" in found.mtp.family and found.mtp.bytes


@pytest.mark.parametrize(
    ("skip", "status"),
    [("blk.2.", "heads missing"), ("blk.2.nextn.hnorm", "unknown layout")],
)
def test_gguf_files_without_all_of_them(tmp_path: Path, skip: str, status: str) -> None:
    file = gguf_of(tmp_path, skip=skip)
    found = inspection.inspect(file)
    assert (found.mtp.status, found.mtp.usable) == (status, False)
    if status == "heads missing":
        assert found.runs and load(file).notes == found.notes
    else:
        with pytest.raises(MtplxError) as refused:
            load(file)
        assert found.problems == (str(refused.value),)


@pytest.mark.model
def test_the_default_model() -> None:
    found = inspection.inspect("smollm2-135m")
    assert found.format == "gguf"
    assert found.parameters == 134_515_008
    assert set(found.dtypes) == {"Q4_1", "Q8_0", "F32"}
    assert (found.layers, found.hidden_size, found.context) == (30, 576, 8192)
    assert found.chat_template and found.eos_token_ids == (2,)
    # The file has no settings: these are given to it.
    assert found.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert found.runs
