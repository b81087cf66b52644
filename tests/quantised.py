"""Weights as quantised checkpoints store them, and what the stored numbers stand for.

Written from the formats' descriptions, number by number, so that it shares nothing with what reads
them. Numbers are drawn and not fitted: what a file says is all that matters here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NOISE = torch.Generator()

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors by what follows a module's name, and the weight [N, K] in float32."""

GROUP = 8
BLOCK = 16


def _numbers(shape: tuple[int, int], below: int) -> list[list[int]]:
    drawn: list[list[int]] = torch.randint(below, shape, generator=NOISE).tolist()
    return drawn


def _scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=NOISE) * 0.1 + 0.01


def _float8(shape: tuple[int, int]) -> Tensor:
    return (torch.randn(shape, generator=NOISE) * 2).to(torch.float8_e4m3fn)


def _stream(rows: list[list[int]], bits: int) -> Tensor:
    """Rows of numbers as one long number each, the first lowest, cut into words."""
    words = []
    for row in rows:
        long = sum(number << bits * i for i, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        cut = [long >> 32 * i & 0xFFFFFFFF for i in range(count)]
        words.append([word - (1 << 32) if word >> 31 else word for word in cut])
    return torch.tensor(words, dtype=torch.int32)


def _columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _weight(rows: list[list[int]], zeros: Tensor, scales: Tensor, groups: list[int]) -> Tensor:
    """Row n, input k: (number - zero) * scale, those of the input's group."""
    return (torch.tensor(rows).float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def _in_order(inputs: int) -> list[int]:
    return [k // GROUP for k in range(inputs)]


def fp8(shape: tuple[int, int]) -> Stored:
    """DeepSeek's and Qwen's: a scale for each block, the last ones cut short."""
    weight = _float8(shape)
    scales = _scales(-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    rows, columns = (torch.arange(count) // BLOCK for count in shape)
    plain = weight.float() * scales[rows][:, columns]
    return {"weight": weight, "weight_scale_inv": scales}, plain


def fp8_static(shape: tuple[int, int]) -> Stored:
    """ModelOpt's: a scale for all, and one for the inputs."""
    weight, scale = _float8(shape), _scales(1)[0]
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": _scales(1)[0]}
    return tensors, weight.float() * scale


def fp8_rows(shape: tuple[int, int]) -> Stored:
    """compressed-tensors' `float-quantized`: a scale for each row, in bfloat16."""
    weight, scales = _float8(shape), _scales(shape[0], 1).bfloat16()
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales.float()


def int8(shape: tuple[int, int]) -> Stored:
    """compressed-tensors' `int-quantized`, with zero points."""
    rows = torch.tensor(_numbers(shape, 256)) - 128
    zeros = torch.tensor(_numbers((shape[0], 1), 256)) - 128
    scales = _scales(shape[0], 1)
    parts = {"weight": rows.to(torch.int8), "weight_scale": scales}
    parts["weight_zero_point"] = zeros.to(torch.int8)
    return parts, (rows - zeros).float() * scales


def packed(
    shape: tuple[int, int], bits: int = 4, zeros: bool = False, order: bool = False
) -> Stored:
    """compressed-tensors' `pack-quantized`: signed numbers with half their range added."""
    rows, half = _numbers(shape, 1 << bits), 1 << bits - 1
    scales = _scales(shape[0], shape[1] // GROUP).bfloat16()
    groups = _in_order(shape[1])
    parts = {
        "weight_packed": _stream(rows, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    points = [[half] * scales.shape[1] for _ in rows]
    if zeros:
        points = _numbers(tuple(scales.shape), 1 << bits)
        parts["weight_zero_point"] = _stream(_columns(points), bits).T.contiguous()
    if order:
        groups = [groups[i] for i in torch.randperm(shape[1], generator=NOISE).tolist()]
        parts["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return parts, _weight(rows, torch.tensor(points), scales, groups)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _e2m1(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows = _numbers(shape, 16)
    octets = [[low | high << 4 for low, high in zip(r[::2], r[1::2], strict=True)] for r in rows]
    values = [[E2M1[n & 7] * (-1 if n & 8 else 1) for n in row] for row in rows]
    return torch.tensor(octets, dtype=torch.uint8), torch.tensor(values)


def nvfp4(shape: tuple[int, int]) -> Stored:
    """compressed-tensors': scales of groups were multiplied by the one for all."""
    octets, values = _e2m1(shape)
    scales = (_scales(shape[0], shape[1] // GROUP) * 1000).to(torch.float8_e4m3fn)
    whole = torch.tensor([1000.0])
    plain = values * (scales.float() / whole).repeat_interleave(GROUP, 1)
    parts = {"weight_packed": octets, "weight_scale": scales, "weight_global_scale": whole}
    return parts | {"input_global_scale": torch.tensor([3.0])}, plain


def nvfp4_modelopt(shape: tuple[int, int]) -> Stored:
    octets, values = _e2m1(shape)
    scales = (_scales(shape[0], shape[1] // GROUP) * 1000).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.001)
    plain = values * (scales.float() * whole).repeat_interleave(GROUP, 1)
    parts = {"weight": octets, "weight_scale": scales, "weight_scale_2": whole}
    return parts | {"input_scale": torch.tensor(3.0)}, plain


def mxfp4(shape: tuple[int, int]) -> Stored:
    octets, values = _e2m1(shape)
    exponents = torch.tensor(_numbers((shape[0], shape[1] // GROUP), 6)) + 121
    plain = values * (2.0 ** (exponents - 127)).repeat_interleave(GROUP, 1)
    return {"weight_packed": octets, "weight_scale": exponents.to(torch.uint8)}, plain


def gptq(shape: tuple[int, int], bits: int = 4, order: bool = False, version: int = 1) -> Stored:
    """Eight inputs of an output in a word; in version 1, each zero less one, and -1 wraps."""
    outputs, inputs = shape
    rows = _numbers(shape, 1 << bits)
    zeros = _numbers((outputs, inputs // GROUP), 1 << bits)
    zeros[0][0] = 0
    less = [[(z - (version == 1)) % (1 << bits) for z in row] for row in zeros]
    scales = _scales(outputs, inputs // GROUP).half()
    groups = _in_order(inputs)
    if order:
        groups = [groups[i] for i in torch.randperm(inputs, generator=NOISE).tolist()]
    parts = {
        "qweight": _stream(rows, bits).T.contiguous(),
        "qzeros": _stream(_columns(less), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return parts, _weight(rows, torch.tensor(zeros), scales, groups)


def awq(shape: tuple[int, int]) -> Stored:
    """Eight outputs of an input in a word, the even ones first."""
    outputs, inputs = shape
    rows, zeros = _numbers(shape, 16), _numbers((outputs, inputs // GROUP), 16)

    def words(columns: list[list[int]]) -> Tensor:
        moved = [
            [eight[i] for at in range(0, outputs, 8) for eight in [row[at : at + 8]]
             for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            for row in columns
        ]  # fmt: skip
        return _stream(moved, 4)

    scales = _scales(outputs, inputs // GROUP).half()
    parts = {
        "qweight": words(_columns(rows)),
        "qzeros": words(_columns(zeros)),
        "scales": scales.T.contiguous(),
    }
    return parts, _weight(rows, torch.tensor(zeros), scales, _in_order(inputs))


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, **weights},
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mtp.*", "model.layers.61.self_attn"],
        "config_groups": {"group_0": group},
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "model.mtp.layers.0.self_attn.q_proj"],
}

FORMATS: dict[str, tuple[Callable[[tuple[int, int]], Stored], dict[str, Any]]] = {
    "fp8": (fp8, _FP8),
    "fp8 by rows": (fp8_rows, _compressed("float-quantized", num_bits=8, strategy="channel")),
    "fp8 of ModelOpt": (fp8_static, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "int8": (int8, _compressed("int-quantized", num_bits=8, strategy="channel")),
    "packed": (packed, _compressed("pack-quantized", group_size=GROUP)),
    "packed with zeros": (
        lambda shape: packed(shape, zeros=True),
        _compressed("pack-quantized", group_size=GROUP, symmetric=False),
    ),
    "packed out of order": (
        lambda shape: packed(shape, order=True),
        _compressed("pack-quantized", group_size=GROUP, actorder="group"),
    ),
    "packed in 8 bits": (
        lambda shape: packed(shape, 8),
        _compressed("pack-quantized", group_size=GROUP, num_bits=8),
    ),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", group_size=GROUP, type="float")),
    "nvfp4 of ModelOpt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", group_size=GROUP, type="float")),
    "gptq": (gptq, _GPTQ),
    "gptq out of order": (lambda shape: gptq(shape, order=True), _GPTQ | {"desc_act": True}),
    "gptq version 2": (
        lambda shape: gptq(shape, version=2),
        _GPTQ | {"checkpoint_format": "gptq_v2"},
    ),
    "gptq in 8 bits": (lambda shape: gptq(shape, 8), _GPTQ | {"bits": 8}),
    "gptq of AutoRound": (
        gptq,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": False,
            "block_name_to_quantize": ["model.layers"],
        },
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
}
"""By a name: what draws a weight of a shape, and the config's `quantization_config`."""


def quantise(
    tensors: dict[str, Tensor], format: str, leave: Callable[[str], bool] = lambda name: False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's tensors with its linear layers drawn anew in a format, and the plain ones.

    Embeddings, output heads, routers and what the format has no room for stay as they are.

    Args:
        tensors: of a plain checkpoint.
        format: one of FORMATS.
        leave: tells of a tensor's name that it stays, too.
    """
    NOISE.manual_seed(5)
    draw, _ = FORMATS[format]
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        kept = ("embed_tokens.weight", "head.weight", "gate.weight", "conv1d.weight")
        few = tensor.ndim != 2 or tensor.shape[0] % GROUP or tensor.shape[1] % GROUP
        ragged = format.startswith("fp8") or format == "int8"
        if tensor.ndim != 2 or name.endswith(kept) or leave(name) or (few and not ragged):
            stored[name] = plain[name] = tensor
            continue
        module = name.removesuffix("weight")
        parts, weight = draw(tuple(tensor.shape))
        stored |= {module + part: value for part, value in parts.items()}
        plain[name] = weight
    return stored, plain
