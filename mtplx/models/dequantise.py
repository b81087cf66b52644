"""Quantised tensors of Hugging Face checkpoints, made plain while they are read.

What a file holds decides, not what its config lists: names in lists of what was left alone differ
from the files' own as often as not. A tensor of a float type is taken as it is; one of a narrower
type is found together with its scales by its name, and what is left over or missing is an error.
No more than one tensor is unpacked at a time for each thread that reads.

Formats are those of DeepSeek's and Qwen's FP8 files (float8 with scales for blocks), of
compressed-tensors (float8, int8, packed integers, NVFP4, MXFP4), of ModelOpt (float8, NVFP4), of
GPTQ and of AWQ's `gemm`, and AutoRound's that are packed as those two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtplx.errors import MtplxError

_METHODS = frozenset({"fp8", "compressed-tensors", "modelopt", "gptq", "awq"})
_PACKINGS = frozenset({"auto_round:auto_gptq", "auto_round:auto_awq"})
"""Of AutoRound's, those that are GPTQ's and AWQ's."""

PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of tensors, as safetensors names them, that are taken as they are."""

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of its quantisation; nothing where it says none."""
    text = config.get("text_config") or {}
    return config.get("quantization_config") or text.get("quantization_config") or {}


def is_known(settings: Mapping[str, Any]) -> bool:
    """Whether files of a config's `quantization_config` are read here."""
    return settings.get("quant_method") in _METHODS or settings.get("packing_format") in _PACKINGS


def is_read(settings: Mapping[str, Any], tensors: Iterable[Any]) -> bool:
    """Whether a checkpoint is quantised in a way that is read here.

    Args:
        settings: of its config.
        tensors: safetensors' slices, or what headers say of them.
    """
    if settings:
        return is_known(settings)
    # Such a tensor means nothing without its scale, whether the config mentions it or not.
    return any(tensor.get_dtype() in _FLOAT8 for tensor in tensors)


