"""The tables of docs/exactness.md: audits of this engine and of transformers, and rounding.

    python benchmarks/audits.py rules          # the three verifiers on the default model
    python benchmarks/audits.py faults         # those planted on purpose
    python benchmarks/audits.py transformers   # its own modes
    python benchmarks/audits.py rounding       # passes of different width against each other

`mtplx audit` does one of the first three at a time, on any model; this does them in turn.
transformers runs the default model with its linear layers in the kernels' hands, for speed. Its
assistant is the same with noise on its weights, so that it is sometimes wrong; `use_mtp` needs a
checkpoint with MTP layers, for which the tests' random one serves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import mtplx
from mtplx.audit.engines import OwnEngine, TransformersEngine
from mtplx.audit.faults import FAULTS
from mtplx.audit.numerics import rounding
from mtplx.audit.run import PROMPTS, audit
from mtplx.llm import LLM
from mtplx.models import blocks
from mtplx.models.deterministic import DeterministicTrunk
from mtplx.models.linear import hand_over, linear_layers
from mtplx.models.trunk import Trunk

TEMPERATURE, DEPTH = 0.8, 3
REPEATING = (
    "one two three one two three one two",
    "to be or not to be or not to be or",
)
"""For prompt lookup, which drafts what followed the same tokens before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--samples", type=int, help="texts of each audit")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    args = parser.parse_args()
    logging.set_verbosity_error()
    TABLES[args.table](args)


def rules(args: argparse.Namespace) -> None:
    llm = mtplx.load()
    for rule in ("token", "block", "coupled"):
        own(llm, rule, rule, None, args)


def faults(args: argparse.Namespace) -> None:
    llm = mtplx.load()
    for fault in FAULTS:
        own(llm, fault, "token", fault, args)


def own(llm, name, rule, fault, args) -> None:
    prompts = [llm.encode(prompt, raw=True) for prompt in PROMPTS]
    sampling = mtplx.SamplerConfig(temperature=args.temperature)
    engine = OwnEngine(llm, prompts, sampling, DEPTH, rule, fault)
    row(name, engine, llm, prompts, sampling, args.samples or 1024, fault)


def transformers(args: argparse.Namespace) -> None:
    llm = mtplx.load(quantize="file")
    prompts = [llm.encode(prompt, raw=True) for prompt in PROMPTS]
    repeating = [llm.encode(prompt, raw=True) for prompt in REPEATING]
    sampling = mtplx.SamplerConfig(temperature=args.temperature)
    count = args.samples or 512

    def generate(name, on, texts, settings, mode, assistant=None):
        engine = TransformersEngine(on, texts, settings, DEPTH, mode, assistant)
        row(name, engine, on, texts, settings, count)

    generate("plain", llm, prompts, sampling, "plain")
    generate("prompt lookup", llm, repeating, sampling, "prompt-lookup")
    assistant = noisy(llm)
    generate("assistant", llm, prompts, sampling, "assistant", assistant)
    filtered = mtplx.SamplerConfig(temperature=args.temperature, top_k=20, top_p=0.95)
    generate("assistant, top-k 20, top-p 0.95", llm, prompts, filtered, "assistant", assistant)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = mtp_checkpoint(Path(directory))
        texts = [[3, 5, 7], [11, 2, 13, 17]]
        few = mtplx.SamplerConfig(temperature=args.temperature, top_k=5)
        generate("use_mtp", checkpoint, texts, sampling, "mtp")
        generate("use_mtp, top-k 5", checkpoint, texts, few, "mtp")


def noisy(llm: LLM, share: float = 0.25) -> torch.nn.Module:
    """The model with noise on its matrices, in parts of their own size, in blocks of 8 bits."""
    model = mtplx.load(quantize="none", dtype="float32").trunk.model
    torch.manual_seed(0)
    for name, layer in linear_layers(model):
        weight = layer.weight
        if name != "lm_head":
            weight = weight + torch.randn_like(weight) * weight.std() * share
        hand_over(model, name, llm.trunk.fused.library, blocks.quantize(weight, 8), layer.bias)
    return model


def mtp_checkpoint(directory: Path) -> SimpleNamespace:
    """A small random model with an MTP layer, in the layout of GLM-4 MoE's checkpoints."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import tiny_native

    tiny_native.write(directory, "glm4_moe", sharded=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # transformers knows the numbers of the published models' MTP layers only.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{tiny_native.TRUNK_LAYERS}\..*"]
    return SimpleNamespace(name="a random GLM-4 MoE", trunk=Trunk(model))


def rounding_table(args: argparse.Namespace) -> None:
    sampling = mtplx.SamplerConfig(temperature=args.temperature)
    ways = [
        ("bfloat16", "torch, SDPA", Trunk),
        ("bfloat16", "torch, eager attention", Trunk),
        ("float32", "torch, SDPA", Trunk),
        ("float32", "torch, eager attention", Trunk),
        ("bfloat16", "torch, deterministic", DeterministicTrunk),
        ("bfloat16", "mtplx's", None),
        ("4 bits", "mtplx's", None),
    ]
    for dtype, kernel, in_torch in ways:
        few = dtype == "4 bits"
        llm = mtplx.load(quantize="file") if few else mtplx.load(dtype=dtype)
        if in_torch:
            llm.trunk = in_torch(llm.trunk.model)
        if "eager" in kernel:
            llm.trunk.model.set_attn_implementation("eager")
        prompts = [llm.encode(prompt, raw=True) for prompt in PROMPTS]
        engine = OwnEngine(llm, prompts, sampling, 0)
        texts = [
            text
            for prompt in range(len(prompts))
            for portion in engine.draw(prompt, args.samples or 32, 33, prompt, False)
            for text in portion
        ]
        for width in (2, 4, 8):
            found = rounding(llm.trunk, sampling, prompts, texts, width)
            print(
                f"| {dtype} | {kernel} | {width} | {found.places} | {found.flips:.2%} | "
                f"{found.distance:.1e} | {found.largest:.1e} |",
                flush=True,
            )


def row(name, engine, llm, prompts, sampling, samples, fault=None) -> None:
    """One audit, and its line of the table."""

    def progress(what, done, total):
        if sys.stderr.isatty():
            print(f"\r{name}: {what} {done}/{total}      ", end="", file=sys.stderr)

    started = time.perf_counter()
    found = audit(
        engine,
        llm.trunk,
        prompts,
        sampling,
        model=llm.name,
        depth=DEPTH,
        samples=samples,
        fault=fault,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    print(
        f"| {name} | {found.texts[found.main]} | {found.smallest_seen:.2f} | "
        f"{found.tokens_per_cycle or float('nan'):.2f} | {seconds:.0f} s | {found.verdict} |",
        flush=True,
    )


TABLES = {
    "rules": rules,
    "faults": faults,
    "transformers": transformers,
    "rounding": rounding_table,
}

if __name__ == "__main__":
    main()
