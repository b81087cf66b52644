"""Verifiers that are broken on purpose, to show what the audit sees.

Each is the token rule with one mistake that looks right; most have been shipped by somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from mtplx.drafters.mtp import Head, HeadSlots
from mtplx.engine import decoding
from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig
from mtplx.shaping import Distributions
from mtplx.verification import Draft, Noise, Verdict

FAULTS = {
    "raw-logits-as-q": "takes the softmax of the head's logits for what the draft was drawn from",
    "match-then-residual": "keeps a draft only if a sample of the target equals it",
    "residual-from-p": "draws the correction from the target, not from the residual",
    "bonus-from-q": "draws the token after a whole draft from the head, not from the target",
    "ignore-temperature": "verifies against the target at temperature 1",
    "shared-uniform": "drafts a token, decides about it and corrects it with one random number",
}


@contextmanager
def planted(fault: str, head: Head, vocab_size: int, sampling: SamplerConfig) -> Iterator[Head]:
    """Have the engine verify with this fault, as long as it drafts with the head given back.

    Raises:
        MtplxError: no such fault, or one that is none under these settings.
    """
    if fault not in FAULTS:
        raise MtplxError(f"no fault {fault!r} to plant; there are {', '.join(FAULTS)}")
    if sampling.temperature == 0:
        raise MtplxError("planted faults need a temperature above 0: greedy rules have none")
    filtered = sampling != replace(sampling, top_k=0, top_p=1, min_p=0, typical_p=1)
    if sampling.temperature == 1 and (
        fault == "ignore-temperature" or (fault == "raw-logits-as-q" and not filtered)
    ):
        raise MtplxError(f"{fault} is no fault at temperature 1; choose another temperature")
    recorder = _Recorder(head)
    faulty = _Faulty(fault, recorder, vocab_size, sampling.temperature)
    with patch.object(decoding, "verify", faulty):
        yield cast(Head, recorder)


class _Recorder:
    """A head that remembers the logits it drafted from."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.recorded: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> HeadSlots:
        return HeadSlots(cast(Head, self), capacity)

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        logits = self._head.logits(hidden, layer)
        self.recorded.append(logits)
        return logits


@dataclass
class _Faulty:
    """`mtplx.verification.verify`'s token rule on whole vocabularies, with one mistake."""

    fault: str
    head: _Recorder
    vocab_size: int
    temperature: float

    def __call__(self, p: Distributions, draft: Draft, depths: Tensor, noise: Noise) -> Verdict:
        batch, depth = draft.tokens.shape
        every = torch.arange(batch, device=depths.device)
        target, emit = p.dense(self.vocab_size), noise.emit
        if not depth:
            return Verdict(depths, _draw(target[:, 0], emit[:, 0]), target[:, 0, :0])
        assert noise.accept is not None and noise.draft is not None
        accept = noise.accept[:, :depth]
        if self.fault == "shared-uniform":
            accept = noise.draft[:, :depth]
            emit = torch.cat([accept, emit[:, depth:]], 1)
        q = draft.q.dense(self.vocab_size)
        if self.fault == "raw-logits-as-q":
            raw = torch.stack(self.head.recorded, 1).float().softmax(-1)
            q = Distributions(raw, self.head.draft_ids).dense(self.vocab_size)
        self.head.recorded.clear()
        if self.fault == "ignore-temperature":
            # What a temperature has done to probabilities, their power undoes.
            target = target.pow(self.temperature)
            target = target / target.sum(-1, keepdim=True)

        tokens = draft.tokens[..., None]
        p_token, q_token = (x[:, :depth].gather(2, tokens)[..., 0] for x in (target, q))
        probability = torch.where(p_token > 0, p_token / torch.maximum(p_token, q_token), 0.0)
        kept = accept < probability
        if self.fault == "match-then-residual":
            sample = _draw(target[:, :depth].flatten(0, 1), accept.flatten())
            kept, probability = sample.view(batch, depth) == draft.tokens, p_token
        kept &= torch.arange(depth, device=depths.device) < depths[:, None]
        accepted = kept.long().cumprod(1).sum(1)

        rejected = (accepted < depths)[:, None]
        bonus, at = target[every, accepted], accepted.clamp_max(depth - 1)
        correction = (bonus - q[every, at]).clamp_min(0)
        if self.fault == "residual-from-p":
            correction = bonus
        correction = torch.where(correction.sum(-1, keepdim=True) > 0, correction, bonus)
        if self.fault == "bonus-from-q":
            bonus = torch.where((depths > 0)[:, None], q[every, (depths - 1).clamp_min(0)], bonus)
        token = _draw(torch.where(rejected, correction, bonus), emit[every, accepted])
        return Verdict(accepted, token, probability)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1, dtype=uniforms.dtype)
    u = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, u, right=True)[:, 0]
