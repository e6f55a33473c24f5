"""`LLM`: the engine in your own process, behind the same bridge as a server's."""

from __future__ import annotations

import itertools
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import BeamSearch, Load, SamplingParams, Submit
from llmcore.config import Config, plugin_settings, settings, with_model_resolved
from llmcore.config.setting import canonical, names
from llmcore.decode_struct import convert
from llmcore.engine.answers import Collector, Generated
from llmcore.engine.build import build_engine
from llmcore.engine.embedding import POOLINGS, normalized
from llmcore.engine.local import LocalBridge
from llmcore.engine.model import Progress
from llmcore.errors import ConfigError, RequestError
from llmcore.plugins import build_registry, configure
from llmcore.protocols import Tokenizer
from llmcore.registry import Registry
from llmcore.specs import OptionSpec, OutputParserSpec, TokenizerSpec
from llmcore.text.bad_words import forbid
from llmcore.text.source import open_tokenizer, prepare
from llmcore.text.stops import StopStrings
from llmcore.text.stream import TextRules

Prompt = str | Sequence[int]
Float32 = NDArray[np.float32]
Done = Callable[[int, int], None]
"""(finished, of how many) prompts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What ends an answer, beside its length and stop texts. `prompt_logprobs`: report the prompt's own, too, and
    `prompt_top` of the best tokens in the place of each.

    `bad_words`: texts whose tokens, with and without a space before them, an answer never completes. `num_beams` above
    1: the `n` best answers of a beam search, best first; for the other two see bridge.BeamSearch.
    """

    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: bool = False
    prompt_top: int = 0
    bad_words: str | Sequence[str] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | None = False

    @property
    def beams(self) -> BeamSearch | None:
        """The search that is asked for."""
        if self.num_beams == 1 and (self.length_penalty, self.early_stopping) != (1.0, False):
            raise RequestError("length_penalty and early_stopping are a beam search's; set num_beams")
        return None if self.num_beams == 1 else BeamSearch(self.num_beams, self.length_penalty, self.early_stopping)


