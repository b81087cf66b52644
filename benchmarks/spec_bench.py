"""Tokens per cycle and decoding speed on Spec-Bench's first turns.

    python benchmarks/spec_bench.py                      # acceptance, all prompts
    python benchmarks/spec_bench.py --speed --every 6    # depth 0 beside it, prompt by prompt

The prompts are half of Spec-Bench (Xia et al., ACL 2024 Findings; Apache-2.0), see README.md here.
Acceptance is counted in batches, since neighbours cannot change it; speed one prompt at a time,
both depths in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import mtplx

PROMPTS = Path(__file__).with_name("spec_bench.jsonl")


def measure_acceptance(llm, prompts, sampling, args):
    """Summed telemetry by category, for all prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]["turns"][0]))
    sums = defaultdict(lambda: {"tokens": 0, "cycles": 0, "decided": [], "accepted": []})
    for start in range(0, len(order), args.batch):
        rows = [prompts[i] for i in order[start : start + args.batch]]
        results = llm.generate(
            [row["turns"][0] for row in rows],
            max_tokens=args.max_tokens,
            depth=args.depth,
            sampling=replace(sampling, seed=args.seed + start),
            verifier=args.verifier,
        )
        for row, result in zip(rows, results, strict=True):
            for key in (row["category"], "all"):
                total = sums[key]
                total["tokens"] += result.stats.tokens
                total["cycles"] += result.stats.cycles
                total["decided"] = add(total["decided"], result.stats.decided_by_position)
                total["accepted"] = add(total["accepted"], result.stats.accepted_by_position)
        print(f"\r{min(start + args.batch, len(order))}/{len(order)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return sums


def figures_of(total):
    """Tokens per cycle, and the share of drafts kept where those before them were."""
    return {
        "tokens_per_cycle": total["tokens"] / total["cycles"],
        "acceptance_by_position": [
            kept / max(1, decided)
            for kept, decided in zip(total["accepted"], total["decided"], strict=True)
        ],
        "tokens": total["tokens"],
    }


def add(a, b):
    width = max(len(a), len(b))
    return [
        sum(x) for x in zip(a + [0] * (width - len(a)), b + [0] * (width - len(b)), strict=True)
    ]


def measure_speed(llm, prompts, sampling, args):
    """Seconds per token at depth 0 and at the depth asked for, in turn on every prompt."""
    pairs = []
    llm.generate("Hello", max_tokens=16, depth=args.depth)
    for i, row in enumerate(prompts[:: args.every]):
        speeds = {}
        for depth in (0, args.depth) if i % 2 else (args.depth, 0):
            result = llm.generate(
                row["turns"][0],
                max_tokens=args.max_tokens,
                depth=depth,
                sampling=replace(sampling, seed=args.seed + i),
                verifier=args.verifier,
            )
            speeds[depth] = result.stats.decode_tokens_per_second
        pairs.append((speeds[0], speeds[args.depth]))
        print(f"{row['category']:>16} {speeds[0]:7.1f} {speeds[args.depth]:7.1f} tokens/s")
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--verifier", choices=("token", "block", "coupled"), default="block")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--every", type=int, default=1, help="use one prompt in so many")
    parser.add_argument("--speed", action="store_true", help="time against depth 0 instead")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    llm = mtplx.load(args.model, head=args.head)
    sampling = mtplx.SamplerConfig(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    if args.speed:
        pairs = measure_speed(llm, prompts, sampling, args)
        ratios = [fast / slow for slow, fast in pairs]
        figures = {
            "depth_0_tokens_per_second": statistics.median(slow for slow, _ in pairs),
            "tokens_per_second": statistics.median(fast for _, fast in pairs),
            "ratio_median": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "prompts": len(pairs),
        }
        print(json.dumps(figures, indent=2))
    else:
        sums = measure_acceptance(llm, prompts[:: args.every], sampling, args)
        figures = {category: figures_of(total) for category, total in sums.items()}
        for category, figure in sorted(figures.items(), key=lambda item: item[0] == "all"):
            positions = " ".join(f"{a:.2f}" for a in figure["acceptance_by_position"])
            print(f"{category:>16} {figure['tokens_per_cycle']:5.2f} tokens/cycle  {positions}")
    if args.json:
        args.json.write_text(
            json.dumps({"settings": vars(args) | {"json": None}, **figures}, indent=2)
        )


if __name__ == "__main__":
    main()
