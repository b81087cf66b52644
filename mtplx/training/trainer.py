"""Training an attached head beside a frozen trunk."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig

from mtplx.errors import MtplxError
from mtplx.models.eagle3 import Eagle3Config, Eagle3Head, save_head
from mtplx.models.trunk import Trunk
from mtplx.training import batches
from mtplx.training.kept import replacing, require_same
from mtplx.training.loss import Objective, draft_loss
from mtplx.training.rollout import rollout
from mtplx.training.states import TrunkStates, fingerprint

STEP_WEIGHTS = (1.0, 0.8, 0.64)
"""A later draft counts only when the earlier ones were kept."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training.

    Attributes:
        epochs: passes over the text.
        minutes: wall-clock budget; the schedule ends at whichever of the two comes first.
        rows: tokens to learn from in a batch.
        acceptance_from: share of the schedule after which acceptance itself is learnt, too; 0 for
            a head that knows something already.
        matrix_lr: Muon's rate for the matrices inside the head.
        other_lr: AdamW's rate for its output head and norms.
        weight_decay: of the matrices.
        noise: added to the tapped streams in training, in parts of their typical size.
        draft_vocab_size: tokens the head can draft.
        intermediate_size: width of the head's MLP.
        taps: trunk layers whose streams it is fed.
        seed: of the shuffling and the initial weights.
    """

    epochs: float = 6.0
    minutes: float = 110.0
    rows: int = 3072
    acceptance_from: float = 0.4
    matrix_lr: float = 2e-3
    other_lr: float = 6e-4
    weight_decay: float = 0.02
    noise: float = 0.1
    draft_vocab_size: int = 8192
    intermediate_size: int = 2560
    taps: tuple[int, int, int] = (8, 18, 30)
    seed: int = 0


def essentials(trunk: Trunk, config: TrainConfig) -> dict[str, object]:
    """What a training cannot change on its way, by the names its user knows."""
    return {
        "model": fingerprint(trunk),
        "--taps": list(config.taps),
        "--width": config.intermediate_size,
        "--draft-vocab": config.draft_vocab_size,
    }


def stream_sizes(states: TrunkStates, conversations: NDArray[np.int64]) -> Tensor:
    """Typical size of each channel of the tapped streams in these conversations, [3H]."""
    starts = states.text.starts[conversations[:256]]
    sample = torch.cat([states.of(i, i + 64) for i in starts])
    streams = sample[:, : 3 * states.trunk.hidden_size].float()
    return streams.pow(2).mean(0).sqrt().clamp_min(1e-3)


def initial_head(
    trunk: Trunk, config: TrainConfig, vocabulary: Tensor, name: str, sizes: Tensor
) -> Eagle3Head:
    """A head that knows the trunk's tokens and nothing else.

    Its output head starts as the trunk's rows of the draft vocabulary, scaled down so that it
    begins unsure rather than wrong.

    Args:
        trunk: what it is to stand beside.
        config: its shape.
        vocabulary: token ids it can draft, ascending [draft_vocab] int64.
        name: of the trunk.
        sizes: of the streams' channels, [3H], so that all weigh alike.
    """
    torch.manual_seed(config.seed)
    of = trunk.config
    layer = LlamaConfig(
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads,
        max_position_embeddings=of.max_position_embeddings,
        rms_norm_eps=of.rms_norm_eps,
        rope_parameters=dict(of.rope_parameters),
        tie_word_embeddings=False,
    )
    head = Eagle3Head(
        Eagle3Config(
            layer=layer,
            draft_vocab_size=len(vocabulary),
            aux_layer_ids=config.taps,
            norm_before_residual=True,
            verifier_name=name,
            verifier_architectures=tuple(of.architectures or ()),
        )
    )
    head.set_vocabulary(vocabulary)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        head.fc.weight.div_(sizes)
        output = trunk.model.get_output_embeddings().weight[vocabulary].float()
        head.lm_head.weight.copy_(output / output.std() * of.hidden_size**-0.5)
    return head


class Trainer:
    """One training, resumable from the files in its directory.

    The head in training sees each stream channel divided by its typical size, so that one
    learning rate suits all; those sizes are taken out of `fc` here and folded in by `export`.
    """

    def __init__(
        self,
        head: Eagle3Head,
        states: TrunkStates,
        train: NDArray[np.int64],
        config: TrainConfig,
        directory: Path,
    ) -> None:
        self.head, self.states, self.config, self.directory = head, states, config, directory
        self.train_rows = train
        self.scale = stream_sizes(states, train)
        if head.config.norm_before_fc or head.config.fc_norm:
            # A norm of its own weighs the channels, and no scale folds through it.
            self.scale = torch.ones_like(self.scale)
        with torch.no_grad():
            head.fc.weight.mul_(self.scale)
        self.low = copy.deepcopy(head).cast(torch.bfloat16)
        # In the type of the head's low copy and of the states, whatever the trunk runs in.
        self.embedding: Tensor = states.trunk.embed.weight.to(torch.bfloat16)
        output: Tensor = states.trunk.model.get_output_embeddings().weight
        self.targets_of = output[head.draft_ids].to(torch.bfloat16)
        matrices = [
            p for n, p in head.named_parameters() if p.ndim == 2 and not n.startswith("lm_head")
        ]
        inner = {id(p) for p in matrices}
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=config.matrix_lr,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [p for p in head.parameters() if id(p) not in inner],
                lr=config.other_lr,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self.rates = (config.matrix_lr, config.other_lr)
        self.epoch, self.batch, self.step, self.elapsed = 0, 0, 0, 0.0
        self.batches_per_epoch = 1
        self.history: list[dict[str, float]] = []

    @property
    def _state_file(self) -> Path:
        return self.directory / "trainer.pt"

    def save(self) -> None:
        """Everything that `resume` needs."""
        state = {
            "head": self.head.state_dict(),
            "scale": self.scale,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "at": (self.epoch, self.batch, self.step, self.elapsed),
            "history": self.history,
            "config": asdict(self.config),
            "identity": self._identity(),
        }
        with replacing(self._state_file) as fresh:
            torch.save(state, fresh)

    def _identity(self) -> dict[str, object]:
        states = self.states
        return essentials(states.trunk, self.config) | {"text": states.text.hash()}

    def resume(self) -> None:
        """Go on from the last `save`.

        Raises:
            MtplxError: nothing to resume from, or it was of another model, text or shape.
        """
        if not self._state_file.exists():
            raise MtplxError(f"{self._state_file}: nothing to resume from; leave out --resume")
        state = torch.load(self._state_file, weights_only=True)
        require_same(state.get("identity", {}), self._identity(), self.directory)
        self.head.load_state_dict(state["head"])
        self.scale = state["scale"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.epoch, self.batch, self.step, self.elapsed = state["at"]
        self.history = state["history"]

    def progress(self) -> float:
        """Share of the schedule behind us, 0 to 1."""
        done = (self.epoch + self.batch / self.batches_per_epoch) / self.config.epochs
        return min(1.0, max(done, self.elapsed / 60 / self.config.minutes))

    def run(self, report: Callable[[str, int, int], None], save_every: float = 240.0) -> None:
        """Train to the end of the schedule."""
        text = self.states.text
        seed = self.config.seed
        saved = time.monotonic()
        clock = saved
        while True:
            order = batches.plan(
                text.lengths[self.train_rows],
                text.prompt_lengths[self.train_rows],
                self.config.rows,
                np.random.default_rng(seed + self.epoch),
            )
            self.batches_per_epoch = len(order)
            for group in order[self.batch :]:
                done = self.progress()
                if done >= 1.0:
                    self.save()
                    return
                loss, accepted = self._learn(self.train_rows[group], done)
                self.batch += 1
                self.step += 1
                now = time.monotonic()
                self.elapsed += now - clock
                clock = now
                self.history.append(
                    {"step": self.step, "minutes": self.elapsed / 60, "loss": loss} | accepted
                )
                report("training", int(1000 * done), 1000)
                if now - saved > save_every:
                    self.save()
                    saved = now
            self.epoch += 1
            self.batch = 0

    def _objective(self, done: float) -> Objective:
        """Distribution first; acceptance at the temperatures people use after that."""
        if done < self.config.acceptance_from:
            return Objective(1.0, 0.0, 0.6)
        return Objective(0.3, 1.0, (0.6, 0.6, 1.0)[self.step % 3])

    def _learn(self, which: NDArray[np.int64], done: float) -> tuple[float, dict[str, float]]:
        """One step; its loss, and the acceptance at the positions where it was computed."""
        rate = min(1.0, (self.step + 1) / 50) * min(1.0, max(0.02, (1 - done) / 0.5))
        for optimizer, base in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        rng = np.random.default_rng([self.config.seed, self.step])
        torch.manual_seed(self.config.seed + self.step)
        batch = batches.make(self.states, which, len(STEP_WEIGHTS), rng)
        aim = self._objective(done)
        logits = (batch.targets @ self.targets_of.T).float()
        p = logits.softmax(-1).to(torch.bfloat16)
        warm = (logits / aim.temperature).softmax(-1).to(torch.bfloat16) if aim.acceptance else None
        del logits
        # Forward and backward run on a bfloat16 copy; the optimizer steps on float32.
        for low, high in zip(self.low.parameters(), self.head.parameters(), strict=True):
            low.data.copy_(high.data)
            low.grad = None
        total = torch.zeros(())
        accepted: dict[str, float] = {}
        steps = rollout(
            self.low, self.embedding, batch, len(STEP_WEIGHTS), self.scale, self.config.noise
        )
        for i, (normed, counted) in enumerate(steps):
            here = slice(i, i + counted.shape[1])
            loss, kept = draft_loss(
                normed,
                self.low.lm_head.weight,
                p[:, here][counted],
                None if warm is None else warm[:, here][counted],
                aim,
            )
            rows = max(1, len(normed))
            total = total + STEP_WEIGHTS[i] * loss / rows
            if aim.acceptance and len(normed):
                accepted[f"accepted_{i + 1}"] = kept.item() / rows
        torch.autograd.backward(total)
        for low, high in zip(self.low.parameters(), self.head.parameters(), strict=True):
            high.grad = None if low.grad is None else low.grad.float()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return total.item(), accepted

    def export(self, directory: Path) -> Eagle3Head:
        """Write the head as it is used: on streams as the trunk has them."""
        head = Eagle3Head(self.head.config)
        head.load_state_dict(self.head.state_dict())
        with torch.no_grad():
            head.fc.weight.div_(self.scale)
        # What is returned is what is written, to the last bit.
        head.cast(torch.bfloat16)
        save_head(head, directory)
        (directory / "history.json").write_text(json.dumps(self.history))
        return head
