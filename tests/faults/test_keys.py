"""Rows 19 to 21 and 47: who may use the server, and that nobody learns what others ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import unquote

import pytest
from conftest import MakeHouse
from harness import KEY, SECRET, House
from llmcore_devtools import sockets

OPEN = ("/health", "/healthz", "/liveness", "/ping", "/readiness")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
PROMPT = f"{SECRET}, which is long enough to fill several granules of the cache with what it says"


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(keys=True, httpserver_workers=1) as house:
        yield house


def ask(house: House, authorization: str | None, path: str = "/v1/completions") -> tuple[int, dict[str, str], bytes]:
    """A request with this header, or without one; the key of the house is left out."""
    line = "" if authorization is None else f"Authorization: {authorization}\r\n"
    body = {"prompt": "x", "max_tokens": 1}
    return house.send(sockets.request("POST", path, body, headers=line))


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY} {KEY}",
        f"Bearer {KEY.upper()}",
        f"Basic {KEY}",
        KEY,
        "Bearer sk-\u00e9",
    ],
)
def test_row_19_keys_that_are_none(house: House, given: str | None) -> None:
    for path in ("/v1/completions", "/generate", "/metrics", "/nowhere"):
        status, headers, answer = ask(house, given, path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), answer
        assert KEY not in answer.decode() and json.loads(answer)["error"]["code"] == "invalid_api_key"


def test_row_19_a_key_that_is_huge_or_comes_twice_or_in_the_query(house: House) -> None:
    assert ask(house, "Bearer " + "x" * (1 << 20))[0] in (400, 401, 431)
    assert ask(house, f"Bearer {KEY}\r\nAuthorization: Bearer {KEY}")[0] == 400
    for query in (f"api_key={KEY}", f"key={KEY}", f"authorization=Bearer%20{KEY}"):
        assert ask(house, None, f"/v1/completions?{query}")[0] == 401
    assert ask(house, f"Bearer {KEY}")[0] == 200


def spellings(path: str) -> Iterator[str]:
    """The path, and what some servers take for it."""
    yield path
    yield "/" + path
    yield path + "/"
    yield "//" + path
    yield "/%2f" + path[1:]
    yield path.replace("/", "//")
    yield "/./" + path[1:]
    yield "/%2e" + path
    yield "/." + path
    yield "/x/.." + path
    yield path + ";x"
    yield path + "%00"
    yield path + "%20"
    yield path.upper()
    yield path.replace("/", "\\")
    yield path[:1] + f"%{ord(path[1]):02x}" + path[2:] if len(path) > 1 else path
    yield f"/health/..{path}"
    yield f"/health?{path}"[: len("/health")] + f"%3f{path}"


def test_row_20_every_route_without_a_key(house: House) -> None:
    """What is open is listed, by its exact path; everything else is closed, known or not."""
    document = json.loads(house.get("/openapi.json")[2])
    routes = [path.replace("{model}", "fake") for path in document["paths"]]
    assert len(routes) > 15 and "/metrics" in routes
    for path in (*routes, "/docs", "/openapi.json", "/nowhere", *OPEN):
        for spelling in spellings(path):
            for method in METHODS if spelling == path else ("GET", "POST"):
                with sockets.connect(house.port) as sock:
                    sock.sendall(f"{method} {spelling} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
                    status = sockets.read_head(sock)[0]
                if unquote(spelling) in OPEN:  # a path is what it decodes to, and nothing else
                    assert status in (200, 405), (method, spelling, status)
                else:
                    assert status in (400, 401, 404, 405), (method, spelling, status)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
def test_row_21_pages_of_other_origins(house: House, origin: str) -> None:
    for method, path in (("OPTIONS", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
        for key in ("", house.headers()):
            more = f"{key}Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n"
            status, headers, _ = house.send(sockets.request(method, path, {}, headers=more))
            assert not [name for name in headers if name.startswith("access-control-")], headers
            assert key or status == 401


def test_row_47_a_prefix_that_another_key_brought_is_no_hit(house: House) -> None:
    def cached(key: str, path: str = "/v1/completions") -> int:
        body = {"prompt": PROMPT, "max_tokens": 1}
        status, _, answer = house.send(sockets.request("POST", path, body, headers=f"Authorization: Bearer {key}\r\n"))
        assert status == 200, answer
        return int((json.loads(answer)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert cached(KEY) == 0
    assert cached(KEY) > 10
    assert cached("sk-another-0c1d") == 0
    assert cached("sk-another-0c1d") > 10
