"""An OpenAI-compatible endpoint, held to the log-probabilities that it reports itself.

What is not among the likeliest tokens it lists is one token to the tests, with the mass that the
list leaves. An endpoint reports the unshaped law, so it can be held to it where nothing shapes it
further, or where top-k leaves no more than is listed.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from mtplx.audit.engines import SLOTS
from mtplx.audit.law import Laws, Likely, Spot, Text, Token, filters, spot
from mtplx.errors import MtplxError
from mtplx.sampling import SamplerConfig, distribution_from_logits

LISTED = 20
"""Likeliest tokens asked for at each position; an endpoint that refuses is asked for 5."""

UNREADABLE = "\ufffd"
"""Stands in a token's text for bytes that are no character; two tokens can look alike then."""

SECONDS = 120.0
"""An answer may take."""

MOST_MASS = 1.05
"""Of all that is listed; more is no rounding."""

Listed = Sequence[tuple[str, float]]
"""Texts of likely tokens and their log-probabilities."""


class Endpoint:
    """`POST /v1/completions` at an address, with log-probabilities."""

    speculates = False  # or not: from outside nobody can tell

    def __init__(
        self,
        address: str,
        model: str | None,
        prompts: Sequence[str],
        sampling: SamplerConfig,
        seeded: bool = False,
    ) -> None:
        """
        Args:
            address: with or without `/v1`.
            model: its name there; None for the first that the endpoint has.
            prompts: texts.
            sampling: settings to ask for.
            seeded: whether to send seeds; not every endpoint varies its texts under one.
        Raises:
            MtplxError: the settings make a law that no list of log-probabilities has.
        """
        _check(sampling)
        address = address.rstrip("/")
        self.address = address if address.endswith("/v1") else f"{address}/v1"
        self.prompts, self.sampling, self.seeded = prompts, sampling, seeded
        self.model = model or self._first_model()
        self.name = f"{self.address}, {self.model}"
        self._laws: list[Laws] = [{} for _ in prompts]
        self.laws: list[Laws] | None = self._laws
        self.ended = 0
        # Without `ignore_eos` a text can end early. Not every endpoint knows it.
        self._ways = list(product((True, False), (LISTED, 5)))

    def draw(
        self, prompt: int, count: int, length: int, seed: int, speculate: bool
    ) -> Iterator[list[Text]]:
        """As `Engine.draw`; the texts have their spots already."""
        drawn = 0
        while drawn < count:
            body = self._body(prompt, min(SLOTS, count - drawn), length)
            if self.seeded:
                body["seed"] = (seed + drawn) % 2**31
            texts = [self._text(prompt, choice, length) for choice in self._complete(body)]
            if not texts:
                raise MtplxError(f"{self.address} answered without a choice")
            drawn += len(texts)
            yield texts

    @property
    def tokens_per_cycle(self) -> float | None:
        return None

    def notes(self) -> list[str]:
        if not self.ended:
            return []
        return [
            f"{self.ended} texts ended early; the draws that ended them are not reported, and "
            "missing here"
        ]

    def _body(self, prompt: int, count: int, length: int) -> dict[str, Any]:
        s = self.sampling
        body = {
            "model": self.model,
            "prompt": self.prompts[prompt],
            "n": count,
            "max_tokens": length,
            "temperature": s.temperature,
            "top_p": s.top_p,
        }
        # Not in OpenAI's own API, so only where they are wanted.
        return (
            body | ({"top_k": s.top_k} if s.top_k else {}) | ({"min_p": s.min_p} if s.min_p else {})
        )

    def _complete(self, body: dict[str, Any]) -> list[Any]:
        while True:
            ignore_eos, listed = self._ways[0]
            more = {"logprobs": listed} | ({"ignore_eos": True} if ignore_eos else {})
            try:
                answer = self._call("completions", body | more)
                break
            except _Refused as refusal:
                self._ways.pop(0)
                if not self._ways:
                    raise MtplxError(str(refusal)) from None
        choices = answer.get("choices") if isinstance(answer, dict) else None
        return choices if isinstance(choices, list) else []

    def _text(self, prompt: int, choice: Any, length: int) -> Text:
        tokens: list[str] = []
        spots: list[Spot] = []
        laws = self._laws[prompt]
        for token, listed in _steps(choice, self.address)[:length]:
            shaped = self._shaped(listed)
            spots.append(_spot(shaped, token))
            laws.setdefault(tuple(tokens), shaped)
            tokens.append(token)
        self.ended += len(tokens) < length
        return Text(prompt, tuple(tokens), (None,) * len(tokens), spots)

    def _shaped(self, listed: Listed) -> Likely:
        """Probabilities of the listed tokens, likeliest first."""
        _, count = self._ways[0]
        # Some add the drawn token to the list where it is not in it; that it is there must not
        # depend on the draw.
        best = sorted(listed, key=lambda item: (-item[1], item[0]))[:count]
        if self.sampling.top_k:
            if self.sampling.top_k > len(best):
                raise MtplxError(
                    f"{self.address} lists {len(best)} tokens a position; --top-k may be no more"
                )
            shaped = distribution_from_logits([lp for _, lp in best], self.sampling).tolist()
        else:
            shaped = [math.exp(lp) for _, lp in best]
            total = max(1.0, math.fsum(shaped))
            if total > MOST_MASS:
                raise MtplxError(
                    f"{self.address} lists probabilities that come to {total:.3g}: they are no law"
                )
            shaped = [p / total for p in shaped]
        law: dict[Token, float] = {}
        for (token, _), p in zip(best, shaped, strict=True):
            if UNREADABLE not in token:
                law[token] = law.get(token, 0.0) + p  # two tokens may have the same text
        return law

    def _first_model(self) -> str:
        try:
            return str(self._call("models", None)["data"][0]["id"])
        except (_Refused, KeyError, IndexError, TypeError):
            raise MtplxError(f"{self.address} names no model; give its name as --model") from None

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key.strip()}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self.address}/{path}", data, headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            detail = " ".join(error.read(500).decode(errors="replace").split())
            message = f"{self.address}/{path} answered {error.code}: {detail or error.reason}"
            if error.code in (400, 422):
                raise _Refused(message) from None
            raise MtplxError(message) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise MtplxError(f"{self.address}/{path}: {reason}") from None
        try:
            return json.loads(content)
        except ValueError:
            raise MtplxError(
                f"{self.address}/{path} answered with something that is no JSON"
            ) from None


