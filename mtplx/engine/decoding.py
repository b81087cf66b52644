"""The engine's loop: one step drafts, verifies and commits for every slot of a batch.

The same cycle as `mtplx.speculative.speculative_decode`, on a model. Depth 0 is plain
autoregressive decoding through the same code.

A slot's sequence is its committed tokens, whose keys and values the trunk's cache holds, and one
pending token, emitted but not yet read. A cycle drafts behind the pending token, reads it and the
draft in one pass, and emits what is kept and one token more, which becomes pending.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mtplx.drafters.mtp import Head, HeadSlots
from mtplx.engine.request import FinishReason, Request, Stats
from mtplx.errors import MtplxError
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk, TrunkOutput
from mtplx.randomness import Purpose, uniforms
from mtplx.shaping import History, Shaper, wide
from mtplx.verification import Draft, Verdict, verify

PREFILL_TOKENS = 2048
"""Prompt tokens of a batch read in one pass."""


@dataclass
class Slot:
    """One request's place in the batch."""

    index: int
    request: Request
    budget: int
    pending: int
    length: int
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    def depth(self) -> int:
        """Tokens worth drafting now: no more than the budget leaves beside the bonus."""
        # Nothing is committed before a first token that is the whole prompt: no hidden state.
        if self.length == 0:
            return 0
        return min(self.request.depth, self.budget - len(self.output) - 1)

    def take(self, tokens: list[int]) -> list[int]:
        """Emit a cycle's tokens up to whatever ends the text; returns those emitted."""
        for i, token in enumerate(tokens):
            self.output.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.output) >= self.budget:
                self.finish_reason = "length"
            if self.finish_reason:
                return tokens[: i + 1]
        return tokens


@dataclass(frozen=True)
class Burst:
    """The tokens that one cycle emitted for one request.

    Attributes:
        index: of the request.
        tokens: 1 to K + 1 token ids.
        drafted: how many of them, from the first on, were drafted.
        finish_reason: why the request ended here, or None.
        stats: of the request so far.
    """

    index: int
    tokens: list[int]
    drafted: int
    finish_reason: FinishReason | None
    stats: Stats


