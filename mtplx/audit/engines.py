"""Who draws the texts: this engine, or transformers' `generate`; `endpoint` has a third.

All give continuations of fixed prompts, of one length each, that do not end at an end-of-text
token: a text that may end early is short just where it drew one token, which would bias the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from mtplx import __version__
from mtplx.audit.faults import planted
from mtplx.audit.law import Laws, Text, filters, short
from mtplx.drafters.mtp import Head
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.llm import LLM
from mtplx.sampling import SamplerConfig, Verifier

SLOTS = 128
"""Texts drawn side by side."""

Mode = Literal["plain", "mtp", "prompt-lookup", "assistant"]


class Engine(Protocol):
    """What an audit needs of one.

    Attributes:
        name: for the report.
        speculates: whether there is anything to compare with plain decoding.
        laws: of each prompt's prefixes, where the engine brings them and the spots of its texts
            itself; else None.
        tokens_per_cycle: mean under speculation so far, where the engine tells.
    """

    name: str
    speculates: bool
    laws: list[Laws] | None

    @property
    def tokens_per_cycle(self) -> float | None: ...

    def draw(
        self, prompt: int, count: int, length: int, seed: int, speculate: bool
    ) -> Iterator[list[Text]]:
        """`count` texts of `length` tokens each, in portions.

        Args:
            prompt: index of what is continued.
            count: texts wanted.
            length: tokens of each.
            seed: fixes the texts, where an engine can.
            speculate: or decode plainly.
        """
        ...

    def notes(self) -> list[str]:
        """What a reader should know of the texts drawn."""
        ...


def _seeds(seed: int, count: int) -> list[int]:
    """Unrelated seeds, so that neighbouring audits do not share texts."""
    return [int(s) for s in np.random.default_rng(seed).integers(2**63, size=count)]


@dataclass
class OwnEngine:
    """Batches of this engine's."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    sampling: SamplerConfig
    depth: int
    verifier: Verifier = "token"
    fault: str | None = None

    def __post_init__(self) -> None:
        self.name = f"mtplx {__version__}"
        self.speculates = self.depth > 0
        self.laws: list[Laws] | None = None
        self.cycles, self.tokens = 0, 0
        if (self.depth or self.fault) and self.llm.head is None:
            raise MtplxError(
                f"{self.llm.name} has no MTP head to draft with; use depth 0, and no fault"
            )
        if self.fault and not self.depth:
            raise MtplxError("a fault in the verifier shows only under speculation; give a depth")
        if self.fault and self.verifier != "token":
            raise MtplxError("the faults to plant are faults of the verifier `token`")

    def draw(
        self, prompt: int, count: int, length: int, seed: int, speculate: bool
    ) -> Iterator[list[Text]]:
        llm, seeds = self.llm, _seeds(seed, count)
        depth = self.depth if speculate else 0
        slots = short(llm.trunk, self.depth + 1, SLOTS)
        for start in range(0, count, slots):
            requests = [
                Request(
                    tuple(self.prompts[prompt]),
                    self.sampling,
                    s,
                    length,
                    depth,
                    verifier=self.verifier,
                )
                for s in seeds[start : start + slots]
            ]
            drafting: AbstractContextManager[Head | None] = nullcontext(llm.head if depth else None)
            if self.fault and depth and llm.head:
                drafting = planted(self.fault, llm.head, llm.trunk.vocab_size, self.sampling)
            with drafting as head:
                texts = self._decode(Batch(llm.trunk, head, requests), prompt)
            yield texts

    def _decode(self, batch: Batch, prompt: int) -> list[Text]:
        requests = [slot.request for slot in batch.slots]
        tokens: list[list[int]] = [[] for _ in requests]
        stages: list[list[str | None]] = [[] for _ in requests]
        for bursts in batch.run():
            for burst in bursts:
                request, so_far = requests[burst.index], tokens[burst.index]
                depth = min(request.depth, request.max_tokens - len(so_far) - 1)
                stages[burst.index] += [
                    stage(i, depth, request.verifier) for i in range(len(burst.tokens))
                ]
                so_far += burst.tokens
                if request.depth:
                    self.cycles += 1
                    self.tokens += len(burst.tokens)
        return [Text(prompt, tuple(t), tuple(s)) for t, s in zip(tokens, stages, strict=True)]

    @property
    def tokens_per_cycle(self) -> float | None:
        return self.tokens / self.cycles if self.cycles else None

    def notes(self) -> list[str]:
        return []


