"""What `ways` says of memory and engines, against what loading keeps and does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_checkpoint
import tiny_native
import torch
from drafters.families import test_qwen as qwen
from family_proof import Proof, read_tensors, write_checkpoint
from gguf import GGMLQuantizationType
from gguf_layout import write_gguf
from quantised import FORMATS, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

import mtplx.llm
import mtplx.ways
from mtplx import MtplxError, inspection, kernels, load
from mtplx.llm import DEFAULT_MODEL
from mtplx.models.blocks import kept_bits, quantize
from mtplx.models.eagle3 import save_head
from mtplx.models.fused import FusedTrunk, Rotations
from mtplx.models.linear import tiles, tiles_size
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk
from mtplx.ways import SAMPLE, Machine, Way

needs_kernels = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")


def tensors_of(*roots: Any) -> dict[int, Tensor]:
    """All tensors that are reached from some objects, one of each storage."""
    seen: set[int] = set()
    found: dict[int, Tensor] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        # A table of cosines is made as long as the texts were.
        if id(one) in seen or isinstance(one, type | Rotations):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif type(one).__module__.split(".")[0] in ("mtplx", "torch", "transformers"):
            waiting += getattr(one, "__dict__", {}).values()
    return found


def kept(*roots: Any) -> int:
    """Their bytes."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(*roots).values())


def ways_of(model: Path | str, head: Path | None = None) -> dict[str, Way]:
    found = inspection.inspect(model, head)
    assert found.runs, found.problems
    return {way.quantize: way for way in found.ways}


