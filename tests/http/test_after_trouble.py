"""After each trouble the next request gets the same bytes as ever, and no slot of the pool is lost.

One real server: two HTTP workers, the real engine, the fake model, a pool of two longest requests, and a plugin that
raises.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from llmcore.builtin.lightllm.requests import GenerateRequest, Parameters
from llmcore.builtin.openai.requests import ChatRequest, CompletionRequest
from llmcore.testing import fake_answer, sockets, write_fake_model
from llmcore.testing.server import RunningServer, serving

CONTEXT = 120
FAILS, GIVES_NAN, VOCABULARY = 250, 251, 275
WORKER = "llmcore.http.worker"
PLUGIN = """
import sys
from llmcore.api import hookimpl

if supervisor := sys.modules.get("llmcore.supervisor.supervisor"):
    supervisor.STATE_SECONDS = 0.1  # figures ten times a second, so that this file need not wait for them

@hookimpl
def on_request_finished(record):
    if record.request_id.startswith("raise"):
        raise RuntimeError("the plugin was told to")
"""

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 1}
NATIVE: dict[str, Any] = {"inputs": "hi", "parameters": {"max_new_tokens": 1}}
ENDPOINTS = {
    "/v1/chat/completions": (CHAT, ChatRequest),
    "/v1/completions": (COMPLETION, CompletionRequest),
    "/generate": (NATIVE, GenerateRequest),
    "/generate_stream": (NATIVE, GenerateRequest),
}
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class House:
    """The server, and what it answered before anything went wrong."""

    server: RunningServer
    first: bytes = b""
    asked: int = 0
    tokens: float = 0.0

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        with sockets.connect(self.server.port, timeout=20) as sock:
            sock.sendall(sockets.request("POST", path, body, headers=lines))
            return sockets.read_reply(sock)

    def send(self, method: str, path: str, headers: str, body: bytes) -> Answer:
        length = "" if "Length" in headers else f"Content-Length: {len(body)}\r\n"
        with sockets.connect(self.server.port) as sock:
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}{length}\r\n".encode() + body)
            return sockets.read_reply(sock)

    def text(self, prompt: list[int], n_tokens: int, **headers: str) -> str:
        body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0}
        status, _, answer = self.post("/v1/completions", body, **headers)
        assert status == 200, answer
        return str(json.loads(answer)["choices"][0]["text"])

    def answers(self) -> None:
        """The canonical request; its seven tokens tell it from all others in the figures."""
        body = {"inputs": "canonical", "parameters": {"max_new_tokens": 7, "return_details": True}}
        status, _, answer = self.post("/generate", body)
        self.asked += 1
        self.first = self.first or answer
        assert (status, answer) == (200, self.first)

    def is_whole(self, seconds: float = 8.0) -> None:
        """Nothing is held once figures newer than the last canonical request are there."""
        deadline = time.monotonic() + seconds
        while True:
            now = self.read()
            parts = now["kv_live"] + now["kv_cached"] + now["kv_free"]
            assert parts == now["kv_total"] > 0, now
            fresh = now["asked"] == self.asked and now["generated_tokens_total"] >= self.tokens + 7
            if fresh and (now["kv_live"], now["batch_current_size"], now["queue_size"]) == (0, 0, 0):
                self.tokens = now["generated_tokens_total"]
                return
            assert time.monotonic() < deadline, now
            time.sleep(0.02)

    def read(self) -> dict[str, float]:
        page = sockets.call(self.server.port, "GET", "/metrics")[2].decode()
        found = {m[1]: float(m[2]) for m in re.finditer(r"^llmcore_(\w+) (\S+)$", page, re.M)}
        of_seven = re.findall(r'^llmcore_request_max_new_tokens_bucket{le="[48]\.0"} (\S+)$', page, re.M)
        return {**found, "asked": float(of_seven[1]) - float(of_seven[0])}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("house")
    plugin = directory / "raises.py"
    plugin.write_text(PLUGIN)
    model = write_fake_model(directory / "fake", step_delay=0.001, faults={"forward": FAILS, "nan": GIVES_NAN})
    with serving(
        model,
        plugins=(str(plugin),),
        httpserver_workers=2,
        max_req_total_len=CONTEXT,
        max_total_token_num=2 * CONTEXT,
        length_estimator="capped",
        router_max_new_token_len=1,
    ) as server:
        house = House(server)
        house.answers()
        house.is_whole()
        yield house


@pytest.fixture
def house(running: House) -> Iterator[House]:
    yield running
    running.answers()
    running.is_whole()


def expected(prompt: list[int], n_tokens: int) -> str:
    return "".join(chr(33 + token) for token in fake_answer(prompt, n_tokens))


def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


# --- what is refused -------------------------------------------------------------------------------------------------

STRANGE: tuple[Any, ...] = (
    *([], {}, [None], [[]], {"a": [1]}, "", "x" * 1500, True, -1, 0, 1.5, 2**31, 2**64, 1e308),
    *(["", 1], ["a"] * 40, {"-1": 1}, {"1": 1e9}),
)


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {**body, first: put(body[first], rest, value) if rest else value}


def fields(kind: Any) -> list[str]:
    names = [f.name for f in msgspec.structs.fields(kind)]
    return names + [f"parameters.{f.name}" for f in msgspec.structs.fields(Parameters) if "parameters" in names]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_with_strange_values(house: House, path: str) -> None:
    """What the field's type refuses is a 400 that names it; whatever else, it is never a 5xx."""
    body, kind = ENDPOINTS[path]
    for name in fields(kind):
        for value in STRANGE:
            strange = put(body, name, value)
            status, _, answer = house.post(path, strange)
            assert status in (200, 400, 404), (name, value, answer)
            try:
                msgspec.convert(strange, kind)
            except msgspec.ValidationError:
                assert status == 400, (name, value, answer)
                assert json.loads(answer)["error"]["param"].startswith(name), (name, value, answer)
        house.answers()


