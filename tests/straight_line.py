"""MTP layers over whole texts, in float32, with nothing kept in between: what drafts are held to.

The parts that published descriptions have in common; a family's test puts its layer together from
them. The trunk's states come from transformers' own model.
"""

from __future__ import annotations

import torch
from family_proof import read_tensors
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


class StraightLine:
    """Called with a text and a draft, the draft's logits.

    Attributes:
        proof: whose checkpoint it is.
        layer: what comes before the names of the decoder layer's tensors.
        names: of the norms and the matrix around it: of the embedding, of the state, the matrix,
            and the last norm.
        eps: of the norms.
    """

    layer: str
    names: tuple[str, str, str, str]
    eps = 1e-6

    def __init__(self, directory, proof):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tensors, self.proof = read_tensors(directory), proof
        self.embedding = self.tensors[proof.embedding]
        self.output = self.tensors[proof.output]

    def __call__(self, known, drafted):
        hidden, tokens, rows = self.states(known[:-1]), list(known[1:]), []
        embedding_norm, hidden_norm, join, last_norm = self.names
        for token in drafted:
            embeds = self.embedding[tokens]
            pair = [self.norm(embedding_norm, embeds), self.norm(hidden_norm, hidden)]
            x = self.decode(torch.cat(pair, -1) @ self.tensors[f"{join}.weight"].T)
            last = self.norm(last_norm, x)[-1:]
            rows.append((last @ self.output.T)[0])
            hidden, tokens = torch.cat([hidden, last]), [*tokens, token]
        return torch.stack(rows)

    def states(self, text) -> Tensor:
        """The trunk's, after its last norm, [T, H]."""
        return self.model.model(torch.tensor([list(text)])).last_hidden_state[0]

    def decode(self, x: Tensor) -> Tensor:
        """The decoder layer; here the usual one, of attention and an MLP each behind a norm."""
        x = x + self.attend(self.norm(f"{self.layer}input_layernorm", x))
        return x + self.feed(self.norm(f"{self.layer}post_attention_layernorm", x))

    def attend(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def feed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    # --- parts ---

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{self.layer}{name}.weight"].T

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def shares(self, name: str, bias: str, x: Tensor, count: int) -> Tensor:
        """How much each expert counts [T, E], by sigmoids; a bias decides which `count` do."""
        scores = self.linear(name, x).sigmoid()
        chosen = (scores + self.tensors[self.layer + bias]).topk(count, -1).indices
        picked = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
        return picked / picked.sum(-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Causal, of heads [T, N, D], into [T, N * V]; `seen` [T, T] leaves keys out."""
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    sight = causal(len(q)) if seen is None else seen
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~sight, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def causal(count: int, window: int | None = None) -> Tensor:
    """Which keys each of so many queries sees: those up to its own, the last `window` of them."""
    seen = torch.ones(count, count).tril().bool()
    return seen if window is None else seen & ~torch.ones(count, count).tril(-window).bool()


def turned(x: Tensor, theta: float, pairs: str = "halves") -> Tensor:
    """Heads [T, N, D] turned by their positions.

    Args:
        x: the heads.
        theta: the base of the frequencies.
        pairs: `halves`, a number and the one half a head further on; `neighbours`, beside it.
    """
    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1) if pairs == "halves" else (x[..., ::2], x[..., 1::2])
    pair = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(pair, -1) if pairs == "halves" else torch.stack(pair, -1).flatten(-2)
