"""The engines as the benchmark runs them: this one, transformers, llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from mtplx.bench import traffic
from mtplx.bench.machine import threads_words
from mtplx.bench.run import Decoded, Engine, Task
from mtplx.bench.split import Split, Watch
from mtplx.llm import LLM, Depth
from mtplx.models.checkpoint import Checkpoint, load_model, reported
from mtplx.sampling import Verifier


class OwnEngine:
    """This engine at one depth, or at as many as pay."""

    def __init__(self, llm: LLM, depth: Depth, verifier: Verifier, words: str) -> None:
        """
        Args:
            llm: loaded; engines share it.
            depth: tokens drafted per cycle; of `auto`, and of others than a head, the bytes of a
                cycle are the trunk's alone.
            verifier: the rule.
            words: on how it runs.
        """
        self.llm, self.verifier = llm, verifier
        self._asked = depth
        self.name = "mtplx, auto" if depth == "auto" else "mtplx"
        self.depth: int | None = None if depth == "auto" else depth
        self.settings = words
        trunk = llm.trunk
        self._weights = traffic.model_bytes(trunk.model)
        if self.depth and llm.head is not None and llm.drafter is llm.head:
            self._weights += self.depth * traffic.head_bytes(llm.head)
        # The kernels' cache is in bfloat16 whatever they compute in.
        size = 2 if trunk.dtype != torch.float32 or hasattr(trunk, "fused") else 4
        self._token = traffic.token_bytes(trunk.config, size)

    def generate(self, task: Task) -> Decoded:
        stats = self._run(task)
        return Decoded(
            tokens=stats.tokens,
            timed_tokens=stats.tokens,
            cycles=stats.cycles,
            decode_seconds=stats.decode_seconds,
            prefill_seconds=stats.prefill_seconds,
            decided_by_position=tuple(stats.decided_by_position),
            accepted_by_position=tuple(stats.accepted_by_position),
        )

    def cycle_bytes(self, context: float) -> float:
        return self._weights + context * self._token

    def split(self, tasks: Sequence[Task]) -> Split:
        """Where the cycles of these tasks spend their time."""
        watch = Watch()
        with watch.on(self.llm.trunk):
            for task in tasks:
                self._run(task)
        return watch.split(self.depth or 0)

    def _run(self, task: Task) -> Any:
        # Reading the prompt is measured too.
        self.llm.forget()
        result = self.llm.generate(
            list(task.prompt),
            max_tokens=task.max_tokens,
            depth=self._asked,
            sampling=task.sampling,
            verifier=self.verifier,
            stop_token_ids=sorted(task.stop_ids),
        )
        return result.stats


class TransformersEngine:
    """`generate` of transformers, plain: one token a pass."""

    depth: int | None = None

    def __init__(self, way: str, checkpoint: Checkpoint, directory: Path) -> None:
        """
        Args:
            way: `bf16`, the weights dequantised to it; or `gguf`, as transformers itself loads a
                file.
            checkpoint: of the model.
            directory: an empty one of its own.
        Raises:
            MtplxError: transformers cannot load it.
        """
        self.name = f"transformers:{way}"
        model: Any
        if way == "gguf":
            model = _load_as_transformers_does(checkpoint, directory)
        else:
            model = load_model(checkpoint, torch.bfloat16, torch.device("cpu"))
        self.model = model.eval()
        kind = str(self.model.dtype).removeprefix("torch.")
        attention = self.model.config._attn_implementation
        threads = threads_words(torch.get_num_threads())
        self.settings = f"generate, {kind}, {attention} attention, {threads}"
        self._weights = traffic.model_bytes(self.model)
        size = self.model.dtype.itemsize
        self._token = traffic.token_bytes(self.model.config.get_text_config(), size)

    @torch.inference_mode()
    def generate(self, task: Task) -> Decoded:
        from transformers import GenerationConfig

        s = task.sampling
        settings: dict[str, Any] = {"do_sample": s.temperature > 0}
        if s.temperature > 0:
            settings |= {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        config = GenerationConfig(
            max_new_tokens=task.max_tokens,
            eos_token_id=sorted(task.stop_ids) or None,
            pad_token_id=0,
            **settings,
        )
        # What the model's own configuration asks for would be taken where ours says nothing.
        self.model.generation_config = GenerationConfig()
        torch.manual_seed((s.seed or 0) % 2**63)
        ids = torch.tensor([task.prompt])
        clock = _Clock()
        started = time.perf_counter()
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock
        )
        first, last = clock.times[0], clock.times[-1]
        timed = len(clock.times) - 1
        return Decoded(len(clock.times), timed, timed, last - first, first - started)

    def cycle_bytes(self, context: float) -> float:
        return self._weights + context * self._token


def _load_as_transformers_does(checkpoint: Checkpoint, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # Beside its neighbours it might take them for parts of the model.
    (directory / checkpoint.path.name).symlink_to(checkpoint.path.resolve())
    # One of its progress bars cannot be told to be quiet.
    with reported(checkpoint), redirect_stderr(StringIO()):
        return AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=checkpoint.path.name, local_files_only=True
        )


class _Clock:
    """A streamer of transformers that keeps the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def make(
    names: Sequence[str], checkpoint: Checkpoint, threads: int, context: int, directory: Path
) -> list[Engine]:
    """The peers of these names, as `library:way`.

    Args:
        names: from `peers.expand`.
        checkpoint: of the model.
        threads: to compute with.
        context: most tokens of a prompt and its text.
        directory: an empty one, for files that a peer needs made.
    Raises:
        MtplxError: one cannot load the model.
    """
    engines: list[Engine] = []
    for i, name in enumerate(names):
        library, _, way = name.partition(":")
        own = directory / str(i)
        own.mkdir()
        if library == "transformers":
            engines.append(TransformersEngine(way, checkpoint, own))
        else:
            from mtplx.bench.llamacpp import LlamaCppEngine

            engines.append(LlamaCppEngine(way, checkpoint.path, threads, context, own))
    return engines
