"""How much memory a model takes: each way of keeping its weights in a process of its own.

    python benchmarks/memory.py
    python benchmarks/memory.py --model MODEL --quantize int4 none

Resident memory (Linux's VmRSS) behind the imports, behind loading and behind one answer, and the
most there ever was until then (VmHWM).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from mtplx.models.checkpoint import QUANTIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantize", choices=QUANTIZE, nargs="+", default=["file", "none"])
    parser.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measured:
        measure(args.model, args.quantize[0])
        return
    for quantize in args.quantize:
        command = [sys.executable, __file__, "--measured", "--model", args.model]
        subprocess.run([*command, "--quantize", quantize], check=True)


def measure(model: str, quantize: str) -> None:
    """Print a line for each stage."""
    import mtplx

    show(quantize, "imports")
    llm = mtplx.load(model, quantize=quantize)
    show(quantize, "loaded")
    llm.generate("Why is the sky blue?", max_tokens=128)
    show(quantize, "an answer of 128 tokens")


def show(quantize: str, stage: str) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(status[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM"))
    print(f"{quantize:>5}, {stage:<24} {now:5.0f} MB, at most {most:5.0f} MB", flush=True)


if __name__ == "__main__":
    main()
