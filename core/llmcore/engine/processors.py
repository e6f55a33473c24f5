"""Logits processors from their specs, bound to requests, and the threads on which the code of plugins runs."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from llmcore.api.bridge import LogitsProcessor, Submit
from llmcore.api.counters import TALLIES
from llmcore.api.errors import (
    ConfigError,
    LlmcoreError,
    RequestError,
    did_you_mean,
    message_of,
    reraise_if_stopping,
    text_of,
)
from llmcore.api.models import ModelConfig
from llmcore.api.processors import OVERLOADED, LogitsProcessorSpec, ProcessorContext
from llmcore.api.protocols import Int32, Tokenizer
from llmcore.api.specs import TokenizerSpec
from llmcore.config import Config
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry
from llmcore.sched.processors import ChoiceProcessors
from llmcore.text.bad_words import PROCESSOR as BAD_WORDS
from llmcore.text.source import open_tokenizer, prepare

logger = logging.getLogger(__name__)

_THREADS = min(16, max(2, len(os.sched_getaffinity(0)) // 2))
"""A mask takes a millisecond where a grammar counts what it repeats, and a step may have dozens of them."""

HUNG_SECONDS = 1.0
"""A thread that works longer than this on one call counts as lost until it returns."""

QUICK = 2
"""Threads that are awake while calls are short: more of them spend their time, and the engine's, on handing Python's
lock to each other."""

WAITED_SECONDS = 0.001
"""A call that waits longer than this wakes one more thread: the calls before it are not short."""

MOST_LOST = 64
"""Threads that are replaced at most; they hold memory as long as they hang."""

EXIT_SECONDS = 5.0
"""Python waits this long for a thread when it exits. It then ends daemon threads wherever they are: inside a native
library that is a crash."""


def apart(name: str, call: Callable[[], None]) -> None:
    """Have `call` run on a thread of its own, for as long as it takes."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, EXIT_SECONDS)


class Threads:
    """`count` threads that call functions, started with the first one: QUICK of them while calls are short, more where
    calls wait. They end with the process, which waits for calls that do not hang (see EXIT_SECONDS).

    While some hang in a call there are others in their place, so that calls that hang do not hold up the rest.
    `hung_seconds` says after which time a call hangs. Every method may be called from any thread.
    """

    def __init__(self, name: str, count: int, hung_seconds: Callable[[], float] = lambda: HUNG_SECONDS) -> None:
        self._name = name
        self._count = count
        self._hung_seconds = hung_seconds
        self._work: deque[tuple[float, Callable[[], None]]] = deque()
        """Calls, and since when they wait (time.monotonic())."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._awake = 0
        self._quick = min(QUICK, count)
        """The number that may be awake while no call has waited: QUICK, and those that hang."""
        self._lock = threading.Lock()
        self._since: dict[threading.Thread, float | None] = {}
        """Thread -> when its call began (time.monotonic()), None while it waits for one."""

    def run(self, work: Callable[[], None]) -> None:
        """Have `work` called soon; it must not raise."""
        if not self._since:
            self.tend()
            atexit.register(self._settle)
        self._work.append((time.monotonic(), work))
        self.hurry()

    def hurry(self) -> None:
        """Wake one more thread if those that are awake do not keep up; call it often while calls wait."""
        with self._lock:
            if self._work and (self._awake < self._quick or self._waited()):
                self._awake += 1
                self._wake.put(None)

    def tend(self) -> None:
        """Replace threads that hang; call it now and then."""
        with self._lock:
            lost = self._lost()
            self._quick = min(QUICK, self._count) + lost
            missing = min(self._count, self._count + MOST_LOST - len(self._since))
            missing -= len(self._since) - lost
            for _ in range(missing):
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._since[thread] = None
                thread.start()
            if lost and missing > 0:
                text = "%d calls of plugins have taken more than %g s; %d more threads serve the others"
                logger.warning(text, lost, self._hung_seconds(), missing)
        self.hurry()

    def _waited(self) -> bool:
        """True if the oldest call has waited for WAITED_SECONDS and a thread sleeps."""
        return self._awake < len(self._since) and time.monotonic() - self._work[0][0] >= WAITED_SECONDS

    def _settle(self) -> None:
        until = time.monotonic() + self._hung_seconds()
        while any(list(self._since.values())) and time.monotonic() < until:
            time.sleep(0.01)

    def _lost(self) -> int:
        late = time.monotonic() - self._hung_seconds()
        return sum(since is not None and since < late for since in self._since.values())

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            self._wake.get()
            while work := self._next():
                self._since[me] = time.monotonic()
                work()
                del work
                self._since[me] = None
                if len(self._since) > self._count and self._superfluous(me):
                    return

    def _next(self) -> Callable[[], None] | None:
        """The call that has waited longest; without one the thread goes to sleep."""
        with self._lock:
            if not self._work:
                self._awake -= 1
                return None
            work = self._work.popleft()[1]
        self.hurry()
        return work

    def _superfluous(self, me: threading.Thread) -> bool:
        """True if `me` hung, was replaced, and is back: then it ends."""
        with self._lock:
            if len(self._since) - self._lost() <= self._count:
                return False
            del self._since[me]
            self._awake -= 1
        self.hurry()
        return True


Start = Callable[[Int32], Any]
"""The function that a spec's `make` returned: prompt ids -> a processor."""


