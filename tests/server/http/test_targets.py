"""Whom a request is for and what it asks for, by bytes alone: hosts, whole URLs, first lines."""

from __future__ import annotations

import pytest
from llmcore_server.http.strict import Pool, RequestReader
from reading import SMALL, head, read, refused


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b"x/health?",
        b"a,b",
        b"a b",
        b"x:",
        b"x:port",
        b"user@x",
        b"[::1",
        b"x#",
        b"x\\y",
        b"http://x",
        b"x:123456",
        b"x:65536",
        b"x:99999",
        b"[::1]:65536",
        b"x:+80",
        b"x:8_0",
        b"x:\xd9\xa1",
        b"x:-1",
    ],
)
def test_hosts_that_are_refused(host: bytes) -> None:
    assert refused(head(b"Host: " + host, host=False)) == 400


def test_hosts_that_are_taken() -> None:
    for host in (
        b"x",
        b"api.example.com:8000",
        b"127.0.0.1",
        b"[::1]:80",
        b"[::ffff:10.0.0.1]",
        b"my_service-1",
        b"x:65535",
    ):
        assert read(head(b"Host: " + host, host=False)).error is None
    assert refused(head(host=False)) == 400
    assert read(head(host=False, first=b"GET / HTTP/1.0")).error is None
    assert refused(head(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0")) == 400


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"http://a.test/v1/x?c=d", "/v1/x", "c=d", "a.test"),
        (b"HtTpS://[::1]:80/%76", "/v", "", "[::1]:80"),
        (b"http://a", "/", "", "a"),
        (b"http://a?b", "/", "b", "a"),
        (b"http://a//b", "//b", "", "a"),
        (b"http://a/http://b/c", "/http://b/c", "", "a"),
        (b"/http://b/c", "/http://b/c", "", "x"),
    ],
)
def test_a_whole_url_is_a_path_of_its_host(target: bytes, path: str, query: str, host: str) -> None:
    for step in (None, 1):
        reader = read(head(first=b"GET %b HTTP/1.1" % target), step)
        found = reader.head
        assert found is not None and reader.error is None
        assert (found.path, found.query, found.headers["HOST"]) == (path, query, host)
        assert found.target.startswith("/")
    assert refused(head(first=b"GET %b HTTP/1.1" % target, host=False)) == 400
    assert refused(head(b"Host: y", first=b"GET %b HTTP/1.1" % target)) == 400


def test_a_whole_url_names_the_host_of_an_old_request() -> None:
    found = read(head(first=b"GET http://a/ HTTP/1.0", host=False)).head
    assert found is not None and found.headers["HOST"] == "a"


@pytest.mark.parametrize("target", [b"*", b"http://x", b"HTTPS://x:80"])
def test_the_whole_server_may_be_asked_for_its_options(target: bytes) -> None:
    found = read(head(first=b"OPTIONS %b HTTP/1.1" % target)).head
    assert found is not None and (found.target, found.path, found.query) == ("*", "*", "")


def test_refusals_know_which_path_a_whole_url_has() -> None:
    for target in (b"/generate?a=b", b"http://x/generate?a=b", b"http://user@x/generate?a=b"):
        reader = RequestReader(SMALL, Pool(100))
        reader.feed(b"POST %b HTTP/1.1 \r\n" % target)
        assert reader.error is not None and reader.line is not None
        assert (reader.line.path, reader.line.query) == ("/generate", "a=b")


@pytest.mark.parametrize(
    "first",
    [
        b"get / HTTP/1.1",
        b"Get / HTTP/1.1",
        b"FOO / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"GET / HTTP/2.0",
        b"GET / HTTP/0.9",
        b"GET / HTTP/1.10",
        b"GET /",
        b"GET http:///health HTTP/1.1",
        b"GET http://user@x/health HTTP/1.1",
        b"GET http://x:y/health HTTP/1.1",
        b"GET http://x\\@y/health HTTP/1.1",
        b"GET http://x%2fy/health HTTP/1.1",
        b"GET http://x/health#a HTTP/1.1",
        b"GET http://x#/health HTTP/1.1",
        b"GET http://x /health HTTP/1.1",
        b"GET http:/x/health HTTP/1.1",
        b"GET http:x HTTP/1.1",
        b"GET ftp://x/health HTTP/1.1",
        b"GET file:///health HTTP/1.1",
        b"GET x HTTP/1.1",
        b"GET ?x HTTP/1.1",
        b"GET * HTTP/1.1",
        b"GET http://x* HTTP/1.1",
        b"OPTIONS ** HTTP/1.1",
        b"OPTIONS *?a HTTP/1.1",
        b"OPTIONS %2a HTTP/1.1",
        b"CONNECT x:443 HTTP/1.1",
        b"GET /a#b HTTP/1.1",
        b"GET /\xe9 HTTP/1.1",
        b"GET /a\tb HTTP/1.1",
        b"PRI * HTTP/2.0",
    ],
)
def test_first_lines_that_are_refused(first: bytes) -> None:
    assert refused(head(first=first)) == 400


@pytest.mark.parametrize(
    ("begun", "n"),
    [
        (b"\x16\x03\x01\x02\x00\x01", 1),
        (b"get / HTTP/1.1", 1),
        (b"GE get", 3),
        (b"HELOHELO", 3),
        (b"PRI * HTTP/2.0\r\n\r\n", 2),
        (b"GET / HTTP/1.1\nHost: x\n\n", 15),
        (b"GET / HTTP/1.1\r\nHost: x\n", 24),
        (b"\x00", 1),
    ],
)
def test_what_will_never_be_a_request_is_refused_at_once(begun: bytes, n: int) -> None:
    reader = RequestReader(SMALL, Pool(100))
    for at in range(len(begun)):
        reader.feed(begun[at : at + 1])
        if reader.error:
            assert (at + 1, reader.error.status) == (n, 400)
            return
    raise AssertionError("it was taken")
