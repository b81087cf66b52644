"""`mtplx generate`: one prompt, one answer."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtplx.cli import options, show
from mtplx.errors import MtplxError

if TYPE_CHECKING:
    from mtplx.llm import Depth, Piece, Result

WARM_UP_TOKENS = 8


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; stdin if it is missing or -.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", exists=True, dir_okay=False, readable=True, help="Read the prompt here."
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = None,
    drafter: options.Drafter = "auto",
    draft_model: options.DraftModel = None,
    depth: options.Depth = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    no_repeat_ngram: options.NoRepeatNgram = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    verifier: options.Rule = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    deterministic: options.Deterministic = False,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    json: options.Json = False,
    logprobs: options.Logprobs = None,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="Print a table on stderr. On a terminal it is, if not told otherwise.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run without drafting too, and show both speeds.")
    ] = False,
) -> None:
    """Write the answer to a prompt, as it comes."""
    given = options.given_sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram=no_repeat_ngram,
        min_tokens=min_tokens,
        seed=seed,
    )
    if logprobs is not None and not json:
        raise typer.BadParameter("--logprobs needs --json, which they are printed in")
    grammar = options.read_grammar(json_schema, regex)
    text = options.read_prompt(prompt, file)
    llm = options.load_llm(
        model, head, dtype, device, deterministic, quantize, threads, drafter, draft_model
    )
    sampling = options.sampling_for(llm, given)
    depth = llm.default_depth(sampling, verifier) if depth is None else depth

    def run(depth: Depth, write: Callable[[str], None], tokens: int = max_tokens) -> Result:
        pieces = llm.stream(
            text,
            max_tokens=tokens,
            depth=depth,
            sampling=sampling,
            verifier=verifier,
            raw=raw,
            grammar=grammar,
            logprobs=logprobs,
        )
        return _collect(pieces, write)

    if compare:
        # What runs first would pay for the memory and threads that the other one finds ready.
        run(depth, _silent, min(max_tokens, WARM_UP_TOKENS))
    result = run(depth, _silent if json else _to_stdout)
    plain = None
    if compare and depth:
        if not json:
            _to_stdout("\n")
        sampling, verifier = result.sampling, result.verifier
        # No longer than the other: short texts and long ones have their own speeds.
        plain = run(0, _silent, len(result.token_ids))

    if json:
        answer = {
            "model": llm.name,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "drafter": llm.drafts_with,
            "depth": depth,
            "sampling": show.sampling_settings(result.sampling),
            "verifier": result.verifier,
            "stats": result.stats.to_dict(),
        }
        if result.logprobs is not None:
            answer["logprobs"] = show.logprobs(llm.tokenizer, result.logprobs)
        if plain is not None:
            answer["stats_without_drafting"] = plain.stats.to_dict()
        print(json_format.dumps(answer, ensure_ascii=False))
    elif plain is None:
        _to_stdout("\n")
    if stats is None:
        stats = compare or (sys.stderr.isatty() and not json)
    if stats:
        plain_stats = None if plain is None else plain.stats
        show.print_stats(llm, depth, result.sampling, result.stats, plain_stats)


def _collect(pieces: Iterable[Piece], write: Callable[[str], None]) -> Result:
    """Pass a stream's text on as it comes, and put the whole together."""
    from mtplx.llm import Result

    texts, tokens, logprobs, last = [], [], [], None
    try:
        for last in pieces:
            write(last.text)
            texts.append(last.text)
            tokens += last.token_ids
            logprobs += last.logprobs or []
    except MtplxError:
        if texts:
            write("\n")  # what went wrong is said on a line of its own
        raise
    assert last is not None and last.finish_reason is not None
    return Result(
        "".join(texts),
        tokens,
        last.finish_reason,
        last.sampling,
        last.verifier,
        last.stats,
        None if last.logprobs is None else logprobs,
    )


def _to_stdout(text: str) -> None:
    print(text, end="", flush=True)


def _silent(text: str) -> None:
    pass
