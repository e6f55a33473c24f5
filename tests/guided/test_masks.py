"""plugin-guided: masks of regular expressions that are kept are those that would be computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api import ProcessorContext, Tokenizer
from llmcore.api.text import load_tokenizer
from llmcore_devtools.tokenizer import EOS, write_tokenizer
from llmcore_guided import masks, processor, residuals
from llmcore_guided.characters import Characters
from llmcore_guided.expressions import expression
from llmcore_guided.processor import Guided, make
from llmcore_guided.residuals import MOST_KINDS

MORE = ("ab", "aab", "bb a", " a", " b a b", "abcabcabc", "12", "1.2", "a\n", "\n\n", "é1", "語a", "--------", "a.b@")
"""Tokens that hold several parts of the expressions below."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), MORE))


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> ProcessorContext:
    return context_of(tokenizer)


def context_of(tokenizer: Tokenizer, stop_ids: tuple[int, ...] = (EOS,)) -> ProcessorContext:
    return ProcessorContext(tokenizer.vocab_size, (EOS,), cache(lambda: tokenizer), stop_ids=stop_ids)


def allowed(guided: Guided) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(guided.mask().view(np.uint8), bitorder="little"))]


def tried(guided: Guided, size: int) -> list[int]:
    """What may come, found by trying every token."""
    matcher = guided._matcher
    found = [token for token in range(size) if matcher.deep_copy().try_consume_tokens([token]) == 1]
    return sorted({*found, *([EOS] if matcher.is_accepting() else [])})


def walk(start: Callable[[], Guided], size: int, random: np.random.Generator, answers: int, most: int) -> int:
    """Answers drawn token by token, each mask compared with what trying finds; how many had a key."""
    keyed = 0
    for _ in range(answers):
        guided = start()
        for _ in range(most):
            found = allowed(guided)
            assert found == tried(guided, size)
            keyed += guided._place is not None and guided._place.key is not None
            # the end is drawn seldom, so that answers get long
            token = int(random.choice([t for t in found if t != EOS] or found))
            guided.accept(token)
            if guided.finished():
                break
    return keyed


EXPRESSIONS = (
    r"([a-z]{1,4}( [a-z]{1,3}){3,30}\. ){3,}",
    r"\w+( \w+){5,20}",
    r"(\+\d{1,3} )?(\(\d{3}\) |\d{3}-)\d{3}-\d{4}",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    r"[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(\.[a-zA-Z]{2,10}){1,2}",
    r"https?://[a-z0-9-]{1,9}(\.[a-z0-9-]{1,9}){1,3}(/[A-Za-z0-9._~%-]{0,4}){0,8}",
    r"(- [^\n]{1,20}\n){3,9}",
    r"(.|\n){1,40}",
    r"([^a\d]|a{2,5}\s){4,}",
    r"((ab|a)?(b|bb){2,3} ?){2,7}",
    r"(\W{1,3}[\w.]){2,9}",
    r"((a?){3}b?){4}c*",
    r"[\S\d-]{3,12}",
    r"(?:é|語|[ä-ÿ]){2,9}\.?",
    r"(x{0}a{1}|\x61)b",
)


@pytest.mark.parametrize("regex", EXPRESSIONS)
def test_masks_are_what_trying_every_token_finds(context: ProcessorContext, tokenizer: Tokenizer, regex: str) -> None:
    keyed = walk(
        lambda: make({"regex": regex}, context)(np.zeros(1, np.int32)),
        tokenizer.vocab_size,
        np.random.default_rng(0),
        answers=8,
        most=40,
    )
    assert keyed or "x61" in regex


ATOMS = [
    "a",
    "b",
    " ",
    "é",
    "ab",
    r"\.",
    "[ab]",
    r"[^a\n]",
    ".",
    r"\w",
    r"\d",
    r"\s",
    r"\S",
    "[a-c ]",
    "[^é-語b]",
    "(?:)",
]
COUNTS = ["", "*", "+", "?", "{2}", "{0,3}", "{1,}", "{3,9}"]


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    series = st.lists(inner, min_size=1, max_size=4).map("".join)
    branch = st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
    repeat = st.tuples(inner, st.sampled_from(COUNTS)).map(lambda pair: f"({pair[0]}){pair[1]}")
    return st.one_of(series, branch, repeat)


