"""Logits processors from their specs, bound to requests, and the threads on which they compute."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcore.bridge import LogitsProcessor, Submit
from llmcore.config import Config
from llmcore.counters import TALLIES
from llmcore.engine.threads import Threads, apart
from llmcore.errors import (
    ConfigError,
    LlmcoreError,
    RequestError,
    did_you_mean,
    message_of,
    reraise_if_stopping,
    text_of,
)
from llmcore.models import ModelConfig
from llmcore.plugins import load
from llmcore.processors import OVERLOADED, LogitsProcessorSpec, ProcessorContext
from llmcore.protocols import Int32, Tokenizer
from llmcore.registry import Registry
from llmcore.sched.processors import ChoiceProcessors
from llmcore.specs import TokenizerSpec
from llmcore.text.bad_words import PROCESSOR as BAD_WORDS
from llmcore.text.healing import PROCESSOR as HEALING
from llmcore.text.source import open_tokenizer, prepare

logger = logging.getLogger(__name__)

_THREADS = min(16, max(2, len(os.sched_getaffinity(0)) // 2))
"""A mask takes a millisecond where a grammar counts what it repeats, and a step may have dozens of them."""

Ids = tuple[int, ...]

Start = Callable[[Int32], Any]
"""What a spec's `make` returned."""


def processors_of(config: Config, registry: Registry, model: ModelConfig) -> Processors:
    """All that plugins contribute, for `model`."""

    @cache
    def tokenizer() -> Tokenizer:
        specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
        directory = prepare(specs, config.model, config.model.path, Path(converted.name))
        return open_tokenizer(specs, directory, config.model.tokenizer_mode)

    converted = tempfile.TemporaryDirectory(prefix="llmcore-")
    context = ProcessorContext(model.vocab_size, model.eos_ids, tokenizer, options=config.plugin_options)
    specs = {spec.name: spec for spec, _ in registry.specs(LogitsProcessorSpec)} | {BAD_WORDS.name: BAD_WORDS}
    if config.requests.token_healing_mode:
        specs[HEALING.name] = HEALING
    processors = Processors(specs, context)
    processors.warm()
    return processors


@dataclass(frozen=True)
class Prepared:
    """The processors of a request by choice, and what of their arguments they do not enforce."""

    choices: Sequence[ChoiceProcessors] = ()
    unenforced: tuple[str, ...] = ()


class Processors:
    """What requests may ask for, by name."""

    def __init__(self, specs: Mapping[str, LogitsProcessorSpec], context: ProcessorContext) -> None:
        self._specs = specs
        self._context = context
        self._threads = Threads("processors", _THREADS)

    def warm(self) -> None:
        """Have what plugins need for every request made ready in the background, for as long as it takes."""
        for spec in self._specs.values():
            if spec.warm is not None:
                apart("processors-warm", partial(self._warm, spec.name, spec.warm))

    def check(self, request: Submit) -> None:
        """Raise RequestError for a name nobody has."""
        for call in request.sampling.logits_processors:
            self._find(call)

    def bind(self, request: Submit) -> Prepared:
        """The processors of each choice, none where none is asked for. May be called from any thread.

        Raises RequestError for a name nobody has, and for arguments that a processor refuses.
        """
        calls = request.sampling.logits_processors
        if not calls:
            return Prepared()
        left_out: list[str] = []
        context = replace(self._context, stop_ids=request.stop_ids, leave_out=left_out.extend)
        starts = [(self._find(call), call, self._make(call, context)) for call in calls]
        prompt = np.frombuffer(request.prompt, "<i4").astype(np.int32)
        banned = request.stop_ids if request.min_new_tokens else ()
        choices = [self._bound(starts, prompt, banned) for _ in range(request.n)]
        return Prepared(choices, tuple(dict.fromkeys(filter(_fits_a_header, left_out))))

    def hurry(self) -> None:
        """See that answers which are asked for are on their way; call it in every step."""
        self._threads.hurry()

    def tend(self) -> None:
        """Replace threads that hang; call it now and then."""
        self._threads.tend()

    def _warm(self, name: str, warm: str) -> None:
        try:
            load(warm)(self._context)
        except ConfigError as error:  # the model's, such as its tokenizer's: who needs it is told then, if not before
            logger.debug("logits processor %s is not made ready: %s", name, error)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.error("logits processor %s failed before the first request", name, exc_info=error)

    def _bound(
        self, starts: Sequence[tuple[LogitsProcessorSpec, LogitsProcessor, Start]], prompt: Int32, banned: Ids
    ) -> ChoiceProcessors:
        hosts, devices = [], []
        for spec, call, start in starts:
            try:
                processor = start(prompt.copy())
            except BaseException as error:
                reraise_if_stopping(error)
                raise _refused(call, error) from error
            if spec.kind == "device":
                devices.append((spec.name, processor))
            else:
                hosts.append((spec.name, spec.kind, processor))
        fields = {call.name: call.param for _, call, _ in starts}
        return ChoiceProcessors(hosts, devices, self._context.vocab_size, self._threads.run, banned, fields)

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

    def _make(self, call: LogitsProcessor, context: ProcessorContext) -> Start:
        try:
            start: Start = load(self._find(call).make)(dict(call.args), context)
        except BaseException as error:
            reraise_if_stopping(error)
            raise _refused(call, error) from error
        return start


def _fits_a_header(name: str) -> bool:
    return name.isascii() and name.isprintable() and len(name) < 100


def _refused(call: LogitsProcessor, error: BaseException) -> RequestError:
    """What the client is told: a refusal is theirs to mend, all else a mistake in the plugin. Who says that the
    server has too much to do, which is nobody's mistake, is told on in those words."""
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
