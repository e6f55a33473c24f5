"""Rows 53 to 55, and the limits of time: what a server does that has too much to do, and how it ends what is late."""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from harness import CANONICAL, KEY, PATIENCE, House, allowed, expected, percentile, until
from llmcore_devtools import sockets

PLACES, WAITING = 4, 6
LONG, SHORT = 4000, 25


@pytest.fixture(scope="module")
def module_house(make_house: Any) -> Iterator[House]:
    """Two workers, so that no worker knows of all requests; few may run, few may wait."""
    with make_house(httpserver_workers=2, running_max_req_size=PLACES, max_waiting_requests=WAITING) as house:
        yield house


def body(prompt: Sequence[int], n_tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": list(prompt), "max_tokens": n_tokens, "temperature": 0, **more}


class Fleet:
    """Requests on connections of their own, sent from one thread. `done`: (status, headers, body, seconds) of each."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.selector = selectors.DefaultSelector()
        self.open: dict[socket.socket, tuple[int, bytearray, float]] = {}
        self.done: dict[int, tuple[int, dict[str, str], bytes, float]] = {}
        self.order: list[int] = []
        """The numbers of requests in the order in which their first bytes came."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.open:
            sock.close()
        self.selector.close()
        until(lambda: _crowd(self.house) == (0, 0), "those that were left are gone")

    def connect(self, number: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.house.port), timeout=PATIENCE)
        sock.setblocking(False)
        self.open[sock] = (number, bytearray(), 0.0)
        self.selector.register(sock, selectors.EVENT_READ)
        return sock

    def send(self, sock: socket.socket, data: bytes) -> None:
        number, answer, _ = self.open[sock]
        self.open[sock] = (number, answer, time.monotonic())
        sock.send(data)

    def ask(self, number: int, prompt: Sequence[int], n_tokens: int, **more: object) -> None:
        self.send(self.connect(number), self.house.request("/v1/completions", body(prompt, n_tokens, **more)))

    def drop(self, number: int) -> None:
        """The client of a request leaves."""
        sock = next(sock for sock, (known, *_) in self.open.items() if known == number)
        self.selector.unregister(sock)
        del self.open[sock]
        sock.close()

    def receive(self, seconds: float) -> None:
        """Take what comes within that time."""
        for key, _ in self.selector.select(seconds):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            number, answer, since = self.open[sock]
            try:
                more = sock.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if more and not answer:
                self.order.append(number)
            answer += more
            found = _whole(bytes(answer))
            if found is not None or not more:
                self.selector.unregister(sock)
                del self.open[sock]
                sock.close()
                status, headers, rest = found or (0, {}, bytes(answer))
                self.done[number] = (status, headers, rest, time.monotonic() - since)

    def until_done(self, count: int, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while len(self.done) < count:
            assert time.monotonic() < deadline, f"{len(self.done)} of {count} answered"
            self.receive(0.1)


def _whole(data: bytes) -> tuple[int, dict[str, str], bytes] | None:
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "content-length" not in headers or len(rest) < int(headers["content-length"]):
        return None
    return int(first.split()[1]), headers, rest


def fill(house: House, fleet: Fleet) -> None:
    """Every place is taken, for long, and the queue is full; requests 0 and up, in the order in which they came."""
    for number in range(PLACES + WAITING):
        fleet.ask(number, [number + 1, 50], LONG if number < PLACES else SHORT)
        crowd = min(number + 1, PLACES), max(0, number + 1 - PLACES)
        until(lambda wanted=crowd: _crowd(house) == wanted, f"{crowd} run and wait")  # type: ignore[misc]


def _crowd(house: House) -> tuple[float, float]:
    now = house.figures()
    return now["batch_current_size"], now["queue_size"]


def text_of(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["text"])


def test_row_53_a_full_queue(house: House) -> None:
    """Exactly as many are taken as may be, over both workers; the others hear at once when to come again."""
    with Fleet(house) as fleet:
        fill(house, fleet)
        first, late = PLACES + WAITING, 40
        for number in range(first, first + late):
            fleet.ask(number, [7, 7], 3)
            fleet.until_done(number - first + 1)
        refused = [fleet.done[number] for number in range(first, first + late)]
        assert {status for status, *_ in refused} == {429}
        assert all(1 <= int(headers["retry-after"]) <= 60 for _, headers, *_ in refused)
        error = json.loads(refused[0][2])["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert percentile([seconds for *_, seconds in refused], 0.9) < allowed(0.05)
        assert _crowd(house) == (PLACES, WAITING)
        # One place becomes free. Nobody who waits is forgotten or overtaken, and everyone gets its own answer.
        fleet.drop(0)
        fleet.until_done(late + WAITING)
        for number in range(PLACES, first):
            status, _, answer, _ = fleet.done[number]
            assert (status, text_of(answer)) == (200, expected([number + 1, 50], SHORT))
        assert [number for number in fleet.order if number < first] == list(range(PLACES, first))


def test_row_53_what_is_never_refused(house: House) -> None:
    with Fleet(house) as fleet:
        fill(house, fleet)
        for path in ("/health", "/readiness", "/liveness", "/metrics", "/token_load", "/v1/models"):
            assert house.get(path)[0] == 200
        assert house.post("/tokenize", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/generate_stream", "/v1/completions"])
def test_row_53_every_dialect_refuses_in_its_shape(house: House, path: str) -> None:
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "x"}], "inputs": "x", "prompt": "x"}
    with Fleet(house) as fleet:
        fill(house, fleet)
        status, headers, answer = house.post(path, {**asked, "stream": True})
        assert (status, json.loads(answer)["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert ("message" in json.loads(answer)) is path.startswith("/generate")


def test_row_53_a_storm(house: House) -> None:
    """So many at once that nobody can have heard of a full queue: who is taken is answered, the others are refused."""
    storm = 600
    with Fleet(house) as fleet:
        waiting = [fleet.connect(number) for number in range(storm)]
        data = house.request("/v1/completions", body([9, 9], 20))
        for sock in waiting:
            fleet.send(sock, data)
        fleet.until_done(storm)
        statuses = {status for status, *_ in fleet.done.values()}
        taken = [answer for status, _, answer, _ in fleet.done.values() if status == 200]
    assert statuses == {200, 429} and len(taken) >= PLACES + WAITING
    assert {text_of(answer) for answer in taken} == {expected([9, 9], 20)}


def test_row_17_more_answers_than_there_can_be(house: House) -> None:
    """More than can run and wait together will never be taken: that is no matter of trying again."""
    status, _, answer = house.post("/v1/completions", {"prompt": [[1]] * 3, "n": PLACES, "max_tokens": 1})
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_value")


# --- keys and limits of time


def test_row_53_who_leaves_the_queue_makes_room_at_once(make_house: Any) -> None:
    limits = {"running_max_req_size": 1, "max_waiting_requests": 1}
    with make_house(fake={"step_delay": 0.25}, settled=False, **limits) as house, ExitStack() as stack:
        open_stream(house, stack)
        with waiting(house, stack):
            pass
        # The step of a quarter of a second, which holds the news up, has not ended when this comes.
        time.sleep(0.02)
        sock = stack.enter_context(sockets.connect(house.port, timeout=1.0))
        sock.sendall(house.request("/v1/completions", body([6], 5)))
        with pytest.raises(TimeoutError):  # a refusal would come at once
            sock.recv(1)


SHARE = 2


@pytest.fixture(scope="module")
def strict_house(make_house: Any) -> Iterator[House]:
    """One place, a share for each key, and little patience."""
    with make_house(
        keys=True,
        running_max_req_size=1,
        max_waiting_requests=3,
        max_requests_per_key=SHARE,
        queue_timeout=1.5,
        first_token_timeout=30,
        request_timeout=20,
    ) as house:
        yield house


@pytest.fixture
def strict(strict_house: House) -> Iterator[House]:
    yield strict_house
    strict_house.check()


OTHER = {"Authorization": "Bearer sk-another-0c1d"}


def open_stream(house: House, stack: ExitStack, **headers: str) -> socket.socket:
    """A stream that runs, until the stack is left."""
    sock = stack.enter_context(sockets.connect(house.port))
    sock.sendall(house.request("/v1/completions", body([5], 4000, stream=True), headers=headers))
    assert sockets.read_head(sock)[0] == 200
    return sock


def waiting(house: House, stack: ExitStack, **headers: str) -> socket.socket:
    """A request that waits."""
    before = house.figures()["queue_size"]
    sock = stack.enter_context(sockets.connect(house.port))
    sock.sendall(house.request("/v1/completions", body([6], 5), headers=headers))
    until(lambda: house.figures()["queue_size"] == before + 1, "it waits")
    return sock


def code_of(answer: bytes) -> str:
    return str(json.loads(answer)["error"]["code"])


def test_row_53_a_key_has_its_share_and_no_more(strict: House) -> None:
    with ExitStack() as stack:
        open_stream(strict, stack)
        waiting(strict, stack)
        status, headers, answer = strict.post("/v1/completions", body([1], 1))
        assert (status, code_of(answer)) == (429, "rate_limit_exceeded") and 1 <= int(headers["retry-after"]) <= 60
        waiting(strict, stack, **OTHER)  # the other key's share is its own


def test_row_53_a_flood_without_keys_takes_nobodys_place(strict: House) -> None:
    wrong = {"Authorization": "Bearer guessed"}
    with ExitStack() as stack:
        open_stream(strict, stack)
        waiting(strict, stack)
        waiting(strict, stack, **OTHER)
        for _ in range(50):
            status, headers, _ = strict.post("/v1/completions", body([1], 1), headers=wrong)
            assert status == 401 and "retry-after" not in headers
        assert strict.figures()["queue_size"] <= 2


def test_who_waits_too_long_hears_so(strict: House) -> None:
    with ExitStack() as stack:
        open_stream(strict, stack)
        began = time.monotonic()
        status, headers, answer = strict.post("/generate", CANONICAL, headers=OTHER)
        took = time.monotonic() - began
    assert (status, code_of(answer)) == (503, "queue_timeout") and "retry-after" in headers
    assert "message" in json.loads(answer) and took >= 1.5


def test_a_client_may_want_it_sooner(strict: House) -> None:
    """Also while it waits, which is when it matters most: nothing of it is left in the queue."""
    soon = {"x-request-timeout": "0.15"}
    with ExitStack() as stack:
        open_stream(strict, stack, **OTHER)
        began = time.monotonic()
        status, _, answer = strict.post("/v1/completions", body([6], 5), headers=soon)
        took = time.monotonic() - began
        until(lambda: strict.figures()["queue_size"] == 0, "it left the queue")
    assert (status, code_of(answer)) == (504, "request_timeout") and took >= 0.15


def test_a_late_answer_is_a_504(strict: House) -> None:
    status, _, answer = strict.post("/v1/completions", body([6], 4000), headers={"x-request-timeout": "0.2"})
    assert (status, code_of(answer)) == (504, "request_timeout")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate_stream"])
def test_a_late_stream_ends_with_an_error(strict: House, path: str) -> None:
    asked = {
        "/v1/completions": body([6], 4000, stream=True),
        "/v1/chat/completions": {**body([], 4000, stream=True), "messages": [{"role": "user", "content": "x"}]},
        "/generate_stream": {"inputs": "x", "parameters": {"max_new_tokens": 4000}},
    }[path]
    for seconds in (0.6, 2.4, 6.0):
        status, _, answer = strict.post(path, asked, headers={"x-request-timeout": str(seconds)})
        if status == 200:  # on a busy machine nothing may have come in so short a time, which is a 504
            break
    events = re.findall(rb"data: ?(.*)\n\n", answer)
    assert status == 200 and len(events) > 1
    assert code_of(events[-1]) == "request_timeout" and b"[DONE]" not in answer
    assert b"error" not in b"".join(events[:-1])


def test_a_client_cannot_have_longer(make_house: Any) -> None:
    with make_house(request_timeout=3.0, first_token_timeout=2.5) as house:
        long = {"x-request-timeout": "60"}
        status, _, answer = house.post("/v1/completions", body([6], 4000), headers=long)
        assert (status, code_of(answer)) == (504, "request_timeout")
        with ExitStack() as stack:  # the first token of a second prompt comes late behind one that has to be computed
            open_stream(house, stack, **long)
        house.check()


@pytest.mark.parametrize("given", ["0", "-3", "soon", "nan", "1_0"])
def test_a_limit_has_to_be_one(strict: House, given: str) -> None:
    status, _, answer = strict.post("/v1/completions", body([6], 1), headers={"x-request-timeout": given})
    assert (status, json.loads(answer)["error"]["param"]) == (400, "x-request-timeout")
    assert strict.get("/health")[0] == 200


def test_keys_are_in_no_answer(strict: House) -> None:
    _, _, answer = strict.post("/v1/completions", body([6], 1), headers={"x-request-timeout": KEY})
    assert KEY.encode() not in answer


# --- little KV

SMALL = 96


@pytest.fixture(scope="module")
def small_house(make_house: Any) -> Iterator[House]:
    """Room for two requests' worth of KV, dealt out as if answers were short; everybody may wait for it."""
    little = {"max_total_token_num": SMALL, "length_estimator": "capped", "router_max_new_token_len": 4}
    with make_house(max_waiting_requests=100, max_waiting_tokens=0, **little) as house:
        yield house


@pytest.fixture
def small(small_house: House) -> Iterator[House]:
    yield small_house
    small_house.check()


def test_row_54_what_can_never_fit_does_not_wait(small: House) -> None:
    for asked in (body([1], SMALL), body(range(1, SMALL), 2), body([1], SMALL - 10, n=2, use_beam_search=True)):
        status, _, answer = small.post("/v1/completions", asked)
        assert (status, code_of(answer)) == (400, "context_length_exceeded")


def test_row_55_a_storm_in_little_kv(small: House) -> None:
    """64 streams take turns in room for two, are taken out and computed again: each gets its answer, none is lost."""
    before = small.figures()["preemptions_total"]
    streams = 64
    with Fleet(small) as fleet:
        for number in range(streams):
            fleet.ask(number, [number + 1, 2], 40)
        fleet.until_done(streams)
        for number, (status, _, answer, _) in fleet.done.items():
            assert (status, text_of(answer)) == (200, expected([number + 1, 2], 40))
    assert small.figures()["preemptions_total"] > before
