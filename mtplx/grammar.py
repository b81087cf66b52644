"""Texts held to a JSON schema, a regular expression or a grammar, by llguidance.

llguidance and not xgrammar; 1.9.1 and 0.2.9 were tried, with the default model's tokenizer of
49,152 tokens and a schema of three fields. xgrammar's masks are quicker: 10 µs against 40 µs in the
median, and 0.1 ms against 20 ms for the slowest, a text's first. Beside a pass of the trunk either
is little. But xgrammar takes a schema with `uniqueItems` or `not` and does not keep to it, where
llguidance refuses what it cannot keep to; and it brings two more packages, Triton among them, where
llguidance is one wheel of 3 MB that needs nothing. Both take back as many tokens as a draft has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mtplx.errors import MtplxError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from mtplx.history import Constraint

Kind = Literal["json_schema", "regex", "lark"]
_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "Lark grammar"}


@dataclass(frozen=True)
class GrammarSpec:
    """What a text is to be, as a whole. Immutable and hashable; made by its three class methods.

    Attributes:
        kind: what `source` is.
        source: a schema as JSON text, a regular expression, or a grammar in Lark's notation as
            llguidance reads it.
    Raises:
        MtplxError: there is no such kind, or the source is no text.
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise MtplxError(f"a grammar is one of {get_args(Kind)}, got {self.kind!r}")
        name = _NAMES[self.kind]
        if not isinstance(self.source, str):
            raise MtplxError(f"the {name} must be a string, got {self.source!r}")
        try:
            self.source.encode()
        except UnicodeEncodeError:
            raise MtplxError(f"the {name} is no valid text: it has a lone surrogate") from None
        # llguidance would drop it.
        if self.kind == "regex" and (len(self.source) - len(self.source.rstrip("\\"))) % 2:
            raise MtplxError("the regex ends in a backslash that escapes nothing")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> GrammarSpec:
        """JSON that follows a schema, given as JSON text or as what that text stands for.

        Raises:
            MtplxError: it is no JSON, or no schema.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(value, default=_plain, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise MtplxError(f"the JSON schema is no JSON: {error}") from None
        except RecursionError:
            raise MtplxError("the JSON schema is nested too deeply to be read") from None
        if not isinstance(value, Mapping | bool):
            raise MtplxError(f"a JSON schema is an object, true or false, got {source}")
        return cls("json_schema", source)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """What a regular expression matches from end to end; it may not look around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """What a context-free grammar derives from its rule `start`."""
        return cls("lark", grammar)


class GrammarCompiler:
    """Makes constraints for the tokens of one tokenizer. Takes seconds to make."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """
        Args:
            tokenizer: of transformers, with a fast backend.
            vocab_size: of the model, which may be more than the tokenizer's.
        Raises:
            MtplxError: llguidance is not installed, or cannot read this tokenizer.
        """
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise MtplxError("a grammar needs llguidance: pip install llguidance") from None
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size)
        except Exception as error:  # whatever it or the tokenizer's own code raises
            raise MtplxError(f"llguidance cannot use this tokenizer: {_line(error)}") from None

    def compile(self, spec: GrammarSpec) -> Callable[[], Constraint]:
        """What begins a constraint by this grammar.

        Raises:
            MtplxError: the grammar is wrong, asks for what llguidance cannot keep to, or fits no
                text at all.
        """
        from llguidance import LLMatcher

        reader = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }[spec.kind]
        matcher = LLMatcher(self._tokenizer, reader(spec.source), log_level=0)
        name = _NAMES[spec.kind]
        if matcher.is_error():
            raise MtplxError(f"the {name} cannot be used: {_line(matcher.get_error())}")

        def begin() -> Constraint:
            return _Matched(matcher, self._tokenizer)

        first = begin()
        if not first.allowed().any() and not first.complete:
            raise MtplxError(f"the {name} cannot be used: {first.fault or 'no text fits it'}")
        return begin


class _Matched:
    """A constraint that llguidance keeps."""

    def __init__(self, beginning: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._tokenizer = tokenizer
        self._text: list[int] = []

    @property
    def complete(self) -> bool:
        return self.fault is None and bool(self._matcher.is_accepting())

    @property
    def fault(self) -> str | None:
        """llguidance gives up on a text that grows too complex, or that nothing can go on from."""
        if not self._matcher.is_error():
            return None
        reason = _line(self._matcher.get_error()).removesuffix(" <state>")
        return "no text fits it" if reason == "NoExtensionBias" else reason

    def allowed(self) -> NDArray[np.bool_]:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        count = self._tokenizer.vocab_size
        if self._matcher.is_error():
            return np.zeros(count, dtype=np.bool_)
        permitted = np.unpackbits(words, count=count, bitorder="little").astype(np.bool_)
        # Which tokens end a text, the request says.
        permitted[self._tokenizer.eos_tokens] = False
        return permitted

    def advance(self, token: int) -> bool:
        ends = token in self._tokenizer.eos_tokens
        if ends or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._text.append(token)
        return True

    def rollback(self, count: int) -> None:
        self._text = self._text[: len(self._text) - count]
        if self._matcher.is_error():
            # A matcher that has failed takes nothing back.
            self._matcher = self._beginning.deep_copy()
            self._matcher.try_consume_tokens(self._text)
        elif count:
            self._matcher.rollback(count)


def _plain(value: object) -> dict[Any, Any]:
    """What JSON takes for a mapping of another type than its own."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _line(error: object) -> str:
    """The first two lines of a message in one: what is wrong, and with what."""
    return " ".join(" ".join(str(error).splitlines()[:2]).split())