@settings(max_examples=60, deadline=None)
@given(regex=st.recursive(st.sampled_from(ATOMS), grown, max_leaves=10), seed=st.integers(0, 2**32 - 1))
def test_masks_of_any_expression(context: ProcessorContext, tokenizer: Tokenizer, regex: str, seed: int) -> None:
    try:
        start = make({"regex": regex}, context)
    except ValueError:
        return  # nothing fits it
    walk(lambda: start(np.zeros(1, np.int32)), tokenizer.vocab_size, np.random.default_rng(seed), answers=3, most=12)


@settings(max_examples=60, deadline=None)
@given(
    regex=st.recursive(st.sampled_from([*ATOMS[:3], "[ab]"]), grown, max_leaves=10), text=st.text("ab .c", max_size=9)
)
def test_what_is_left_of_an_expression_is_what_pythons_own_says(regex: str, text: str) -> None:
    left = residuals.Residuals(regex, lambda tables: 9)
    try:
        node = left.after(left.start, text)
    except residuals.Lost:
        assert not re.fullmatch(regex, text)
    else:
        assert node.empty == bool(re.fullmatch(regex, text))


def test_a_mask_is_computed_once_for_all_who_come_to_its_place(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tokenizer)
    computed: list[Guided] = []
    real = Guided._computed
    monkeypatch.setattr(Guided, "_computed", lambda self: computed.append(self) or real(self))

    def answer(regex: str, stop_ids: tuple[int, ...] = (EOS,)) -> list[list[int]]:
        ids = ProcessorContext(tokenizer.vocab_size, (EOS,), context.tokenizer, stop_ids=stop_ids)
        guided = make({"regex": regex}, ids)(np.zeros(1, np.int32))
        found = []
        for token in tokenizer.encode("b b b bb", add_special_tokens=False):
            found.append(allowed(guided))
            guided.accept(token)
        return found

    first = answer("[ab]( [ab]{1,2}){2,5}")
    steps = len(computed)
    assert steps >= 5 and answer("[ab]( [ab]{1,2}){2,5}") == first and len(computed) == steps
    hidden = answer("[ab]( [ab]{1,2}){2,5}", stop_ids=())
    assert hidden == [[token for token in row if token != EOS] for row in first] != first
    assert len(computed) == 2 * steps
    answer("[ab]( [ab]{1,2}){2,6}")
    assert len(computed) > 2 * steps


def test_counts_that_no_token_can_tell_apart_are_one_place(tokenizer: Tokenizer) -> None:
    left = residuals.Residuals(r"([a-c]{1,9}( [a-c]{1,9}){3,600}\. ){99,}", lambda tables: 2)
    node, keys = left.start, set()
    for n in range(400):
        node = left.after(node, "ab ")
        keys.add(node.key)
        assert (n < 596) == (node.key is not node)
    assert len(keys) < 8
    near = left.after(node, "ab " * 200)
    assert near.key not in keys


def test_what_a_token_holds_at_most(context: ProcessorContext) -> None:
    vocabulary = processor._model(context).vocabulary

    def table(text: str) -> bytes:
        return bytes(chr(byte) in text for byte in range(256))

    assert vocabulary.most((table("-"),)) == 8
    assert vocabulary.most((table("a"), table("b"))) == 3
    assert vocabulary.most((table("b"), table(" "), table("a"))) == 1
    assert vocabulary.most((table("-"), table("a"))) == 0
    assert vocabulary.most(()) == 9


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        ("a" * 3000, "too long"),
        ("(" * 40 + "a" + ")" * 40, "nested"),
        (r"(?i)a", "plain groups"),
        (r"\bab", "escape"),
        (r"\x41", "escape"),
        ("a*?", "repeats of repeats"),
        ("^a", "not read here"),
        ("[[:alpha:]]", "class"),
        ("[a&&b]", "class"),
        ("[]a]", "class"),
        (r"[a-\d]", "range"),
        ("a{,3}", "not read here"),
        ("(a|" * 9 + "b" + ")" * 9 + "]", "unexpected"),
    ],
)
def test_what_might_be_read_differently_is_not_followed(context: ProcessorContext, regex: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) if why != "unexpected" else pytest.raises(ValueError):
        expression(regex)
    assert masks.Masks(processor._model(context).vocabulary).place(regex) is None