EDGES: tuple[tuple[int, int | None, int], ...] = (
    *((CONTEXT - 1, 1, 200), (CONTEXT, 1, 400), (CONTEXT + 1, 1, 400), (CONTEXT + 1, None, 400)),
    *((20, CONTEXT - 20, 200), (20, CONTEXT - 19, 400), (20, 2**31 - 1, 400), (10_000_000, 1, 400)),
)


def test_the_edge_of_the_context(house: House) -> None:
    for length, n_tokens, status in EDGES:
        prompt = "x" * length
        tokens = {} if n_tokens is None else {"max_tokens": n_tokens}
        native = {} if n_tokens is None else {"max_new_tokens": n_tokens}
        for path, body in (
            ("/v1/completions", {"prompt": prompt, "temperature": 0, **tokens}),
            ("/generate", {"inputs": prompt, "parameters": native}),
        ):
            got, _, answer = house.post(path, body)
            assert got == status, answer
            if status == 400:
                assert json.loads(answer)["error"]["code"] == "context_length_exceeded"
            house.answers()


BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *([token] for token in (-1, VOCABULARY, 2**31, 2**64, True, 1.5, None, [300])),
        *("", [], [[]], ["a", 1], [[1], 2], ["a"] * 300),
    ),
    "repetition_penalty": (0, 1e-38, 101),
    "logit_bias": tuple({key: 1} for key in ("-1", str(VOCABULARY), "1.5", "x", "", "9" * 40)),
    "n": (0, -1, 129, 10**9),
    "max_tokens": (0, -1, 2**63, CONTEXT),
    "stop": ("", ["a", ""], ["a"] * 33, "x" * 2**20, ["x"] * 10_000),
    "temperature": (-1, 2.1, 1e308),
    "top_p": (0, 1.1),
    "seed": (-1, 2**63),
    "logprobs": (21, -1),
}


def test_values_out_of_range(house: House) -> None:
    for name, value in [(name, value) for name, values in BAD_VALUES.items() for value in values]:
        for stream in (False, True):
            status, _, answer = house.post("/v1/completions", {**COMPLETION, "stream": stream, name: value})
            assert status == 400, (name, answer)
            assert json.loads(answer)["error"]["param"].startswith(name), answer
        house.answers()


