"""Text that is streamed is the text, and is never taken back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mtplx.text.detokenizer import UNFINISHED, Detokenizer

CORPUS = [
    "the cat sat on the mat, the end",
    "naïve café über",
    "мама мыла раму",
    "你好世界 🙂🙃 👩‍👩‍👧",
] * 3


def byte_level(vocab_size):
    """Byte-level BPE; with few merges most characters beyond ASCII span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def pieced():
    """As sentencepiece makes them: a space belongs to the word after it, bytes are a fallback."""
    words = ["▁the", "▁cat", "▁", "cat", "s", "▁é", "<unk>"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = byte_level(257)
MERGED = byte_level(320)
PIECES = pieced()


def stream(tokenizer, ids, cuts):
    """The pieces that come of pushing `ids` in lists that end at `cuts`."""
    detokenizer = Detokenizer(tokenizer)
    ends = [*sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    pieces = [
        detokenizer.push(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)
    ]
    return pieces, detokenizer.finish()


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


text = st.text(max_size=20) | st.text("e\u0301🙂👩\u200d👧\U0001f3fd\U0001f1e9 \n你", max_size=12)
cuts = st.lists(st.integers(0, 200), max_size=8)


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@settings(max_examples=60)
@given(text, cuts)
@example("👩‍👩‍👧 \u0301e", list(range(40)))
def test_pieces_make_up_the_text(tokenizer, text, cuts):
    ids = tokenizer(text)["input_ids"]
    pieces, rest = stream(tokenizer, ids, cuts)
    assert "".join(pieces) + rest == whole(tokenizer, ids)
    # Finished characters are not held back, and unfinished ones do not show.
    assert UNFINISHED in text or (rest == "" and UNFINISHED not in "".join(pieces))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["▁the", "▁cat", "s", "▁", "▁é"]) | text, max_size=8), cuts)
def test_pieces_of_a_vocabulary_with_a_byte_fallback_make_up_the_text(parts, cuts):
    names = []
    for part in parts:
        spelled = [f"<0x{byte:02X}>" for byte in part.encode()]
        names += [part] if part in PIECES.get_vocab() else spelled
    ids = PIECES.convert_tokens_to_ids(names)
    pieces, rest = stream(PIECES, ids, cuts)
    assert "".join(pieces) + rest == whole(PIECES, ids)
    assert UNFINISHED in "".join(parts) or (rest == "" and UNFINISHED not in "".join(pieces))


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@settings(max_examples=60)
@given(st.data(), cuts)
def test_tokens_that_spell_no_text_come_out_as_they_would_at_once(tokenizer, data, cuts):
    """A sampled model may write any ids: broken characters, and special tokens within."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    pieces, rest = stream(tokenizer, ids, cuts)
    assert "".join(pieces) + rest == whole(tokenizer, ids)


def test_a_character_shows_once_it_is_whole():
    ids = BYTES("a🙂b")["input_ids"]
    assert len(ids) == 6
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_shows_at_the_end_as_broken():
    ids = BYTES("a🙂")["input_ids"][:3]
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == UNFINISHED
    assert detokenizer.finish() == ""


def test_special_tokens_leave_no_text():
    end = BYTES.eos_token_id
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([*BYTES("hi")["input_ids"], end]) == "hi"
    assert detokenizer.push([end]) == ""
    assert detokenizer.push(BYTES("!")["input_ids"]) == "!"
    assert detokenizer.finish() == ""


def test_spaces_between_pieces_are_kept():
    ids = PIECES.convert_tokens_to_ids(["▁the", "▁cat", "s", "▁", "▁", "▁cat"])
    detokenizer = Detokenizer(PIECES)
    assert [detokenizer.push([token]) for token in ids] == ["the", " cat", "s", " ", " ", " cat"]


@pytest.mark.model
@settings(max_examples=40)
@given(text=text, cuts=cuts)
def test_the_default_tokenizer_streams_its_text(default_model, text, cuts):
    tokenizer = default_model.tokenizer
    ids = tokenizer(text)["input_ids"]
    pieces, rest = stream(tokenizer, ids, cuts)
    assert "".join(pieces) + rest == whole(tokenizer, ids)
    # Its vocabulary lacks the byte 0xF1, so that a few rare characters are broken from the start.
    text = whole(tokenizer, ids)
    assert UNFINISHED in text or (rest == "" and UNFINISHED not in "".join(pieces))
