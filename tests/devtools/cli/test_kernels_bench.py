"""`llmcore kernels --bench`: times that are times, bytes and flops that the ops declare, and what fails is said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from llmcore.api.specs import DeviceInfo, OpContext, OpSpec
from llmcore.builtin.devices.cpu import CPU
from llmcore.cli.kernels import command
from llmcore.ops import SAMPLE_TOKENS, drawing, rms_norm
from llmcore_devtools import registry_of
from llmcore_devtools.cli.kernels import Asked, _wanted
from llmcore_devtools.kernels.bench import HOST, Bench, Ceilings, Effort, ceilings, seconds_per_call

PLUGIN = """
import time
import torch
from llmcore.api import KernelSpec, hookimpl

@hookimpl
def register_kernels():
    for name in ("slow", "broken"):
        yield KernelSpec(op="rms_norm", name=name, make=f"{__name__}:{name}", priority={"slow": 90}.get(name, 1))

def slow(context):
    def run(x, weight, eps):
        time.sleep(0.002)
        return x
    return run

def broken(context):
    def run(x, weight, eps):
        raise RuntimeError("no room")
    return run
"""


def bench(*options: str) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(command, ["--bench", "--json", "--device", "cpu", *options])
    return result, json.loads(result.stdout) if result.stdout else {}


def test_every_kernel_of_an_op_in_every_bucket_with_what_its_op_declares() -> None:
    result, found = bench("silu_and_mul", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    rows = found["rows"]
    assert found["ceilings"]["copy"] > 1e8 and found["ceilings"]["matmul"] > 1e8
    assert sorted({row["tokens"] for row in rows}) == list(HOST.tokens)
    assert "torch" in {row["kernel"] for row in rows}
    for row in rows:
        width = row["shape"]["size"]
        assert row["moved"] == 3 * 4 * row["tokens"] * width and row["flops"] == 5 * row["tokens"] * width
        floor = max(row["moved"] / found["ceilings"]["copy"], row["flops"] / found["ceilings"]["matmul"])
        assert row["us"] > 0 and row["roofline"] == pytest.approx(1e6 * floor / row["us"])
    by_call: dict[tuple[str, int], int] = {}
    for row in rows:
        key = str(row["shape"]), row["tokens"]
        by_call[key] = by_call.get(key, 0) + row["chosen"]
    assert set(by_call.values()) == {1}, "one of a call's kernels is the one that would be chosen"


def test_codes_are_counted_as_they_are_packed() -> None:
    result, found = bench("linear.w4a16", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    rows = [row for row in found["rows"] if row["shape"]["group"] == 32]
    assert {row["kernel"] for row in rows} == {"parts", "torch"}
    for row in rows:
        inputs, outputs, tokens = (*(row["shape"][name] for name in ("inputs", "outputs")), row["tokens"])
        held = outputs * (inputs // 2 + inputs // 32 * (2 + 1))  # codes, f16 scales, zeros
        assert row["moved"] == held + 2 * tokens * (inputs + outputs) and row["roofline"] > 0


def test_a_slow_kernel_stands_behind_its_alternatives_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(PLUGIN)
    result, found = bench("rms_norm", "--dtype", "fp32", "--plugins", str(file))
    assert result.exit_code == 1
    calls: dict[tuple[str, int], dict[str, Any]] = {}
    for row in found["rows"]:
        calls.setdefault((str(row["shape"]), row["tokens"] or -1), {})[row["kernel"]] = row
    timed = [call for call in calls.values() if "slow" in call]
    # a busy machine may hold up a call of either
    assert all(call["slow"]["us"] >= 2000 for call in timed) and median(call["torch"]["us"] for call in timed) < 2000
    for call in timed:
        floor, same = (call[kernel]["roofline"] * call[kernel]["us"] for kernel in ("slow", "torch"))
        assert floor == pytest.approx(same)
    assert all(call["slow"]["chosen"] and not call["torch"]["chosen"] for call in timed)
    assert {row["failure"] for row in found["rows"] if row["kernel"] == "broken"} == {"RuntimeError: no room"}
    table = CliRunner().invoke(
        command, ["rms_norm", "--bench", "--dtype", "fp32", "--device", "cpu", "--plugins", str(file)]
    )
    lines = [line.split() for line in table.stdout.splitlines() if "size=40" in line and "failed" not in line]
    by_tokens = {tokens: [float(line[4].replace(",", "")) for line in lines if line[2] == tokens] for tokens in "14"}
    assert all(len(times) == 2 and times == sorted(times) for times in by_tokens.values()), "the best first"
    assert "failed: RuntimeError: no room" in table.stdout and "GB/s copied" in table.stderr


def test_a_pin_leaves_one_kernel_and_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "bench_pinned.py"
    file.write_text(PLUGIN)
    options = ("--dtype", "fp32", "--plugins", str(file), "--kernel", "rms_norm=slow")
    result, found = bench("rms_norm", *options)
    assert result.exit_code == 0 and {row["kernel"] for row in found["rows"]} == {"slow", "torch"}


def test_attention_counts_the_kv_that_is_read_and_half_of_a_causal_prompt() -> None:
    _, found = bench("attn.gqa.prefill", "--dtype", "fp32")
    whole = next(row for row in found["rows"] if row["tokens"] == 80 == row["kv_len"])
    heads, kv_heads, width = whole["shape"]["heads"], whole["shape"]["kv_heads"], 2 * whole["shape"]["key_size"]
    assert whole["moved"] == 4 * 80 * (kv_heads + heads) * width
    assert whole["flops"] == pytest.approx(2 * 80 * 40.5 * heads * width, rel=0.02)
    windowed = next(row for row in found["rows"] if row["kv_len"] == 513 and row["shape"]["window"] == 5)
    assert windowed["tokens"] == 1 and windowed["moved"] == 4 * (5 * 4 + 4) * 32


def test_a_models_shapes_and_a_composites_parts(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    result, found = bench("linear_silu_and_mul", "--model", str(tmp_path), "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    rows = found["rows"]
    assert {(row["shape"]["inputs"], row["shape"]["size"]) for row in rows} == {(64, 96)}
    # the engine runs the parts where it would run the reference
    assert {row["kernel"] for row in rows} >= {"parts", "torch"}
    assert not any(row["chosen"] for row in rows if row["kernel"] == "torch")


def test_every_op_can_be_timed() -> None:
    registry, device = registry_of(), CPU()
    few = Effort((1, 3), cold=1, most=1, memory=1 << 26, seconds=1e-6, copy=1 << 16, side=16)
    asked = Asked(ops=(), model=None)
    base = OpContext(op="", device=device.info, dtype="f32", layout="token")
    run = Bench(registry, device, few, Ceilings("f32", 1e9, 1e9), base, {})
    for spec, _ in registry.specs(OpSpec):
        rows = list(run.rows(spec.name, _wanted(asked, spec, ())[:1]))
        assert rows and not [row.failure for row in rows if row.failure], spec.name
        assert all(row.moved > 0 and row.us and row.roofline for row in rows), spec.name


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        ("rope_kv_write", "token-int4"),
        ("qk_norm_rope_kv_write", "token-fp8"),
        ("latent_rope_kv_write", "mla-latent-fp8"),
    ],
)
def test_writes_are_timed_over_the_layout_of_a_mode(op: str, layout: str) -> None:
    """Without a kernel for it, the engine runs the parts. One of them is the layout's own write."""
    registry, device = registry_of(), CPU()
    few = Effort((1, 3), cold=1, most=1, memory=1 << 26, seconds=1e-6, copy=1 << 16, side=16)
    base = OpContext(op="", device=device.info, dtype="f32", layout="token")
    layouts = {"mla-latent" if layout.startswith("mla") else "token": layout}
    run = Bench(registry, device, few, Ceilings("f32", 1e9, 1e9), base, {}, layouts)
    rows = list(run.rows(op, _wanted(Asked(ops=(), model=None), registry.find(OpSpec, op), ())[:1]))
    assert [(row.kernel, row.chosen, row.failure) for row in rows] == [("parts", True, None)] * 2
    assert all(row.us and row.roofline for row in rows)