class _Refused(Exception):
    """The endpoint does not take a request of this form."""


def _check(sampling: SamplerConfig) -> None:
    s = sampling
    if s != filters(s) or s.typical_p < 1:
        raise MtplxError(
            "an endpoint is audited with temperature, top-k, top-p and min-p; leave out the other "
            "settings"
        )
    shaped = s.temperature != 1 or s.top_p < 1 or s.min_p
    if s.top_k > LISTED or (shaped and not s.top_k):
        raise MtplxError(
            "an endpoint reports the unshaped law, and that of its likeliest tokens only; give "
            f"--temperature 1 and no filter, or a --top-k of at most {LISTED}"
        )


def _steps(choice: Any, address: str) -> list[tuple[str, Listed]]:
    """Each drawn token and what was listed with it, from either of the API's two forms."""
    try:
        given = choice["logprobs"]
        if "content" in given:
            return [
                (
                    str(step["token"]),
                    [(str(t["token"]), _logprob(t["logprob"])) for t in step["top_logprobs"]],
                )
                for step in given["content"]
            ]
        listed = given["top_logprobs"]
        return [
            (str(token), [(str(t), _logprob(lp)) for t, lp in likely.items()])
            for token, likely in zip(given["tokens"], listed, strict=True)
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise MtplxError(
            f"{address} gives no log-probabilities that can be read; start it with them"
        ) from None


def _logprob(value: Any) -> float:
    logprob = float(value)
    if not logprob <= MOST_MASS - 1:
        raise ValueError(f"{logprob} is the logarithm of no probability")
    return logprob


def _spot(law: Likely, token: str) -> Spot:
    """A token's place among those listed, or that of the rest, which comes last in both orders."""
    order = sorted(law, key=str)
    p = np.array([*(law[word] for word in order), max(0.0, 1 - math.fsum(law.values()))])
    found = spot(p, order.index(token) if token in law else len(order))
    found = found._replace(highest=max(law.values(), default=0.0))
    if token not in law:
        # However much the rest may be, it stands behind what is listed.
        return found._replace(above=found.before)
    likelier = (q for word, q in law.items() if (-q, str(word)) < (-found.p, token))
    return found._replace(above=math.fsum(likelier))
