"""The interface of a dialect: `Front`, which it gets, and `Route`, which it gives back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import UnionType
from typing import Any, TypeVar

import falcon
import orjson
from llmcore.api.bridge import Bridge, ModelFacts
from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import RequestRecord, Tokenizer
from llmcore.config import Config

from llmcore_server.chat.request_parsing import OutputParsers
from llmcore_server.http import body, streaming
from llmcore_server.http.admission import Gate
from llmcore_server.http.deadlines import Deadlines, read_terms
from llmcore_server.http.errors import EncodeError, openai_error
from llmcore_server.http.reply import Reply
from llmcore_server.messages import State
from llmcore_server.server_status import model_names, server_info
from llmcore_server.settings import Admission, Prompts, Server

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """One path of a dialect and the Falcon resource behind it (`on_get`, `on_post`, ...).

    `encode_error` makes the dialect's body of a RequestError, for whatever fails on this path. `queued`: what is
    posted here waits for the engine, so it is refused, before it is read, while the engine's queue is full.

    The rest is for the OpenAPI document, whose text comes from docstrings: those of the resource, of these types, and
    those below their fields. `body`: what a body is read as. `answer`: what is answered. `event`: what an event of a
    streamed answer holds. `event_type`: the media type of such an answer. `failure`: what an error is answered with,
    as `encode_error` writes it; None: `ErrorAnswer`.
    """

    path: str
    resource: object
    encode_error: EncodeError = openai_error
    body: type | None = None
    queued: bool = False
    answer: type | None = None
    event: type | UnionType | None = None
    event_type: str = "text/event-stream"
    failure: type | None = None


@dataclass(frozen=True, kw_only=True)
class Front:
    """The HTTP side as a dialect sees it: one per worker, safe to use from any thread.

    `facts`: what the engine knows of the model. `state`: the supervisor's newest word on readiness, load and
    metrics. `parsers`: the output parsers that the operator chose. `processors`: names of the logits processors that
    requests may ask for. `observers` are told of every finished request. `gate` and `deadlines`: what `Generation`
    keeps the server's limits with. `key_names`: what logs call the API keys, in their order.
    """

    config: Config
    bridge: Bridge
    tokenizer: Tokenizer
    facts: ModelFacts
    state: Callable[[], State]
    parsers: OutputParsers = field(default_factory=OutputParsers)
    processors: frozenset[str] = frozenset()
    observers: tuple[Callable[[RequestRecord], object], ...] = ()
    gate: Gate = field(default_factory=Gate)
    deadlines: Deadlines = field(default_factory=Deadlines)
    key_names: tuple[str, ...] = ()
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def model_name(self) -> str:
        """The name clients use: the first `--model_name`, else the name of the model's directory or file."""
        return self.model_names[0]

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """Every name that clients may use: the model's and its aliases."""
        # once, because pathlib interns what a path is made of, and the table of interned strings grows with each
        return model_names(self.config)

    @cached_property
    def limits(self) -> Admission:
        """The operator's limits on requests and their time."""
        return self.config.section(Admission)

    @cached_property
    def prompts(self) -> Prompts:
        """The operator's settings of prompts."""
        return self.config.section(Prompts)

    @cached_property
    def keep_alive(self) -> float:
        """Seconds of silence until a stream sends a comment; 0 for never."""
        return self.config.section(Server).sse_keep_alive

    def key_name(self, client: int) -> str:
        """The name of API key number `client` in logs: the beginning of its SHA-256; "" for none."""
        return self.key_names[client] if 0 <= client < len(self.key_names) else ""

    def server_info(self) -> bytes:
        """The body of `/server_info`, as on the admin listener: JSON without any secret."""
        state = self.state()
        return server_info(self.config, state.server, self.facts, state.engines, state.reason)

    def next_id(self) -> int:
        """A number for `Submit.id` that this worker has not used."""
        return next(self._ids)

    def read(self, req: falcon.Request, kind: type[T]) -> T:
        """The JSON body as `kind` (a msgspec.Struct); RequestError names the field that is wrong."""
        return body.read(req, kind)

    def answer(self, resp: falcon.Response, value: object) -> None:
        """Answer with `value` as JSON when the responder returns."""
        resp.content_type = "application/json"
        resp.data = orjson.dumps(value)

    def detach(self, req: falcon.Request, resp: falcon.Response) -> Reply:
        """Answer `req` later, from any thread. Submit after this call, so that a client that leaves is noticed.

        If the responder raises afterwards, the error is the answer and the reply's `on_close` callbacks run.
        """
        terms = getattr(req.context, "terms", None) or read_terms(req)
        reply = streaming.detach(req.env, resp)
        reply.terms = terms
        return reply

    def request_id(self, req: falcon.Request) -> str:
        """The `x-request-id` of this request."""
        value: Any = req.context.request_id
        return str(value)

    def finished(self, record: RequestRecord) -> None:
        """A request ended, for whatever reason: tell the hooks and the metric sinks. Once per submitted request."""
        for observer in self.observers:
            try:
                observer(record)
            except BaseException as error:
                reraise_if_stopping(error)
                logger.exception("request %s: an observer of its end failed", record.request_id)
