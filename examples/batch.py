"""Several prompts side by side: one trunk pass a cycle serves them all.

A row's text depends on its own prompt and seed only, not on its neighbours.
"""

import argparse

import mtplx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--max-tokens", type=int, default=32)
args = parser.parse_args()

llm = mtplx.load(args.model, dtype="float32")
prompts = ["What is a comet?", "Write a line about rain.", "Count from one to ten."]
sampling = mtplx.SamplerConfig(temperature=0.6, seed=7)
for prompt, result in zip(
    prompts, llm.generate(prompts, max_tokens=args.max_tokens, sampling=sampling), strict=True
):
    seed = result.sampling.seed
    print(f"{prompt} (seed {seed}, {result.stats.tokens_per_cycle:.2f} tokens per cycle)")
    print(f"  {result.text}")