class LLM:
    """A model to generate with. Settings are those of `llmcore serve` by name, e.g. ``LLM(dir, data_type="f32")``,
    options of plugins among them.

    Raises ConfigError that says what to do. Use it as a context manager, or `close` it.
    """

    def __init__(
        self,
        model_dir: str | Path,
        plugins: Sequence[str] | None = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        config, registry = configure(plugins, model_dir=str(model_dir), **settings)
        _refuse_server_settings(settings, registry)
        self._start(config, registry, progress)

    @classmethod
    def from_config(cls, config: Config, progress: Progress | None = None) -> Self:
        """The same from a whole Config; `progress` is told how far loading has come."""
        llm = cls.__new__(cls)
        llm._start(config, build_registry(config), progress)
        return llm

    def _start(self, config: Config, registry: Registry, progress: Progress | None) -> None:
        self.config = config = with_model_resolved(config)
        self._registry = registry
        with ExitStack() as stack:
            converted = stack.enter_context(tempfile.TemporaryDirectory(prefix="llmcore-"))
            stack.enter_context(registry.lifetime(config))
            self.tokenizer: Tokenizer = self._open_tokenizer(config.model.path, Path(converted))
            engine = build_engine(config, registry, *([] if progress is None else [progress]))
            self.facts = engine.facts
            self._bridge = LocalBridge(engine)
            self._open = stack.pop_all()
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = 16,
        stop: str | Sequence[str] = (),
        n: int = 1,
        progress: Done | None = None,
        **more: Any,
    ) -> list[Generated]:
        """Answer every prompt, a text or token ids; results are in the prompts' order.

        `sampling`, or its fields by name (`temperature`, `top_p`, `seed`, ...); `max_new_tokens` None: to the end of
        the context; `more` also takes the fields of `Limits`. Raises RequestError for the first prompt that fails.
        """
        limits, params = _sort_out(more, sampling)
        params = self._forbidding(limits, params)
        rules = self._rules(limits, stop)
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        submits = [self._submit(prompt, params, rules, limits, (max_new_tokens, n)) for prompt in ids]
        return self._run(submits, rules, progress)

    def score(self, prompts: Prompt | Sequence[Prompt], *, progress: Done | None = None) -> list[list[float]]:
        """What the model's head says of every prompt, a text or token ids: a number per label, one of a reward model.

        Raises RequestError for a model that has no such head.
        """
        limits, params = _sort_out({}, None)
        rules = self._rules(limits, ())
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        plain = [self._submit(prompt, params, rules, limits, (1, 1)) for prompt in ids]
        submits = [msgspec.structs.replace(submit, score=True) for submit in plain]
        return [list(found.answers[0].scores) for found in self._run(submits, rules, progress)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        progress: Done | None = None,
    ) -> list[Float32]:
        """The model's hidden state of every prompt, a text or token ids: of its last token, or the "mean" of all.

        [hidden size] each, of length 1 unless `normalize` is False. Raises RequestError for a model without any.
        """
        if pooling not in POOLINGS:
            raise RequestError(f"pooling is one of {', '.join(POOLINGS)}, not {pooling!r}", param="pooling")
        limits, params = _sort_out({"temperature": 0.0}, None)
        rules = self._rules(limits, ())
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        plain = [self._submit(prompt, params, rules, limits, (1, 1)) for prompt in ids]
        found = self._run([msgspec.structs.replace(submit, pool=pooling) for submit in plain], rules, progress)
        states = [np.frombuffer(one.answers[0].pooled, "<f4") for one in found]
        return [normalized(state) if normalize else state for state in states]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int | None = None, **options: Any
    ) -> Generated:
        """Answer one conversation through the model's chat template; `options` are those of `generate`."""
        return self.generate([self._chat_ids(messages)], max_new_tokens=max_new_tokens, **options)[0]

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[str]:
        """The answer to one conversation, piece by piece; leaving the iterator ends it in the engine."""
        stop = options.pop("stop", ())
        limits, params = _sort_out(options, None)
        params = self._forbidding(limits, params)
        rules = self._rules(limits, stop)
        submit = self._submit(self._chat_ids(messages), params, rules, limits, (max_new_tokens, 1))
        pieces: SimpleQueue[str | Collector] = SimpleQueue()
        collector = Collector(submit, self.tokenizer, rules, ended=pieces.put, text=pieces.put)
        try:
            collector.start(self._bridge)
            while isinstance(piece := pieces.get(), str):
                yield piece
            collector.raise_error()
        finally:
            self._end([collector])

    def load(self) -> Load:
        """What the engine is doing."""
        return self._bridge.load()

    def close(self) -> None:
        """End the engine; what is still running gets an error."""
        self._bridge.close()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_tokenizer(self, model: Path, converted: Path) -> Tokenizer:
        specs = [spec for spec, _ in self._registry.specs(TokenizerSpec)]
        directory = prepare(specs, self.config.model, model, converted)
        parsers = [spec for spec, _ in self._registry.specs(OutputParserSpec)]
        settings = self.config.model
        return open_tokenizer(specs, directory, settings.tokenizer_mode, settings.chat_template, parsers)

    def _ids_of(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _rules(self, limits: Limits, stop: str | Sequence[str]) -> TextRules:
        stop = [*([stop] if isinstance(stop, str) else stop), *getattr(self.tokenizer, "stop_words", ())]
        eos = () if limits.ignore_eos else self.facts.end_ids(self.tokenizer.eos_ids)
        return TextRules(
            stops=StopStrings(stop) if stop else None,
            stop_ids=frozenset((*eos, *limits.stop_token_ids)),
            keep_stop=limits.keep_stop,
            keep_stop_id=limits.keep_stop,
            skip_special_tokens=limits.skip_special_tokens,
            min_tokens=limits.min_new_tokens,
        )

    def _forbidding(self, limits: Limits, sampling: SamplingParams) -> SamplingParams:
        words = [limits.bad_words] if isinstance(limits.bad_words, str) else limits.bad_words
        return forbid(sampling, words, self.tokenizer, self.facts.vocab_size)

    def _submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        rules: TextRules,
        limits: Limits,
        size: tuple[int | None, int],
    ) -> Submit:
        room = self.facts.max_total_len - len(prompt)
        most, n = size
        if not 1 <= n <= self.facts.max_running:
            raise RequestError(f"n must be between 1 and {self.facts.max_running}, not {n}", param="n")
        return Submit(
            id=next(self._ids),
            prompt=_packed(prompt),
            max_new_tokens=max(room, 1) if most is None else most,
            min_new_tokens=limits.min_new_tokens,
            stop_ids=tuple(sorted(rules.stop_ids)),
            n=n,
            sampling=sampling,
            prompt_logprobs=limits.prompt_logprobs,
            prompt_top=limits.prompt_top,
            beams=limits.beams,
        )

    def _run(self, submits: Sequence[Submit], rules: TextRules, progress: Done | None) -> list[Generated]:
        ended: SimpleQueue[Collector] = SimpleQueue()
        collectors = [Collector(submit, self.tokenizer, rules, ended=ended.put) for submit in submits]
        try:
            for collector in collectors:
                collector.start(self._bridge)
            for count in range(1, len(collectors) + 1):
                ended.get().raise_error()
                if progress is not None:
                    progress(count, len(collectors))
        finally:
            self._end(collectors)
        return [collector.result() for collector in collectors]

    def _end(self, collectors: Sequence[Collector]) -> None:
        """Abort what still runs, and tell the plugins how each ended."""
        for collector in collectors:
            self._bridge.abort(collector.submit.id)
            self._registry.call("on_request_finished", record=collector.record())

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self.tokenizer.chat(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _refuse_server_settings(given: Iterable[str], registry: Registry) -> None:
    """There is no server, so these would do nothing."""
    brought = plugin_settings(spec for spec, _ in registry.specs(OptionSpec))
    server = names(s for s in (*settings(), *brought) if s.serving or s.group in ("requests", "reports"))
    if idle := [name for name in given if canonical(name) in server]:
        raise ConfigError(f"{idle[0]} is a setting of the server and has no effect on LLM; leave it out")


def _packed(prompt: Sequence[int]) -> bytes:
    try:
        return np.array(prompt, "<i4").tobytes()
    except OverflowError as error:
        raise RequestError(f"the prompt holds ids that are none: {error}", param="prompt") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _sort_out(given: Mapping[str, Any], sampling: SamplingParams | None) -> tuple[Limits, SamplingParams]:
    """Split keywords into limits and sampling parameters; a request without a seed gets one of its own."""
    names = set(Limits.__dataclass_fields__)
    params = {name: value for name, value in given.items() if name not in names}
    known: Iterable[str] = SamplingParams.__struct_fields__
    if unknown := sorted(set(params) - set(known)):
        raise TypeError(f"generate() has no option {unknown[0]!r}; it takes {', '.join(sorted({*names, *known}))}")
    if sampling is not None and params:
        raise TypeError(f"give either sampling or {', '.join(sorted(params))}, not both")
    limits = Limits(**{name: value for name, value in given.items() if name in names})
    if sampling is not None:
        return limits, sampling
    try:
        return limits, convert({"seed": secrets.randbits(63), **params}, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), code="invalid_value") from error