BONUS = "bonus"


def stage(kept: int, depth: int, verifier: Verifier) -> str | None:
    """What of a cycle is settled before its next token is drawn; None if nothing may be said.

    Draws may be told apart only by what does not depend on them. That so many drafts were kept
    before this token is settled before it by the rules that go position by position, and so is
    that it is the bonus. The block rule keeps a prefix because of what follows it; only a cycle's
    first token and its bonus can be told there. Whether a token is a draft or a correction depends
    on the token itself, always.

    Args:
        kept: tokens of the cycle before it.
        depth: tokens the cycle drafted.
        verifier: the rule.
    """
    if depth == 0:
        return None
    if kept == depth:
        return BONUS
    if kept and verifier == "block":
        return None
    return f"after {kept} kept"


@dataclass
class TransformersEngine:
    """`generate` of transformers, in one of its modes, on the same model."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    sampling: SamplerConfig
    depth: int
    mode: Mode = "plain"
    assistant: Any = None

    def __post_init__(self) -> None:
        from transformers import __version__

        self.name = f"transformers {__version__}, {self.mode}"
        self.speculates = self.mode != "plain"
        self.laws: list[Laws] | None = None
        if (self.mode == "assistant") != (self.assistant is not None):
            raise MtplxError("mode assistant, and no other, needs an assistant model: --assistant")
        known = replace(filters(self.sampling), repetition_penalty=self.sampling.repetition_penalty)
        if self.sampling != known:
            raise MtplxError(
                "transformers is audited with temperature, top-k, top-p, min-p, typical-p and "
                "repetition penalty; leave out the other settings"
            )

    def draw(
        self, prompt: int, count: int, length: int, seed: int, speculate: bool
    ) -> Iterator[list[Text]]:
        mode = self.mode if speculate else "plain"
        # Assisted generation takes one sequence at a time.
        rows = SLOTS if mode == "plain" else 1
        ids = torch.tensor([list(self.prompts[prompt])], device=self.llm.trunk.device)
        torch.manual_seed(seed)
        for start in range(0, count, rows):
            portion = min(rows, count - start)
            yield [
                Text(prompt, tuple(row[:length]), (None,) * length)
                for row in self._generate(ids, portion, length, mode)
            ]

    @property
    def tokens_per_cycle(self) -> float | None:
        return None

    def notes(self) -> list[str]:
        return []

    def _generate(self, ids: torch.Tensor, count: int, length: int, mode: Mode) -> list[list[int]]:
        from transformers import GenerationConfig

        s, depth = self.sampling, max(self.depth, 1)
        settings: dict[str, Any] = {
            "do_sample": s.temperature > 0,
            "max_new_tokens": length,
            "min_new_tokens": None,
            "repetition_penalty": s.repetition_penalty,
            "num_return_sequences": count,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        if s.temperature > 0:
            settings |= {
                "temperature": s.temperature,
                "top_k": s.top_k,
                "top_p": s.top_p,
                "min_p": s.min_p or None,
                "typical_p": s.typical_p,
            }
        more: dict[str, Any] = {}
        if mode == "mtp":
            settings["use_mtp"] = True
        elif mode == "prompt-lookup":
            settings["prompt_lookup_num_tokens"] = depth
        elif mode == "assistant":
            more["assistant_model"] = self.assistant
            config = self.assistant.generation_config
            config.num_assistant_tokens = depth
            config.num_assistant_tokens_schedule = "constant"
            # With its default threshold a draft ends behind an unlikely token.
            config.assistant_confidence_threshold = 0.0
        model = self.llm.trunk.model
        # What its own configuration sets beside ours would go into the law unseen.
        with _without_defaults(model):
            try:
                texts = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=GenerationConfig(**settings),
                    **more,
                )
            except (ValueError, AttributeError, OSError) as error:
                reason = " ".join(str(error).split())
                raise MtplxError(f"transformers cannot do this in mode {mode}: {reason}") from error
        return [list(row) for row in texts[:, ids.shape[1] :].tolist()]


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Have the model's generation configuration say nothing, for a while."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
