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
from typing import Any

import torch
from torch import Tensor

from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.pace import Draftsman, Pace, Trust
from mtplx.drafters.record import Record
from mtplx.engine.request import FinishReason, Request, Stats, TokenLogprobs, keeps_its_depth
from mtplx.errors import MtplxError
from mtplx.history import Follower, Histories
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk, TrunkOutput
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Noise, verify

PREFILL_TOKENS = 2048
"""Prompt tokens of a batch read in one pass."""


KEPT_SHARE = 0.85
"""A batch is packed when no more than this share of its slots still runs."""


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
    trust: Trust = field(default_factory=Trust)

    def depth(self) -> int:
        """Tokens worth drafting now: no more than the budget leaves beside the bonus."""
        # Nothing is committed before a first token that is the whole prompt: no hidden state.
        if self.length == 0 or self.finish_reason:
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
class Prefix:
    """What a text leaves in the caches, for a next one that begins with the same tokens.

    Attributes:
        tokens: that were read.
        cache: the trunk's, of one slot.
        drafter: the drafter's side, if there was one.
    """

    tokens: tuple[int, ...]
    cache: Any
    drafter: DraftSlots | None


@dataclass(frozen=True)
class Burst:
    """The tokens that one cycle emitted for one request.

    Attributes:
        index: of the request.
        tokens: 1 to K + 1 token ids.
        drafted: how many of them, from the first on, were drafted.
        finish_reason: why the request ended here, or None.
        stats: of the request so far.
        logprobs: of each token, if the request asked for them.
    """

    index: int
    tokens: list[int]
    drafted: int
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None


