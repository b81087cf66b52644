"""The sampler's settings applied to logits in torch, a row each.

The batched counterpart of `mtplx.sampling.distribution_from_logits`, held to it by tests. Rows
may have different settings; a setting that no row uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtplx import kernels
from mtplx.errors import MtplxError
from mtplx.history import History, indices
from mtplx.kernels import Kernels
from mtplx.sampling import SamplerConfig, check_token_settings

TOP_P_CANDIDATES = 1024
"""How many of the likeliest tokens top-p looks at before it sorts a whole row."""


def wide(device: torch.device) -> torch.dtype:
    """The type for sums over a vocabulary: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Distributions:
    """Distributions over a vocabulary, on the tokens that filters left or on all.

    Attributes:
        p: float32 [..., C], rows sum to 1.
        ids: token of each column, ascending: [C] if all rows share them, [..., C] if not, None
            where the column is the token. Rows with fewer tokens than others end in columns of
            probability 0 whose id is no token's.
        void: rows of which the settings forbid all tokens, [...] bool; None if they cannot. Their
            p is what it would be without settings that forbid: a draft may come from it, since
            its tokens are rejected, but nothing may be emitted.
    """

    p: Tensor
    ids: Tensor | None
    void: Tensor | None = None

    def __getitem__(self, where: Any) -> Distributions:
        """Some of the rows, by any index of the leading dimensions."""
        own = self.ids is not None and self.ids.ndim > 1
        ids = self.ids[where] if own and self.ids is not None else self.ids
        void = None if self.void is None else self.void[where]
        return Distributions(self.p[where], ids, void)

    def view(self, *shape: int) -> Distributions:
        """The same rows under other leading dimensions."""
        ids = self.ids
        if ids is not None and ids.ndim > 1:
            ids = ids.view(*shape, -1)
        void = None if self.void is None else self.void.view(*shape)
        return Distributions(self.p.view(*shape, -1), ids, void)

    def tokens(self, columns: Tensor) -> Tensor:
        """Tokens of one column of each row, [...] -> [...]."""
        if self.ids is None:
            return columns
        if self.ids.ndim == 1:
            return self.ids[columns]
        return self.ids.gather(-1, columns[..., None])[..., 0]

    def at(self, tokens: Tensor) -> Tensor:
        """Probabilities of some tokens of each row, [..., N] -> [..., N]; 0 for no token's id."""
        width = self.p.shape[-1]
        if self.ids is None:
            return self.p.gather(-1, tokens.clamp_max(width - 1)) * (tokens < width)
        if self.ids.ndim > 1 and tokens.shape[-1] == 1:
            return (self.p * (self.ids == tokens)).sum(-1, keepdim=True)
        column = torch.searchsorted(self.ids.contiguous(), tokens.contiguous())
        column = column.clamp_max(width - 1)
        id_there = self.ids[column] if self.ids.ndim == 1 else self.ids.gather(-1, column)
        return self.p.gather(-1, column) * (id_there == tokens)

    def minus(self, other: Distributions, weight: Tensor) -> Tensor:
        """max(weight * p - other's, 0) at these columns; weight [...], result [..., C]."""
        mine = self.p * weight[..., None]
        if self.ids is not None:
            ids = self.ids.expand(self.p.shape) if self.ids.ndim == 1 else self.ids
            return (mine - other.at(ids)).clamp_min(0)
        if other.ids is not None:
            width = mine.shape[-1]
            ids = other.ids.expand(other.p.shape).clamp_max(width - 1)
            return mine.scatter_add(-1, ids, -other.p.to(mine.dtype)).clamp_min(0)
        return (mine - other.p).clamp_min(0)

    def dense(self, vocab_size: int) -> Tensor:
        """Probabilities of all tokens, [..., V]."""
        if self.ids is None:
            return self.p
        everywhere = self.p.new_zeros(*self.p.shape[:-1], vocab_size + 1)
        ids = self.ids.expand(self.p.shape).clamp_max(vocab_size)
        return everywhere.scatter_(-1, ids, self.p)[..., :vocab_size]

    @classmethod
    def stack(cls, rows: Sequence[Distributions], vocab_size: int) -> Distributions:
        """[B, C] each -> [B, N, C], the narrower ones widened. Which are void is left out."""
        shared = rows[0].ids
        own = shared is not None and shared.ndim > 1
        if not own and all(row.ids is shared for row in rows):
            return cls(torch.stack([row.p for row in rows], 1), shared)
        widest = max(row.p.shape[-1] for row in rows)
        p = [_padded(row.p, widest, 0.0) for row in rows]
        ids = [_padded(row._every_id(), widest, vocab_size) for row in rows]
        return cls(torch.stack(p, 1), torch.stack(ids, 1))

    @classmethod
    def certain(cls, tokens: Tensor) -> Distributions:
        """All mass on these tokens, [...] -> [..., 1]."""
        return cls(torch.ones(*tokens.shape, 1, device=tokens.device), tokens[..., None])

    def where(self, rows: Tensor, other: Distributions, vocab_size: int) -> Distributions:
        """These rows [B] bool of [B, N, C], and the other's for the rest. Not which are void."""
        chosen = rows[:, None, None]
        if self.ids is None or other.ids is None:
            return Distributions(
                torch.where(chosen, self.dense(vocab_size), other.dense(vocab_size)), None
            )
        widest = max(self.p.shape[-1], other.p.shape[-1])
        mine, theirs = (
            (_padded(each.p, widest, 0.0), _padded(each._every_id(), widest, vocab_size))
            for each in (self, other)
        )
        p, ids = (torch.where(chosen, a, b) for a, b in zip(mine, theirs, strict=True))
        return Distributions(p, ids)

    def _every_id(self) -> Tensor:
        """The token of every column of every row, [..., C]."""
        ids = self.ids
        if ids is None:
            ids = torch.arange(self.p.shape[-1], device=self.p.device)
        return ids.expand(self.p.shape)


