"""The benchmark's plumbing, with engines that only pretend: order, figures, files."""

import pytest

from mtplx import SamplerConfig
from mtplx.bench import machine
from mtplx.bench.machine import Machine
from mtplx.bench.prompts import Prompt, Question, choose, questions
from mtplx.bench.run import Bench, Decoded, Spread, in_turn
from mtplx.errors import MtplxError

BANDWIDTH = 1000.0


class Pretender:
    """Writes at a speed of its own for each prompt, and notes who ran."""

    def __init__(self, name, rates, log, depth=None, per_cycle=1, decided=(), accepted=()):
        self.name, self.depth, self.settings = name, depth, f"{name} as always"
        self.rates, self.log, self.per_cycle = rates, log, per_cycle
        self.decided, self.accepted = decided, accepted

    def generate(self, task):
        self.log.append((self.name, self.depth, task))
        tokens = task.max_tokens
        return Decoded(
            tokens,
            tokens,
            tokens // self.per_cycle,
            tokens / self.rates[task.prompt[0]],
            0.5,
            self.decided,
            self.accepted,
        )

    def cycle_bytes(self, context):
        return 10 * context


def prompts(count):
    return [Prompt(Question(80 + i, "ab"[i % 2], "?"), (i, 7, 7, 7)) for i in range(count)]


def run(engines, count, temperatures=(0.5,), **more):
    settings = SamplerConfig(top_p=0.9, top_k=5, seed=100)
    found = Bench(
        Machine("a CPU", 2, 4, 2, 2**30, BANDWIDTH, "avx2", {"python": "3"}),
        {"model": "none"},
        [{"engine": e.name, "depth": e.depth, "settings": e.settings} for e in engines],
    )
    found.runs += in_turn(
        engines, prompts(count), temperatures, settings, 12, frozenset([3]), BANDWIDTH, **more
    )
    return found


def test_every_engine_is_given_the_same_and_goes_first_in_its_turn():
    log = []
    engines = [
        Pretender("ours", [1] * 4, log, depth=0),
        Pretender("ours", [1] * 4, log, depth=2),
        Pretender("theirs", [1] * 4, log),
    ]
    run(engines, 2, temperatures=(0.0, 0.5))
    warm, log = log[:3], log[3:]
    assert {task.max_tokens for *_, task in warm} == {8}
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    who = [[(name, depth) for name, depth, _ in turn] for turn in turns]
    a, b, c = ("ours", 0), ("ours", 2), ("theirs", None)
    assert who == [[a, b, c], [b, c, a], [c, a, b], [a, b, c]]
    for turn in turns:
        assert len({task for *_, task in turn}) == 1
    tasks = [turn[0][2] for turn in turns]
    assert [task.sampling.temperature for task in tasks] == [0.0, 0.5, 0.0, 0.5]
    assert [task.sampling.seed for task in tasks] == [100, 100, 101, 101]
    assert [task.prompt[0] for task in tasks] == [0, 0, 1, 1]
    task = tasks[0]
    assert (task.sampling.top_p, task.sampling.top_k, task.max_tokens) == (0.9, 5, 12)
    assert task.stop_ids == {3}


def test_rows_have_medians_and_ratios_on_the_same_prompts():
    log = []
    ours = Pretender("ours", [10, 20, 40], log, depth=0)
    deep = Pretender("ours", [30, 20, 80], log, 3, 2, decided=(6, 4), accepted=(4, 1))
    found = run([ours, deep], 3)
    plain, drafted = found.rows()
    assert plain.tokens_per_second == Spread(20, 15, 30)
    assert plain.ratio == Spread(1, 1, 1)
    assert (plain.prompts, plain.tokens_per_cycle, plain.acceptance_by_position) == (3, 1, ())
    assert drafted.tokens_per_second.median == 30
    assert drafted.ratio == Spread(2, 1.5, 2.5)
    assert drafted.tokens_per_cycle == 2
    assert drafted.acceptance_by_position == (4 / 6, 1 / 4)
    # A cycle of two tokens at 30 a second.
    assert drafted.milliseconds_per_cycle.median == pytest.approx(2000 / 30)
    # 4 tokens of a prompt in half a second.
    assert drafted.prompt_tokens_per_second.median == 8
    # 10 bytes for each of 4 + 12 / 2 tokens of context, 1000 of them a second: 0.1 s a cycle.
    assert plain.share_of_limit.median == pytest.approx(0.1 * 20)
    only_b = found.rows("b")
    assert [row.prompts for row in only_b] == [1, 1]
    assert only_b[0].tokens_per_second == Spread(20, 20, 20)
    assert found.categories == ["a", "b"]


def test_a_text_that_ends_at_once_has_no_speed():
    class Silent(Pretender):
        def generate(self, task):
            return Decoded(1, 0, 0, 0.0, 0.5)

    found = run([Pretender("ours", [10], [], depth=0), Silent("theirs", [], [])], 1)
    assert found.runs[1].tokens_per_second is None
    row = found.rows()[1]
    assert (row.tokens_per_second, row.ratio, row.tokens_per_cycle) == (None, None, None)
    assert row.prompts == 1


def test_progress_is_told_of_all_runs():
    told = []
    engines = [Pretender("ours", [1, 1], [], depth=0), Pretender("theirs", [1, 1], [])]
    run(engines, 2, progress=lambda *words: told.append(words))
    assert told[0] == ("warming up", 0, 2)
    assert told[-1] == ("measuring", 4, 4)


def test_copy_bandwidth_is_a_positive_number():
    assert machine.copy_bandwidth(2**16, repeats=2) > 0


def test_cores_are_counted_once(monkeypatch, tmp_path):
    fields = {"physical id": ["0"] * 4, "core id": ["0", "1", "0", "1"]}
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: fields.get(key, []))
    assert machine._cores() == 2
    # A machine that does not say.
    fields.clear()
    assert machine._cores() >= 1
    assert machine._cpu()


def test_all_categories_come_in_turn_and_long_prompts_are_passed_over():
    everything = questions()
    assert len(everything) == 240
    categories = list(dict.fromkeys(q.category for q in everything))
    assert len(categories) == 13
    chosen = choose(2, lambda text: list(text.encode()), 10**6)
    assert [p.question.category for p in chosen] == categories * 2
    room = 500
    short = choose(1, lambda text: list(text.encode()), room)
    assert max(len(p.ids) for p in short) <= room
    # Every prompt of `rag` is longer; the first of `reasoning` that fits is not its first.
    assert "rag" not in {p.question.category for p in short}
    with pytest.raises(MtplxError, match="no prompt leaves room"):
        choose(1, lambda text: list(text.encode()), 5)
