"""How many log-probabilities an answer may have, what they take until it is sent, and what their tokens are called."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest
from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import FakeTransport, Side, dialect_client
from llmcore_server.http.logprobs import WHOLE_ANSWER, Places
from llmcore_server.http.pieces import PIECE
from llmcore_tgi.routes import routes as tgi_routes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MOST = WHOLE_ANSWER.most
CONTEXT = 4 << 20
FACTS: dict[str, Any] = {"max_total_len": CONTEXT, "max_input_len": CONTEXT - 1, "max_running": 1000}
USER = [{"role": "user", "content": "x"}]

MakeSide = Callable[..., Side]


@pytest.fixture
def tgi(tokenizer: FastTokenizer) -> MakeSide:
    def make(answer: str | list[int] | None = None, facts: dict[str, Any] | None = None, **bridge: Any) -> Side:
        side = Side.of(lambda front: [], tokenizer, answer, facts, **bridge)
        side.front = replace(side.front, config=replace(side.front.config, plugin_options={"use_tgi_api": True}))
        side.client = dialect_client(tgi_routes, side.front)
        return side

    return make


def chat(tokens: int | None, n: int = 1, top: int = 20, **more: Any) -> tuple[str, dict[str, Any]]:
    named = {} if tokens is None else {"max_tokens": tokens}
    return CHAT, {"messages": USER, "logprobs": True, "top_logprobs": top, "n": n, **named, **more}


def text(tokens: int | None, n: int = 1, top: int = 5, **more: Any) -> tuple[str, dict[str, Any]]:
    named = {} if tokens is None else {"max_tokens": tokens}
    return TEXT, {"prompt": "x", "logprobs": top, "n": n, **named, **more}


def native(tokens: int | None, **parameters: Any) -> tuple[str, dict[str, Any]]:
    named = {} if tokens is None else {"max_new_tokens": tokens}
    return "/generate", {"inputs": "x", "parameters": {**named, **parameters}}


# --- numbers that are named ------------------------------------------------------------------------------------------

FIT, TOO_MANY = 200, 400


@pytest.mark.parametrize(
    ("asked", "param", "entries"),
    [
        (chat(MOST // 21 + 1), "max_tokens", (MOST // 21 + 1) * 21),
        (chat(MOST // 21 // 8 + 1, n=8), "max_tokens", (MOST // 21 // 8 + 1) * 21 * 8),
        (chat(32_000, n=128), "max_tokens", 32_000 * 21 * 128),
        (chat(MOST + 1, top=0), "max_tokens", MOST + 1),
        (chat(None, max_completion_tokens=MOST, top=1), "max_completion_tokens", 2 * MOST),
        (chat(None, n=128, min_tokens=1000), "min_tokens", 21 * 128 * 1000),
        (text(MOST // 6 + 1), "max_tokens", (MOST // 6 + 1) * 6),
        (text(10_000, n=2, best_of=20), "max_tokens", 10_000 * 20 * 6),
        (text(10_000, prompt=["x"] * 20), "max_tokens", 10_000 * 20 * 6),
    ],
)
def test_named_numbers_that_cannot_fit_are_refused(
    openai: MakeSide, asked: tuple[str, dict[str, Any]], param: str, entries: int
) -> None:
    side = openai("abc", facts=FACTS, wait=True)
    path, body = asked
    result = side.post(path, **body)
    assert (result.status_code, result.json["error"]["param"]) == (400, param), result.text
    message = result.json["error"]["message"]
    assert f"{entries:,}" in message and f"{MOST:,}" in message and not side.bridge.submitted
    side.post(path, **body, stream=True) if "best_of" not in body else None
    assert bool(side.bridge.submitted) == ("best_of" not in body), "a stream keeps none of them"


@pytest.mark.parametrize(
    "asked",
    [
        chat(MOST // 21),
        chat(32_000),
        chat(MOST // 21 // 8, n=8),
        chat(CONTEXT - 100, top=0, logprobs=False),
        text(MOST // 6),
        {"prompt": "x", "max_tokens": 32_000, "n": 2, "best_of": 100},
    ],
)
def test_named_numbers_that_fit_are_taken(openai: MakeSide, asked: Any) -> None:
    side = openai("abc", facts=FACTS, wait=True)
    path, body = asked if isinstance(asked, tuple) else (TEXT, asked)
    side.post(path, **body)
    (submit,) = side.bridge.submitted
    assert submit.max_new_tokens == body["max_tokens"]


def test_named_numbers_in_the_other_dialects(lightllm: MakeSide, tgi: MakeSide) -> None:
    for make, asked, entries in (
        (lightllm, native(MOST // 8 + 1, n=8, return_details=True), (MOST // 8 + 1) * 8),
        (tgi, native(MOST // 21 + 1, details=True, top_n_tokens=20), (MOST // 21 + 1) * 21),
        (tgi, native(MOST // 8 + 1, details=True, best_of=8, do_sample=True), (MOST // 8 + 1) * 8),
    ):
        side = make("abc", facts=FACTS, wait=True)
        path, body = asked
        result = side.post(path, **body)
        assert result.status_code == 400 and "parameters.max_new_tokens: " in result.text
        assert f"{entries:,}" in result.text and f"{MOST:,}" in result.text and not side.bridge.submitted
        shown = "return_details" if "return_details" in body["parameters"] else "details"
        body["parameters"][shown] = False
        side.post(path, **body)
        assert side.bridge.submitted, "no log-probabilities are shown"


# --- numbers that are not named --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        (chat(None), MOST // 21),
        (chat(None, n=8), MOST // 21 // 8),
        (chat(None, n=128), MOST // 21 // 128),
        (text(None, n=2, best_of=4), MOST // 6 // 4),
        (text(None, prompt=["x", "y", "z"]), MOST // 6 // 3),
        (chat(None, stream=True), None),
        (text(None, top=0), MOST),
        ((TEXT, {"prompt": "x"}), None),
    ],
)
def test_where_none_are_named_the_bound_ends_the_answer(
    openai: MakeSide, asked: tuple[str, dict[str, Any]], each: int | None
) -> None:
    side = openai("abc", facts=FACTS, wait=True)
    path, body = asked
    side.post(path, **body)
    for submit in side.bridge.submitted:
        whole = CONTEXT - len(submit.prompt) // 4
        assert submit.max_new_tokens == (whole if each is None else each)


def test_the_bound_ends_an_answer_with_length(
    tgi: MakeSide, openai: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WHOLE_ANSWER.__dict__, "most", 84)
    choices = openai(facts=FACTS).ok(CHAT, **chat(None, n=2)[1])["choices"]
    details = tgi(facts=FACTS).ok("/generate", **native(None, details=True, top_n_tokens=20)[1])["details"]
    assert [(choice["finish_reason"], len(choice["logprobs"]["content"])) for choice in choices] == [("length", 2)] * 2
    assert (details["finish_reason"], details["generated_tokens"], len(details["top_tokens"])) == ("length", 4, 4)


# --- beam searches, whose answers come in one step -------------------------------------------------------------------


def test_a_beam_search_tells_as_much_as_one_step_can(openai: MakeSide, lightllm: MakeSide) -> None:
    side = openai("abc", facts=FACTS, wait=True)
    for stream in (False, True):
        search = {"use_beam_search": True, "num_beams": 4, "stream": stream}
        fits = MOST_LOGPROBS_AT_ONCE // 4 // 6
        result = side.post(TEXT, **text(fits + 1, **search)[1])
        assert result.status_code == 400 and f"{MOST_LOGPROBS_AT_ONCE:,}" in result.text, result.text
        for tokens in (fits, None):
            side.post(TEXT, **text(tokens, **search)[1])
            assert side.bridge.submitted[-1].max_new_tokens == fits
    native_side = lightllm("abc", facts=FACTS, wait=True)
    path, body = native(MOST_LOGPROBS_AT_ONCE // 2 + 1, num_beams=2, n=2, return_details=True)
    assert native_side.post(path, **body).status_code == 400
    body["parameters"]["max_new_tokens"] -= 1
    native_side.post(path, **body)
    assert native_side.bridge.submitted


# --- what they take until they are sent ------------------------------------------------------------------------------


class Held(FakeTransport):
    """Keeps the pieces of an answer as they are."""

    pieces: Iterator[bytes]

    def send_pieces(self, pieces: Iterator[bytes], content_type: str, headers: Mapping[str, str]) -> None:
        type(self).pieces = pieces


CASES = {
    "chat": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 20, "return_token_ids": True}),
    "completions": (TEXT, {"prompt": "x", "logprobs": 20}),
    "lightllm": ("/generate", {"inputs": "x", "parameters": {"return_details": True}}),
    "tgi": ("/generate", {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 20}}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_takes_columns_while_it_is_made_and_one_piece_while_it_is_sent(
    openai: MakeSide, lightllm: MakeSide, tgi: MakeSide, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokens = 4_000
    path, body = CASES[name]
    limit = {"max_new_tokens": tokens} if "parameters" in body else {"max_tokens": tokens}
    asked = {**body, "parameters": {**body["parameters"], **limit}} if "parameters" in body else {**body, **limit}
    side = {"lightllm": lightllm, "tgi": tgi}.get(name, openai)([100] * tokens, FACTS, wait=True)
    monkeypatch.setattr("llmcore_devtools.dialect.FakeTransport", Held)
    side.post(path, **asked)
    side.bridge.step()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(tokens - 2):
            side.bridge.step()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        each = 1 if name == "lightllm" else 21
        assert kept < 2 * (8 * each + 24) * tokens, f"{kept / tokens / each:.1f} bytes for each"
        side.bridge.step()
        tracemalloc.reset_peak()
        size = most = 0
        for piece in Held.pieces:
            size, most = size + len(piece), max(most, len(piece))
        assert most <= PIECE and size > 12 * tokens * each
        assert tracemalloc.get_traced_memory()[1] < kept + 24 * PIECE, "a body of megabytes is never there as a whole"
    finally:
        tracemalloc.stop()


def test_columns_give_back_what_was_put_in() -> None:
    places = Places()
    given = [
        (0, 5, -0.1, ((5, -0.1), (7, -2.5))),
        (3, 2**31 - 1, float("-inf"), ()),
        (2**31 - 1, 0, 0.0, ((1, -9.75),)),
    ]
    places.extend(given)
    found = list(places)
    assert [place[:2] for place in found] == [place[:2] for place in given]
    assert [place[2] for place in found] == pytest.approx([place[2] for place in given], rel=1e-7)
    assert [[token for token, _ in place[3]] for place in found] == [[5, 7], [], [1]]
    assert (list(Places()), list(places)) == ([], found)


# --- what tokens are called ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_may_be_named_by_their_ids(openai: MakeSide, tokenizer: FastTokenizer, stream: bool) -> None:
    ids = tokenizer.encode("h\u00e9")

    def choices(path: str, **body: Any) -> list[Any]:
        side, body = openai(ids), {**body, "return_tokens_as_token_ids": True}
        if not stream:
            return [side.ok(path, **body)["choices"][0]["logprobs"]]
        chunks = [chunk for chunk in side.events(path, stream=True, **body) if chunk != "[DONE]"]
        return [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]

    entries = [
        entry for found in choices(CHAT, messages=USER, logprobs=True, top_logprobs=1) for entry in found["content"]
    ]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "h\u00e9"
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == [f"token_id:{token - 1}" for token in ids]
    found = choices(TEXT, prompt="x", logprobs=1)
    assert [token for one in found for token in one["tokens"]] == [f"token_id:{token}" for token in ids]
    tops = [top for one in found for top in one["top_logprobs"]]
    assert [set(top) for top in tops] == [{f"token_id:{token}", f"token_id:{token - 1}"} for token in ids]
    echoed = openai(ids).ok(TEXT, prompt="x", logprobs=1, echo=True, max_tokens=1, return_tokens_as_token_ids=True)
    assert echoed["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{tokenizer.encode('x')[0]}"


def test_names_of_tokens_change_nothing_without_logprobs(openai: MakeSide) -> None:
    plain = openai("ab").ok(TEXT, prompt="x")["choices"]
    assert openai("ab").ok(TEXT, prompt="x", return_tokens_as_token_ids=True)["choices"] == plain
    assert orjson.dumps(plain)
