"""`mtplx train`, start to end: text, trunk states, training, report, head.

Every stage leaves its result in the run's directory and is skipped when it is there, so a stopped
training goes on with `resume`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mtplx.errors import MtplxError
from mtplx.training.report import Acceptance, held_out_acceptance, write_report
from mtplx.training.selfplay import Author
from mtplx.training.states import TrunkStates
from mtplx.training.text import Conversations
from mtplx.training.trainer import STEP_WEIGHTS, TrainConfig, Trainer, initial_head

if TYPE_CHECKING:
    from mtplx.llm import LLM

HELD_OUT_EVERY = 40
"""One conversation in this many is kept for the report."""

Report = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        head: directory of the head, in the `speculators` format.
        held_out: expected acceptance on conversations that were not trained on.
        minutes: spent on training proper.
    """

    head: Path
    held_out: list[Acceptance]
    minutes: float


def train_head(
    llm: LLM,
    directory: Path,
    config: TrainConfig,
    *,
    text: Sequence[Path] = (),
    write: int = 0,
    resume: bool = False,
    report: Report = lambda what, done, total: None,
) -> Trained:
    """Train a head for a model and write it, with its report, to `directory / "head"`.

    Args:
        llm: the model; its trunk stays as it is.
        directory: of this run: text, trunk states (eight bytes times the hidden size for every
            token), checkpoints.
        config: settings.
        text: `.npz` files of conversations that this trunk wrote.
        write: conversations for the trunk to write itself, beside those.
        resume: go on with the run in `directory`.
        report: called as work gets done.
    Raises:
        MtplxError: nothing to train on, a run is already there, or there is none to resume.
    """
    if (directory / "trainer.pt").exists() and not resume:
        raise MtplxError(f"{directory} holds a training already; add --resume, or choose another")
    directory.mkdir(parents=True, exist_ok=True)
    trunk = llm.trunk
    _check(config, trunk.layers, trunk.vocab_size)
    conversations = _text(llm, directory, list(text), write, config.seed, report)
    if int(conversations.tokens.max()) >= trunk.vocab_size:
        raise MtplxError("the text has token ids outside this model's vocabulary")
    states = TrunkStates(directory, conversations, trunk, list(config.taps))
    states.compute(report)

    everything = np.arange(len(conversations))
    held_out = everything[everything % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    training = np.setdiff1d(everything, held_out)
    vocabulary = conversations.select(training).frequent_tokens(
        min(config.draft_vocab_size, trunk.vocab_size),
        trunk.vocab_size,
        list(llm.defaults.eos_token_ids),
    )
    head = initial_head(trunk, config, torch.from_numpy(vocabulary), llm.origin)
    trainer = Trainer(head, states, training, config, directory)
    if resume:
        trainer.resume()
    trainer.run(report)
    exported = trainer.export(directory / "head")

    report("held-out report", 0, 1)
    acceptances = held_out_acceptance(exported, states, held_out, len(STEP_WEIGHTS))
    facts: dict[str, Any] = {
        "model": llm.name,
        "conversations": len(conversations),
        "tokens": len(conversations.tokens),
        "answer_tokens": int((conversations.lengths - conversations.prompt_lengths).sum()),
        "held_out_conversations": len(held_out),
        "epochs": round(trainer.epoch + trainer.batch / trainer.batches_per_epoch, 2),
        "steps": trainer.step,
        "minutes": round(trainer.elapsed / 60, 1),
        "parameters": sum(p.numel() for p in exported.parameters()),
        "config": asdict(config),
    }
    write_report(directory / "head", acceptances, trainer.history, facts)
    report("held-out report", 1, 1)
    return Trained(directory / "head", acceptances, trainer.elapsed / 60)


def _check(config: TrainConfig, layers: int, vocab_size: int) -> None:
    if config.minutes <= 0 or config.epochs <= 0 or config.rows < 1:
        raise MtplxError("minutes, epochs and rows must be above 0")
    if not all(0 <= tap <= layers for tap in config.taps):
        raise MtplxError(f"taps {config.taps} must lie between 0 and the trunk's {layers} layers")


def _text(
    llm: LLM, directory: Path, files: list[Path], write: int, seed: int, report: Report
) -> Conversations:
    kept = directory / "text.npz"
    if kept.exists():
        return Conversations.load(kept)
    parts = [Conversations.load(path) for path in files]
    if write:
        stop_ids = frozenset(llm.defaults.eos_token_ids)
        author = Author(llm.trunk, llm.tokenizer, stop_ids, random.Random(seed))
        parts.append(author.write(write, report))
    if not parts or sum(len(part) for part in parts) < HELD_OUT_EVERY:
        raise MtplxError(
            f"at least {HELD_OUT_EVERY} conversations are needed to train on; give --text FILE, "
            "or --write N to let the model write them"
        )
    conversations = Conversations.join(parts)
    conversations.save(kept)
    return conversations
