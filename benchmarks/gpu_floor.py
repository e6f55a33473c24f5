"""The bytes that a decode step must move and the flops that it must compute, beside its time; the experts that it
reads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcore.api.specs import DeviceInfo
from llmcore.config import Config
from llmcore.engine.dry_model import dry_model
from llmcore.layers.build import Build
from llmcore.registry.loader import build_registry, discover
from llmcore.registry.modes import Pins
from llmcore.weights.source import open_checkpoint, read_model
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.decode_floor import decode_floor, seconds

COUNTER = Path(__file__).with_name("count_experts.py")
PROMPT, STEPS = 512, 129
"""Lengths of the decode rows. A row holds PROMPT tokens and, on average, half of the answer's."""


def experts(config: Config, batches: Sequence[int]) -> dict[int, float]:
    """Returns batch -> the mean number of experts that a mixture layer reads in a decode step, or {} without mixtures.

    It runs an engine of its own, without graphs and with little KV.
    """
    names = (*(info.name for info in config.discovered), str(COUNTER))
    config = replace(
        config,
        plugins=replace(config.plugins, plugins=names),
        discovered=discover(names),
        kernels=replace(config.kernels, disable_cudagraph=True),
        memory=replace(config.memory, max_total_token_num=max(batches) * (PROMPT + 32) + 16384),
    )
    found = {}
    with BenchEngine(config) as engine:
        import sys

        seen: Mapping[int, list[int]] = sys.modules[f"llmcore_file_{COUNTER.stem}"].SEEN
        for batch in batches:
            seen.pop(batch, None)
            engine.run([(PROMPT, 17)] * batch)
            if counts := seen.get(batch):
                found[batch] = statistics.mean(counts)
    return found


def lines(config: Config, device: DeviceInfo, limits: Mapping[str, float], steps: Mapping[int, float]) -> list[Any]:
    """Returns a dict per batch of `steps` (batch -> seconds of a decode step): bytes, flops, and the share of the time
    that they would take at the run's own ceilings."""
    build = model_build(config, device)
    touched = experts(config, sorted(steps)) if any(op == "moe.fused" for op, _ in build.asked) else {}
    found = []
    for batch, step in sorted(steps.items()):
        floor = decode_floor(build, batch, PROMPT + STEPS // 2, touched.get(batch))
        moved = sum(part.moved for part in floor)
        copy, matmul = limits["copy_tb_s"] * 1e12, limits["matmul_tflop_s"] * 1e12
        found.append(
            {
                "batch": batch,
                "experts": touched.get(batch),
                "gigabytes": moved / 1e9,
                "teraflops": sum(part.flops for part in floor) / 1e12,
                "bytes_share": moved / copy / step,
                "roofline_share": seconds(floor, copy, matmul) / step,
            }
        )
    return found


def text(line: Mapping[str, Any]) -> str:
    """Returns one line for people."""
    read = "" if line["experts"] is None else f", {line['experts']:.1f} experts read per layer"
    return (
        f"decode step, batch {line['batch']}: {line['gigabytes']:.2f} GB, {line['teraflops']:.3f} Tflop{read}; "
        f"bytes at copy bandwidth are {line['bytes_share']:.2f} of the time, the roofline op by op "
        f"{line['roofline_share']:.2f}"
    )


def model_build(config: Config, device: DeviceInfo) -> Build:
    """Returns the model's requests for kernels, without making tensors."""
    registry = build_registry(config)
    assert config.model.model_dir is not None
    checkpoint = open_checkpoint(registry, Path(config.model.model_dir), weights=False)
    family, model = read_model(registry, checkpoint.config(), config.model.data_type)
    return dry_model(family, model, registry, device, Pins())[1]
