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

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{self.layer}{name}.weight"].T

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def shares(
        self, name: str, bias: str, x: Tensor, count: int, groups: int = 1, kept: int = 1
    ) -> Tensor:
        """How much each expert counts [T, E], by sigmoids.

        Args:
            name: of the matrix.
            bias: of what is added where it is decided which experts count.
            x: what they are to work on.
            count: of experts for each position.
            groups: of experts that lie together.
            kept: how many of those are looked at, by the sum of their two best.
        """
        scores = self.linear(name, x).sigmoid()
        chosen = scores + self.tensors[self.layer + bias]
        best = chosen.view(len(x), groups, -1).topk(2, -1).values.sum(-1)
        near = torch.zeros_like(best).scatter(1, best.topk(kept, -1).indices, 1.0).bool()
        near = near.repeat_interleave(scores.shape[1] // groups, 1)
        chosen = chosen.masked_fill(~near, -torch.inf).topk(count, -1).indices
        picked = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
        return picked / picked.sum(-1, keepdim=True)

    def experts(self, name: str, x: Tensor, shares: Tensor) -> Tensor:
        """What all experts make of it, each by its share."""
        parts = [shares[:, i, None] * self.mlp(f"{name}.{i}", x) for i in range(shares.shape[1])]
        return torch.stack(parts).sum(0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Of heads [T, N, D], into [T, N * V]; `seen` [T, T] says which keys, else those before."""
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    sight = causal(len(q)) if seen is None else seen
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~sight, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def causal(count: int, window: int | None = None) -> Tensor:
    """Which keys each of so many queries sees: those up to its own, the last `window` of them."""
    seen = torch.ones(count, count).tril().bool()
    return seen if window is None else seen & ~torch.ones(count, count).tril(-window).bool()


def frequencies(size: int, theta: float) -> Tensor:
    """How far each pair of a head's numbers turns from one position to the next."""
    return theta ** (-torch.arange(0, size, 2) / size)


def turned(x: Tensor, frequencies: Tensor, neighbours: bool = False) -> Tensor:
    """Heads [T, N, D] turned by their positions.

    Args:
        x: the heads.
        frequencies: of the pairs.
        neighbours: whether a pair lies side by side, and not half a head apart.
    """
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    pair = [a * cos - b * sin, b * cos + a * sin]
    return torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)
