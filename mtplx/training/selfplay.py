"""Training text that the trunk writes itself.

A head is to predict what this trunk says, so this trunk's own text is the text to learn from.
Behind the chat template's user header the trunk writes a question, and then answers it. Two
variations widen what it talks about: questions that begin with given words (`openings`), and tasks
about documents, which it writes without the template and which teach the head long contexts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig
from mtplx.training import openings
from mtplx.training.text import Conversations

FREELY = SamplerConfig(temperature=1.0, top_p=0.95, top_k=200)
"""What is not an answer: variety is what it is for."""

ANSWERS = (
    SamplerConfig(temperature=0.0),
    SamplerConfig(temperature=0.6, top_p=0.95, top_k=20),
    SamplerConfig(temperature=0.8, top_p=0.95, top_k=20),
    SamplerConfig(temperature=1.0, top_p=0.95, top_k=200),
)
"""Answers are written at the temperatures people use, in turn."""

QUESTION_TOKENS, ANSWER_TOKENS, DOCUMENT_TOKENS = 64, 224, 700
"""At most."""

EXCERPT_TOKENS = (250, 500, 700, 900, 1100)
"""What a task gives of the documents it is about, one of these."""

TASKS_PER_DOCUMENT = 4

BATCH, BATCH_TOKENS = 192, 65536
"""Texts written side by side, and what their caches may hold together; at most."""


@dataclass
class Author:
    """The trunk as a writer of questions and answers.

    Attributes:
        trunk: the model.
        tokenizer: its tokenizer, with a chat template.
        stop_ids: what ends an answer.
        rng: picks openings, tasks and documents.
    """

    trunk: Trunk
    tokenizer: Any
    stop_ids: frozenset[int]
    rng: random.Random

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise MtplxError("the model has no chat template to write questions and answers behind")
        mark = "\x00"
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        self._header, _, self._footer = rendered.partition(mark)
        self._start: str = self.tokenizer.bos_token or self.tokenizer.eos_token or ""
        needed = len(self._prompt("")) + QUESTION_TOKENS + ANSWER_TOKENS
        if self.trunk.context < needed:
            raise MtplxError(
                f"the model's context of {self.trunk.context} tokens is too short to write in; a "
                f"question and its answer take {needed}"
            )

    def write(self, count: int, progress: Callable[[str, int, int], None]) -> Conversations:
        """`count` conversations: an eighth free, half opened, the rest about documents."""
        about, opened = 3 * count // 8, count // 2
        free = count - opened - about
        documents = -(-about // TASKS_PER_DOCUMENT)
        done = 0

        def written(texts: int) -> None:
            nonlocal done
            done += texts
            progress("text", done, free + opened + documents + count)

        begun = [""] * free + [openings.request(self.rng) for _ in range(opened)]
        questions = self._continued(begun, self._header, QUESTION_TOKENS, written)
        headlines = [openings.document(self.rng) for _ in range(documents)]
        texts = self._continued(headlines, self._start, DOCUMENT_TOKENS, written)
        asked = questions + [self._task(texts, questions) for _ in range(about)]
        prompts = [self._prompt(content) for content in asked]
        answers = self._generate(prompts, list(ANSWERS), ANSWER_TOKENS, written)
        return Conversations(
            np.array(
                [t for p, a in zip(prompts, answers, strict=True) for t in [*p, *a]], np.int32
            ),
            np.array([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], np.int32),
            # Questions and documents are the trunk's own words as well: all to be learnt.
            np.full(len(prompts), len(self._ids(self._header)), np.int32),
        )

    def _continued(
        self, begun: list[str], behind: str, tokens: int, written: Callable[[int], None]
    ) -> list[str]:
        prompts = [self._ids(behind + opening) for opening in begun]
        rest = self._generate(prompts, [FREELY], tokens, written)
        return [(o + self._decoded(t)).strip() for o, t in zip(begun, rest, strict=True)]

    def _task(self, texts: list[str], questions: list[str]) -> str:
        """About documents that leave room for an answer; a bare question where none can."""
        task, question = self.rng.choice(openings.TASKS), self.rng.choice(questions)
        frame = len(self._prompt(task.format(document="", question=question)))
        room = self.trunk.context - ANSWER_TOKENS - frame
        if room < 1:
            return question
        wanted = min(self.rng.choice(EXCERPT_TOKENS), room)
        document = self.rng.choice(texts)
        while len(self._ids(document)) < wanted:
            document += "\n\n" + self.rng.choice(texts)
        document = self._decoded(self._ids(document)[:wanted])
        return task.format(document=document, question=question)

    def _generate(
        self,
        prompts: list[list[int]],
        samplings: list[SamplerConfig],
        max_tokens: int,
        written: Callable[[int], None],
    ) -> list[list[int]]:
        # Alike in length, so that a batch's slots are filled alike.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts: list[list[int]] = [[] for _ in prompts]
        while order:
            # The last is the longest, and the batch's size is settled by it.
            longest = len(prompts[order[-1]]) + max_tokens
            fitting = max(1, min(BATCH, BATCH_TOKENS // longest))
            rows, order = order[-fitting:], order[:-fitting]
            requests = [
                Request(
                    tuple(prompts[i]),
                    samplings[i % len(samplings)],
                    self.rng.getrandbits(64),
                    max_tokens,
                    0,
                    self.stop_ids,
                )
                for i in rows
            ]
            for bursts in Batch(self.trunk, None, requests).run():
                for burst in bursts:
                    texts[rows[burst.index]] += burst.tokens
            written(len(rows))
        return texts

    def _prompt(self, content: str) -> list[int]:
        return self._ids(self._header + content + self._footer)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
