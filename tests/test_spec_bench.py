"""The benchmark's figures, on telemetry written for it."""

from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtplx import SamplerConfig
from mtplx.engine.request import Stats

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "spec_bench.py"


@pytest.fixture
def spec_bench():
    spec = spec_from_file_location("spec_bench", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_acceptance_is_that_of_the_engines_own_telemetry(spec_bench):
    """A text that ends inside a draft leaves later positions undecided."""
    stats = Stats(
        tokens=10,
        cycles=5,
        drafted_by_position=[5, 4, 3],
        decided_by_position=[5, 3, 1],
        accepted_by_position=[4, 2, 1],
    )
    llm = SimpleNamespace(generate=lambda prompts, **_: [SimpleNamespace(stats=stats)])
    prompts = [{"turns": ["Why?"], "category": "qa"}]
    args = Namespace(batch=1, max_tokens=9, depth=[3], seed=0, verifier="block")
    sums = spec_bench.measure_acceptance(llm, prompts, SamplerConfig(), args)
    assert spec_bench.figures_of(sums["qa"]) == {
        "tokens_per_cycle": stats.tokens_per_cycle,
        "acceptance_by_position": stats.acceptance_by_position,
        "tokens": 10,
    }
    # Position 2 was reached by three of the four that kept position 1.
    assert stats.acceptance_by_position == [4 / 5, 2 / 3, 1.0]


def test_speed_is_compared_on_the_same_prompts(spec_bench, capsys):
    speeds = {0: [10, 20, 30], 1: [12, 22, 33], 3: [15, 40, 30]}
    asked = []

    def generate(prompt, depth, **_):
        if prompt == "Hello":
            return None
        asked.append(depth)
        stats = SimpleNamespace(decode_tokens_per_second=speeds[depth][int(prompt)])
        return SimpleNamespace(stats=stats)

    prompts = [{"turns": [str(i)], "category": "qa"} for i in range(3)]
    args = Namespace(every=1, max_tokens=9, depth=[1, 3], seed=0, verifier="block")
    llm = SimpleNamespace(generate=generate)
    rows = spec_bench.measure_speed({"none": llm}, prompts, SamplerConfig(), args)
    # Each goes first once.
    assert asked == [0, 1, 3, 1, 3, 0, 3, 0, 1]
    figures = spec_bench.speed_figures(rows, ("none", 3), ("none", 0))
    assert figures["ratio_median"] == 1.5
    assert (figures["ratio_min"], figures["ratio_max"]) == (1.0, 2.0)
    assert figures["tokens_per_second"] == 30
