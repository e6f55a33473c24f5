"""scripts/tune.py without a GPU: every op's calls run, the fastest right configuration is written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, OpSpec
from llmcore.config import Config
from llmcore.ops import made
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import REFERENCE

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
GPU = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SIZES = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "max_position_embeddings": 64, "torch_dtype": "float32"},
}
SPARSE = {
    **SIZES,
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    **{"num_experts_per_tok": 2},
}
LATENT = {
    **SIZES,
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 2},
}
LATENT_OPS = (
    *("attn.mla.decode", "attn.mla.mixed", "attn.mla.prefill", "attn.varlen", "attn.merge", "head_linear"),
    "latent_rope_kv_write",
)


def script(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


cases = script("tune_cases")
tune = script("tune")
REGISTRY = build_registry(Config(discovered=select(None).plugins))


def wanted(tmp_path: Path, *ops: str) -> list:
    sparse = any(op.startswith("moe.") for op in ops)
    sizes = SPARSE if sparse else LATENT if set(ops) & set(LATENT_OPS) else SIZES
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tune.contexts(REGISTRY, tmp_path, GPU, ops, "fp32")


@pytest.mark.parametrize(
    "op",
    [
        *("linear", "silu_and_mul", "add_rms_norm", "rope_kv_write", "attn.gqa.decode", "attn.gqa.prefill"),
        *("moe.route", "moe.dispatch", "moe.experts", "moe.combine", "moe.fused"),
        *LATENT_OPS,
    ],
)
def test_calls_of_every_op_run_and_agree_with_the_reference(tmp_path: Path, op: str) -> None:
    agree([context for context in wanted(tmp_path, op) if context.bucket == 0][:1], op)


@pytest.mark.parametrize(("op", "layout"), [("attn.gqa.decode", "token-int8"), ("attn.mla.decode", "mla-latent-fp8")])
def test_attention_over_quantized_kv_has_entries_of_its_own(tmp_path: Path, op: str, layout: str) -> None:
    sizes = LATENT if "mla" in op else SIZES
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    contexts = tune.contexts(REGISTRY, tmp_path, GPU, (op, "linear"), "fp32", layout)
    assert {(context.op, context.layout) for context in contexts} == {(op, layout)}
    (entry, *_) = agree([context for context in contexts if context.bucket == 0][:1], op)
    assert entry["layout"] == layout


PLAIN = {
    **{"linear.w4a16": "linear", "linear.w8a16": "linear", "linear.w8a8": "linear", "linear.fp8_block": "linear"},
    **{f"linear.w{bits}a16_silu_and_mul": "linear_silu_and_mul" for bits in (4, 8)},
    **{"quantize_rows": "", "rms_norm_quant": "rms_norm", "add_rms_norm_quant": "add_rms_norm"},
    **{"silu_and_mul_quant": "silu_and_mul"},
}
WIDE = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize(
    ("modes", "ops"),
    [
        (["triton_w4a16", "g64"], {"linear.w4a16", "linear.w4a16_silu_and_mul"}),
        (["triton_w8a16"], {"linear.w8a16", "linear.w8a16_silu_and_mul"}),
        (["triton_w8a8", "triton_int8kv"], {"linear.w8a8", *cases.QUANTIZED_ROWS}),
        (["fp8w8a8_b128"], {"linear.fp8_block", *cases.QUANTIZED_ROWS}),
    ],
)
def test_a_mode_adds_contexts_and_their_calls_run(tmp_path: Path, modes: list[str], ops: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    wanted = [op for op in tune.TUNABLE if not op.startswith("attn.")]
    found = tune.contexts(REGISTRY, tmp_path, GPU, wanted, "fp32", None, modes)
    assert {context.op for context in found} <= ops and any(context.op.startswith("linear.") for context in found)
    for op in {context.op for context in found}:
        context = next(context for context in found if context.op == op)
        plain = tune.plain_of(REGISTRY, context)
        assert (plain.op if plain else "") == PLAIN[op]
        kernel = Reference(REGISTRY.find(OpSpec, op).module, context)
        kernel.packing = "none" if op.startswith("linear.") else None
        for cold in (True, False):
            for calls in tune.Workload(REGISTRY, context, torch.device("cpu"), counts=(2,)).calls(kernel, cold):
                y = calls[-1]()
                assert len(y if torch.is_tensor(y) else y[0]) == 2
        assert (kernel.packs > 4) == op.startswith("linear.")


class Reference:
    """The reference of an op. Its weights are packed into themselves."""

    packing: str | None

    def __init__(self, module: str, context: OpContext) -> None:
        self.call, self.packs = made(KernelSpec(name=REFERENCE, op=context.op, make=f"{module}:make"), context), 0

    def pack(self, codes: Any, scale: Any, zero: Any, order: Any) -> tuple[Any, ...]:
        assert codes.dtype.itemsize == 1 and codes.view(torch.uint8).unique().numel() > 9
        self.packs += 1
        return codes, scale, zero, order

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


@pytest.mark.parametrize("op", ["gelu_and_mul", "gelu_tanh", "layer_norm", "add_layer_norm"])
def test_calls_of_what_other_families_ask_for(op: str) -> None:
    shapes = [{"size": 32, "bias": True}, {"size": 16, "heads": 3}] if op == "layer_norm" else [{"size": 32}]
    for shape in shapes:
        agree([OpContext(op=op, device=GPU, dtype="f32", bucket=0, shape=shape)], op)


def agree(contexts: list, op: str) -> list[dict]:
    jobs = tune.jobs_for(REGISTRY, contexts, most=1)
    assert jobs, f"no kernel of {op} has a cost"
    ran = []

    def timer(calls, heat) -> float:
        calls[-1]()
        ran.append(len(calls))
        return float(len(ran))

    entries, notes = tune.measure(REGISTRY, jobs, torch.device("cpu"), timer, lambda: 1.0, counts=(1,))
    assert not notes
    assert [entry["kernel"] for entry in entries] == [job.spec.name for job in jobs]
    assert all(entry["op"] == op and entry["us"] > 0 for entry in entries) and min(ran) >= 4
    return entries


def test_the_parts_of_composites_are_measured_too(tmp_path: Path) -> None:
    shapes = [context.shape for context in wanted(tmp_path, "linear") if context.bucket == 0]
    assert {"inputs": 32, "outputs": 96, "bias": False} in shapes


def test_the_fastest_configuration_wins_and_time_runs_out(tmp_path: Path) -> None:
    contexts = [context for context in wanted(tmp_path, "linear") if context.bucket == 0][:2]
    jobs = [job for job in tune.jobs_for(REGISTRY, contexts, most=3) if len(job.configs) == 3]
    jobs = [job for job in jobs if job.spec == jobs[0].spec]
    assert len(jobs) == 2
    times = iter((3.0, 1.0, 2.0))
    left, kept = iter([1.0] * 4), []

    def timer(calls, heat) -> float:
        return next(times)

    entries, notes = tune.measure(
        REGISTRY, jobs, torch.device("cpu"), timer, lambda: next(left, 0.0), counts=(1,), keep=kept.append
    )
    assert kept == entries
    assert [(entry["us"], entry["config"]) for entry in entries] == [(1.0, jobs[0].configs[1])]
    assert notes == ["no time for 1 kernels"]


def test_steps_at_the_power_limit_are_heated_and_their_best_are_timed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    found = tune.contexts(REGISTRY, tmp_path, GPU, ("quantize_rows",), "fp32", None, ["triton_w8a8"])
    context = next(context for context in found if context.bucket == 3)
    (job,) = tune.jobs_for(REGISTRY, [context], most=3)
    times, seen = iter((3.0, 1.0, 2.0, 2.5, 2.2)), []

    def timer(calls, heat) -> float:
        seen.append(heat)
        return next(times)

    entries, notes = tune.measure(REGISTRY, [job], torch.device("cpu"), timer, lambda: 1.0, counts=(1,), every=True)
    assert not notes and [(entry["us"], entry["config"]) for entry in entries] == [(2.2, job.configs[2])]
    assert seen == [tune.SCREEN] * 3 + [tune.HEAT] * tune.FINALISTS
    assert capsys.readouterr().out.count("quantize_rows=triton") == 4


def test_the_plain_op_is_timed_beside(capsys: pytest.CaptureFixture[str]) -> None:
    where = OpContext(
        op="rms_norm_quant", device=GPU, dtype="f32", bucket=0, shape={"size": 128, "codes": "i8", "group": 0}
    )
    jobs = tune.jobs_for(REGISTRY, [where], most=1)
    tune.measure(REGISTRY, jobs, torch.device("cpu"), lambda calls, heat: 7.5, lambda: 1.0, counts=(1,))
    assert "7.50 us  beside it: rms_norm=triton, 1 tokens, size=128" in capsys.readouterr().out


def test_a_plain_op_that_fails_leaves_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(context: OpContext) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("llmcore_triton.rms_norm.make", fails)
    where = OpContext(
        op="rms_norm_quant", device=GPU, dtype="f32", bucket=0, shape={"size": 128, "codes": "i8", "group": 0}
    )
    jobs = tune.jobs_for(REGISTRY, [where], most=1)
    entries, notes = tune.measure(
        REGISTRY, jobs, torch.device("cpu"), lambda calls, heat: 7.5, lambda: 1.0, counts=(1,)
    )
    assert len(entries) == 1 and any("beside it: rms_norm=triton" in note and "no room" in note for note in notes)
