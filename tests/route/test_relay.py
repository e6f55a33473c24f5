"""Requests pass to nodes and answers pass back, as they are."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from routed import Got, node, read_until, rest, routed, until, whole

CHAT = "/v1/chat/completions"


def test_status_headers_and_body_are_the_nodes() -> None:
    odd = whole(
        "418 Teapot", b'{"detail": "no"}', "Retry-After: 7", "X-Odd: a", "X-Odd: b", "Connection: X-Mine", "X-Mine: 1"
    )
    with node({CHAT: odd}) as one, routed() as router:
        router.add(one.url)
        status, headers, body = router.send("POST", CHAT, b'{"model": "m"}')
        assert (status, body) == (418, b'{"detail": "no"}')
        assert headers["retry-after"] == "7" and headers["x-odd"] == "a, b"
        assert "x-mine" not in headers


def test_any_path_and_method_passes() -> None:
    paths = ("/generate", "/generate_stream", "/api/chat", "/v1/messages", "/v1/responses", "/anything")
    with node({path: whole() for path in paths}) as one, routed() as router:
        router.add(one.url)
        for path in paths:
            assert router.send("POST", f"{path}?a=%2Fb", b'{"inputs": "x"}')[0] == 200
        assert router.send("DELETE", "/anything", b"")[0] == 200
        seen = one.seen()
        assert [got.path for got in seen] == [*(f"{path}?a=%2Fb" for path in paths), "/anything"]
        assert seen[0].body == b'{"inputs": "x"}' and seen[-1].line.startswith("DELETE ")


def test_a_client_s_key_stays_here_and_the_nodes_key_is_sent() -> None:
    settings = {"api_keys": ("client",), "node_api_key": "node", "admin_key": "admin"}
    with node({CHAT: whole()}) as one, routed(**settings) as router:
        body = {"url": one.url, "status": {"models": ["m"]}}
        assert router.post("/nodes/add", body, Authorization="Bearer admin")[0] == 200
        assert router.post(CHAT, {"model": "m"})[0] == 401
        assert (
            router.post(CHAT, {"model": "m"}, Authorization="Bearer client", X_Custom="kept", TE="trailers")[0] == 200
        )
        assert router.post(CHAT, {"model": "m"}, x_api_key="client")[0] == 200
        for got in one.seen():
            assert got.headers["authorization"] == "Bearer node"
            assert "client" not in str(got.headers) and "te" not in got.headers
        assert one.seen()[0].headers["x-custom"] == "kept" and one.seen()[0].headers["host"] == one.url[7:]


def test_streams_pass_as_they_come() -> None:
    """Every piece is here before the node sends the next."""
    go = threading.Event()

    def stream(got: Got) -> None:
        got.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Mine: 1\r\n")
        got.connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n")
        assert go.wait(10)
        got.connection.sendall(b"5\r\ndata:\r\n4\r\n b\n\n\r\n0\r\n\r\n")

    with node({CHAT: stream}) as one, routed() as router:
        router.add(one.url)
        with router.open(CHAT, {"model": "m", "stream": True}) as client:
            first = read_until(client, b"data: a\n\n\r\n")
            assert first.startswith(b"HTTP/1.1 200 OK\r\n") and b"X-Mine: 1\r\n" in first
            assert b"Content-Type: text/event-stream; charset=utf-8\r\n" in first
            go.set()
            left = rest(client)
            assert left.endswith(b"0\r\n\r\n")
            assert b"".join(part for part in left.split(b"\r\n")[1::2]) == b"data: b\n\n"


def test_lines_of_json_pass_without_a_length() -> None:
    lines = b'{"a": 1}\n{"done": true}\n'

    def stream(got: Got) -> None:
        got.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n" + lines)

    with node({"/api/chat": stream}) as one, routed() as router:
        router.add(one.url)
        status, headers, body = router.send("POST", "/api/chat", b'{"model": "m:latest"}')
        assert (status, headers["content-type"], body) == (200, "application/x-ndjson", lines)


def test_a_broken_stream_breaks_here_too() -> None:
    def stream(got: Got) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        got.connection.sendall(head + b"9\r\ndata: a\n\n\r\n")

    with node({CHAT: stream}) as one, routed() as router:
        router.add(one.url)
        with router.open(CHAT, {"model": "m"}) as client:
            assert read_until(client, b"data: a\n\n\r\n")
            assert b"0\r\n\r\n" not in rest(client)
        assert router.router.nodes.status()[one.url]["latency"] == []


def test_a_client_of_http_1_0_gets_a_reset() -> None:
    def stream(got: Got) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        got.connection.sendall(head + b"9\r\ndata: a\n\n\r\n")

    with node({CHAT: stream}) as one, routed() as router:
        router.add(one.url)
        with socket.create_connection(("127.0.0.1", router.port), timeout=10) as client:
            client.sendall(f"POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            with pytest.raises(ConnectionResetError):  # the end of the stream would mean a whole answer
                rest(client)


def test_a_client_that_leaves_ends_the_request_at_the_node() -> None:
    left = threading.Event()

    def silent(got: Got) -> None:
        assert got.connection.recv(1) == b""
        left.set()

    with node({CHAT: silent}) as one, routed() as router:
        router.add(one.url)
        client = router.open(CHAT, {"model": "m"})
        until(one.seen)
        client.close()
        assert left.wait(10)
        until(lambda: router.router.nodes.status()[one.url]["unfinished"] == 0)
        assert router.router.nodes.status()[one.url]["ready"]


def test_a_request_without_an_answer_goes_to_another_node_once() -> None:
    def dies(got: Got) -> None:
        got.connection.close()

    with node({CHAT: dies}) as one, node({CHAT: whole(body=b'"two"')}) as two, node() as three, routed() as router:
        first, second = sorted((one, two), key=lambda each: each.url)
        first.answers, second.answers = {CHAT: dies}, {CHAT: whole(body=b'"two"')}
        for each in (one, two):
            router.add(each.url)
        assert router.post(CHAT, {"model": "m"}) == (200, "two")
        second.answers = {CHAT: dies}
        router.add(three.url, ["other"])
        status, answer = router.post(CHAT, {"model": "m"})
        assert status == 502 and "2 nodes did not answer" in answer["error"]["message"]
        assert len(first.seen()) == len(second.seen()) == 2 and not three.seen()


def test_an_answer_cut_short_goes_to_another_node() -> None:
    cut = lambda got: got.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")  # noqa: E731
    with node() as one, node() as two, routed() as router:
        first, second = sorted((one, two), key=lambda each: each.url)
        first.answers, second.answers = {CHAT: cut}, {CHAT: whole(body=b'"all"')}
        router.add(one.url)
        router.add(two.url)
        assert router.post(CHAT, {"model": "m"}) == (200, "all")


def test_a_node_that_is_gone_is_out_after_two_requests() -> None:
    with node() as one, node({CHAT: whole()}) as two, routed(health_interval=60.0) as router:
        gone, lives = sorted((one, two), key=lambda each: each.url)
        lives.answers = {CHAT: whole()}
        router.add(gone.url)
        router.add(lives.url)
        gone.close()
        for _ in range(3):
            assert router.post(CHAT, {"model": "m"})[0] == 200
        assert not router.router.nodes.status()[gone.url]["ready"]
        assert [len(candidates) for _, candidates in router.balancer.asked] == [2, 1, 2, 1, 1]


def test_the_balancer_sees_the_prompt_and_the_load() -> None:
    load = {"running": 3, "waiting": 1, "waiting_tokens": 50, "kv_live": 10, "kv_total": 100}
    info = whole(body=json.dumps({"load": load}).encode())
    wait = threading.Event()

    def slow(got: Got) -> None:
        wait.wait(10)
        whole()(got)

    with node({CHAT: slow, "/server_info": info}) as one, routed(node_api_key="k", health_interval=60) as router:
        router.add(one.url, speed=4)
        until(lambda: router.router.nodes._nodes[one.url].others == (4, 50, 10))
        clients = [router.open(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]})]
        until(one.seen)
        clients.append(router.open(CHAT, {"model": "m", "prompt": [1, 2, 3]}))
        until(lambda: len(router.balancer.asked) == 2)
        wait.set()
        (first, (before,)), (second, (then,)) = router.balancer.asked
        assert 100 <= first.tokens <= 120 and first.key != second.key and second.tokens == 3
        assert (before.requests, before.waiting, before.kv_live, before.kv_total) == (4, 50, 10, 100)
        assert before.speed == 1.0
        assert (then.requests, then.waiting, then.kv_live) == (5, 50 + first.tokens, 10 + first.tokens)
        until(lambda: router.router.nodes.status()[one.url]["unfinished"] == 0)
        assert len(router.router.nodes.status()[one.url]["latency"]) == 2
        for client in clients:
            client.close()


def test_more_requests_than_allowed_are_refused() -> None:
    wait = threading.Event()
    with node({CHAT: lambda got: wait.wait(10) and whole()(got)}) as one, routed(max_concurrent_requests=1) as router:
        router.add(one.url)
        with router.open(CHAT, {"model": "m"}):
            until(one.seen)
            status, headers, body = router.send("POST", CHAT, b'{"model": "m"}')
            assert status == 503 and headers["retry-after"] == "1" and b"--max_concurrent_requests" in body
            wait.set()


def test_a_redirect_is_not_followed() -> None:
    moved = whole("302 Found", b"", "Location: http://127.0.0.1:1/")
    with node({CHAT: moved}) as one, routed() as router:
        router.add(one.url)
        status, headers, _ = router.send("POST", CHAT, b'{"model": "m"}')
        assert (status, headers["location"], len(one.seen())) == (302, "http://127.0.0.1:1/", 1)


def test_open_requests_end_before_the_router() -> None:
    wait = threading.Event()
    with node({CHAT: lambda got: wait.wait(10) and whole()(got)}) as one, routed() as router:
        router.add(one.url)
        with router.open(CHAT, {"model": "m"}) as client:
            until(one.seen)
            router.router.stop()
            until(lambda: not router.router.nodes.ready)
            assert router.post(CHAT, {"model": "m"})[0] == 503
            wait.set()
            assert rest(client).startswith(b"HTTP/1.1 200 OK")


def test_requests_that_do_not_end_are_ended() -> None:
    wait = threading.Event()
    with node({CHAT: lambda got: wait.wait(10)}) as one, routed(drain_timeout=0.2) as router:
        router.add(one.url)
        with router.open(CHAT, {"model": "m"}) as client:
            until(one.seen)
            router.router.stop()
            answer = rest(client)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer
        wait.set()