def _padded(rows: Tensor, width: int, value: float) -> Tensor:
    missing = width - rows.shape[-1]
    return F.pad(rows, (0, missing), value=value) if missing else rows


class Shaper:
    """Settings of B requests as tensors, ready to shape their logits."""

    def __init__(
        self,
        configs: Sequence[SamplerConfig],
        vocab_size: int,
        device: torch.device,
        stop_ids: Sequence[Collection[int]] = (),
    ) -> None:
        """
        Args:
            configs: of B requests.
            vocab_size: V.
            device: of the logits.
            stop_ids: the tokens that end each request's text, as far as they are in the
                vocabulary; where none are given, none do.
        """
        self.configs = list(configs)
        self.stop_ids = [
            sorted(token for token in ids if 0 <= token < vocab_size)
            for ids in (stop_ids or [()] * len(self.configs))
        ]
        self.vocab_size = vocab_size
        self.device = device
        self.kernels = kernels.find() if device.type == "cpu" else None
        for config in self.configs:
            _check_range(config, vocab_size)

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        # A temperature beyond float32 is as good as its nearest number; 0 is another matter, and
        # told by `greedy` alone.
        coolest, hottest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        # Greedy rows are replaced in the end; a temperature of 1 keeps them finite until then.
        self.temperature = column(
            [min(max(c.temperature or 1.0, coolest), hottest) for c in self.configs]
        )
        # What top-p takes away, nothing below 0. As wide as the law's, so that ties on the edge of
        # the nucleus fall the same way.
        self.surplus = column(
            [1 - c.top_p if c.top_p < 1 else -1.0 for c in self.configs], wide(device)
        )
        self.min_p = column([c.min_p for c in self.configs], wide(device))
        self.typical_p = column([c.typical_p for c in self.configs], wide(device))
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
        self.any_typical = any(c.typical_p < 1 for c in self.configs)
        self.all_narrow = all(c.top_k > 0 or c.temperature == 0 for c in self.configs)
        self.max_top_k = min(max(c.top_k for c in self.configs), vocab_size)
        self.uses_penalties = any(
            c.repetition_penalty != 1 or c.presence_penalty or c.frequency_penalty
            for c in self.configs
        )
        sizes = [min(c.no_repeat_ngram, LONGEST_TEXT) for c in self.configs]
        self.ngram = torch.tensor(sizes, device=device)[:, None]
        self.ngrams = sorted(set(sizes) - {0})
        self.bias, self.bans = self._bias()
        self.early_stops = self._early_stops()
        self.forced = self._forced()
        # How many of the largest the kernels look for; none where the first of them is all.
        self.wanted = self.top_k.masked_fill(self.greedy, 0)
        self._settings: dict[int, list[Tensor]] = {}
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._ids: Tensor | None = None
        self._id_of = torch.empty(0, dtype=torch.int64)

    @property
    def uses_history(self) -> bool:
        """Whether a setting looks back at the text."""
        return (
            self.uses_penalties
            or bool(self.ngrams)
            or self.early_stops is not None
            or self.forced is not None
        )

    def _repeated(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Greedy, temperature, top-k and surplus of `count` rows for each request, [B * N, 1]."""
        if count not in self._rows:
            columns = (self.greedy, self.temperature, self.top_k, self.surplus)
            greedy, temperature, top_k, surplus = (c.repeat_interleave(count, 0) for c in columns)
            self._rows[count] = greedy, temperature, top_k, surplus
        return self._rows[count]

    def begin(self, prompts: Sequence[Sequence[int]]) -> History:
        """Histories of these prompts, with what the settings look at."""
        text = bool(self.ngrams)
        return History.of(prompts, self.vocab_size, self.device, self.uses_penalties, text)

    def _bias(self) -> tuple[Tensor | None, bool]:
        """What is always added, [B, V], and whether it forbids any token."""
        biases = []
        for config, stops in zip(self.configs, self.stop_ids, strict=True):
            never = [*config.banned_tokens, *(stops if config.suppress_stop else ())]
            biases.append(config.bias | dict.fromkeys(never, -torch.inf))
        values = [value for bias in biases for value in bias.values()]
        if not values:
            return None, False
        added = torch.zeros(len(biases), self.vocab_size, device=self.device)
        at = indices([list(bias) for bias in biases], self.device)
        added[at] = torch.tensor(values, device=self.device)
        return added, -torch.inf in values

    def _early_stops(self) -> tuple[Tensor, Tensor] | None:
        """How many tokens come before a stop, [B, 1], and the stops, [B, V] bool."""
        if not any(c.min_tokens for c in self.configs):
            return None
        counts = [min(c.min_tokens, LONGEST_TEXT) for c in self.configs]
        least = torch.tensor(counts, device=self.device)
        stops = torch.zeros(len(self.configs), self.vocab_size, dtype=torch.bool)
        stops[indices(self.stop_ids, stops.device)] = True
        return least[:, None], stops.to(self.device)

    def _forced(self) -> Tensor | None:
        """The output's first tokens, [B, N + 1] int64, -1 where any may come."""
        longest = max(len(c.forced_tokens) for c in self.configs)
        if not longest:
            return None
        rows = [[*c.forced_tokens, *[-1] * (longest + 1)][: longest + 1] for c in self.configs]
        return torch.tensor(rows, device=self.device)

    def keep_rows(self, rows: Sequence[int]) -> Shaper:
        """For these requests only."""
        return Shaper(
            [self.configs[r] for r in rows],
            self.vocab_size,
            self.device,
            [self.stop_ids[r] for r in rows],
        )

    def __call__(
        self, logits: Tensor, history: History | None, ids: Tensor | None = None
    ) -> Distributions:
        """Distributions of B * N rows, N consecutive ones for each request.

        On few tokens where the settings of all rows leave few, else on all.

        Args:
            logits: [B * N, W] of any float type.
            history: of B * N rows; needed where a setting looks back.
            ids: target token ids of the W columns, ascending [W]; None for the whole vocabulary.
        Raises:
            MtplxError: logits have a NaN or a +inf, or nothing but -inf; names row and position.
        """
        raw = logits.float()
        repeat = len(raw) // len(self.configs)

        def rows(column: Tensor) -> Tensor:
            return column if repeat == 1 else column.repeat_interleave(repeat, 0)

        scores = self._biased_and_penalised(raw, history, ids, rows)
        scores, forbids = self._without_forbidden(scores, history, ids, rows)
        void: Tensor | None = None
        if forbids:
            void = scores.amax(-1) == -torch.inf
            scores = torch.where(void[:, None], raw, scores)
        if self.kernels and self.all_narrow and not self.any_typical:
            return self._distributions(*self._shaped(scores, repeat, self.kernels), ids, void)
        top = scores.amax(-1, keepdim=True)
        _check(top, repeat)

        greedy, temperature, top_k, surplus = self._repeated(repeat)
        best = _lowest_of(scores, top, self.kernels) if self.any_greedy else None
        columns: Tensor | None = None
        if self.all_greedy and best is not None:
            p, columns = torch.ones_like(top), best
        else:
            if self.all_narrow:
                scores, columns = _largest(scores, top_k, self.max_top_k, self.kernels)
            elif self.max_top_k:
                scores = _top_k(scores, top_k, self.max_top_k)
            scaled = (scores - top) / temperature
            if self.any_top_p:
                scaled, left = _top_p(scores, scaled, surplus)
                if left is not None:
                    columns = left if columns is None else columns.gather(-1, left)
            # Summed in the wide type: in float32 the last digit would tell how many columns the
            # neighbours' settings left.
            p = scaled.to(wide(self.device)).softmax(-1)
            if self.any_min_p:
                likely = torch.where(p >= rows(self.min_p) * p.amax(-1, keepdim=True), p, 0.0)
                # Rows without min-p keep their p, whatever their neighbours ask for.
                p = torch.where(rows(self.min_p) > 0, likely / likely.sum(-1, keepdim=True), p)
            if self.any_typical:
                typical = torch.where(_typical(p, rows(self.typical_p)), p, 0.0)
                share = typical / typical.sum(-1, keepdim=True)
                p = torch.where(rows(self.typical_p) < 1, share, p)
            p = p.float()
            if best is not None:
                p, columns = _greedy_rows(p, columns, greedy, best, logits.shape[-1])
        return self._distributions(p, columns, ids, void)

    def _shaped(self, scores: Tensor, repeat: int, library: Kernels) -> tuple[Tensor, Tensor]:
        """Probabilities [R, C] and columns, by the kernels: for settings that leave few tokens."""
        if repeat not in self._settings:
            settings = (self.wanted, self.temperature, self.surplus, self.min_p)
            self._settings[repeat] = [s.repeat_interleave(repeat, 0) for s in settings]
        scores = scores.contiguous()
        rows, width = scores.shape
        top, room = scores.new_empty(rows), max(1, min(self.max_top_k, width))
        while True:
            p, columns = scores.new_empty(rows, room), self.wanted.new_empty(rows, room)
            parts = (scores, *self._settings[repeat], top, p, columns)
            pointers = [part.data_ptr() for part in parts]
            widest = library.shape(*pointers, rows, width, room, torch.get_num_threads())
            if widest < 0:
                raise MemoryError(f"no memory to sort {rows} rows of {room} scores")
            # Half-precision logits tie often, and all that tie with the last have to be here.
            if widest <= room:
                break
            room = widest
        _check(top[:, None], repeat)
        return p, columns

    def _distributions(
        self, p: Tensor, columns: Tensor | None, ids: Tensor | None, void: Tensor | None
    ) -> Distributions:
        """With the tokens of the columns [R, C], of logits that stand for `ids` or for all."""
        if columns is None:
            return Distributions(p, ids, void)
        if ids is not None:
            if ids is not self._ids:
                # Those of a head never change. The column behind them is that of no token.
                self._ids, self._id_of = ids, F.pad(ids, (0, 1), value=self.vocab_size)
            columns = self._id_of.take(columns)
        return Distributions(p, columns, void)

    def _biased_and_penalised(
        self,
        scores: Tensor,
        history: History | None,
        ids: Tensor | None,
        rows: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if self.bias is not None:
            scores = scores + rows(self.bias if ids is None else self.bias[:, ids])
        if self.uses_penalties:
            assert history is not None, "penalties need a history"
            assert history.prompt is not None and history.output is not None
            prompt = history.prompt if ids is None else history.prompt[:, ids]
            output = history.output if ids is None else history.output[:, ids]
            factor = rows(self.repetition)
            penalised = torch.where(scores < 0, scores * factor, scores / factor)
            scores = torch.where(prompt | (output > 0), penalised, scores)
            scores = scores - rows(self.frequency) * output - rows(self.presence) * (output > 0)
        return scores

    def _without_forbidden(
        self,
        scores: Tensor,
        history: History | None,
        ids: Tensor | None,
        rows: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, bool]:
        """Scores [R, W] with -inf for what may not come, and whether any setting can say so."""

        def here(mask: Tensor) -> Tensor:
            return mask if ids is None else mask[:, ids]

        masks = []
        if history is not None and history.allowed is not None:
            masks.append(~here(history.allowed))
        if self.early_stops is not None:
            assert history is not None, "min_tokens needs a history"
            least, stops = self.early_stops
            masks.append((history.emitted[:, None] < rows(least)) & rows(here(stops)))
        if self.ngrams:
            assert history is not None and history.text is not None, "n-grams need a history"
            for size in self.ngrams:
                repeating = _repeating(history.text, history.end, size, self.vocab_size)
                masks.append((rows(self.ngram) == size) & here(repeating))
        for mask in masks:
            scores = scores.masked_fill(mask, -torch.inf)
        if self.forced is not None:
            assert history is not None, "forced tokens need a history"
            position = history.emitted.clamp_max(self.forced.shape[1] - 1)
            token = rows(self.forced).gather(1, position[:, None])
            columns = torch.arange(self.vocab_size, device=self.device) if ids is None else ids
            alone = torch.where(columns == token, 0.0, -torch.inf)
            scores = torch.where(token >= 0, alone, scores)
        return scores, self.bans or bool(masks) or self.forced is not None


LONGEST_TEXT = 2**62
"""No text has so many tokens, and int64 holds it: counts beyond it are as good as it."""

LARGEST_SETTING = 1e4
"""Beyond it, what float32 leaves of the logits beside a bias or a penalty is no longer exact."""


def _check_range(config: SamplerConfig, vocab_size: int) -> None:
    try:
        check_token_settings(config, vocab_size)
    except ValueError as error:
        raise MtplxError(str(error)) from None
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(config, name)
        # Logits are divided by the first; next to nothing of the others is next to nothing.
        tiny = name == "repetition_penalty" and value < 1 / LARGEST_SETTING
        if abs(value) > LARGEST_SETTING or tiny:
            raise MtplxError(f"{name} {value} is beyond what can be computed with here")
    for token, bias in config.bias.items():
        if abs(bias) > LARGEST_SETTING and bias != -torch.inf:
            raise MtplxError(
                f"logit_bias {bias} of token {token} is beyond what can be computed with here"
            )


def _check(top: Tensor, repeat: int) -> None:
    # The largest logit of a row tells: NaN and +inf come through the maximum, and it is -inf
    # only where all are.
    values = top.flatten().tolist()
    row = next((i for i, value in enumerate(values) if not isfinite(value)), None)
    if row is not None:
        value = values[row]
        what = "nothing but -inf" if value == -torch.inf else str(value)
        raise MtplxError(
            f"logits: row {row // repeat} has {what} at position {row % repeat} of the cycle; no "
            "distribution can be made of it"
        )


def _lowest_of(scores: Tensor, top: Tensor, library: Kernels | None) -> Tensor:
    """The lowest column [R, 1] of scores [R, W] that reach the top [R, 1], on every device."""
    if library is not None:
        return _largest(scores, torch.ones(top.shape, dtype=torch.int64), 1, library)[1][:, :1]
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == top, ids, scores.shape[-1]).amin(-1, keepdim=True)


def _greedy_rows(
    p: Tensor, columns: Tensor | None, greedy: Tensor, best: Tensor, width: int
) -> tuple[Tensor, Tensor | None]:
    """Put all mass of the greedy rows on their best column; [R, C] and columns [R, C] or None.

    Args:
        p: [R, C].
        columns: those of p, ascending [R, C]; None for all, C = W.
        greedy: which rows are, [R, 1] bool.
        best: their columns, [R, 1].
        width: W, and the column of what is no token's.
    """
    if columns is None:
        here = torch.arange(width, device=p.device)
        return torch.where(greedy, (here == best).float(), p), None
    # The best column need not be among those left to its neighbours' filters.
    alone = F.pad(torch.ones_like(p[:, :1]), (0, p.shape[-1] - 1))
    only = F.pad(best, (0, p.shape[-1] - 1), value=width)
    return torch.where(greedy, alone, p), torch.where(greedy, only, columns)


def _largest(
    scores: Tensor, k: Tensor, most: int, library: Kernels | None
) -> tuple[Tensor, Tensor]:
    """Each row's k largest scores with all that tie, [R, C], and their columns, ascending.

    What follows then works on some dozens of numbers instead of a vocabulary. Rows with fewer
    than others have -inf beside them, at any column or at W.

    Args:
        scores: [R, W] float32, without NaN.
        k: [R, 1]; 0 counts as 1.
        most: the largest of them.
        library: to search with; None for torch.
    """
    width = scores.shape[-1]
    if library is None:
        best, columns = _candidates(scores, min(most, width))
        cut = best.topk(min(most, width), dim=-1).values.gather(-1, k.clamp(1, width) - 1)
        return torch.where(best < cut, -torch.inf, best), columns
    scores, k = scores.contiguous(), k.contiguous()
    room = min(most, width)
    while True:
        best = scores.new_empty(len(scores), room)
        columns = k.new_empty(best.shape)
        widest = library.largest(
            scores.data_ptr(),
            k.data_ptr(),
            best.data_ptr(),
            columns.data_ptr(),
            len(scores),
            width,
            room,
            torch.get_num_threads(),
        )
        # Half-precision logits tie often, and all that tie with the k-th have to be here.
        if widest <= room:
            return best, columns
        room = widest


def _candidates(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row, what ties with them, and some others; as `_largest`."""
    width = scores.shape[-1]
    count = 2 * k + 32
    while True:
        count = min(count, width)
        best, columns = scores.topk(count, dim=-1)
        least = best[:, -1]
        if count == width or not bool(((least == best[:, k - 1]) & least.isfinite()).any()):
            break
        count *= 8
    columns, order = columns.sort(-1)
    return best.gather(-1, order), columns


def _top_k(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    """Scores [R, C] with -inf for all but each row's k [R, 1] largest; 0 keeps all."""
    largest = min(largest, scores.shape[-1])
    best = scores.topk(largest, dim=-1).values
    cut = best.gather(-1, k.clamp(1, largest) - 1)
    # The threshold itself stays, with all that tie with it.
    return torch.where((scores < cut) & (k > 0), -torch.inf, scores)


def _top_p(scores: Tensor, scaled: Tensor, surplus: Tensor) -> tuple[Tensor, Tensor | None]:
    """Remove, from the least likely up, what fits into the surplus.

    Looks at the likeliest tokens first, which nearly always decide; the whole row is sorted only
    where the cut lies, or may lie, beyond them.

    Args:
        scores: [R, W]; they tell which tokens come first, for divided by a temperature some tie.
        scaled: their distance from the largest, 0 or below, divided by the temperature, [R, W].
        surplus: probability to be removed, [R, 1]; rows of less than 0 stay as they are.
    Returns:
        The scaled scores [R, C] with -inf for what is removed, and their columns, ascending
        [R, C], if only a part is given back.
    """
    width = scores.shape[-1]
    count = min(width, TOP_P_CANDIDATES)
    weights = scaled.exp()
    total = weights.sum(-1, keepdim=True, dtype=surplus.dtype)
    while True:
        best, ids = _ascending(scores, count)
        p = weights.gather(-1, ids) / total
        mass = p.cumsum(-1)
        if count < width:
            # What lies below the candidates is the rest of the mass.
            mass = mass + (1 - p.sum(-1, keepdim=True)).clamp_min(0)
        keep = mass > surplus
        keep.select(-1, -1).fill_(True)
        if count == width:
            break
        # Decided: the least candidate is gone, and none of what stays ties with it, or it has no
        # probability left to give.
        floor = best[:, :1]
        decided = (~keep[:, 0] & ~(keep & (best == floor)).any(-1)) | (floor[:, 0] == -torch.inf)
        if bool((decided | (surplus[:, 0] < 0)).all()):
            break
        count = width
    kept = torch.where(keep, scaled.gather(-1, ids), -torch.inf)
    if count < width and bool((surplus >= 0).all()):
        ids, order = ids.sort(-1)
        return kept.gather(-1, order), ids
    if count == width:
        return torch.empty_like(scaled).scatter_(-1, ids, kept), None
    everywhere = torch.full_like(scaled, -torch.inf).scatter_(-1, ids, kept)
    return torch.where(surplus < 0, scaled, everywhere), None


def _ascending(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their columns, by score and then by column."""
    if count == scores.shape[-1]:
        return scores.sort(dim=-1, stable=True)
    ids = scores.topk(count, dim=-1).indices.sort(-1).values
    best, order = scores.gather(-1, ids).sort(dim=-1, stable=True)
    return best, ids.gather(-1, order)


def _typical(p: Tensor, typical_p: Tensor) -> Tensor:
    """Which tokens of p [R, C] are nearest to the entropy, as many as reach typical_p [R, 1]."""
    p = p.to(typical_p.dtype)
    distance = (-p.log() - torch.special.entr(p).sum(-1, keepdim=True)).abs()
    nearest = distance.argsort(dim=-1)
    mass = p.gather(-1, nearest).cumsum(-1)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp_max(p.shape[-1] - 1)
    kept: Tensor = distance <= distance.gather(-1, nearest.gather(-1, last))
    return kept


def _repeating(text: Tensor, end: Tensor, size: int, vocab_size: int) -> Tensor:
    """Tokens that would make the last `size` tokens of a text ones that it has already.

    Args:
        text: token ids, [R, N] int64, -1 before a row's first.
        end: columns of each row that count, [R] int64.
        size: tokens in a sequence.
    Returns:
        [R, V] bool.
    """
    count = text.shape[1] - size + 1
    if count < 1:
        return torch.zeros(len(text), vocab_size, dtype=torch.bool, device=text.device)
    same = torch.arange(size - 1, text.shape[1], device=text.device) < end[:, None]
    for i in range(size - 1):
        # Of a row shorter than the sequence no column counts, whatever is gathered.
        last = text.gather(1, (end - size + 1 + i).clamp_min(0)[:, None])
        same = same & (text[:, i : i + count] == last)
    # What does not count goes to a column that is no token's.
    token = torch.where(same, text[:, size - 1 :], -1)
    token = torch.where((token >= 0) & (token < vocab_size), token, vocab_size)
    found = torch.zeros(len(text), vocab_size + 1, dtype=torch.bool, device=text.device)
    found.scatter_(1, token, True)
    return found[:, :vocab_size]
