"""The public face: a loaded model that generates text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args, overload

import numpy as np
import torch

from mtplx import kernels
from mtplx.drafters.assistant import TYPES as ASSISTANTS
from mtplx.drafters.drafter import Drafter
from mtplx.drafters.find import DrafterName, FoundDrafter, assisted_by, draft_with, find_drafter
from mtplx.drafters.mtp import Head
from mtplx.drafters.pace import DEEPEST, Pace
from mtplx.drafters.record import Record
from mtplx.engine.decoding import Batch, Burst, Prefix
from mtplx.engine.request import (
    FinishReason,
    Request,
    Stats,
    TokenLogprobs,
    keeps_its_depth,
)
from mtplx.errors import MtplxError, MtplxWarning
from mtplx.grammar import GrammarCompiler, GrammarSpec
from mtplx.history import Constraint
from mtplx.kernels import Kernels
from mtplx.models.checkpoint import (
    QUANTIZE,
    Checkpoint,
    GenerationDefaults,
    Quantize,
    generation_defaults,
    load_config,
    load_model,
    load_outline,
    load_rounded,
    load_tokenizer,
    locate,
    locate_head,
)
from mtplx.models.deterministic import DeterministicTrunk
from mtplx.models.fused import FusedTrunk, misfit
from mtplx.models.rounding import Report, left_out
from mtplx.models.trunk import Trunk
from mtplx.randomness import fresh_seed
from mtplx.sampling import SamplerConfig, Verifier, check_token_settings
from mtplx.text.detokenizer import Detokenizer

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_TOKENS = 256
MOST_LOGPROBS = 1000
"""Alternatives reported with each token at most: more would be no report, but a vocabulary."""

Depth = int | Literal["auto"]
"""Tokens drafted per cycle, or `auto` for as many as pay."""

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text, chat messages, or token ids."""


