"""A tiny model on disk in Hugging Face layout, with a tokenizer, a chat template and a head."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtplx.models.eagle3 import save_head

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (END, USER, ASSISTANT)
VOCAB_SIZE = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, chat_template=template)


def write(
    directory: Path,
    *,
    width: int = 16,
    inner: int = 24,
    context: int = 512,
    template: str | None = TEMPLATE,
    generation: dict[str, object] | None = None,
) -> Path:
    """A Llama of a few thousand random parameters."""
    tiny.llama(VOCAB_SIZE, width=width, inner=inner, context=context).model.save_pretrained(
        directory
    )
    tokenizer(template).save_pretrained(directory)
    ends = {"eos_token_id": tokenizer().convert_tokens_to_ids(END)}
    (directory / "generation_config.json").write_text(json.dumps(ends | (generation or {})))
    return directory


def write_head(directory: Path, draft_vocab_size: int = 200, width: int = 16) -> Path:
    """A random head for it."""
    save_head(tiny.eagle3(tiny.llama(VOCAB_SIZE, width=width), draft_vocab_size), directory)
    return directory
