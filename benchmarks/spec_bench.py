"""Tokens per cycle and decoding speed on Spec-Bench's first turns.

    python benchmarks/spec_bench.py                      # acceptance, all prompts
    python benchmarks/spec_bench.py --speed --every 16 --depth 1 2 3    # and depth 0, in turn

The prompts are those of `mtplx bench`, which measures speed beside other engines: half of
Spec-Bench (Xia et al., ACL 2024 Findings; Apache-2.0). Acceptance is counted in batches, since
neighbours cannot change it; speed one prompt at a time, all depths in turn.
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
from mtplx.bench.prompts import FILE as PROMPTS


def measure_acceptance(llm, prompts, sampling, args):
    """Summed telemetry by category, for all prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]["turns"][0]))
    sums = defaultdict(lambda: {"tokens": 0, "cycles": 0, "decided": [], "accepted": []})
    for start in range(0, len(order), args.batch):
        rows = [prompts[i] for i in order[start : start + args.batch]]
        results = llm.generate(
            [row["turns"][0] for row in rows],
            max_tokens=args.max_tokens,
            depth=args.depth[0],
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


def measure_speed(llms, prompts, sampling, args):
    """Tokens per second of every model at depth 0 and at the depths asked for, in turn.

    Returns:
        For each prompt the speeds by way, which is the name of a model and a depth.
    """
    ways = [(name, depth) for name in llms for depth in (0, *args.depth)]
    for name, depth in ways:
        llms[name].generate("Hello", max_tokens=16, depth=depth)
    rows = []
    for i, row in enumerate(prompts[:: args.every]):
        speeds = {}
        # What runs first or last changes from prompt to prompt.
        for name, depth in ways[i % len(ways) :] + ways[: i % len(ways)]:
            result = llms[name].generate(
                row["turns"][0],
                max_tokens=args.max_tokens,
                depth=depth,
                sampling=replace(sampling, seed=args.seed + i),
                verifier=args.verifier,
            )
            speeds[name, depth] = result.stats.decode_tokens_per_second
        rows.append(speeds)
        shown = " ".join(f"{speeds[way]:7.1f}" for way in ways)
        print(f"{row['category']:>16} {shown} tokens/s", flush=True)
    return rows


def speed_figures(rows, way, base):
    """Of one way, beside another on the same prompts."""
    ratios = [speeds[way] / speeds[base] for speeds in rows]
    return {
        "tokens_per_second": statistics.median(speeds[way] for speeds in rows),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "prompts": len(rows),
    }


def depth_of(text):
    return text if text == "auto" else int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head")
    parser.add_argument("--drafter", choices=("auto", "mtp", "ngram", "mtp+ngram"), default="auto")
    parser.add_argument("--quantize", nargs="+", default=["none"], help="for --speed, one or more")
    parser.add_argument("--depth", type=depth_of, nargs="+", default=[3])
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
    llms = {
        name: mtplx.load(args.model, head=args.head, drafter=args.drafter, quantize=name)
        for name in args.quantize
    }
    sampling = mtplx.SamplerConfig(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    if args.speed:
        rows = measure_speed(llms, prompts, sampling, args)
        base = (args.quantize[0], 0)
        figures = {
            f"{name}, depth {depth}": speed_figures(rows, (name, depth), base)
            for name, depth in rows[0]
        }
        for way, figure in sorted(figures.items()):
            print(
                f"{way:>16} {figure['tokens_per_second']:7.1f} tokens/s, "
                f"{figure['ratio_median']:.2f} times {base[0]}, depth 0 "
                f"({figure['ratio_min']:.2f} to {figure['ratio_max']:.2f})"
            )
    else:
        sums = measure_acceptance(llms[args.quantize[0]], prompts[:: args.every], sampling, args)
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
