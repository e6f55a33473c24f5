"""Words that an answer must not have: which tokens they are, and what transformers forbids for the same tokens."""

from __future__ import annotations

import random

import pytest
import torch
from llmcore.api.bridge import LogitsProcessor, SamplingParams
from llmcore.api.errors import RequestError
from llmcore.api.processors import ProcessorContext
from llmcore.api.protocols import Tokenizer
from llmcore.text.bad_words import NEVER, PROCESSOR, BadWords, forbid, make, sequences_of
from transformers.generation.logits_process import NoBadWordsLogitsProcessor


class Letters:
    """A token per letter, one for the word "end", and one for each letter after a space."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found, text = [], text.replace("end", "\0")
        while text:
            spaced = text[0] == " " and len(text) > 1
            found.append(ord(text[1]) + 128 if spaced else ord(text[0]))
            text = text[2:] if spaced else text[1:]
        return found


LETTERS: Tokenizer = Letters()  # type: ignore[assignment]


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space() -> None:
    assert sequences_of(["ab"], LETTERS, 256) == [(97, 98), (225, 98)]
    assert sequences_of([" ab", "ab"], LETTERS, 256) == [(97, 98), (225, 98)]
    assert sequences_of(["end", "\n"], LETTERS, 256) == [(0,), (128,), (10,), (138,)]


def test_a_sequence_that_ends_with_another_is_left_out() -> None:
    """Also where a space is a token of its own, so that every word after a space ends with the word."""
    assert sequences_of(["ab", "cab", "b"], LETTERS, 256) == [(98,), (226,)]
    assert sequences_of(["b c"], LETTERS, 256) == [(98, 227), (226, 227)]


def test_the_tokens_of_all_words_are_bounded() -> None:
    letters = "abcdefghijklmnop"
    words = [first + second * 500 for first in letters for second in letters[:2]]
    assert len(sequences_of(words[:16], LETTERS, 256)) == 32
    with pytest.raises(RequestError, match="16,384 tokens"):
        sequences_of(words, LETTERS, 256)


@pytest.mark.parametrize(("words", "size", "reason"), [(["a", ""], 256, "empty"), (["ab"], 225, "225")])
def test_words_that_cannot_be_forbidden(words: list[str], size: int, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        sequences_of(words, LETTERS, size)
    assert (raised.value.param, raised.value.code, raised.value.status) == ("bad_words", "invalid_value", 400)


def test_one_token_is_a_bias_and_several_are_a_processor() -> None:
    plain = SamplingParams(logit_bias={0: 5.0, 7: 1.0})
    single = forbid(plain, ["end"], LETTERS, 256)
    assert single.logit_bias == {0: NEVER + 5.0, 7: 1.0, 128: NEVER}
    assert single.logits_processors == ()
    both = forbid(plain, ["end", "ab"], LETTERS, 256)
    sequences = [[97, 98], [225, 98]]
    assert both.logits_processors == (LogitsProcessor("bad_words", {"sequences": sequences}, "bad_words"),)


def test_what_is_allowed_must_not_be_forbidden() -> None:
    forbid(SamplingParams(allowed_ids=(0, 7)), ["end"], LETTERS, 256)
    with pytest.raises(RequestError, match="allowed"):
        forbid(SamplingParams(allowed_ids=(0, 128)), ["end"], LETTERS, 256)


def test_the_tokens_that_transformers_forbids() -> None:
    """Of few different tokens, so that prefixes come often and are ends of each other.

    A prompt stands before them, because transformers 5.17 forbids nothing until there are as many tokens as a
    sequence has.
    """
    chance = random.Random(3)
    prompt = [9] * 5
    for _ in range(30):
        sequences = [[chance.randrange(4) for _ in range(chance.randrange(2, 5))] for _ in range(6)]
        theirs = NoBadWordsLogitsProcessor(sequences)
        mine, answer = BadWords(map(tuple, sequences)), []
        for _ in range(25):
            scores = theirs(torch.tensor([prompt + answer]), torch.zeros(1, 10))
            assert set(mine.bias()) == set(torch.nonzero(scores[0] == -torch.inf).flatten().tolist())
            assert set(mine.bias().values()) <= {NEVER} and not mine.finished()
            answer.append(chance.randrange(4))
            mine.accept(answer[-1])


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"sequences": [[1]]},
        {"sequences": [1]},
        {"sequences": [[1, 300]]},
        {"sequences": [[1, -1]]},
        {"sequences": [[1, True]]},
        {"sequences": [[1, 2]], "more": 1},
        {"sequences": [[1, 2]] * 8193},
    ],
)
def test_arguments_that_are_refused(args: dict[str, object]) -> None:
    context = ProcessorContext(300, (0,), lambda: LETTERS)
    assert make(dict(PROCESSOR.example), context)([]).bias() == {}
    with pytest.raises(ValueError, match=r"takes|ids are"):
        make(args, context)
