"""Measurements of kernels on GPUs: launch configurations and times, read from `tuned/*.json`. No torch, no triton.

A file is for one GPU: ``{"gpu": "NVIDIA H200", "capability": 90, "entries": [entry, ...]}``. An entry is the best
configuration of one kernel for one op, dtype, shape and token bucket: ``{"op": "linear", "kernel": "small_rows",
"dtype": "bf16", "bucket": 0, "shape": {"inputs": 4096, ...}, "us": 9.8, "config": {"block_n": 64, ...}}``. `config` is
{} for a kernel without choices. An entry for a layout that quantizes has its name under `layout`. `scripts/tune.py`
writes the files, and `benchmarks/comm.py` the entries of sums over ranks. A GPU without a file uses that of another
GPU with the same compute capability.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llmcore.api import DeviceInfo, OpContext

from llmcore_triton.specs.layouts import QUANTIZED, QUANTIZED_LATENT

Entry = Mapping[str, Any]

_QUANTIZED = frozenset({*QUANTIZED, *QUANTIZED_LATENT})

_FOLDER = Path(__file__).with_name("tuned")


def choose(kernel: str, context: OpContext, default: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the launch configuration of `kernel` for `context`: the measured one, over `default`."""
    entry = find(kernel, context)
    return {**default, **(entry["config"] if entry else {})}


def microseconds(context: OpContext) -> float | None:
    """Returns the measured microseconds of `context.kernel`, or None."""
    entry = find(context.kernel, context)
    return float(entry["us"]) if entry else None


def fastest(context: OpContext) -> float | None:
    """Returns the microseconds of the op's fastest measured kernel for `context`, or None."""
    return _least(context.device, _of(context, "", context.shape))


def fastest_of_any_shape(context: OpContext) -> float | None:
    """The least microseconds of any measured shape: a lower bound for a `context` that has not been measured."""
    return _least(context.device, _of(context, "", {})[:-1])


def _least(device: DeviceInfo, key: tuple[object, ...]) -> float | None:
    """Returns the least time of entries that match `key` as far as it goes, for any kernel."""
    times = [
        float(entry["us"])
        for other, entry in _table(device).items()
        if other[0] == key[0] and other[2 : len(key)] == key[2:]
    ]
    return min(times, default=None)


def find(kernel: str, context: OpContext) -> Entry | None:
    """Returns the entry of `kernel` for `context`, or None."""
    table = _table(context.device)
    return table.get(_of(context, kernel, context.shape))


def _of(context: OpContext, kernel: str, shape: Mapping[str, Any]) -> tuple[object, ...]:
    layout = context.layout if context.layout in _QUANTIZED else None
    return _key(context.op, kernel, context.dtype, context.bucket, layout, shape)


def _key(
    op: str, kernel: str, dtype: str, bucket: int, layout: str | None, shape: Mapping[str, Any]
) -> tuple[object, ...]:
    sizes = tuple(sorted((k, v) for k, v in shape.items() if v not in (None, False)))
    return (op, kernel, dtype, bucket, layout, sizes)


@cache
def _table(device: DeviceInfo) -> Mapping[tuple[object, ...], Entry]:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.json"))]
    mine = [file for file in files if file["gpu"] == device.name]
    siblings = [file for file in files if file["capability"] == device.capability]
    return {
        _key(entry["op"], entry["kernel"], entry["dtype"], entry["bucket"], entry.get("layout"), entry["shape"]): entry
        for file in (mine or siblings)[:1]
        for entry in file["entries"]
    }


def written(folder: Path, entries: Sequence[Entry], device: DeviceInfo, versions: Mapping[str, str]) -> Path:
    """Writes the file of this GPU to `folder`, with `entries` over the existing ones.

    `versions`: name -> version of what they were measured with.
    """
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []
    merged = {_place(entry): entry for entry in (*old, *entries)}
    lines = ",\n".join(f"  {json.dumps(merged[key])}" for key in sorted(merged))
    day = datetime.date.today().isoformat()
    head = json.dumps({"gpu": device.name, "capability": device.capability, "date": day, **versions})[:-1]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    return path


def _place(entry: Entry) -> tuple[str, ...]:
    """The fields by which entries of a file differ, in the file's order."""
    shape = json.dumps(entry["shape"], sort_keys=True)
    return entry["op"], entry["dtype"], shape, str(entry["bucket"]), entry["kernel"], entry.get("layout", "")
