"""Logits processors from their specs: bound to requests, and the threads on which they think."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from llmcore.bridge import LogitsProcessor, Submit
from llmcore.config import Config, check_model_dir
from llmcore.errors import LlmcoreError, RequestError, did_you_mean
from llmcore.plugins import load
from llmcore.processors import LogitsProcessorSpec, ProcessorContext
from llmcore.protocols import Int32, Tokenizer
from llmcore.registry import Registry
from llmcore.sched.bound import Bound
from llmcore.specs import ModelConfig, TokenizerSpec
from llmcore.text.source import open_tokenizer, prepare

logger = logging.getLogger(__name__)

_THREADS = 4

Start = Callable[[Int32], Any]
"""What a spec's `make` returned."""


class Thinkers:
    """A few threads that call functions, started with the first one. They end with the process, whatever they do."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = threads
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = False

    def run(self, work: Callable[[], None]) -> None:
        """Have `work` called soon."""
        if not self._started:
            self._started = True
            for _ in range(self._threads):
                threading.Thread(target=self._serve, name="processors", daemon=True).start()
        self._work.put(work)

    def _serve(self) -> None:
        while True:
            self._work.get()()


def processors_of(config: Config, registry: Registry, model: ModelConfig) -> Processors:
    """All that plugins contribute, for `model`."""

    @cache
    def tokenizer() -> Tokenizer:
        specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
        directory = prepare(specs, config.model, check_model_dir(config), Path(converted.name))
        return open_tokenizer(specs, directory, config.model.tokenizer_mode)

    converted = tempfile.TemporaryDirectory(prefix="llmcore-")
    context = ProcessorContext(model.vocab_size, model.eos_ids, tokenizer)
    return Processors({spec.name: spec for spec, _ in registry.specs(LogitsProcessorSpec)}, context)


class Processors:
    """What requests may ask for, by name."""

    def __init__(self, specs: Mapping[str, LogitsProcessorSpec], context: ProcessorContext) -> None:
        self._specs = specs
        self._context = context
        self._thinkers = Thinkers()

    def bind(self, request: Submit) -> list[Bound]:
        """The processors of each choice, [] where none is asked for.

        Raises RequestError for a name nobody has, and for arguments that a processor refuses.
        """
        calls = request.sampling.logits_processors
        if not calls:
            return []
        starts = [(self._find(call), self._make(call)) for call in calls]
        prompt = np.frombuffer(request.prompt, "<i4").astype(np.int32)
        return [self._bound(starts, prompt) for _ in range(request.n)]

    def _bound(self, starts: list[tuple[LogitsProcessorSpec, Start]], prompt: Int32) -> Bound:
        hosts, devices = [], []
        for spec, start in starts:
            try:
                processor = start(prompt.copy())
            except Exception as error:
                raise _refused(spec.name, error) from error
            if spec.kind == "device":
                devices.append((spec.name, processor))
            else:
                hosts.append((spec.name, spec.kind, processor))
        return Bound(hosts, devices, self._context.vocab_size, self._thinkers.run)

    def _find(self, call: LogitsProcessor) -> LogitsProcessorSpec:
        if call.name not in self._specs:
            known = ", ".join(sorted(self._specs)) or "none"
            raise RequestError(
                f"logits_processors: there is no {call.name[:100]!r}; known: {known}."
                f"{did_you_mean(call.name, self._specs)}",
                param="logits_processors",
                code="invalid_value",
            )
        return self._specs[call.name]

    def _make(self, call: LogitsProcessor) -> Start:
        try:
            start: Start = load(self._find(call).make)(dict(call.args), self._context)
        except Exception as error:
            raise _refused(call.name, error) from error
        return start


def _refused(name: str, error: Exception) -> RequestError:
    """What the client is told; what is no refusal is a plugin's mistake, and logged."""
    if not isinstance(error, (ValueError, LlmcoreError)):
        logger.error("logits processor %s failed on its arguments", name, exc_info=error)
    text = str(error) if isinstance(error, (ValueError, LlmcoreError)) else f"{type(error).__name__}: {error}"
    return RequestError(
        f"logits_processors: {name!r} refuses its arguments: {text}"[:500],
        param="logits_processors",
        code="invalid_value",
    )
