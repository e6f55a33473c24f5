"""kv_slots: the slot in the KV pool of each new token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, size

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}


def slots_of(table: torch.Tensor, owner: torch.Tensor, positions: torch.Tensor, granule: int = 1) -> torch.Tensor:
    """table [N, places], owner [T], positions [T], all int32 -> slots [T] int64.

    Row n of `table` has the granules of request n, in order; each holds `granule` tokens. `owner` is each token's
    request. The slot is granule number x `granule` + the token's place within the granule.
    """
    if granule == 1:
        return table[owner, positions].long()
    place = torch.div(positions, granule, rounding_mode="floor")
    return table[owner, place].long() * granule + positions % granule


def make(context: OpContext) -> Op:
    """`slots_of` for the context's granule."""
    return partial(slots_of, granule=context.granule)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens of several requests, at first and last places. Table entries that must not be read are -1."""
    granule = context.granule
    generator = torch.Generator().manual_seed(0)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        requests, places = 9, 1 + tokens // granule
        owner = torch.arange(tokens) * 5 % requests
        positions = torch.randint(places * granule, (tokens,), generator=generator)
        positions[0], positions[-1] = 0, places * granule - 1
        table = torch.randint(1 << 20, (requests, places), generator=generator)
        unused = torch.ones_like(table, dtype=torch.bool)
        unused[owner, positions // granule] = False
        table[unused] = -1
        yield table.int(), owner.int(), positions.int()


def cost(shape: Shape) -> tuple[float, float]:
    """For each token, owner, position and granule are read and the slot is written."""
    return 20.0 * size(shape, "tokens"), 0.0
