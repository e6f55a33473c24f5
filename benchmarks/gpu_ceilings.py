"""The best rates of this GPU: memory copies, one large matmul, and one layer's linears through cuBLAS."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

COPY_BYTES = 2 << 30
SIDE = 8192
HIDDEN, INNER, QKV = 4096, 14336, 6144
"""The sizes of Llama-3.1-8B."""
LINEARS = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
"""(in, out) of one layer: 436 MB in bf16, more than any cache holds."""
ROWS = (16, 256, 2048)


def ceilings() -> dict[str, float]:
    """Returns figures by name, and frees its memory."""
    found = dict(_measured())
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _measured() -> Iterator[tuple[str, float]]:
    yield "copy_tb_s", copy()
    yield "matmul_tflop_s", matmul()
    weights = [torch.randn(size, width, dtype=torch.bfloat16, device="cuda") * 0.02 for width, size in LINEARS]
    for rows in ROWS:
        inputs = [torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device="cuda") for weight in weights]
        yield f"linears_{rows}_us", layer(inputs, weights)


def copy() -> float:
    """Returns TB/s, read and written, within the GPU's memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds(lambda: target.copy_(source)) / 1e6


def matmul() -> float:
    """Returns TFLOP/s of one square bf16 product of random data."""
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * SIDE**3 / microseconds(lambda: left @ right) / 1e6


def layer(inputs: list[torch.Tensor], weights: list[torch.Tensor], rounds: int = 8) -> float:
    """The microseconds of one pass over the linears, in a graph of `rounds`, so that the host does not count."""

    def work() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            work()
    return microseconds(graph.replay) / rounds


def microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Returns the median of `repeats` on the GPU's own clock, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