BODIES = {
    "empty": b"",
    "cut": b'{"prompt": "x"',
    "no utf-8": b'{"prompt": "\xff"}',
    "deep": b'{"prompt": %b%b, "inputs": 1}' % (b"[" * 100_000, b"]" * 100_000),
    "deep and open": b'{"a": ' * 100_000,
    "NaN": b'{"prompt": "x", "inputs": "x", "messages": [], "temperature": NaN}',
    "1e999": b'{"prompt": "x", "inputs": "x", "messages": [], "temperature": 1e999}',
    "5,000 digits": b'{"prompt": "x", "inputs": "x", "seed": %b}' % (b"9" * 5000),
    "half a pair": b'{"prompt": "\\ud800", "inputs": "\\ud800", "messages": "\\udfff"}',
    "half a pair in stop": b'{"prompt": "x", "inputs": "x", "stop": "\\ud800"}',
    "half a pair in model": b'{"prompt": "x", "inputs": "x", "model": "\\ud800"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_no_json(running: House, body: bytes) -> None:
    for path in ENDPOINTS:
        status, headers, answer = running.send("POST", path, "Content-Type: application/json\r\n", body)
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error"), answer
        assert headers["x-request-id"]
        running.answers()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/v1/completions", "Content-Type: text/plain\r\n", b"{}", 415),
        ("POST", "/generate", "Content-Type: application/x-www-form-urlencoded\r\n", b"{}", 415),
        ("POST", "/generate", "Content-Type: application/json\r\nContent-Encoding: gzip\r\n", b"{}", 415),
        ("GET", "/v1/chat/completions", "", b"", 405),
        ("BREW", "/generate", "", b"", 400),
        ("POST", "/nowhere", "", b"{}", 404),
        ("POST", "/v1/completions", "Content-Type: application/json\r\n", b'{"model":"no","prompt":"x"}', 404),
        ("POST", "/generate", "Content-Length: x\r\n", b"", 400),
    ],
)
def test_what_is_no_request(running: House, method: str, path: str, headers: str, body: bytes, status: int) -> None:
    got, _, answer = running.send(method, path, headers, body)
    assert (got, "error" in json.loads(answer)) == (status, True), answer
    running.answers()


# --- clients that leave ----------------------------------------------------------------------------------------------


def asking(stream: bool, path: str = "/v1/completions") -> bytes:
    body = {"prompt": [7, 8], "max_tokens": 110, "temperature": 0, "ignore_eos": True, "stream": stream}
    native = {"inputs": [7, 8], "parameters": {"max_new_tokens": 110, "ignore_eos": True}, "stream": stream}
    return sockets.request("POST", path, body if path.startswith("/v1") else native)


def test_a_client_leaves_in_the_middle(house: House) -> None:
    for path in ("/v1/completions", "/generate_stream") * 3:
        with sockets.connect(house.server.port) as sock:
            sock.sendall(asking(True, path))
            rest = sockets.read_head(sock)[2]
            while rest.count(b"data:") < 3:
                rest += sock.recv(1 << 16)


def test_clients_leave_before_the_first_token(house: House) -> None:
    for whole in (asking(True), asking(False)):
        for sent in (whole, whole[:-5], whole[:40]):
            for _ in range(4):
                with sockets.connect(house.server.port) as sock:
                    sock.sendall(sent)


def test_clients_leave_while_they_wait(house: House) -> None:
    prompts = [[9, i] for i in range(12)]
    with ThreadPoolExecutor(12) as pool, ExitStack() as stack:
        others = [pool.submit(house.text, prompt, 100) for prompt in prompts]
        for i in range(12):
            sock = stack.enter_context(sockets.connect(house.server.port))
            sock.sendall(asking(i % 2 == 0))
        time.sleep(0.1)
        stack.close()
        assert [other.result() for other in others] == [expected(prompt, 100) for prompt in prompts]


