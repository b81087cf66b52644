"""Incremental detokenising: text that is shown never changes afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What tokenizers write for bytes that are not yet, or never become, a character."""


class Detokenizer:
    """Turns a stream of token ids into pieces of text.

    A piece is held back while it ends in the middle of a character, which a later token may
    complete. Tokens are decoded together with a few before them, because many tokenizers write a
    token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # where decoding starts
        self._shown = 0  # tokens whose text is out

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now certain, perhaps none."""
        pieces = []
        for token in ids:
            self._ids.append(token)
            before = self._decode(self._ids[self._context : self._shown])
            after = self._decode(self._ids[self._context :])
            if after.endswith(UNFINISHED) or len(after) <= len(before):
                continue
            pieces.append(after[len(before) :])
            self._context, self._shown = self._shown, len(self._ids)
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back; an unfinished character comes out as U+FFFD."""
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        self._context = self._shown = len(self._ids)
        return after[len(before) :]
