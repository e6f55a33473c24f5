"""`llmcore kernels`: what there is, and why each is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from listed import EXAMPLES, ROOT, plugin, rows, run
from llmcore.api.errors import ResolveError
from llmcore.api.specs import TOKEN_BUCKETS, DeviceInfo, OpContext, Requires
from llmcore.cli.kernels import choice_rows, requires_text
from llmcore.registry.resolve import Resolution


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (Requires(), ""),
        (Requires(device="gpu", capability=(80, 90)), "gpu, capability 80-90"),
        (
            Requires(dtypes=frozenset({"f32", "bf16"}), buckets=frozenset({0, 4})),
            "dtype bf16 or f32, tokens 1 or 257+",
        ),
        (Requires(granules=frozenset({16}), shape={"size": frozenset({64})}), "granule 16, size 64"),
    ],
)
def test_a_requirement_in_words(when: Requires, text: str) -> None:
    assert requires_text(when) == text


def test_kernels_lists_every_op_with_its_reference() -> None:
    found = rows("kernels", "rms_norm")
    assert [row["priority"] for row in found] == sorted((row["priority"] for row in found), reverse=True)
    assert found[-1]["name"] == "torch" and found[-1]["priority"] == 0
    assert {row["op"] for row in rows("kernels")} > {"linear", "rms_norm"}
    assert {row["op"] for row in rows("kernels", "linear", "rms_norm")} == {"linear", "rms_norm"}
    assert "there is no op 'liner'" in str(run("kernels", "liner").exception)


def test_kernels_explain_for_a_device_that_is_not_here() -> None:
    code = str(EXAMPLES / "register_kernels.py")
    (here,) = rows("kernels", "rms_norm", "--explain", "--dtype", "fp32", "--plugins", code)
    assert (here["chosen"], here["plugin"], here["tokens"]) == ("written-out", "register_kernels", "any")
    assert here["others"]["torch"] == "priority 0 < 40"
    both = rows("kernels", "rms_norm", "linear", "--explain", "--dtype", "fp32", "--plugins", code)
    assert {row["op"] for row in both} == {"linear", "rms_norm"}
    (there,) = rows("kernels", "rms_norm", "--explain", "--dtype", "fp32", "--plugins", code, "--device", "sm90")
    assert there["chosen"] == "torch"
    assert there["others"]["written-out"] == "needs device cpu, has cuda"
    assert "there is no device 'sm_x'" in str(run("kernels", "--explain", "--device", "sm_x").exception)


def test_kernels_explain_what_deterministic_leaves() -> None:
    model = str(ROOT / "benchmarks" / "configs" / "llama-3.1-8b")
    found = {row["op"]: row for row in rows("kernels", "--model", model, "--device", "sm90", "--deterministic")}
    assert all(row["chosen"] for row in found.values())
    assert found["attn.gqa.decode"]["chosen"] == found["attn.gqa.prefill"]["chosen"] != "torch"
    (linear,) = rows("kernels", "linear", "--explain", "--deterministic")
    assert linear["chosen"] is None and linear["why"].startswith("--deterministic: no kernel for linear on cpu")


def test_kernels_explain_says_why_a_pin_does_not_fit() -> None:
    code = str(EXAMPLES / "register_kernels.py")
    pin = ("--plugins", code, "--kernel", "rms_norm=written-out")
    (row,) = rows("kernels", "rms_norm", "--explain", "--dtype", "bf16", *pin)
    assert row["chosen"] is None
    assert "does not fit rms_norm on cpu, bf16" in row["why"] and "needs dtype f32, has bf16" in row["why"]


def test_kernels_explain_groups_token_counts_with_one_outcome(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_kernels():\n"
    code += "    yield KernelSpec(op='rms_norm', name='few', make='m:m', when=Requires(buckets=frozenset({0, 1})))\n"
    found = rows("kernels", "rms_norm", "--explain", "--plugins", plugin(tmp_path, code))
    assert {row["tokens"]: row["chosen"] for row in found} == {"1, 2-16": "few", "17-64, 65-256, 257+": "torch"}


def test_an_error_of_every_token_count_is_one_row() -> None:
    cpu = DeviceInfo("cpu")
    contexts = [OpContext(op="o", device=cpu, dtype="f32", bucket=bucket) for bucket in range(len(TOKEN_BUCKETS))]
    outcomes: list[tuple[OpContext, Resolution | ResolveError]] = [
        (context, ResolveError(f"bucket {context.bucket}")) for context in contexts
    ]
    (row,) = choice_rows(outcomes)
    assert (row["tokens"], row["chosen"], row["why"]) == ("any", None, "bucket 0")


def test_kernels_for_a_model_know_its_shapes(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = rows("kernels", "--model", str(tmp_path), "--device", "sm90")
    shapes = {(row["op"], row["shape"].get("inputs"), row["shape"].get("outputs")) for row in found}
    assert ("linear", 64, 192) in shapes and ("linear", 96, 64) in shapes
    (decode,) = [row for row in found if row["op"] == "attn.gqa.decode"]
    assert decode["shape"]["kv_heads"] == 2
    assert decode["others"]["sdpa"] == "needs device cpu, has cuda"
