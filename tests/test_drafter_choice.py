"""Which drafter a model is loaded with, by name; and what cannot be had."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import tiny_checkpoint

import mtplx
from mtplx import SamplerConfig, kernels
from mtplx.cli import main
from mtplx.drafters.draft_model import DraftModel
from mtplx.drafters.mixed import HeadOrLookup
from mtplx.drafters.ngram import Ngram
from mtplx.errors import MtplxError

GREEDY = SamplerConfig(temperature=0, logit_bias={256: -float("inf")})
PROMPT = [*b"the same again, and the same again, and the"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        "model": tiny_checkpoint.write(root / "model", width=64, inner=64),
        "small": tiny_checkpoint.write(root / "small", width=32, inner=32),
        "head": tiny_checkpoint.write_head(root / "head", width=64),
    }


def load(directories: dict[str, Path], **settings: object) -> mtplx.LLM:
    named = {key: directories.get(str(value), value) for key, value in settings.items()}
    return mtplx.load(
        directories["model"],
        **{"dtype": "float32", "device": "cpu"} | named,  # type: ignore[arg-type]
    )


WAYS = {
    "ngram": {"drafter": "ngram"},
    "mtp": {"drafter": "mtp", "head": "head"},
    "mtp+ngram": {"drafter": "mtp+ngram", "head": "head"},
    "draft model small": {"draft_model": "small"},
}


@pytest.mark.parametrize("name", WAYS)
def test_a_drafter_is_loaded_by_name_and_drafts(directories: dict[str, Path], name: str) -> None:
    llm = load(directories, **WAYS[name])
    assert llm.drafts_with is not None
    assert llm.drafts_with.replace(str(directories["small"]), "small") == name
    kinds = {"ngram": Ngram, "mtp+ngram": HeadOrLookup, "draft model small": DraftModel}
    assert isinstance(llm.drafter, kinds.get(name, object))
    assert (llm.head is not None) == name.startswith("mtp")
    assert llm.depth > 0
    assert llm.default_depth(SamplerConfig()) == "auto"
    plain = llm.generate(PROMPT, max_tokens=40, depth=0, sampling=GREEDY)
    drafted = llm.generate(PROMPT, max_tokens=40, depth=4, sampling=GREEDY)
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.drafted_by_position) > 0
    learned = llm.generate(PROMPT, max_tokens=40, depth="auto", sampling=GREEDY)
    assert learned.token_ids == plain.token_ids


def test_nothing_changes_where_nothing_is_asked_for(directories: dict[str, Path]) -> None:
    bare, headed = load(directories), load(directories, head="head")
    assert (bare.drafter, bare.drafts_with, bare.depth) == (None, None, 0)
    assert headed.drafter is headed.head and headed.drafts_with == "mtp"


@pytest.mark.parametrize("name", WAYS)
def test_a_conversation_goes_on_as_if_it_were_read_anew(
    directories: dict[str, Path], name: str
) -> None:
    llms = [load(directories, deterministic=True, **WAYS[name]) for _ in range(2)]
    sampling = SamplerConfig(temperature=1.2, top_k=50, seed=4)
    first = llms[0].generate(PROMPT, max_tokens=20, depth=2, sampling=sampling)
    longer = [*PROMPT, *first.token_ids, *PROMPT]
    results = [llm.generate(longer, max_tokens=20, depth=2, sampling=sampling) for llm in llms]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats.cached_tokens > len(PROMPT) and not results[1].stats.cached_tokens
    assert results[0].stats.accepted_by_position == results[1].stats.accepted_by_position


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("name", WAYS)
def test_they_draft_for_quantised_models(directories: dict[str, Path], name: str) -> None:
    llm = load(directories, dtype=None, quantize="int8", **WAYS[name])
    prompts = [PROMPT, PROMPT[:3], PROMPT]
    sampling = SamplerConfig(temperature=1.1, seed=1)
    settings = {"max_tokens": 30, "sampling": sampling}
    plain = llm.generate(prompts, depth=0, **settings)  # type: ignore[call-overload]
    drafted = llm.generate(prompts, depth=3, **settings)  # type: ignore[call-overload]
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(sum(r.stats.drafted_by_position) > 0 for r in drafted[::2])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"drafter": "mtp"}, "model has no MTP head for the drafter 'mtp': name one"),
        ({"drafter": "mtp+ngram"}, "has no MTP head for the drafter 'mtp+ngram'"),
        ({"drafter": "eagle"}, "drafter must be one of auto, mtp, ngram, mtp+ngram, got 'eagle'"),
        ({"drafter": "ngram", "head": "head"}, "the drafter 'ngram' uses no head"),
        ({"draft_model": "small", "head": "head"}, "a draft_model drafts alone"),
        ({"draft_model": "small", "drafter": "ngram"}, "a draft_model drafts alone"),
        ({"draft_model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(
    directories: dict[str, Path], settings: dict[str, str], complaint: str
) -> None:
    with pytest.raises(MtplxError, match=re.escape(complaint)) as raised:
        load(directories, **settings)
    assert "\n" not in str(raised.value)


def written(directory: Path, vocab_size: int, renamed: str | None = None) -> Path:
    """A draft model of so many tokens, with one of the tokenizer's renamed."""
    tiny.llama(vocab_size).model.save_pretrained(directory)
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.save_pretrained(directory)
    if renamed:
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["other"] = vocabulary.pop(renamed)
        file.write_text(json.dumps(content))
    return directory


def test_a_draft_model_has_the_same_tokens_or_the_first_of_them(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    llm = load(directories, draft_model=written(tmp_path / "fewer", 200))
    text = llm.generate(PROMPT, max_tokens=30, depth=3, sampling=GREEDY)
    assert text.token_ids == llm.generate(PROMPT, max_tokens=30, depth=0, sampling=GREEDY).token_ids
    more = tiny_checkpoint.VOCAB_SIZE + 1
    with pytest.raises(MtplxError, match=f"it has {more} tokens, more than the model's {more - 1}"):
        load(directories, draft_model=written(tmp_path / "more", more))
    with pytest.raises(MtplxError, match="'other' is not the same token in both"):
        load(directories, draft_model=written(tmp_path / "other", 200, renamed="a"))


@pytest.mark.parametrize("name", WAYS)
def test_the_command_line_takes_them(
    directories: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        part
        for key, value in WAYS[name].items()
        for part in (f"--{key.replace('_', '-')}", str(directories.get(value, value)))
    ]
    fixed = ["--dtype", "float32", "--device", "cpu", "--depth", "2", "--max-tokens", "20"]
    command = ["generate", "again and again", "--model", str(directories["model"]), "--json"]
    with pytest.raises(SystemExit) as end:
        main([*command, *fixed, *options])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert answer["drafter"].replace(str(directories["small"]), "small") == name
