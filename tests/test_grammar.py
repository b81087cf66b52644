"""Grammars on real tokenizers: what comes out is what was asked for, drafted or not."""

import json
import re
import sys
from types import MappingProxyType

import numpy as np
import pytest
import tiny_checkpoint

import mtplx
from mtplx import GrammarSpec, MtplxError, SamplerConfig
from mtplx.grammar import GrammarCompiler

END = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def assert_valid(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert re.fullmatch("[A-Z][a-z]{1,8}", value["name"])
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green", "blue"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    root = tmp_path_factory.mktemp("grammar")
    model, head = tiny_checkpoint.write(root / "model"), tiny_checkpoint.write_head(root / "head")
    return mtplx.load(model, head=head, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tiny_checkpoint.tokenizer(), tiny_checkpoint.VOCAB_SIZE + 9)


def text_of(ids):
    return tiny_checkpoint.tokenizer().decode(ids)


# --- A constraint ---------------------------------------------------------------------------------


def test_a_constraint_follows_a_text_and_takes_tokens_back(compiler):
    constraint = compiler.compile(GrammarSpec.regex("[ab]{2}c?"))()
    a, b, c = tiny_checkpoint.tokenizer()("abc")["input_ids"]

    def state():
        allowed = constraint.allowed()
        assert allowed.shape == (tiny_checkpoint.VOCAB_SIZE + 9,)
        return text_of(np.flatnonzero(allowed)), constraint.complete

    assert state() == ("ab", False)
    assert constraint.advance(a) and constraint.advance(b)
    assert state() == ("c", True)
    # Neither another letter nor the token that ends texts is the grammar's.
    assert not constraint.advance(a) and not constraint.advance(END)
    assert state() == ("c", True)
    assert constraint.advance(c)
    assert state() == ("", True)
    constraint.rollback(2)
    assert state() == ("ab", False)
    constraint.rollback(0)
    constraint.rollback(1)
    assert state() == ("ab", False)
    assert constraint.advance(b) and constraint.advance(b) and constraint.complete


def test_constraints_of_one_grammar_are_apart(compiler):
    begin = compiler.compile(GrammarSpec.lark('start: "<" start ">" | "x"'))
    first, second = begin(), begin()
    assert first.advance(tiny_checkpoint.tokenizer()("x")["input_ids"][0])
    assert (first.complete, second.complete) == (True, False)
    assert text_of(np.flatnonzero(second.allowed())) == "<x"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GrammarSpec.regex("[a-"), "the regex cannot be used: .*invalid regex"),
        (GrammarSpec.lark("start: foo"), 'the Lark grammar cannot be used: .*unknown name: "foo"'),
        (GrammarSpec.json_schema({"not": {}}), "the JSON schema cannot be used: .*not"),
        (GrammarSpec.json_schema({"type": "strin"}), "the JSON schema cannot be used: .*strin"),
        (GrammarSpec.json_schema({"$ref": "#"}), "JSON schema cannot be used: no text fits it"),
        (GrammarSpec.regex(r"[^\s\S]"), "the regex cannot be used: no text fits it"),
    ],
)
def test_a_grammar_that_cannot_be_kept_to_is_refused(compiler, spec, says):
    with pytest.raises(MtplxError, match=says) as caught:
        compiler.compile(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "is no JSON: "),
        ({"a": {1}}, "is no JSON: "),
        ('{"minimum": NaN}', "is no JSON: "),
        ("3", "object, true or false, got 3"),
        ('{"items":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_schema_is_refused(schema, says):
    with pytest.raises(MtplxError, match=says):
        GrammarSpec.json_schema(schema)


def test_a_schema_is_text_or_what_it_stands_for():
    assert GrammarSpec.json_schema(SCHEMA) == GrammarSpec.json_schema(json.dumps(SCHEMA))
    assert GrammarSpec.json_schema(MappingProxyType(SCHEMA)) == GrammarSpec.json_schema(SCHEMA)
    assert len({GrammarSpec.json_schema(True), GrammarSpec.json_schema("true")}) == 1


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("gbnf", "a", r"one of \('json_schema', 'regex', 'lark'\), got 'gbnf'"),
        ("regex", 5, "the regex must be a string, got 5"),
        ("lark", b"a", "the Lark grammar must be a string, got b'a'"),
        ("regex", "\ud800", "the regex is no valid text"),
        ("regex", "a\\\\\\", "the regex ends in a backslash"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_at_once(kind, source, says):
    with pytest.raises(MtplxError, match=says):
        GrammarSpec(kind, source)


def test_a_backslash_may_end_a_regex_if_it_is_escaped(compiler):
    constraint = compiler.compile(GrammarSpec.regex(r"a\\"))()
    assert all(map(constraint.advance, tiny_checkpoint.tokenizer()("a\\")["input_ids"]))
    assert constraint.complete


def test_a_failed_constraint_says_why_and_comes_back(compiler):
    """Behind its b nothing can come; llguidance's own state cannot be taken back from there."""
    constraint = compiler.compile(GrammarSpec.lark(r'start: "xa" | "xb" /[^\s\S]/'))()
    x, a, b = tiny_checkpoint.tokenizer()("xab")["input_ids"]
    assert constraint.advance(x) and constraint.advance(b)
    assert not constraint.allowed().any() and not constraint.complete
    assert constraint.fault == "no text fits it"
    assert not constraint.advance(a)
    constraint.rollback(1)
    assert constraint.fault is None
    assert set(np.flatnonzero(constraint.allowed())) == {a, b}
    assert constraint.advance(a) and constraint.complete


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_a_text_does_not_go_on_where_llguidance_gives_up(llm, depth):
    pieces = []
    with pytest.raises(MtplxError, match=r"the grammar leaves no token .* \(lexer error: too many"):
        for piece in llm.stream("hi", depth=depth, grammar=GrammarSpec.regex("(a{1000}){1000}")):
            pieces.append(piece.text)
    assert set("".join(pieces)) <= {"a"}


def test_without_llguidance_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(MtplxError, match=r"pip install llguidance"):
        GrammarCompiler(tiny_checkpoint.tokenizer(), tiny_checkpoint.VOCAB_SIZE)


# --- Whole texts ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["coupled", "block", "token"])
def test_every_text_is_what_was_asked_for(llm, verifier):
    spec, prompts = GrammarSpec.json_schema(SCHEMA), ["hi", "what", "why", "who"]

    def run(depth):
        return llm.generate(
            prompts,
            max_tokens=120,
            depth=depth,
            sampling=SamplerConfig(seed=3),
            verifier=verifier,
            grammar=spec,
        )

    deep = run(3)
    for result in deep:
        assert result.finish_reason == "stop" and result.token_ids[-1] == END
        assert_valid(result.text)
    # Whatever is as good as certain here, a random head finds as well.
    assert sum(sum(result.stats.accepted_by_position) for result in deep) > 20
    if verifier == "coupled":
        assert [r.token_ids for r in deep] == [r.token_ids for r in run(0)]


def test_a_forced_opening_is_not_the_grammars(llm):
    opening = llm.tokenizer("So: ")["input_ids"]
    result = llm.generate(
        "hi",
        max_tokens=40,
        depth=3,
        sampling=SamplerConfig(seed=1, forced_tokens=opening),
        grammar=GrammarSpec.regex("[0-9]{4}-[0-9]{2}"),
    )
    assert re.fullmatch("So: [0-9]{4}-[0-9]{2}", result.text)


def test_a_stop_token_ends_a_text_where_it_is_complete(llm):
    stop = llm.tokenizer(";")["input_ids"]
    for result in llm.generate(
        ["a", "b", "c", "d"],
        max_tokens=40,
        depth=2,
        sampling=SamplerConfig(seed=1, logit_bias={stop[0]: 20.0}),
        grammar=GrammarSpec.regex("[xy]{3,6}"),
        stop_token_ids=stop,
    ):
        assert re.fullmatch("[xy]{3,6};", result.text)


def test_a_stop_token_of_the_grammars_own_comes_only_where_the_text_is_complete(llm):
    stop = llm.tokenizer("y")["input_ids"]
    for result in llm.generate(
        ["a", "b", "c", "d"],
        max_tokens=40,
        depth=2,
        sampling=SamplerConfig(seed=1, logit_bias={stop[0]: 8.0}),
        grammar=GrammarSpec.regex("[xy]{3,6}z?"),
        stop_token_ids=stop,
    ):
        assert re.fullmatch("x{3,6}z?y", result.text)


def test_what_is_no_grammar_is_refused(llm):
    with pytest.raises(MtplxError, match=r"grammar must be a GrammarSpec, .* got a dict"):
        llm.generate("hi", grammar=SCHEMA)
    with pytest.raises(MtplxError, match="the regex cannot be used"):
        llm.stream("hi", grammar=GrammarSpec.regex("("))


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_writes_json(default_model):
    def run(depth):
        return default_model.generate(
            "Describe a person as JSON with name, age and tags.",
            max_tokens=80,
            depth=depth,
            sampling=SamplerConfig(seed=5),
            grammar=GrammarSpec.json_schema(SCHEMA),
        )

    plain, deep = run(0), run(3)
    assert_valid(deep.text)
    assert deep.text == plain.text
    assert deep.stats.cycles < plain.stats.cycles