# --- what goes wrong while it runs -----------------------------------------------------------------------------------


COLD: tuple[dict[str, Any], ...] = (
    *({"temperature": t} for t in (1e-4, 1e-9, 1e-38, 1e-44, 5e-324)),
    *({"top_k": 1}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"min_p": 1}),
    *({"temperature": 1e-38, **more} for more in ({"top_p": 0.5}, {"top_k": 3}, {"logprobs": 2})),
)


def test_parameters_at_the_edge_of_their_range(house: House) -> None:
    for more in COLD:
        body = {"prompt": [8, 8], "max_tokens": 9, "temperature": 1, **more}
        status, _, answer = house.post("/v1/completions", body)
        assert status == 200 and json.loads(answer)["choices"][0]["text"] == expected([8, 8], 9), (more, answer)


def test_a_text_stop_ends_a_choice(house: House) -> None:
    whole = expected([5, 6, 7], 100)
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stop": whole[30:34]}
    choice = json.loads(house.post("/v1/completions", body)[2])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[30:34])], "stop")


def test_one_choice_of_several_stops_early(house: House) -> None:
    body = {"prompt": [4, 2], "max_tokens": 60, "seed": 11, "n": 3, "ignore_eos": True}
    texts = [choice["text"] for choice in json.loads(house.post("/v1/completions", body)[2])["choices"]]
    stop = texts[1][20:24]
    assert stop not in texts[0] + "|" + texts[2]
    choices = json.loads(house.post("/v1/completions", {**body, "stop": stop})[2])["choices"]
    assert [choice["text"] for choice in choices] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]


def test_one_request_id_fifty_times_in_flight(house: House) -> None:
    prompts = [[i, 3] for i in range(50)]
    with ThreadPoolExecutor(50) as pool:
        with sockets.connect(house.server.port) as sock:
            sock.sendall(asking(True).replace(b"Host:", b"X-Request-Id: same\r\nHost:", 1))
            answers = [pool.submit(house.text, prompt, 10, x_request_id="same") for prompt in prompts]
        assert [answer.result() for answer in answers] == [expected(prompt, 10) for prompt in prompts]


def test_a_plugin_that_raises_when_a_request_ends(house: House) -> None:
    assert house.text([1, 2], 10, x_request_id="raise-1") == expected([1, 2], 10)
    until(lambda: "the plugin was told to" in house.server.log.read_text())
    with sockets.connect(house.server.port) as sock:
        sock.sendall(asking(True).replace(b"Host:", b"X-Request-Id: raise-2\r\nHost:", 1))


@pytest.mark.parametrize("token", [FAILS, GIVES_NAN])
def test_a_step_that_fails_and_a_row_of_nan(house: House, token: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        for stream in (False, True):
            neighbour = pool.submit(house.text, [3, 1, 4], 100)
            body = {"prompt": [6, token], "max_tokens": 5, "temperature": 0, "stream": stream}
            status, _, answer = house.post("/v1/completions", body)
            assert (status, json.loads(answer)["error"]["type"]) == (500, "server_error"), answer
            assert "Traceback" not in answer.decode()
            assert neighbour.result() == expected([3, 1, 4], 100)
            house.answers()


def test_a_storm_of_preemptions(house: House) -> None:
    before = house.read()["preemptions_total"]
    prompts = [[20 + i] * 10 for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda prompt: house.text(prompt, 60), prompts)) == [expected(p, 60) for p in prompts]
    until(lambda: house.read()["preemptions_total"] > before)


def test_a_worker_is_killed(house: House) -> None:
    before = house.server.children()
    victim = before[WORKER]
    with ExitStack() as stack:
        for _ in range(6):
            sock = stack.enter_context(sockets.connect(house.server.port))
            sock.sendall(asking(True))
            sockets.read_head(sock)
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in house.server.children().values())
        house.answers()
    until(lambda: len(house.server.children()) == len(before))
    for _ in range(10):
        house.answers()
    assert "canonical" not in house.server.log.read_text()
