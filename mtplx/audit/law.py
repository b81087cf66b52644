"""The exact law of every token of many short texts, from the trunk's logits.

Of a law over a whole vocabulary only that is kept which the tests ask for; there are thousands
of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig, distribution_from_logits

Token = int | str
"""An id, or the text that an endpoint gives for one."""

Prefix = tuple[Token, ...]

ROWS = 64
"""Texts read in one pass of the trunk, at most."""

LOGITS = 2**25
"""That a pass has at most, unless one text has more."""


class Spot(NamedTuple):
    """Where a drawn token lies in its law.

    Attributes:
        p: its probability.
        above: of all likelier tokens together; among equals lower ids count as likelier.
        before: of all tokens with lower ids together.
        highest: probability of the likeliest token.
        surprise: -log p beyond its mean over the law, which is the entropy, in nats.
        variance: of the surprise, and
        skew: its third moment, over the law.
    """

    p: float
    above: float
    before: float
    highest: float
    surprise: float
    variance: float
    skew: float

    @property
    def likeliest(self) -> bool:
        """Whether it is the likeliest token itself."""
        return self.above == 0 and self.p > 0


@dataclass
class Text:
    """One continuation.

    Attributes:
        prompt: index of what it continues.
        tokens: drawn, in order.
        stages: of each token, what of its cycle was settled before it was drawn; or None.
        spots: of each token, once its law is known.
    """

    prompt: int
    tokens: Prefix
    stages: tuple[str | None, ...]
    spots: list[Spot] = field(default_factory=list)


Likely = Mapping[Token, float]
Laws = dict[Prefix, Likely]
"""After each prefix of one prompt, the tokens likely enough to be counted one by one."""


class TrunkLaws:
    """Laws after the prefixes of one prompt's continuations."""

    def __init__(
        self, trunk: Trunk, sampling: SamplerConfig, prompt: Sequence[int], least: float
    ) -> None:
        """
        Args:
            trunk: whose laws they are.
            sampling: what shapes its logits.
            prompt: token ids.
            least: probability from which on a token is kept by name.
        """
        self.trunk, self.sampling, self.prompt, self.least = trunk, sampling, prompt, least
        self.likely: Laws = {}

    def read(self, texts: Sequence[Text], progress: Callable[[int], None] = lambda _: None) -> None:
        """Give all texts, of one length, their spots. `progress` is told of texts read.

        Texts that are alike, or differ in their last tokens only, are read once.
        """
        drawn: dict[Prefix, set[Token]] = {}
        for text in texts:
            for i, token in enumerate(text.tokens):
                drawn.setdefault(text.tokens[:i], set()).add(token)
        spots: dict[tuple[Prefix, Token], Spot] = {}
        alike = Counter(text.tokens[:-1] for text in texts)
        done = 0
        for prefix, p in self._laws(list(alike)):
            self._keep(prefix, p)
            of_law = moments(p)
            for token in drawn[prefix]:
                spots[prefix, token] = spot(p, int(token), of_law)
            if prefix in alike:
                done += alike[prefix]
                progress(done)
        for text in texts:
            text.spots = [spots[text.tokens[:i], token] for i, token in enumerate(text.tokens)]

    def after(self, prefixes: Iterable[Prefix]) -> Laws:
        """Likely tokens after these prefixes, all of one length, and maybe others."""
        missing = [prefix for prefix in prefixes if prefix not in self.likely]
        for prefix, p in self._laws(missing):
            self._keep(prefix, p)
        return self.likely

    def _keep(self, prefix: Prefix, p: NDArray[np.float64]) -> None:
        ids = (p >= self.least).nonzero()[0]
        self.likely[prefix] = dict(zip(ids.tolist(), p[ids].tolist(), strict=True))

    def _laws(self, texts: Sequence[Prefix]) -> Iterator[tuple[Prefix, NDArray[np.float64]]]:
        """The law after every prefix of these texts, all of one length, each once."""
        seen: set[Prefix] = set()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for rows in self._portions(texts):
                logits = self._logits(rows)
                wanted: list[tuple[Prefix, torch.Tensor]] = []
                for row, text in enumerate(rows):
                    for i in range(len(text) + 1):
                        if text[:i] not in seen:
                            seen.add(text[:i])
                            wanted.append((text[:i], logits[row, i]))
                # NumPy lets go of the interpreter in its loops, so threads do share the work.
                yield from pool.map(self._law, wanted)

    def _portions(self, texts: Sequence[Prefix]) -> Iterator[Sequence[Prefix]]:
        if texts:
            width = len(texts[0]) + 1
            rows = max(
                1, min(short(self.trunk, width, ROWS), LOGITS // width // self.trunk.vocab_size)
            )
            for start in range(0, len(texts), rows):
                yield texts[start : start + rows]

    @torch.inference_mode()
    def _logits(self, texts: Sequence[Prefix]) -> torch.Tensor:
        """Logits after 0 to N tokens of each text, [R, N + 1, V]."""
        device, rows, read = self.trunk.device, len(texts), len(self.prompt) - 1
        cache = self.trunk.new_cache(read + len(texts[0]) + 1)
        if read:
            shared = torch.tensor([list(self.prompt[:-1])], device=device)
            self.trunk.forward(shared, Span.after([0], read, device), cache, with_logits=False)
            cache.keep_rows(torch.zeros(rows, dtype=torch.int64, device=device))
        own = torch.tensor([[self.prompt[-1], *text] for text in texts], device=device)
        span = Span.after([read] * rows, own.shape[1], device)
        logits = self.trunk.forward(own, span, cache).logits
        assert logits is not None
        return logits.float().cpu()

    def _law(self, wanted: tuple[Prefix, torch.Tensor]) -> tuple[Prefix, NDArray[np.float64]]:
        prefix, logits = wanted
        row = logits.numpy()
        # Looking at histories costs a copy of the row.
        if self.sampling == filters(self.sampling):
            return prefix, distribution_from_logits(row, self.sampling)
        output = [int(token) for token in prefix]
        return prefix, distribution_from_logits(
            row, self.sampling, prompt_ids=self.prompt, output_ids=output
        )


def short(trunk: Trunk, width: int, rows: int) -> int:
    """How many of these rows a pass over `width` positions of each can have and not be long.

    Where long passes are computed in another way, what an audit looks at is all of one kind: that
    of a single text.
    """
    return rows if trunk.long is None else max(1, min(rows, (trunk.long - 1) // width))


def filters(sampling: SamplerConfig) -> SamplerConfig:
    """Those of the settings that look at one law and nothing else; and the seed."""
    return SamplerConfig(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
    )


def moments(p: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean, variance and third central moment of -log p under a law itself."""
    p = p[p > 0]
    information = -np.log(p)
    entropy = float(p @ information)
    off = information - entropy
    weighted = p * off * off
    return entropy, float(weighted.sum()), float(weighted @ off)


def spot(
    p: NDArray[np.float64], token: int, of_law: tuple[float, float, float] | None = None
) -> Spot:
    """A token's place in a law over ids; `of_law` are its moments, if known."""
    mine, lower = p[token], p[:token]
    above = p[p > mine].sum() + lower[lower == mine].sum()
    entropy, variance, skew = of_law or moments(p)
    surprise = -float(np.log(mine)) - entropy if mine else np.inf
    return Spot(
        float(mine), float(above), float(lower.sum()), float(p.max()), surprise, variance, skew
    )
