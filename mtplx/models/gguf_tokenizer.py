"""The tokenizers of GGUF files, as transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf

from mtplx.errors import MtplxError
from mtplx.models.gguf import GgufFile, by_itself

# As in `gguf_families`: imported where it is needed.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Splitter:
    """How text is cut before byte pairs are merged, by the file's `tokenizer.ggml.pre`.

    `pattern`: the pieces, as the model's own tokenizer.json has it; `None` is GPT-2's, with
    digits cut one by one first if `digits`. `whole_words`: a piece that is in the vocabulary is
    taken as it is, whether merges lead to it or not. `nfc`: text is composed first.
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False


def _words(numbers: str, letters: str = r"\p{L}") -> str:
    """The pattern that Llama 3 and Qwen share but for how many digits make a piece, and for what
    counts as a letter."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
        rf"|{numbers}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _Splitter()
_GPT2_DIGITS = _Splitter(digits=True)
_LLAMA3 = _Splitter(_words(r"\p{N}{1,3}"), whole_words=True)
_QWEN2 = _Splitter(_words(r"\p{N}"), nfc=True)
_QWEN35 = _Splitter(_words(r"\p{N}", r"\p{L}\p{M}"), nfc=True)
_GLM4 = _Splitter(_words(r"\p{N}{1,3}"))

_SPLITTERS = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
}

_CONTROL, _USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED


def load_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The file's tokenizer, with its special tokens and its chat template.

    Byte-level BPE is built here. transformers' GGUF loader falls back to GPT-2's splitting where
    it does not know the file's (`smollm` among them, so that "a  1" comes out differently than
    the model was trained on), hence a splitter known to neither is an error.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind, pre = file["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _SPLITTERS:
        if kind == "gpt2" and pre not in _splitters_of_transformers():
            raise MtplxError(
                f"{file.path}: how its tokenizer splits text ({pre!r}) is not known here "
                f"(known: {', '.join(sorted(_SPLITTERS))}): use the model's Hugging Face checkpoint"
            )
        with by_itself(file) as place:
            return AutoTokenizer.from_pretrained(**place)

    tokens = file["tokenizer.ggml.tokens"]

    def token(name: str) -> str | None:
        index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(file, _SPLITTERS[pre]),
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_length=file[f"{file.architecture}.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _splitters_of_transformers() -> Mapping[str, str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    splits: Mapping[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    return splits


def _byte_level_bpe(file: GgufFile, splitter: _Splitter) -> Any:
    """The `tokenizers.Tokenizer` of a GPT-2 style vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    tokens = file["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]],
            ignore_merges=splitter.whole_words,
        )
    )
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre.Digits(individual_digits=True)] if splitter.digits else []
    if splitter.pattern is not None:
        steps.append(pre.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()

    # Control tokens steer the model and are left out of its text; user-defined ones (`<think>`)
    # are part of the text. Both are matched whole, before any splitting.
    kinds = list(zip(tokens, file["tokenizer.ggml.token_type"], strict=True))
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in kinds
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        index = file["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[index]} $A",
            pair=f"{tokens[index]} $A {tokens[index]} $B",
            special_tokens=[(tokens[index], index)],
        )
    return tokenizer
