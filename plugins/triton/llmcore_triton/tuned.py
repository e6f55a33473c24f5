"""What was measured on GPUs: launch configurations and times, read from `tuned/*.json`. No torch, no triton.

A file is one GPU's: ``{"gpu": "NVIDIA H200", "capability": 90, "entries": [entry, ...]}``. An entry is the best of one
kernel for one op, dtype, shape and token bucket: ``{"op": "linear", "kernel": "small_rows", "dtype": "bf16",
"bucket": 0, "shape": {"inputs": 4096, ...}, "us": 9.8, "config": {"block_n": 64, ...}}``; `config` is {} for a
kernel without choices. `benchmarks/tune.py` writes them. A GPU without a file of its own takes a sibling's, of the
same compute capability.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmcore.api import DeviceInfo, OpContext

Entry = Mapping[str, Any]

_FOLDER = Path(__file__).with_name("tuned")


def choose(kernel: str, context: OpContext, default: Mapping[str, Any]) -> dict[str, Any]:
    """The launch configuration of `kernel` for `context`: what was measured, over `default`."""
    entry = find(kernel, context)
    return {**default, **(entry["config"] if entry else {})}


def microseconds(kernel: str, context: OpContext) -> float | None:
    """What `kernel` takes for `context`, None where nobody measured it."""
    entry = find(kernel, context)
    return float(entry["us"]) if entry else None


def fastest(context: OpContext) -> float | None:
    """What the fastest of the op's measured kernels takes for `context`."""
    return _least(context.device, _key(context.op, "", context.dtype, context.bucket, context.shape))


def fastest_of_any_shape(context: OpContext) -> float | None:
    """What they take for the shape that takes least: as little as `context` may take where nobody measured it."""
    return _least(context.device, _key(context.op, "", context.dtype, context.bucket, {})[:-1])


def _least(device: DeviceInfo, key: tuple[object, ...]) -> float | None:
    """The least time of entries whose key is `key`, whatever the kernel, as far as `key` goes."""
    times = [
        float(entry["us"])
        for other, entry in _table(device).items()
        if other[0] == key[0] and other[2 : len(key)] == key[2:]
    ]
    return min(times, default=None)


def find(kernel: str, context: OpContext) -> Entry | None:
    """The entry of `kernel` for `context`."""
    table = _table(context.device)
    return table.get(_key(context.op, kernel, context.dtype, context.bucket, context.shape))


def _key(op: str, kernel: str, dtype: str, bucket: int, shape: Mapping[str, Any]) -> tuple[object, ...]:
    return (op, kernel, dtype, bucket, tuple(sorted((k, v) for k, v in shape.items() if v not in (None, False))))


@cache
def _table(device: DeviceInfo) -> Mapping[tuple[object, ...], Entry]:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.json"))]
    mine = [file for file in files if file["gpu"] == device.name]
    siblings = [file for file in files if file["capability"] == device.capability]
    return {
        _key(entry["op"], entry["kernel"], entry["dtype"], entry["bucket"], entry["shape"]): entry
        for file in (mine or siblings)[:1]
        for entry in file["entries"]
    }
