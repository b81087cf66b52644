"""Conversations as training text: token ids, where each ends, where what is learnt starts."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtplx.errors import MtplxError
from mtplx.training.kept import replacing

_UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error)
"""What NumPy raises for a file that is no `.npz`, is cut off or damaged, or lacks an array."""


@dataclass(frozen=True)
class Conversations:
    """Token ids of many conversations one after another.

    Attributes:
        tokens: all ids, [N] int32.
        lengths: tokens of each conversation, [C] int32.
        prompt_lengths: how many of them come before the answer, or before the question where the
            trunk wrote that as well: what is not to be learnt, [C] int32.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    prompt_lengths: NDArray[np.int32]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index in `tokens` of each conversation's first token, [C]."""
        return np.concatenate([[0], np.cumsum(self.lengths[:-1], dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def load(cls, path: Path) -> Conversations:
        """Read an `.npz` with arrays `tokens`, `lengths` and `prompt_lengths`.

        Raises:
            MtplxError: not such a file, its lengths do not add up, or an id is negative.
        """
        try:
            with np.load(path) as file:
                found = cls(
                    tokens=file["tokens"].astype(np.int32),
                    lengths=file["lengths"].astype(np.int32),
                    prompt_lengths=file["prompt_lengths"].astype(np.int32),
                )
        except _UNREADABLE as error:
            reason = " ".join(str(error).split())
            raise MtplxError(
                f"{path}: not training text ({reason}); expected an .npz with tokens, lengths "
                "and prompt_lengths"
            ) from None
        if any(a.ndim != 1 for a in (found.tokens, found.lengths, found.prompt_lengths)):
            raise MtplxError(f"{path}: tokens, lengths and prompt_lengths must be flat arrays")
        if found.lengths.sum() != len(found.tokens) or len(found.lengths) != len(
            found.prompt_lengths
        ):
            raise MtplxError(f"{path}: lengths do not add up to the tokens")
        if (found.prompt_lengths < 1).any() or (found.prompt_lengths > found.lengths).any():
            raise MtplxError(f"{path}: a prompt is empty or longer than its conversation")
        if (found.tokens < 0).any():
            raise MtplxError(f"{path}: holds negative token ids")
        return found

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        # An open file: given a path, NumPy would append .npz to it.
        with replacing(path) as fresh, fresh.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=self.tokens.astype(np.uint32),
                lengths=self.lengths,
                prompt_lengths=self.prompt_lengths,
            )

    def hash(self) -> str:
        """SHA-256 of all that is in it."""
        arrays = (self.tokens, self.lengths, self.prompt_lengths)
        return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()

    @classmethod
    def join(cls, parts: list[Conversations]) -> Conversations:
        """One after another."""
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.lengths for p in parts]),
            np.concatenate([p.prompt_lengths for p in parts]),
        )

    def select(self, which: NDArray[np.int64]) -> Conversations:
        """These conversations only, in this order."""
        starts = self.starts
        pieces = [self.tokens[starts[i] : starts[i] + self.lengths[i]] for i in which]
        return Conversations(
            np.concatenate(pieces) if pieces else self.tokens[:0],
            self.lengths[which],
            self.prompt_lengths[which],
        )

    def frequent_tokens(self, count: int, vocab_size: int, always: list[int]) -> NDArray[np.int64]:
        """The `count` most frequent answer tokens, ascending; `always` are among them."""
        answer = np.ones(len(self.tokens), dtype=bool)
        for start, prompt in zip(self.starts, self.prompt_lengths, strict=True):
            answer[start : start + prompt] = False
        counts = np.bincount(self.tokens[answer], minlength=vocab_size).astype(np.float64)
        counts[always] = np.inf
        # Stable, so that ties go to the lower id and the choice can be repeated.
        return np.sort(np.argsort(-counts, kind="stable")[:count])
