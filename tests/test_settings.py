"""Settings that look back, grammars and log-probabilities, under speculation.

Every setting is held to the law at depth 0, where each token is checked alone, and deeper texts to
those of depth 0: token for token where the noise is coupled, in distribution where it is not.
"""

import dataclasses

import numpy as np
import pytest
import tiny
import torch
from test_law import p_value

from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.history import Follower, Histories, History
from mtplx.sampling import SamplerConfig, distribution_from_logits

VOCAB = 7
STOPS = (6,)


class Machine:
    """A grammar of a few states: in each, the tokens that may come and where they lead."""

    fault = None

    def __init__(self, table, final):
        self.table, self.final = table, final
        self.path, self.text = [0], []

    @property
    def complete(self):
        return self.path[-1] in self.final

    def allowed(self):
        permitted = np.zeros(VOCAB, dtype=bool)
        permitted[list(self.table[self.path[-1]])] = True
        return permitted

    def advance(self, token):
        state = self.table[self.path[-1]].get(token)
        if state is None:
            return False
        self.path.append(state)
        self.text.append(token)
        return True

    def rollback(self, count):
        for _ in range(count):
            self.path.pop()
            self.text.pop()


def brackets():
    """0 opens and 1 closes, at most two deep, with 2, 3 and 4 inside; whole when all is closed."""
    inside = {2: 1, 3: 1, 4: 1, 0: 2, 1: 3}
    table = {0: {0: 1}, 1: inside, 2: {3: 2, 5: 2, 1: 1}, 3: {0: 1, 5: 3}}
    return Machine(table, {3})


def turns():
    """Even and odd tokens take turns, and the text may end behind an even one."""
    return Machine({0: {0: 1, 2: 1, 4: 1}, 1: {1: 0, 3: 0, 5: 0}}, {1})


