"""Training: what the head is shown, what it is scored by, and that it goes on where it stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch

from mtplx.drafters.attached import AttachedHead
from mtplx.errors import MtplxError
from mtplx.models.eagle3 import load_head
from mtplx.models.slots import Span
from mtplx.training import batches, loss
from mtplx.training.loss import Objective, draft_loss
from mtplx.training.report import held_out_acceptance
from mtplx.training.rollout import rollout
from mtplx.training.states import TrunkStates
from mtplx.training.text import Conversations
from mtplx.training.trainer import TrainConfig, Trainer, initial_head, stream_sizes

VOCAB = 23


def conversations(count: int, seed: int = 0, longest: int = 12) -> Conversations:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, longest, count).astype(np.int32)
    lengths = (prompts + rng.integers(0, longest, count)).astype(np.int32)
    tokens = rng.integers(0, VOCAB, lengths.sum()).astype(np.int32)
    return Conversations(tokens, lengths, prompts)


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def trunk():
    return tiny.llama(VOCAB)


@pytest.fixture
def states(trunk, tmp_path):
    made = TrunkStates(tmp_path, conversations(30), trunk, [0, 1, 2])
    made.compute(silent)
    return made


# --- text and states -----------------------------------------------------------------------------


def test_conversations_survive_a_file(tmp_path):
    text = conversations(5)
    text.save(tmp_path / "t.npz")
    again = Conversations.load(tmp_path / "t.npz")
    assert (again.tokens == text.tokens).all()
    assert (again.lengths == text.lengths).all()
    assert (again.prompt_lengths == text.prompt_lengths).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.array([3, 4], np.int32)}, "do not add up"),
        ({"prompt_lengths": np.array([0, 1], np.int32)}, "empty or longer"),
        ({"prompt_lengths": np.array([1, 9], np.int32)}, "empty or longer"),
        ({"tokens": np.array([3, 1, -1, 0, 2])}, "negative"),
        ({"tokens": np.zeros((5, 2), int)}, "flat"),
    ],
)
def test_text_that_does_not_add_up_is_refused(tmp_path, change, message):
    arrays = {
        "tokens": np.arange(5),
        "lengths": np.array([2, 3], np.int32),
        "prompt_lengths": np.array([1, 1], np.int32),
    } | change
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(MtplxError, match=message):
        Conversations.load(tmp_path / "t.npz")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "t.npz").write_bytes(b"nonsense")
    with pytest.raises(MtplxError, match="not training text"):
        Conversations.load(tmp_path / "t.npz")


def test_damaged_and_other_files_are_refused_in_one_line(tmp_path):
    conversations(5).save(tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.arange(4))
    damaged = bytearray(whole)
    damaged[60:80] = bytes(20)
    files = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "array": (tmp_path / "array.npy").read_bytes(),
        "damaged": bytes(damaged),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MtplxError, match="not training text") as caught:
            Conversations.load(tmp_path / name)
        assert len(str(caught.value).splitlines()) == 1


def test_a_stop_while_saving_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    conversations(5).save(path)

    def stop(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        conversations(6).save(path)
    assert len(Conversations.load(path)) == 5


def test_frequent_tokens_are_the_answers_own():
    text = Conversations(
        np.array([9, 9, 9, 5, 5, 9, 3, 5], np.int32),
        np.array([5, 3], np.int32),
        np.array([3, 1], np.int32),
    )
    # Answers are 5 5 and 3 5: the nines are all prompt. Token 7 is wanted whatever its count.
    assert text.frequent_tokens(3, 12, [7]).tolist() == [3, 5, 7]


def test_states_are_the_trunks_own(states, trunk):
    text = states.text
    for c in (0, 7, 29):
        start, length = int(text.starts[c]), int(text.lengths[c])
        ids = torch.from_numpy(text.tokens[start : start + length].astype(np.int64))[None]
        output = trunk.model.model(ids, output_hidden_states=True, use_cache=False)
        hidden = output.hidden_states
        # The last of transformers' tuple is normed; the stream before it is not in there.
        wanted = torch.cat([hidden[0], hidden[1], output.last_hidden_state], -1)[0]
        got = states.of(start, start + length).float()
        h = trunk.hidden_size
        got = torch.cat([got[:, : 2 * h], got[:, 3 * h :]], -1)
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_states_go_on_where_they_stopped(trunk, tmp_path, monkeypatch):
    monkeypatch.setattr("mtplx.training.states.TOKENS_PER_PASS", 40)
    text = conversations(30)
    whole = TrunkStates(tmp_path / "whole", text, trunk, [0, 1, 2])
    whole.compute(silent)

    class Stop(Exception):
        pass

    def stop_half_way(what: str, done: int, total: int) -> None:
        if done > 15:
            raise Stop

    part = TrunkStates(tmp_path / "part", text, trunk, [0, 1, 2])
    with pytest.raises(Stop):
        part.compute(stop_half_way)
    again = TrunkStates(tmp_path / "part", text, trunk, [0, 1, 2])
    assert 15 < again.done < 30
    again.compute(silent)
    n = len(text.tokens)
    assert torch.equal(again.of(0, n), whole.of(0, n))
    # Other layers' states are not these.
    assert TrunkStates(tmp_path / "part", text, trunk, [0, 1, 1]).done == 0


# --- batches and rollout -------------------------------------------------------------------------


def test_every_conversation_is_in_one_batch():
    text = conversations(500, longest=60)
    planned = batches.plan(text.lengths, text.prompt_lengths, 200, np.random.default_rng(0))
    assert sorted(np.concatenate(planned).tolist()) == list(range(500))
    answers = text.lengths - text.prompt_lengths
    for group in planned:
        assert len(group) == 1 or len(group) * answers[group].max() <= 200


def test_rollout_is_what_the_engine_drafts(states, trunk):
    """Each row's chain of hidden states equals the cached head's, fed the true tokens."""
    steps = 3
    head = tiny.eagle3(trunk)
    attached = AttachedHead(head, trunk)
    attached.taps = (0, 1, 2)
    which = np.array([3, 8, 14, 21])
    batch = batches.make(states, which, steps)
    batch = batches.Batch(**{k: _float(v) for k, v in vars(batch).items()})
    scale = torch.ones(3 * trunk.hidden_size)
    got = list(rollout(head, trunk.embed.weight, batch, steps, scale))
    text = states.text
    compared = 0
    for step, (normed, counted) in enumerate(got):
        rows = normed.split(counted.sum(1).tolist())
        for b, c in enumerate(which):
            start, length = int(text.starts[c]), int(text.lengths[c])
            tokens = torch.from_numpy(text.tokens[start : start + length].astype(np.int64))
            stored = states.of(start, start + length).float()
            fused = head.fuse(stored[None, :, : 3 * trunk.hidden_size])
            begin = max(int(text.prompt_lengths[c]) - 2, 0)
            for r, row in enumerate(rows[b]):
                anchor = begin + r
                cache = attached.new_cache(length + steps)
                hidden = attached.step(
                    tokens[None, 1 : anchor + 2],
                    fused[:, : anchor + 1],
                    Span.after([0], anchor + 1, trunk.device),
                    cache,
                )[:, -1:]
                for s in range(step):
                    hidden = attached.step(
                        tokens[None, anchor + 2 + s : anchor + 3 + s],
                        hidden,
                        Span.after([anchor + 1 + s], 1, trunk.device),
                        cache,
                    )
                torch.testing.assert_close(row, head.norm(hidden)[0, 0], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 40


def _float(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def test_targets_are_the_trunks_distribution_of_the_token_to_draft(states, trunk):
    """Row r, step s is scored by the state at the token that the s-th draft should follow."""
    which = np.array([5])
    batch = batches.make(states, which, 3)
    text = states.text
    start = int(text.starts[5])
    begin = max(int(text.prompt_lengths[5]) - 2, 0)
    h = trunk.hidden_size
    for r in range(int(batch.counts[0])):
        for s in range(3):
            at = begin + r + 1 + s
            if at >= text.lengths[5]:
                continue
            assert batch.tokens[0, r + s] == text.tokens[start + at]
            wanted = states.of(start + at, start + at + 1)[0, 3 * h :]
            assert torch.equal(batch.targets[0, r + s], wanted)
            # It counts where the text has the token that follows.
            assert bool(batch.counted(s)[0, r]) == (at + 1 < text.lengths[5])


# --- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 5, 9])
@pytest.mark.parametrize(
    "aim", [Objective(1.0, 0.0, 0.6), Objective(0.3, 1.0, 0.6), Objective(0.0, 1.0, 1.0)]
)
def test_gradients_are_autograds(rows, aim, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 4)
    monkeypatch.setattr(loss, "_fused", lambda function: function)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=True)
    logits = torch.randn(rows, 11) * 2
    p, warm = logits.softmax(-1), (logits / aim.temperature).softmax(-1)
    got, kept = draft_loss(hidden, weight, p, warm if aim.acceptance else None, aim)
    got.backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    z = hidden @ weight.T
    overlap = torch.minimum((z / aim.temperature).softmax(-1), warm).sum(-1)
    wanted = -aim.divergence * (p * z.log_softmax(-1)).sum() - aim.acceptance * overlap.log().sum()
    wanted.backward()
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(gradients[0], hidden.grad)
    torch.testing.assert_close(gradients[1], weight.grad)
    if aim.acceptance:
        torch.testing.assert_close(kept, overlap.sum())


# --- training ------------------------------------------------------------------------------------


def predictable(count: int) -> Conversations:
    """Texts in which every token is decided by the one before it."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(count):
        row = [int(rng.integers(VOCAB))]
        while len(row) < 16:
            row.append((row[-1] * 5 + 3) % VOCAB)
        rows.append(row)
    lengths = np.full(count, 16, np.int32)
    return Conversations(np.array(rows, np.int32).ravel(), lengths, np.full(count, 4, np.int32))


