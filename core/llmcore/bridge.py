"""The bridge: all that the HTTP side (or any caller) sees of an engine.

Requests and events are msgspec structs; between processes they travel as msgpack. An engine sends one
`StepEvents` per worker and step, as columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec


class Finish(enum.IntEnum):
    """Why a choice ended; RUNNING until it has."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class LogitsProcessor(msgspec.Struct, frozen=True):
    """A logits processor that a request asks for, with its arguments: a JSON object that the processor checks.

    `param`: the client's field, for error messages, which begin with it.
    """

    name: str
    args: dict[str, Any] = {}
    param: str = "logits_processors"


class LengthDecay(msgspec.Struct, frozen=True):
    """The scores s of `ids` become s + |s| * (factor ** n - 1), n tokens beyond the first `start` of the answer."""

    start: int
    factor: float
    ids: tuple[int, ...]


COLDEST = 1e-5
"""Temperatures below this are greedy, as in LightLLM: scores divided by much less would leave f32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. Defaults sample from the model's own distribution; temperature 0
    (below COLDEST) is greedy, and so is `top_p` 0.

    Presence and frequency penalties follow OpenAI's definitions, over generated tokens; `repetition_penalty` is
    Hugging Face's (divide a positive logit, multiply a negative one), over generated tokens and, with
    `repetition_over_prompt`, the prompt's; `penalize_prompt` extends all three to the prompt. `logprobs`: None, or
    how many of the best tokens to report beside the drawn one (0: it alone). `seed` is a 64-bit key; the front
    end draws one where the client gave none. `logits_processors`: all of them apply. `allowed_ids`: the only tokens
    that may be drawn, () for all. `length_decay`: makes an end more likely, the longer the answer is. `typical_p`:
    the share of the mass that locally typical sampling keeps of what the other filters leave, 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_over_prompt: bool = True
    penalize_prompt: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    seed: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    allowed_ids: tuple[int, ...] = ()
    length_decay: LengthDecay | None = None
    typical_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """True if every draw takes the likeliest token."""
        return self.temperature < COLDEST or self.top_p <= 0


class BeamSearch(msgspec.Struct, frozen=True):
    """The answers are searched for, with `width` beams, as transformers' `generate(num_beams=...)` does.

    An answer's score is the sum of its log-probabilities divided by its length to the power of `length_penalty`.
    `early_stopping`: True ends the search with the first `width` answers, False when no better ones are likely, None
    (transformers' "never") when there cannot be any.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False


Hint = str | int | float | bool
"""A value of `Submit.hints`."""

MOST_LOGPROBS_AT_ONCE = 1 << 17
"""Most log-probabilities that one step tells of one request, the best in every place included: those of its prompt, or
those of all its beams. A step that told more would keep all other requests waiting, in the engine and in the worker,
and its message might be too long to be sent."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit", omit_defaults=True):
    """A request, validated by the front end and validated again for size by the engine.

    `id` is unique per worker; `prompt` holds token ids as little-endian int32; `stop_ids` end a choice (the eos ids
    unless the client ignores them) and are masked while fewer than `min_new_tokens` were produced. `n` choices share
    one prefill. `salt` separates prefix caches. `received` is time.monotonic() at the front end; `client`: the number
    of the API key it came with, -1 without one. `score`: the prompt is scored, which models with such a head do and
    others cannot; nothing is produced, and `max_new_tokens` is 1. `prompt_logprobs`: the prompt's own
    log-probabilities come with the first token of choice 0, and those of the `prompt_top` best tokens in the place of
    each; the whole prompt is computed for them. `pool`: nothing is produced, and `max_new_tokens` is 1; what comes is
    the model's hidden state of the prompt, after its last norm: of the "last" token or the "mean" of all. `beams`: the
    `n` best answers of a beam search, best first; each comes as a whole when the search is over, and nothing of
    `sampling` counts but `logprobs`. `priority`: requests with lower numbers run earlier, where the scheduling policy
    heeds it. `hints`: what else a dialect tells the scheduling policy; core does not look at it. `request_id`: what
    logs call the request.
    """

    id: int
    prompt: bytes
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    salt: bytes = b""
    received: float = 0.0
    client: int = -1
    score: bool = False
    prompt_logprobs: bool = False
    prompt_top: int = 0
    pool: str = ""
    beams: BeamSearch | None = None
    priority: int = 0
    hints: dict[str, Hint] = {}
    request_id: str = ""

    @property
    def choices(self) -> int:
        """Places it takes when it runs."""
        return self.n if self.beams is None else max(self.n, self.beams.width)


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client left: every choice of request `id` ends, its slots are free by the end of the running step."""

    id: int


class FinishChoice(msgspec.Struct, frozen=True, tag="finish"):
    """The front end found a stop text: the choice counts as finished with its first `n_tokens` tokens."""

    id: int
    choice: int
    n_tokens: int


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot of the engine. Slots are tokens of the first KV group; live + cached + free == total.

    `failed_steps`: whose requests were tried again one at a time; `failed_requests`: choices that the model or a
    plugin failed on. `graphs`: steps that are captured. `taken`: when it was taken, as time.time(); 0.0: nobody said.
    `cache`: what that group's prefix cache says of itself.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_live: int = 0
    kv_cached: int = 0
    kv_free: int = 0
    kv_total: int = 0
    peak: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    graphs: int = 0
    failed_steps: int = 0
    failed_requests: int = 0
    taken: float = 0.0
    cache: dict[str, int] = {}

    def figures(self) -> dict[str, float]:
        """Everything as numbers by name; those of `cache` begin with `cache_`."""
        plain: dict[str, float] = {name: getattr(self, name) for name in self.__struct_fields__ if name != "cache"}
        return plain | {f"cache_{name}": value for name, value in self.cache.items()}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows of the loaded model and the HTTP side needs. Lengths and sizes are in tokens.

    `eos_ids`: the operator's, else those of the model's config.json and generation_config.json. `generation`: its
    generation_config.json. `fingerprint`: of the resolved kernels. `report`: lines of the start-up summary, as (label,
    text). `scores`: numbers that the model gives of a prompt, where it scores and produces nothing; else 0.
    `embedding_size`: of its hidden states, 0 where it shows none.
    """

    architecture: str
    vocab_size: int
    max_input_len: int
    max_total_len: int
    kv_tokens: int
    max_running: int
    eos_ids: tuple[int, ...] = ()
    generation: dict[str, Any] = {}
    fingerprint: str = ""
    report: tuple[tuple[str, str], ...] = ()
    scores: int = 0
    embedding_size: int = 0

    def end_ids(self, of_tokenizer: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer: `eos_ids`, or else the tokenizer's, as far as the model can produce them."""
        return self.eos_ids or tuple(token for token in of_tokenizer if token < self.vocab_size)


class StepEvents(msgspec.Struct, kw_only=True, tag="events", omit_defaults=True):
    """What one step did for one worker. Row i belongs to (request[i], choice[i]) and has count[i] tokens.

    `tokens` and `logprobs` (natural log; present when any row asked, 0.0 in rows that did not) are flat over all
    rows. `top[i]`: for row i, per token, the best (id, logprob) pairs. `finish[i]` is a Finish. `cached[i]`: prompt
    tokens that came from the prefix cache, sent with a choice's first token. `error[i]`: (code, message) of a row
    that ends with Finish.ERROR. `scores[i]`: the numbers that a row asked for; it has no tokens and ends.
    `prompt_logprobs[i]`: natural logs, of every token of the row's prompt but the first; `prompt_ranks[i]`: for each
    of these, how many tokens were likelier in its place, and one more; `prompt_top[i]`: the best (id, logprob) pairs
    there. `pooled[i]`: a hidden state, little-endian f32; the row has no tokens and ends. `unenforced[i]`: what of the
    request's arguments is not enforced; the row has no tokens, and comes before all others of its request.
    """

    stamp: float
    request: list[int]
    choice: list[int]
    count: list[int]
    tokens: list[int]
    finish: list[int]
    logprobs: list[float] = []
    top: dict[int, list[list[tuple[int, float]]]] = {}
    cached: dict[int, int] = {}
    error: dict[int, tuple[str, str]] = {}
    scores: dict[int, list[float]] = {}
    prompt_logprobs: dict[int, list[float]] = {}
    prompt_ranks: dict[int, list[int]] = {}
    prompt_top: dict[int, list[list[tuple[int, float]]]] = {}
    pooled: dict[int, bytes] = {}
    unenforced: dict[int, list[str]] = {}


class ChoiceEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step did for one choice: a row of `StepEvents`, as a subscriber receives it."""

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
        """Queue `request`; its events go to `sink` until every choice ended. Raises RequestError."""

    def abort(self, request_id: int) -> None:
        """End every choice of a request; no more events follow."""

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice at its first `n_tokens` tokens (a stop text); no more events of it follow."""

    def load(self) -> Load:
        """The engine's newest snapshot."""


_FINISHES = {int(finish): finish for finish in Finish}
_RARE = ("logprobs", "top", "error", "scores", "prompt_logprobs", "prompt_ranks", "prompt_top", "pooled", "unenforced")
"""Columns of which most steps have nothing."""


def explode(events: StepEvents) -> Iterator[tuple[int, ChoiceEvent]]:
    """The rows of a `StepEvents` as (request id, event) pairs, in order.

    A server does this for every token it streams. In most steps rows have tokens and nothing else, and making one
    event after the other keeps no list of them for the garbage collector to look through.
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
