"""The trunk's hidden states for a training text, computed once and kept on disk.

The trunk is frozen, so what the head is fed and what it should predict never change; reading them
back costs a fraction of running the trunk again each epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtplx.models.trunk import Trunk
from mtplx.training.kept import replacing
from mtplx.training.text import Conversations

TOKENS_PER_PASS = 4096


class TrunkStates:
    """Four bfloat16 vectors for each token: three tapped streams and the last normed state.

    Laid out as one array [N, 4 * H] in the order of the text's tokens. Interrupted work goes on
    where it stopped.
    """

    def __init__(self, directory: Path, text: Conversations, trunk: Trunk, taps: list[int]) -> None:
        self.text, self.trunk, self.taps = text, trunk, taps
        directory.mkdir(parents=True, exist_ok=True)
        self._marks = directory / "states.json"
        width = 4 * trunk.hidden_size
        shape = (len(text.tokens), width)
        # What the states depend on; other states in this directory are written over. Hashes of
        # bytes, not sums: a sum's last digit changes with the number of threads.
        self._identity = {
            "taps": taps,
            "shape": list(shape),
            "tokens": hashlib.sha256(text.tokens.tobytes()).hexdigest(),
            "trunk": _hash(trunk.embed.weight),
        }
        path = directory / "states.bf16"
        marks = json.loads(self._marks.read_text()) if self._marks.exists() else {}
        resume = path.exists() and marks.get("identity") == self._identity
        self.done: int = marks["done"] if resume else 0
        self._array: NDArray[np.int16] = np.memmap(
            path, dtype=np.int16, mode="r+" if resume else "w+", shape=shape
        )

    def compute(self, progress: Callable[[str, int, int], None]) -> None:
        """Run the trunk over every conversation that has no states yet."""
        text, trunk = self.text, self.trunk
        order = np.argsort(text.lengths, kind="stable")
        starts = text.starts
        while self.done < len(text):
            longest = int(text.lengths[order[min(self.done + 255, len(text) - 1)]])
            rows = order[self.done : self.done + max(1, TOKENS_PER_PASS // longest)]
            longest = int(text.lengths[rows].max())
            tokens = np.zeros((len(rows), longest), dtype=np.int64)
            for b, row in enumerate(rows):
                tokens[b, : text.lengths[row]] = text.tokens[starts[row] :][: text.lengths[row]]
            output = trunk.read(torch.from_numpy(tokens).to(trunk.device), self.taps)
            assert output.aux is not None
            states = torch.cat([output.aux, output.hidden], dim=-1).to("cpu", torch.bfloat16)
            raw = states.view(torch.int16).numpy()
            for b, row in enumerate(rows):
                length = text.lengths[row]
                self._array[starts[row] : starts[row] + length] = raw[b, :length]
            self.done += len(rows)
            with replacing(self._marks) as fresh:
                fresh.write_text(json.dumps({"identity": self._identity, "done": self.done}))
            progress("trunk states", self.done, len(text))

    def of(self, start: int, stop: int) -> Tensor:
        """States of tokens [start, stop) of the text, [stop - start, 4 * H] bfloat16."""
        return torch.from_numpy(np.array(self._array[start:stop])).view(torch.bfloat16)


def fingerprint(trunk: Trunk) -> str:
    """Tells one model from another, its fine-tunes included: some of every weight, hashed.

    In bfloat16, so that it is the same model in every type it is loaded in.
    """
    parts = [p.detach().flatten()[:256].to(torch.bfloat16) for p in trunk.model.parameters()]
    return _hash(torch.cat(parts))


def _hash(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
