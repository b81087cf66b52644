"""Ways to run a model on this machine, and the memory that each of them takes.

Told from the model and its head on torch's meta device: shapes, and no weights. The sizes are those
of what is kept, as `load` keeps it; while a model is read, and in a long pass, it is more.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mtplx import kernels
from mtplx.drafters.attached import BITS, AttachedHead, kernels_take
from mtplx.drafters.native import NativeHead
from mtplx.llm import computes_bfloat16, pick_device, pick_dtype
from mtplx.models import gguf_weights
from mtplx.models.blocks import GROUP, Bits
from mtplx.models.checkpoint import Checkpoint, Quantize, is_dequantised, load_outline
from mtplx.models.fused import misfit, projections
from mtplx.models.headers import StoredTensor
from mtplx.models.linear import PLAIN, linear_layers, tiles_size
from mtplx.models.recurrent import RecurrentSlots
from mtplx.models.slots import KVSlots, Span
from mtplx.models.trunk import Trunk

Engine = Literal["kernels", "torch"]
"""Whole passes by the kernels, or by transformers' code in torch."""

Deterministic = Literal["always", "on request", "no"]
"""Whether a position comes out to the same bits in any pass; on request, by `deterministic`."""

SAMPLE = 1000
"""Tokens of a text for which keys and values are told, and with which a model has to fit."""


@dataclass(frozen=True)
class Way:
    """What comes of one choice of `quantize`. Sizes are estimates, in bytes.

    Attributes:
        quantize: the choice; `none` is what is done where nothing is chosen.
        engine: what computes.
        dtype: of the weights that are not rounded.
        deterministic: see Deterministic.
        context: tokens of prompt and answer together.
        weights: of the trunk.
        head: of what drafts beside it; 0 without.
        keys_and_values: of 1,000 tokens of one text, in the trunk and its head; None where the
            model's code does not tell without weights.
        states: of recurrent layers, which do not grow with a text; None likewise.
        fits: whether all of these fit into the machine's memory.
        problem: why it cannot be chosen for this model; all sizes are then 0.
    """

    quantize: Quantize
    engine: Engine
    dtype: str
    deterministic: Deterministic
    context: int
    weights: int = 0
    head: int = 0
    keys_and_values: int | None = 0
    states: int | None = 0
    fits: bool = True
    problem: str | None = None

    @property
    def needs(self) -> int:
        """Bytes with a text of 1,000 tokens, as far as they are known."""
        return self.weights + self.head + (self.keys_and_values or 0) + (self.states or 0)


class Machine(NamedTuple):
    """Where models run if nothing is said: the device, its memory in bytes, and the kernels' set of
    instructions, if they are there."""

    device: torch.device
    memory: int
    instructions: str | None


def this_machine() -> Machine:
    """The one this runs on."""
    device = pick_device(None)
    library = kernels.find() if device.type == "cpu" else None
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(device, memory, library.name if library else None)


def why_not_kernels(checkpoint: Checkpoint, trunk: Trunk, machine: Machine) -> str | None:
    """Why whole passes are not the kernels', or None if they are."""
    if machine.device.type != "cpu":
        return f"they compute on a CPU, and the model runs on {machine.device.type}"
    if machine.instructions is None:
        return "they were not built"
    if trunk.model.dtype in PLAIN:
        return misfit(trunk.model)
    return misfit(load_outline(checkpoint).bfloat16())


def ways(
    checkpoint: Checkpoint,
    trunk: Trunk,
    head: NativeHead | AttachedHead | None,
    machine: Machine,
    stored: Mapping[str, StoredTensor],
) -> list[Way]:
    """How a model can be run, first what is done where nothing is chosen.

    Args:
        checkpoint: of the model.
        trunk: on the meta device.
        head: to draft with, on the meta device.
        machine: to run on.
        stored: the checkpoint's tensors.
    """
    model = trunk.model
    fused = why_not_kernels(checkpoint, trunk, machine) is None
    numbers = _cache_numbers(trunk, head)
    found = []
    for quantize in _choices(checkpoint, machine):
        plain = quantize == "none"
        if plain:
            dtype = pick_dtype(None, machine.device, lambda: model)
            by_kernels = fused and dtype == torch.bfloat16
        else:
            by_kernels = fused
            # Their layers' results are float32, and in torch what is between them is so as well.
            dtype = _own_dtype(checkpoint, model, stored) if fused else torch.float32
        alike: Deterministic = "no" if model._is_stateful else "on request"
        if by_kernels and not (plain and computes_bfloat16(machine.device)):
            alike = "always"
        way = Way(
            quantize,
            "kernels" if by_kernels else "torch",
            str(dtype).removeprefix("torch."),
            alike,
            min(trunk.context, trunk.narrowest) if by_kernels else trunk.context,
            problem=None if plain else _problem(checkpoint, model, quantize),
        )
        if way.problem is None:
            if plain:
                weights = _plain(model, dtype) + (_copies(model, dtype) if by_kernels else 0)
            else:
                weights = _rounded(checkpoint, model, quantize, dtype, by_kernels)
            beside, head_dtype = _head(checkpoint, head, trunk, quantize, dtype, by_kernels)
            way = replace(way, weights=weights, head=beside, keys_and_values=None, states=None)
            if numbers is not None:
                cached = torch.bfloat16 if by_kernels else dtype
                a_token = numbers.trunk * cached.itemsize + numbers.head * head_dtype.itemsize
                states = numbers.windows * dtype.itemsize + numbers.states * _STATE.itemsize
                way = replace(way, keys_and_values=SAMPLE * a_token, states=states)
            way = replace(way, fits=way.needs <= machine.memory)
        found.append(way)
    return found