def test_an_expression_of_many_characters_is_not_followed(context: ProcessorContext) -> None:
    """It would take Python a second and more, and the engine with it."""
    vocabulary = processor._model(context).vocabulary
    for count, followed in ((MOST_KINDS, True), (MOST_KINDS + 1, False), (1900, False)):
        text = "".join(chr(0x4E00 + i) for i in range(count))
        assert (masks.Masks(vocabulary).place(text) is not None) == followed


def test_an_expression_with_too_many_ways_is_lost_and_goes_on(context: ProcessorContext, tokenizer: Tokenizer) -> None:
    """Each of the last sixty letters may be the one that counts."""
    regex = "([ab]*a[ab]{60})+c"
    guided = make({"regex": regex}, context)(np.zeros(1, np.int32))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(50):
        guided.accept(a)
        guided.mask()
    assert guided._place is not None and guided._place.key is None
    assert allowed(guided) == tried(guided, tokenizer.vocab_size)


def test_characters_that_unicode_may_change_are_not_guessed() -> None:
    word = Characters((), frozenset("w"))
    assert [word.has(c) for c in "aé語_ -€\u0378Ⓐ"] == [True, True, True, True, False, False, False, None, None]
    assert Characters((), frozenset("W")).has("é") is False and Characters((), frozenset("W")).has("\u0378") is None
    left = residuals.Residuals(r"\w.", lambda tables: 9)
    with pytest.raises(residuals.Lost):
        left.after(left.start, "\u0378")
    assert left.after(left.start, "a\u0378").empty


def test_a_mask_is_computed_now_and_then_even_where_it_is_known(
    context: ProcessorContext, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(processor, "PAID_BYTES", 10)
    guided = make({"regex": "[ab]+"}, context)(np.zeros(1, np.int32))
    computed: list[int] = []
    real = Guided._computed
    monkeypatch.setattr(Guided, "_computed", lambda self: computed.append(1) or real(self))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(100):
        guided.accept(a)
        guided.mask()
    assert 10 <= len(computed) <= 12


def test_what_is_kept_is_bounded(context: ProcessorContext, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = masks.Masks(processor._model(context).vocabulary)
    monkeypatch.setattr(masks, "KEY_BYTES", 10)
    monkeypatch.setattr(masks, "KEPT_BYTES", 100)
    monkeypatch.setattr(masks, "KEPT_EXPRESSIONS", 2)
    first, second = kept.place("a"), kept.place("b")
    assert first is not None and second is not None and kept.place("a") is not None
    mask = np.arange(10, dtype=np.int32)
    for i in range(5):
        kept.keep(first.residuals, i, mask)
        assert (found := kept.get(first.residuals, i)) is not None and not found.flags.writeable
        kept.get(first.residuals, 0)
    assert [i for i in range(5) if kept.get(first.residuals, i) is not None] == [0, 4]
    assert kept.get(second.residuals, 0) is None
    kept.place("c")
    kept.place("d")
    assert kept.get(first.residuals, 0) is None and not kept._masks and not kept._bytes
    kept.keep(first.residuals, 0, mask)
    assert not kept._masks


def test_threads_find_the_same_masks(tokenizer: Tokenizer) -> None:
    context = context_of(tokenizer)

    def work(seed: int) -> None:
        start = make({"regex": EXPRESSIONS[0]}, context)
        random = np.random.default_rng(seed)
        walk(lambda: start(np.zeros(1, np.int32)), tokenizer.vocab_size, random, answers=2, most=15)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=60))
