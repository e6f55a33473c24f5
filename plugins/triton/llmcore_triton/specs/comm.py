"""The ops over several ranks, of GPUs in one host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext

from llmcore_triton import tuned
from llmcore_triton.specs import GPU
from llmcore_triton.specs.rows import LONGEST

MOST_RANKS = 8
"""GPUs that are connected with each other in one host."""

SLOT = 64 << 20
"""Bytes of one call's rows that a rank can receive from all others together. Larger calls are cut into pieces."""

SLOTS = 2
"""Calls take turns with the slots. No rank begins call n + 2 before all ranks have done with the slot of call n. To
end call n + 1 it needs something from every other rank, which sends that after its own call n. In one_shot these are
the rows of the other rank. In two_shot it is the sum of any row, which has a part from every rank. A call has one row
at least."""

_WIDTHS = 2
"""Elements of 2 and of 4 bytes have slots of their own."""

_BUFFERS = {"slots": _WIDTHS * SLOTS * SLOT}

_PREFERRED = replace(GPU, buckets=frozenset(range(5)))
"""All buckets. It is narrower than GPU, and so decides where nothing is measured."""

_ONE_SHOT = ("comm.all_reduce", "comm.all_gather", "comm.exchange", "reduce_add_rms_norm")
_NCCL = ("comm.all_reduce", "comm.all_gather", "comm.exchange", "comm.broadcast")
_SUMS = ("comm.all_reduce", "reduce_add_rms_norm")


def kernels() -> Iterable[KernelSpec]:
    """NCCL's collectives, and the faster ones over shared memory."""
    for op in _ONE_SHOT:
        yield KernelSpec(
            op=op,
            name="one_shot",
            make="llmcore_triton.comm.one_shot:make",
            when=_PREFERRED,
            refuses=_refuses_slots,
            cost=f"{__name__}:microseconds",
            batch_invariant=True,
            buffers=_BUFFERS,
            summary="each GPU writes its rows into the memory of the others",
        )
    for op in _SUMS:
        yield KernelSpec(
            op=op,
            name="two_shot",
            make="llmcore_triton.comm.two_shot:make",
            when=GPU,
            refuses=_refuses_slots,
            cost=f"{__name__}:microseconds",
            batch_invariant=True,
            buffers=_BUFFERS,
            summary="each GPU sums a share of the rows, and writes the sums into the memory of the others",
        )
    for op in _NCCL:
        yield KernelSpec(
            op=op,
            name="nccl",
            make="llmcore_triton.comm.nccl:make",
            when=GPU,
            priority=40,
            batch_invariant=op not in _SUMS,
            summary="NCCL, between any GPUs of a host",
        )


def microseconds(context: OpContext) -> float | None:
    """Returns what `benchmarks/comm.py` measured for `context.kernel`, or None. The group may have any name."""
    return tuned.microseconds(replace(context, shape={name: context.shape.get(name) for name in ("ranks", "size")}))


def _refuses_slots(context: OpContext) -> str | None:
    """Returns why rows cannot be exchanged through shared memory, or None."""
    ranks, size = context.shape.get("ranks"), context.shape.get("size")
    if not isinstance(ranks, int) or not isinstance(size, int):
        return "needs to know ranks, size"
    if ranks > MOST_RANKS:
        return f"is for up to {MOST_RANKS} ranks, not {ranks}"
    if context.op in _SUMS and size > LONGEST:
        return f"has rows of up to {LONGEST} elements in its registers, not {size}"
    return None
