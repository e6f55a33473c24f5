"""What the ops comm.* share: the ranks of a mesh group, and a gather of bytes that every one of their kernels uses.

The torch kernels go through gloo and CPU memory, so they are right on every device, and fast on none. With one rank
they call nothing and return what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from llmcore.api.errors import ConfigError
from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, size

T = TypeVar("T")

SHAPES: tuple[Shape, ...] = (
    {"group": "attn_tp", "ranks": 1, "size": 40},
    {"group": "attn_tp", "ranks": 1, "size": 3},
)
"""Kernels are checked in one process, so with one rank."""


class Collectives(Protocol):
    """What the torch kernels call of torch's ProcessGroupGloo, which declares nothing of it."""

    def allgather(self, into: list[list[torch.Tensor]], given: list[torch.Tensor]) -> distributed.Work:
        """Fill `into[0]` with every rank's `given[0]`."""

    def broadcast(self, tensors: list[torch.Tensor], options: distributed.BroadcastOptions) -> distributed.Work:
        """Overwrite `tensors[0]` with that of rank 0."""


@dataclass(eq=False)
class Peers:
    """The ranks of one mesh group, as rank `rank` of `ranks` reaches them. `gloo`: their group for CPU tensors.

    `store`: a key-value store that all ranks share, through which they find each other. `limit`: the most seconds that
    this rank waits for another one in a call.
    """

    rank: int
    ranks: int
    gloo: Collectives
    store: Store
    limit: float
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _told: list[Callable[[float], object]] = field(default_factory=list, repr=False)

    def set_limit(self, seconds: float) -> None:
        """Change `limit`. Kernels that wait on a device hear of it."""
        self.limit = seconds
        for tell in self._told:
            tell(seconds)

    def tell_limit(self, tell: Callable[[float], object]) -> None:
        """Call `tell` with `limit` now and after each change."""
        self._told.append(tell)
        tell(self.limit)

    def once(self, name: str, make: Callable[[Store], T]) -> T:
        """The object `name` of this process that kernels share, such as a communicator or a buffer.

        The first call makes it: `make` gets a part of the store that no other name has. Every rank must make the same
        objects in the same order, because ranks wait for each other while they make one.
        """
        if name not in self._kept:
            self._kept[name] = make(PrefixStore(name, self.store))
        found: T = self._kept[name]
        return found

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors `x` [..., size] of all ranks, in rank order, on the device of `x`. All have one shape and dtype.

        Raises RuntimeError if a rank ended, or does not answer within `limit`.
        """
        sent = _bytes(x)
        found = [torch.empty_like(sent) for _ in range(self.ranks)]
        self.gloo.allgather([found], [sent]).wait(timedelta(seconds=self.limit))
        return [part.view(x.dtype).to(x.device) for part in found]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` [..., size] of rank 0, as `gathered` has it. Raises RuntimeError as that does."""
        sent = _bytes(x).clone()
        self.gloo.broadcast([sent], distributed.BroadcastOptions()).wait(timedelta(seconds=self.limit))
        return sent.view(x.dtype).to(x.device)


def connect(store: Store, rank: int, ranks: int, timeout: float) -> Peers:
    """Join the other ranks through `store`, over this host's loopback interface.

    `timeout`: seconds for joining, and the first `limit`, which can become shorter. Raises RuntimeError if a rank does
    not come.
    """
    options: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timedelta(seconds=timeout)
    options._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
    group: Any = distributed.ProcessGroupGloo(store, rank, ranks, options)
    return Peers(rank, ranks, group, store, timeout)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of `x`, in CPU memory: gloo does not know every dtype."""
    return x.detach().cpu().contiguous().view(torch.uint8)


def over(context: OpContext, make: Callable[[Peers], Op], alone: Op) -> Op:
    """The kernel of a comm op: `make` of the group's peers, or `alone` for one rank.

    For several ranks without peers, it raises ConfigError when it is called.
    """
    if size(context.shape, "ranks") == 1:
        return alone
    return partial(_apart, context) if context.peers is None else make(context.peers)


def _apart(context: OpContext, x: torch.Tensor) -> torch.Tensor:
    raise ConfigError(
        f"{context.op} over {context.shape['ranks']} ranks of {context.shape['group']} needs their connection; "
        "the program that starts the ranks gives it to llmcore.layers.Mesh(peers=...)"
    )


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor]]:
    """Rows as a rank sends them."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        yield (draw(context, tokens, size(context.shape, "size", 40)),)


def moved(shape: Shape, times: float) -> float:
    """The bytes of `times` the rows that one rank gives."""
    return times * size(shape, "tokens") * size(shape, "size") * size(shape, "element", 2)
