"""The decode kernels against the op's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from llmcore.ops import attention, attn_gqa_decode
from llmcore.ops.check import check
from llmcore.specs import AttnSpec, DeviceInfo, OpContext
from llmcore_triton.attention import flashdecoding, gqa_attention, gqa_flashdecoding
from llmcore_triton.attention.listed import Config

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPLITTING = vars(Config(block_n=16, stages=2, least=16, per_processor=1))
MODULES = {"gqa_flashdecoding": gqa_flashdecoding, "gqa_attention": gqa_attention, "flashdecoding": flashdecoding}


def context(granule: int = 1, dtype: str = "f32", **spec: Any) -> OpContext:
    sizes = {"heads": 6, "kv_heads": 2, "key_size": 16, "value_size": 16, "scale": 0.25, **spec}
    return OpContext(
        op="attn.gqa.decode",
        device=H200,
        dtype=dtype,
        layout="token",
        granule=granule,
        shape=attention.shape_of(AttnSpec(**sizes)),
    )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"granule": 4, "dtype": "f16"},
        {"heads": 7, "kv_heads": 1, "granule": 4, "window": 5},
        {"heads": 2, "key_size": 80, "value_size": 80, "soft_cap": 3.0},
        {"key_size": 24, "value_size": 8, "window": 40, "soft_cap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [False, True])
def test_against_the_reference(name: str, given: Mapping[str, Any], split: bool) -> None:
    if split and name == "gqa_attention":
        pytest.skip("never splits")
    where = context(**given)
    module = MODULES[name]
    kernel = module.make_with(where, SPLITTING) if split else module.make(where)
    assert check(attn_gqa_decode, kernel, where) >= 4
