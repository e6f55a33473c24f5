"""Addresses that are looked up again for every connection."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from llmcore.api import ConfigError, RequestError
from llmcore_route.addresses import Allowed, check, dial, place_of


def test_a_name_that_means_another_address_later_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = ["127.0.0.1", "169.254.169.254"], socket.getaddrinfo

    def lookup(host: str, port: int, *args: Any, **more: Any) -> list[Any]:
        if host != "rebinds.test":  # threads of other tests look up their own hosts
            return real(host, port, *args, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (answers.pop(0), port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    place = place_of("http://rebinds.test:80")
    check(place, Allowed(()))
    with pytest.raises(ConnectionError, match=r"means 169\.254\.169\.254 now"):
        dial(place, 1.0)


def test_hosts_with_and_without_ports() -> None:
    allowed = Allowed(("10.0.0.1", "10.0.0.2:80", "[::1]:81", "::2"))
    for url in ("http://10.0.0.1:5", "http://10.0.0.2", "http://[::1]:81/base", "http://[::2]:9"):
        assert allowed.node(place_of(url)), url
    for url in ("http://10.0.0.2:81", "http://[::1]:80", "http://10.0.0.3", "https://10.0.0.2"):
        assert not allowed.node(place_of(url)), url
    assert allowed.client("10.0.0.2") and allowed.client("::ffff:10.0.0.1") and not allowed.client("10.0.0.3")
    assert Allowed(()).node(place_of("http://anything:1")) and not Allowed(()).client("127.0.0.1")


@pytest.mark.parametrize("text", ["", "a:b", "a/b", "u@h", "[::1"])
def test_a_host_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST or HOST:PORT"):
        Allowed((text,))


def test_a_base_is_kept() -> None:
    place = place_of("HTTPS://Example.Test/base/")
    assert (place.secure, place.host, place.port, place.base) == (True, "example.test", 443, "/base")
    with pytest.raises(RequestError, match="write http://HOST:PORT"):
        place_of("http://h:70000")
