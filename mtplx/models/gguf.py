"""GGUF files: the container, and the config of the model in it.

The container is read here: `gguf.GGUFReader` wraps each of a vocabulary's 100,000 strings in an
array of its own and needs seconds for it, while a walk over the header takes a tenth of one. The
block formats are the `gguf` package's. Format: "GGUF" in the ggml repository, docs/gguf.md.

Architectures that have no entry in the table below go through transformers' own GGUF loader.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from mtplx.errors import MtplxError

# transformers takes seconds to import, so the functions that need it import it: a damaged file is
# reported before that.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# --- the container ---------------------------------------------------------------------------

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ROWS_AT_ONCE = 64

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file.

    `shape` is in torch's order (rows first), `data` the raw bytes `[..., bytes per row]`, mapped
    and not yet read.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def dequantize(self) -> torch.Tensor:
        """The values in float32, `[*shape]`, in memory of their own.

        Raises `NotImplementedError` for a block format the `gguf` package cannot decode.
        """
        # The package decodes 16 rows at a call. Blocks lie one after another whatever a row is
        # called, so longer rows mean fewer calls: a third of the time.
        rows = prod(self.shape[:-1])
        data = self.data.reshape(rows // gcd(rows, _ROWS_AT_ONCE), -1)
        values = gguf.dequantize(data, self.kind)
        return torch.from_numpy(np.require(values, requirements="W")).view(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The parsed header of a GGUF file; the weights stay on disk until they are asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model family: `llama`, `qwen3`, …"""
        return str(self["general.architecture"])

    def __getitem__(self, key: str) -> Any:
        """A metadata value that the file must have; `MtplxError` where it has not."""
        if key not in self.metadata:
            raise MtplxError(f"{self.path}: the GGUF file lacks the metadata key {key!r}")
        return self.metadata[key]


class _Cursor:
    """Little-endian values, one after another; `EOFError` where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise EOFError
        return self.data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[GGUFValueType(element)])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(element) for _ in range(count)]
        number = self.scalar(_SCALARS[GGUFValueType(kind)])
        # A float32 holds 1e-5 as 9.999999747378752e-06; the shortest decimal that rounds to it is
        # the number its author wrote.
        return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number


def read_gguf(path: Path) -> GgufFile:
    """Reads a GGUF file's header: all metadata, and where each tensor lies.

    Raises `MtplxError` for a file that is missing, not GGUF, of a version or byte order not known
    here, damaged, truncated, or only one part of a split model.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise MtplxError(
                    f"{path}: not a GGUF file (it does not begin with the bytes 'GGUF')"
                )
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise MtplxError(f"{path}: cannot be read ({error.strerror})") from error

    cursor = _Cursor(data)
    cursor.take(4)
    try:
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise MtplxError(
                f"{path}: GGUF version {version} is not known here (only little-endian files of "
                f"version {' and '.join(map(str, _VERSIONS))}): convert the model again"
            )
        tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {
            cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(metadata_count)
        }
        tensors = dict(_tensors(cursor, tensor_count, metadata))
        if (parts := metadata.get("split.count", 1)) > 1:
            raise MtplxError(
                f"{path}: one of {parts} parts of a model: merge them with "
                "`llama-gguf-split --merge` and give the merged file"
            )
    except EOFError:
        raise MtplxError(
            f"{path}: the file ends too early ({len(data):,} bytes): it is truncated, "
            "download it again"
        ) from None
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
        raise MtplxError(f"{path}: damaged GGUF header ({error}): download it again") from error
    return GgufFile(path, metadata, tensors)


def _tensors(
    cursor: _Cursor, count: int, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, GgufTensor]]:
    entries = []
    for _ in range(count):
        name = cursor.string()
        # ggml counts dimensions from the innermost outwards, torch the other way round.
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        kind = GGMLQuantizationType(cursor.scalar("I"))
        entries.append((name, shape, kind, cursor.scalar("Q")))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    for name, shape, kind, offset in entries:
        byte_shape = gguf.quant_shape_to_byte_shape(shape, kind)
        if start + offset + prod(byte_shape) > len(cursor.data):
            raise EOFError
        raw = np.frombuffer(cursor.data, np.uint8, prod(byte_shape), start + offset)
        yield name, GgufTensor(shape, kind, raw.reshape(byte_shape))


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """How one of llama.cpp's architectures maps to a transformers model.

    `interleaved`: the file's q and k rows are reordered so that a rotary pair is two neighbours,
    as llama.cpp's original rope wants it. transformers rotates row i with row i + head_dim / 2.
    """

    model_type: str
    interleaved: bool


