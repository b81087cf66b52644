"""What every family of MTP layers has to show, on a small random checkpoint of its own.

A misaligned head never breaks exactness: only a comparison with a reference, and a head that is
right by construction, reveal it. A family's test is a subclass that says what its files look like
and how its layers are described where they were published; see docs/adding-a-family.md.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from mtplx.drafters.find import find_head
from mtplx.drafters.native import load_native_head
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.inspection import inspect
from mtplx.models.checkpoint import Checkpoint, load_model
from mtplx.models.families import mtp_layers
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig

VOCAB, HIDDEN = 24, 32

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (7,), (2, 7, 1, 8, 2)]
"""Of three lengths, one of them with nothing before the pending token."""

GREEDY = SamplerConfig(temperature=0.0)
SAMPLED = SamplerConfig(temperature=3.0)
"""Hot, so that random heads have drafts accepted."""

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def load(directory, dtype=torch.float32):
    """The trunk and what `load_native_head` says of it."""
    checkpoint = Checkpoint(str(directory), directory)
    trunk = Trunk(load_model(checkpoint, dtype))
    return trunk, *load_native_head(checkpoint, trunk)


def decode(trunk, head, prompts, depth, sampling=GREEDY, tokens=24, watch=None):
    """Run requests side by side; returns their texts and the statistics of each."""
    depths = [depth] * len(prompts) if isinstance(depth, int) else depth
    requests = [
        Request(p, sampling, i, tokens, d)
        for i, (p, d) in enumerate(zip(prompts, depths, strict=True))
    ]
    batch = Batch(trunk, head, requests)
    if watch:
        watch(batch)
    texts: list[list[int]] = [[] for _ in prompts]
    stats = [slot.stats for slot in batch.slots]
    for bursts in batch.run():
        for burst in bursts:
            texts[burst.index] += burst.tokens
    return texts, stats


def watch_drafts(cycles, batch):
    """Record of each draft: the request, the tokens before it, its tokens and its logits."""
    draft, logits = batch.drafter.draft, batch.drafter.head.logits

    def recording(*args, **kwargs):
        seen: list[Tensor] = []
        batch.drafter.head.logits = lambda *of: seen.append(logits(*of)) or seen[-1]
        result = draft(*args, **kwargs)
        del batch.drafter.head.logits
        for row, slot in enumerate(batch.slots):
            known = [*slot.request.prompt, *slot.output]
            cycles.append((slot.index, known, result.tokens[row], torch.stack(seen)[:, row]))
        return result

    batch.drafter.draft = recording


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: Tensors, sharded: bool = True
) -> Path:
    """Files as they are published: two shards with an index, or one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    names = sorted(tensors)
    # MTP tensors come last, and need not lie in one file.
    cut = len(names) - 8
    weight_map = {}
    for i, part in enumerate((names[:cut], names[cut:]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_tensors(directory: Path) -> Tensors:
    """All that its files hold, in float32."""
    tensors: Tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor.float() for name, tensor in tensors.items()}


def random_tensors(shapes: Shapes, dtype: torch.dtype, centre: float = 1.0) -> Tensors:
    """Random weights, norms around `centre`: a state from the wrong side of one shows."""
    noise = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if "norm" in name:
            tensor = torch.rand(shape, generator=noise) - 0.5 + centre
        else:
            scale = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
            tensor = torch.randn(shape, generator=noise) * scale
        tensors[name] = tensor.to(dtype)
    return tensors


class Reference:
    """What most references are made of; float32, whole texts [T, H], published names."""

    eps = 1e-6

    def __init__(self, directory: Path, proof: Proof) -> None:
        self.model = proof.transformers(directory, dtype=torch.float32).eval()
        self.tensors = read_tensors(directory)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """An RMS norm whose weight is what it multiplies by."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """With a bias if the files have one."""
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """Gated by SiLU."""
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Causal softmax attention over [T, heads, D], which fewer heads of keys may share.

    Args:
        q: queries.
        k: keys.
        v: values.
        window: keys that a query sees at most, its own included.
        sinks: [heads], scores that take their share of each sum and give nothing.
    Returns:
        [T, heads * D] of the values.
    """
    count, heads, size = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    seen = torch.ones(count, count).tril().bool()
    if window is not None:
        seen &= torch.ones(count, count).triu(1 - window).bool()
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v).flatten(1)


