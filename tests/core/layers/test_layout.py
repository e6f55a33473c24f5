"""The token layout: what is written is read, granules are copied bit for bit, bytes are what is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmcore.api.models import KVGroupSpec
from llmcore.layers.layout import TokenLayout

GROUP = KVGroupSpec(name="all", layers=(0, 3), kv_heads=2, key_size=4, value_size=6)
CPU = torch.device("cpu")


@pytest.mark.parametrize("granule", [1, 4])
def test_token_layout(granule: int) -> None:
    layout = TokenLayout(GROUP, granule, "bf16")
    pools = layout.tensors(5, CPU)
    assert sorted(pools) == [0, 3]
    assert sum(tensor.nbytes for kv in pools.values() for tensor in kv) == 5 * layout.bytes
    k, v = torch.randn(granule, 2, 4).bfloat16(), torch.randn(granule, 2, 6).bfloat16()
    slots = torch.arange(3 * granule, 4 * granule)
    layout.write(pools[3], slots, k, v)
    assert all(torch.equal(*pair) for pair in zip(layout.gather(pools[3], slots), (k, v), strict=True))
    layout.copy(pools[3], torch.tensor([3]), torch.tensor([1]))
    copied = layout.gather(pools[3], torch.arange(granule, 2 * granule))
    assert all(torch.equal(*pair) for pair in zip(copied, (k, v), strict=True))
    layout.scatter(pools[0], slots, *copied)
    assert torch.equal(layout.gather(pools[0], slots)[1], v)


def test_an_unused_pool_takes_no_memory() -> None:
    grown, kept = [], []
    for _ in range(3):  # other tests' threads may still take memory of their own
        before = resident()
        kept.append(pools := TokenLayout(GROUP, 1, "f32").tensors(1_000_000, CPU))
        grown.append(resident() - before)
    # all are kept, so that none can take the place of another
    assert min(grown) < 8 << 20
    assert all(tensor.data_ptr() % 64 == 0 and not tensor[-1].any() for kv in pools.values() for tensor in kv)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
