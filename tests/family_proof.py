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
from transformers import AutoModelForCausalLM

from mtplx.drafters.find import find_head
from mtplx.drafters.native import load_native_head
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.models.checkpoint import Checkpoint, load_model
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
    draft, logits = batch.head.draft, batch.head.head.logits

    def recording(*args, **kwargs):
        seen: list[Tensor] = []
        batch.head.head.logits = lambda *of: seen.append(logits(*of)) or seen[-1]
        result = draft(*args, **kwargs)
        del batch.head.head.logits
        for row, slot in enumerate(batch.slots):
            known = [*slot.request.prompt, *slot.output]
            cycles.append((slot.index, known, result.tokens[row], torch.stack(seen)[:, row]))
        return result

    batch.head.draft = recording


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


class Proof:
    """The proof of one family; subclasses, named Test…, fill in what stands first."""

    config: dict[str, Any]
    dtype = torch.bfloat16
    named = True
    """Whether config.json tells of the layers."""
    behind = ""
    """What the names of MTP layers begin with that are numbered on behind the trunk's."""

    def shapes(self) -> Shapes:
        """Every tensor of the files, by its published name."""
        raise NotImplementedError

    def tensors(self) -> Tensors:
        """The files' tensors."""
        return random_tensors(self.shapes(), self.dtype)

    def reference(self, directory: Path) -> Any:
        """Called with a text and a draft, the draft's logits: float32, no cache, from the book."""
        raise NotImplementedError

    # Of a head that is built to count on: what is silenced, and how a norm leaves things alone.
    silent = ("o_proj.weight", "down_proj.weight", "down_proj")
    no_norm = 1.0
    embedding = "model.embed_tokens.weight"
    output = "lm_head.weight"
    copies: tuple[str, ...] = ()
    join: str
    hidden_first = False

    def counting(self, source: str) -> Tensors:
        """A trunk that counts, and a head that does if it is given the right `source`.

        Embeddings are unit vectors that the layers leave alone; the output head names the next
        number. The head either passes on the token it is joined with, or moves the hidden state
        one number on; one taken from a position too early or too late counts wrong.
        """
        onward = torch.zeros(HIDDEN, HIDDEN)
        onward[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(1, 0)
        nothing = torch.zeros(HIDDEN, HIDDEN)
        halves = [torch.eye(HIDDEN), nothing] if source == "token" else [nothing, onward]
        tensors = self.tensors()
        for name, tensor in tensors.items():
            if name.endswith(self.silent):
                tensor.zero_()
            elif name == self.embedding or name.endswith(self.copies or ("\n",)):
                tensor.copy_(torch.eye(VOCAB, HIDDEN))
            elif name == self.join:
                tensor.copy_(torch.cat(halves[::-1] if self.hidden_first else halves, -1))
            elif "norm" in name:
                tensor.fill_(self.no_norm)
        for name in tensors:
            if name == self.output or name.endswith("shared_head.head.weight"):
                tensors[name].copy_(torch.eye(VOCAB, HIDDEN).roll(1, 0))
        return tensors

    # --- the proof ---

    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory):
        return write_checkpoint(
            tmp_path_factory.mktemp(type(self).__name__), self.config, self.tensors()
        )

    @pytest.fixture(scope="class")
    def loaded(self, directory):
        return load(directory)

    @pytest.fixture(scope="class")
    def expected(self, directory):
        """What transformers writes, one prompt at a time."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
        texts = [model.generate(torch.tensor([p]), **settings)[0].tolist() for p in PROMPTS]
        return [text[len(p) :] for p, text in zip(PROMPTS, texts, strict=True)]

    def test_all_tensors_are_taken_and_none_is_missing(self, directory, loaded):
        # Loading raises for the head's; these are the trunk's.
        _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        if self.behind:
            # Of these transformers passes over the numbers of the published sizes only.
            left = report["unexpected_keys"]
            report["unexpected_keys"] = {n for n in left if not n.startswith(self.behind)}
        assert not any(report.values())
        trunk, head, notes = loaded
        assert head is not None
        assert self.named == (notes == ())
        assert self.named or "config.json names no MTP layers" in notes[0]
        found = find_head(Checkpoint("tiny", directory), trunk, None)
        assert (found.depth, found.notes) == (1, notes)

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
        _, stats = decode(trunk, head, PROMPTS, 3, SAMPLED, 64, partial(watch_drafts, cycles))
        with torch.inference_mode():
            for _, known, drafted, logits in cycles:
                # A first token that is the whole prompt has no hidden state to draft from yet.
                if len(known) > 1:
                    expected = reference(known, drafted.tolist())
                    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        # Every way for a cycle to end leaves other caches behind.
        kept = torch.tensor([s.accepted_by_position[:3] for s in stats]).sum(0).tolist()
        assert len(cycles) > kept[0] > kept[2] > 0

    @pytest.mark.parametrize("source", ["token", "hidden"])
    def test_a_head_that_knows_the_text_has_every_draft_kept(self, tmp_path, source):
        write_checkpoint(tmp_path, self.config, self.counting(source))
        trunk, head, _ = load(tmp_path)
        prompts = [(3, 4, 5, 6, 7, 8), (9,), (1, 2, 3)]
        for depth in (1, 2, 3, 4, 5):
            texts, stats = decode(trunk, head, prompts, depth)
            for prompt, text, s in zip(prompts, texts, stats, strict=True):
                start = prompt[-1] + 1
                assert text == [n % VOCAB for n in range(start, start + 24)]
                assert len(s.drafted_by_position) == depth
                assert s.accepted_by_position == s.drafted_by_position

    def test_in_the_published_type_it_drafts_too(self, directory):
        trunk, head, _ = load(directory, torch.bfloat16)
        texts, stats = decode(trunk, head, PROMPTS[:1], 2, SAMPLED)
        assert len(texts[0]) == 24 and sum(stats[0].drafted_by_position) > 0
