"""Logits processors: they change a request's scores before the sampler draws a token. No torch at import.

A *host* processor works on token ids: `mask` returns the tokens that may come next, `bias` the values to add to some
scores. A *device* processor gets the logits. A host processor delays only its own request, by the time that it needs
after each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from llmcore.api.protocols import Int32, Tokenizer
from llmcore.api.specs import ImportString, Spec

if TYPE_CHECKING:
    import torch

OVERLOADED = "server_overloaded"
"""A processor raises RequestError with this code if the machine is too busy for it now: a 503. Other codes are not
passed on."""


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """A logits processor that a request may ask for by name.

    `make` and `start` run on a thread of their own before the request is queued, and have 10 s together.
    """

    make: ImportString
    """(args, processors.ProcessorContext) -> start, once per request.

    `args`: the JSON object of the request, or {}. `make` refuses wrong arguments with a ValueError; the client sees
    its text. `start`: (prompt ids, int32) -> a processor, once per choice. The choices share the costly work of
    `make`, such as compiling a grammar.
    """
    kind: Literal["mask", "bias", "device"] = "mask"
    """The processor's protocol: MaskProcessor, BiasProcessor or DeviceProcessor."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that `make` accepts."""
    option: str | None = None
    """The flag of a plugin without which the engine does not have the processor."""
    warm: ImportString | None = None
    """(ProcessorContext) -> None. The engine calls it once at build, on a thread of its own, to prepare the work that
    all requests need."""

    def enabled(self, options: Mapping[str, Any]) -> bool:
        """True unless the processor needs an option that is not set. `options`: `config.plugin_options`."""
        return self.option is None or bool(options.get(self.option))


def _unheard(names: Sequence[str]) -> None:
    """Drop the names: no answer could carry them."""


@dataclass(frozen=True)
class ProcessorContext:
    """The facts about the model and the request that a processor may use."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: Callable[[], Tokenizer]
    """The first call opens the tokenizer; later calls are free."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end this request's answers: `eos_ids` unless the client ignores them, and ids that the client named."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The values of plugins' options: `config.plugin_options`."""
    leave_out: Callable[[Sequence[str]], None] = _unheard
    """`make` may call it with the parts of its arguments that the processor does not enforce, such as keywords of a
    schema. The client finds them in the answer's header `x-llmcore-unenforced`."""


class HostProcessor(Protocol):
    """The state of one choice, on the host.

    Calls come from several threads and never overlap. The engine passes each token once, in order. After a preemption
    or a recomputation the choice keeps its processor.

    An exception ends the request. A processor raises errors.RequestError if the request itself is at fault; the client
    sees its text. With the code "server_overloaded" the client gets a 503.

    A processor may have a method `free()`, which returns True if it allows every token from now on. If all processors
    of a choice do, the engine does not call them again.
    """

    def accept(self, token: int) -> None:
        """Take the next token of the answer. It must be quick, because the engine's own thread calls it."""

    def finished(self) -> bool:
        """True if the answer is complete. It then ends with the last accepted token, as at a stop id."""


class MaskProcessor(HostProcessor, Protocol):
    """Allows or forbids the next tokens, as a grammar does."""

    def mask(self) -> Int32 | None:
        """The tokens that may come next, [ceil(vocabulary / 32)] int32; None allows every token.

        Token t is allowed if bit t % 32 of word t // 32 is 1. At least one token must be allowed. If only ids that end
        the answer are allowed, `min_new_tokens` does not forbid them.

        The engine calls it before the first token and after every accepted one, on a thread of its own. The choice
        waits until it returns; other choices go on. The engine reads the result until the next call.
        """


class BiasProcessor(HostProcessor, Protocol):
    """Adds values to the scores of some tokens."""

    def bias(self) -> Mapping[int, float]:
        """Token id -> the value to add to its score before the temperature, finite or minus infinity.

        The engine calls it when it would call `mask`.
        """


class DeviceProcessor(Protocol):
    """Changes a row's logits on the device. It has no state, because a repeated step calls it again."""

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """New scores [V] f32 in place of `logits` [V] f32; minus infinity forbids a token.

        `ids` [L] int32: prompt and answer so far; only the first `length` [] int32 are valid. It must not change
        `logits`, and must not wait for the device: no `.item()`, no branch on a tensor. Scores with NaN or plus
        infinity end the request.
        """


def words_of(vocab_size: int) -> int:
    """Words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)