def processors_of(config: Config, registry: Registry, model: ModelConfig) -> Processors:
    """All that plugins contribute, for `model`."""

    @cache
    def tokenizer() -> Tokenizer:
        specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
        directory = prepare(specs, config.model, config.model.path, Path(converted.name))
        return open_tokenizer(specs, directory, config.model.tokenizer_mode)

    converted = tempfile.TemporaryDirectory(prefix="llmcore-")
    context = ProcessorContext(model.vocab_size, model.eos_ids, tokenizer, options=config.plugin_options)
    brought = (spec for spec, _ in registry.specs(LogitsProcessorSpec) if spec.enabled(config.plugin_options))
    processors = Processors({spec.name: spec for spec in (*brought, BAD_WORDS)}, context)
    processors.warm()
    return processors


@dataclass(frozen=True)
class RequestProcessors:
    """The processors of a request by choice, and what of their arguments they do not enforce."""

    choices: Sequence[ChoiceProcessors] = ()
    unenforced: tuple[str, ...] = ()


class Processors:
    """The logits processors that requests may ask for, by name; `threads` compute what they want."""

    def __init__(self, specs: Mapping[str, LogitsProcessorSpec], context: ProcessorContext) -> None:
        self._specs = specs
        self._context = context
        self.threads = Threads("processors", _THREADS)

    def warm(self) -> None:
        """Have what plugins need for every request made ready in the background, for as long as it takes."""
        for spec in self._specs.values():
            if spec.warm is not None:
                apart("processors-warm", partial(self._warm, spec.name, spec.warm))

    def check(self, request: Submit) -> None:
        """Raise RequestError for an unknown name."""
        for call in request.sampling.logits_processors:
            self._find(call)

    def bind(self, request: Submit) -> RequestProcessors:
        """The processors of each choice. May be called from any thread.

        Raises RequestError for an unknown name, and for arguments that a processor refuses.
        """
        left_out: list[str] = []
        context = replace(self._context, stop_ids=request.stop_ids, leave_out=left_out.extend)
        starts: list[tuple[LogitsProcessorSpec, LogitsProcessor, Start]] = []
        for call in request.sampling.logits_processors:
            spec = self._find(call)
            with _refusals(call):
                starts.append((spec, call, load(spec.make)(dict(call.args), context)))
        choices = [self._bound(starts, request, number) for number in range(request.n)]
        return RequestProcessors(choices, tuple(dict.fromkeys(filter(_fits_a_header, left_out))))

    def _warm(self, name: str, warm: str) -> None:
        try:
            load(warm)(self._context)
        except ConfigError as error:
            # The model's error, such as its tokenizer's: the first request that needs it reports it.
            logger.debug("logits processor %s is not made ready: %s", name, error)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.error("logits processor %s failed before the first request", name, exc_info=error)

    def _bound(
        self, starts: Sequence[tuple[LogitsProcessorSpec, LogitsProcessor, Start]], request: Submit, number: int
    ) -> ChoiceProcessors:
        hosts, devices = [], []
        for spec, call, start in starts:
            with _refusals(call):
                processor = start(request.prompt.ids.copy())
            if spec.kind == "device":
                devices.append((spec.name, processor))
            else:
                hosts.append((spec.name, spec.kind, processor))
        banned = request.stop_ids if request.min_new_tokens else ()
        fields = {call.name: call.param for _, call, _ in starts}
        produced = request.produced.get(number, ())
        return ChoiceProcessors(hosts, devices, self._context.vocab_size, self.threads.run, banned, fields, produced)

    def _find(self, call: LogitsProcessor) -> LogitsProcessorSpec:
        if call.name not in self._specs:
            known = ", ".join(sorted(self._specs))
            raise RequestError(
                f"{call.param}: there is no {call.name[:100]!r}; known: {known}."
                f"{did_you_mean(call.name, self._specs)}",
                param=call.param,
                code="invalid_value",
            )
        return self._specs[call.name]


def _fits_a_header(name: str) -> bool:
    return name.isascii() and name.isprintable() and len(name) < 100


@contextmanager
def _refusals(call: LogitsProcessor) -> Iterator[None]:
    """An exception of a plugin's code becomes the client's error."""
    try:
        yield
    except BaseException as error:
        reraise_if_stopping(error)
        raise _refused(call, error) from error


def _refused(call: LogitsProcessor, error: BaseException) -> RequestError:
    """The client's error. ValueError and LlmcoreError refuse the arguments (400). Any other exception is a fault of
    the plugin (500). A processor that is overloaded says so (503)."""
    if not isinstance(error, (ValueError, LlmcoreError)):
        TALLIES.count("plugin_failures", call.name, "logits_processor")
        text = f"{call.param}: {call.name!r} failed: {text_of(error)}"
        return RequestError(text[:500], param=call.param, code="internal_error", status=500)
    asked_by_name = call.param == LogitsProcessor("").param
    text = f"{call.param}: {call.name!r} refuses its arguments: " if asked_by_name else f"{call.param}: "
    said = (text + message_of(error))[:500]
    if isinstance(error, RequestError) and error.code == OVERLOADED:
        return RequestError(said, param=call.param, code=OVERLOADED, status=503)
    return RequestError(said, param=call.param, code="invalid_value")
