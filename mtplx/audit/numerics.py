"""How much rounding alone moves a law: the same place read in passes of different width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mtplx.audit.law import Text, filters, short
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig, distribution_from_logits

TEXTS = 32
"""Texts of each prompt that are read twice."""


@dataclass(frozen=True)
class Rounding:
    """Disagreement of passes of 1 token a text and of `width`.

    Attributes:
        width: tokens of the wider pass.
        texts: read side by side, at most; a text alone may round differently again.
        places: looked at.
        flips: share of them where another token is the likeliest.
        distance: mean total variation between the two laws.
        largest: the largest one.
        outside: mean mass that the one law gives to tokens that have none in the other.
    """

    width: int
    texts: int
    places: int
    flips: float
    distance: float
    largest: float
    outside: float


def rounding(
    trunk: Trunk,
    sampling: SamplerConfig,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Text],
    width: int,
) -> Rounding:
    """Read some of these texts, all of one length, a token at a time and `width` at a time.

    Settings that look at histories move both laws alike and are left out.
    """
    flips, distances, outside, most = [], [], [], 0
    few = short(trunk, width, TEXTS)
    for index, prompt in enumerate(prompts):
        read = dict.fromkeys(text.tokens[:-1] for text in texts if text.prompt == index)
        rows = [[*prompt, *(int(t) for t in tokens)] for tokens in list(read)[:few]]
        most = max(most, len(rows))
        start = len(prompt) - 1
        for a, b in zip(
            _laws(trunk, sampling, rows, start, 1),
            _laws(trunk, sampling, rows, start, width),
            strict=True,
        ):
            flips.append(a.argmax(-1) != b.argmax(-1))
            distances.append(np.abs(a - b).sum(-1) / 2)
            outside.append(np.where(a == 0, b, 0).sum(-1))
    distance = np.concatenate(distances)
    return Rounding(
        width,
        most,
        len(distance),
        float(np.concatenate(flips).mean()),
        float(distance.mean()),
        float(distance.max()),
        float(np.concatenate(outside).mean()),
    )


@torch.inference_mode()
def _laws(
    trunk: Trunk, sampling: SamplerConfig, rows: list[list[int]], start: int, width: int
) -> Iterator[NDArray[np.float64]]:
    """Laws after every token from `start` on, a row's in passes of `width`; [N, V] for each row."""
    shaping = filters(sampling)
    tokens = torch.tensor(rows, device=trunk.device)
    cache = trunk.new_cache(tokens.shape[1])
    if start:
        # The prompt, which all share.
        span = Span.after([0], start, trunk.device)
        trunk.forward(tokens[:1, :start], span, cache, with_logits=False)
        cache.keep_rows(torch.zeros(len(rows), dtype=torch.int64, device=trunk.device))
    logits = []
    for at in range(start, tokens.shape[1], width):
        part = tokens[:, at : at + width]
        span = Span.after([at] * len(rows), part.shape[1], trunk.device)
        output = trunk.forward(part, span, cache)
        assert output.logits is not None
        logits.append(output.logits.float().cpu())
    return (distribution_from_logits(row.numpy(), shaping) for row in torch.cat(logits, 1))
