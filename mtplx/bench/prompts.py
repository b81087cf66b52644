"""Spec-Bench's first turns, by category."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from mtplx.errors import MtplxError

FILE = Path(__file__).with_name("spec_bench.jsonl")
"""Half of it; spec_bench.md beside it says whose it is."""


@dataclass(frozen=True)
class Question:
    """A prompt of Spec-Bench.

    Attributes:
        id: its number there.
        category: one of 13, such as `writing`, `translation`, `rag`.
        text: the first turn.
    """

    id: int
    category: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A question as this model's token ids, with the chat template around it."""

    question: Question
    ids: tuple[int, ...]


def questions() -> list[Question]:
    """All of the file, in its order."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Question(row["question_id"], row["category"], row["turns"][0]) for row in rows]


def choose(per_category: int, encode: Callable[[str], list[int]], room: int) -> list[Prompt]:
    """The first prompts of each category that fit, one of each category after another.

    Args:
        per_category: how many of each.
        encode: makes token ids of a text.
        room: most tokens of a prompt; longer ones are passed over.
    Raises:
        MtplxError: none fits.
    """
    categories: dict[str, list[Prompt]] = {}
    for question in questions():
        chosen = categories.setdefault(question.category, [])
        if len(chosen) < per_category:
            ids = encode(question.text)
            if len(ids) <= room:
                chosen.append(Prompt(question, tuple(ids)))
    # Machines drift: no category should have the first minutes to itself.
    turns = zip_longest(*categories.values())
    prompts = [prompt for turn in turns for prompt in turn if prompt is not None]
    if not prompts:
        raise MtplxError(
            f"no prompt leaves room in the model's context, which has {max(room, 0)} tokens beside "
            "the answer: give fewer --max-tokens or another model"
        )
    return prompts
