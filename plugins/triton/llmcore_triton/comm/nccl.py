"""The ops comm.* through NCCL, which works between any GPUs of a host. Kernel one_shot is faster where it can be used.

Ranks end with os._exit: NCCL waits for ever when a communicator is destroyed that a CUDA graph still holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from llmcore.api import OpContext, preset
from llmcore.layers import Op, Peers, over
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import Store

from llmcore_triton.launch import place

SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",  # ranks of one host find each other over the loopback interface
    "NCCL_NVLS_ENABLE": "0",  # multicast memory is not for use in every container
}
"""Variables that NCCL reads when the first communicator is made. One that is set already stays as it is."""


class Communicator:
    """NCCL's communicator of the group `peers`. All work goes to the current stream (asyncOp), and can be captured.

    The constructor waits for the other ranks. Each method must be called by every rank, in one order. Raises
    RuntimeError (torch.distributed.DistBackendError) if NCCL fails.
    """

    def __init__(self, peers: Peers, device: torch.device, store: Store) -> None:
        preset(SETTINGS)
        nccl: Any = distributed.ProcessGroupNCCL
        self._ranks = peers.ranks
        self._group = nccl(store, peers.rank, peers.ranks, nccl.Options())
        self.sum(torch.zeros(1, device=device))  # makes the communicator, which cannot be made inside a capture
        torch.cuda.synchronize(device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in x's type. NCCL decides the order of the summands."""
        total, options = x.clone(), distributed.AllreduceOptions()
        options.asyncOp = False
        self._group.allreduce([total], options)
        return total

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [ranks, T, size], in rank order."""
        out, options = x.new_empty(self._ranks, *x.shape), AllgatherOptions()
        options.asyncOp = False
        self._group._allgather_base(out, x.contiguous(), options)
        return out

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, ranks size]."""
        return self.stacked(x).transpose(0, 1).flatten(1)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The x of rank 0."""
        out, options = x.clone(), distributed.BroadcastOptions()
        options.asyncOp = False
        self._group.broadcast([out], options)
        return out


_OPS = {
    "comm.all_reduce": (Communicator.sum, lambda x: x),
    "comm.all_gather": (Communicator.joined, lambda x: x),
    "comm.exchange": (Communicator.stacked, lambda x: x.unsqueeze(0)),
    "comm.broadcast": (Communicator.first, lambda x: x),
}
"""Op -> the method, and the op for one rank."""


def make(context: OpContext) -> Op:
    """The op over the ranks of the context's peers. The first of a group's ops waits for the other ranks."""
    method, alone = _OPS[context.op]

    def joined(peers: Peers) -> Op:
        return partial(method, peers.once("nccl", partial(Communicator, peers, place(context))))

    return over(context, joined, alone)
