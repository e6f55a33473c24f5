"""A dialect under test, without a server: its routes on a scripted bridge.

side = Side.of(routes, tokenizer, answer="Hello")
assert side.ok("/generate", inputs="hi", parameters={})["generated_text"] == ["Hello"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import falcon.testing
import orjson
from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import OutputParserSpec
from llmcore_server.http.front import Front, Route

from llmcore_devtools.fake_bridge import FakeBridge, FakeFront, dialect_client, fake_front


@dataclass
class Side:
    """A client of one dialect, with its bridge and front."""

    client: falcon.testing.TestClient
    bridge: FakeBridge
    front: FakeFront

    @classmethod
    def of(
        cls,
        routes: Callable[[Front], Iterable[Route]],
        tokenizer: Tokenizer,
        answer: str | list[int] | None = None,
        facts: dict[str, Any] | None = None,
        parsers: Iterable[OutputParserSpec] = (),
        **bridge: Any,
    ) -> Side:
        """A side on which every choice answers with `answer`, or repeats its prompt if that is None.

        `fake_front` describes `facts` and `parsers`.
        """
        if answer is not None:
            ids = tokenizer.encode(answer) if isinstance(answer, str) else answer
            bridge["answer"] = lambda prompt, choice: ids
        fake = FakeBridge(**bridge)
        front = fake_front(fake, tokenizer, parsers=parsers, **(facts or {}))
        return cls(dialect_client(routes, front), fake, front)

    def post(self, path: str, **body: Any) -> falcon.testing.Result:
        """POST a JSON object."""
        return self.client.simulate_post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        """The JSON answer of a POST that must succeed."""
        result = self.post(path, **body)
        assert result.status_code == 200, result.text
        return result.json

    def events(self, path: str, prefix: str = "data: ", **body: Any) -> list[Any]:
        """The events of a stream, which must have ended. "[DONE]" stays text."""
        result = self.post(path, **body)
        assert result.headers["content-type"] == "text/event-stream", result.text
        assert self.front.transports[-1].ended
        *events, rest = result.text.split("\n\n")
        assert rest == ""
        assert all(event.startswith(prefix) for event in events)
        texts = [event.removeprefix(prefix) for event in events]
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]

    def lines(self, path: str, **body: Any) -> list[Any]:
        """The objects of a stream of JSON lines, which must have ended."""
        result = self.post(path, **body)
        assert result.headers["content-type"] == "application/x-ndjson", result.text
        assert self.front.transports[-1].ended
        return [orjson.loads(line) for line in result.text.splitlines()]
