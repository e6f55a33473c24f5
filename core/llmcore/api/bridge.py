"""The bridge: everything that the HTTP side (or any other caller) sees of an engine.

Requests and events are msgspec structs; between processes they travel as msgpack. An engine sends one
`StepEvents` per worker and step, as columns.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmcore.api.errors import RequestError, reraise_if_stopping

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Finish(enum.IntEnum):
    """Why a choice ended. RUNNING means that it has not ended."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class LogitsProcessor(msgspec.Struct, frozen=True):
    """A logits processor that a request asks for."""

    name: str
    args: dict[str, Any] = {}
    """A JSON object, which the processor checks."""
    param: str = "logits_processors"
    """The client's field. Error messages begin with its name."""


class LengthDecay(msgspec.Struct, frozen=True):
    """Raises the scores of `ids` as the answer grows.

    n tokens after the first `start` tokens of the answer, a score s becomes s + |s| * (factor ** n - 1).
    """

    start: int
    factor: float
    ids: tuple[int, ...]


COLDEST = 1e-5
"""Temperatures below this are greedy, as in LightLLM. Scores divided by a much smaller number would overflow f32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules by which the sampler draws the next token. The defaults sample from the model's own distribution."""

    temperature: float = 1.0
    """Below COLDEST, sampling is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    """At 0, sampling is greedy."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Hugging Face's: it divides a positive logit and multiplies a negative one. It covers generated tokens."""
    presence_penalty: float = 0.0
    """OpenAI's, over generated tokens."""
    frequency_penalty: float = 0.0
    """OpenAI's, over generated tokens."""
    repetition_over_prompt: bool = True
    """`repetition_penalty` covers the prompt's tokens too."""
    penalize_prompt: bool = False
    """All three penalties cover the prompt's tokens too."""
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """The number of best tokens to report beside the drawn one. 0: the drawn token alone; None: no report."""
    seed: int = 0
    """A 64-bit key. The front end draws one if the client gave none."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """All of them apply."""
    allowed_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; () allows all."""
    length_decay: LengthDecay | None = None
    """Makes an end more likely as the answer grows."""
    typical_p: float = 1.0
    """The share of the mass that locally typical sampling keeps, after the other filters; 1 keeps all."""

    @property
    def greedy(self) -> bool:
        """True if every draw takes the likeliest token."""
        return self.temperature < COLDEST or self.top_p <= 0