CASES = {
    "typical": ({"typical_p": 0.6, "temperature": 1.2}, None),
    "typical of few": ({"typical_p": 0.8, "top_k": 5, "min_p": 0.02}, None),
    "pairs": ({"no_repeat_ngram": 2}, None),
    "triples": ({"no_repeat_ngram": 3, "temperature": 0.7}, None),
    "late stop": ({"min_tokens": 4, "logit_bias": {6: 2.0}}, None),
    "no stop": ({"suppress_stop": True, "logit_bias": {6: 2.0}}, None),
    "banned": ({"banned_tokens": [0, 3], "temperature": 1.5}, None),
    "forced": ({"forced_tokens": [5, 0, 5], "no_repeat_ngram": 2, "min_tokens": 5}, None),
    "greedy": ({"temperature": 0.0, "no_repeat_ngram": 2, "min_tokens": 6}, None),
    "penalised": ({"presence_penalty": 0.6, "frequency_penalty": 0.4, "min_tokens": 3}, None),
    "brackets": ({"temperature": 1.3}, brackets),
    "turns": ({"top_p": 0.9, "forced_tokens": [5, 5], "repetition_penalty": 1.2}, turns),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(VOCAB, seed=3)


@pytest.fixture(scope="module")
def heads(trunk):
    return [tiny.attached(trunk), tiny.attached(trunk, 4, seed=9)]


def request(name, seed=0, max_tokens=24, depth=0, verifier="coupled", **keywords):
    settings, grammar = CASES[name]
    return Request(
        (1, 3, 0),
        SamplerConfig(**settings),
        seed,
        max_tokens,
        depth,
        frozenset(STOPS),
        verifier,
        grammar,
        **keywords,
    )


def texts(trunk, head, requests):
    tokens = [[] for _ in requests]
    for bursts in Batch(trunk, head, requests).run():
        for burst in bursts:
            tokens[burst.index] += burst.tokens
    return tokens


def law(logits, one, output):
    """The law of the next token, from the definition."""
    allowed, opening = None, len(one.sampling.forced_tokens)
    if one.grammar and len(output) >= opening:
        grammar = one.grammar()
        assert all(grammar.advance(token) for token in output[opening:])
        allowed = grammar.allowed()
        allowed[list(one.stop_ids)] = grammar.complete
    return distribution_from_logits(
        logits,
        one.sampling,
        prompt_ids=one.prompt,
        output_ids=output,
        stop_ids=one.stop_ids,
        allowed=allowed,
    )


def logits_after(trunk, rows):
    with torch.inference_mode():
        return trunk.model(torch.tensor(rows)).logits


@pytest.mark.slow
@every_case
def test_a_coupled_text_is_the_same_at_every_depth(trunk, heads, name):
    plain = [request(name, seed) for seed in range(12)]
    expected = texts(trunk, None, plain)
    for one, output in zip(plain, expected, strict=True):
        logits = logits_after(trunk, [[*one.prompt, *output]])[0, len(one.prompt) - 1 :].numpy()
        for i, token in enumerate(output):
            assert law(logits[i], one, output[:i])[token] > 0
    for head in heads:
        for depth in (1, 2, 3, 4):
            deep = [dataclasses.replace(one, depth=depth) for one in plain]
            assert texts(trunk, head, deep) == expected
    # Beside neighbours with other settings, and with rows leaving at different times.
    mixed = [request(other, seed=5, depth=3, max_tokens=9) for other in CASES]
    together = texts(trunk, heads[0], [*(dataclasses.replace(o, depth=2) for o in plain), *mixed])
    assert together[: len(plain)] == expected


@pytest.mark.slow
@pytest.mark.no_cover
@every_case
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_the_law_of_a_text_is_that_of_depth_0(trunk, heads, name, verifier):
    length, runs = 4, 5_000
    one = request(name, max_tokens=length, verifier=verifier)
    exact, open_texts = {}, {(): 1.0}
    for _ in range(length):
        rows = [[*one.prompt, *text] for text in open_texts]
        logits, longer = logits_after(trunk, rows)[:, -1].numpy(), {}
        for (text, p), row in zip(open_texts.items(), logits, strict=True):
            for token, share in enumerate(law(row, one, list(text))):
                if share > 0:
                    ended = token in STOPS or len(text) + 1 == length
                    (exact if ended else longer)[*text, token] = p * share
        open_texts = longer
    counts = dict.fromkeys(exact, 0)
    seeds = [dataclasses.replace(one, seed=seed, depth=3) for seed in range(runs)]
    for text in texts(trunk, heads[0], seeds):
        counts[tuple(text)] += 1
    assert (
        len(exact) == 1
        or p_value(np.array(list(counts.values())), np.array([*exact.values()])) > 1e-3
    )


@pytest.mark.parametrize("name", ["brackets", "turns"])
def test_a_constraint_comes_back_from_every_draft(trunk, heads, name):
    requests = [request(name, seed, depth=d, verifier="block") for d in (1, 3) for seed in range(6)]
    batch = Batch(trunk, heads[0], requests)
    rejected = 0
    for bursts in batch.run():
        for row, slot in enumerate(batch.slots):
            follower = batch.histories.followers[row]
            text = [token for token in slot.output if token not in STOPS]
            assert follower.constraint.text == text[len(slot.request.sampling.forced_tokens) :]
        rejected += sum(burst.drafted < 1 for burst in bursts)
    assert rejected > 20


def test_a_grammar_makes_drafts_that_are_kept(trunk, heads):
    """The head obeys it too: it would be rejected at most brackets otherwise."""
    requests = [request("brackets", seed, depth=2, verifier="token") for seed in range(40)]
    drafted = accepted = 0
    last = {}
    for bursts in Batch(trunk, heads[0], requests).run():
        last |= {burst.index: burst for burst in bursts}
    for burst in last.values():
        drafted += sum(burst.stats.decided_by_position)
        accepted += sum(burst.stats.accepted_by_position)
    assert accepted > 0.3 * drafted


def test_a_follower_leaves_a_draft_that_is_not_allowed():
    follower = Follower(turns(), STOPS)
    assert set(np.flatnonzero(follower.allowed())) == {0, 2, 4}
    follower.follow(2)
    assert set(np.flatnonzero(follower.allowed())) == {1, 3, 5, 6}
    follower.follow(2)  # not its turn
    assert follower.allowed() is None
    follower.follow(3)  # all behind it is void
    follower.emit([2, 1])
    assert follower.constraint.text == [2, 1]
    follower.follow(0)
    follower.follow(6)
    assert follower.allowed() is None
    follower.emit([0, 3, 4, 6])
    assert follower.constraint.text == [2, 1, 0, 3, 4]
    assert follower.allowed() is None
    follower.emit([])
    assert follower.allowed() is None


def test_what_ends_a_text_comes_only_where_it_is_complete(trunk, heads):
    """Though the grammar has a use of its own for it: 3 ends the text as 6 does."""
    follower = Follower(turns(), (3, 6, 7, -1))
    assert set(np.flatnonzero(follower.allowed())) == {0, 2, 4}
    follower.follow(2)
    assert set(np.flatnonzero(follower.allowed())) == {1, 3, 5, 6}
    ends = set()
    for depth in (0, 3):
        many = [
            Request((1,), SamplerConfig(), seed, 12, depth, frozenset((2, 6)), "block", brackets)
            for seed in range(20)
        ]
        for text in texts(trunk, heads[0], many):
            ends.add(text[-1])
            if text[-1] in (2, 6):
                grammar = brackets()
                assert all(grammar.advance(token) for token in text[:-1]) and grammar.complete
    assert {2, 6} < ends


class Failing(Machine):
    """One that fails behind a 4 and stays so, as long as the 4 is not taken back."""

    fault = None

    def allowed(self):
        return super().allowed() & (self.fault is None)

    def advance(self, token):
        if self.fault is None and token == 4:
            self.fault = "fours are too much"
        return self.fault is None and super().advance(token)

    def rollback(self, count):
        super().rollback(count)
        self.fault = None


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_a_constraint_that_fails_lets_nothing_come(trunk, heads, verifier):
    """Neither what the text has not come to, nor anything behind what failed, does any harm."""
    table = {0: dict.fromkeys(range(6), 0)}
    ended = dict.fromkeys((0, 1, 3), 0)
    for seed in range(60):
        for depth in ended:
            one = Request(
                (1,),
                SamplerConfig(),
                seed,
                8,
                depth,
                grammar=lambda: Failing(table, ()),
                verifier=verifier,
            )
            output = []
            try:
                for (burst,) in Batch(trunk, heads[0], [one]).run():
                    output += burst.tokens
                assert 4 not in output[:-1] and len(output) == 8
                ended[depth] += 1
            except MtplxError as error:
                # Said behind the 4, which is the last to be seen, drafted or not.
                says = (
                    f"the grammar leaves no token to go on with after {len(output)} of the output"
                )
                assert f"{says} (fours are too much)" in str(error)
                assert output.index(4) == len(output) - 1
    assert all(5 < count < 55 for count in ended.values())
    if verifier == "coupled":
        assert len(set(ended.values())) == 1


def test_only_a_grammar_makes_the_host_wait(monkeypatch):
    history = History.of([[1], [2]], VOCAB, torch.device("cpu"), counts=False, text=True)
    drafted = [torch.tensor([3, 4]), torch.tensor([5, 0])]
    waits = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.append(t) or tolist(t))
    free = Histories(history, {}, VOCAB)
    assert free.behind(drafted).allowed is free.along(torch.stack(drafted, 1)).allowed is None
    assert not waits
    bound = Histories(history, {1: Follower(turns(), STOPS)}, VOCAB)
    for count in range(3):
        bound.behind(drafted[:count])
    along = bound.along(torch.stack(drafted, 1)).allowed
    assert len(waits) == 2  # once for each token, for draft and target together
    assert along[:3].all()
    assert along[3:].int().tolist() == [[1, 0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1, 1], [1] * 7]


