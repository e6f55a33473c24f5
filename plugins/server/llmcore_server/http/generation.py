"""The answers to one HTTP request: submitted, fed with events, and ended exactly once.

A dialect makes a `Generation` from a `Request`, and calls `start` with a `Writer`; no thread waits. From then on
everything happens on the bridge's thread. Only a client disconnect is noticed by another thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
from llmcore.api.bridge import ChoiceEvent, Finish, Submit
from llmcore.api.errors import RequestError, reraise_if_stopping
from llmcore.text.stream import Healing, Reducer, TextRules, Usage, failure

from llmcore_server.chat.request_parsing import Choice, RequestParsing
from llmcore_server.http.deadlines import Deadline
from llmcore_server.http.errors import EncodeError, count_error, http_error, openai_error, retry_headers
from llmcore_server.http.front import Front
from llmcore_server.http.healing import heal
from llmcore_server.http.reply import KeepAlive, Reply
from llmcore_server.settings import Logging

logger = logging.getLogger(__name__)

_ABORT, _ERROR = Finish.ABORT, Finish.ERROR
"""Looked up once, because access to an enum's members is slow, and every token needs it."""

_STATUS = {
    **{"context_length_exceeded": 400, "invalid_value": 400, "unsupported_parameter": 400},
    **{"queue_full": 429, "rate_limit_exceeded": 429},
    **{"engine_failed": 503, "server_overloaded": 503, "queue_timeout": 503},
}
"""The HTTP status of an engine's errors by code; any other one is a 500."""

_CAUSES = {
    **{"queue_full": "overload", "rate_limit_exceeded": "overload", "server_overloaded": "overload"},
    **{"queue_timeout": "deadline", "first_token_timeout": "deadline", "request_timeout": "deadline"},
    **{"context_length_exceeded": "refused", "invalid_value": "refused", "unsupported_parameter": "refused"},
    "engine_failed": "engine",
}
"""Their names in records; any other one is a "failure"."""

UNENFORCED_HEADER = "x-llmcore-unenforced"
"""The header of an answer that names the parts of its request that are not enforced, such as keywords of a schema."""


class Writer(Protocol):
    """Writes the answers of one generation for a dialect. All calls come from one thread, one at a time, and must not
    block."""

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """`choice` went on. `texts`: the results of `ChoiceText.feed`. `choice.text.finish` tells if it ended."""

    def done(self) -> None:
        """Every choice has ended."""

    def failed(self, error: RequestError) -> None:
        """The request ended with `error`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request: one `Submit` for each of its prompts, all with the same `n`.

    `dialect` and `request_id` are for the record.
    `parsing`: the parsers that read the text of the answers.
    `single_call`: an answer ends with its first tool call.
    `stream`: the reply is server-sent events, so comments may keep its connection open.
    """

    submits: Sequence[Submit]
    rules: TextRules
    dialect: str
    request_id: str
    parsing: RequestParsing | None = None
    single_call: bool = False
    stream: bool = False