@dataclass(frozen=True)
class Result:
    """A finished generation.

    Attributes:
        text: what the model wrote, special tokens left out.
        token_ids: all emitted tokens, a final end-of-text token included.
        finish_reason: `stop` at an end-of-text or stop token, `length` at the budget's or the
            context's end.
        sampling: the settings used, with the seed that was drawn if none was given.
        verifier: the rule used. With it and the seed the same text can be had again, by `coupled`
            at any depth, by the others at the same one with the same head: not with `auto`, whose
            depths depend on what passes took, nor a text in which the head was given up.
        stats: telemetry.
        logprobs: of each token, if they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    sampling: SamplerConfig
    verifier: Verifier
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Piece:
    """What one cycle added to a stream.

    Attributes:
        text: new text; may be empty while a character is unfinished.
        token_ids: the cycle's tokens.
        drafted: how many of them, from the first on, were drafted.
        finish_reason: on the last piece, else None.
        sampling: the settings used.
        verifier: the rule used.
        stats: telemetry so far.
        logprobs: of each token, if they were asked for.
    """

    text: str
    token_ids: list[int]
    drafted: int
    finish_reason: FinishReason | None
    sampling: SamplerConfig
    verifier: Verifier
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A trunk, what drafts for it if anything does, and its tokenizer. Made by `load`.

    Attributes:
        head: the MTP head, if one drafts.
        drafter: what drafts: that head, or something else, alone or beside it.
        drafts_with: the drafter's name: `mtp`, `ngram`, `mtp+ngram`, or `draft model` or
            `assistant` and its name; None where nothing drafts.
    """

    def __init__(
        self,
        name: str,
        trunk: Trunk,
        head: Head | None,
        tokenizer: Any,
        defaults: GenerationDefaults,
        depth: int,
        notes: Sequence[str] = (),
        origin: str | None = None,
        quantize: Quantize | None = None,
        drafter: Drafter | None = None,
        drafts_with: str | None = None,
    ) -> None:
        self.name = name
        self.quantize = None if quantize == "none" else quantize
        self.origin = origin or name
        self.trunk = trunk
        self.head = head
        self.drafter = drafter or head
        self.drafts_with = drafts_with or ("mtp" if head else None)
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.depth = depth
        self._prefix: Prefix | None = None
        self.pace = Pace(depth) if depth else Pace()
        self.notes = tuple(notes)
        # A lookup finds nothing in one text and much in the next; a model is what it is.
        lasting = self.drafter is not None and drafts_with not in ("ngram", "mtp+ngram")
        self._record = Record(self._add_note) if lasting else None

    def _add_note(self, note: str) -> None:
        """Say something that has come up while the model was running, and go on."""
        self.notes = (*self.notes, note)
        warnings.warn(f"{self.name}: {note}", MtplxWarning, stacklevel=2)

    @property
    def default_sampling(self) -> SamplerConfig:
        """The checkpoint's own sampling settings, over the neutral ones."""
        return self.sampling_with({})

    def sampling_with(self, settings: Mapping[str, Any]) -> SamplerConfig:
        """These settings over the checkpoint's own.

        Raises:
            MtplxError: a setting of the checkpoint's that is not overridden cannot be used.
            ValueError: one of `settings` cannot.
        """
        SamplerConfig(**settings)
        try:
            return SamplerConfig(**{**self.defaults.sampling, **settings})
        except ValueError as error:
            raise MtplxError(
                f"{self.name}: its own sampling settings are unusable: {error}"
            ) from None

    def forget(self) -> None:
        """Drop what the last text left in the caches: the next prompt is read whole."""
        self._prefix = None

    def default_depth(self, sampling: SamplerConfig, verifier: Verifier | None = None) -> Depth:
        """The depth of a request that names none: `auto`, if there is a drafter.

        But what the drafter recommends where the same text is wanted again and depth could show in
        it (see `keeps_its_depth`): how far `auto` drafts is a matter of time.

        Args:
            sampling: of the request.
            verifier: of the request; None for the default.
        """
        if self.drafter is None:
            return 0
        rule = verifier or default_verifier(sampling)
        kept = keeps_its_depth(sampling, rule, self.trunk.deterministic)
        return self.depth if kept else "auto"

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        A string is put through the chat template as one user message, unless `raw` or the model
        has no template; messages always are; ids are taken as they are.

        Raises:
            MtplxError: an empty prompt, ill-formed messages, or messages without a template.
        """
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise MtplxError("the prompt is no valid text: it has a lone surrogate") from None
            if raw or not self.tokenizer.chat_template:
                return self._nonempty(list(self.tokenizer(prompt)["input_ids"]))
            prompt = [{"role": "user", "content": prompt}]
        items: list[Any] = list(prompt)
        if not items or _is_id(items[0]):
            return self._nonempty(_token_ids(items, "a prompt of token ids"))
        for item in items:
            if not isinstance(item, Mapping):
                raise MtplxError(f"{PROMPT_KINDS}; got a list with a {type(item).__name__}")
        if not self.tokenizer.chat_template:
            raise MtplxError(f"{self.name} has no chat template; give text with raw=True instead")
        for message in items:
            if "role" not in message or "content" not in message:
                raise MtplxError(f"a chat message needs a role and a content, got {dict(message)}")
        try:
            encoded = self.tokenizer.apply_chat_template(
                [dict(m) for m in items], add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # whatever the checkpoint's template raises
            raise MtplxError(f"the chat template refused the messages: {error}") from None
        return self._nonempty(list(encoded["input_ids"]))

    def _nonempty(self, ids: list[int]) -> list[int]:
        if not ids:
            raise MtplxError("the prompt has no tokens; give at least one")
        return ids

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = ...,
        depth: Depth | None = ...,
        sampling: SamplerConfig | None = ...,
        verifier: Verifier | None = ...,
        raw: bool = ...,
        stop_token_ids: Sequence[int] = ...,
        grammar: GrammarSpec | None = ...,
        logprobs: int | None = ...,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[Mapping[str, Any]]] | list[list[int]],
        *,
        max_tokens: int = ...,
        depth: Depth | None = ...,
        sampling: SamplerConfig | None = ...,
        verifier: Verifier | None = ...,
        raw: bool = ...,
        stop_token_ids: Sequence[int] = ...,
        grammar: GrammarSpec | None = ...,
        logprobs: int | None = ...,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        depth: Depth | None = None,
        sampling: SamplerConfig | None = None,
        verifier: Verifier | None = None,
        raw: bool = False,
        stop_token_ids: Sequence[int] = (),
        grammar: GrammarSpec | None = None,
        logprobs: int | None = None,
    ) -> Result | list[Result]:
        """Continue one prompt, or a list of prompts as one batch.

        Args:
            prompt: see `encode`; a list of strings, of message lists or of id lists is a batch.
            max_tokens: most tokens to emit, each.
            depth: tokens drafted per cycle; 0 for none, "auto" for as many as pay, which is learned
                as the model writes. None for `default_depth`.
            sampling: settings; None for the checkpoint's own. In a batch, row i uses seed + i.
            verifier: the exact rule by which drafts are kept; None for `coupled` where the
                sampling has a seed, so that the text depends on the seed alone, else `block`.
            raw: do not put strings through the chat template.
            stop_token_ids: end the text too, beside the checkpoint's own.
            grammar: what the text is to be; the tokens that end it come where it is complete.
                The sampling's forced tokens come first even where they break it.
            logprobs: report the model's own log-probabilities, before all settings, of each token
                and of so many of the likeliest; None for none at all.
        Returns:
            A `Result`, or a list of them for a list of prompts.
        """
        many = _is_batch(prompt)
        prompts: list[Prompt] = list(prompt) if many else [prompt]
        if not prompts:
            return []
        begin = None if grammar is None else self._compile(grammar)
        stops = _stop_ids(stop_token_ids)
        requests = [
            self._request(
                p, max_tokens, depth, sampling, verifier, raw, stops, begin, logprobs, row
            )
            for row, p in enumerate(prompts)
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        entries: list[list[TokenLogprobs]] = [[] for _ in requests]
        last: dict[int, Burst] = {}
        batch = self._batch(requests)
        for bursts in batch.run():
            for burst in bursts:
                tokens[burst.index] += burst.tokens
                entries[burst.index] += burst.logprobs or []
                last[burst.index] = burst
        self._prefix = batch.prefix() or self._prefix
        results = []
        for i, request in enumerate(requests):
            reason = last[i].finish_reason
            assert reason is not None
            text = Detokenizer(self.tokenizer)
            results.append(
                Result(
                    text.push(tokens[i]) + text.finish(),
                    tokens[i],
                    reason,
                    replace(request.sampling, seed=request.seed),
                    request.verifier,
                    last[i].stats,
                    None if logprobs is None else entries[i],
                )
            )
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        depth: Depth | None = None,
        sampling: SamplerConfig | None = None,
        verifier: Verifier | None = None,
        raw: bool = False,
        stop_token_ids: Sequence[int] = (),
        grammar: GrammarSpec | None = None,
        logprobs: int | None = None,
    ) -> Iterator[Piece]:
        """Continue one prompt, a piece for each cycle. Arguments as `generate`."""
        begin = None if grammar is None else self._compile(grammar)
        stops = _stop_ids(stop_token_ids)
        request = self._request(
            prompt, max_tokens, depth, sampling, verifier, raw, stops, begin, logprobs, 0
        )
        # Made here, so that what is wrong with the request is said now and not at the first piece.
        return self._pieces(self._batch([request]), request)

    def _batch(self, requests: Sequence[Request]) -> Batch:
        """With what the last text left, if it may show.

        Read in other company, a trunk that is not deterministic rounds the same tokens otherwise,
        and so does a drafter; where the same text is asked for again, all is read as it was the
        first time.
        """
        greedy = requests[0].sampling.temperature == 0
        again = greedy or requests[0].sampling.seed is not None
        apart = greedy or requests[0].verifier == "coupled"
        may = not again or (self.trunk.deterministic and apart)
        prefix = self._prefix if may else None
        return Batch(self.trunk, self.drafter, requests, self.pace, prefix, self._record)

    def _pieces(self, batch: Batch, request: Request) -> Iterator[Piece]:
        used = replace(request.sampling, seed=request.seed)
        text = Detokenizer(self.tokenizer)
        try:
            for (burst,) in batch.run():
                new = text.push(burst.tokens)
                if burst.finish_reason:
                    new += text.finish()
                yield Piece(
                    new,
                    burst.tokens,
                    burst.drafted,
                    burst.finish_reason,
                    used,
                    request.verifier,
                    burst.stats,
                    burst.logprobs,
                )
        finally:
            # Of a stream that is left early as well.
            self._prefix = batch.prefix() or self._prefix

    def _request(
        self,
        prompt: Prompt,
        max_tokens: int,
        depth: Depth | None,
        sampling: SamplerConfig | None,
        verifier: Verifier | None,
        raw: bool,
        stop_token_ids: Sequence[int],
        grammar: Callable[[], Constraint] | None,
        logprobs: int | None,
        row: int,
    ) -> Request:
        if not _is_id(max_tokens) or max_tokens < 1:
            raise MtplxError(f"max_tokens must be an integer of 1 or more, got {max_tokens!r}")
        sampling = self.default_sampling if sampling is None else sampling
        if not isinstance(sampling, SamplerConfig):
            raise MtplxError(f"sampling must be a SamplerConfig, got {sampling!r}")
        rules = get_args(Verifier)
        if verifier is not None and not (isinstance(verifier, str) and verifier in rules):
            raise MtplxError(f"verifier must be one of {rules}, got {verifier!r}")
        depth = self.default_depth(sampling, verifier) if depth is None else depth
        adaptive = isinstance(depth, str) and depth == "auto"
        if adaptive:
            # Without a drafter nothing pays.
            depth = DEEPEST if self.drafter else 0
        if not _is_id(depth) or int(depth) < 0:
            raise MtplxError(f'depth must be an integer of 0 or more, or "auto", got {depth!r}')
        if depth and self.drafter is None:
            raise MtplxError(
                f"{self.name} has no MTP head to draft with; use depth 0, or load it with the "
                "drafter 'ngram' or a draft_model"
            )
        try:
            check_token_settings(sampling, self.trunk.vocab_size)
        except ValueError as error:
            raise MtplxError(f"{self.name}: {error}") from None
        if logprobs is not None and not (_is_id(logprobs) and 0 <= logprobs <= MOST_LOGPROBS):
            raise MtplxError(
                f"logprobs must be an integer from 0 to {MOST_LOGPROBS}, or None for no "
                f"log-probabilities, got {logprobs!r}"
            )
        rule = verifier or default_verifier(sampling)
        # A depth that is learned remembers what a seed's numbers came to in an earlier text. By a
        # rule that looks at the draft they would no longer be random in a second one.
        drawn = sampling.seed is None or (adaptive and rule != "coupled")
        seed = fresh_seed() if drawn else ((sampling.seed or 0) + row) % 2**64
        return Request(
            prompt=tuple(self.encode(prompt, raw)),
            sampling=sampling,
            seed=seed,
            max_tokens=int(max_tokens),
            depth=int(depth),
            adaptive=adaptive,
            stop_ids=frozenset([*self.defaults.eos_token_ids, *stop_token_ids]),
            verifier=rule,
            grammar=grammar,
            logprobs=None if logprobs is None else int(logprobs),
        )

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.trunk.vocab_size)

    def _compile(self, grammar: GrammarSpec) -> Callable[[], Constraint]:
        if not isinstance(grammar, GrammarSpec):
            raise MtplxError(
                "grammar must be a GrammarSpec, as GrammarSpec.json_schema(…) makes one, got a "
                f"{type(grammar).__name__}"
            )
        return self._grammars.compile(grammar)


def default_verifier(sampling: SamplerConfig) -> Verifier:
    """A seed asks for the same text again, whatever drafts it; else what keeps most."""
    return "block" if sampling.seed is None else "coupled"


PROMPT_KINDS = "a prompt is a string, a list of chat messages or a list of token ids"


BYTES = (bytes, bytearray, memoryview)


def _is_id(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _token_ids(items: Any, what: str) -> list[int]:
    try:
        ids = list(items)
    except TypeError:
        raise MtplxError(f"{what} must be a list of token ids, got {items!r}") from None
    for item in ids:
        if not _is_id(item):
            raise MtplxError(f"{what} holds {item!r}, which is no integer")
    return [int(item) for item in ids]


def _stop_ids(items: Any) -> list[int]:
    """Read once, whatever holds them, and not once for each prompt."""
    ids = _token_ids(items, "stop_token_ids")
    for token in ids:
        if token < 0:
            raise MtplxError(f"stop_token_ids holds {token}: token ids are integers from 0 up")
    return ids


def _is_batch(prompt: Any) -> bool:
    """Whether it is a list of prompts; a list of ids or of messages is one prompt."""
    if isinstance(prompt, str):
        return False
    number = isinstance(prompt, np.ndarray) and prompt.ndim == 0
    if number or not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, BYTES):
        raise MtplxError(f"{PROMPT_KINDS}; got a {type(prompt).__name__}")
    return all(
        isinstance(item, str)
        or (isinstance(item, Sequence | np.ndarray) and not isinstance(item, BYTES))
        for item in prompt
    )


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    head: str | os.PathLike[str] | None = None,
    drafter: DrafterName = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    deterministic: bool = False,
    quantize: Quantize | None = None,
    report: Report | None = None,
) -> LLM:
    """Load a model and whatever drafts for it.

    Args:
        model: a built-in name, a directory in Hugging Face layout, a `.gguf` file or a hub id.
        head: an attached head instead of the model's own: its directory, or a hub id.
        drafter: `mtp` is the head; `ngram` looks up what followed when the text last stood as it
            does, and needs no head; `mtp+ngram` is whichever does better, text by text; `auto` is
            the head, and nothing where there is none.
        draft_model: another, smaller model to draft with instead, of the same vocabulary, or Gemma
            4's assistant: named as `model` is, and computed in likewise.
        dtype: of the weights; None for bfloat16 where the device computes in it, or on a CPU the
            kernels do, else float32.
        device: None for CUDA or Apple's GPU where there is one, else the CPU.
        deterministic: compute every position to the same bits, whatever pass it is in: slower,
            and a coupled text is then the same at every depth, alone or in a batch.
        quantize: on the CPU, `int8` or `int4` rounds the linear layers, those of the model's own
            MTP layers too, to numbers of so many bits in groups of 32, and `file` takes those that
            a GGUF file has; several times faster. `none` and None compute in `dtype`.
        report: called while layers are quantised: how many are done, and of how many.
    Raises:
        MtplxError: the model or head cannot be had, in one line that says what to do.
    """
    names = get_args(DrafterName)
    if not (isinstance(drafter, str) and drafter in names):
        raise MtplxError(f"drafter must be one of {', '.join(names)}, got {drafter!r}")
    if draft_model is not None and (head is not None or drafter != "auto"):
        raise MtplxError("a draft_model drafts alone: leave out head and drafter, or draft_model")
    if drafter == "ngram" and head is not None:
        raise MtplxError("the drafter 'ngram' uses no head: leave out head, or take 'mtp+ngram'")
    checkpoint: Checkpoint = locate(model)
    attached = None if head is None else locate_head(head)
    other = None if draft_model is None else locate(draft_model)
    place = pick_device(device)
    trunk = _trunk(checkpoint, dtype, place, deterministic, quantize, report)
    tokenizer = load_tokenizer(checkpoint)
    if other is None:
        found = find_drafter(checkpoint, trunk, attached, drafter)
    else:
        found = _draft_with(other, trunk, tokenizer, dtype, place, deterministic, quantize)
    notes = [*found.notes, *_limits(trunk), *_unrounded(trunk, quantize)]
    return LLM(
        checkpoint.name,
        trunk,
        found.head,
        tokenizer,
        generation_defaults(checkpoint),
        found.depth,
        notes,
        checkpoint.origin,
        quantize,
        found.drafter,
        found.name,
    )


def _draft_with(
    other: Checkpoint,
    trunk: Trunk,
    tokenizer: Any,
    dtype: torch.dtype | str | None,
    device: torch.device,
    deterministic: bool,
    quantize: Quantize | None,
) -> FoundDrafter:
    """Another model as drafter, computed in as the one it drafts for."""
    if load_config(other).model_type in ASSISTANTS:
        return assisted_by(other.name, load_model(other, trunk.dtype, device), trunk)
    # Of blocks that a file has the other file knows nothing.
    own = None if quantize == "file" and not other.is_gguf else quantize
    small = _trunk(other, dtype, device, deterministic, own, None)
    return draft_with(other.name, small, load_tokenizer(other), trunk, tokenizer)


def _trunk(
    checkpoint: Checkpoint,
    dtype: torch.dtype | str | None,
    device: torch.device,
    deterministic: bool,
    quantize: Quantize | None,
    report: Report | None,
) -> Trunk:
    """The trunk: by the kernels where they can run it, else in torch."""
    if quantize is None or quantize == "none":
        kind = pick_dtype(dtype, device, lambda: load_outline(checkpoint))
        network = load_model(checkpoint, kind, device)
        library = _library(device)
        if library and kind == torch.bfloat16 and misfit(network) is None:
            in_torch = not deterministic and computes_bfloat16(device)
            return FusedTrunk(network, library, long_in_torch=in_torch)
        return DeterministicTrunk(network) if deterministic else Trunk(network)
    if quantize not in QUANTIZE:
        raise MtplxError(f"quantize must be one of {', '.join(QUANTIZE)}, got {quantize!r}")
    if device.type != "cpu":
        raise MtplxError(f"quantised layers are computed on the CPU, not on {device}: device='cpu'")
    if dtype is not None:
        raise MtplxError("quantised layers are computed in float32: leave out dtype")
    library = kernels.find()
    if library is None:
        raise MtplxError(
            "quantize needs the kernels, which are built where a C compiler is found: install one, "
            "then mtplx again"
        )
    network = load_rounded(checkpoint, library, quantize, report)
    if misfit(network) is None:
        return FusedTrunk(network, library)
    # The layers' results are float32, and what is between them has to be as well.
    network = network.float()
    return DeterministicTrunk(network) if deterministic else Trunk(network)


def _limits(trunk: Trunk) -> list[str]:
    """Notes on what a trunk does worse, or cannot do, for the way in which it is computed."""
    notes = []
    if isinstance(trunk, DeterministicTrunk) and trunk.slow_because:
        notes.append(f"tokens are computed one at a time, which is slow: {trunk.slow_because}")
    if not trunk.windowed and trunk.narrowest < (trunk.config.max_position_embeddings or 0):
        ends = f"texts end after {trunk.context:,} tokens, which is the model's sliding window"
        if isinstance(trunk, DeterministicTrunk):
            notes.append(f"{ends}: leave out deterministic to go on")
        else:
            notes.append(f"{ends}: the kernels go no further, dtype='float32' does")
    return notes


FEW = 0.1
"""A share of weights in few bits that may be in other layers without a word."""


def _unrounded(trunk: Trunk, quantize: Quantize | None) -> list[str]:
    """A note where much of a model is not what its user takes it for."""
    share = 0.0 if quantize in (None, "none") else left_out(trunk.model)
    if share <= FEW:
        return []
    return [
        f"{share:.0%} of its weights are in layers that quantize does not reach (experts that are "
        "stored together, for example), and are kept in float32"
    ]


def _library(device: torch.device) -> Kernels | None:
    return kernels.find() if device.type == "cpu" else None


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, or the best one there is."""
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise MtplxError(f"device {device!r} cannot be used here ({reason})") from None
    return place


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def pick_dtype(
    dtype: torch.dtype | str | None, device: torch.device, outline: Callable[[], Any]
) -> torch.dtype:
    """The type asked for, or bfloat16 where it is computed in, else float32.

    Args:
        dtype: asked for.
        device: where the model is to be.
        outline: gives the model, with or without weights; called where it is the kernels that may
            compute in bfloat16.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise MtplxError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if dtype is not None:
        return dtype
    if computes_bfloat16(device):
        return torch.bfloat16
    by_kernels = _library(device) is not None and misfit(outline()) is None
    return torch.bfloat16 if by_kernels else torch.float32


def computes_bfloat16(device: torch.device) -> bool:
    """Whether torch does there, faster than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        # Without these instructions a CPU emulates bfloat16, slower than float32.
        flags: Any = torch.cpu
        return bool(flags._is_avx512_bf16_supported() or flags._is_amx_tile_supported())
    return True
