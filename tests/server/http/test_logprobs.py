"""Tokens beside the text of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.api.bridge import ChoiceEvent, Finish
from llmcore.text.stops import StopStrings
from llmcore.text.stream import ChoiceText, TextRules
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.chat.request_parsing import Choice
from llmcore_server.http.logprobs import TokenNames, UnshownTokens, released_by_token


@pytest.fixture
def tokenizer(tmp_path: Path) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path))


def event(*tokens: int, finish: Finish = Finish.RUNNING) -> ChoiceEvent:
    return ChoiceEvent(
        choice=0,
        tokens=tokens,
        logprobs=tuple(-1.0 - token for token in tokens),
        top=tuple(((token, -1.0),) for token in tokens),
        finish=finish,
    )


def test_every_token_has_the_text_that_it_released(tokenizer: FastTokenizer) -> None:
    choice = Choice(0, 0, ChoiceText(tokenizer, TextRules()))
    ids = tokenizer.encode("ж", add_special_tokens=False)
    assert len(ids) == 2, "a character of two tokens"
    given = event(*ids)
    first, second = released_by_token(choice, given, choice.text.feed(given))
    assert (first.text, first.token, first.ends) == ("", ids[0], False)
    assert second == ("ж", ids[1], -1.0 - ids[1], ((ids[1], -1.0),), False)


def test_the_end_has_a_text_where_no_token_brings_it(tokenizer: FastTokenizer) -> None:
    choice = Choice(0, 0, ChoiceText(tokenizer, TextRules()))
    last = event(finish=Finish.STOP)
    assert list(released_by_token(choice, last, choice.text.feed(last))) == [("", None, 0.0, (), True)]
    still = Choice(0, 0, ChoiceText(tokenizer, TextRules()))
    assert list(released_by_token(still, event(), still.text.feed(event()))) == []


def test_tokens_wait_for_their_text(tokenizer: FastTokenizer) -> None:
    a, b, c = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
    choice = Choice(0, 0, ChoiceText(tokenizer, TextRules(stops=StopStrings(["bc"]))))
    unshown = UnshownTokens()
    shown = []
    for token in (a, b, c):
        given = event(token)
        choice.text.feed(given)
        shown.append([place[1] for place in unshown.take(choice, given)])
    assert shown == [[a], [], []] and choice.text.finish is Finish.STOP, "the stop text cut b and c away"
    assert UnshownTokens(none=True).take(choice, event(a)) == []


def test_tokens_without_text_are_shown_at_the_end_on_request(tokenizer: FastTokenizer) -> None:
    [end] = tokenizer.eos_ids
    for whole, expected in ((True, [end]), (False, [])):
        choice = Choice(0, 0, ChoiceText(tokenizer, TextRules(stop_ids=frozenset([end]))))
        last = event(end, finish=Finish.STOP)
        choice.text.feed(last)
        assert [place[1] for place in UnshownTokens(whole=whole).take(choice, last)] == expected


def test_names_of_tokens(tokenizer: FastTokenizer) -> None:
    [a], half = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("ж", add_special_tokens=False)[0]
    assert TokenNames(tokenizer).text(a) == "a" and TokenNames(tokenizer, ids=True).text(a) == f"token_id:{a}"
    assert TokenNames(tokenizer).text(half) == "\\xd0" and TokenNames(tokenizer, "bytes:").text(half) == "bytes:\\xd0"
    assert TokenNames(tokenizer).bytes(half) == b"\xd0" and TokenNames(tokenizer).bytes(tokenizer.vocab_size) == b""