class Batch:
    """Requests decoded side by side until all are done."""

    def __init__(self, trunk: Trunk, head: Head | None, requests: Sequence[Request]) -> None:
        self.trunk = trunk
        self.device = trunk.device
        self.slots = [self._slot(i, request) for i, request in enumerate(requests)]
        if head is None and any(r.depth for r in requests):
            raise MtplxError("this model has no head to draft with; use depth 0")
        deepest = max(r.depth for r in requests)
        # The last cycle of a slot may write a whole draft past its last token.
        capacity = max(len(r.prompt) + s.budget for r, s in zip(requests, self.slots, strict=True))
        capacity += deepest + 1
        self.cache = trunk.new_cache(capacity)
        self.head = HeadSlots(head, len(requests), capacity) if head and deepest else None
        trunk.tap(head.taps if head and deepest else ())
        self.shaper = Shaper([r.sampling for r in requests], trunk.vocab_size, self.device)
        self.history: History | None = None
        if self.shaper.uses_history:
            prompts = [r.prompt for r in requests]
            self.history = History.of(prompts, trunk.vocab_size, self.device)

    def _slot(self, index: int, request: Request) -> Slot:
        room = self.trunk.context - len(request.prompt)
        if not request.prompt:
            raise MtplxError("the prompt has no tokens; give at least one")
        if room < 1:
            raise MtplxError(
                f"the prompt has {len(request.prompt)} tokens; the model's context of "
                f"{self.trunk.context} leaves no room to answer"
            )
        wrong = [t for t in request.prompt if not 0 <= t < self.trunk.vocab_size]
        if wrong:
            raise MtplxError(
                f"the prompt holds token id {wrong[0]}; the model has {self.trunk.vocab_size}"
            )
        budget = min(request.max_tokens, room)
        return Slot(index, request, budget, request.prompt[-1], len(request.prompt) - 1)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read all of every prompt but its last token, which is left pending."""
        started = time.perf_counter()
        prompts = [slot.request.prompt for slot in self.slots]
        longest = max(slot.length for slot in self.slots)
        chunk = max(1, PREFILL_TOKENS // len(prompts))
        for start in range(0, longest, chunk):
            width = min(chunk, longest - start)
            # One token more than is read: the head joins each state with the token after it.
            window = torch.zeros(len(prompts), width + 1, dtype=torch.int64)
            last = []
            for row, prompt in zip(window, prompts, strict=True):
                ids = prompt[start : start + width + 1]
                row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
                last.append(len(ids) - 2)
            window = window.to(self.device)
            span = Span.after([start] * len(prompts), width, self.device)
            output = self.trunk.forward(window[:, :-1], span, self.cache, with_logits=False)
            if self.head:
                self.head.refill(output, window[:, 1:], span, last)
        for slot in self.slots:
            slot.stats.prefill_seconds = time.perf_counter() - started

    def run(self) -> Iterator[list[Burst]]:
        """Prefill, then a list of bursts a cycle, one for each request still running."""
        self.prefill()
        started = time.perf_counter()
        while self.slots:
            bursts = self.cycle()
            for slot in self.slots:
                slot.stats.decode_seconds = time.perf_counter() - started
            yield bursts
            self._drop_finished()

    @torch.inference_mode()
    def cycle(self) -> list[Burst]:
        """Draft, verify, commit; one step for all slots."""
        slots = self.slots
        depths = [slot.depth() for slot in slots]
        depth = max(depths)
        lengths = [slot.length for slot in slots]
        seeds = [slot.request.seed for slot in slots]
        pending = torch.tensor([[slot.pending] for slot in slots], device=self.device)

        if depth and self.head:
            draft = self.head.draft(depth, lengths, seeds, self.shaper, self.history)
        else:
            draft = _empty_draft(len(slots), self.trunk.vocab_size, self.device)

        span = Span.after(lengths, depth + 1, self.device)
        output = self.trunk.forward(torch.cat([pending, draft.tokens], 1), span, self.cache)
        verdict = self._verify(output, draft, depths, lengths, seeds)

        # The one point of the cycle where the host waits for the device.
        accepted = verdict.accepted.tolist()
        tokens = torch.cat([draft.tokens, verdict.token[:, None]], 1).tolist()
        probability = verdict.probability.tolist()
        if self.head:
            following = torch.cat([draft.tokens, draft.tokens.new_zeros(len(slots), 1)], 1)
            following.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
            self.head.refill(output, following, span, accepted)

        bursts = []
        for b, slot in enumerate(slots):
            kept = accepted[b]
            emitted = slot.take([*tokens[b][:kept], tokens[b][-1]])
            slot.length += len(emitted)
            slot.pending = emitted[-1]
            _record(slot.stats, depths[b], kept, len(emitted), probability[b])
            bursts.append(
                Burst(
                    slot.index, emitted, min(kept, len(emitted)), slot.finish_reason, slot.stats
                )
            )
        if self.history:
            self.history.emit([burst.tokens for burst in bursts])
        return bursts

    def _verify(
        self,
        output: TrunkOutput,
        draft: Draft,
        depths: list[int],
        lengths: list[int],
        seeds: list[int],
    ) -> Verdict:
        batch, depth = draft.tokens.shape
        assert output.logits is not None
        history = self.history.after(draft.tokens) if self.history else None
        p = self.shaper(output.logits.flatten(0, 1), history).view(batch, depth + 1, -1)
        seed = np.array(seeds, dtype=np.uint64)[:, None]
        # The token that the trunk chooses after reading position n takes position n + 1.
        at = np.array(lengths, dtype=np.uint64)[:, None] + np.arange(1, depth + 2, dtype=np.uint64)

        def noise(positions: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], use: Purpose) -> Tensor:
            u = torch.from_numpy(uniforms(seed, positions, use))
            return u.to(self.device, wide(self.device))

        return verify(
            p,
            draft,
            torch.tensor(depths, device=self.device),
            noise(at[:, :-1], Purpose.ACCEPT),
            noise(at, Purpose.EMIT),
        )

    def _drop_finished(self) -> None:
        keep = [b for b, slot in enumerate(self.slots) if slot.finish_reason is None]
        if len(keep) == len(self.slots):
            return
        self.slots = [self.slots[b] for b in keep]
        if not keep:
            return
        rows = torch.tensor(keep, device=self.device)
        self.cache.keep_rows(rows)
        self.shaper = self.shaper.keep_rows(keep)
        if self.head:
            self.head.keep_rows(rows)
        if self.history:
            self.history.keep_rows(rows)


def _empty_draft(batch: int, vocab_size: int, device: torch.device) -> Draft:
    nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    return Draft(nothing, nothing, torch.zeros(batch, 0, vocab_size, device=device), None)


def _record(
    stats: Stats, depth: int, kept: int, emitted: int, probability: list[float]
) -> None:
    stats.cycles += 1
    stats.tokens += emitted
    for position in range(depth):
        if position == len(stats.drafted_by_position):
            stats.drafted_by_position.append(0)
            stats.accepted_by_position.append(0)
        stats.drafted_by_position[position] += 1
        stats.accepted_by_position[position] += position < min(kept, emitted)
    decided = min(kept + 1, depth)
    stats.decided += decided
    stats.acceptance_sum += sum(probability[:decided])
