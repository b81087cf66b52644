"""Load a model, ask it something, look at what drafting did."""

import argparse

import mtplx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--max-tokens", type=int, default=128)
args = parser.parse_args()

llm = mtplx.load(args.model)
result = llm.generate(
    args.prompt,
    max_tokens=args.max_tokens,
    sampling=mtplx.SamplerConfig(temperature=0.6, top_p=0.95, top_k=20, seed=1),
)
print(result.text)
print()
print("finish reason:", result.finish_reason)
print(f"tokens per cycle: {result.stats.tokens_per_cycle:.2f}")
print("acceptance by position:", [round(a, 2) for a in result.stats.acceptance_by_position])
print(f"tokens/s: {result.stats.decode_tokens_per_second:.1f}")
