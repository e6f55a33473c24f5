"""A profile of steps: the GPU's idle time in steady decode, its longest kernels, and the host's time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.workloads import chat
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

BATCHES = (1, 64, 256)
PROMPT, STEPS, SKIP, SETTLE = 512, 20, 5, 10
CHATS = 1000
EAGER_TOKENS, EAGER_STEPS = 1024, 12
TOP = 15


def steady_decode(bench: BenchEngine, batch: int) -> dict[str, Any]:
    """Profiles STEPS decode steps of `batch` requests: idle share of the GPU, time per step, and its kernels by
    time."""
    engine = bench.engine
    for _ in range(batch):
        engine.submit(bench.request(PROMPT, SETTLE * 2 + SKIP + STEPS + 64))
    enough = engine.load().output_tokens + batch * SETTLE
    while engine.load().output_tokens < enough:
        engine.step()
    return _decoding(bench)


def chat_decode(bench: BenchEngine) -> dict[str, Any]:
    """The same for conversations of many lengths, after all their prompts are computed. `rows`: those of the first
    step."""
    engine = bench.engine
    for prompt, output in chat(CHATS).lengths:
        engine.submit(bench.request(prompt, output))
    while engine.load().waiting:
        engine.step()
    for _ in range(SETTLE):
        engine.step()
    load = engine.load()
    return {"rows": load.running, "kv": load.kv_live, **_decoding(bench)}


def first_token(bench: BenchEngine) -> dict[str, Any]:
    """Profiles prompts of PROMPT tokens, one after the other. Each is a captured step."""
    for _ in range(3):
        _one_prompt(bench, PROMPT)
    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        for _ in range(SKIP + STEPS):
            _one_prompt(bench, PROMPT)
        torch.cuda.synchronize()
    return _by_kernel(watch)


def _decoding(bench: BenchEngine) -> dict[str, Any]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        for _ in range(SKIP + STEPS):
            bench.engine.step()
        torch.cuda.synchronize()
    _finish(bench)
    return _by_kernel(watch)


def _by_kernel(watch: profile) -> dict[str, Any]:
    """Returns the kernels of the last STEPS of SKIP + STEPS steps."""
    spans = sorted(_spans(watch), key=lambda span: span[1])
    # Every step launches the same kernels. The profiler's own start slows the first steps.
    spans = spans[len(spans) * SKIP // (SKIP + STEPS) :]
    window = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    busy = _union([(start, end) for _, start, end in spans])
    kernels: dict[str, list[float]] = defaultdict(list)
    for name, start, end in spans:
        kernels[name].append(end - start)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "idle": 1 - busy / window,
        "step_us": window / STEPS,
        "launches_per_step": len(spans) / STEPS,
        "kernels": [
            {"name": name, "us_per_step": sum(us) / STEPS, "per_step": len(us) / STEPS, "us": sum(us) / len(us)}
            for name, us in longest
        ],
    }


def _one_prompt(bench: BenchEngine, tokens: int) -> float:
    """Returns the host's seconds to plan and launch a step of one prompt of `tokens` tokens."""
    bench.engine.submit(bench.request(tokens, 1))
    torch.cuda.synchronize()
    began = time.perf_counter()
    bench.engine.step()
    seconds = time.perf_counter() - began
    _finish(bench)
    return seconds


def eager_host(bench: BenchEngine) -> float:
    """Returns the host's microseconds for an eager step. Call it before any profile, which may slow later launches."""
    for _ in range(3):
        _one_prompt(bench, EAGER_TOKENS)
    return statistics.median(_one_prompt(bench, EAGER_TOKENS) for _ in range(EAGER_STEPS)) * 1e6


def eager_gpu(bench: BenchEngine) -> float:
    """Returns the GPU's microseconds for the same step."""
    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        for _ in range(EAGER_STEPS):
            _one_prompt(bench, EAGER_TOKENS)
        torch.cuda.synchronize()
    return _union([(start, end) for _, start, end in _spans(watch)]) / EAGER_STEPS


def report(bench: BenchEngine) -> dict[str, Any]:
    """Measures and prints decode by batch, and an eager step."""
    host = eager_host(bench)
    decode = {batch: _show(f"steady decode, batch {batch}", steady_decode(bench, batch)) for batch in BATCHES}
    first = _show(f"first token of {PROMPT} tokens", first_token(bench))
    mixed = chat_decode(bench)
    _show(f"{mixed['rows']} conversations over {mixed['kv']:,} tokens", mixed)
    gpu = eager_gpu(bench)
    eager = {"host_us": host, "gpu_us": gpu, "share": host / gpu}
    print(
        f"eager step of {EAGER_TOKENS} tokens: host {eager['host_us']:,.0f} us, GPU {eager['gpu_us']:,.0f} us: "
        f"{eager['share']:.0%} (under 60% wanted)"
    )
    return {"steady_decode": decode, "first_token": first, "chat_decode": mixed, "eager_step": eager}


def _show(what: str, decode: dict[str, Any]) -> dict[str, Any]:
    print(
        f"\n{what}: {decode['step_us']:,.0f} us per step, {decode['launches_per_step']:.0f} kernels and copies, "
        f"GPU idle {decode['idle']:.1%} (under 3% wanted in steady decode at 64)"
    )
    total = sum(kernel["us_per_step"] for kernel in decode["kernels"])
    print(f"  {'us/step':>9}  {'share':>6}  {'count':>6}  {'us each':>8}  kernel")
    for kernel in decode["kernels"][:TOP]:
        whole, count, each = (kernel[key] for key in ("us_per_step", "per_step", "us"))
        print(f"  {whole:>9,.1f}  {whole / total:>6.1%}  {count:>6.1f}  {each:>8.2f}  {kernel['name'][:90]}")
    return decode


def _finish(bench: BenchEngine) -> None:
    while not bench.engine.idle:
        bench.engine.step()


def _spans(watch: profile) -> list[tuple[str, float, float]]:
    """Returns (name, start, end) in us of everything that ran on the GPU."""
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in watch.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    if not found:
        raise RuntimeError("the profiler saw nothing on the GPU; is CUPTI installed?")
    return found


def _union(spans: list[tuple[float, float]]) -> float:
    """Returns the length that the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
