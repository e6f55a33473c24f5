"""The built-in layout: `token`, which the torch reference reads."""

from __future__ import annotations

import torch
from llmcore.api.models import KVGroupSpec
from llmcore.builtin.layouts import register_kv_layouts
from llmcore.layers import Layout
from llmcore.ops.attention import LAYOUTS
from llmcore.registry.loader import load


def test_the_spec_makes_a_layout_that_the_reference_reads() -> None:
    (spec,) = register_kv_layouts()
    assert spec.name in LAYOUTS
    layout = load(spec.make)(KVGroupSpec(name="all", layers=(0,), kv_heads=2, key_size=4, value_size=6), 1, "f16")
    assert isinstance(layout, Layout)
    keys, values = layout.layer_tensors(3, torch.device("cpu"))
    assert (keys.shape, values.shape, keys.dtype) == ((3, 2, 4), (3, 2, 6), torch.float16)
    assert layout.bytes == (keys.nbytes + values.nbytes) // 3