def turn(x: Tensor, theta: float, size: int, paired: bool = False) -> Tensor:
    """Rotary positions from 0 on, over the first `size` numbers of each head [T, heads, D].

    A number is turned with the one half of them further on, or `paired` with its neighbour.
    """
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned, rest = x[..., :size], x[..., size:]
    if paired:
        a, b = turned[..., 0::2], turned[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = turned.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Proof:
    """The proof of one family; subclasses, named Test…, fill in what stands first."""

    config: dict[str, Any]
    dtype = torch.bfloat16
    named = True
    """Whether config.json tells of the layers."""
    layers = 1
    chained = True
    """Whether a layer is fed what the one before it computes; else the trunk's state."""
    depth = 3
    """Of the drafts that are compared with the reference."""

    def shapes(self) -> Shapes:
        """Every tensor of the files, by its published name."""
        raise NotImplementedError

    def tensors(self) -> Tensors:
        """The files' tensors."""
        return random_tensors(self.shapes(), self.dtype)

    def transformers(self, directory: Path, **settings: Any) -> Any:
        """The trunk as transformers has it."""
        return AutoModelForCausalLM.from_pretrained(directory, **settings)

    def reference(self, directory: Path) -> Any:
        """Called with a text and a draft, the draft's logits: float32, no cache, from the book."""
        raise NotImplementedError

    def load(self, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
        """The trunk, the head and its notes, of these files."""
        return load(directory, dtype)

    # Of a head that is built to count on: what is silenced, and how a norm leaves things alone.
    silent = ("o_proj.weight", "down_proj.weight", "down_proj")
    no_norm = 1.0
    embedding = "model.embed_tokens.weight"
    output = "lm_head.weight"
    copies: tuple[str, ...] = ()
    join: str  # its name, with {} for a layer's number
    hidden_first = False

    def counting(self, source: str) -> Tensors:
        """A trunk that counts, and a head that does if it is given the right `source`.

        Embeddings are unit vectors that the layers leave alone; the output head names the next
        number. The head either passes on the token it is joined with, or moves the hidden state
        one number on; one taken from a position too early or too late counts wrong.
        """
        nothing = torch.zeros(HIDDEN, HIDDEN)
        joins = {self.join.format(k): k for k in range(self.layers)}
        tensors = self.tensors()
        for name, tensor in tensors.items():
            if name.endswith(self.silent):
                tensor.zero_()
            elif name == self.embedding or name.endswith(self.copies or ("\n",)):
                tensor.copy_(torch.eye(VOCAB, HIDDEN))
            elif name in joins:
                # Each layer of several is one token further from the trunk's state.
                step = 1 if self.chained else 1 + joins[name]
                onward = nothing.clone()
                onward[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(step, 0)
                halves = [torch.eye(HIDDEN), nothing] if source == "token" else [nothing, onward]
                tensor.copy_(torch.cat(halves[::-1] if self.hidden_first else halves, -1))
            elif "norm" in name:
                tensor.fill_(self.no_norm)
        for name in tensors:
            if name == self.output or name.endswith("shared_head.head.weight"):
                tensors[name].copy_(torch.eye(VOCAB, HIDDEN).roll(1, 0))
        return tensors

    # --- the proof ---

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory):
        return write_checkpoint(
            tmp_path_factory.mktemp(cls.__name__), cls().config, cls().tensors()
        )

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, directory):
        return cls().load(directory)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, directory):
        """What transformers writes, one prompt at a time."""
        model = cls().transformers(directory, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
        texts = [model.generate(torch.tensor([p]), **settings)[0].tolist() for p in PROMPTS]
        return [text[len(p) :] for p, text in zip(PROMPTS, texts, strict=True)]

    def test_all_tensors_are_taken_and_none_is_missing(self, directory, loaded):
        # Loading raises for the head's; these are the trunk's.
        _, report = self.transformers(directory, output_loading_info=True)
        trunk, head, notes = loaded
        # transformers knows MTP layers by the numbers of the published sizes, if at all.
        unexpected = report.pop("unexpected_keys")
        mtp = mtp_layers(unexpected, trunk.layers)
        assert not any(report.values()) and unexpected == {name for n in mtp.values() for name in n}
        assert head is not None and head.layers == self.layers
        assert self.named == (notes == ())
        assert self.named or "config.json names no MTP layers" in notes[0]
        found = find_head(Checkpoint("tiny", directory), trunk, None)
        assert (found.depth, found.notes) == (self.layers, notes)

    def test_inspect_says_of_headers_what_loading_says(self, directory, loaded):
        _, head, notes = loaded
        found = inspect(directory)
        mtp = found.mtp
        assert (mtp.status, mtp.usable, mtp.found) == ("works", True, head.layers)
        assert found.notes == notes

    @pytest.mark.slow
    @pytest.mark.parametrize("depth", [1, 2, 4, (4, 0, 2)])
    def test_greedy_text_is_that_of_generate(self, loaded, expected, depth):
        trunk, head, _ = loaded
        if isinstance(depth, int):
            assert decode(trunk, head, PROMPTS[:1], depth)[0] == expected[:1]
        assert decode(trunk, head, PROMPTS, depth)[0] == expected

    def test_drafts_are_those_of_a_reference_without_caches(self, directory, loaded):
        trunk, head, _ = loaded
        reference = self.reference(directory)
        cycles: list = []
        _, stats = decode(
            trunk, head, PROMPTS, self.depth, SAMPLED, 64, partial(watch_drafts, cycles)
        )
        with torch.inference_mode():
            for _, known, drafted, logits in cycles:
                # A first token that is the whole prompt has no hidden state to draft from yet.
                if len(known) > 1:
                    expected = reference(known, drafted.tolist())
                    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        # Every way for a cycle to end leaves other caches behind.
        kept = torch.tensor([s.accepted_by_position[:3] for s in stats]).sum(0).tolist()
        assert len(cycles) > kept[0] > kept[2] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("source", ["token", "hidden"])
    def test_a_head_that_knows_the_text_has_every_draft_kept(self, tmp_path, source):
        write_checkpoint(tmp_path, self.config, self.counting(source))
        trunk, head, _ = self.load(tmp_path)
        prompts = [(3, 4, 5, 6, 7, 8), (9,), (1, 2, 3)]
        # Beyond its layers, one that counts from a state further back would count too far.
        deepest = 5 if source == "token" or self.chained else self.layers
        for depth in range(1, deepest + 1):
            texts, stats = decode(trunk, head, prompts, depth)
            for prompt, text, s in zip(prompts, texts, stats, strict=True):
                start = prompt[-1] + 1
                assert text == [n % VOCAB for n in range(start, start + 24)]
                assert len(s.drafted_by_position) == depth
                assert s.accepted_by_position == s.drafted_by_position

    @pytest.mark.slow
    def test_in_the_published_type_it_drafts_too(self, directory):
        trunk, head, _ = self.load(directory, torch.bfloat16)
        texts, stats = decode(trunk, head, PROMPTS[:1], 2, SAMPLED)
        assert len(texts[0]) == 24 and sum(stats[0].drafted_by_position) > 0
