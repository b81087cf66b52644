"""Bytes that a cycle has to read: what no engine can do without, however fast it computes.

All weights once a pass, but for the embedding, of which a pass reads a few rows, and the keys and
values of the context. In a mixture of experts all experts are counted, though a pass over few
tokens reads only some: there the figure is too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mtplx.models import gguf
from mtplx.models.fused import FusedLayers
from mtplx.models.linear import KernelLinear


def model_bytes(model: Any) -> int:
    """Weights that a pass of a model of transformers reads, whoever runs it."""
    # Some quantised layers keep their weights in buffers; what is not saved is no weight.
    tensors = list(model.state_dict().values())
    looked_up = model.get_input_embeddings().weight.data_ptr()
    output = getattr(model.get_output_embeddings(), "weight", None)
    if output is None or output.data_ptr() != looked_up:
        tensors = [tensor for tensor in tensors if tensor.data_ptr() != looked_up]
    return _sum(tensors) + _sum(layer.data for layer in _kernel_layers(model))


def head_bytes(head: Any) -> int:
    """Weights that one step of a head reads. What it projects once a cycle is counted as well."""
    # Where the kernels run a head, its modules are only what they were made of.
    handed = _sum(layer.data for layer in _kernel_layers(list(vars(head).values())))
    if handed:
        return handed
    modules = [part for part in vars(head).values() if isinstance(part, nn.Module)]
    return _sum(
        tensor
        for module in modules
        if not isinstance(module, nn.Embedding)
        for tensor in module.parameters()
    )


def file_bytes(path: Path) -> int:
    """Weights of a GGUF file that a pass reads, as they lie there."""
    tensors = gguf.read_gguf(path).tensors
    untied = "output.weight" in tensors
    return sum(
        int(tensor.data.nbytes)
        for name, tensor in tensors.items()
        if not (untied and name == "token_embd.weight")
    )


def token_bytes(config: Any, size: int) -> int:
    """Keys and values of one position in all layers.

    Args:
        config: of a model of transformers.
        size: bytes of a number.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * size)


def _kernel_layers(part: Any) -> list[KernelLinear]:
    """The layers in the kernels' hands in a module, a collection or what holds such."""
    if isinstance(part, KernelLinear):
        return [part]
    if isinstance(part, nn.Module):
        return [layer for layer in part.modules() if isinstance(layer, KernelLinear)]
    if isinstance(part, FusedLayers):
        return _kernel_layers(list(vars(part).values()))
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        return [layer for item in part for layer in _kernel_layers(item)]
    return []


def _sum(tensors: Iterable[Tensor]) -> int:
    """Bytes of all of them, each counted once."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return sum(found.values())
