"""The sampler's settings applied to logits in torch, a row each.

The batched counterpart of `mtplx.sampling.distribution_from_logits`, held to it by tests. Rows
may have different settings; a setting that no row uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig

TOP_P_CANDIDATES = 1024
"""How many of the likeliest tokens top-p looks at before it sorts a whole row."""


def wide(device: torch.device) -> torch.dtype:
    """The type for sums over a vocabulary: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class History:
    """What the penalties count, for B sequences over a vocabulary of V.

    Attributes:
        prompt: whether the token is in the prompt, [B, V] bool.
        output: how often the token has been emitted, [B, V] float32.
    """

    prompt: Tensor
    output: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> History:
        """Histories that have only a prompt so far."""
        seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        seen[_indices(prompts, device)] = True
        return cls(seen, torch.zeros(seen.shape, device=device))

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count emitted tokens, a list for each sequence."""
        one = self.output.new_ones(())
        self.output.index_put_(_indices(tokens, self.output.device), one, accumulate=True)

    def after(self, draft: Tensor) -> History:
        """Histories at every position of a draft [B, K]: 0 to K drafted tokens counted.

        Returns:
            A history of B * (K + 1) rows, the positions of one sequence together.
        """
        steps = [self] + [self.after_tokens(draft[:, : i + 1]) for i in range(draft.shape[1])]
        counts = torch.stack([step.output for step in steps], 1)
        return History(self.prompt.repeat_interleave(len(steps), 0), counts.flatten(0, 1))

    def after_tokens(self, tokens: Tensor) -> History:
        """Histories with these tokens [B, N] counted too."""
        return History(
            self.prompt,
            self.output.scatter_add(1, tokens, torch.ones_like(tokens, dtype=torch.float32)),
        )

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        self.prompt, self.output = self.prompt[rows], self.output[rows]


def _indices(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every token in a list for each row."""
    rows = [row for row, ids in enumerate(tokens) for _ in ids]
    columns = [token for ids in tokens for token in ids]
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(columns, dtype=torch.int64, device=device),
    )


class Shaper:
    """Settings of B requests as tensors, ready to shape their logits."""

    def __init__(
        self, configs: Sequence[SamplerConfig], vocab_size: int, device: torch.device
    ) -> None:
        self.configs = list(configs)
        self.vocab_size = vocab_size
        self.device = device
        for config in self.configs:
            _check_range(config)

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        # A temperature beyond float32 is as good as its nearest number; 0 is another matter, and
        # told by `greedy` alone.
        coolest, hottest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        self.temperature = column([min(max(c.temperature, coolest), hottest) for c in self.configs])
        # As wide as the law's, so that ties on the edge of the nucleus fall the same way.
        self.top_p = column([c.top_p for c in self.configs], wide(device))
        self.min_p = column([c.min_p for c in self.configs])
        self.repetition = column([c.repetition_penalty for c in self.configs])
        self.presence = column([c.presence_penalty for c in self.configs])
        self.frequency = column([c.frequency_penalty for c in self.configs])
        self.top_k = torch.tensor([min(c.top_k, vocab_size) for c in self.configs], device=device)[
            :, None
        ]
        self.greedy = column([float(c.temperature == 0) for c in self.configs]) > 0
        # Settings that some row uses.
        self.any_greedy = any(c.temperature == 0 for c in self.configs)
        self.all_greedy = all(c.temperature == 0 for c in self.configs)
        self.any_top_p = any(c.top_p < 1 for c in self.configs)
        self.any_min_p = any(c.min_p > 0 for c in self.configs)
        self.all_narrow = all(c.top_k > 0 or c.temperature == 0 for c in self.configs)
        self.max_top_k = min(max(c.top_k for c in self.configs), vocab_size)
        self.uses_history = any(
            c.repetition_penalty != 1 or c.presence_penalty or c.frequency_penalty
            for c in self.configs
        )
        self.bias = self._bias()

    def _bias(self) -> Tensor | None:
        if not any(c.logit_bias for c in self.configs):
            return None
        biases = [c.bias for c in self.configs]
        largest = max(token for bias in biases for token in bias)
        if largest >= self.vocab_size:
            raise MtplxError(
                f"logit_bias names token {largest}; the model has {self.vocab_size} tokens"
            )
        values = [value for bias in biases for value in bias.values()]
        added = torch.zeros(len(biases), self.vocab_size, device=self.device)
        at = _indices([list(bias) for bias in biases], self.device)
        added[at] = torch.tensor(values, device=self.device)
        return added

    def keep_rows(self, rows: Sequence[int]) -> Shaper:
        """For these requests only."""
        return Shaper([self.configs[r] for r in rows], self.vocab_size, self.device)

    def __call__(
        self, logits: Tensor, history: History | None, ids: Tensor | None = None
    ) -> Tensor:
        """Probabilities of B * N rows, N consecutive ones for each request.

        Args:
            logits: [B * N, W] of any float type.
            history: of B * N rows; needed where a penalty is used.
            ids: target token ids of the W columns, [W]; None for the whole vocabulary.
        Returns:
            float32 [B * N, W]; rows sum to 1.
        Raises:
            MtplxError: a row has a NaN or a +inf, or nothing but -inf; names row and position.
        """
        scores = logits.float()
        repeat = len(scores) // len(self.configs)

        def rows(column: Tensor) -> Tensor:
            return column if repeat == 1 else column.repeat_interleave(repeat, 0)

        if self.bias is not None:
            bias = self.bias if ids is None else self.bias[:, ids]
            biased = scores + rows(bias)
            if ids is not None:
                # A reduced vocabulary may hold nothing that the bias allows. What is drafted
                # then is drawn from the unbiased row, and rejected.
                biased = torch.where((biased == -torch.inf).all(-1, keepdim=True), scores, biased)
            scores = biased
        if self.uses_history:
            assert history is not None, "penalties need a history"
            prompt = history.prompt if ids is None else history.prompt[:, ids]
            output = history.output if ids is None else history.output[:, ids]
            factor = rows(self.repetition)
            penalised = torch.where(scores < 0, scores * factor, scores / factor)
            scores = torch.where(prompt | (output > 0), penalised, scores)
            scores = scores - rows(self.frequency) * output - rows(self.presence) * (output > 0)
        top = scores.amax(-1, keepdim=True)
        _check(top, repeat)

        if self.all_greedy:
            return _one_hot(scores, top)
        unfiltered = scores
        greedy = rows(self.greedy)
        # Greedy rows are replaced at the end; a temperature of 1 keeps them finite until then.
        temperature = torch.where(greedy, 1.0, rows(self.temperature))
        columns = None
        if self.all_narrow:
            scores, columns = _narrow(scores, self.max_top_k)
        if self.max_top_k:
            scores = _top_k(scores, rows(self.top_k), self.max_top_k)
        if self.any_top_p:
            scores = _top_p(scores, top, temperature, rows(self.top_p))
        p = ((scores - top) / temperature).softmax(-1)
        if self.any_min_p:
            likely = torch.where(p >= rows(self.min_p) * p.amax(-1, keepdim=True), p, 0.0)
            # Rows without min-p keep their p, whatever their neighbours ask for.
            p = torch.where(rows(self.min_p) > 0, likely / likely.sum(-1, keepdim=True), p)
        if columns is not None:
            p = torch.zeros_like(unfiltered).scatter_(-1, columns, p)
        if self.any_greedy:
            p = torch.where(greedy, _one_hot(unfiltered, top), p)
        return p


