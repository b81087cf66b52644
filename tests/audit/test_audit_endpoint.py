"""Endpoints over HTTP, played by a small server: an honest one, and some that are not."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from mtplx.audit import run
from mtplx.audit.endpoint import Endpoint
from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig

WORDS = [f" w{i:02}" for i in range(30)] + ["\ufffd", " \ufffd"]
PROMPTS = ("one", "two")
PLAIN = SamplerConfig()


def law(prompt, tokens):
    """Some law over the words, the same for the same text before it."""
    seed = [len(prompt), *(WORDS.index(token) for token in tokens[-2:])]
    return np.random.default_rng(seed).dirichlet(np.full(len(WORDS), 0.3))


class Server:
    """An endpoint. `draws_from` gives the law that it really draws from."""

    def __init__(self, draws_from=lambda p, body: p, form="lists", limit=20, end=7, **knows):
        self.end = end  # the word that ends a text
        self.draws_from, self.form, self.limit, self.knows = draws_from, form, limit, knows
        self.rng = np.random.default_rng(0)
        self.bodies, self.keys = [], set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                models = {"data": [{"id": "served"}]} if server.knows.get("models", True) else {}
                self.answer(200, models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.keys.add(self.headers.get("Authorization"))
                self.answer(*server.complete(body))

            def answer(self, code, content):
                data = server.knows.get("bytes", json.dumps(content).encode())
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def complete(self, body):
        if "ignore_eos" in body and not self.knows.get("ignore_eos", True):
            return 400, {"error": "unknown parameter ignore_eos"}
        if body["logprobs"] > self.limit:
            return 422, {"error": f"at most {self.limit} logprobs"}
        if self.form == "broken":
            return 500, {"error": "out of order"}
        change = self.knows.get("change", lambda choice: choice)
        return 200, {"choices": [change(self.choice(body)) for _ in range(min(body["n"], 40))]}

    def choice(self, body):
        tokens, logprobs, likely = [], [], []
        for _ in range(body["max_tokens"]):
            p = law(body["prompt"], tokens)
            actual = np.asarray(self.draws_from(p, body))
            token = int(self.rng.choice(len(WORDS), p=actual / actual.sum()))
            if token == self.end and not body.get("ignore_eos"):
                break
            best = np.argsort(-p)[: body["logprobs"]].tolist()
            best += [token] * (token not in best)  # as some endpoints do
            logprobs.append(math.log(p[token]))
            likely.append({WORDS[i]: math.log(p[i]) for i in best})
            tokens.append(WORDS[token])
        if self.form == "steps":
            steps = [
                {
                    "token": t,
                    "logprob": lp,
                    "top_logprobs": [{"token": w, "logprob": x} for w, x in top.items()],
                }
                for t, lp, top in zip(tokens, logprobs, likely, strict=True)
            ]
            return {"text": "".join(tokens), "logprobs": {"content": steps}}
        if self.form == "none":
            return {"text": "".join(tokens), "logprobs": None}
        lists = {"tokens": tokens, "top_logprobs": likely}
        return {"text": "".join(tokens), "logprobs": lists}


def top(p, k):
    return np.where(p >= np.sort(p)[-k], p, 0)


def cooled(p, temperature):
    weights = p ** (1 / temperature)
    return weights / weights.sum()


def measure(server, sampling=PLAIN, samples=400, depth=0, **options):
    engine = Endpoint(server.address, None, PROMPTS, sampling, **options)
    return run.audit(
        engine, None, [[] for _ in PROMPTS], sampling, model="x", depth=depth, samples=samples
    )


@pytest.mark.parametrize("form", ["lists", "steps"])
def test_an_honest_endpoint_passes(form):
    with Server(form=form) as server:
        audit = measure(server, depth=1)
    assert audit.passed and audit.texts == {"plain": 400}
    assert audit.rounding is None and audit.notes == []
    assert {test.name for test in audit.tests} >= {"first token", "texts", "by likelihood"}
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 4, 1.0)
    assert "seed" not in body and "top_k" not in body


@pytest.mark.slow
@pytest.mark.parametrize(
    "draws_from",
    [
        lambda p, body: cooled(p, 0.8),
        lambda p, body: 0.85 * p + 0.15 / len(WORDS),
        lambda p, body: top(p, 10),
    ],
)
def test_one_that_draws_from_another_law_fails(draws_from):
    with Server(draws_from) as server:
        audit = measure(server, samples=1000)
    assert not audit.passed
    assert audit.verdict.startswith("FAIL: plain leaves the exact law")


@pytest.mark.slow
def test_top_k_and_temperature_are_applied_to_what_is_listed():
    sampling = SamplerConfig(temperature=0.7, top_k=8)
    with Server(lambda p, body: cooled(top(p, body["top_k"]), body["temperature"])) as server:
        assert measure(server, sampling).passed
    with Server(lambda p, body: top(p, body["top_k"])) as server:
        assert not measure(server, sampling, samples=1000).passed
    with Server(lambda p, body: cooled(p, body["temperature"])) as server:
        audit = measure(server, sampling)
    assert audit.failures[0].name == "impossible tokens"


def test_an_older_api_is_asked_for_less():
    with Server(limit=5, end=None, ignore_eos=False) as server:
        audit = measure(server)
        with pytest.raises(MtplxError, match=r"lists 5 tokens a position; --top-k"):
            measure(server, SamplerConfig(top_k=6))
    asked = [(body.get("ignore_eos"), body["logprobs"]) for body in server.bodies[:5]]
    assert asked == [(True, 20), (True, 5), (None, 20), (None, 5), (None, 5)]
    assert audit.passed and audit.notes == []


def test_a_text_may_end_early_but_not_many():
    """What ended them is missing, which would look like a fault."""
    seen = []

    def change(choice):
        seen.append(choice)
        if len(seen) % 100 == 0:  # as many as may be
            del choice["logprobs"]["tokens"][1:], choice["logprobs"]["top_logprobs"][1:]
        return choice

    with Server(change=change) as server:
        audit = measure(server)
    assert audit.passed and audit.notes[0].startswith("4 texts ended early")
    with (
        Server(ignore_eos=False) as server,
        pytest.raises(MtplxError, match=r"\d\d of 400 texts ended before their 3 tokens"),
    ):
        measure(server)


def test_tokens_of_the_same_text_count_as_one():
    def alike(choice):
        logprobs = choice["logprobs"]["content"]
        for step in logprobs:
            for listed in (step, *step["top_logprobs"]):
                listed["token"] = listed["token"][:3]  # w0, w1 or w2
        return choice

    with Server(form="steps", change=alike) as server:
        engine = Endpoint(server.address, None, PROMPTS, PLAIN)
        (texts,) = engine.draw(0, 40, 1, 0, False)
        p = law("one", [])
        tens = [p[i : i + 10].sum() for i in (0, 10, 20)]
        listed = engine.laws[0][()]
    assert [listed[f" w{i}"] for i in range(3)] == pytest.approx(tens, abs=0.01)
    for text in texts:
        rest = 1 - sum(listed.values())
        assert text.spots[0].p == pytest.approx(listed.get(text.tokens[0], rest))


@pytest.mark.parametrize(
    ("logprob", "complaint"),
    [
        (math.nan, "no log-probabilities that can be read"),
        (math.inf, "no log-probabilities that can be read"),
        (1000, "no log-probabilities that can be read"),
        ("much", "no log-probabilities that can be read"),
        (None, "no log-probabilities that can be read"),
        (0, "come to 20: they are no law"),
    ],
)
def test_log_probabilities_that_are_none_are_refused(logprob, complaint):
    def change(choice):
        for listed in choice["logprobs"]["top_logprobs"]:
            listed.update(dict.fromkeys(listed, logprob))
        return choice

    with Server(change=change) as server, pytest.raises(MtplxError, match=complaint):
        measure(server)


def test_a_certain_token_beside_impossible_ones_is_a_law():
    def change(choice):
        for token, listed in zip(*choice["logprobs"].values(), strict=True):
            listed.update(dict.fromkeys(listed, -math.inf) | {token: 0})
        return choice

    for sampling in (PLAIN, SamplerConfig(top_k=3)):
        with Server(change=change) as server:
            engine = Endpoint(server.address, None, PROMPTS, sampling)
            for text in next(engine.draw(0, 40, 2, 0, False)):
                assert [spot.p for spot in text.spots] == [1, 1]


def test_one_that_refuses_every_way_is_quoted():
    with Server(limit=3) as server, pytest.raises(MtplxError, match=r"422.*at most 3 logprobs"):
        measure(server)


def test_seeds_are_sent_where_asked_for_and_differ():
    with Server() as server:
        measure(server, samples=200, seeded=True)
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == len(seeds)


def test_a_key_is_passed_on(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    with Server() as server:
        measure(server, samples=200)
    assert server.keys == {"Bearer abc"}


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        (Server(form="none"), "gives no log-probabilities"),
        (Server(form="broken"), "answered 500.*out of order"),
        (Server(models=False), "names no model; give its name"),
        (Server(bytes=b"<html>"), "/v1/models answered with something that is no JSON"),
        (Server(bytes=b"\xff"), "/v1/models answered with something that is no JSON"),
        (Server(bytes=b"3"), "names no model; give its name"),
    ],
)
def test_what_an_endpoint_lacks_is_said(server, complaint):
    with server, pytest.raises(MtplxError, match=complaint):
        measure(server)


@pytest.mark.parametrize("address", ["http://", "http://[x", "http://a b", "http://a:b"])
def test_an_address_that_is_none_is_one_line(address):
    with pytest.raises(MtplxError, match=r"/v1/models: \S"):
        Endpoint(address, None, PROMPTS, PLAIN)


def test_nobody_there():
    with Server() as server:
        address = server.address
    with pytest.raises(MtplxError, match=r"/v1/completions: .*refused"):
        engine = Endpoint(address + "/v1/", "x", PROMPTS, PLAIN)
        list(engine.draw(0, 1, 1, 0, False))


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (SamplerConfig(temperature=0.8), "a --top-k of at most 20"),
        (SamplerConfig(top_p=0.9), "a --top-k of at most 20"),
        (SamplerConfig(top_k=21), "a --top-k of at most 20"),
        (SamplerConfig(repetition_penalty=1.1), "leave out the other settings"),
    ],
)
def test_a_law_that_no_list_has_is_refused(sampling, complaint):
    with pytest.raises(MtplxError, match=complaint):
        Endpoint("http://nowhere", "x", PROMPTS, sampling)
