"""Where a cycle's time goes: a run of its own, with watches on the engine's parts.

The watches take time themselves, so no speed is measured with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from mtplx.drafters.mtp import HeadSlots
from mtplx.drafters.ngram import NgramSlots
from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.models.trunk import Trunk
from mtplx.shaping import Shaper

PARTS = ("draft", "verify", "sample", "host")


@dataclass(frozen=True)
class Split:
    """Milliseconds per cycle, on average.

    Attributes:
        depth: of the drafts.
        cycles: how many there were.
        draft: the head's steps, its draws among them, and its catching up with what was kept.
        verify: the trunk's pass.
        sample: shaping the trunk's logits by the request's settings, and the verdict.
        host: all else.
    """

    depth: int
    cycles: int
    draft: float
    verify: float
    sample: float
    host: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Watch:
    """Adds up the seconds spent in watched functions while a cycle runs."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.cycles = 0
        # What is called inside a watched function is that one's.
        self._inside: str | None = None

    @contextmanager
    def on(self, trunk: Trunk) -> Iterator[None]:
        """Watch the engine run this trunk."""
        with ExitStack() as stack:
            for owner, name, part in (
                (HeadSlots, "draft", "draft"),
                (HeadSlots, "refill", "draft"),
                (NgramSlots, "draft", "draft"),
                (NgramSlots, "emit", "draft"),
                (trunk, "forward", "verify"),
                (Shaper, "__call__", "sample"),
                (decoding, "verify", "sample"),
            ):
                stack.enter_context(patch.object(owner, name, self._part(owner, name, part)))
            stack.enter_context(patch.object(Batch, "cycle", self._cycle(Batch.cycle)))
            yield

    def _part(self, owner: Any, name: str, part: str) -> Any:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            # Outside a cycle the prompt is read.
            if self._inside != "host":
                return function(*args, **kwargs)
            self._inside = part
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - started
                self.seconds[part] += elapsed
                self.seconds["host"] -= elapsed
                self._inside = "host"

        return watched

    def _cycle(self, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._inside = "host"
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds["host"] += time.perf_counter() - started
                self.cycles += 1
                self._inside = None

        return watched

    def split(self, depth: int) -> Split:
        """What was seen so far."""
        cycles = max(self.cycles, 1)
        return Split(
            depth, self.cycles, **{part: 1e3 * s / cycles for part, s in self.seconds.items()}
        )