LARGEST_SETTING = 1e4
"""Beyond it, what float32 leaves of the logits beside a bias or a penalty is no longer exact."""


def _check_range(config: SamplerConfig) -> None:
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(config, name)
        if abs(value) > LARGEST_SETTING or 0 < abs(value) < 1 / LARGEST_SETTING:
            raise MtplxError(f"{name} {value} is beyond what can be computed with here")
    for token, bias in config.bias.items():
        if abs(bias) > LARGEST_SETTING and bias != -torch.inf:
            raise MtplxError(
                f"logit_bias {bias} of token {token} is beyond what can be computed with here"
            )


def _check(top: Tensor, repeat: int) -> None:
    # The largest logit of a row tells: NaN and +inf come through the maximum, and it is -inf
    # only where all are.
    if not bool(top.isfinite().all()):
        row = int((~top.isfinite()).flatten().nonzero()[0])
        value = top.flatten()[row].item()
        what = "nothing but -inf" if value == -torch.inf else str(value)
        raise MtplxError(
            f"logits: row {row // repeat} has {what} at position {row % repeat} of the cycle; no "
            "distribution can be made of it"
        )


def _one_hot(scores: Tensor, top: Tensor) -> Tensor:
    # The lowest id among equals, on every device.
    ids = torch.arange(scores.shape[-1], device=scores.device)
    first = torch.where(scores == top, ids, scores.shape[-1]).amin(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, first, 1.0)


def _narrow(scores: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """The k largest scores of each row, those that tie with the k-th, and their columns, ascending.

    What follows then works on some dozens of numbers instead of a vocabulary. Half-precision
    logits tie often; where more tie than there is room for, all columns are given back, as None.
    """
    count = 2 * k + 32
    if count >= scores.shape[-1]:
        return scores, None
    best, columns = scores.topk(count, dim=-1)
    if bool(((best[:, -1] == best[:, k - 1]) & best[:, -1].isfinite()).any()):
        return scores, None
    columns, order = columns.sort(-1)
    return best.gather(-1, order), columns


def _top_k(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    largest = min(largest, scores.shape[-1])
    best = scores.topk(largest, dim=-1).values
    cut = best.gather(-1, k.clamp(1, largest) - 1)
    # The threshold itself stays, with all that tie with it.
    return torch.where((scores < cut) & (k > 0), -torch.inf, scores)


def _top_p(scores: Tensor, top: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Remove, from the least likely up, what fits into a mass of 1 - top_p.

    Looks at the likeliest tokens first, which nearly always decide; the whole row is sorted only
    where the cut lies, or may lie, beyond them.
    """
    width = scores.shape[-1]
    count = min(width, TOP_P_CANDIDATES)
    weights = ((scores - top) / temperature).exp()
    total = weights.sum(-1, keepdim=True, dtype=wide(scores.device))
    while True:
        best, ids = scores.topk(count, dim=-1)
        # Ascending by score and, among equals, by id.
        order = ids.argsort(dim=-1)
        best, ids = best.gather(-1, order), ids.gather(-1, order)
        order = best.argsort(dim=-1, stable=True)
        best, ids = best.gather(-1, order), ids.gather(-1, order)
        p = weights.gather(-1, ids).to(total.dtype) / total
        # What lies below the candidates is the rest of the mass.
        below = (1 - p.sum(-1, keepdim=True)).clamp_min(0) if count < width else 0.0
        keep = below + p.cumsum(-1) > 1 - top_p
        keep[:, -1] = True
        # Decided: the least candidate is gone, and none of what stays ties with it, or it has no
        # probability left to give.
        floor = best[:, :1]
        decided = (~keep[:, 0] & ~(keep & (best == floor)).any(-1)) | (floor[:, 0] == -torch.inf)
        if count == width or bool((decided | (top_p[:, 0] >= 1)).all()):
            break
        count = width
    kept = torch.full_like(scores, -torch.inf)
    kept.scatter_(-1, ids, torch.where(keep, best, -torch.inf))
    return torch.where(top_p < 1, kept, scores)