def settle(directory: Path, **changes: Any) -> Path:
    """With these settings, and a tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    tiny_checkpoint.tokenizer().save_pretrained(directory)
    return directory


def llama(directory: Path, head_dim: int = 16, **changes: Any) -> Path:
    """For the kernels, whose heads are multiples of 16 wide, or not."""
    tiny_checkpoint.write(directory, width=64, inner=96)
    config = json.loads((directory / "config.json").read_text())
    if config["hidden_size"] // config["num_attention_heads"] != head_dim:
        heads = config["hidden_size"] // head_dim
        changes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        changes["head_dim"] = head_dim
    if changes.get("tie_word_embeddings"):
        tensors = load_file(directory / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return settle(directory, **changes)


def agrees(way: Way, model: Path | str, head: Path | None = None) -> None:
    """That a way is what loading makes of it."""
    llm = load(model, head=head, quantize=way.quantize)
    assert way.engine == ("kernels" if isinstance(llm.trunk, FusedTrunk) else "torch")
    assert way.weights == kept(llm.trunk)
    assert way.head == kept(llm.trunk, llm.head) - kept(llm.trunk)
    assert (way.deterministic == "always") == llm.trunk.deterministic
    assert way.context == llm.trunk.context
    cache = llm.trunk.new_cache(SAMPLE)
    span = Span.after([0], 1, torch.device("cpu"))
    llm.trunk.forward(torch.zeros(1, 1, dtype=torch.int64), span, cache, with_logits=False)
    if isinstance(llm.trunk, FusedTrunk):
        written = cache.keys.nbytes + cache.values.nbytes
        written = written * SAMPLE // cache.capacity
    else:
        written = sum(part.keys.nbytes + part.values.nbytes for part in cache.slots.values())
        states = [(s.window, s.state) for s in cache.recurrent.values()]
        assert way.states == sum(part.nbytes for pair in states for part in pair)
    if llm.head:
        beside = llm.head.new_cache(SAMPLE)
        output = llm.trunk.forward(
            torch.zeros(1, 1, dtype=torch.int64), span, llm.trunk.new_cache(1), llm.head.taps
        )
        for layer in range(llm.head.layers):
            states = llm.head.features(output)
            llm.head.step(torch.zeros(1, 1, dtype=torch.int64), states, span, beside, layer)
        parts = getattr(beside, "slots", {0: beside}).values()
        numbers = [(part.keys, part.values) for part in parts]
        capacity = getattr(beside, "capacity", SAMPLE)
        mine = sum(tensor.nbytes for pair in numbers for tensor in pair)
        written += mine * SAMPLE // capacity
    assert way.keys_and_values == written


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", [16, 8])
def test_a_llama_by_the_kernels_and_in_torch(
    tmp_path: Path, dtype: str, tied: bool, head_dim: int
) -> None:
    model = llama(tmp_path, head_dim, dtype=dtype, tie_word_embeddings=tied)
    ways = ways_of(model)
    assert list(ways) == ["none", "int8", "int4"]
    for way in ways.values():
        agrees(way, model)
    assert ways["int4"].weights < ways["int8"].weights


def without_bfloat16(patch: pytest.MonkeyPatch) -> None:
    for module in (mtplx.llm, mtplx.ways):
        patch.setattr(module, "computes_bfloat16", lambda device: False)


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "find", lambda name=None: None)


@needs_kernels
def test_where_torch_has_no_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bfloat16(monkeypatch)
    ways = ways_of(model := llama(tmp_path / "fit"))
    assert (ways["none"].dtype, ways["none"].deterministic) == ("bfloat16", "always")
    agrees(ways["none"], model)
    ways = ways_of(model := llama(tmp_path / "misfit", 8))
    assert (ways["none"].dtype, ways["none"].engine) == ("float32", "torch")
    agrees(ways["none"], model)


def test_without_kernels_nothing_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    model = llama(tmp_path)
    found = inspection.inspect(model)
    assert found.instructions is None and found.why_not_kernels == "they were not built"
    (way,) = found.ways
    assert way.engine == "torch"
    agrees(way, model)


@needs_kernels
@pytest.mark.parametrize("head_dim", [16, 8])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_an_attached_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, bfloat16: bool
) -> None:
    if not bfloat16:
        without_bfloat16(monkeypatch)
    model = llama(tmp_path / "model", head_dim)
    trunk = tiny.llama(tiny_checkpoint.VOCAB_SIZE, width=64, heads=64 // head_dim)
    head = tmp_path / "head"
    save_head(tiny.eagle3(trunk, 200), head)
    for way in ways_of(model, head).values():
        assert way.head > 0
        agrees(way, model, head)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_native_layers_of_experts(tmp_path: Path, family: str) -> None:
    model = settle(tiny_native.write(tmp_path, family, mtp_layers=2))
    way = ways_of(model)["none"]
    assert way.head > 0 and way.keys_and_values
    agrees(way, model)


WIDE = {"intermediate_size": 64, "moe_intermediate_size": 32, "v_head_dim": 8}


@needs_kernels
@pytest.mark.parametrize("format", ["plain", "fp8", "packed", "Q4_0", "Q8_0"])
def test_native_layers_are_rounded_beside_rounded_trunks(tmp_path: Path, format: str) -> None:
    sizes = {key: size for key, size in WIDE.items() if key in tiny_native.FAMILIES["glm4_moe"]}
    model = settle(tiny_native.write(tmp_path, "glm4_moe", config=sizes))
    if format in FORMATS:
        config = json.loads((model / "config.json").read_text())
        stored, _ = quantise(read_tensors(model), format)
        config |= {"quantization_config": FORMATS[format][1]}
        model = settle(write_checkpoint(tmp_path / format, config, stored))
    elif format != "plain":
        model = write_gguf(model, kind=GGMLQuantizationType[format])
    ways = ways_of(model)
    for way in ways.values():
        assert way.problem is None
        agrees(way, model)
    assert 0 < ways["int4"].head < ways["int8"].head


@pytest.mark.parametrize("proof", [qwen.TestQwen3Next, qwen.TestQwen35Tied])
def test_recurrent_layers(tmp_path: Path, proof: type[Proof]) -> None:
    model = settle(write_checkpoint(tmp_path, proof.config, proof().tensors()))
    found = inspection.inspect(model)
    way = found.ways[0]
    assert (way.engine, way.deterministic) == ("torch", "no") and way.states
    assert found.why_not_kernels is not None and "layers of type 'qwen3" in found.why_not_kernels
    agrees(way, model)


@needs_kernels
def test_layers_that_cannot_be_cut_are_a_problem_of_that_way_alone(tmp_path: Path) -> None:
    model = settle(tiny_native.write(tmp_path, "glm4_moe"))
    found = inspection.inspect(model)
    assert found.runs
    none, *rounded = found.ways
    assert none.problem is None and [way.quantize for way in rounded] == ["int8", "int4"]
    for way in rounded:
        with pytest.raises(MtplxError, match="24 inputs") as refused:
            load(model, quantize=way.quantize)
        assert way.problem and "24 inputs, which cannot be cut into groups of 32" in way.problem
        assert "24 inputs cannot be cut into groups of 32" in str(refused.value)


@needs_kernels
def test_what_fits_instead_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tmp_path)
    usual = ways_of(model)["none"]
    assert usual.needs == usual.weights + (usual.keys_and_values or 0) > usual.weights
    need = usual.needs
    machine = mtplx.ways.this_machine()
    monkeypatch.setattr(inspection, "this_machine", lambda: machine._replace(memory=need))
    assert inspection.inspect(model).runs
    monkeypatch.setattr(inspection, "this_machine", lambda: machine._replace(memory=need - 1))
    found = inspection.inspect(model)
    assert not found.runs and "; --quantize int8 needs 0.0 GB" in found.problems[0]
    monkeypatch.setattr(inspection, "this_machine", lambda: machine._replace(memory=1))
    assert "--quantize" not in inspection.inspect(model).problems[0]


def test_on_a_gpu_nothing_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtplx.llm, "computes_bfloat16", lambda device: True)
    gpu = Machine(torch.device("cuda"), 10**9, None)
    monkeypatch.setattr(inspection, "this_machine", lambda: gpu)
    found = inspection.inspect(llama(tmp_path))
    assert (found.device, found.memory, found.instructions) == ("cuda", 10**9, None)
    (way,) = found.ways
    assert (way.engine, way.dtype) == ("torch", "bfloat16")
    assert found.why_not_kernels == "they compute on a CPU, and the model runs on cuda"


def test_code_that_does_not_run_without_weights_leaves_sizes_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("aten::_local_scalar_dense")

    model = llama(tmp_path)
    monkeypatch.setattr(Trunk, "forward", fail)
    way = ways_of(model)["none"]
    assert (way.keys_and_values, way.states) == (None, None)
    assert way.weights > 0 and way.fits


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (17, 64), (40, 96)])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_size_of_tiles(outputs: int, inputs: int, bits: Any) -> None:
    made = tiles(quantize(torch.randn(outputs, inputs), bits))
    assert tiles_size(outputs, inputs, bits) == made.nbytes


def test_bits_of_a_files_blocks() -> None:
    assert [kept_bits(kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "Q6_K")] == [4, 4, 8, None]


@needs_kernels
@pytest.mark.model
@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "file"])
def test_the_default_model(quantize: str) -> None:
    agrees(ways_of(DEFAULT_MODEL)[quantize], DEFAULT_MODEL)
