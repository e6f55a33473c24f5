"""A chat over an OpenAI-compatible server, with the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from llmcore.api.errors import ConfigError, LlmcoreError

Message = dict[str, str]


class Server:
    """An OpenAI-compatible server at `url` (with or without /v1). `model` None means the first model that it lists."""

    def __init__(self, url: str, model: str | None, timeout: float = 600.0) -> None:
        server_address(url)
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._timeout = timeout
        self.model = model or self._first_model()

    def reply(self, messages: Sequence[Message], settings: dict[str, Any]) -> Iterator[str]:
        """Pieces of the answer as they arrive."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **settings}
        with self._open("/chat/completions", body) as response:
            for event in events(response):
                if "error" in event:
                    raise LlmcoreError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            listed = json.load(response)["data"]
        if not listed:
            raise LlmcoreError(f"{self._base} lists no model.")
        return str(listed[0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + path, data=data, headers={"Content-Type": "application/json"})
        try:
            response: HTTPResponse = urlopen(request, timeout=self._timeout)
        except HTTPError as error:
            raise LlmcoreError(f"{self._base}{path}: {error.code} {_message(error)}") from error
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise LlmcoreError(f"{self._base}{path} does not answer: {reason}") from error
        return response


def events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of every server-sent event up to `[DONE]`."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        yield json.loads(data)


def _message(error: HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def server_address(url: str) -> tuple[bool, str, int]:
    """(True for TLS, host, port) of a value of `--url`. Raises ConfigError for an invalid address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # an open bracket, an invalid port
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(f"--url {url}: write http://HOST:PORT.")
    secure = parts.scheme == "https"
    return secure, host, port or (443 if secure else 80)
