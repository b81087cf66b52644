"""Attached MTP heads in EAGLE-3's layout, kept in the `speculators` file format.

Heads in the format of EAGLE-3's authors are read too, by way of `eagle3_original.py`.

One decoder layer stands beside the trunk. Its input at position i is the normed embedding of
token i+1 next to a hidden state: the fused residual streams of three trunk layers at position i
for the first draft, its own output for every later one. Its output head covers a reduced draft
vocabulary. A head with an embedding of its own may be of another width than its trunk.

Sources: EAGLE-3 (Li et al. 2025, arXiv:2503.01840) for the layout and for training on its own
outputs; the `speculators` config (`speculators_model_type: eagle3`) for the file. Layer ids count
layers whose output has been added to the residual stream: id i is the stream after i layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtplx.errors import MtplxError
from mtplx.models import eagle3_original
from mtplx.models.head_files import SAFETENSORS, read_tensors, weights_file

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, heads, T, D], k and v [B, kv_heads, T, D]) -> [B, heads, T, D]; owns cache and mask."""


@dataclass(frozen=True)
class Eagle3Config:
    """The part of a `speculators` config.json that decides how the head computes.

    Attributes:
        layer: of the decoder layer, whose `vocab_size` is the trunk's.
        draft_vocab_size: tokens it can draft.
        aux_layer_ids: trunk layers it taps.
        norm_before_residual: whether the layer's residual is the normed hidden state.
        norm_before_fc: whether the joined streams are normed, all three as one.
        norm_output: whether the head is fed its output after the last norm, not before.
        fc_norm: whether each of the joined streams is normed by itself.
        target_hidden_size: the trunk's width; None for the head's own.
        verifier_name: the trunk it was made for.
        verifier_architectures: that trunk's classes.
        depth: tokens per cycle that it recommends.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    aux_layer_ids: tuple[int, int, int]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    target_hidden_size: int | None = None
    verifier_name: str | None = None
    verifier_architectures: tuple[str, ...] = ()
    depth: int = 3

    @property
    def trunk_hidden_size(self) -> int:
        return self.target_hidden_size or self.layer.hidden_size

    def to_dict(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """The config.json of the `speculators` format, for weights of this type."""
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "target_hidden_size": self.target_hidden_size,
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
            "transformer_layer_config": self.layer.to_diff_dict(),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.depth},
                ],
                "verifier": {
                    "name_or_path": self.verifier_name,
                    "architectures": list(self.verifier_architectures),
                },
            },
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str, trunk_layers: int) -> Eagle3Config:
        """Read a `speculators` config.

        Args:
            raw: the parsed config.json.
            where: what to call the file in an error.
            trunk_layers: number of layers of the trunk, for the default layer ids.
        Raises:
            MtplxError: not an EAGLE-3 head, or one that needs what is not here.
        """
        kind = raw.get("speculators_model_type")
        if kind != "eagle3":
            raise MtplxError(
                f"{where}: speculators_model_type is {kind!r}; only 'eagle3' heads can be attached"
            )
        field = partial(_field, where)
        layer = dict(field(raw, "transformer_layer_config", dict, {}))
        model_type = layer.pop("model_type", "llama")
        if model_type != "llama":
            raise MtplxError(
                f"{where}: decoder layers of type {model_type!r} are not supported, only llama's"
            )
        if layer.get("num_hidden_layers", 1) != 1:
            raise MtplxError(f"{where}: heads with more than one decoder layer are not supported")
        ids = field(raw, "eagle_aux_hidden_state_layer_ids", list, None) or [
            2,
            trunk_layers // 2,
            trunk_layers - 3,
        ]
        if len(ids) != 3 or not all(type(i) is int and 0 <= i <= trunk_layers for i in ids):
            raise MtplxError(
                f"{where}: eagle_aux_hidden_state_layer_ids {ids} do not name three of the "
                f"trunk's {trunk_layers} layers"
            )
        meta = field(raw, "speculators_config", dict, {})
        verifier = field(meta, "verifier", dict, {})
        methods = field(meta, "proposal_methods", list, None) or [{}]
        method = methods[0] if isinstance(methods[0], dict) else {}
        config = _layer_config(layer, where)
        target = field(raw, "target_hidden_size", int, None)
        size = field(raw, "draft_vocab_size", int, config.vocab_size)
        depth = field(method, "speculative_tokens", int, 3)
        if size < 1 or depth < 1 or (target is not None and target < 1):
            raise MtplxError(
                f"{where}: draft_vocab_size ({size}), speculative_tokens ({depth}) and "
                f"target_hidden_size ({target}) must be 1 or more"
            )
        return cls(
            layer=config,
            draft_vocab_size=size,
            aux_layer_ids=(ids[0], ids[1], ids[2]),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_before_fc=bool(raw.get("norm_before_fc", False)),
            fc_norm=bool(raw.get("fc_norm", False)),
            norm_output=bool(raw.get("norm_output", False)),
            # Stated or not, a head as wide as its trunk is the same head.
            target_hidden_size=None if target == config.hidden_size else target,
            verifier_name=field(verifier, "name_or_path", str, None),
            verifier_architectures=tuple(field(verifier, "architectures", list, ())),
            depth=depth,
        )


def _field(where: str, raw: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A JSON value of this type; the default where there is none."""
    value = raw.get(name)
    if value is None:
        return default
    # In Python, not in JSON, true is a number.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MtplxError(f"{where}: {name} is {value!r}, not of type {_JSON[kind]}")
    return value


