"""How good a head is, on text it was not trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtplx.models.eagle3 import Eagle3Head
from mtplx.sampling import SamplerConfig
from mtplx.shaping import Shaper
from mtplx.training import batches
from mtplx.training.rollout import rollout
from mtplx.training.states import TrunkStates

SAMPLERS = {
    "temperature 0.6, top-p 0.95, top-k 20": SamplerConfig(temperature=0.6, top_p=0.95, top_k=20),
    "temperature 1.0": SamplerConfig(),
}
ROWS_PER_CHUNK = 256


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance under one sampler.

    Attributes:
        sampler: in words.
        by_position: mean of sum_x min(p, q) at draft positions 1, 2, ...; each on the true text.
        rows: how many places of the text it was measured at.
    """

    sampler: str
    by_position: tuple[float, ...]
    rows: int

    @property
    def tokens_per_cycle(self) -> float:
        """Expected at this many draft positions, if acceptances were independent."""
        return 1.0 + float(np.cumprod(self.by_position).sum())


@torch.inference_mode()
def held_out_acceptance(
    head: Eagle3Head, states: TrunkStates, which: NDArray[np.int64], steps: int, rows: int = 2048
) -> list[Acceptance]:
    """Measure a head as exported, in the trunk's own type, on these conversations."""
    trunk = states.trunk
    head = head.cast(trunk.dtype)
    ones = torch.ones(3 * trunk.hidden_size)
    output = trunk.model.get_output_embeddings()
    kept = {name: np.zeros(steps) for name in SAMPLERS}
    seen = np.zeros(steps)
    for batch in batches.epoch(states, which, rows, steps, seed=0):
        for step, (normed, counted) in enumerate(
            rollout(head, trunk.embed.weight, batch, steps, ones)
        ):
            targets = batch.targets[:, step : step + counted.shape[1]][counted]
            seen[step] += len(normed)
            for i in range(0, len(normed), ROWS_PER_CHUNK):
                chunk = slice(i, i + ROWS_PER_CHUNK)
                p_logits = output(targets[chunk].to(trunk.dtype))
                q_logits = head.lm_head(normed[chunk])
                for name, config in SAMPLERS.items():
                    kept[name][step] += _acceptance(p_logits, q_logits, head.draft_ids, config)
    return [
        Acceptance(name, tuple((kept[name] / np.maximum(seen, 1)).tolist()), int(seen[0]))
        for name in SAMPLERS
    ]


def _acceptance(p_logits: Tensor, q_logits: Tensor, ids: Tensor, config: SamplerConfig) -> float:
    shaper = Shaper([config], p_logits.shape[-1], p_logits.device)
    q = shaper(q_logits, None, ids)
    drafted = ids if q.ids is None else q.ids
    p = shaper(p_logits, None).at(drafted.expand(q.p.shape))
    return float(torch.minimum(p, q.p).sum())


def write_report(
    directory: Path,
    acceptances: list[Acceptance],
    history: list[dict[str, float]],
    facts: dict[str, Any],
) -> None:
    """`report.json`, and `training.png` where matplotlib is installed."""
    report = {
        "held_out": [
            {
                "sampler": a.sampler,
                "acceptance_by_position": [round(x, 4) for x in a.by_position],
                "expected_tokens_per_cycle": round(a.tokens_per_cycle, 3),
                "rows": a.rows,
            }
            for a in acceptances
        ],
        **facts,
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _plot(directory / "training.png", history)


def write_card(directory: Path, acceptances: list[Acceptance], facts: dict[str, Any]) -> None:
    """`README.md`: what the head is, what it was trained on, how good it is, how to use it.

    Args:
        directory: of the head.
        acceptances: on held-out text.
        facts: those of `report.json`.
    """
    model, positions = facts["model"], range(len(acceptances[0].by_position))
    table = [
        ["sampler", *(f"position {i + 1}" for i in positions), "tokens per cycle"],
        ["---", *("---:" for _ in positions), "---:"],
    ]
    for a in acceptances:
        table.append([a.sampler, *(f"{x:.3f}" for x in a.by_position), f"{a.tokens_per_cycle:.2f}"])
    rows = "\n".join(f"| {' | '.join(row)} |" for row in table)
    options = json.dumps(
        {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": len(positions)}
    )
    (directory / "README.md").write_text(
        f"""# EAGLE-3 head for {model}

Drafts tokens for {model}, which verifies them: the text stays the model's own, and takes fewer
passes of it. {facts["parameters"] / 1e6:.1f} million parameters, in the `speculators` format.

## Training

By self-distillation with mtplx on {facts["conversations"]} conversations
({facts["tokens"]} tokens, {facts["answer_tokens"]} of them to learn from) that the model wrote,
of which {facts["held_out_conversations"]} were kept for the table below. {facts["epochs"]} epochs,
{facts["steps"]} steps, {facts["minutes"]} minutes on the CPU. `report.json` has all settings,
`history.json` the loss of every step.

## Acceptance

Probability that a drafted token is kept, on held-out text, given that the drafts before it were:

{rows}

The last column is what these make if acceptances were independent; the token that the model adds
to every draft is counted.

## Use

HEAD is this directory, MODEL the model's name or directory.

With mtplx:

```
mtplx generate "Hello" --model MODEL --head HEAD
```

With vLLM:

```
vllm serve MODEL --speculative-config '{options}'
```
""",
        encoding="utf-8",
    )


def _plot(path: Path, history: list[dict[str, float]]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not history:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width = max(1, len(history) // 100)
    minutes = _smooth([h["minutes"] for h in history], width)
    axes.plot(minutes, _smooth([h["loss"] for h in history], width))
    axes.set_xlabel("minutes")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)
    names = sorted({name for h in history for name in h if name.startswith("accepted_")})
    second = axes.twinx() if names else None
    for i, name in enumerate(names):
        assert second is not None
        # Acceptance is computed in the schedule's later part only.
        measured = [h for h in history if h.get(name)]
        at, kept = (_smooth([h[key] for h in measured], width) for key in ("minutes", name))
        second.plot(at, kept, color=f"C{i + 1}", label=f"draft position {i + 1}")
    if second is not None:
        second.set_ylabel("acceptance in training")
        second.set_ylim(0, 1)
        second.legend()
    figure.savefig(path, dpi=120)


def _smooth(values: list[float], width: int) -> NDArray[np.float64]:
    count = len(values) // width * width
    smooth: NDArray[np.float64] = np.asarray(values[:count]).reshape(-1, width).mean(1)
    return smooth
