"""The measured tables: what they name exists, and decides which kernel a model gets on that GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmcore_triton
import pytest
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext
from llmcore.ops import made
from llmcore.registry.loader import load
from llmcore.registry.resolve import candidates_for, resolve, why_not
from llmcore_devtools import registry_of
from llmcore_triton import tuned
from tune_cases import TUNABLE, contexts

FILES = sorted((Path(llmcore_triton.__file__).parent / "tuned").glob("*.json"))
REGISTRY = registry_of()
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_entries_are_of_kernels_that_exist(file: Path) -> None:
    table = json.loads(file.read_text())
    device = DeviceInfo("cuda", table["gpu"], capability=table["capability"], processors=132)
    found: dict[str, OpContext] = {}
    for entry in table["entries"]:
        plain = "token" if entry["op"].startswith("attn") or entry["op"].endswith("kv_write") else None
        layout = entry.get("layout", plain)
        context = OpContext(
            **{name: entry[name] for name in ("op", "dtype", "bucket", "shape")}, device=device, layout=layout
        )
        spec = {spec.name: spec for spec, _ in candidates_for(REGISTRY, entry["op"])}[entry["kernel"]]
        assert cost(spec, context) == pytest.approx(entry["us"], abs=1.0), "its cost is read from this entry"
        found[json.dumps([entry["op"], entry["bucket"], entry["shape"], layout])] = context
    for context in found.values():
        kernels = candidates_for(REGISTRY, context.op)
        costs = [cost(spec, context) for spec, _ in kernels if why_not(spec, context) is None]
        if fitting := [took for took in costs if took is not None]:
            assert cost(resolve(kernels, context, {}).chosen, context) == min(fitting)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3.1-8b", {}),
        ("llama-3.1-8b", {"ranks": 2}),
        *(("llama-3.1-8b", {"modes": [mode]}) for mode in ("triton_w4a16", "triton_w8a16", "triton_w8a8", "fp8w8a8")),
        ("llama-3.1-8b", {"modes": ["fp8w8a8_b128"]}),
        ("qwen3-30b-a3b", {}),
        *(("qwen3-30b-a3b", {"modes": [mode]}) for mode in ("triton_w4a16", "fp8w8a8")),
        ("deepseek-v2-lite", {}),
    ],
)
def test_a_served_kernel_has_its_measured_configuration(
    model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make` looks for the entry of the kernel that `made` makes. Otherwise the default would be served unnoticed."""
    find, found, checked = tuned.find, list[tuned.Entry | None](), 0
    monkeypatch.setattr(tuned, "find", lambda kernel, context: found.append(find(kernel, context)) or found[-1])
    # tensors are on the CPU
    device = DeviceInfo("cpu", "NVIDIA H200", capability=90, processors=132)
    for context in contexts(REGISTRY, CONFIGS / model, device, TUNABLE, "bf16", **more):
        for spec, _ in candidates_for(REGISTRY, context.op):
            if (entry := find(spec.name, context)) is not None and entry["config"]:
                found.clear()
                made(spec, context)
                assert entry in found, f"{spec.name} of {context}"
                checked += 1
    assert checked >= 5


def test_a_layout_that_quantizes_has_measurements_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"op": "attn.gqa.decode", "kernel": "k", "dtype": "bf16", "bucket": 0, "shape": {"heads": 4}, "us": 1.0}
    entries = [{**base, "config": {"block_n": 32}}, {**base, "layout": "token-int8", "config": {"block_n": 128}}]
    (tmp_path / "gpu.json").write_text(json.dumps({"gpu": "G", "capability": 90, "entries": entries}))
    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    where = OpContext(
        **{name: base[name] for name in ("op", "dtype", "bucket", "shape")},
        device=DeviceInfo("cuda", "G", capability=90),
    )
    chosen = {
        layout: tuned.choose("k", replace(where, layout=layout), {"block_n": 64})["block_n"]
        for layout in ("token", "token-int8", "token-fp8")
    }
    assert chosen == {"token": 32, "token-int8": 128, "token-fp8": 64}


def test_a_table_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    entry = {
        "op": "linear",
        "kernel": "a",
        "dtype": "bf16",
        "bucket": 0,
        "shape": {"inputs": 4},
        "us": 2.0,
        "config": {},
    }
    device = DeviceInfo("cuda", "NVIDIA H200", capability=90)
    tuned.written(tmp_path, [entry, {**entry, "kernel": "b"}], device, {"torch": "2.11.0"})
    path = tuned.written(tmp_path, [{**entry, "us": 1.0}], device, {"torch": "2.13.0"})
    table = json.loads(path.read_text())
    assert path.name == "nvidia-h200.json" and (table["gpu"], table["torch"]) == ("NVIDIA H200", "2.13.0")
    assert [(e["kernel"], e["us"]) for e in table["entries"]] == [("a", 1.0), ("b", 2.0)]


def cost(spec: KernelSpec, context: OpContext) -> float | None:
    return None if spec.cost is None else load(spec.cost)(replace(context, kernel=spec.name))