class Generation:
    """The answers to one request, between its submission and its end.

    It does not keep its writer, because the writer keeps it: the callers of the writer do. When they are over, both
    are freed without the collector of cycles.
    """

    __slots__ = (
        *("_deadlines", "_ended", "_ending", "_front", "_inside", "_keep_alive", "_reducer", "_started", "_terms"),
        *("choices", "reply", "request"),
    )

    def __init__(self, front: Front, reply: Reply, request: Request):
        self.reply = reply
        healings: list[Healing | None] = []
        if front.prompts.token_healing_mode:
            most = front.facts.max_total_len
            healed = [heal(submit, front.tokenizer, most) for submit in request.submits]
            request, healings = (
                replace(request, submits=[one for one, _ in healed]),
                [healing for _, healing in healed],
            )
        self.request = request
        self._reducer = Reducer(request.submits, front.tokenizer, request.rules, front.bridge, healings)
        n = request.submits[0].n
        self.choices = [Choice(i, i // n, text, request.parsing) for i, text in enumerate(self._reducer.choices)]
        self._front = front
        self._inside = 0
        self._terms = reply.terms
        self._started = self._terms.received
        self._deadlines: list[Deadline] = []
        self._keep_alive: KeepAlive | None = None
        self._ending = threading.Lock()
        self._ended = False

    def start(self, writer: Writer) -> None:
        """Submit all prompts. Raises RequestError if the gate or the bridge refuses; then nothing is left running."""
        if logger.isEnabledFor(logging.DEBUG):
            self._log_prompts()
        try:
            choices = sum(submit.choices for submit in self.request.submits)
            self._front.gate.enter(self._terms.client, choices)
            self._inside = choices  # open until the end
            self.reply.on_close(self._left)
            for prompt, submit in enumerate(self.request.submits):
                if self._ended:
                    break
                named = msgspec.structs.replace(submit, request_id=self.request.request_id, client=self._terms.client)
                self._front.bridge.submit(named, partial(self._take, writer, prompt))
        except BaseException as error:
            reraise_if_stopping(error)
            if self._claim():
                self._reducer.abort()
                self._record("error", self._cause(error))
                raise
            return
        self._limit(writer)
        if self.reply.closed:
            # The client left between two submissions, after the first were aborted.
            self._reducer.abort()

    def fail(self, error: RequestError, encode: EncodeError, event: bytes = b"data: %b\n\n") -> None:
        """Answer with `error`, or end a stream that has begun with it as one more `event`. For `Writer.failed`."""
        body = encode(error)
        if self.reply.streaming:
            self.reply.stream(event % body)
            self.reply.end()
        else:
            self.reply.respond(error.status, body, headers=retry_headers(error))

    def usage(self) -> Usage:
        """The tokens so far."""
        thoughts = [choice.thought.count for choice in self.choices if choice.thought is not None]
        return replace(self._reducer.usage(), reasoning=sum(thoughts) if thoughts else None)

    def _limit(self, writer: Writer) -> None:
        """Set the request's time limits: the operator's, or the client's if that is shorter."""
        limits = self._front.limits
        own = self._terms.seconds
        total = min(own or math.inf, limits.request_timeout or math.inf)
        if limits.first_token_timeout < total and limits.first_token_timeout:
            self._end_at(limits.first_token_timeout, "first_token_timeout", writer)
        if total < math.inf:
            self._end_at(total, "request_timeout", writer)
        if self.request.stream and self._front.keep_alive:
            self._keep_alive = KeepAlive(self.reply, self._front.deadlines, self._front.keep_alive)
        if self._ended:
            self._forget_limits()

    def _end_at(self, seconds: float, code: str, writer: Writer) -> None:
        call = partial(self._late, writer, code, seconds)
        self._deadlines.append(self._front.deadlines.add(self._started + seconds, call))

    def _late(self, writer: Writer, code: str, seconds: float) -> None:
        """On the bridge's thread: end the request at a time limit."""
        if code == "request_timeout":
            text = f"The request was not done within {seconds:g} s."
        elif self._reducer.first is None:
            text = f"The first token did not come within {seconds:g} s."
        else:
            return
        self._fail(writer, RequestError(text, code=code, status=504))

    def _forget_limits(self) -> None:
        for deadline in self._deadlines:
            deadline.cancel()
        if self._keep_alive is not None:
            self._keep_alive.end()

    def _log_prompts(self) -> None:
        """Log every prompt as text and as ids, cut to `--max_log_len`."""
        most = self._front.config.section(Logging).max_log_len
        for submit in self.request.submits:
            ids = submit.prompt.ids.tolist()
            text = self._front.tokenizer.decode(ids, skip_special_tokens=False)
            logger.debug(
                "%s: %d tokens, up to %d more: %r %s",
                self.request.request_id,
                len(ids),
                submit.max_new_tokens,
                text[:most],
                ids[:most],
            )

    def _complete(self, writer: Writer) -> None:
        if self._claim():
            reason = cause = ""
            try:
                writer.done()
            except BaseException as error:  # noqa: BLE001 - a dialect's writer is foreign code
                reason, cause = "error", "failure"
                self._write_error(writer, self._note(error))
            self._record(reason, cause)

    def _fail(self, writer: Writer, error: RequestError) -> None:
        if self._claim():
            self._reducer.abort()
            self._write_error(writer, error)
            self._record("error", self._cause(error))

    def _note(self, error: BaseException) -> RequestError:
        """The error that the client is told of; the log gets the rest."""
        reraise_if_stopping(error)
        logger.error("request %s failed on the way to its client", self.request.request_id, exc_info=error)
        return http_error(500)

    def _write_error(self, writer: Writer, error: RequestError) -> None:
        count_error(error)
        try:
            writer.failed(error)
        except BaseException as broken:  # noqa: BLE001 - a dialect's writer is foreign code
            # The client must not wait for ever, so it gets an error in OpenAI's shape.
            body = openai_error(self._note(broken))
            try:
                self.reply.respond(500, body)
            except RuntimeError:  # its stream has begun, or is over
                with contextlib.suppress(RuntimeError):
                    self.reply.stream(b"data: " + body + b"\n\n")
                    self.reply.end()

    def _left(self) -> None:
        """After a client disconnect: end the request in the engine too."""
        if self._claim():
            self._reducer.abort()
            self._front.gate.vacate(self._inside)
            self._record("abort", self.reply.why_closed)

    def _cause(self, error: BaseException) -> str:
        """The name of `error` in the record: a key of counters.CAUSES."""
        if not isinstance(error, RequestError):
            return "failure"
        if error.status in (400, 404):
            return "refused"
        if error.code == "server_overloaded" and self._front.gate.closed:
            return "drain"
        return _CAUSES.get(error.code or "", "failure")

    def _claim(self) -> bool:
        """True for the one caller that is to end this generation."""
        with self._ending:
            ended, self._ended = self._ended, True
        if not ended:
            self._forget_limits()
            if self._inside:
                self._front.gate.leave(self._terms.client, self._inside)
        return not ended

    def _record(self, reason: str = "", cause: str = "") -> None:
        self._front.finished(
            self._reducer.record(
                request_id=self.request.request_id,
                dialect=self.request.dialect,
                finish=reason,
                cause=cause,
                key=self._front.key_name(self._terms.client),
                model=self._front.model_name,
                started=self._started,
                ended=time.monotonic(),
            )
        )

    def _take(self, writer: Writer, prompt: int, event: ChoiceEvent) -> None:
        """The bridge's sink for the prompt of this number. Whatever code fails on an event, only this request ends."""
        if self._ended:
            return
        try:
            if event.unenforced:
                self.reply.add_headers({UNENFORCED_HEADER: ", ".join(event.unenforced)})
                if event.finish is Finish.RUNNING and not event.tokens:
                    return
            if event.finish is _ERROR or event.finish is _ABORT:
                self._fail(writer, self._failure(event, self.request.submits[prompt]))
                return
            number, texts = self._reducer.feed(prompt, event)
            choice = self.choices[number]
            if choice.parser is not None and choice.parse(choice.parser, texts, single_call=self.request.single_call):
                self._reducer.stop(number)
            writer.write(choice, event, texts)
            if not self._reducer.running:
                self._complete(writer)
        except BaseException as error:  # noqa: BLE001 - whatever it raises ends its request only
            self._fail(writer, self._note(error))

    def _failure(self, event: ChoiceEvent, submit: Submit) -> RequestError:
        """The error that the client is told of when the engine has ended its request."""
        error = failure(event, submit)
        error.status = _STATUS.get(error.code or "", 500)
        if error.code == "queue_full":
            error.retry_after = self._front.gate.retry_after
        return error