def plain(tensors: Mapping[str, Any], settings: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Tensors by the names they have in a checkpoint that is not quantised, none of them read yet.

    Args:
        tensors: safetensors' slices of a whole checkpoint, or what headers say of them, whose
            slices are on the meta device; so are then those returned.
        settings: the config's `quantization_config`.
        where: the checkpoint, for errors.
    Returns:
        slices; those that were quantised read in float32.
    Raises:
        MtplxError: a scale or another part is missing, left over, or of a shape that does not fit.
    """
    found: dict[str, Any] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if _companion_of(name, tensors):
            continue
        form = next((form for form in _FORMS if form.has(name, tensor)), None)
        if form is None:
            found[name] = tensor
            continue
        stem = name.removesuffix(form.suffix)
        parts = {"": tensor}
        for alternatives in form.needs:
            part = next((part for part in alternatives if stem + part in tensors), None)
            if part is None:
                raise MtplxError(
                    f"{where}: {name} is quantised, and {stem}{alternatives[0]}, which tells what "
                    "its numbers stand for, is missing: download the model again"
                )
            parts[alternatives[0]] = tensors[stem + part]
            used.add(stem + part)
        for part in form.may:
            if stem + part in tensors:
                parts[part] = tensors[stem + part]
                used.add(stem + part)
        try:
            read, shape = form.build(parts, settings)
        except _Misfit as error:
            raise MtplxError(
                f"{where}: {name} is quantised in a way that is not read here: {error}"
            ) from None
        if stem + form.becomes in tensors and form.suffix:
            raise MtplxError(
                f"{where}: {name} and {stem}{form.becomes} are the same weight twice; take the "
                "checkpoint as it was published"
            )
        found[stem + form.becomes] = _Dequantised(parts, read, shape)
    for name in tensors.keys() - used:
        main = _companion_of(name, tensors)
        if main and not name.endswith(_OF_ACTIVATIONS):
            raise MtplxError(
                f"{where}: {name} is left over: it belongs to {main}, which is not there or not "
                "quantised; take the checkpoint as it was published"
            )
    return found


class _Misfit(Exception):
    """Shapes that are none of a format's."""


@dataclass(frozen=True)
class _Dequantised:
    """What transformers asks of a slice of safetensors, over the parts of a quantised tensor."""

    parts: Mapping[str, Any]
    read: Callable[[dict[str, Tensor]], Tensor]
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        parts = {name: part[...] for name, part in self.parts.items()}
        if parts[""].is_meta:
            return torch.empty(self.shape, device="meta")[index]
        return self.read(parts)[index]


Build = Callable[
    [Mapping[str, Any], Mapping[str, Any]],
    tuple[Callable[[dict[str, Tensor]], Tensor], tuple[int, ...]],
]
"""(slices of a tensor's parts, the config's settings) -> (what makes it of its parts, its shape).

The part called "" holds the numbers.
"""


@dataclass(frozen=True)
class _Form:
    """A way in which a tensor lies in a file.

    Attributes:
        types: of the tensor with the numbers.
        suffix: of its name; what is before it is common to all parts.
        becomes: the suffix of the plain tensor.
        needs: suffixes of other parts, of each the first that is there.
        may: suffixes of parts that may be there.
        build: see Build.
    """

    types: frozenset[str]
    build: Build
    needs: tuple[tuple[str, ...], ...]
    may: tuple[str, ...] = ()
    suffix: str = ""
    becomes: str = ""

    def has(self, name: str, tensor: Any) -> bool:
        return name.endswith(self.suffix) and tensor.get_dtype() in self.types


_COMPANION = re.compile(
    r"(?P<stem>.+?)(?:_(?:scale_inv|scale|scale_2|global_scale|zero_point|shape|g_idx)"
    r"|\.(?:qzeros|scales|g_idx))$"
)
_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
"""Suffixes of what tells how to quantise activations, keys and values, which is not done here."""


def _companion_of(name: str, tensors: Mapping[str, Any]) -> str | None:
    """The tensor that this one helps to read; None for one that stands for itself."""
    if name.endswith(_OF_ACTIVATIONS):
        return name.rpartition(".")[0]
    match = _COMPANION.match(name)
    if match is None:
        return None
    stem, behind = match["stem"], name[match.end("stem")]
    if behind == ".":
        return f"{stem}.qweight"
    # Other weights may have names that end so, such as a scale of a router's.
    return stem if stem.endswith(".weight") or stem in tensors else None


# --- what numbers stand for ------------------------------------------------------------------


_SIZES = frozenset({"weight_block_size", "block_structure", "group_size", "q_group_size"})
_WIDTHS = frozenset({"bits", "num_bits", "w_bit"})


def _named(settings: Any, keys: frozenset[str]) -> list[int]:
    """The numbers that any part of the settings has under these keys, each once."""
    found: list[int] = []
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            values = value if isinstance(value, list) else [value]
            if key in keys:
                found += [n for n in values if isinstance(n, int) and n > 0]
            else:
                found += _named(value, keys)
    return list(dict.fromkeys(found))


def _block(count: int, scales: int, sizes: list[int]) -> int:
    """How many of `count` numbers in a row share each of so many scales; the last may have fewer.

    Raises:
        _Misfit: there is no such number.
    """
    if scales == 1:
        return count
    for size in sizes:
        if ceil(count / size) == scales:
            return size
    if not scales or count % scales:
        raise _Misfit(f"{scales} scales for {count} numbers")
    return count // scales


def _spread(scales: Tensor, shape: tuple[int, ...], sizes: list[int]) -> Tensor:
    """Scales [a, b, ...], the last dimensions left out or not, made to fit numbers [N, K, ...]."""
    scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    for axis, count in enumerate(shape):
        if scales.shape[axis] not in (1, count):
            block = _block(count, scales.shape[axis], sizes)
            scales = scales.repeat_interleave(block, axis).narrow(axis, 0, count)
    return scales


def _check_scales(
    scales: list[int], shape: tuple[int, ...], sizes: list[int], what: str = "scales"
) -> None:
    if len(scales) > len(shape):
        raise _Misfit(f"{what} of shape {scales} for numbers of shape {list(shape)}")
    for count, several in zip(shape, scales, strict=False):
        _block(count, several, sizes)


def _real(scales: Tensor) -> Tensor:
    """Scales in float32; those in bytes are exponents of two (OCP's E8M0), with a bias of 127."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    return scales.float()


def _wide(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """A number a byte, float8 or int8; scales for blocks, rows, columns or all."""
    shape = tuple(parts[""].get_shape())
    sizes = _named(settings, _SIZES)
    for part, tensor in parts.items():
        if part:
            _check_scales(tensor.get_shape(), shape, sizes)

    def read(of: dict[str, Tensor]) -> Tensor:
        values = of[""].float()
        if "_zero_point" in of:
            values -= _spread(of["_zero_point"].float(), shape, sizes)
        scales = of.get("_scale_inv", of.get("_scale"))
        assert scales is not None
        values *= _spread(_real(scales), shape, sizes)
        return values

    return read, shape


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Numbers of a few bits out of a stream, the lowest bits of each word first.

    Args:
        words: [..., W] int32.
        bits: of a number, 8 or less.
        count: of numbers in a row.
    Returns:
        [..., count] uint8.
    """
    octets = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        return (octets[..., None] >> shifts & mask).flatten(-2)[..., :count]
    # A number may lie in two octets; of those no more than 14 bits are looked at.
    octets = F.pad(octets, (0, 1))
    first = torch.arange(count, device=words.device) * bits
    pairs = octets[..., first // 8 + 1].to(torch.int16) << 8 | octets[..., first // 8]
    return (pairs >> (first % 8).to(torch.int16) & mask).to(torch.uint8)


def _bits(words: int, count: int, settings: Mapping[str, Any]) -> int:
    """Of a number, where `count` of them fill so many words."""
    widths: list[int] = [*_named(settings, _WIDTHS), *range(2, 9)]
    for bits in widths:
        if bits <= 8 and ceil(count * bits / 32) == words:
            return bits
    raise _Misfit(f"{words} words for {count} numbers")


def _likely_inputs(
    words: int, scales: list[int], settings: Mapping[str, Any], sizes: list[int]
) -> int:
    """Numbers in a row of so many words, where only headers are at hand, which do not tell.

    Rows end with a word in all common files. Where the settings name several widths, it is one
    with which groups of a size that they name come to as many as there are scales.
    """
    likely = [words * 32 // bits for bits in _named(settings, _WIDTHS) if bits <= 8]
    if len(scales) > 1 and scales[1] > 1:
        likely.sort(key=lambda count: all(ceil(count / size) != scales[1] for size in sizes))
    return likely[0] if likely else words * 8


def _packed(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """compressed-tensors' `pack-quantized`: [N, W] int32, each number with half its range added."""
    rows, words = parts[""].get_shape()
    sizes = _named(settings, _SIZES)
    scales = parts["_scale"].get_shape()
    told = parts["_shape"][...]
    if told.is_meta:
        shape = (rows, _likely_inputs(words, scales, settings, sizes))
    else:
        shape = tuple(told.tolist())
    if len(shape) != 2 or shape[0] != rows:
        raise _Misfit(f"{rows} rows for a weight of shape {list(shape)}")
    bits = _bits(words, shape[1], settings)
    _check_scales(scales, shape, sizes)
    groups = scales[1] if len(scales) > 1 else 1
    zero = parts.get("_zero_point")
    if zero is not None and zero.get_shape() != [ceil(rows * bits / 32), groups]:
        raise _Misfit(f"zero points of shape {zero.get_shape()} for {rows} rows of {groups} groups")

    def read(of: dict[str, Tensor]) -> Tensor:
        values = unpack(of[""], bits, shape[1]).float()
        scales = _real(of["_scale"])
        zeros = torch.full((1, 1), float(1 << bits - 1))
        if "_zero_point" in of:  # with the same half added
            zeros = unpack(of["_zero_point"].T, bits, rows).T.float()
        if "_g_idx" in of:
            index = of["_g_idx"].long()
            zeros, scales = zeros.expand(-1, groups)[:, index], scales[:, index]
        values -= _spread(zeros, shape, sizes)
        values *= _spread(scales, shape, sizes)
        return values

    return read, shape


_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the bits of a number of OCP's E2M1 stand for, but for the sign, which is the highest bit."""


def _four_bit_floats(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """NVFP4 and MXFP4: [N, K / 2] of bytes, the lower half of each first, in groups of a row."""
    rows, octets = parts[""].get_shape()
    shape = (rows, 2 * octets)
    _check_scales(parts["_scale"].get_shape(), shape, [])

    def read(of: dict[str, Tensor]) -> Tensor:
        table = torch.tensor([*_HALVES, *(-value for value in _HALVES)])
        octets = of[""]
        halves = torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
        values = table[halves.int()]
        scales = _real(of["_scale"])
        # Those of the groups are kept near the middle of float8's range by another one for all,
        # with which compressed-tensors multiplied them; ModelOpt divided.
        if "_global_scale" in of:
            scales = scales / of["_global_scale"].float()
        if "_scale_2" in of:
            scales = scales * of["_scale_2"].float()
        values *= _spread(scales, shape, [])
        return values

    return read, shape


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ's `gemm` kernel has each of eight numbers."""


def _by_columns(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """GPTQ and AWQ: the matrix lies transposed, with scales and zeros [groups, N].

    GPTQ packs eight inputs of an output into a word, AWQ eight outputs; so their shapes differ.
    """
    stored, zeros = parts[""].get_shape(), parts[".qzeros"].get_shape()
    groups, outputs = parts[".scales"].get_shape()
    if zeros[0] != groups:
        raise _Misfit(f"{zeros[0]} rows of zeros for {groups} groups")
    bits = _bits(zeros[1], outputs, settings)
    sizes = _named(settings, _SIZES)
    if stored[1] == outputs and stored[0] * 32 % bits == 0:
        inputs = stored[0] * 32 // bits
        read = _gptq(bits, outputs, inputs, settings, sizes)
    elif stored[1] == zeros[1] and bits == 4:
        inputs = stored[0]
        read = _awq(outputs, inputs, sizes)
    else:
        raise _Misfit(f"numbers of shape {stored} for {groups} groups of {outputs} outputs")
    _block(inputs, groups, sizes)
    return read, (outputs, inputs)


def _gptq(
    bits: int, outputs: int, inputs: int, settings: Mapping[str, Any], sizes: list[int]
) -> Callable[[dict[str, Tensor]], Tensor]:
    # The first version of the format has each zero less one, so that 0 became the largest number.
    less = 0 if "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format")) else 1

    def read(of: dict[str, Tensor]) -> Tensor:
        values = unpack(of[""].T, bits, inputs).float()
        zeros = unpack(of[".qzeros"], bits, outputs) + less & (1 << bits) - 1
        zeros, scales = zeros.T.float(), of[".scales"].T.float()
        if ".g_idx" in of:
            index = of[".g_idx"].long()
            zeros, scales = zeros[:, index], scales[:, index]
        values -= _spread(zeros, (outputs, inputs), sizes)
        values *= _spread(scales, (outputs, inputs), sizes)
        return values

    return read


def _awq(outputs: int, inputs: int, sizes: list[int]) -> Callable[[dict[str, Tensor]], Tensor]:
    def numbers(words: Tensor) -> Tensor:
        eights = unpack(words, 4, outputs).view(len(words), -1, 8)
        return eights[..., list(_AWQ_ORDER)].flatten(1)

    def read(of: dict[str, Tensor]) -> Tensor:
        values = numbers(of[""]).T.float()
        values -= _spread(numbers(of[".qzeros"]).T.float(), (outputs, inputs), sizes)
        values *= _spread(of[".scales"].T.float(), (outputs, inputs), sizes)
        return values.contiguous()

    return read


_FORMS = (
    _Form(_FLOAT8, _wide, (("_scale_inv", "_scale"),)),
    _Form(frozenset({"I8"}), _wide, (("_scale",),), ("_zero_point",)),
    _Form(
        frozenset({"I32"}),
        _packed,
        (("_scale",), ("_shape",)),
        ("_zero_point", "_g_idx"),
        "_packed",
    ),
    _Form(frozenset({"U8"}), _four_bit_floats, (("_scale",),), ("_global_scale",), "_packed"),
    _Form(frozenset({"U8"}), _four_bit_floats, (("_scale",),), ("_scale_2",)),
    _Form(
        frozenset({"I32"}),
        _by_columns,
        ((".qzeros",), (".scales",)),
        (".g_idx",),
        ".qweight",
        ".weight",
    ),
)
