"""scripts/tune.py without a GPU: every op's calls run, the fastest right configuration is written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select

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


script("tune_cases")
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


@pytest.mark.parametrize("op", ["gelu_and_mul", "gelu_tanh", "layer_norm", "add_layer_norm"])
def test_calls_of_what_other_families_ask_for(op: str) -> None:
    shapes = [{"size": 32, "bias": True}, {"size": 16, "heads": 3}] if op == "layer_norm" else [{"size": 32}]
    for shape in shapes:
        agree([OpContext(op=op, device=GPU, dtype="f32", bucket=0, shape=shape)], op)


def agree(contexts: list, op: str) -> list[dict]:
    jobs = tune.jobs_for(REGISTRY, contexts, most=1)
    assert jobs, f"no kernel of {op} has a cost"
    ran = []

    def timer(calls) -> float:
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
    left = iter([1.0] * 4)
    entries, notes = tune.measure(
        REGISTRY, jobs, torch.device("cpu"), lambda calls: next(times), lambda: next(left, 0.0), counts=(1,)
    )
    assert [(entry["us"], entry["config"]) for entry in entries] == [(1.0, jobs[0].configs[1])]
    assert notes == ["no time for 1 kernels"]


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
    head = {"gpu": "NVIDIA H200", "capability": 90}
    tune.written(tmp_path, [entry, {**entry, "kernel": "b"}], head)
    path = tune.written(tmp_path, [{**entry, "us": 1.0}], head)
    table = json.loads(path.read_text())
    assert path.name == "nvidia-h200.json" and table["gpu"] == "NVIDIA H200"
    assert [(e["kernel"], e["us"]) for e in table["entries"]] == [("a", 1.0), ("b", 2.0)]
