"""Logits processors: how a request changes its own scores before a token is drawn. No torch at import.

A *host* processor works on token ids: it says which tokens may come next (`mask`), or what to add to some scores
(`bias`). A *device* processor is handed the logits. One that works on the host costs its request, and nobody else,
the time between reading a token and knowing what may follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from llmcore.protocols import Int32, Tokenizer
from llmcore.specs import ImportString, Spec

if TYPE_CHECKING:
    import torch

OVERLOADED = "server_overloaded"
"""The code of a RequestError by which a processor says that there is no time for it now: a 503. No other is kept."""


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """What a request may ask for by name. `make`: (args, processors.ProcessorContext) -> start.

    `args` is the JSON object of the request, {} where it gave none. `make` is called once per request; what it cannot
    use it refuses with a ValueError, whose text the client is shown. Both are called on a thread of their own before
    the request is queued, and have 10 s. `start`: (prompt ids, int32) -> a processor,
    once per choice, so that what is costly (a compiled grammar) is shared by all of them. `kind` says which protocol:
    "mask" MaskProcessor, "bias" BiasProcessor, "device" DeviceProcessor. `example`: arguments that `make` takes.
    `warm`: (ProcessorContext) -> None, called once on a thread of its own when the engine is built, so that no request
    has to wait for what all of them need.
    """

    make: ImportString
    kind: Literal["mask", "bias", "device"] = "mask"
    example: Mapping[str, Any] = field(default_factory=dict)
    warm: ImportString | None = None


def _unheard(names: Sequence[str]) -> None:
    """Names of a request without an answer that could carry them are dropped."""


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor may know of the model. `tokenizer` opens it at the first call; later ones are free.

    `stop_ids`: the ids that end the answers of the request at hand: `eos_ids`, unless the client ignores them, and
    others that the client named. `options`: those that plugins declare, as `config.plugin_options` has them.
    `leave_out(names)`, within `make`: say what of its arguments the processor does not enforce, such as keywords of a
    schema; the client finds the names in the answer's header `x-llmcore-unenforced`.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: Callable[[], Tokenizer]
    stop_ids: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    leave_out: Callable[[Sequence[str]], None] = _unheard


class HostProcessor(Protocol):
    """The state of one choice, on the host.

    Calls never overlap, but come from several threads. Tokens are told as they are read, each exactly once and in
    order; a choice that is preempted or computed again keeps its processor. One that raises ends its request: with an
    errors.RequestError where the request itself is at fault, and its text is what the client is told. One with
    the code "server_overloaded" says that there is no time for it now, which is a 503. It may have a
    method `free()`, which says that it allows everything from now on: where all do, nobody is asked again.
    """

    def accept(self, token: int) -> None:
        """`token` was drawn and belongs to the answer. Must be quick: the engine's own thread calls it."""

    def finished(self) -> bool:
        """Whether the answer is complete: it ends with the last accepted token, as at a stop id."""


class MaskProcessor(HostProcessor, Protocol):
    """Says which tokens may come next; a grammar is one."""

    def mask(self) -> Int32 | None:
        """The tokens that may come next, [ceil(vocabulary / 32)] int32: t may where bit t % 32 of word t // 32 is 1.

        None: every token may. Called once after every accepted token and once before the first, on a thread of its
        own; until it returns, the choice waits and others go on. One token at least must be allowed. What is returned
        is read until the next call. Where only ids that end the answer are allowed, `min_new_tokens` does not forbid
        them.
        """


class BiasProcessor(HostProcessor, Protocol):
    """Says what to add to the scores of some tokens."""

    def bias(self) -> Mapping[int, float]:
        """Token id -> what is added to its score before the temperature, finite or minus infinity.

        Called when `mask` is.
        """


class DeviceProcessor(Protocol):
    """Changes a row's logits on the device. It has no state: it is called again where a step is repeated."""

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Scores [V] f32 in place of `logits` [V] f32, which it must not change; minus infinity forbids a token.

        `ids` [L] int32: prompt and answer so far, of which the first `length` [] int32 are valid. Nothing may wait
        for the device: no `.item()`, no branch on a tensor. Scores with NaN or plus infinity end the request.
        """


def words_of(vocab_size: int) -> int:
    """Words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)
