"""Chat templates, rendered in child processes within limits of time and memory.

A template is a program that came with a download. It may be harmless for one message and loop for another. In a child
process (`template_child`) it cannot hold up the worker's streams or take the worker's memory, and the kernel ends it
when it exceeds a limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import msgspec
from llmcore.api.child_pool import ChildEnded, ChildPool, Limits, NoChild
from llmcore.api.errors import ConfigError, RequestError
from llmcore.text.templates import ChatTemplate

from llmcore_server.template_child import Answer, Question

CPU_SECONDS = 1.0
"""Most CPU seconds of a render."""

MEMORY_BYTES = 64 << 20
"""Most bytes that a render may take, besides `PER_BYTE` for each byte of the conversation."""

PER_BYTE = 16
"""A wide character makes every character of its text take four bytes, and templates copy texts several times."""

WALL_SECONDS = 60.0
"""Most seconds of real time. A template cannot sleep, so only an overloaded machine reaches this limit."""

PLACES = 4
"""Most renders at once in one worker."""

MOST_WAITING = 4
"""Most renders that wait longer than `SHORT_SECONDS` for a place; further ones are refused.

Each of them occupies a thread of the worker, and health checks need threads too.
"""

SHORT_SECONDS = 1.0
"""A burst of ordinary renders is over before that, also on a machine whose cores are all busy."""

_answers = msgspec.json.Decoder(Answer)


def render_in_children(tokenizer: Any) -> None:
    """Have the `template` of a `protocols.Tokenizer` rendered in child processes, if it has one."""
    template = getattr(tokenizer, "template", None)
    if isinstance(template, ChatTemplate) and template.sources:
        tokenizer.template = child = ChildTemplate(template)
        threading.Thread(target=child.warm, name="template-warm", daemon=True).start()


class ChildTemplate:
    """A ChatTemplate that child processes render. Any thread may use it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._name = template.name
        self._pool = ChildPool("llmcore_server.template_child", msgspec.json.encode(template))
        self._places = threading.BoundedSemaphore(PLACES)
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def warm(self) -> None:
        """Start a child, which compiles the template."""
        with suppress(RequestError):
            self._answer(Question())

    def check(self) -> None:
        """Let a child render one word. Raises ConfigError if the template cannot be served."""
        name = self._name
        try:
            answer = self._asked(Question())
        except ChildEnded as error:
            raise self._template.unfit(f"for one word it takes {_excess(error)}") from error
        except NoChild as error:
            raise ConfigError(
                f"the process that tries {name} could not start: {error}; "
                "check the limits of this shell (ulimit -a) and the free memory"
            ) from error
        except TimeoutError as error:
            raise ConfigError(
                f"the process that tries {name} did not end within {WALL_SECONDS:g} s; "
                "start the server when the machine is less busy"
            ) from error
        if answer.error is not None:
            raise ConfigError(answer.error)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads. Raises RequestError if no child answers."""
        return frozenset(self._answer(Question()).variables)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Render the chat template in a child process: the prompt for `messages`.

        Raises RequestError also for a render that exceeds its limits. See `ChatTemplate.render`.
        """
        return self._answer(Question(messages, variables)).prompt  # type: ignore[arg-type]

    def _answer(self, question: Question) -> Answer:
        name = self._name
        try:
            answer = self._asked(question)
        except ChildEnded as error:
            raise RequestError(
                f"{name} was stopped: for these messages it takes {_excess(error)}; send fewer or shorter ones, and "
                "if that changes nothing, give the server another one with --chat_template",
                param="messages",
                code="invalid_value",
            ) from error
        except (NoChild, TimeoutError) as error:
            raise RequestError(
                f"{name} takes long for these messages, and for those of other requests at the same time; "
                "try again later",
                code="server_overloaded",
                status=503,
            ) from error
        if answer.error is not None:
            raise RequestError(answer.error, param=answer.param, code=answer.code)
        return answer

    def _asked(self, question: Question) -> Answer:
        """The answer of a child. Raises ChildEnded, NoChild, and TimeoutError if too many renders wait."""
        asked = msgspec.json.encode(question)
        limits = Limits(CPU_SECONDS, MEMORY_BYTES + PER_BYTE * len(asked), WALL_SECONDS)
        with self._place():
            return _answers.decode(self._pool.answer(asked, limits))

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of `PLACES`. Raises TimeoutError."""
        if not self._places.acquire(timeout=SHORT_SECONDS):
            if not self._waiting.acquire(blocking=False):
                raise TimeoutError
            try:
                if not self._places.acquire(timeout=WALL_SECONDS):
                    raise TimeoutError
            finally:
                self._waiting.release()
        try:
            yield
        finally:
            self._places.release()


def _excess(error: ChildEnded) -> str:
    """The limit that a template exceeded."""
    if error.out_of_time:
        return f"more than {CPU_SECONDS:g} s of CPU time"
    if error.status == -signal.SIGSEGV:
        return "more than the stack of a process"
    return f"more than {MEMORY_BYTES >> 20} MB of memory beyond the size of the messages"
