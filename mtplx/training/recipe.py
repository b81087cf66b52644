"""`mtplx train`, start to end: text, trunk states, training, report, head. On the CPU.

Every stage leaves its result in the run's directory, whole or as far as it came, so a stopped run
goes on with `resume`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mtplx.drafters.attached import AttachedHead
from mtplx.errors import MtplxError
from mtplx.models.eagle3 import Eagle3Head, load_head
from mtplx.models.head_files import weights_file
from mtplx.models.linear import KernelLinear
from mtplx.training.kept import replacing, require_same
from mtplx.training.report import Acceptance, held_out_acceptance, write_card, write_report
from mtplx.training.selfplay import Author
from mtplx.training.states import TrunkStates
from mtplx.training.text import Conversations
from mtplx.training.trainer import (
    STEP_WEIGHTS,
    TrainConfig,
    Trainer,
    essentials,
    initial_head,
    stream_sizes,
)

if TYPE_CHECKING:
    from mtplx.llm import LLM
    from mtplx.models.trunk import Trunk

HELD_OUT_EVERY = 41
"""One conversation in this many is kept for the report. Odd, because the answers' samplers take
turns: so all of them are in it."""

ROUND = 512
"""Conversations written between two saves."""

RUN, TEXT, WRITTEN = "run.json", "text.npz", "written.npz"
"""Files of a run: what it was begun with, its whole text, and what is written of it so far."""

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
    start: Path | None = None,
    resume: bool = False,
    report: Report = lambda what, done, total: None,
) -> Trained:
    """Train a head for a model and write it, with its report, to `directory / "head"`.

    Args:
        llm: the model, on the CPU; its trunk stays as it is.
        directory: of this run: text, trunk states (eight bytes times the hidden size for every
            token), checkpoints.
        config: settings.
        text: `.npz` files of conversations that this trunk wrote.
        write: conversations for the trunk to write itself, beside those.
        start: directory of a head to begin from, which settles taps, width and vocabulary.
        resume: go on with the run in `directory`, whichever stage it came to. Its text need not
            be given again once it is whole.
        report: called as work gets done.
    Raises:
        MtplxError: nothing to train on, a run is already there, there is none to resume, or it
            was begun with another model, text or shape.
    """
    check_directory(directory, resume)
    trunk = llm.trunk
    if trunk.device.type != "cpu":
        raise MtplxError(f"training runs on the CPU; load the model there, not on {trunk.device}")
    if isinstance(trunk.model.get_output_embeddings(), KernelLinear):
        raise MtplxError("training needs the trunk's own weights: load the model without quantize")
    started = _started(start, trunk) if start else None
    if started:
        config = _like(started, config)
    _check(config, trunk.layers, trunk.vocab_size)
    conversations = _text(llm, directory, config, list(text), write, start, report)
    states = TrunkStates(directory, conversations, trunk, list(config.taps))
    states.compute(report)

    everything = np.arange(len(conversations))
    held_out = everything[everything % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    training = np.setdiff1d(everything, held_out)
    name = _verifier_name(llm)
    if started:
        head = started
    else:
        vocabulary = conversations.select(training).frequent_tokens(
            min(config.draft_vocab_size, trunk.vocab_size),
            trunk.vocab_size,
            list(llm.defaults.eos_token_ids),
        )
        sizes = stream_sizes(states, training)
        head = initial_head(trunk, config, torch.from_numpy(vocabulary), name, sizes)
    trainer = Trainer(head, states, training, config, directory)
    if (directory / "trainer.pt").exists():
        trainer.resume()
    trainer.run(report)
    exported = trainer.export(directory / "head")

    report("held-out report", 0, 1)
    acceptances = held_out_acceptance(exported, states, held_out, len(STEP_WEIGHTS))
    facts: dict[str, Any] = {
        "model": name,
        "conversations": len(conversations),
        "tokens": len(conversations.tokens),
        "answer_tokens": int((conversations.lengths - conversations.prompt_lengths).sum()),
        "held_out_conversations": len(held_out),
        "begun_from_a_head": started is not None,
        "epochs": round(trainer.epoch + trainer.batch / trainer.batches_per_epoch, 2),
        "steps": trainer.step,
        "minutes": round(trainer.elapsed / 60, 1),
        "parameters": sum(p.numel() for p in exported.parameters()),
        "config": asdict(config),
    }
    write_report(directory / "head", acceptances, trainer.history, facts)
    write_card(directory / "head", acceptances, facts)
    report("held-out report", 1, 1)
    return Trained(directory / "head", acceptances, trainer.elapsed / 60)


def _started(directory: Path, trunk: Trunk) -> Eagle3Head:
    """The head to begin from, ready to be trained."""
    head = load_head(directory, trunk.layers)
    # Its fit to the trunk is checked where the two are joined for use, so by the same code here.
    joined = AttachedHead(load_head(directory, trunk.layers), trunk)
    if joined.head.embed_tokens is not None:
        raise MtplxError(
            f"{directory}: the head has an embedding of its own (embed_tokens.weight); only heads "
            "that share their trunk's can be trained on"
        )
    head.embed_tokens = None
    return head.cast(torch.float32).train().requires_grad_(True)


def _like(head: Eagle3Head, config: TrainConfig) -> TrainConfig:
    """Settings for going on with a head: its own shape, and acceptance from the first step."""
    return replace(
        config,
        draft_vocab_size=head.config.draft_vocab_size,
        intermediate_size=head.config.layer.intermediate_size,
        taps=head.config.aux_layer_ids,
        acceptance_from=0.0,
    )


def _check(config: TrainConfig, layers: int, vocab_size: int) -> None:
    if config.minutes <= 0 or config.epochs <= 0 or config.rows < 1:
        raise MtplxError("minutes, epochs and rows must be above 0")
    if not all(0 <= tap <= layers for tap in config.taps):
        raise MtplxError(f"taps {config.taps} must lie between 0 and the trunk's {layers} layers")


def check_directory(directory: Path, resume: bool) -> None:
    """Refuse to begin where a run is, and to go on where none is; looks at names only.

    Raises:
        MtplxError: either of the two.
    """
    found = [name for name in (RUN, TEXT, "trainer.pt") if (directory / name).exists()]
    if found and not resume:
        raise MtplxError(
            f"{directory} holds a run already ({found[-1]}): add --resume, or choose another"
        )
    if resume and not found:
        raise MtplxError(f"{directory}: nothing to resume there; leave out --resume")


def _text(
    llm: LLM,
    directory: Path,
    config: TrainConfig,
    files: list[Path],
    write: int,
    start: Path | None,
    report: Report,
) -> Conversations:
    """The run's text: kept, or read and written now; and a note of what the run was begun with."""
    run, whole = directory / RUN, directory / TEXT
    parts = [Conversations.load(path) for path in files]
    begun = essentials(llm.trunk, config)
    begun["--from"] = start and hashlib.sha256(weights_file(start).read_bytes()).hexdigest()
    # Once the text is whole it need not be named again.
    if parts or not whole.exists():
        begun["--text"] = [part.hash() for part in parts]
    if write or not whole.exists():
        begun["--write"] = write
    if run.exists():
        require_same(json.loads(run.read_text()), begun, directory)
    if whole.exists():
        conversations = Conversations.load(whole)
        _check_text(conversations, llm)
        return conversations
    if sum(len(part) for part in parts) + write < HELD_OUT_EVERY:
        raise MtplxError(
            f"at least {HELD_OUT_EVERY} conversations are needed to train on; give --text FILE, "
            "or --write N to let the model write them"
        )
    for part in parts:
        _check_text(part, llm)
    author = _author(llm, config.seed, 0) if write else None
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(run) as fresh:
        fresh.write_text(json.dumps(begun))
    if author:
        parts.append(_write(llm, directory / WRITTEN, write, config.seed, report))
    conversations = Conversations.join(parts)
    conversations.save(whole)
    (directory / WRITTEN).unlink(missing_ok=True)
    return conversations


