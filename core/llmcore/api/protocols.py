"""The protocols of the objects that specs make. Torch appears only as a type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Hint
from llmcore.api.counters import ServerFigures
from llmcore.api.specs import DeviceInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


# --- devices ---------------------------------------------------------------------------------------------------


class Event(Protocol):
    """A point in the device's queue."""

    def done(self) -> bool:
        """True if the device has passed this point."""

    def wait(self) -> None:
        """Block the host until the device has passed this point."""


class Graph(Protocol):
    """Captured work that can be enqueued again as a whole, over the same tensors, such as a CUDA graph."""

    def replay(self) -> None:
        """Enqueue the work."""


class Device(Protocol):
    """The engine's view of a device. Only implementations of this protocol name a torch backend."""

    info: DeviceInfo
    torch_device: torch.device
    ahead: int
    """Steps that may be enqueued before the last step's tokens are read; 0 if steps run synchronously."""
    step_tokens: int
    """Tokens of one step, unless the operator sets them."""
    prefill_stall_ms: float
    """Milliseconds by which prompts may lengthen a step while answers wait, unless the operator sets them; 0: any."""
    measured: bool
    """`kv_budget` subtracts the peak memory of a worst-case run that was made since `reset_peak`."""
    graphs: bool
    """Steps can be captured. Only then the device needs `capture`, `forget_graphs` and `graph_memory`."""
    graph_memory: int
    """Bytes that graphs hold."""

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Capture the work that `work` enqueues, with nothing else in flight; returns the graph and `work`'s result.

        Every replay writes the tensors of that result. All graphs of a device share their intermediate memory, so the
        result of one replay is valid until the next.
        """

    def forget_graphs(self) -> None:
        """Return the memory of all graphs, which no caller holds any more. Call it before another capture."""

    def kv_budget(self, fraction: float) -> int:
        """Bytes that KV may take now. `fraction`: the operator's share of an accelerator's memory."""

    def sticky(self, error: BaseException) -> bool:
        """True if the device cannot run anything more after `error`."""

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    def peak_memory(self) -> int:
        """Most bytes that were allocated at once since `reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new measurement of `peak_memory`."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that the device can copy from and to without blocking (itself on a CPU)."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of `tensor` (itself on a CPU), complete when an event marked after this call has passed."""

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
        """(shape, dtype) of every tensor by its Hugging Face name, from headers alone.

        The dtype is spelt as in safetensors: "F32", "BF16", "I8".
        """

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Every tensor by its Hugging Face name, with a function that reads it (on the host, any dtype)."""


class QuantMethod(Protocol):
    """Reads and holds the quantized weights of one checkpoint, or quantizes a plain one if a mode pins it.

    The engine calls `checkpoint` once, then `method_for` once for each linear and `expert_method` for each mixture of
    experts, and then asks the returned checkpoint for sizes and tensors.
    """

    def checkpoint(self, checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
        """The checkpoint with the names, shapes, dtypes and tensors that the model's parameters take.

        A module for which `method_for` returned a LinearMethod has the tensors which that method names, such as
        `X.codes` and `X.scale`. All others have a plain `X.weight`. `device`: where the model's parameters are. A
        method that quantizes plain weights does so there, and its tensors may be there. Raises ConfigError, from
        headers alone, if the checkpoint contradicts its quantization_config. A checkpoint without weights has no
        headers; its `sizes` are {}.
        """

    def method_for(self, modules: Sequence[str]) -> Any:
        """The llmcore.layers.LinearMethod that holds and multiplies the weights of one linear; None if they are plain.

        `modules`: the checkpoint's names of the modules that the linear stacks, in order, such as
        "model.layers.0.self_attn.q_proj". If the checkpoint has headers, these have tensors of every module.
        """

    def expert_method(self, modules: Sequence[str]) -> Any:
        """The llmcore.layers.ExpertMethod that holds the experts of one mixture; None if their weights are plain.

        `modules`: gate and up of every expert, then down of every expert, such as "model.layers.0.mlp.experts.7.w1".
        Their tensors are named as those of `method_for`. Asked as `method_for` is, once for each mixture.
        """


class Tokenizer(Protocol):
    """Text to ids and back, without loss: unknown characters have ids too.

    An id beyond the vocabulary raises RequestError and never crashes.

    A tokenizer may have three more members, which the server finds by name. `pieces(*, skip_special_tokens)` returns
    the bytes of every id, or None if it cannot; with them the detokenizer is faster and token healing works (see
    api.text.FastTokenizer). `stop_words` are texts that end every answer. `template` is the api.text.ChatTemplate that
    `chat` renders; a server replaces it by one that is rendered in a child process, within limits of time and memory.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, with U+FFFD for bytes that are not a whole character."""

    def token(self, token_id: int) -> str:
        """The vocabulary's own string for one id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one id, which may be part of a character."""

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt that the model's chat template renders. Raises RequestError with the template's message.

        `variables` go to the template, which may ignore them. `tools`: functions in OpenAI's format; absent if there
        are none. `add_generation_prompt`: True, the default, ends the prompt with the start of an answer. False ends
        it with the last message, which the answer then continues.
        """


# --- scheduling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The operator's limits, after defaults, in tokens, requests or steps.

    `stall_tokens`: the prompt tokens that make a step about `--prefill_stall_ms` longer; 0: any number.
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
    """Estimates how many tokens a request will produce. Arrays are columns over requests."""

    guaranteed: bool
    """True if the estimate is an upper bound. Then no admitted request is ever preempted."""

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """Expected total output length, from produced + 1 to max_new. `used`: share of slots in use."""

    def observe(self, produced: int) -> None:
        """Learn that a choice finished after `produced` tokens."""


@dataclass(frozen=True)
class RequestInfo:
    """Properties of a request for the scheduling policy.

    `priority`: lower numbers should run earlier; 0 if the client gave none. `client`: the number of the request's API
    key, from 0, or -1 without one. `hints`: values that the dialect adds, by name.
    """

    priority: int = 0
    client: int = -1
    hints: Mapping[str, Hint] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitingRequest:
    """A candidate for admission, as a policy sees it."""

    index: int
    """Its name in a Decision."""
    tokens: int
    """Tokens to compute, without a prefix hit."""
    cached: int
    """The first tokens, which a prefix hit would save."""
    max_new: int
    choices: int
    """Places that it takes among the running requests."""
    waited: int
    """Steps since it was queued."""
    info: RequestInfo = RequestInfo()


class SchedulerView(Protocol):
    """A policy's view: columns over running requests in order of arrival, and the queue."""

    budget: int
    """Tokens that all rows together may compute in this step."""
    prompt_budget: int
    """Tokens of `budget` that prompts may have, so that answers do not wait long for their next token
    (`--prefill_stall_ms`). A policy keeps to it; core does not enforce it."""
    chunk: int
    """Most tokens of one row; core cuts a chunk back to the next granule border."""
    whole: bool
    """Prompts are not chunked: a row computes all remaining tokens, or a chunk if more than `budget` remain."""
    admit: bool
    """Requests may join in this step (`--router_max_wait_tokens`)."""
    running: Int32
    """Indices of the requests that could run, oldest first."""
    remaining: Int32
    """Tokens that each running request still has to compute: 1 during decode, more during prefill."""

    def info(self, index: int) -> RequestInfo:
        """The properties of a running request; `index` is one of the values of `running`."""

    def waiting(self, order: Callable[[RequestInfo], Any] | None = None) -> Iterator[WaitingRequest]:
        """The queue from its head. Each item costs a prefix lookup, so stop early.

        The request with the lowest `order` comes first. Among equal ones, and without `order`, the oldest comes first.
        A request is left out while another request computes its next tokens; it waits for that KV.
        """

    def fits(self, candidate: WaitingRequest) -> bool:
        """True if the future peak has room for `candidate` beside the running requests and earlier ones that fit."""


@dataclass(frozen=True)
class Decision:
    """A policy's choice for one step. Core validates it before anything happens.

    `rows`: indices of running requests. `n_query`: the number of tokens that each of them computes, at least 1.
    `admit`: (index of a waiting request, tokens of its first chunk).
    """

    rows: Int32
    n_query: Int32
    admit: Sequence[tuple[int, int]] = ()


class SchedulerPolicy(Protocol):
    """Decides order and admission. It holds no slot and cannot leak one."""

    def plan(self, view: SchedulerView) -> Decision:
        """Choose the rows of this step."""


# --- KV --------------------------------------------------------------------------------------------------------


class KVManager(Protocol):
    """The prefix cache of one KV group. It names granules; core counts them.

    Content ids are int64: token ids, or interned ids (>= 2**32) of other content. Only whole granules enter.

    Right before a request releases its granules, core calls `insert` with them, or `match` if fewer of them are valid.
    So a policy may take granules in use out of its eviction order and put them back in this call. A request that holds
    a granule of the tree holds all granules above it.
    """

    caching: bool
    """False if the manager never keeps anything. Then no request waits for the KV that another one computes."""

    def match(self, salt: bytes, content: Int64) -> Int32:
        """Granules that hold the longest cached prefix of `content`, whole granules only, in order."""

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """Keep `granules` for `content`. Returns those newly held; the cache held the others already."""

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """Drop the granules from token `start` of `content` on, and all below them. Returns the dropped granules."""

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """Drop up to `n` granules that no request holds, least recently used first. Returns the dropped granules.

        `in_use` returns True for granules that a request holds.
        """

    def stats(self) -> Mapping[str, int]:
        """Figures for `/metrics`: at least `granules` and `nodes`. Core calls it several times a second."""


# --- attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttnLimits:
    """The largest step, for workspaces that are allocated before capture. Lengths are in tokens."""

    rows: int
    tokens: int
    kv_len: int


@dataclass(frozen=True, kw_only=True)
class AttnRows:
    """The rows of one step for one attention kernel, as the host knows them (upper bounds).

    A row of a captured step may be padding: `n_query` and `kv_len` are 0, and its results are not read.
    """

    n_query: Int32
    kv_len: Int32


class MetaWriter(Protocol):
    """Takes the metadata of `plan`, for the step's one packed upload."""

    def put(self, name: str, values: Int32) -> None:
        """Upload `values`; `run` finds the device's copy as `meta[name]`."""


class AttentionKernel(Protocol):
    """One attention implementation, made for one AttnSpec, layout and granule.

    `plan` runs on the host once per kernel, KV group and step, from upper-bound lengths. `run` runs in the CUDA graph.
    It reads true lengths and tables from the device, allocates nothing that persists, and is right for every length
    that its key covers. The KV of this step's tokens is already written when `run` is called.
    """

    def workspace(self, limits: AttnLimits) -> None:
        """Allocate the memory that `run` will need, before capture."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Write this step's metadata. Returns a graph key, or "" if the step cannot be captured.

        For equal numbers of rows and query tokens, the same key means metadata of the same sizes and launches of the
        same grids. Use few keys, because each is captured once per batch size.
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
        """Attend with q [T, heads, key_size] over the rows' KV. Writes and returns out [T, heads, value_size].

        `meta` holds the kernel's own uploads and, for every kernel:

        - `table` [max requests, granules] int32,
        - `request` [R] int32: the row's row in the table,
        - `q_start` [R + 1] int32: borders of the rows in q,
        - `kv_len` [R] int32: tokens of each row, its new ones included.

        `lse` [T, heads] f32, if given, receives the natural log-sum-exp of the scaled scores, so that partial results
        can be merged. Rows without query tokens, and query rows past the last border, are padding. The kernel may
        write anything there, and must not read the table for them.
        """


# --- observation -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One finished request. Counts are in tokens, times in seconds."""

    request_id: str
    dialect: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_new_tokens: int
    finish: str
    """"stop", "length", "abort" or "error"."""
    first_token: float | None
    """Until the first token; None if there was none."""
    duration: float
    cause: str = ""
    """The cause of an abort or an error, a key of `counters.CAUSES`; else ""."""
    key: str = ""
    """The fingerprint of the client's API key, "" without one."""
    model: str = ""
    """The server's name for its model."""


class MetricSink(Protocol):
    """Receives the server's figures. The supervisor calls it, so it is never on the engine's path."""

    def request_finished(self, record: RequestRecord) -> None:
        """Take the record of a request that ended, for any reason."""

    def snapshot(self, values: Mapping[str, float]) -> None:
        """Take the engine's figures (`bridge.Load.figures()`), about once a second."""

    def server(self, figures: ServerFigures) -> None:
        """Take the counters of all processes of the server, about once a second."""

    def page(self) -> tuple[str, bytes] | None:
        """The answer of `/metrics` as (content type, body), or None. The first sink with a page answers."""