class BeamSearch(msgspec.Struct, frozen=True):
    """A search for the best answers with `width` beams, as in transformers' `generate(num_beams=...)`.

    An answer's score is the sum of its log-probabilities divided by its length to the power of `length_penalty`.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False
    """True ends the search at the first `width` answers. False ends it when better answers are unlikely. None, which
    is "never" in transformers, ends it when better answers are impossible."""


Hint = str | int | float | bool
"""A value of `Submit.hints`."""

MOST_LOGPROBS_AT_ONCE = 1 << 17
"""Most log-probabilities that one step reports for one request: for its prompt, or for all its beams. The best tokens
of every place count too. A larger report would delay all other requests, in the engine and in the worker, and its
message might be too long to send."""


class Prompt(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A request's token ids. Raises ValueError for bytes that are not whole ids."""

    packed: bytes
    """Little-endian int32, as they travel between processes."""

    def __post_init__(self) -> None:
        _ = self.ids

    @staticmethod
    def of(ids: Sequence[int] | NDArray[np.int32]) -> Prompt:
        """The prompt of `ids`. Raises OverflowError for an id that int32 cannot hold."""
        return Prompt(np.asarray(ids, "<i4").tobytes())

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """The token ids; read-only."""
        return np.frombuffer(self.packed, "<i4")

    def __len__(self) -> int:
        return self.ids.size

    def content(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """The content ids of `tokens`, which are this prompt and an answer, or a part of it. The prefix cache compares
        them. The content id of a text token is its token id."""
        return tokens.astype(np.int64)


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit", omit_defaults=True):
    """A request. The front end validates it, and the engine validates its size again."""

    id: int
    """Unique per worker."""
    prompt: Prompt
    produced: dict[int, tuple[int, ...]] = {}
    """The choices that continue, by number, with the tokens that another engine has produced already; {}: all choices
    begin. Each continues as if this engine had produced its tokens. They count as new tokens, and no event repeats
    them. Choices that are not named have ended, and have no events."""
    max_new_tokens: int
    """1 where the request asks for a score or a hidden state. `produced` counts."""
    min_new_tokens: int = 0
    """`stop_ids` are masked until a choice has this many tokens. `produced` counts."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a choice: the eos ids unless the client ignores them, and others that the client named."""
    n: int = 1
    """Choices. They share one prefill."""
    sampling: SamplingParams = SamplingParams()
    salt: bytes = b""
    """Requests with different salts share no prefix cache."""
    received: float = 0.0
    """time.monotonic() at the front end."""
    client: int = -1
    """The number of the request's API key, or -1 without one."""
    score: bool = False
    """Score the prompt and produce nothing. Only models with a score head can do it."""
    prompt_logprobs: bool = False
    """Report the prompt's log-probabilities with the first token of choice 0. The engine then computes the whole
    prompt."""
    prompt_top: int = 0
    """The number of best tokens to report at each place of the prompt."""
    pool: str = ""
    """"last" or "mean": report the model's hidden state after its last norm, of the prompt's last token or as the mean
    of all, and produce nothing."""
    beams: BeamSearch | None = None
    """Search for the `n` best answers. Each comes whole, best first, when the search is over. Of `sampling`, only
    `logprobs` counts."""
    priority: int = 0
    """Lower numbers run earlier, if the scheduling policy uses priorities."""
    hints: dict[str, Hint] = {}
    """Further values from the dialect to the scheduling policy. Core does not read them."""
    request_id: str = ""
    """The request's name in logs."""

    @property
    def scope(self) -> bytes:
        """The salt together with the API key: requests of different scopes share no prefix cache."""
        return self.salt + b"/key:%d" % self.client if self.client >= 0 else self.salt

    @property
    def private(self) -> bool:
        """True if it takes nothing from the prefix cache, which keeps KV, but no log-probabilities and no hidden
        states."""
        return self.prompt_logprobs or self.pool == "mean"

    @property
    def choices(self) -> int:
        """Places that the request takes among the running ones."""
        return self.n if self.beams is None else max(self.n, self.beams.width)


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Client disconnect: every choice of request `id` ends, and its slots are free by the end of the running step."""

    id: int


class FinishChoice(msgspec.Struct, frozen=True, tag="finish"):
    """The front end found a stop text: the choice counts as finished with its first `n_tokens` tokens."""

    id: int
    choice: int
    n_tokens: int


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot of the engine. The `kv_` fields count slots of the first KV group: live + cached + free == total."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_live: int = 0
    kv_cached: int = 0
    kv_free: int = 0
    kv_total: int = 0
    kv_granule: int = 0
    """Slots of a granule, the unit in which the group gives slots to requests."""
    peak: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    graphs: int = 0
    """Steps that are captured as graphs."""
    failed_steps: int = 0
    """Failed steps whose requests were tried again one at a time."""
    failed_requests: int = 0
    """Choices on which the model or a plugin failed."""
    taken: float = 0.0
    """When the snapshot was taken, as time.time(); 0.0 if unknown."""
    cache: dict[str, int] = {}
    """The `stats` of that group's prefix cache."""

    def figures(self) -> dict[str, float]:
        """All fields as numbers by name, and `kv_usage`, the share of slots that requests hold.

        The names of `cache` get the prefix `cache_`.
        """
        plain: dict[str, float] = {name: getattr(self, name) for name in self.__struct_fields__ if name != "cache"}
        plain["kv_usage"] = self.kv_live / self.kv_total if self.kv_total else 0.0
        return plain | {f"cache_{name}": value for name, value in self.cache.items()}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model that the HTTP side needs. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    max_input_len: int
    max_total_len: int
    kv_tokens: int
    max_running: int
    eos_ids: tuple[int, ...] = ()
    """The operator's, else those of the model's config.json and generation_config.json."""
    generation: dict[str, Any] = {}
    """The model's generation_config.json."""
    fingerprint: str = ""
    """A digest of the resolved kernels."""
    report: tuple[tuple[str, str], ...] = ()
    """Lines of the start-up summary, as (label, text)."""
    scores: int = 0
    """Numbers in a prompt's score, for a model that scores; 0 for a language model."""
    embedding_size: int = 0
    """Elements of a pooled hidden state, or 0 if the model cannot give one."""
    parameters: int = 0
    """The number of the model's parameters; one in a quantized tensor counts as one."""
    weights: str = ""
    """The method of the quantized weights, such as gptq, or the data type of plain ones, such as bf16."""
    weight_bytes: int = 0
    """The memory that the weights take on one rank."""
    device: str = ""
    """The kind of device that the model runs on, as `--device` names it."""

    def end_ids(self, of_tokenizer: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer: `eos_ids`, or else those ids of the tokenizer that the model can produce."""
        return self.eos_ids or tuple(token for token in of_tokenizer if token < self.vocab_size)


class StepEvents(msgspec.Struct, kw_only=True, tag="events", omit_defaults=True):
    """The results of one step for one worker, as columns.

    Row i belongs to (request[i], choice[i]) and has count[i] tokens. A dict maps a row's index to its value.
    Log-probabilities are natural logarithms.
    """

    stamp: float
    request: list[int]
    choice: list[int]
    count: list[int]
    tokens: list[int]
    """Flat over all rows."""
    finish: list[int]
    """A Finish per row."""
    logprobs: list[float] = []
    """Flat over all rows if any row asked for them; 0.0 in rows that did not ask."""
    top: dict[int, list[list[tuple[int, float]]]] = {}
    """The best (id, logprob) pairs for each token of the row."""
    cached: dict[int, int] = {}
    """Prompt tokens from the prefix cache, sent with a choice's first token."""
    error: dict[int, tuple[str, str]] = {}
    """(code, message) of a row that ends with Finish.ERROR."""
    scores: dict[int, list[float]] = {}
    """The score of a prompt. The row has no tokens and ends."""
    prompt_logprobs: dict[int, list[float]] = {}
    """One per token of the row's prompt, except the first."""
    prompt_ranks: dict[int, list[int]] = {}
    """The rank of each of these tokens in its place; the likeliest token has rank 1."""
    prompt_top: dict[int, list[list[tuple[int, float]]]] = {}
    """The best (id, logprob) pairs in each of these places."""
    pooled: dict[int, bytes] = {}
    """A hidden state, little-endian f32. The row has no tokens and ends."""
    unenforced: dict[int, list[str]] = {}
    """Parts of the request's arguments that are not enforced. The row has no tokens and is the request's first."""


class ChoiceEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one step for one choice: a row of `StepEvents`, as a subscriber receives it."""

    choice: int
    tokens: tuple[int, ...]
    finish: Finish
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached: int = -1
    error: tuple[str, str] | None = None
    scores: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_ranks: tuple[int, ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    pooled: bytes = b""
    unenforced: tuple[str, ...] = ()


Sink = Callable[[ChoiceEvent], None]
"""Receives the events of one request, in order, on the bridge's own thread; it must not block."""


class Bridge(Protocol):
    """Submit, abort, finish, a stream of events, a snapshot of load. Nothing else."""

    def submit(self, request: Submit, sink: Sink) -> None:
        """Queue `request`; its events go to `sink` until every choice has ended. Raises RequestError."""

    def abort(self, request_id: int) -> None:
        """End every choice of a request; no more events follow."""

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice after its first `n_tokens` tokens, at a stop string; no more events of it follow."""

    def load(self) -> Load:
        """The engine's newest snapshot."""


_FINISHES = {int(finish): finish for finish in Finish}
_RARE = ("logprobs", "top", "error", "scores", "prompt_logprobs", "prompt_ranks", "prompt_top", "pooled", "unenforced")
"""Columns that are empty in most steps."""


def explode(events: StepEvents) -> Iterator[tuple[int, ChoiceEvent]]:
    """The rows of a `StepEvents` as (request id, event) pairs, in order.

    A server does this for every token that it streams, so rows with tokens alone take a short path. It yields one
    event at a time, so the garbage collector need not visit a list of them.
    """
    if any(getattr(events, name) for name in _RARE):
        yield from _explode_all(events)
        return
    at, tokens, cached = 0, events.tokens, events.cached
    rows = zip(events.request, events.choice, events.count, events.finish, strict=True)
    for i, (request, choice, count, finish) in enumerate(rows):
        mine = (tokens[at],) if count == 1 else tuple(tokens[at : at + count])
        at += count
        known = cached.get(i, -1) if cached else -1
        yield request, ChoiceEvent(choice=choice, tokens=mine, finish=_FINISHES[finish], cached=known)


def _explode_all(events: StepEvents) -> Iterator[tuple[int, ChoiceEvent]]:
    at = 0
    for i, request in enumerate(events.request):
        end = at + events.count[i]
        yield (
            request,
            ChoiceEvent(
                choice=events.choice[i],
                tokens=tuple(events.tokens[at:end]),
                finish=Finish(events.finish[i]),
                logprobs=tuple(events.logprobs[at:end]),
                top=_pairs(events.top.get(i, ())),
                cached=events.cached.get(i, -1),
                error=events.error.get(i),
                scores=tuple(events.scores.get(i, ())),
                prompt_logprobs=tuple(events.prompt_logprobs.get(i, ())),
                prompt_ranks=tuple(events.prompt_ranks.get(i, ())),
                prompt_top=_pairs(events.prompt_top.get(i, ())),
                pooled=events.pooled.get(i, b""),
                unenforced=tuple(events.unenforced.get(i, ())),
            ),
        )
        at = end


def _pairs(top: Sequence[Sequence[tuple[int, float]]]) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(tuple((token, logprob) for token, logprob in best) for best in top)


# --- plain values -------------------------------------------------------------------------------------------------

_known: set[Any] = set()
_learning = threading.Lock()


def convert(value: Any, kind: type[T]) -> T:
    """`value` as `kind`, by `msgspec.convert`. Raises msgspec.ValidationError.

    msgspec inspects a type at its first use. The process crashes if a second thread converts to that type meanwhile,
    for instance when a server's first requests come all at once. So one thread at a time shows msgspec a new type.
    """
    if kind not in _known:
        with _learning:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(None, kind)
            _known.add(kind)
    return msgspec.convert(value, kind)


# --- open requests ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A request that has not ended: the sink of its events, and the choices that still run."""

    sink: Sink
    choices: set[int]


_RUNNING = Finish.RUNNING
"""Looked up once, because access to an enum's members is slow, and every event needs it."""
_BUG = ("internal_error", "The server failed to handle this request.")


class Subscribers:
    """Sinks of open requests.

    Any thread may call it, except `deliver`, `end` and `end_all`: they call sinks, so they run on the bridge's own
    thread.
    `abort` tells the engine that a request is over, even if the engine still computes it.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._refusal: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: int) -> bool:
        return request in self._open

    @property
    def refusal(self) -> RequestError | None:
        """The error that `open` raises, or None if it raises none."""
        refusal = self._refusal
        return None if refusal is None else RequestError(refusal[1], code=refusal[0], status=503)

    def open(self, request: Submit, sink: Sink) -> None:
        """Send the events of `request` to `sink` from now on. Raises RequestError (503) after `refuse`."""
        with self._lock:
            refusal = self.refusal
            if refusal is not None:
                raise refusal
            self._open[request.id] = _Open(sink, set(range(request.n)))

    def close(self, request: int) -> bool:
        """Send nothing more to the sink of `request`. Returns True if the request was open."""
        with self._lock:
            return self._open.pop(request, None) is not None

    def close_choice(self, request: int, choice: int) -> bool:
        """Send no more events of one choice. Returns True if the choice was open."""
        return self._sink(request, choice, last=True) is not None

    def deliver(self, request: int, event: ChoiceEvent) -> None:
        """Pass an event to its request's sink, if it is open. If the sink raises, only this request ends."""
        sink = self._sink(request, event.choice, last=event.finish is not _RUNNING)
        if sink is not None:
            self._call(request, sink, event)

    def refuse(self, error: tuple[str, str]) -> None:
        """Make `open` raise `error`, a (code, message), from now on. Only the first call counts."""
        with self._lock:
            self._refusal = self._refusal or error

    def end_all(self) -> None:
        """End every open request with the error of `refuse`."""
        with self._lock:
            ending, self._open = self._open, {}
        for request, entry in ending.items():
            self._abort(request)
            self._end(request, entry, self._refusal or _BUG)

    def end(self, request: int, error: tuple[str, str]) -> None:
        """End `request` with `error`, a (code, message), if it is open. The engine is not told."""
        with self._lock:
            entry = self._open.pop(request, None)
        if entry is not None:
            self._end(request, entry, error)

    def _end(self, request: int, entry: _Open, error: tuple[str, str]) -> None:
        for choice in sorted(entry.choices):
            self._call(request, entry.sink, _ended_by(choice, error))

    def _sink(self, request: int, choice: int, *, last: bool) -> Sink | None:
        if not last:  # every token takes this path, without the lock: one lookup in a dict needs none
            entry = self._open.get(request)
            return None if entry is None or choice not in entry.choices else entry.sink
        with self._lock:
            entry = self._open.get(request)
            if entry is None or choice not in entry.choices:
                return None
            entry.choices.discard(choice)
            if not entry.choices:
                del self._open[request]
            return entry.sink

    def _call(self, request: int, sink: Sink, event: ChoiceEvent) -> None:
        try:
            sink(event)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("the sink of a request failed")
            if self.close(request):
                self._abort(request)
            if event.error is None:
                self._call(request, sink, _ended_by(event.choice, _BUG))


def _ended_by(choice: int, error: tuple[str, str]) -> ChoiceEvent:
    """The event that ends a choice with an error, (code, message)."""
    return ChoiceEvent(choice=choice, tokens=(), finish=Finish.ERROR, error=error)