class Batch:
    """Requests decoded side by side until all are done."""

    def __init__(
        self,
        trunk: Trunk,
        drafter: Drafter | None,
        requests: Sequence[Request],
        pace: Pace | None = None,
        prefix: Prefix | None = None,
        record: Record | None = None,
    ) -> None:
        """
        Args:
            trunk: of the model.
            drafter: None where no request wants drafts.
            requests: at least one.
            pace: what is known of the model's pace, and goes on being learned; None to begin anew.
            prefix: of an earlier text; looked at where there is one request.
            record: of what drafts, in all texts, which gives up what is hopeless; None never does.
        """
        self.trunk = trunk
        self.pace = pace or Pace()
        self.record = record
        self.device = trunk.device
        self.slots = [self._slot(i, request) for i, request in enumerate(requests)]
        if drafter is None and any(r.depth for r in requests):
            raise MtplxError("this model has no head to draft with; use depth 0")
        # No slot drafts more than its budget leaves, but all are padded to the deepest.
        deepest = max(
            0 if self._given_up(slot.request) else min(slot.request.depth, slot.budget - 1)
            for slot in self.slots
        )
        longest = max(len(slot.request.prompt) + slot.budget for slot in self.slots)
        capacity = longest + deepest + 1
        self.cache = trunk.new_cache(capacity)
        # A prompt that several requests have is read once.
        self._prompts = list(dict.fromkeys(slot.request.prompt for slot in self.slots))
        self.drafter: DraftSlots | None = None
        if drafter and deepest:
            self.drafter = drafter.slots(self._prompts, capacity, self.cache)
        self.taps = self.drafter.taps if self.drafter else ()
        self.shaper = Shaper(
            [r.sampling for r in requests],
            trunk.vocab_size,
            self.device,
            [r.stop_ids for r in requests],
        )
        self.histories = self._histories(requests)
        self._single = self.slots[0] if len(self.slots) == 1 else None
        self._read = self._take(prefix) if prefix and self._single else 0

    def _take(self, prefix: Prefix) -> int:
        """Begin with what the prompt and an earlier text have in common; returns how much it is."""
        assert self._single is not None
        prompt = self._single.request.prompt
        pairs = zip(prompt[:-1], prefix.tokens, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if common is None:
            common = min(len(prompt) - 1, len(prefix.tokens))
        if self.drafter:
            common = self.drafter.take(prefix.drafter, common)
        common = int(prefix.cache.reaches(common))
        if common < 1:
            return 0
        self.cache.take(prefix.cache, common)
        self._single.stats.cached_tokens = common
        return common

    def prefix(self) -> Prefix | None:
        """What a next text may begin with; None of several requests, or before the prompt is read.

        The batch is not to be run any further.
        """
        slot = self._single
        if slot is None or not slot.stats.cycles:
            return None
        if self.drafter:
            self.drafter.catch_up()
        tokens = (*slot.request.prompt, *slot.output)[: slot.length]
        return Prefix(tokens, self.cache, self.drafter)

    def _histories(self, requests: Sequence[Request]) -> Histories:
        followers = {
            row: Follower(request.grammar(), request.stop_ids, len(request.sampling.forced_tokens))
            for row, request in enumerate(requests)
            if request.grammar
        }
        history = None
        if followers or self.shaper.uses_history:
            history = self.shaper.begin([request.prompt for request in requests])
        return Histories(history, followers, self.trunk.vocab_size)

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
        prompts = self._prompts
        longest = max(slot.length for slot in self.slots)
        chunk = max(1, PREFILL_TOKENS // len(prompts))
        for start in range(self._read, longest, chunk):
            width = min(chunk, longest - start)
            # One token more than is read: a head joins each state with the token after it.
            ids = [prompt[start : start + width + 1] for prompt in prompts]
            last = [len(row) - 2 for row in ids]
            window = torch.tensor([[*row, *[0] * (width + 1 - len(row))] for row in ids])
            window = window.to(self.device)
            # What shorter prompts are filled up with is nobody's text.
            kept = [max(0, len(row) - 1) for row in ids]
            span = Span.after([start] * len(prompts), width, self.device, kept)
            output = self.trunk.forward(
                window[:, :-1], span, self.cache, self.taps, with_logits=False
            )
            if self.drafter:
                self.drafter.refill(output, window[:, 1:], span, last)
        if self.drafter:
            self.drafter.catch_up()
        if len(prompts) < len(self.slots):
            row_of = {prompt: row for row, prompt in enumerate(prompts)}
            rows = [row_of[slot.request.prompt] for slot in self.slots]
            index = torch.tensor(rows, device=self.device)
            self.cache.keep_rows(index)
            if self.drafter:
                self.drafter.keep_rows(index)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - started
        for slot in self.slots:
            slot.stats.prefill_seconds = elapsed

    def run(self) -> Iterator[list[Burst]]:
        """Prefill, then a list of bursts a cycle, one for each request still running."""
        self.prefill()
        while self.slots:
            yield self.cycle()
            self._drop_finished()

    @torch.inference_mode()
    def cycle(self) -> list[Burst]:
        """Draft, verify, commit; one step for all slots."""
        started = time.perf_counter()
        slots = self.slots
        # What is said of the last cycle may stop this one, which has not begun.
        if self.record:
            self.record.tell()
        depths = [0 if self._given_up(slot.request) else slot.depth() for slot in slots]
        draftsman = self._draftsman(depths)
        depth = max(depths) if draftsman is None or draftsman.goes_on(0) else 0
        if depth and self.drafter:
            self.drafter.catch_up()
        # What was postponed in cycles without a draft is no part of what one takes.
        paced = time.perf_counter()
        lengths = [slot.length for slot in slots]
        noise = Noise(
            [slot.request.seed for slot in slots],
            lengths,
            [slot.request.verifier for slot in slots],
            depth,
            self.device,
            [slot.request.adaptive for slot in slots],
        )
        pending = torch.tensor([[slot.pending] for slot in slots], device=self.device)

        if depth and self.drafter:
            draft = self.drafter.draft(
                depth, lengths, noise, self.shaper, self.histories, draftsman
            )
        else:
            draft = Draft.empty(len(slots), self.device)
        depth = draft.tokens.shape[1]
        drafted = draft.lengths or [depth] * len(slots)
        depths = [min(own, count) for own, count in zip(depths, drafted, strict=True)]

        span = Span.after(lengths, depth + 1, self.device)
        output = self.trunk.forward(
            torch.cat([pending, draft.tokens], 1), span, self.cache, self.taps
        )
        p = self._target(output, draft)
        verdict = verify(p, draft, torch.tensor(depths, device=self.device), noise)
        # The token after each that was read; past the last one decided it may be anything.
        following = torch.cat([draft.tokens, draft.tokens.new_zeros(len(slots), 1)], 1)
        following.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])

        # Here the host waits for the device.
        accepted = verdict.accepted.tolist()
        tokens = following.tolist()
        probability = verdict.probability.tolist()
        void = None if p.void is None else p.void.tolist()
        logprobs = self._logprobs(output, following)
        if self.drafter and depth:
            self.drafter.refill(output, following, span, accepted)
        elif self.drafter:
            self.drafter.postpone(output, following, span)

        # Only the cycle's own time: what a stream's reader does between cycles is not decoding.
        ended = time.perf_counter()
        elapsed = ended - started
        emitted: list[list[int]] = [[] for _ in slots]
        for b, slot in enumerate(slots):
            if slot.finish_reason:
                continue
            # What is only drafted may come to where the settings leave nothing. The text may not:
            # it goes up to there, and no further in the next cycle.
            decided = accepted[b] + 1
            if void and True in void[b][:decided]:
                decided = void[b].index(True)
            if not decided:
                raise MtplxError(self._nothing_left(b))
            emitted[b] = slot.take(tokens[b][:decided])
        self.histories.emit(emitted)
        if self.drafter:
            self.drafter.emit(emitted)
        bursts = []
        for b, (slot, new) in enumerate(zip(slots, emitted, strict=True)):
            if not new:
                continue
            if self.histories.at_end(b):
                slot.finish_reason = "stop"
            # All but the correction or bonus, unless the text ends before that.
            kept = min(accepted[b], len(new))
            slot.length += len(new)
            slot.pending = new[-1]
            if depths[b] and self.record:
                self.record.count(kept > 0)
            slot.stats.record(depths[b], kept, len(new), probability[b], elapsed)
            stats = slot.stats.snapshot()
            own = logprobs[b][: len(new)] if b in logprobs else None
            bursts.append(Burst(slot.index, new, kept, slot.finish_reason, stats, own))
            if draftsman:
                draftsman.learn(b, min(len(new), depths[b]), probability[b])
        if draftsman:
            self.pace.took(len(slots), depth, ended - paced, sum(map(len, emitted)))
        return bursts

    def _given_up(self, request: Request) -> bool:
        """Whether it is not to be drafted for any more, because nothing comes of it."""
        if self.record is None or not self.record.given_up:
            return False
        kept = keeps_its_depth(request.sampling, request.verifier, self.trunk.deterministic)
        return request.adaptive or not kept

    def _draftsman(self, depths: Sequence[int]) -> Draftsman | None:
        """Who decides how far this cycle's draft goes; None where all depths are fixed."""
        trusts = [slot.trust if slot.request.adaptive else None for slot in self.slots]
        if self.drafter is None or not any(trusts):
            return None
        return Draftsman(self.pace, trusts, depths, self.drafter.foreseen(depths))

    def _nothing_left(self, row: int) -> str:
        """What to say where a request's settings forbid all that could come next."""
        slot = self.slots[row]
        why = slot.request.forbidding()
        follower = self.histories.followers.get(row)
        fault = follower.constraint.fault if follower else None
        return (
            f"request {slot.index}: {' and '.join(why)} {'leave' if why[1:] else 'leaves'} "
            f"no token to go on with after {len(slot.output)} of the output"
            f"{f' ({fault})' if fault else ''}"
        )

    def _target(self, output: TrunkOutput, draft: Draft) -> Distributions:
        """What the trunk and the settings make of every position, [B, K + 1, C]."""
        batch, depth = draft.tokens.shape
        assert output.logits is not None
        history = self.histories.along(draft.tokens)
        return self.shaper(output.logits.flatten(0, 1), history).view(batch, depth + 1)

    def _logprobs(self, output: TrunkOutput, following: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Of the token after each that was read, for the rows that ask for it."""
        counts = {b: slot.request.logprobs for b, slot in enumerate(self.slots)}
        asked = {b: count for b, count in counts.items() if count is not None}
        if not asked:
            return {}
        assert output.logits is not None
        rows = torch.tensor(list(asked), device=self.device)
        logprobs = output.logits[rows].float().log_softmax(-1)
        chosen = logprobs.gather(-1, following[rows, :, None])[..., 0].tolist()
        best = logprobs.topk(min(max(asked.values()), logprobs.shape[-1]), dim=-1)
        ids, values, tokens = best.indices.tolist(), best.values.tolist(), following[rows].tolist()
        return {
            b: [
                TokenLogprobs(token, own, tuple(zip(top[:count], of_top[:count], strict=True)))
                for token, own, top, of_top in zip(
                    tokens[row], chosen[row], ids[row], values[row], strict=True
                )
            ]
            for row, (b, count) in enumerate(asked.items())
        }

    def _drop_finished(self) -> None:
        keep = [b for b, slot in enumerate(self.slots) if slot.finish_reason is None]
        # Dropping copies the caches, so finished slots idle along until some have gathered.
        if keep and len(keep) > KEPT_SHARE * len(self.slots):
            return
        self.slots = [self.slots[b] for b in keep]
        if not keep:
            return
        rows = torch.tensor(keep, device=self.device)
        self.cache.keep_rows(rows)
        self.shaper = self.shaper.keep_rows(keep)
        if self.drafter:
            self.drafter.keep_rows(rows)
        self.histories.keep_rows(keep)
