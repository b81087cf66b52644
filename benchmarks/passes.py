"""What a pass of the kernels costs by its width and by the context, and what a draft step does.

    python benchmarks/passes.py                    # the default model, by its file's own blocks
    python benchmarks/passes.py --quantize none    # in bfloat16
    python benchmarks/passes.py --random 1.5b      # random weights in 4 bits, of Qwen2-1.5B's shape

All widths run in turn, and medians are given; a pass of K + 1 tokens verifies K drafts. Random
weights are fair for what a pass costs, and say nothing about acceptance.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import mtplx
from mtplx.bench import traffic
from mtplx.bench.machine import copy_bandwidth
from mtplx.models.checkpoint import QUANTIZE
from mtplx.models.slots import Span

SHAPES = {
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
}
WIDTHS = (1, 2, 3, 4, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", choices=SHAPES)
    parser.add_argument("--quantize", choices=QUANTIZE, help="file, or int4 of random weights")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if args.random:
        llm = random_model(SHAPES[args.random], args.quantize or "int4")
    else:
        llm = mtplx.load(quantize=args.quantize or "file")
    bandwidth = copy_bandwidth()
    weights = traffic.model_bytes(llm.trunk.model)
    token = traffic.token_bytes(llm.trunk.config, 2)
    print(f"{weights / 1e6:.0f} MB of weights, copies at {bandwidth / 1e9:.1f} GB/s")
    first = None
    with torch.inference_mode():
        for context in args.contexts:
            times = passes(llm, context, args.repeats)
            first = first or times[1]
            limit = (weights + context * token) / bandwidth
            print(f"context {context}: {context * token / 1e6:.0f} MB of keys and values")
            for width, seconds in times.items():
                print(
                    f"  {width} tokens {1e3 * seconds:6.2f} ms, {seconds / times[1]:.2f} of one "
                    f"token's, {seconds / first:.2f} of one at {args.contexts[0]}, "
                    f"{limit / seconds:.0%} of the limit"
                )
        if llm.head:
            step = draft_step(llm, args.contexts[0], args.repeats)
            print(f"a draft step {1e3 * step:.2f} ms, {step / first:.1%} of a pass of one token")


def passes(llm, context: int, repeats: int) -> dict[int, float]:
    """Median seconds by width, behind so many tokens."""
    trunk, times = llm.trunk, {width: [] for width in WIDTHS}
    ids = torch.randint(0, trunk.vocab_size, (1, context + max(WIDTHS)))
    cache = trunk.new_cache(context + max(WIDTHS))
    span = Span.after([0], context, ids.device)
    trunk.forward(ids[:, :context], span, cache, with_logits=False)
    for _ in range(repeats):
        for width, seconds in times.items():
            part = ids[:, context : context + width]
            started = time.perf_counter()
            trunk.forward(part, Span.after([context], width, ids.device), cache)
            seconds.append(time.perf_counter() - started)
    return {width: statistics.median(seconds) for width, seconds in times.items()}


def draft_step(llm, context: int, repeats: int) -> float:
    """Median seconds of one step of the head with its logits."""
    head, seconds = llm.head, []
    cache = head.new_cache(context + 1)
    tokens = torch.randint(0, llm.trunk.vocab_size, (1, context))
    hidden = torch.randn(1, context, llm.trunk.hidden_size)
    head.step(tokens, hidden, Span.after([0], context, tokens.device), cache)
    for _ in range(4 * repeats):
        started = time.perf_counter()
        span = Span.after([context], 1, tokens.device)
        state = head.step(tokens[:, -1:], hidden[:, -1:], span, cache)
        head.logits(state[:, 0])
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def random_model(shape: dict[str, object], quantize: str) -> mtplx.LLM:
    """Qwen2 of this shape with random weights."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    with tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
        model.save_pretrained(directory)
        del model
        tokenizer(Path(directory), PreTrainedTokenizerFast)
        return mtplx.load(directory, quantize=quantize)


def tokenizer(directory: Path, kind) -> None:
    """Of one word: nothing here is text."""
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    kind(tokenizer_object=plain, eos_token="a").save_pretrained(directory)


if __name__ == "__main__":
    main()