# --- Where nothing is left ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_settings_that_leave_nothing_are_named_where_the_text_gets_there(trunk, heads, depth):
    # The prompt has three of the seven tokens: four are left.
    once = Request((1, 3, 0), SamplerConfig(no_repeat_ngram=1), 1, 4, depth)
    (output,) = texts(trunk, heads[0], [once])
    assert sorted(output) == [2, 4, 5, 6]
    longer = dataclasses.replace(once, max_tokens=9)
    seen = []
    with pytest.raises(MtplxError, match=r"request 0: no_repeat_ngram leaves no token .* after 4 "):
        for (burst,) in Batch(trunk, heads[0], [longer]).run():
            seen += burst.tokens
    assert sorted(seen) == [2, 4, 5, 6]  # all that could come was given
    # One that has ended there idles beside others, and is no reason to stop.
    others = [
        dataclasses.replace(once, max_tokens=20, sampling=SamplerConfig(), seed=s) for s in (2, 3)
    ]
    assert texts(trunk, heads[0], [once, *others])[0] == output

    never = SamplerConfig(suppress_stop=True, logit_bias={5: -np.inf}, temperature=1.5)
    ends = Machine({0: {0: 1, 5: 1}, 1: {}}, {1})
    dead = Request((1,), never, 0, 9, depth, frozenset(STOPS), grammar=lambda: ends)
    with pytest.raises(
        MtplxError, match="logit_bias and suppress_stop and the grammar leave no tok"
    ):
        texts(trunk, heads[0], [dead])


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_whole_text_without_a_token_to_end_it_ends_there(trunk, heads, depth, verifier):
    # Two or four tokens of two kinds; behind the second both an end and more are possible.
    table = {0: {0: 1, 5: 1}, 1: {2: 2, 4: 3}, 2: {6: 1}, 3: {}}
    for seed in range(12):
        requests = [
            Request(
                (1, 3),
                SamplerConfig(forced_tokens=(3,)),
                seed,
                30,
                depth,
                verifier=verifier,
                grammar=lambda: Machine(table, {2, 3}),
            ),
            Request((2,), SamplerConfig(), seed, 40, depth),
        ]
        output, bursts = [], []
        for found in Batch(trunk, heads[0], requests).run():
            bursts += [burst for burst in found if burst.index == 0]
        output = [token for burst in bursts for token in burst.tokens]
        assert [burst.finish_reason for burst in bursts[:-1]] == [None] * (len(bursts) - 1)
        whole = output[-1] == 4
        assert bursts[-1].finish_reason == ("stop" if whole else "length")
        assert output[0] == 3 and output[1] in (0, 5) and 4 not in output[:-1]
        assert set(output[2:-1:2]) <= {2} and set(output[3:-1:2]) <= {6}
        assert len(output) == 30 or whole


# --- Log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["late stop", "brackets"])
def test_logprobs_are_the_models_own(trunk, heads, name, depth):
    counts = [None, 0, 3, 7, 50, 3, 3, 3]
    requests = [request(name, s, depth=depth, logprobs=n) for s, n in enumerate(counts)]
    got = {i: [] for i in range(len(counts))}
    outputs = {i: [] for i in range(len(counts))}
    for bursts in Batch(trunk, heads[0], requests).run():
        for burst in bursts:
            outputs[burst.index] += burst.tokens
            assert (burst.logprobs is None) == (counts[burst.index] is None)
            got[burst.index] += burst.logprobs or []
    ended = 0
    for i, count in enumerate(counts):
        if count is None:
            continue
        rows = logits_after(trunk, [[1, 3, 0, *outputs[i]]])[0, 2:-1].log_softmax(-1)
        assert [entry.token_id for entry in got[i]] == outputs[i]
        ended += outputs[i][-1] in STOPS
        for entry, row in zip(got[i], rows, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            best = row.topk(min(count, VOCAB))
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [x for _, x in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert ended
