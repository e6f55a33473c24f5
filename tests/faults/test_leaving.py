"""Rows 48 to 50: clients that leave, in every phase, and many of them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import MakeHouse
from harness import PATIENCE, House, expected, until
from llmcore_devtools import sockets

ABORTED_SECONDS = 0.3
"""From a client's leaving to figures that say so: at most 100 ms to the engine, the rest until figures are told."""


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(httpserver_workers=2, running_max_req_size=32, chunked_prefill_size=16) as house:
        yield house


def asking(house: House, *, stream: bool, path: str = "/v1/completions", **more: Any) -> bytes:
    body = {"prompt": [7, 8], "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": stream, **more}
    native = {"inputs": [7, 8], "parameters": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": stream}
    return house.request(path, body if path.startswith("/v1") else native)


def leaves(house: House, sock: socket.socket, others: int = 0) -> float:
    """Close the connection; seconds until the figures say that the request is gone, but for `others`."""
    before = house.figures()["request_abort_total"]
    began = time.monotonic()
    sock.close()
    while True:
        now = house.figures()
        if now["request_abort_total"] > before and now["batch_current_size"] + now["queue_size"] <= others:
            return time.monotonic() - began
        assert time.monotonic() - began < PATIENCE, now


def test_row_48_one_request_id_fifty_times_in_flight(house: House) -> None:
    prompts = [[i, 3] for i in range(50)]
    same = {"X-Request-Id": "same"}

    def answer(prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0}
        return str(json.loads(house.post("/v1/completions", body, headers=same)[2])["choices"][0]["text"])

    with ThreadPoolExecutor(50) as pool:
        with sockets.connect(house.port) as sock:
            sock.sendall(asking(house, stream=True).replace(b"Host:", b"X-Request-Id: same\r\nHost:", 1))
            sockets.read_head(sock)
            answers = [pool.submit(answer, prompt) for prompt in prompts]
        assert [answer.result() for answer in answers] == [expected(prompt, 10) for prompt in prompts]


PHASES = ("prefill", "first", "middle", "last", "whole", "compiling", "mask")
LEAVING = [*(("/v1/completions", phase) for phase in PHASES), *(("/generate_stream", p) for p in ("first", "middle"))]


@pytest.mark.parametrize(("path", "phase"), LEAVING)
def test_row_49_a_client_leaves(house: House, phase: str, path: str) -> None:
    slow = {"name": "fault", "args": {"at": "make" if phase == "compiling" else "mask", "how": "slow", "seconds": 1.0}}
    more: dict[str, Any] = {
        "prefill": {"prompt": [7] * 3000, "max_tokens": 500},
        "last": {"max_tokens": 12},
        "compiling": {"logits_processors": [slow]},
        "mask": {"logits_processors": [slow]},
    }.get(phase, {})

    def leave() -> float:
        sock = socket.create_connection(("127.0.0.1", house.port), timeout=PATIENCE)
        sock.sendall(asking(house, stream=phase != "whole", path=path, **more))
        if phase in ("first", "middle"):
            sockets.read_until(sock, b"data:", {"first": 1, "middle": 20}[phase])
        elif phase == "last":
            # a busy server sends several tokens in one event, so that an answer may have ended before 11 events
            data, events = b"", 0
            while events < 11 and b"[DONE]" not in data:
                events += 1
                data = sockets.read_until(sock, b"\n\n", events, data)
        else:
            until(lambda: house.figures()["batch_current_size"] + house.figures()["queue_size"] >= 2, "it has begun")
        if phase == "last":
            sock.close()  # it may have ended by itself
            return 0.0
        return leaves(house, sock, others=1)

    with house.neighbour(events=50):
        took = [leave()]
        while min(took) >= ABORTED_SECONDS:  # a busy machine holds some of them up
            assert len(took) < 5, took
            took.append(leave())


def test_row_49_a_client_leaves_the_queue(house: House) -> None:
    """Every place is taken; who waits leaves, and those that run get what they would have got."""
    prompts = [[9, i] for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        others = [pool.submit(house.text, prompt, 600) for prompt in prompts]
        until(lambda: house.figures()["batch_current_size"] == 32, "all places are taken")
        with ExitStack() as stack:
            for i in range(12):
                sock = stack.enter_context(sockets.connect(house.port))
                sock.sendall(asking(house, stream=i % 2 == 0))
            until(lambda: house.figures()["queue_size"] == 12, "twelve wait")
        until(lambda: house.figures()["queue_size"] == 0, "none waits")
        assert not any(other.done() for other in others), "they left a queue that did not move"
        assert [other.result() for other in others] == [expected(prompt, 600) for prompt in prompts]


def test_row_49_clients_leave_before_anything_is_known_of_them(house: House) -> None:
    for whole in (asking(house, stream=True), asking(house, stream=False)):
        for sent in (whole, whole[:-5], whole[:40], b""):
            for _ in range(4):
                with sockets.connect(house.port) as sock:
                    sock.sendall(sent)


def test_row_50_a_storm_of_connections(house: House) -> None:
    """Two thousand connections that send something and close; a part of them a whole request."""
    whole = asking(house, stream=True)
    pieces = (b"", b"G", b"GET / HTTP/1.1\r\n", whole[:80], whole, b"\x16\x03\x01\x02\x00")

    def one(i: int) -> None:
        with socket.create_connection(("127.0.0.1", house.port), timeout=PATIENCE) as sock:
            sock.sendall(pieces[i % len(pieces)])

    for i in range(200):
        one(i)
    house.is_whole()
    before = house.resident()
    with house.neighbour():
        for i in range(2000):
            one(i)
    house.is_whole()
    assert house.resident() - before < 24 << 20


def test_row_51_a_client_that_does_not_read(house: House) -> None:
    """What waits for it is bounded: then it is cut off, and its slots are free."""
    before = house.figures()["request_abort_total"]
    with house.neighbour(), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        sock.connect(("127.0.0.1", house.port))
        sock.sendall(asking(house, stream=True, n=28, logprobs=10))
        resident = house.resident()
        until(lambda: house.figures()["request_abort_total"] > before, "it is cut off")
        assert house.resident() - resident < 64 << 20
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while more := sock.recv(1 << 16):
                received += len(more)
        assert received < 32 << 20