FAMILIES = {
    "llama": _Family("llama", interleaved=True),
    "qwen2": _Family("qwen2", interleaved=False),
    "qwen3": _Family("qwen3", interleaved=False),
}

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def load_config(file: GgufFile) -> PreTrainedConfig:
    """The transformers config that the file's metadata describes."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = FAMILIES.get(file.architecture)
    if family is None:
        with by_itself(file) as place:
            return AutoConfig.from_pretrained(**place)

    def value(key: str) -> Any:
        number = file[f"{file.architecture}.{key}"]
        if isinstance(number, list):
            raise MtplxError(
                f"{file.path}: {key} differs from layer to layer, which no {family.model_type} "
                "model in transformers has: use its Hugging Face checkpoint"
            )
        return number

    def optional(key: str, default: Any) -> Any:
        return value(key) if f"{file.architecture}.{key}" in file.metadata else default

    heads = value("attention.head_count")
    head_dim = optional("attention.key_length", value("embedding_length") // heads)
    if (rotated := optional("rope.dimension_count", head_dim)) != head_dim:
        raise MtplxError(
            f"{file.path}: rotates {rotated} of {head_dim} dimensions of a head, which no "
            f"{family.model_type} model in transformers does: use its Hugging Face checkpoint"
        )
    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise MtplxError(f"{file.path}: the GGUF file lacks the tensor 'token_embd.weight'")
    # In transformers only llama's config knows the switch; qwen2 always has biases.
    biases = {"attention_bias": True} if _has_llama_biases(file) else {}
    return CONFIG_MAPPING[family.model_type](
        vocab_size=embedding.shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=optional("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope_parameters(file, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **biases,
    )


@contextmanager
def by_itself(file: GgufFile) -> Iterator[dict[str, Any]]:
    """The file as an argument for transformers' loaders, in a directory where nothing else is.

    They would read its neighbours too, though a GGUF file is a model of its own, and ask whether
    to run the code that one of them may name.
    """
    with TemporaryDirectory() as directory:
        place = Path(directory, file.path.name)
        try:
            place.symlink_to(file.path.resolve())
        except OSError:  # Windows lets only some users
            shutil.copyfile(file.path, place)
        yield {
            "pretrained_model_name_or_path": directory,
            "gguf_file": place.name,
            "local_files_only": True,
            "trust_remote_code": False,
        }


def _has_llama_biases(file: GgufFile) -> bool:
    return file.architecture == "llama" and "blk.0.attn_q.bias" in file.tensors


def _rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rotary settings, as transformers spells them."""
    prefix = f"{file.architecture}.rope"
    theta = file.metadata.get(f"{prefix}.freq_base", 10000.0)
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, head_dim, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": file[f"{prefix}.scaling.factor"],
        }
    raise MtplxError(
        f"{file.path}: rope scaling of type {kind!r} is not read from GGUF files: "
        "use the model's Hugging Face checkpoint"
    )


def _llama3_rope(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's rotary scaling, found again from the factors that the file holds instead of it.

    llama.cpp stores what each frequency is divided by, `[head_dim / 2]`. The settings behind them
    are the published ones for every Llama 3 (frequencies 1 and 4, 8,192 positions) but for the
    factor, which is the largest entry; they are taken only if they give the file's own numbers.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = file.tensors[ROPE_FACTORS].dequantize()
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The context length only keeps the config's own check quiet: the formula does not use it.
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=8192 * 128
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if stored.shape != scaled.shape or not torch.allclose(
        (plain / scaled).float(), stored, rtol=1e-4
    ):
        raise MtplxError(
            f"{file.path}: its rope_freqs.weight are not Llama 3's rotary scaling: "
            "use the model's Hugging Face checkpoint"
        )
    return parameters


# --- how to run it ---------------------------------------------------------------------------

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end an answer: end of text, then end of turn where the file names one."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(file.metadata[name] for name in names if name in file.metadata))


def sampling(file: GgufFile) -> dict[str, float]:
    """The sampler settings that the file recommends, by transformers' names."""
    return {
        ours: file.metadata[f"general.sampling.{theirs}"]
        for theirs, ours in _SAMPLING.items()
        if f"general.sampling.{theirs}" in file.metadata
    }
