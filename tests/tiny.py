"""Small random models for the tests: real architectures, a few thousand parameters."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mtplx.drafters.attached import AttachedHead
from mtplx.models.eagle3 import Eagle3Config, Eagle3Head
from mtplx.models.trunk import Trunk


def llama(
    vocab_size: int = 7,
    seed: int = 0,
    layers: int = 2,
    context: int = 512,
    heads: int = 4,
    width: int = 16,
    inner: int = 24,
) -> Trunk:
    """A Llama whose next-token distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=width // heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Trunk(model)


def eagle3(
    trunk: Trunk,
    draft_vocab_size: int | None = None,
    seed: int = 1,
    taps: tuple[int, int, int] | None = None,
    **flags: bool,
) -> Eagle3Head:
    """A random head for it; with a smaller vocabulary it covers every other token first.

    `taps` and `flags` are those of `Eagle3Config`.
    """
    torch.manual_seed(seed)
    size = trunk.vocab_size if draft_vocab_size is None else draft_vocab_size
    layer = LlamaConfig(
        vocab_size=trunk.vocab_size,
        hidden_size=trunk.hidden_size,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=trunk.config.num_attention_heads,
        num_key_value_heads=trunk.config.num_key_value_heads,
        head_dim=trunk.config.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    taps = taps or (0, trunk.layers // 2, trunk.layers)
    head = Eagle3Head(Eagle3Config(layer, size, taps, **{"norm_before_residual": True} | flags))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = sorted(range(trunk.vocab_size), key=lambda i: (i % 2, i))[:size]
    head.set_vocabulary(torch.tensor(sorted(ids)))
    return head.eval().requires_grad_(False)


def attached(trunk: Trunk, draft_vocab_size: int | None = None, seed: int = 1) -> AttachedHead:
    """A random head bound to its trunk."""
    return AttachedHead(eagle3(trunk, draft_vocab_size, seed), trunk)