CONFIG = TrainConfig(
    epochs=20,
    minutes=10,
    rows=128,
    matrix_lr=1e-2,
    other_lr=1e-2,
    draft_vocab_size=VOCAB,
    intermediate_size=32,
    taps=(0, 1, 2),
)


@pytest.fixture
def setup(tmp_path, monkeypatch, request):
    # Compiling for so small a head would cost more than it saves.
    monkeypatch.setattr(loss, "_fused", lambda function: function)
    trunk = tiny.llama(VOCAB)
    dtype = getattr(request, "param", torch.bfloat16)
    trunk.model.to(dtype)
    trunk.dtype = dtype
    states = TrunkStates(tmp_path / "states", predictable(80), trunk, [0, 1, 2])
    states.compute(silent)

    def trainer(name: str, config: TrainConfig = CONFIG) -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        head = initial_head(
            trunk, config, torch.arange(VOCAB), "tiny", stream_sizes(states, np.arange(70))
        )
        return Trainer(head, states, np.arange(70), config, tmp_path / name)

    return trainer, states, tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("setup", [torch.bfloat16, torch.float32], indirect=True)
def test_a_head_learns_its_trunk(setup):
    trainer, states, path = setup
    run = trainer("run")
    before = held_out_acceptance(run.export(path / "before"), states, np.arange(70, 80), 3)
    run.run(silent)
    after = held_out_acceptance(run.export(path / "after"), states, np.arange(70, 80), 3)
    for old, new in zip(before, after, strict=True):
        assert all(b > a + 0.1 for a, b in zip(old.by_position, new.by_position, strict=True))
    # What was written is what was measured, and its config names the trunk.
    again = held_out_acceptance(load_head(path / "after", 2), states, np.arange(70, 80), 3)
    assert again == after
    # Acceptance is in the history where it was computed, which is not from the beginning.
    history = json.loads((path / "after" / "history.json").read_text())
    measured = ["accepted_1" in entry for entry in history]
    assert not measured[0] and measured[-1] and measured == sorted(measured)
    assert all(entry["accepted_1"] > 0 for entry in history if "accepted_1" in entry)
    written = json.loads((path / "after" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "tiny"


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_same_head(setup):
    trainer, _, _ = setup
    whole = trainer("whole")
    whole.run(silent)

    class Stop(Exception):
        pass

    part = trainer("part")

    def stop_half_way(what: str, done: int, total: int) -> None:
        if done >= 500:
            part.save()
            raise Stop

    with pytest.raises(Stop):
        part.run(stop_half_way)
    again = trainer("part")
    again.resume()
    assert 0 < again.step < whole.step
    again.run(silent)
    assert again.step == whole.step
    for a, b in zip(again.head.parameters(), whole.head.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_minutes_end_a_training(setup):
    trainer, _, _ = setup
    run = trainer("short", TrainConfig(**(vars(CONFIG) | {"minutes": 1e-6, "epochs": 1e6})))
    run.run(silent)
    assert run.step == 1


def test_a_checkpoint_of_another_text_is_refused_and_one_without_identity_is_not(setup):
    trainer, states, path = setup
    trainer("run").save()
    states.text.tokens[3] ^= 1
    with pytest.raises(MtplxError, match="another text"):
        trainer("run").resume()
    state = torch.load(path / "run" / "trainer.pt")
    del state["identity"]
    torch.save(state, path / "run" / "trainer.pt")
    trainer("run").resume()


def test_nothing_to_resume_is_said(setup):
    trainer, _, _ = setup
    with pytest.raises(MtplxError, match="nothing to resume"):
        trainer("empty").resume()


def test_skipped_positions_keep_order_and_distance_after_the_skip(states):
    which = np.arange(30)
    batch = batches.make(states, which, 3, np.random.default_rng(0))
    plain = batches.make(states, which, 3)
    assert (batch.skips > 0).any() and (batch.skips == 0).any()
    context, rows = batch.positions()
    for b in range(30):
        begin = int(batch.begins[b])
        if begin == 0:
            continue
        here = torch.cat([context[b, -begin:], rows[b]])
        jumps = here.diff()
        assert (jumps >= 1).all() and (jumps > 1).sum() <= 1
        assert rows[b, 0] - plain.positions()[1][b, 0] == batch.skips[b]