def _check_text(text: Conversations, llm: LLM) -> None:
    if int(text.tokens.max(initial=0)) >= llm.trunk.vocab_size:
        raise MtplxError("the text has token ids outside this model's vocabulary")
    longest = int(text.lengths.max(initial=0))
    if longest > llm.trunk.context:
        raise MtplxError(
            f"the text has a conversation of {longest} tokens, more than this model's context of "
            f"{llm.trunk.context}; cut it or leave it out"
        )


def _author(llm: LLM, seed: int, done: int) -> Author:
    # Each round has its own randomness, so a stop in between changes nothing.
    rng = random.Random(f"{seed} {done}")
    return Author(llm.trunk, llm.tokenizer, frozenset(llm.defaults.eos_token_ids), rng)


def _write(llm: LLM, path: Path, count: int, seed: int, report: Report) -> Conversations:
    """`count` conversations by the trunk, kept in `path` after every round."""
    parts = [Conversations.load(path)] if path.exists() else []
    while (done := sum(len(part) for part in parts)) < count:
        size = min(ROUND, count - done)

        def progress(what: str, i: int, n: int, done: int = done, size: int = size) -> None:
            report(what, done + size * i // n, count)

        parts.append(_author(llm, seed, done).write(size, progress))
        Conversations.join(parts).save(path)
    return Conversations.join(parts)


def _verifier_name(llm: LLM) -> str:
    """The model's published name, else that of its own directory or file, wherever it lies."""
    path = Path(llm.origin).expanduser()
    return path.resolve().name if llm.origin == llm.name and path.exists() else llm.origin
