"""Detokenizers: the pieces of any text are the text, and no piece ends within a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.text.detokenizer import BytesDetokenizer, WindowDetokenizer, detokenizer
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.tokenizer import PAD, SPECIAL, write_sentencepiece_like, write_tokenizer

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.text("the stopé😀€ \n", max_size=60)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_sentencepiece_like(tmp_path_factory.mktemp("spm")))


def streamed(tokenizer: FastTokenizer, ids: list[int], *, skip: bool = True, window: bool = False) -> list[str]:
    state = WindowDetokenizer(tokenizer, skip) if window else detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(state.add, ids), state.flush()]


@given(text=TEXTS)
@pytest.mark.parametrize("window", [False, True])
def test_byte_level_text_comes_whole(byte_level: FastTokenizer, text: str, window: bool) -> None:
    ids = byte_level.encode(text)
    parts = streamed(byte_level, ids, window=window)
    assert "".join(parts) == text == byte_level.decode(ids)


@given(text=TEXTS)
@pytest.mark.parametrize("window", [False, True])
def test_sentencepiece_text_comes_whole(sentencepiece_like: FastTokenizer, text: str, window: bool) -> None:
    ids = sentencepiece_like.encode(text)
    assert "".join(streamed(sentencepiece_like, ids, window=window)) == sentencepiece_like.decode(ids)


@given(ids=st.lists(st.integers(0, 274), max_size=60), skip=st.booleans())
def test_any_ids_give_what_the_whole_gives(byte_level: FastTokenizer, ids: list[int], skip: bool) -> None:
    whole = byte_level.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(byte_level, ids, skip=skip)) == whole


def test_never_half_a_character(byte_level: FastTokenizer) -> None:
    ids = byte_level.encode("a😀€")
    assert len(ids) == 5
    assert streamed(byte_level, ids) == ["a", "", "😀", "", "€", ""]
    assert streamed(byte_level, ids, window=True) == ["a", "", "😀", "", "€", ""]


def test_an_unfinished_character_shows_only_at_the_end(byte_level: FastTokenizer) -> None:
    ids = byte_level.encode("a😀")[:-1]
    assert streamed(byte_level, ids) == ["a", "", "\ufffd"]


def test_special_tokens_are_left_out_or_shown(byte_level: FastTokenizer) -> None:
    ids = byte_level.encode(f"a{SPECIAL[1]}b")
    assert "".join(streamed(byte_level, ids)) == "ab"
    assert "".join(streamed(byte_level, ids, skip=False)) == f"a{SPECIAL[1]}b"


def test_a_character_may_be_split_by_a_skipped_token(byte_level: FastTokenizer) -> None:
    first, second = byte_level.encode("😀")
    assert "".join(streamed(byte_level, [first, byte_level.eos_ids[0], second])) == "😀"
    assert "".join(streamed(byte_level, [first, byte_level.eos_ids[0], second], window=True)) == "😀"


def test_the_leading_space_goes_once(sentencepiece_like: FastTokenizer) -> None:
    ids = sentencepiece_like.encode("a") * 3
    assert streamed(sentencepiece_like, ids) == ["a", " a", " a", ""]


def test_the_fast_way_is_chosen_for_both_families(
    byte_level: FastTokenizer, sentencepiece_like: FastTokenizer
) -> None:
    assert isinstance(detokenizer(byte_level), BytesDetokenizer)
    assert isinstance(detokenizer(sentencepiece_like), BytesDetokenizer)


def test_garbage_does_not_grow_the_window(byte_level: FastTokenizer) -> None:
    garbage = next(i for i in range(256) if byte_level.token_bytes(i) == b"\xff")
    state = WindowDetokenizer(byte_level, True)
    for _ in range(200):
        state.add(garbage)
    assert len(state._ids) < 20


@pytest.mark.parametrize("window", [False, True])
def test_kept_special_tokens_have_their_text(byte_level: FastTokenizer, window: bool) -> None:
    ids = byte_level.encode("a<|endoftext|>é<|im_start|>b")
    keep = frozenset({PAD})
    make = WindowDetokenizer(byte_level, True, keep) if window else detokenizer(byte_level, keep=keep)
    assert "".join(map(make.add, ids)) + make.flush() == "a<|endoftext|>éb"
    plain = WindowDetokenizer(byte_level, True) if window else detokenizer(byte_level)
    assert "".join(map(plain.add, ids)) + plain.flush() == "aéb"
    every = detokenizer(byte_level, skip_special_tokens=False, keep=keep)
    assert "".join(map(every.add, ids)) == "a<|endoftext|>é<|im_start|>b"


def test_kept_special_tokens_of_a_sentencepiece_vocabulary(sentencepiece_like: FastTokenizer) -> None:
    tokenizer = sentencepiece_like
    ids = [tokenizer.encode("<s>", add_special_tokens=False)[0], *tokenizer.encode(" a"), 2]
    make = detokenizer(tokenizer, keep=frozenset(ids[:1]))
    assert "".join(map(make.add, ids)).replace(" ", "") == "<s>a"
