"""The shapes of what specs make: what a plugin's object must do. Torch appears only as a type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import Hint
from llmcore.counters import ServerFigures
from llmcore.specs import DeviceInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


# --- devices ---------------------------------------------------------------------------------------------------


class Event(Protocol):
    """A point in the device's queue."""

    def done(self) -> bool:
        """Whether the device has passed it."""

    def wait(self) -> None:
        """Block the host until it has."""


class Graph(Protocol):
    """Work that was captured and can be enqueued again as a whole, over the same tensors."""

    def replay(self) -> None:
        """Enqueue it."""


class Device(Protocol):
    """What the engine needs of a device; the only code that names a torch backend implements it.

    `ahead`: steps to enqueue before the last one's tokens are read (0 where steps run synchronously).
    `step_tokens`: tokens of one step, and `prefill_stall_ms`: milliseconds of prompts in a step while answers wait (0:
    any), both unless the operator says otherwise. `measured`: `kv_budget` is what a worst-case
    run, made since `reset_peak`, leaves. `graphs`: whether steps can be captured; only then it needs
    `capture`, `forget_graphs` and `graph_memory`, the bytes that graphs hold.
    """

    info: DeviceInfo
    torch_device: torch.device
    ahead: int
    step_tokens: int
    prefill_stall_ms: float
    measured: bool
    graphs: bool
    graph_memory: int

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Capture what `work` enqueues, with nothing else in flight, and give what it returned.

        The tensors in it are written by every replay. All graphs of a device share their intermediate memory, so what
        one replay returns is valid until the next.
        """

    def forget_graphs(self) -> None:
        """Every graph is gone; give their memory back. Has to be called before another is captured."""

    def kv_budget(self, fraction: float) -> int:
        """Bytes that KV may take now; `fraction` is the operator's share of an accelerator's memory."""

    def sticky(self, error: BaseException) -> bool:
        """Whether nothing works on this device any more after `error`."""

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    def peak_memory(self) -> int:
        """Most bytes allocated since `reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new measurement of `peak_memory`."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor the device can copy from and to without blocking (itself on a CPU)."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of `tensor`, complete when an event marked after this call has passed (itself on a CPU)."""

    def event(self) -> Event:
        """Mark this point of the queue."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""


# --- checkpoints and tokenizers --------------------------------------------------------------------------------


class Checkpoint(Protocol):
    """Weights on disk with their config, read one tensor at a time."""

    def config(self) -> dict[str, Any]:
        """The model's config in Hugging Face's terms (config.json)."""

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or {}."""

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of every tensor by its Hugging Face name, from headers alone; dtype as in safetensors
        ("F32", "BF16", "I8")."""

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Every tensor by its Hugging Face name, with a function that reads it (on the host, any dtype)."""


class QuantMethod(Protocol):
    """How the quantized weights of one checkpoint are read and held; made for it, or pinned for a plain one."""

    @property
    def linear_method(self) -> Any:
        """The llmcore.layers.LinearMethod that holds and multiplies the linears' weights; None: they are plain."""

    def checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as the model's parameters take it: names, shapes, dtypes and tensors.

        Raises ConfigError, from headers alone, where it is not what its quantization_config says.
        """


class Tokenizer(Protocol):
    """Text to ids and back, without loss: unknown characters have ids too. Ids beyond the vocabulary raise
    RequestError, never crash.

    It may also have what the server gains by, each known by its name: `pieces(*, skip_special_tokens)` -> the bytes of
    every id, by which text is put together faster and prompts are healed (see api.text.FastTokenizer; None: not so
    here); `stop_words`, texts that end every answer.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, with U+FFFD for bytes that are not whole characters."""

    def token(self, token_id: int) -> str:
        """The vocabulary's own string for one id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes one id stands for (parts of a character included)."""

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt that the model's chat template renders; raises RequestError with the template's message.

        `variables` are the template's. `tools`: functions as OpenAI describes them, absent where there are none.
        `add_generation_prompt`: True, which is the default, ends the prompt with what begins an answer; with False it
        ends with the last message, which the answer goes on with. A template may ignore any of them.
        """


# --- scheduling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the operator allowed, after defaults; all counts are tokens, requests or steps.

    `stall_tokens`: the prompt tokens that the device computes in `--prefill_stall_ms`; 0: any number.
    """

    max_running: int
    max_input_len: int
    max_total_len: int
    batch_tokens: int
    chunk_tokens: int
    stall_tokens: int = 0
    wait_steps: int = 0
    token_ratio: float | None = None
    capped_new_tokens: int = 1024
    chunked: bool = True


class LengthEstimator(Protocol):
    """How many tokens a request will produce in all. Arrays are columns over requests."""

    guaranteed: bool
    """True where the estimate is an upper bound, so that nothing admitted is ever preempted."""

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """Expected output length in all, between produced + 1 and max_new; `used`: share of slots in use."""

    def observe(self, produced: int) -> None:
        """A choice finished after `produced` tokens."""


@dataclass(frozen=True)
class RequestInfo:
    """A request's wishes for the scheduler. `priority`: lower numbers are to run earlier, 0 unless the client says
    otherwise. `client`: the number of the API key that it came with, counted from 0; -1 without one. `hints`: values
    that its dialect adds, by name.
    """

    priority: int = 0
    client: int = -1
    hints: Mapping[str, Hint] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitingRequest:
    """A candidate for admission as a policy sees it.

    `index` names it in a Decision. Of its `tokens`, a prefix hit would save the first `cached`; `choices` places
    among the running are taken at once. `waited`: steps since it was queued. `info`: its wishes.
    """

    index: int
    tokens: int
    cached: int
    max_new: int
    choices: int
    waited: int
    info: RequestInfo = RequestInfo()


class SchedulerView(Protocol):
    """What a policy may look at: columns over running requests in order of arrival, and the queue."""

    budget: int
    """Tokens that all rows together may compute in this step."""
    prompt_budget: int
    """Tokens of `budget` that prompts may have, so that answers do not wait long for their next token
    (`--prefill_stall_ms`). A policy keeps to it; core does not enforce it."""
    chunk: int
    """Most tokens of one row; core cuts a chunk back to the next granule border."""
    whole: bool
    """Prompts are not chunked: a row computes all that remains, or (where more than `budget` remains) a chunk."""
    admit: bool
    """Whether requests may join in this step (`--router_max_wait_tokens`)."""
    running: Int32
    """Indices of the requests that could run, oldest first."""
    remaining: Int32
    """Tokens of each running request still to compute: 1 for one that decodes, more while it is prefilled."""

    def info(self, index: int) -> RequestInfo:
        """The wishes of a running request; `index` is one of the values of `running`."""

    def waiting(self, order: Callable[[RequestInfo], Any] | None = None) -> Iterator[WaitingRequest]:
        """The queue from its head; prefix hits are looked up as it is read, so stop early.

        Without `order` the oldest request comes first. With `order` the lowest key comes first, and among equal keys
        the oldest request.
        Left out are requests whose next tokens another is just computing: they wait for its KV.
        """

    def fits(self, candidate: WaitingRequest) -> bool:
        """Whether the future peak allows `candidate` beside the running and those found to fit before it."""


@dataclass(frozen=True)
class Decision:
    """What a policy wants done in this step; core validates it before anything happens.

    `rows`, `n_query`: columns of running request indices and how many tokens each computes (at least 1). `admit`:
    waiting indices with their first chunk's tokens.
    """

    rows: Int32
    n_query: Int32
    admit: Sequence[tuple[int, int]] = ()


class SchedulerPolicy(Protocol):
    """Order and admission. It holds no slot and cannot leak one."""

    def plan(self, view: SchedulerView) -> Decision:
        """What to run in this step."""


# --- KV --------------------------------------------------------------------------------------------------------


class KVManager(Protocol):
    """The prefix cache of one KV group: it names granules, core counts them.

    Content ids are int64: token ids, or interned ids (>= 2**32) of other content. Only whole granules enter. Core
    calls `insert` (or, where less of it is valid, `match`) with what a request holds right before the request lets
    go of it, so a policy may take what is in use out of its order and put it back then. A request that holds a
    granule of the tree holds everything above it.
    """

    caching: bool
    """False where nothing is ever kept, so nobody need wait for what another request computes."""

    def match(self, salt: bytes, content: Int64) -> Int32:
        """Granules that hold the longest cached prefix of `content`, whole granules only, in order."""

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """Keep `granules` for `content`; returns those newly held (the rest was there already)."""

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """Drop what is held from token `start` of `content` on, and all below it; returns the granules dropped."""

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """Drop up to `n` granules that `in_use` says no request holds, least recently used first; returns them."""

    def stats(self) -> Mapping[str, int]:
        """Figures for `/metrics`: at least `granules` and `nodes`. Asked several times a second, steps or not."""


# --- attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttnLimits:
    """The most a step can hold, for workspaces taken before capture. Lengths in tokens."""

    rows: int
    tokens: int
    kv_len: int


@dataclass(frozen=True, kw_only=True)
class AttnRows:
    """The rows of one step that one attention kernel gets, as the host knows them (upper bounds).

    A row of a captured step may be padding: `n_query` and `kv_len` are 0, and nobody reads what it computes.
    """

    n_query: Int32
    kv_len: Int32


class MetaWriter(Protocol):
    """Where `plan` writes its metadata: a slice of the step's one packed upload."""

    def put(self, name: str, values: Int32) -> None:
        """Upload `values`; `run` finds the device's copy as `meta[name]`."""


class AttentionKernel(Protocol):
    """One attention implementation, made for one AttnSpec, layout and granule.

    `plan` runs on the host once per kernel, KV group and step, from upper-bound lengths; `run` runs in the graph,
    reads true lengths and tables from the device, allocates nothing that persists, and is right for every length
    its key covers. KV of this step's tokens has already been written when `run` is called.
    """

    def workspace(self, limits: AttnLimits) -> None:
        """Take what `run` will need, before capture."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Write this step's metadata; returns a graph key, "" where the step cannot be captured.

        With as many rows and query tokens, the same key means metadata of the same sizes and launches of the same
        grids. Keys should be few: each is captured once per size of batch.
        """

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: q [T, heads, key_size] over the rows' KV; writes and returns out [T, heads, value_size].

        `meta` holds the kernel's own uploads and what every kernel gets: `table` [max requests, granules] int32,
        `request` [R] int32 (row of the table), `q_start` [R + 1] int32 (borders of the rows in q), `kv_len` [R]
        int32 (tokens of each row including its new ones). `lse` [T, heads] f32, if given, receives the natural
        log-sum-exp of the scaled scores, so that partial results can be merged. Rows without query tokens, and query
        rows past the last border, are padding: they may be written with anything and must not be read through.
        """


# --- observation -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One finished request: counts in tokens, times in seconds (None where it did not get that far).

    `finish`: "stop", "length", "abort" or "error". `cause`: why it is one of the last two, a key of `counters.CAUSES`,
    else "".
    `key`: the fingerprint of the client's API key, "" without one. `model`: the name that the server gives its model.
    """

    request_id: str
    dialect: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_new_tokens: int
    finish: str
    first_token: float | None
    duration: float
    cause: str = ""
    key: str = ""
    model: str = ""


class MetricSink(Protocol):
    """Where figures go. Called in the supervisor, never on the engine's path."""

    def request_finished(self, record: RequestRecord) -> None:
        """One request ended, for whatever reason."""

    def snapshot(self, values: Mapping[str, float]) -> None:
        """The engine's figures (`bridge.Load.figures()`), about once a second."""

    def server(self, figures: ServerFigures) -> None:
        """What all processes of the server have counted, about once a second."""

    def page(self) -> tuple[str, bytes] | None:
        """What `/metrics` answers, as (content type, body), or None; the first sink that has one is asked."""
