"""Families of checkpoints with MTP layers: what their tensors are called and how they are wired.

All of them join the embedding of a token with a hidden state of the position before, each behind a
norm of its own, by one matrix; run a decoder layer of the trunk's kind over what comes out; and put
a last norm over that. They differ in names, in the kind of the decoder layer, and in the points
below. docs/adding-a-family.md says how one is added.

Where implementations differ in what is fed to a head, docs/models.md says which is followed here
and why. In some families vLLM and SGLang have zeros for the embedding in a text's first pair; here,
as in transformers, no pair is special.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mtplx.errors import MtplxError

Settings = Callable[[Any, int], Mapping[str, Any]]
"""(the trunk's config, how many decoder layers) -> what the config of the head's layers has
instead."""


@dataclass(frozen=True)
class Family:
    """How a family names and wires its MTP layers.

    Attributes:
        types: `model_type` of the trunk's config, as it was published.
        joint: what comes before the names of norms and matrices around the decoder layer, with
            `{}` for the layer's number, if that has one; `{part}` for the name, where the number
            comes behind it.
        block: what comes before the decoder layer's own names, likewise.
        parts: the name of each part behind `joint`, and what it is here: `embedding_norm`,
            `hidden_norm`, `join`, `norm`; `embedding` and `output` for copies of the trunk's;
            `unused` for what the family's authors leave lying in the files.
        renamed: names within the decoder layer that transformers has otherwise.
        settings: of the decoder layers.
        plain: from the trunk's last layer, attention and an MLP such as the decoder layers have
            where they are put together otherwise than the trunk's: each behind a norm, and added.
        behind_trunk: layers are numbered on behind the trunk's.
        in_one: the numbers are those of several decoder layers in one MTP layer.
        hidden_first: the matrix has the hidden state's columns before the embedding's.
        before_norm: the trunk's state is taken before its last norm.
        feeds_raw: what is fed to the next draft is taken before the layer's own last norm.
        chained: a layer is fed what the one before it computes; else all are fed the trunk's state.
    """

    types: tuple[str, ...]
    joint: str
    block: str
    parts: Mapping[str, str]
    settings: Settings
    plain: Callable[[Any], tuple[Any, Any]] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    behind_trunk: bool = False
    in_one: bool = False
    hidden_first: bool = False
    before_norm: bool = False
    feeds_raw: bool = False
    chained: bool = True

    def translate(self, name: str, trunk_layers: int) -> tuple[int, str] | None:
        """A published tensor's place: the number of its layer, and its name in `MtpLayers`.

        None for a tensor that is none of an MTP layer's.
        """
        # What a model of text and images puts before the names of its language model.
        name = name.replace("language_model.", "", 1)
        first = trunk_layers if self.behind_trunk else 0
        if match := self._joint.match(name):
            number = int(match["number"] or first) - first if "number" in match.groupdict() else 0
            layer = 0 if self.in_one else number
            return (layer, f"joints.{layer}.{self.parts[match['part']]}.{match['kind']}")
        if match := self._block.match(name):
            number = int(match["number"]) - first
            if number >= 0:
                rest = match["rest"]
                for theirs, ours in self.renamed.items():
                    rest = rest.replace(theirs, ours)
                return (0 if self.in_one else number), f"blocks.{number}.{rest}"
        return None

    def published(self, name: str, trunk_layers: int, blocks: int = 1) -> str:
        """The name that `translate` makes this one of, as far as it tells.

        Args:
            name: in `MtpLayers`.
            trunk_layers: how many the trunk has.
            blocks: how many decoder layers the MTP layers have.
        """
        kind, number, rest = name.split(".", 2)
        if self.in_one and rest.startswith("norm."):
            # What stands behind all of them is named after the last.
            number = str(blocks - 1)
        shown = str(int(number) + (trunk_layers if self.behind_trunk else 0))
        if kind == "blocks":
            for theirs, ours in self.renamed.items():
                rest = rest.replace(ours, theirs) if ours else theirs + rest
            return self.block.replace("{}", shown) + rest
        part, suffix = rest.split(".", 1)
        theirs = next(theirs for theirs, ours in self.parts.items() if ours == part)
        return f"{self._place.replace('{}', shown).replace('{part}', theirs)}.{suffix}"

    @property
    def has_norm(self) -> bool:
        """Whether there is a norm behind the decoder layer."""
        return "norm" in self.parts.values()

    @property
    def _place(self) -> str:
        return self.joint if "{part}" in self.joint else self.joint + "{part}"

    @cached_property
    def _joint(self) -> re.Pattern[str]:
        parts = "|".join(map(re.escape, self.parts))
        place = _numbered(self._place).replace(r"\{part\}", f"(?P<part>{parts})")
        return re.compile(rf"{place}\.(?P<kind>weight|bias)$")

    @cached_property
    def _block(self) -> re.Pattern[str]:
        return re.compile(rf"{_numbered(self.block)}(?P<rest>.+)$")


def _numbered(place: str) -> str:
    return re.escape(place).replace(r"\{\}", r"(?P<number>\d+)")


_DEEPSEEK_PARTS = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "shared_head.norm": "norm",
    "shared_head.head": "output",
    "embed_tokens": "embedding",
}
_QWEN_PARTS = {
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "join",
    "norm": "norm",
}
_FINAL_PARTS = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "final_layernorm": "norm",
}
_HUNYUAN_PARTS = {**_FINAL_PARTS, "shared_head": "unused", "embed_tokens": "unused"}

FAMILIES = (
    # DeepSeek-V3's report (arXiv 2412.19437, section 2.2), and the GLM-4.5 report after it.
    Family(
        types=("deepseek_v3", "glm4_moe"),
        joint="model.layers.{}.",
        block="model.layers.{}.",
        parts=_DEEPSEEK_PARTS,
        settings=lambda config, count: {"first_k_dense_replace": 0},
        behind_trunk=True,
    ),
    # The one layer of Qwen3-Next, Qwen3.5 and 3.6; `mtp` stands outside the language model.
    Family(
        types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        joint="mtp.",
        block="mtp.layers.{}.",
        parts=_QWEN_PARTS,
        settings=lambda config, count: {
            "layer_types": ["full_attention"] * count,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
    ),
    # MiMo-7B: a Qwen2 by another name. Its authors' class for transformers has these names and
    # joins them so, but does not say what is fed to them. vLLM's class, which is theirs too, feeds
    # the trunk's state before its last norm; SGLang's the state after it.
    Family(
        types=("mimo",),
        joint="model.mtp_layers.{}.",
        block="model.mtp_layers.{}.",
        parts={
            "token_layernorm": "embedding_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "join",
            "final_layernorm": "norm",
        },
        settings=lambda config, count: {"layer_types": ["full_attention"] * count},
        hidden_first=True,
        before_norm=True,
    ),
    # Ernie 4.5 MoE. Its layer is dense and has no norm behind it: what the decoder layer computes
    # goes to the output head as it is. It turns heads as the trunk does; in vLLM it pairs their
    # numbers otherwise, by Llama's class.
    Family(
        types=("ernie4_5_moe",),
        joint="model.{part}.{}",
        block="model.mtp_block.{}.",
        parts={
            "mtp_emb_norm": "embedding_norm",
            "mtp_hidden_norm": "hidden_norm",
            "mtp_linear_proj": "join",
        },
        settings=lambda config, count: {"moe_layer_start_index": count},
    ),
    # The three layers of MiMo-V2-Flash. Each is fed the trunk's state, as in SGLang, which has all
    # three draft; vLLM runs the first alone, over and over.
    Family(
        types=("mimo_v2_flash",),
        joint="model.mtp.layers.{}.",
        block="model.mtp.layers.{}.",
        parts=_FINAL_PARTS,
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        settings=lambda config, count: {
            "layer_types": ["sliding_attention"] * count,
            "mlp_layer_types": ["dense"] * count,
        },
        chained=False,
    ),
    # Nemotron 3: one layer of several blocks, each with one of the trunk's mixers.
    Family(
        types=("nemotron_h",),
        joint="mtp.layers.{}.",
        block="mtp.layers.{}.",
        parts=_FINAL_PARTS,
        settings=lambda config, count: {"layers_block_type": config.mtp_layers_block_type},
        in_one=True,
    ),
    # DeepSeek-V3's layout in its successors.
    Family(
        types=("glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
        joint="model.layers.{}.",
        block="model.layers.{}.",
        parts=_DEEPSEEK_PARTS,
        settings=lambda config, count: {"mlp_layer_types": ["sparse"] * count},
        behind_trunk=True,
    ),
    # K-EXAONE: a dense layer with rotary positions, which in the trunk only layers with a window
    # have. Where no kinds are named for them, they are those of the trunk's first layers.
    Family(
        types=("exaone_moe",),
        joint="mtp.",
        block="mtp.layers.{}.",
        parts=_QWEN_PARTS,
        settings=lambda config, count: {
            # With rotary positions; what a layer looks at is said by the other.
            "layer_types": ["sliding_attention"] * count,
            "mtp_layer_types": getattr(config, "mtp_layer_types", None)
            or config.layer_types[:count],
            "mlp_layer_types": ["dense"] * count,
        },
    ),
    # EXAONE 4.5: layers of the kinds of the trunk's first.
    Family(
        types=("exaone4", "exaone4_5_text"),
        joint="mtp.",
        block="mtp.layers.{}.",
        parts=_QWEN_PARTS,
        settings=lambda config, count: {},
    ),
    # Mellum 2.
    Family(
        types=("mellum",),
        joint="mtp.",
        block="mtp.layers.{}.",
        parts=_QWEN_PARTS,
        settings=lambda config, count: {
            "layer_types": config.mtp_layer_types or ["sliding_attention"] * count,
            "mlp_layer_types": config.mtp_mlp_layer_types or ["sparse"] * count,
        },
    ),
    # Hy3. Its authors draft with the trunk's output head, not with the one beside the layer.
    Family(
        types=("hy_v3",),
        joint="model.layers.{}.",
        block="model.layers.{}.",
        parts=_HUNYUAN_PARTS,
        settings=lambda config, count: {"mlp_layer_types": ["sparse"] * count},
        behind_trunk=True,
    ),
    # Hy4, whose trunk's layers keep several streams; the layer behind them has one.
    Family(
        types=("hy_v4",),
        joint="model.mtp_layers.{}.",
        block="model.mtp_layers.{}.",
        parts=_HUNYUAN_PARTS,
        settings=lambda config, count: {},
        plain=lambda layer: (layer.self_attn, layer.mlp),
    ),
    # LongCat-Flash, whose trunk's layers are two in one; the layer behind them is one half.
    Family(
        types=("longcat_flash",),
        joint="model.mtp.",
        block="model.mtp.layers.{}.",
        parts={
            "layers.0.enorm.m": "embedding_norm",
            "layers.0.hnorm.m": "hidden_norm",
            "layers.0.eh_proj": "join",
            "norm": "norm",
            "embed_tokens": "embedding",
        },
        settings=lambda config, count: {},
        plain=lambda layer: (layer.self_attn[0], layer.mlps[0]),
        renamed={"transformer_layer.mlp.": "mlp."},
    ),
    # Ling 3: attention to all positions behind a trunk that has some layers without.
    Family(
        types=("bailing_hybrid",),
        joint="model.layers.{}.",
        block="model.layers.{}.",
        parts=_FINAL_PARTS,
        settings=lambda config, count: {
            "layer_types": ["full_attention"] * count,
            "mlp_layer_types": ["sparse"] * count,
        },
        behind_trunk=True,
    ),
    # Step-3.7: three layers with output heads of their own, fed what stands before any last norm.
    Family(
        types=("step3p5",),
        joint="model.layers.{}.",
        block="model.layers.{}.",
        parts={
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "join",
            "transformer.shared_head.norm": "norm",
            "transformer.shared_head.output": "output",
            "shared_head.norm": "norm",
            "shared_head.output": "output",
        },
        renamed={"transformer.": ""},
        settings=lambda config, count: {
            "layer_types": config.mtp_layer_types,
            "mlp_layer_types": config.mtp_mlp_layer_types,
            "per_layer_config": {
                layer: {"num_attention_heads": config.num_sliding_attention_heads}
                for layer, kind in enumerate(config.mtp_layer_types)
                if kind == "sliding_attention"
            },
            # Of these transformers keeps the trunk's alone; published ones bound its last layers.
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        },
        behind_trunk=True,
        before_norm=True,
        feeds_raw=True,
    ),
    # MiniMax-M3: a sparse layer with experts, whatever those of the trunk are. vLLM feeds the next
    # draft what stands before the last norm; those who train and serve it otherwise, behind it.
    Family(
        types=("minimax_m3_vl_text",),
        joint="model.mtp.layers.{}.",
        block="model.mtp.layers.{}.transformer_layer.",
        parts=_FINAL_PARTS,
        settings=lambda config, count: {
            "layer_types": ["minimax_m3_sparse"] * count,
            "mlp_layer_types": ["sparse"] * count,
        },
    ),
)


def family_of(model_type: str) -> Family | None:
    """The family with this type of trunk, if its MTP layers are run."""
    # A config of text and images has another type than that of its text part.
    types = (model_type, f"{model_type}_text")
    return next((family for family in FAMILIES if set(types) & set(family.types)), None)


# What config.json calls its number of MTP layers.
_PROMISES = (
    "num_nextn_predict_layers",  # DeepSeek, GLM, MiMo and most others
    "mtp_num_hidden_layers",  # Qwen3.5 and later
    "num_mtp_modules",  # MiniMax
)


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of its language model."""
    # A model of text and images keeps its language model's settings in a config of their own.
    return {**config, **(config.get("text_config") or {})}


def promised_layers(config: Mapping[str, Any]) -> int:
    """How many MTP layers a config.json promises; what it leaves out counts as none.

    Raises:
        MtplxError: what it says is no number of layers.
    """
    text = text_settings(config)
    key = next((key for key in _PROMISES if text.get(key)), None)
    if key is None:
        return 0
    count = text[key]
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise MtplxError(
            f"config.json: {key} is {count!r}, which is no number of layers; take the config as it "
            "was published"
        )
    return count


# Anchored, so that the layers of a vision tower are not taken for more of the trunk's.
_LAYER = re.compile(r"^(?:(?:model|language_model)\.)*layers\.(\d+)\.|^blk\.(\d+)\.")
_MODULE = re.compile(r"(?:^|\.)mtp\w*\.(?:[^\W\d]\w*\.)?(?:(\d+)\.)?")


def mtp_layers(
    names: Iterable[str], trunk_layers: int | None, family: Family | None = None
) -> dict[int, list[str]]:
    """The tensors of each MTP layer among a checkpoint's, by the layer's number, from 0 on.

    Told from names alone: in the layout of DeepSeek and GLM, and in GGUF files, layers are numbered
    on behind the trunk's last; other families have a module with a name of its own.

    Args:
        names: of all tensors.
        trunk_layers: how many layers the trunk has; None where that is not known, and no numbered
            layer is then taken for an MTP layer.
        family: says which layer a tensor belongs to, where it is known.
    """
    layers: dict[int, list[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            number = int(match[1] or match[2])
            if trunk_layers is None or number < trunk_layers:
                continue
            number -= trunk_layers
        elif match := _MODULE.search(name):
            number = int(match[1] or 0)
        else:
            continue
        place = family.translate(name, trunk_layers or 0) if family else None
        layers.setdefault(place[0] if place else number, []).append(name)
    return dict(sorted(layers.items()))
