"""`LLM`: the engine in your own process, behind the same bridge as a server's."""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import BeamSearch, ChoiceEvent, Finish, Load, Prompt, SamplingParams, Submit, convert
from llmcore.api.errors import ConfigError, RequestError
from llmcore.api.protocols import RequestRecord, Tokenizer
from llmcore.api.specs import OptionSpec, OutputParserSpec, TokenizerSpec
from llmcore.config import Config, settings, with_model_resolved
from llmcore.config.setting import canonical, names
from llmcore.engine.build import build_engine
from llmcore.engine.in_process import InProcessBridge
from llmcore.engine.model import Progress
from llmcore.registry.loader import build_registry, configure
from llmcore.registry.registry import Registry
from llmcore.text.bad_words import forbid
from llmcore.text.chosen_template import choose_template
from llmcore.text.source import open_tokenizer, prepare
from llmcore.text.stops import StopStrings
from llmcore.text.stream import FINISH_REASONS, Reducer, TextRules, failure


@dataclass
class Answer:
    """One choice. `logprobs`: of its tokens; `top_logprobs`: per token the best (id, logprob) pairs, if asked for.
    `scores`, `pooled` (f32): of the prompt, where they were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    scores: tuple[float, ...] = ()
    pooled: bytes = b""


@dataclass(frozen=True)
class Generated:
    """A prompt's answers; the properties are those of the first. `cached_tokens` of the prompt were not computed.

    `prompt_logprobs`: of every prompt token but the first, if asked for; `prompt_top`: the best (id, logprob) pairs in
    the place of each; `prompt_ranks`: how many tokens were likelier there, and one more.
    """

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Text, without the stop text that ended it."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids, an end-of-text id included."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""
        return self.answers[0].finish_reason

    @property
    def logprobs(self) -> list[float]:
        """Natural log-probabilities, if asked for."""
        return self.answers[0].logprobs


class Collector:
    """Gathers one request's events, on the bridge's thread; calls `ended` once, and `text` with each piece of text."""

    def __init__(
        self,
        submit: Submit,
        llm: LLM,
        rules: TextRules,
        *,
        ended: Callable[[Collector], object],
        text: Callable[[str], object] | None = None,
    ) -> None:
        self._submit = submit
        self._bridge = llm._bridge
        self._reducer = Reducer([submit], llm.tokenizer, rules, self._bridge)
        self._ended = ended
        self._on_text = text
        self._answers = [Answer() for _ in range(submit.n)]
        self._prompt_logprobs: tuple[float, ...] = ()
        self._prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
        self._prompt_ranks: tuple[int, ...] = ()
        self._error: RequestError | None = None
        self._started = time.monotonic()

    def start(self) -> None:
        """Submit the request."""
        self._bridge.submit(self._submit, self.take)

    def abort(self) -> None:
        """End what still runs."""
        self._reducer.abort()

    def take(self, event: ChoiceEvent) -> None:
        """The sink."""
        if self._error is not None:
            return
        if event.finish in (Finish.ERROR, Finish.ABORT):
            self._error = failure(event, self._submit)
            self._ended(self)
            return
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        self._prompt_top = event.prompt_top or self._prompt_top
        self._prompt_ranks = event.prompt_ranks or self._prompt_ranks
        number, texts = self._reducer.feed(0, event)
        choice, answer = self._reducer.choices[number], self._answers[number]
        piece, new = "".join(texts), len(choice.starts)
        answer.text += piece
        if self._on_text is not None and piece:
            self._on_text(piece)
        answer.token_ids.extend(event.tokens[:new])
        if self._submit.sampling.logprobs is not None:
            answer.logprobs.extend(event.logprobs[:new])
            answer.top_logprobs.extend(event.top[:new])
        answer.scores, answer.pooled = event.scores, event.pooled
        if choice.finish is not Finish.RUNNING:
            answer.finish_reason = FINISH_REASONS[choice.finish]
        if not self._reducer.running:
            self._ended(self)

    def raise_error(self) -> None:
        """Raise what ended the request, if it failed."""
        if self._error is not None:
            raise self._error

    def result(self) -> Generated:
        """All answers; every choice must have ended."""
        known = self._prompt_logprobs, self._prompt_top, self._prompt_ranks
        return Generated(
            tuple(self._submit.prompt.ids.tolist()), self._reducer.usage().cached, tuple(self._answers), *known
        )

    def record(self) -> RequestRecord:
        """The figures for `on_request_finished`."""
        return self._reducer.record(
            request_id=str(self._submit.id),
            dialect="python",
            finish="error" if self._error is not None else "",
            started=self._started,
            ended=self._reducer.last or self._started,
        )


TextOrIds = str | Sequence[int]
Float32 = NDArray[np.float32]
Done = Callable[[int, int], None]
"""(finished, of how many) prompts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Options of `LLM.generate` beside the sampling parameters, the length and the stop texts."""

    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: bool = False
    """Report the log-probabilities of the prompt's tokens, too."""
    prompt_top: int = 0
    """The number of best tokens to report in the place of each prompt token."""
    bad_words: str | Sequence[str] = ()
    """Texts that an answer never completes, with and without a space before them."""
    num_beams: int = 1
    """Above 1: a beam search gives the `n` best answers, best first. The next two are described in `BeamSearch`."""
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
            self._bridge = InProcessBridge(engine)
            self._open = stack.pop_all()
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
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

    def score(self, prompts: TextOrIds | Sequence[TextOrIds], *, progress: Done | None = None) -> list[list[float]]:
        """Score every prompt, a text or token ids: one number per label of the model's head,
        a single one if it is a reward model.

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
        prompts: TextOrIds | Sequence[TextOrIds],
        *,
        pooling: str = "last",
        normalize: bool = True,
        progress: Done | None = None,
    ) -> list[Float32]:
        """The model's hidden state of every prompt, a text or token ids: of its last token, or the "mean" of all.

        [hidden size] each, of length 1 unless `normalize` is False. Raises RequestError for a model without any.
        """
        limits, params = _sort_out({"temperature": 0.0}, None)
        rules = self._rules(limits, ())
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        plain = [self._submit(prompt, params, rules, limits, (1, 1)) for prompt in ids]
        found = self._run([msgspec.structs.replace(submit, pool=pooling) for submit in plain], rules, progress)
        states = [np.frombuffer(one.answers[0].pooled, "<f4") for one in found]
        return [_normalized(state) if normalize else state for state in states]

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
        collector = Collector(submit, self, rules, ended=pieces.put, text=pieces.put)
        try:
            collector.start()
            while isinstance(piece := pieces.get(), str):
                yield piece
            collector.raise_error()
        finally:
            self._end([collector])

    def load(self) -> Load:
        """A snapshot of the engine's load."""
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
        if settings.chat_template is not None:
            choose_template(settings.chat_template, parsers).with_tokens({}).check()
        return open_tokenizer(specs, directory, settings.tokenizer_mode, settings.chat_template, parsers)

    def _ids_of(self, prompt: TextOrIds) -> list[int]:
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
        return forbid(sampling, words, self.tokenizer, self.facts.vocab_size) if words else sampling

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
        # The engine checks n too. Here it bounds what is kept for each choice.
        if not 1 <= n <= self.facts.max_running:
            raise RequestError(f"n must be between 1 and {self.facts.max_running}, not {n}", param="n")
        return Submit(
            id=next(self._ids),
            prompt=_prompt(prompt),
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
        collectors = [Collector(submit, self, rules, ended=ended.put) for submit in submits]
        try:
            for collector in collectors:
                collector.start()
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
            collector.abort()
            self._registry.call("on_request_finished", record=collector.record())

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self.tokenizer.chat(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _refuse_server_settings(given: Iterable[str], registry: Registry) -> None:
    """Raise ConfigError for a setting of the server: it would have no effect here."""
    known = settings(spec for spec, _ in registry.specs(OptionSpec))
    server = names(setting for setting in known if setting.serving)
    if idle := [name for name in given if canonical(name) in server]:
        raise ConfigError(f"{idle[0]} is a setting of the server and has no effect on LLM; leave it out")


def _prompt(ids: Sequence[int]) -> Prompt:
    try:
        return Prompt.of(ids)
    except OverflowError as error:
        raise RequestError(f"the prompt holds ids that are none: {error}", param="prompt") from error


def _as_list(prompts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
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


def _normalized(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """`state` with length 1; one of zeros stays as it is."""
    length = float(np.linalg.norm(state))
    return state / np.float32(length) if length else state
