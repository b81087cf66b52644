"""Recurrent layers over slots: passes of transformers' own modules, with states that can go back.

transformers' mixers keep one state for all of a batch and overwrite it. The functions here do with
a mixer's weights what its own `forward` does, over `RecurrentSlots`. A pass without a cache is
still the module's own, so that the trunk's trial at loading holds one against the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtplx.models.recurrent import (
    RecurrentSlots,
    decayed_sum,
    gated_delta_rule,
    rowwise_delta_rule,
)
from mtplx.models.slots import SlotCache

Mixer = Callable[[Any, Tensor, RecurrentSlots], Tensor]
"""(the module, hidden states [B, T, H], its slots) -> [B, T, H]."""


def gated_delta_net(module: Any, hidden: Tensor, slots: RecurrentSlots) -> Tensor:
    """The mixer of Qwen3-Next and its successors (Yang et al., arXiv 2412.06464)."""
    batch, width, _ = hidden.shape
    if hasattr(module, "in_proj_qkvz"):
        joined, pair = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        *parts, gate, write, pace = module.fix_query_key_value_ordering(joined, pair)
        mixed = torch.cat([part.flatten(2) for part in parts], -1)
    else:
        mixed, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        write, pace = module.in_proj_b(hidden), module.in_proj_a(hidden)
    mixed = _short_convolution(module, mixed, slots).float()
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    queries, keys, values = torch.split(mixed, sizes, -1)
    heads, size = module.num_v_heads, module.head_k_dim
    queries, keys = (
        # A head of keys serves several heads of values, which lie beside each other.
        _unit(x.view(batch, width, -1, size)).repeat_interleave(heads // module.num_k_heads, 2)
        for x in (queries, keys)
    )
    decay = -module.A_log.float().exp() * F.softplus(pace.float() + module.dt_bias)
    read = slots.run(
        gated_delta_rule,
        (queries * size**-0.5).transpose(1, 2),
        keys.transpose(1, 2),
        values.view(batch, width, heads, -1).transpose(1, 2),
        decay.transpose(1, 2),
        write.float().sigmoid().transpose(1, 2),
    )
    size = module.head_v_dim
    read = read.transpose(1, 2).to(hidden.dtype).reshape(-1, size)
    result: Tensor = module.out_proj(
        module.norm(read, gate.reshape(-1, size)).view(batch, width, -1)
    )
    return result


def kimi_delta_attention(module: Any, hidden: Tensor, slots: RecurrentSlots) -> Tensor:
    """The mixer of Ling 3 (Kimi Team, arXiv 2510.26692)."""
    batch, width, _ = hidden.shape
    mixed = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], -1)
    mixed = _short_convolution(module, mixed, slots).float()
    size = module.head_dim
    queries, keys, values = (x.view(batch, width, -1, size) for x in mixed.chunk(3, -1))
    read = slots.run(
        rowwise_delta_rule,
        (_unit(queries) * size**-0.5).transpose(1, 2),
        _unit(keys).transpose(1, 2),
        values.transpose(1, 2),
        module.forget_gate(hidden).float().transpose(1, 2),
        module.b_proj(hidden).sigmoid().float().transpose(1, 2),
    )
    read = read.transpose(1, 2).to(hidden.dtype)
    gate = module.g_proj(hidden).view(batch, width, -1, size)
    result: Tensor = module.o_proj(module.o_norm(read, gate).reshape(batch, width, -1))
    return result


def mamba2(module: Any, hidden: Tensor, slots: RecurrentSlots) -> Tensor:
    """Nemotron-H's Mamba 2 mixer (Dao and Gu, arXiv 2405.21060)."""
    batch, width, _ = hidden.shape
    heads, groups, size = module.num_heads, module.n_groups, module.ssm_state_size
    inner = module.intermediate_size
    gate, mixed, pace = module.in_proj(hidden).split([inner, module.conv_dim, heads], -1)
    mixed = _short_convolution(module, mixed, slots).float()
    values, keys, queries = torch.split(mixed, [inner, groups * size, groups * size], -1)
    values = values.view(batch, width, heads, -1)
    queries, keys = (
        x.view(batch, width, groups, size).repeat_interleave(heads // groups, 2)
        for x in (queries, keys)
    )
    pace = F.softplus(pace.float() + module.dt_bias).clamp(*module.time_step_limit)
    read = slots.run(
        decayed_sum,
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        (values * pace[..., None]).transpose(1, 2),
        (-module.A_log.float().exp() * pace).transpose(1, 2),
    )
    read = read.transpose(1, 2) + module.D[:, None] * values
    normed = module.norm(read.reshape(batch, width, -1), gate)
    result: Tensor = module.out_proj(normed.to(hidden.dtype))
    return result


def _short_convolution(module: Any, inputs: Tensor, slots: RecurrentSlots) -> Tensor:
    """Each channel over its own last few inputs [B, T, C], and the activation; [B, T, C]."""
    layer: nn.Conv1d = module.conv1d
    window = slots.convolve(inputs.transpose(1, 2), layer.kernel_size[0])
    mixed = F.conv1d(window.to(layer.weight.dtype), layer.weight, layer.bias, groups=layer.groups)
    return F.silu(mixed).to(inputs.dtype).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


_MIXERS: dict[str, Mixer] = {
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": gated_delta_net,
    "NemotronHMamba2Mixer": mamba2,
    "BailingHybridDeltaAttention": kimi_delta_attention,
}


def over_slots(decoder: nn.Module) -> int:
    """Have all mixers in a decoder that are known here pass over slots; returns how many."""
    found = 0
    for module in decoder.modules():
        mixer = _MIXERS.get(type(module).__name__)
        if mixer and getattr(module, "activation", "silu") in ("silu", "swish"):
            module.forward = partial(_pass, module, mixer, module.forward)
            found += 1
    return found


def _pass(
    module: Any,
    mixer: Mixer,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    cache: Any = None,
    **others: Any,
) -> Tensor:
    if not isinstance(cache, SlotCache):
        return own(hidden_states, cache=cache, **others)
    span = cache.span
    assert span is not None, "set span before the pass"
    slots = cache.recurrent.setdefault(module.layer_idx, RecurrentSlots())
    slots.begin(span.positions[:, 0], span.positions.shape[1], span.kept)
    mixed = mixer(module, hidden_states, slots)
    slots.end(span.kept)
    return mixed
