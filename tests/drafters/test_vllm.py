"""The same checkpoints under vLLM's `method: mtp`: the same greedy text, the same drafts kept.

Needs an environment of its own with vLLM in it, named by the variable MTPLX_VLLM_PYTHON:

    MTPLX_VLLM_PYTHON=…/bin/python pytest -m vllm

Sizes are those that its CPU build can compute with: GLM in float32, DeepSeek's latent attention in
bfloat16, where texts may part and only the counts are compared. Its CPU build (0.32) drafts for no
model with gated delta nets, and for none of text and images.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_proof import VOCAB, decode, load, write_checkpoint

sys.path.insert(0, str(Path(__file__).parent / "families"))
from test_deepseek import TestDeepseekV3 as DeepseekV3
from test_deepseek import TestGlm4Moe as Glm4Moe

PYTHON = os.environ.get("MTPLX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="MTPLX_VLLM_PYTHON names no Python with vLLM"),
]

# No first token alone: vLLM leaves out the first pair's embedding.
PROMPTS = [(3, 4, 5, 6, 7, 8), (1, 2, 3)]
TOKENS = 24
SMALL = {"intermediate_size": 32, "max_position_embeddings": 512, "moe_intermediate_size": 32}


class Glm(Glm4Moe):
    """In sizes that vLLM's CPU build takes."""

    __test__ = False
    config = Glm4Moe.config | SMALL | {"head_dim": 32}


class Deepseek(DeepseekV3):
    """In sizes that vLLM's CPU build takes."""

    __test__ = False
    config = (
        DeepseekV3.config
        | SMALL
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    )


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

if __name__ == "__main__":
    model, depth, dtype, tokens, prompts = json.loads(sys.argv[1])
    draft = {"method": "mtp", "num_speculative_tokens": depth} if depth else None
    llm = LLM(
        model=model, dtype=dtype, max_model_len=128, max_num_seqs=4, enforce_eager=True,
        skip_tokenizer_init=True, disable_log_stats=False, speculative_config=draft,
    )
    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    texts = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], settings)
    counts = {
        metric.name: getattr(metric, "values", getattr(metric, "value", None))
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    print("RESULT", json.dumps([[list(t.outputs[0].token_ids) for t in texts], counts]))
"""


def vllm(directory, depth, dtype):
    """Texts, and how many drafts were made and how many were kept at each position."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    script = directory / "run.py"
    script.write_text(SCRIPT)
    job = json.dumps([str(directory), depth, dtype, TOKENS, PROMPTS])
    done = subprocess.run(
        [str(PYTHON), str(script), job], capture_output=True, text=True, env=os.environ | quiet
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-2000:]
    texts, counts = json.loads(lines[0].removeprefix("RESULT "))
    drafts = counts.get("vllm:spec_decode_num_drafts", 0)
    return texts, drafts, counts.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_random_heads_greedy_text_is_vllms(tmp_path, depth):
    proof = Glm()
    write_checkpoint(tmp_path, proof.config, proof.tensors())
    trunk, head, _ = load(tmp_path)
    texts, _, _ = vllm(tmp_path, depth, "float32")
    assert decode(trunk, head, PROMPTS, depth, tokens=TOKENS)[0] == texts


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("source", ["token", "hidden"])
@pytest.mark.parametrize(("proof", "dtype"), [(Glm, "float32"), (Deepseek, "bfloat16")])
def test_a_head_that_knows_the_text_has_as_many_drafts_kept(tmp_path, proof, dtype, source, depth):
    made = proof()
    write_checkpoint(tmp_path, made.config, made.counting(source))
    trunk, head, _ = load(tmp_path, getattr(torch, dtype))
    theirs, drafts, kept = vllm(tmp_path, depth, dtype)
    texts, stats = decode(trunk, head, PROMPTS, depth, tokens=TOKENS)
    counted = [[n % VOCAB for n in range(p[-1] + 1, p[-1] + 1 + TOKENS)] for p in PROMPTS]
    assert texts == theirs == counted
    assert kept == [drafts] * depth
    for s in stats:
        assert s.accepted_by_position == s.drafted_by_position
        assert len(s.drafted_by_position) == depth
