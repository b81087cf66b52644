"""Where a checkpoint's own MTP layers lie in its files, told from tensor names and config alone.

In the layout of DeepSeek, GLM and MiMo they are numbered on behind the trunk's last layer; in that
of Qwen3-Next they have a module of their own, `mtp`. GGUF files have the first layout, with `blk`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Anchored, so that the layers of a vision tower are not taken for more of the trunk's.
_LAYER = re.compile(r"^(?:(?:model|language_model)\.)*layers\.(\d+)\.|^blk\.(\d+)\.")
_MODULE = re.compile(r"(?:^|\.)mtp\w*\.(?:\w+\.)?(?:(\d+)\.)?")

# What config.json calls its number of MTP layers: DeepSeek, GLM and MiMo; Qwen3-Next and later.
_PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def mtp_layers(names: Iterable[str], trunk_layers: int | None) -> dict[int, list[str]]:
    """The tensors of each MTP layer among a checkpoint's, by the layer's number in its names.

    Args:
        names: of all tensors.
        trunk_layers: how many layers the trunk has; None where that is not known, and no numbered
            layer is then taken for an MTP layer.
    """
    layers: dict[int, list[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            number = int(match[1] or match[2])
            if trunk_layers is None or number < trunk_layers:
                continue
        elif match := _MODULE.search(name):
            number = int(match[1] or 0)
        else:
            continue
        layers.setdefault(number, []).append(name)
    return layers


def promised_layers(config: Mapping[str, Any]) -> int:
    """How many MTP layers a config.json promises; what it leaves out counts as none."""
    # A model of text and images keeps its language model's numbers in a config of their own.
    text = {**config, **(config.get("text_config") or {})}
    return next((int(text[key]) for key in _PROMISES if text.get(key)), 0)