_JSON = {dict: "object", list: "array", int: "integer", str: "string"}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def _layer_config(layer: dict[str, Any], where: str) -> LlamaConfig:
    """The decoder layer's settings, checked to make a layer."""
    try:
        config = LlamaConfig(**layer)
        LlamaRotaryEmbedding(config)  # the one part whose settings a class cannot check
    # transformers checks types and raises its own kinds of errors, its rotary code any.
    except Exception as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise MtplxError(f"{where}: its settings make no decoder layer: {detail}") from None
    sizes = {name: getattr(config, name) for name in _SIZES}
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if any(type(size) is not int or size < 1 for size in sizes.values()) or heads % shared:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise MtplxError(f"{where}: its settings make no decoder layer: {listed}")
    if config.hidden_act != "silu":
        raise MtplxError(
            f"{where}: hidden_act is {config.hidden_act!r}; only 'silu' is supported in a head"
        )
    return config


class Attention(nn.Module):
    """Grouped-query attention whose input is twice as wide as the layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        width, bias = 2 * config.hidden_size, bool(config.attention_bias)
        query = config.num_attention_heads * self.head_dim
        key = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, query, bias=bias)
        self.k_proj = nn.Linear(width, key, bias=bias)
        self.v_proj = nn.Linear(width, key, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=bias)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]"""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias = bool(config.mlp_bias)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """The head's decoder layer: token embedding and hidden state in, hidden state out."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config.layer)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = GatedMLP(config.layer)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's input [B, T, 2H] and the residual [B, T, H] beside it."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), residual

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From attention's result [B, heads, T, D] to the layer's output [B, T, H]."""
        attended = attended.transpose(1, 2).flatten(2)
        hidden = residual + self.self_attn.o_proj(attended)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. Parameter names are those of the file.

    Token embeddings are passed in as vectors, so that a head file need not hold them. Where it
    does, they are in `embed_tokens`, in the type of the file; without, the trunk's are meant.
    """

    embed_tokens: nn.Embedding | None
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        width = config.trunk_hidden_size
        self.embed_tokens = None
        self.fc = nn.Linear(3 * width, hidden, bias=False)
        self.input_norm = nn.RMSNorm(3 * width, eps=eps) if config.norm_before_fc else None
        norms = [nn.RMSNorm(width, eps=eps) for _ in range(3)] if config.fc_norm else None
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config.layer)
        # d2t holds the distance from a draft id to its target id, t2d the target ids covered.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.layer.vocab_size, dtype=torch.bool))

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def draft_ids(self) -> Tensor:
        """Target token id of each draft id, [draft_vocab] int64."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, draft_ids: Tensor) -> None:
        """Cover these target token ids, ascending [draft_vocab] int64."""
        self.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.t2d.zero_()
        self.t2d[draft_ids] = True

    @torch.no_grad()
    def sort_vocabulary(self) -> None:
        """Put the draft ids in the order of their target ids, whatever order a file has."""
        order = self.draft_ids.argsort()
        self.lm_head.weight.copy_(self.lm_head.weight[order])
        self.set_vocabulary(self.draft_ids[order])

    def cast(self, dtype: torch.dtype) -> Eagle3Head:
        """Hold the parameters in this type.

        Rotary frequencies stay in float32, and an embedding, of which a step takes a few rows, as
        it is.
        """
        for name, parameter in self.named_parameters():
            if not name.startswith("embed_tokens."):
                parameter.data = parameter.data.to(dtype)
        return self

    def normed(self, aux: Tensor) -> Tensor:
        """Residual streams as `fc` is given them, [B, T, 3 * trunk's H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, aux.chunk(3, dim=-1), strict=True)
            aux = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return aux

    def fuse(self, aux: Tensor) -> Tensor:
        """Residual streams of the three trunk layers, [B, T, 3 * trunk's H] -> [B, T, H]."""
        fused: Tensor = self.fc(self.normed(aux))
        return fused

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary position embedding of queries or keys, [B, heads, T, D] at positions [B, T]."""
        cos, sin = self.rotary(x, positions)
        rotated: Tensor = apply_rotary_pos_emb(x, x, cos, sin)[0]
        return rotated

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step over T positions.

        Args:
            embeds: embeddings of the tokens that follow, [B, T, H].
            hidden: fused trunk states, or this function's own result one position earlier,
                [B, T, H].
            positions: [B, T] int64, of the hidden states.
            attend: attention over this step's keys and whatever came before.
        Returns:
            Hidden states [B, T, H], to be fed back and given to `logits`.
        """
        layer, attention = self.layer, self.layer.self_attn
        x, residual = layer.inputs(embeds, hidden)
        attended = attend(
            self.rotate(attention.split(attention.q_proj(x)), positions),
            self.rotate(attention.split(attention.k_proj(x)), positions),
            attention.split(attention.v_proj(x)),
        )
        out = layer.output(attended, residual)
        if self.config.norm_output:
            out = self.norm(out)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits over the reduced vocabulary, [..., H] -> [..., draft_vocab]."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        result: Tensor = self.lm_head(normed)
        return result


def save_head(head: Eagle3Head, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in the `speculators` format."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
        for name, t in head.state_dict().items()
    }
    save_file(tensors, directory / SAFETENSORS, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(head.config.to_dict(dtype), indent=2) + "\n")


def load_head(directory: Path, trunk_layers: int, meta: bool = False) -> Eagle3Head:
    """Read a head in the `speculators` format, or in that of EAGLE-3's authors.

    Args:
        directory: holds `config.json` and `model.safetensors` or `pytorch_model.bin`.
        trunk_layers: number of layers of the trunk it will stand beside.
        meta: build it on torch's meta device, from the names and shapes of its tensors alone.
    Raises:
        MtplxError: a file is missing or damaged, or a tensor is missing or left over.
    """
    path, weights = directory / "config.json", weights_file(directory)
    raw = _read_config(path)
    tensors = read_tensors(weights, meta)
    if eagle3_original.is_original(raw):
        tensors = eagle3_original.renamed(tensors, weights)
        raw = eagle3_original.translated(raw, tensors, path)
    config = Eagle3Config.from_dict(raw, str(path), trunk_layers)
    with torch.device("meta" if meta else "cpu"):
        head = Eagle3Head(config)
    own, t2d = tensors.pop("embed_tokens.weight", None), tensors.pop("t2d", None)
    whole = config.draft_vocab_size == config.layer.vocab_size
    if whole:  # no map is needed, and one that is there may never have been set
        tensors.setdefault("d2t", torch.zeros_like(head.d2t))
    tensors["t2d"] = head.t2d  # follows from d2t, below
    try:
        missing, unexpected = head.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise MtplxError(f"{weights}: does not fit its config.json: {detail}") from None
    if missing or unexpected:
        raise MtplxError(f"{weights}: tensors missing {missing}, left over {unexpected}")
    if own is not None:
        shape = [config.layer.vocab_size, config.layer.hidden_size]
        if list(own.shape) != shape or not own.is_floating_point():
            raise MtplxError(
                f"{weights}: does not fit its config.json: embed_tokens.weight is {own.dtype} "
                f"{list(own.shape)}, not numbers {shape}"
            )
        rows, width = shape
        head.embed_tokens = nn.Embedding(rows, width, device="meta")
        head.embed_tokens.weight = nn.Parameter(own)
    if not meta:
        _check_vocabulary(head, None if whole else t2d, weights)
        head.sort_vocabulary()
    head.eval().requires_grad_(False)
    return head


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MtplxError(f"{path.parent}: no config.json; expected a head directory") from None
    except (OSError, ValueError) as error:
        raise MtplxError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise MtplxError(f"{path}: cannot be read as JSON (not an object)")
    return raw


def _check_vocabulary(head: Eagle3Head, covered: Tensor | None, weights: Path) -> None:
    """Refuse a map that cannot be right; `covered` is the file's t2d, if it has one."""
    ids = head.draft_ids
    if bool((ids < 0).any()) or bool((ids >= len(head.t2d)).any()):
        raise MtplxError(f"{weights}: d2t points outside the vocabulary of {len(head.t2d)} tokens")
    # Two columns for one token would split its q, and what is emitted would not be exact.
    if len(set(ids.tolist())) < len(ids):
        raise MtplxError(f"{weights}: d2t names a token twice")
    marked = torch.zeros_like(head.t2d)
    marked[ids] = True
    if covered is not None and not torch.equal(covered.bool(), marked):
        raise MtplxError(
            f"{weights}: t2d does not mark the {len(ids)} tokens that d2t names; d2t should hold "
            "the distance from each draft id to its token"
        )