_STATE = torch.float32
"""In what recurrent layers keep their states."""


def _choices(checkpoint: Checkpoint, machine: Machine) -> list[Quantize]:
    """What `quantize` may be on this machine."""
    if machine.instructions is None:
        return ["none"]
    if checkpoint.is_gguf:
        return ["none", "int8", "int4", "file"]
    return ["none", "int8", "int4"]


def _problem(checkpoint: Checkpoint, model: Any, quantize: Quantize) -> str | None:
    if quantize == "file":
        known = gguf_weights.knows(checkpoint.gguf_file)
        return None if known else "not possible: the file has no blocks that the kernels can take"
    output = model.get_output_embeddings()
    for name, layer in linear_layers(model):
        if layer is not output and layer.in_features % GROUP:
            return (
                f"not possible: {name} has {layer.in_features} inputs, which cannot be cut into "
                f"groups of {GROUP}"
            )
    return None


# --- weights ---------------------------------------------------------------------------------


def _own_dtype(
    checkpoint: Checkpoint, model: Any, stored: Mapping[str, StoredTensor]
) -> torch.dtype:
    """In what the weights are that `load_rounded` does not round."""
    if checkpoint.is_gguf:
        known = gguf_weights.knows(checkpoint.gguf_file)
        return torch.float32 if known else torch.bfloat16
    if is_dequantised(checkpoint, stored):
        return torch.float32
    named = model.config.dtype or model.config.get_text_config().dtype
    if isinstance(named, torch.dtype):
        return named
    kinds = (getattr(torch, tensor.dtype, None) for tensor in stored.values())
    floats = (kind for kind in kinds if isinstance(kind, torch.dtype) and kind.is_floating_point)
    return next(floats, torch.float32)


def _plain(model: Any, dtype: torch.dtype, kept: Mapping[str, Any] | None = None) -> int:
    """Of a model whose parameters are all of one type, but for those that transformers keeps."""
    kept = model._get_dtype_plan(dtype) if kept is None else kept
    names = re.compile("|".join(map(re.escape, kept)) or r"(?!)")
    parameters: int = sum(
        part.numel() * (4 if names.search(name) else dtype.itemsize)
        for name, part in model.named_parameters()
    )
    return parameters + _size(model.buffers())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _copies(model: Any, dtype: torch.dtype, apart: Collection[Any] = ()) -> int:
    """Of the norms and biases that the kernels want in float32, where they are in another type."""
    if dtype == torch.float32:
        return 0
    vectors = [part for part in model.parameters() if part.ndim == 1 and part not in apart]
    return sum(4 * part.numel() for part in vectors)


def _layer_bits(
    checkpoint: Checkpoint, model: Any, quantize: Quantize
) -> list[tuple[nn.Linear, Bits | None]]:
    """A model's linear layers, and the bits of a number in each; None where that is not rounded."""
    layers = linear_layers(model)
    if quantize == "file":
        bits = gguf_weights.stored_bits(checkpoint.gguf_file, model.config)
        return [(layer, bits[f"{name}.weight"]) for name, layer in layers]
    output = model.get_output_embeddings()
    few: Bits = 8 if quantize == "int8" else 4
    return [(layer, None if layer is output else few) for _, layer in layers]


def _rounded(
    checkpoint: Checkpoint, model: Any, quantize: Quantize, dtype: torch.dtype, by_kernels: bool
) -> int:
    """Of a model whose linear layers are in few bits, its output head in bfloat16, all else not."""
    embedding = model.get_input_embeddings()
    total: int = 0
    seen = set()
    for layer, bits in _layer_bits(checkpoint, model, quantize):
        seen |= {layer.weight, layer.bias}
        if bits:
            total += tiles_size(layer.out_features, layer.in_features, bits)
        # A head that is the embedding is looked up where that lies, if it is in bfloat16.
        elif layer.weight is not embedding.weight or dtype != torch.bfloat16:
            total += 2 * layer.weight.numel()
        if layer.bias is not None:
            total += 4 * layer.bias.numel()
    seen.discard(embedding.weight)
    rest = [part for part in model.parameters() if part not in seen]
    total += sum(part.numel() * dtype.itemsize for part in rest)
    if by_kernels:
        total += _copies(model, dtype, seen)
    return total + _size(model.buffers())


