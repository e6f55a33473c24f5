"""Memory of each GPU that the other GPUs of the host write. The only file that uses torch's symmetric memory.

Multicast is off: not every container may use it, and nothing here needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from llmcore.api import ConfigError, preset
from llmcore.layers import Peers
from torch.distributed.distributed_c10d import Store

from llmcore_triton.specs.comm import SLOT, SLOTS

EMPTY = {2: -(1 << 15), 4: -(1 << 31)}
"""Bytes of an element -> the bits, as an integer, of a place into which nothing has been written since it was last
read. As a float they are -0.0, which is sent as 0.0."""

BITS = {2: torch.int16, 4: torch.int32}

ALIGNED = 16
"""A slot has a multiple of this many elements for each sender, so that both halves begin at a multiple of 16 bytes."""


@dataclass(frozen=True)
class Shared:
    """The slots of all ranks for elements of one size.

    `buffers` [ranks] int64: the address of each rank's slots, as this GPU reaches them. `own`: this rank's slots.
    `state` [3] int32: the calls so far, the programs of the current call that have ended, and the milliseconds that a
    program waits for another rank. `room`: elements that a rank can send to another in one call. Layout of a rank's
    slots: [SLOTS, senders, room].
    """

    rank: int
    ranks: int
    room: int
    own: torch.Tensor
    buffers: torch.Tensor
    state: torch.Tensor


def shared(peers: Peers, device: torch.device, element: int) -> Shared:
    """The slots for elements of `element` bytes (2 or 4). The first call waits for the other ranks.

    Raises ConfigError if the GPUs cannot write each other's memory.
    """
    return peers.once(f"shared-{element}", partial(_made, peers, element, device))


def sized(rank: int, ranks: int, own: torch.Tensor, buffers: torch.Tensor) -> Shared:
    """The slots `own` of `rank`, which are filled with EMPTY here."""
    own.fill_(EMPTY[own.element_size()])
    return Shared(
        rank=rank,
        ranks=ranks,
        room=own.numel() // (SLOTS * (ranks - 1)) // ALIGNED * ALIGNED,
        own=own,
        buffers=buffers,
        state=torch.zeros(3, dtype=torch.int32, device=own.device),
    )


def _made(peers: Peers, element: int, device: torch.device, store: Store) -> Shared:
    preset({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group
    from torch._C._distributed_c10d import _SymmetricMemory as Symmetric

    name, bits = f"llmcore-{element}", BITS[element]
    try:
        # symmetric memory asks the group of this name for its rank, its size and its store
        group = ProcessGroup(store, peers.rank, peers.ranks)
        _register_process_group(name, group)  # type: ignore[arg-type]  # a NewType in some versions
        own = Symmetric.empty_strided_p2p((SLOTS * SLOT // element,), (1,), bits, device)
        handle = Symmetric.rendezvous(own, name)
        addresses = [handle.get_buffer(rank, (1,), bits).data_ptr() for rank in range(peers.ranks)]
    except RuntimeError as error:
        raise ConfigError(
            f"the GPUs of the {peers.ranks} ranks cannot write each other's memory ({error}); use GPUs that "
            "`nvidia-smi topo -p2p w` calls OK, or NCCL, with --kernel comm.all_reduce=nccl --kernel "
            "comm.all_gather=nccl --kernel comm.exchange=nccl --kernel reduce_add_rms_norm=torch"
        ) from error
    made = sized(peers.rank, peers.ranks, own, torch.tensor(addresses, dtype=torch.int64, device=device))
    peers.tell_limit(partial(_limit, made.state))
    torch.cuda.synchronize(device)
    peers.gathered(torch.zeros(1))  # no rank writes before every rank has filled its slots
    _KEPT.append((group, handle))
    return made


def _limit(state: torch.Tensor, seconds: float) -> None:
    """Enter a limit into the `state` of slots. It is not a constant of the kernels, so captured steps have it too."""
    with torch.inference_mode():  # the state may have been made in it
        state[2].fill_(round(seconds * 1e3))


_KEPT: list[object] = []
"""Groups and handles. The other ranks' memory stays mapped as long as its handle lives: until the process ends."""
