"""Training text that the trunk writes itself.

A head is to predict what this trunk says, so this trunk's own text is the text to learn from.
Behind the chat template's user header the trunk writes a question, and then answers it. Two
variations widen what it talks about: questions that begin with given words, and tasks about a
document, put together from its own earlier answers, which teach the head long contexts.
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
from mtplx.training.text import Conversations

QUESTION = SamplerConfig(temperature=1.0, top_p=0.95)
ANSWERS = (
    SamplerConfig(temperature=0.0),
    SamplerConfig(temperature=0.6, top_p=0.95, top_k=20),
    SamplerConfig(temperature=0.8, top_p=0.95, top_k=20),
    SamplerConfig(temperature=1.0, top_p=0.95),
)
"""Answers are written at the temperatures people use, in turn."""

QUESTION_TOKENS, ANSWER_TOKENS = 64, 224
"""At most."""

OPENINGS = (
    "Translate the following sentence from German to English: ",
    "Translate into English: ",
    "Übersetze ins Englische: ",
    "Solve this word problem step by step. ",
    "A shop sells ",
    "If a train ",
    "How many ",
    "Calculate ",
    "What is ",
    "Who ",
    "When did ",
    "Where ",
    "Why ",
    "Explain how ",
    "Compare ",
    "Describe ",
    "Give me a list of ",
    "What are the main causes of ",
    "Is it true that ",
    "What would happen if ",
    "Write a short story about ",
    "Write an email to ",
    "Draft a blog post about ",
    "Imagine you are ",
    "Pretend to be ",
    "Write a Python function that ",
    "Fix the following code:\n",
    "Extract the following information from the text below: ",
    "Classify ",
    "Rewrite the following paragraph: ",
    "Suggest ",
    "Help me plan ",
    "Design ",
)

TASKS = (
    "Summarize the following text:\n\n{document}",
    "{document}\n\nSummarize the text above.",
    "Summarize this article: {document}",
    "{document}\n\nWhat are the key points?",
    "What is the text below about?\n\n{document}",
    "Rewrite the following text in simpler words: {document}",
    "Read the passages below and answer the question.\n\n{document}\n\nQuestion: {question}",
    "Answer the question using the context.\n\nContext: {document}\n\nQuestion: {question}",
    "Here are some search results:\n{document}\n\n{question}",
    "{document}\n\nGiven the text above, {question}",
)

DOCUMENT_TOKENS = (250, 500, 700, 900, 1100)


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
    batch: int = 64

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise MtplxError("the model has no chat template to write questions and answers behind")
        mark = "\x00"
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        self._header, _, self._footer = rendered.partition(mark)
        needed = len(self._prompt("")) + QUESTION_TOKENS + ANSWER_TOKENS
        if self.trunk.context < needed:
            raise MtplxError(
                f"the model's context of {self.trunk.context} tokens is too short to write in; a "
                f"question and its answer take {needed}"
            )

    def write(self, count: int, progress: Callable[[str, int, int], None]) -> Conversations:
        """`count` conversations: half free, a quarter opened, a quarter about documents."""
        about, opened = count // 4, count // 4
        free = count - opened - about
        done = 0

        def written(texts: int) -> None:
            nonlocal done
            done += texts
            progress("text", done, free + opened + count)

        openings = [""] * free + [self.rng.choice(OPENINGS) for _ in range(opened)]
        headed = [self._ids(self._header + opening) for opening in openings]
        continued = self._generate(headed, [QUESTION], QUESTION_TOKENS, written)
        questions = [o + self._text(t) for o, t in zip(openings, continued, strict=True)]
        prompts = [self._prompt(question) for question in questions]
        answers = self._generate(prompts, list(ANSWERS), ANSWER_TOKENS, written)
        texts = [text for text in map(self._text, answers) if text]
        tasks = [self._prompt(self._task(texts, questions)) for _ in range(about)]
        answers += self._generate(tasks, list(ANSWERS), ANSWER_TOKENS, written)
        prompts += tasks
        return Conversations(
            np.array(
                [t for p, a in zip(prompts, answers, strict=True) for t in [*p, *a]], np.int32
            ),
            np.array([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], np.int32),
            np.array([len(p) for p in prompts], np.int32),
        )

    def _task(self, texts: list[str], questions: list[str]) -> str:
        """About a document that leaves room for an answer; a bare question where none can."""
        task, question = self.rng.choice(TASKS), self.rng.choice(questions)
        frame = len(self._prompt(task.format(document="", question=question)))
        room = self.trunk.context - ANSWER_TOKENS - frame
        if not texts or room < 1:
            return question
        wanted = min(self.rng.choice(DOCUMENT_TOKENS), room)
        document = self.rng.choice(texts)
        while len(self._ids(document)) < wanted:
            document += "\n\n" + self.rng.choice(texts)
        document = self._text(self._ids(document)[:room])
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
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
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

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()