def _head(
    checkpoint: Checkpoint,
    head: NativeHead | AttachedHead | None,
    trunk: Trunk,
    quantize: Quantize,
    dtype: torch.dtype,
    by_kernels: bool,
) -> tuple[int, torch.dtype]:
    """Of a head beside a trunk of this type, and the type of its keys and values."""
    if head is None:
        return 0, dtype
    if isinstance(head, NativeHead):
        layers = [] if quantize == "none" else _layer_bits(checkpoint, trunk.model, quantize)
        few = Counter(bits for _, bits in layers if bits)
        if few:  # as `rounding.kept_in` has it
            total = _rounded_native(head.model, few.most_common(1)[0][0])
            output = trunk.model.get_output_embeddings()
            if any(layer is output and bits for layer, bits in layers):
                # What the file has beside an MTP layer is not known for the same in its blocks.
                copies = gguf_weights.output_copies(checkpoint.gguf_file)
                total += copies * 2 * output.weight.numel()
            return total, torch.float32
        return _plain(head.model, dtype, trunk.model._get_dtype_plan(dtype)), dtype
    own = head.head
    embedding = own.embed_tokens
    apart = set() if embedding is None else {embedding.weight}
    by_kernels = by_kernels or dtype != torch.float32
    by_kernels = by_kernels and kernels.find() is not None and kernels_take(own, trunk)
    kind = torch.float32 if by_kernels else dtype
    total = sum(part.numel() * kind.itemsize for part in own.parameters() if part not in apart)
    lists = [*apart, *own.buffers(), *([] if head.draft_ids is None else [head.draft_ids])]
    total += _size(lists)
    if not by_kernels:
        return total, dtype
    matrices: list[nn.Linear] = [own.fc, own.lm_head]
    matrices += projections(own.layer.self_attn, own.layer.mlp).values()
    total += sum(
        tiles_size(layer.out_features, layer.in_features, BITS)
        for layer in matrices
        if not layer.in_features % GROUP
    )
    return total, torch.bfloat16


def _rounded_native(model: Any, bits: Bits) -> int:
    """Of MTP layers whose linear layers are in few bits where they can be cut so, and all else in
    float32."""
    total: int = 0
    seen = set()
    for _, layer in linear_layers(model):
        if not layer.in_features % GROUP:
            seen.add(layer.weight)
            total += tiles_size(layer.out_features, layer.in_features, bits)
    total += sum(4 * part.numel() for part in model.parameters() if part not in seen)
    return total + _size(model.buffers())


# --- caches ----------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """How many numbers caches keep of one text: of each token by the trunk and by the head, and of
    all of it by recurrent layers, in the windows of their convolutions and in their states."""

    trunk: int
    head: int
    windows: int
    states: int


def _cache_numbers(trunk: Trunk, head: NativeHead | AttachedHead | None) -> _Numbers | None:
    """What a pass over one token writes, or None where there is none without weights."""
    meta, model = torch.device("meta"), trunk.model
    try:
        for part in (model, *([head.model] if isinstance(head, NativeHead) else ())):
            if part._can_set_experts_implementation():
                # The one that does not ask which experts the tokens go to.
                part.set_experts_implementation("batched_mm")
        token = torch.zeros(1, 1, dtype=torch.int64, device=meta)
        span, cache = Span.after([0], 1, meta), trunk.new_cache(1)
        cache.recurrent = {layer: _begun(meta) for layer in range(trunk.layers)}
        output = trunk.forward(token, span, cache, () if head is None else head.taps, False)
        states = cache.recurrent.values()
        drafted = 0
        if head is not None:
            kept: Any = head.new_cache(1)
            for layer in range(head.layers):
                head.step(token, head.features(output), span, kept, layer)
            drafted = sum(map(_numbers, getattr(kept, "slots", {0: kept}).values()))
        return _Numbers(
            sum(map(_numbers, cache.slots.values())),
            drafted,
            sum(part.window.numel() for part in states if part.window is not None),
            sum(part.state.numel() for part in states if part.state is not None),
        )
    except Exception:  # whatever the model's code raises where it looks at what is not there
        return None


def _begun(device: torch.device) -> RecurrentSlots:
    slots = RecurrentSlots()
    slots.at = torch.zeros(1, dtype=torch.int64, device=device)
    return slots


def _numbers(slots: KVSlots) -> int:
    return sum(part.numel() for part in (slots.keys, slots.values) if part is not None)
