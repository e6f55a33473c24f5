"""Which attention kernel a GPU gets: by default, by mode, and with --deterministic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ResolveError
from llmcore.api.models import AttnSpec
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.engine.blueprint import blueprint_at
from llmcore.ops.attention import shape_of
from llmcore.registry.resolve import Resolution, candidates_for, resolve
from llmcore_devtools import registry_of
from llmcore_devtools.family import small_model
from llmcore_triton.specs import attention as specs
from llmcore_triton.specs.layouts import QUANTIZED

LLAMA = AttnSpec(heads=32, kv_heads=8, key_size=128, value_size=128, scale=0.1)
CONTEXT = OpContext(
    op="attn.gqa.decode",
    device=DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132),
    dtype="bf16",
    layout="token",
    shape=shape_of(LLAMA),
)


def chosen(context: OpContext, **pins: str) -> Resolution:
    return resolve(candidates_for(registry_of(), context.op), context, pins)


@pytest.mark.parametrize("bucket", range(5))
def test_unmeasured_the_general_kernel_is_taken(bucket: int) -> None:
    found = chosen(replace(CONTEXT, bucket=bucket))
    assert found.chosen.name == "gqa_flashdecoding"
    assert "deterministic" in found.reasons["unified"]


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_deterministic_takes_one_kernel_for_all(kind: str) -> None:
    context = replace(CONTEXT, op=f"attn.gqa.{kind}", deterministic=True)
    assert chosen(context).chosen.name == "unified"


def test_prefill_has_its_own_kernel_otherwise() -> None:
    assert chosen(replace(CONTEXT, op="attn.gqa.prefill")).chosen.name == "flash"


@pytest.mark.parametrize("layout", QUANTIZED)
def test_quantized_kv_has_every_kernel(layout: str) -> None:
    context = replace(CONTEXT, layout=layout, bucket=3)
    assert chosen(context).chosen.name == "gqa_flashdecoding"
    assert chosen(replace(context, op="attn.gqa.prefill")).chosen.name == "flash"
    assert chosen(replace(context, op="attn.gqa.mixed")).chosen.name == "unified"
    assert chosen(replace(context, deterministic=True)).chosen.name == "unified"
    latent = {"heads": 16, "kv_heads": 1, "key_size": 576, "value_size": 512}
    absorbed = replace(
        context, op="attn.mla.decode", layout="mla-latent-fp8", shape=shape_of(replace(LLAMA, **latent))
    )
    assert chosen(absorbed).chosen.name == "mla_flashdecoding"


def test_gpus_without_fp8_read_no_fp8() -> None:
    ampere = replace(CONTEXT, device=replace(CONTEXT.device, capability=80))
    assert chosen(replace(ampere, layout="token-int8")).chosen.name == "gqa_flashdecoding"
    assert chosen(replace(ampere, layout="token-fp8")).chosen.name == "torch"


def test_ppl_fp16_pins_decode_alone_and_needs_f16(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM", head_dim=64).save_pretrained(tmp_path)
    for mode in specs.modes():
        if not mode.name.startswith("ppl_fp16"):
            continue
        assert mode.kernels == {"attn.gqa.decode": "gqa_flashdecoding"}
        where = partial(blueprint_at, tmp_path, registry_of())
        assert where(CONTEXT.device, "f16").misfit(mode) is None
        assert where(CONTEXT.device, "bf16").misfit(mode) == "is for f16, this model runs as bf16; set --data_type"
        assert "needs device cuda" in str(where(DeviceInfo("cpu"), "f16").misfit(mode))


def test_modes_pin_kernels_that_exist() -> None:
    for mode in specs.modes():
        (op, name), *more = mode.kernels.items()
        assert not more
        assert mode.name == f"triton_{name}" or mode.dtypes
        found = chosen(CONTEXT, **mode.kernels)
        assert op == CONTEXT.op
        assert (found.chosen.name, found.why) == (name, "pinned")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sinks": True}, "no sinks"),
        ({"mask": "full"}, "no full mask"),
        ({"heads": 9}, "whole groups"),
        ({"key_size": 576, "value_size": 512}, "up to 256"),
        ({"heads": 256, "kv_heads": 1}, "up to 128"),
    ],
)
def test_what_is_refused_says_why(changed: dict[str, Any], reason: str) -> None:
    context = replace(CONTEXT, shape=shape_of(replace(LLAMA, **changed)))
    assert chosen(context).chosen.name == "torch"
    with pytest.raises(ResolveError, match=reason):
        chosen(context, **{"attn.gqa.decode": "gqa_flashdecoding"})
