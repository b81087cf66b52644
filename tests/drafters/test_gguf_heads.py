"""MTP layers in GGUF files: what a file may hold, and what it may not."""

from __future__ import annotations

from functools import partial

import gguf
import pytest
import tiny_native
import torch
from family_proof import GREEDY, PROMPTS, SAMPLED, decode, load, watch_drafts
from gguf import GGMLQuantizationType as Kind
from gguf_layout import write_gguf

from mtplx.errors import MtplxError
from mtplx.inspection import inspect
from mtplx.llm import load as load_llm
from mtplx.models.checkpoint import Checkpoint, load_model
from mtplx.models.gguf import read_gguf
from mtplx.models.gguf_weights import load_model as load_file

MTP = f"blk.{tiny_native.TRUNK_LAYERS}."
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_native.write(tmp_path_factory.mktemp("glm4_moe"), "glm4_moe")


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


def published(directory, dtype=torch.float32):
    return load_model(Checkpoint("tiny", directory), dtype)


# --- GLM-4 MoE -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_trunk_and_the_drafts_are_those_of_the_checkpoint(directory, fused):
    path = write_gguf(directory, f"{fused}.gguf", fused=fused)
    trunk, head, notes = load(path)
    assert notes == ()
    assert torch.equal(logits(trunk.model), logits(published(directory)))
    (theirs, expected), (ours, found) = (run(*one[:2]) for one in (load(directory), (trunk, head)))
    assert found == expected
    assert len(ours) == len(theirs) > 10
    for (*drafted, own), (*reference, expected) in zip(ours, theirs, strict=True):
        assert drafted[:2] == reference[:2] and torch.equal(drafted[2], reference[2])
        assert torch.equal(own, expected)


def run(trunk, head):
    """What was drafted, and the texts."""
    cycles: list = []
    return cycles, decode(trunk, head, PROMPTS, 3, SAMPLED, 32, partial(watch_drafts, cycles))[0]


def test_copies_of_the_embedding_and_of_the_output_head_are_the_layers_own(tmp_path):
    """Where they differ from the trunk's."""

    def change(tensors):
        for part in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.{tiny_native.TRUNK_LAYERS}.{part}.weight"] *= 2

    tiny_native.write(tmp_path, "glm4_moe", change=change)
    trunk, head, _ = load(write_gguf(tmp_path))
    hidden = torch.randn(1, 3, tiny_native.HIDDEN)
    output = trunk.model.get_output_embeddings()
    # The last norm is the head's own either way.
    torch.testing.assert_close(head.logits(hidden), 2 * output(hidden))
    torch.testing.assert_close(head.embeds[0](TOKENS), 2 * trunk.embed(TOKENS))


def test_what_is_computed_in_float32_keeps_its_own_type(directory):
    model = load_file(read_gguf(write_gguf(directory)), torch.bfloat16)
    reference = published(directory, torch.bfloat16)
    gates = {name for name, part in model.state_dict().items() if part.dtype == torch.float32}
    assert gates == {
        f"model.layers.1.mlp.gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")
    }
    assert all(
        torch.equal(part, reference.state_dict()[name]) for name, part in model.state_dict().items()
    )


# --- what a file may lack, or have beside ----------------------------------------------------


def test_promised_layers_that_are_not_there_are_told_of_and_not_drafted_with(directory):
    path = write_gguf(directory, "without.gguf", skip=MTP)
    trunk, head, notes = load(path)
    assert head is None
    assert notes == (
        "nothing is drafted: its header promises 1 MTP layer(s), but the weight files hold none",
    )
    assert torch.equal(logits(trunk.model), logits(published(directory)))
    assert decode(trunk, None, PROMPTS, 0)[0] == decode(load(directory)[0], None, PROMPTS, 0)[0]
    found = inspect(path)
    assert (found.mtp.kind, found.mtp.promised, found.layers) == ("missing", 1, 2)


def test_layers_that_the_header_does_not_name_draft_and_are_told_of(directory):
    path = write_gguf(
        directory,
        "unnamed.gguf",
        metadata={"nextn_predict_layers": 0, "block_count": tiny_native.TRUNK_LAYERS},
    )
    _, head, notes = load(path)
    assert head is not None
    assert notes == (
        "its header names no MTP layers, and the weight files hold 1: what they hold drafts",
    )


def test_an_unknown_tensor_of_a_layer_is_named(directory):
    name = f"{MTP}nextn.gate.weight"
    path = write_gguf(directory, "more.gguf", extra={name: torch.zeros(4)})
    with pytest.raises(MtplxError, match=rf"more\.gguf: the tensor '{name}' is not part of"):
        load(path)


def test_a_missing_tensor_of_a_layer_is_named(directory):
    path = write_gguf(directory, "less.gguf", skip=f"{MTP}nextn.eh_proj")
    with pytest.raises(MtplxError, match=r"less\.gguf: its MTP layer lacks .*eh_proj"):
        load(path)


def test_a_file_of_mtp_layers_alone_is_refused(directory):
    path = write_gguf(directory, "alone.gguf", skip=("blk.0.", "blk.1."))
    with pytest.raises(MtplxError, match=r"alone\.gguf: holds MTP layers without the model"):
        load(path)


def test_experts_chosen_in_another_way_are_refused(directory):
    softmax = {"expert_gating_func": int(gguf.ExpertGatingFuncType.SOFTMAX)}
    path = write_gguf(directory, "softmax.gguf", metadata=softmax)
    with pytest.raises(MtplxError, match=r"softmax\.gguf: its experts are chosen by function 1"):
        load(path)


def test_inspect_says_what_loading_finds(directory):
    found = inspect(write_gguf(directory))
    assert found.runs and not found.notes
    assert (found.layers, found.mtp.kind, found.mtp.found) == (2, "native", 1)
    assert found.mtp.usable


def test_it_is_loaded_by_name_and_drafts(directory):
    model = load_llm(str(write_gguf(directory)), dtype="float32")
    result = model.generate("abc", sampling=GREEDY, max_tokens=8, raw=True)
    assert sum(result.stats.drafted_by_position) > 0


# --- quantised -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "limit"), [(Kind.F16, 2e-3), (Kind.BF16, 1e-2), (Kind.Q8_0, 5e-2)]
)
def test_logits_of_a_quantised_file_are_close(directory, kind, limit):
    path = write_gguf(directory, f"{kind.name}.gguf", kind)
    assert read_gguf(path).tensors[f"{MTP}nextn.eh_proj.weight"].kind == kind
    expected = logits(published(directory))
    found = logits(load(path)[0].model)
    assert 0 < (found - expected).norm() < limit * expected.norm()