def test_what_cannot_be_captured_is_timed_with_the_host() -> None:
    class WithGraphs(CPU):
        graphs, stale = True, False

        def forget_graphs(self) -> None:
            self.stale = False

        def capture(self, work: Any) -> Any:
            if self.refuses:
                raise RuntimeError("not while capturing")
            assert not self.stale, "the memory that the last graph shared went with it"
            self.stale = True
            work()
            return type("Graph", (), {"replay": staticmethod(lambda: None)}), None

    device, ran = WithGraphs(), []
    calls = [lambda: ran.append(1), lambda: time.sleep(1e-4)]
    device.refuses = True
    seconds, captured = seconds_per_call(device, calls, 1e-4)
    assert not captured and seconds >= 0.5e-4 and len(ran) > 2
    device.refuses = False
    for _ in range(2):
        replayed, captured = seconds_per_call(device, calls, 1e-4)
        assert captured and replayed < seconds


def test_ceilings_are_of_this_run_and_decide_what_bounds() -> None:
    measured = ceilings(CPU(), "f32", HOST)
    assert measured.copy > 1e8 and measured.matmul > 1e8
    best = Ceilings("f32", copy=100.0, matmul=10.0)
    assert best.seconds(200.0, 10.0) == (2.0, "memory") and best.seconds(100.0, 50.0) == (5.0, "compute")


def test_samples_have_as_many_tokens_as_drawing_says() -> None:
    context = OpContext(op="rms_norm", device=DeviceInfo("cpu"), dtype="f32", bucket=1)
    plain = [len(x) for x, *_ in rms_norm.samples(context)]
    with drawing(0, torch.device("cpu"), tokens=11):
        assert {len(x) for x, *_ in rms_norm.samples(context)} == {11} and SAMPLE_TOKENS[3] == (11,)
    assert [len(x) for x, *_ in rms_norm.samples(context)] == plain and 11 not in plain


@pytest.mark.parametrize("options", [("--bench", "--check"), ("--bench", "--explain"), ("--bench", "--seed", "3")])
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(command, ["rms_norm", *options]).exit_code == 2
