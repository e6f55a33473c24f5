"""Rows 40, 42 to 46: templates and images that clients send. This server takes text: nothing is fetched or decoded."""

from __future__ import annotations

import base64
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT
from harness import House

CHATS = "/v1/chat/completions"


class Canary:
    """A listener that nobody should ever call. `calls`: who did."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self.calls = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return
            self.calls += 1
            peer.close()

    def close(self) -> None:
        """No more."""
        self._sock.close()


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    listener = Canary()
    yield listener
    assert listener.calls == 0
    listener.close()


def png(width: int, height: int) -> bytes:
    """A black image of one bit per pixel; large ones are small files."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes(1 + (width + 7) // 8) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def refused(house: House, url: Any) -> None:
    """An image, in every dialect's way, is a 400 that says so."""
    part = {"type": "image_url", "image_url": {"url": url}}
    before = house.resident()
    for path, body, param in (
        (CHATS, {"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0]"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}, "messages"),
        (
            "/generate",
            {"inputs": "x", "parameters": {}, "multimodal_params": {"images": [{"type": "url", "data": url}]}},
            "multimodal_params.images",
        ),
        (
            "/generate_stream",
            {"inputs": "x", "parameters": {}, "multimodal_params": {"images": [{"type": "base64", "data": url}]}},
            "multimodal_params.images",
        ),
    ):
        status, _, answer = house.post(path, body)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (400, "unsupported"), answer
        assert error["param"].startswith(param), error
        assert "0x" not in error["message"]
    assert house.resident() - before < 32 << 20


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_row_40_templates_of_clients(house: House, more: dict[str, Any], param: str) -> None:
    status, _, answer = house.post(CHATS, {**CHAT, "max_tokens": 1, **more})
    assert (status, json.loads(answer)["error"]["param"]) == (400, param), answer


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|vision_start|><|image_pad|>", "<image>")


def test_row_42_special_tokens_as_text(house: House) -> None:
    with house.neighbour():
        for text in (*SPECIAL, "".join(SPECIAL) * 20):
            for path, body in (
                ("/v1/completions", {"prompt": text}),
                (CHATS, {"messages": [{"role": "user", "content": text}]}),
                (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
            ):
                status, _, answer = house.post(path, {**body, "max_tokens": 2})
                assert status == 200, (text, answer)
    refused(house, "<|image_pad|>")


IMAGES = {
    "1x1": png(1, 1),
    "0x0": png(0, 0),
    "1x20,000": png(1, 20_000),
    "13,000x13,000": png(13_000, 13_000),
    "truncated": png(50, 50)[:40],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "pdf": b"%PDF-1.7",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0",
    "fits": b"SIMPLE  =                    T",
}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_row_43_images(house: House, image: bytes) -> None:
    refused(house, "data:image/png;base64," + base64.b64encode(image).decode())


def test_row_43_broken_text_and_a_hundred_images(house: House) -> None:
    refused(house, "data:image/png;base64,????")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, _, answer = house.post(CHATS, {"messages": [{"role": "user", "content": [part] * 100}]})
    assert (status, json.loads(answer)["error"]["code"]) == (400, "unsupported")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/x.png",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f.1:{port}/",
        "http:\\\\127.0.0.1:{port}/",
        "http://example.com@127.0.0.1:{port}/",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "/etc/passwd",
        "gopher://127.0.0.1:{port}/_x",
        "ftp://127.0.0.1:{port}/",
    ],
)
def test_rows_44_and_45_addresses(house: House, canary: Canary, url: str) -> None:
    """Nobody is called, so there is nothing to redirect, to drip or to unpack."""
    with house.neighbour(events=50):
        refused(house, url.format(port=canary.port))
    assert canary.calls == 0


def test_row_46_images_of_equal_bytes(house: House) -> None:
    for width, height in ((30, 100), (100, 30)):
        refused(house, base64.b64encode(png(width, height)).decode())
