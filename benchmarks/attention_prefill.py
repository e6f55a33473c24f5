"""Prefill attention on one GPU: TFLOP/s of every launch configuration at a few shapes, and its largest error.

    python benchmarks/attention_prefill.py

Only the products that the causal mask leaves count. The error is against torch's scaled_dot_product_attention in f32
over the last queries of every row. As in the engine, inputs are slices of one projection, and slots are scattered.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnRows
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops.attention_cases import Uploads
from llmcore_triton.attention import prefill
from triton.runtime.errors import OutOfResources

SPEC = AttnSpec(heads=32, kv_heads=8, key_size=128, value_size=128, scale=128**-0.5)
MIXED = tuple(int(n) for n in np.random.default_rng(0).integers(32, 1025, 64))
SHAPES = {
    "2 x 4096": ((4096,) * 2, 0),
    "1 x 512": ((512,), 0),
    "4 x 2048 over 6144": ((2048,) * 4, 6144),
    "64 x 32..1024": (MIXED, 0),
}
CHECKED = 128
"""Queries at the end of a row that are compared."""


class Call:
    """One step's tensors, its number of operations, and its exact results."""

    def __init__(self, spec: AttnSpec, dtype: torch.dtype, n_query: tuple[int, ...], cached: int) -> None:
        self.spec, n = spec, np.array(n_query, np.int32)
        self.rows, self.ends = AttnRows(n_query=n, kv_len=n + cached), np.cumsum(n)
        total, width = int(self.rows.kv_len.sum()), int(self.rows.kv_len.max())
        joined = torch.randn(int(n.sum()), spec.heads + 2 * spec.kv_heads, spec.key_size, device="cuda").to(dtype)
        self.q, self.k, self.v = joined.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        self.kv = tuple(torch.randn(total, spec.kv_heads, spec.key_size, device="cuda").to(dtype) for _ in range(2))
        slots, table = torch.randperm(total).int(), torch.zeros(len(n), width, dtype=torch.int32)
        for row, (part, end) in enumerate(zip(slots.split(self.rows.kv_len.tolist()), self.ends, strict=True)):
            table[row, : len(part)] = part
            own = slice(int(end - n[row]), int(end))
            self.kv[0][part[cached:].long()], self.kv[1][part[cached:].long()] = self.k[own], self.v[own]
        small = {"request": range(len(n)), "q_start": [0, *self.ends.tolist()], "kv_len": self.rows.kv_len.tolist()}
        self.meta = {"table": table.cuda(), **{k: torch.tensor(v).int().cuda() for k, v in small.items()}}
        pairs = float((n.astype(np.float64) * cached + n.astype(np.float64) * (n + 1.0) / 2).sum())
        self.flops = 4 * pairs * spec.heads * spec.key_size

    def error(self, out: torch.Tensor) -> float:
        worst = 0.0
        for row, (n, length, end) in enumerate(zip(self.rows.n_query, self.rows.kv_len, self.ends, strict=True)):
            count, slots = min(int(n), CHECKED), self.meta["table"][row, :length].long()
            mask = torch.ones(count, int(length), dtype=torch.bool, device="cuda").tril(int(length) - count)
            q, k, v = (x.float().transpose(0, 1) for x in (self.q[end - count : end], *(kv[slots] for kv in self.kv)))
            expected = F.scaled_dot_product_attention(q, k, v, mask, scale=self.spec.scale, enable_gqa=True)
            worst = max(worst, float((out[end - count : end].float() - expected.transpose(0, 1)).abs().max()))
        return worst


def measure(call: Call, kernel: prefill.Prefill) -> str:
    """Returns TFLOP/s of the fastest run, and the error."""
    meta, out = dict(call.meta), torch.full_like(call.q, torch.nan, memory_format=torch.contiguous_format)
    kernel.plan(call.rows, Uploads(meta))
    kernel.run(call.q, call.k, call.v, call.kv, meta, out)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    torch.cuda._sleep(20_000_000)  # puts the host ahead, so that no gaps are measured
    for mark in marks:
        kernel.run(call.q, call.k, call.v, call.kv, meta, out)
        mark.record()
    torch.cuda.synchronize()
    best = min(first.elapsed_time(last) for first, last in pairwise(marks))
    return f"{call.flops / best / 1e9:.0f} ({call.error(out):.0e})"


def main() -> None:
    about = torch.cuda.get_device_properties(0)
    gpu = DeviceInfo("cuda", about.name, about.major * 10 + about.minor, processors=about.multi_processor_count)
    op = OpContext(op="attn.gqa.prefill", device=gpu, dtype="bf16", layout="token", bucket=4, shape=asdict(SPEC))
    calls = [Call(SPEC, torch.bfloat16, *shape) for shape in SHAPES.values()]
    print(f"{'TFLOP/s (error)':72}", *(f"{name:>20}" for name in SHAPES), flush=True)
    for config in prefill.candidates(op):
        results = []
        for call in calls:
            try:
                results.append(measure(call, prefill.make_with(op, config)))
            except OutOfResources:
                results.append("does not fit")
        print(f"{' '.join(f'{k}={int(v)}' for k, v in config.items()):72}", *(f"{r:>20}" for r in results), flush=True)


if __name__ == "__main__":
    main()
