"""Write the golden files: one weight in each format, packed and dequantized by the library whose format it is.

The tests do not depend on these libraries. Commands for an environment with this repository's packages:

    pip install --no-deps --no-build-isolation compressed-tensors==0.20.0 loguru gptqmodel==7.7.0 optimum==2.3.0 \
        logbar tokenicer device-smi pypcre threadpoolctl defuser pillow
    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xzf autoawq-0.2.9.tar.gz
    python tests/quantization/golden/write.py autoawq-0.2.9

A file has the tensors of one module, what the library says that its weight is as `expected`, and in its metadata the
quantization_config and the origin.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
MODULE = "model.layers.0.self_attn.q_proj"
INPUTS, OUTPUTS, GROUP = 64, 32, 32

Tensors = dict[str, torch.Tensor]
Golden = tuple[Tensors, torch.Tensor, Mapping[str, Any], str]
"""(tensors by leaf, the weight that they mean, quantization_config, origin)."""


def weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(17)) * 0.05


def grid(symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """f16 scales and zeros [outputs, groups] of 4 bits."""
    groups = weight().view(OUTPUTS, -1, GROUP)
    if symmetric:
        scale = (groups.abs().amax(-1) / 7.5).half()
        return scale, torch.full_like(scale, 8)
    high, low = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
    scale = ((high - low) / 15).half()
    return scale, (-low / scale).round().clamp(0, 15).half()


def awq() -> Golden:
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        package = sys.modules[name] = types.ModuleType(name)  # their __init__ imports all models
        package.__path__ = [str(Path(sys.argv[1]) / name.replace(".", "/"))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    scale, zero = grid(symmetric=False)
    # Their packer does not clamp: codes have to be in range.
    codes = (weight().view(OUTPUTS, -1, GROUP) / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    linear.weight.data = ((codes - zero[..., None]) * scale[..., None].float()).view(OUTPUTS, INPUTS)
    packed = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous().float()
    )
    leaves = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    meant = dequantize_gemm(*leaves.values(), 4, GROUP).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return leaves, meant, config, "AutoAWQ 0.2.9: WQLinear_GEMM.from_linear, dequantize_gemm"


def gptq(act: bool) -> Golden:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    scale, zero = grid(symmetric=False)
    g_idx = torch.arange(INPUTS, dtype=torch.int32) // GROUP
    if act:
        g_idx = g_idx[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(3))]
    s, z = scale[:, g_idx.long()].float(), zero[:, g_idx.long()].float()
    linear.weight.data = ((weight() / s + z).round().clamp(0, 15) - z) * s
    options = {"sym": False, "desc_act": act, "in_features": INPUTS, "out_features": OUTPUTS, "bias": False}
    made = TorchLinear(bits=4, group_size=GROUP, pack_dtype=torch.int32, register_buffers=True, **options)
    made.pack(linear, scale.float(), zero.float(), g_idx)
    convert_gptq_v2_to_v1_format_module(
        module=made, quantize_config=types.SimpleNamespace(bits=4, pack_dtype=torch.int32)
    )
    leaves = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    convert_gptq_v1_to_v2_format_module(made, 4, torch.int32)
    made.post_init()
    meant = made.dequantize_weight().t()
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": act}
    return leaves, meant, config, "GPTQModel 7.7.0: TorchLinear.pack, v1, TorchLinear.dequantize_weight"


def compressed_tensors(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Golden:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    given = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=given, format=format)
    groups = weight().view(OUTPUTS, -1, arguments.group_size or INPUTS)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    leaves = {"weight": weight(), "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(format)
    leaves = compressor.compress(leaves, scheme)
    meant = compressor.decompress({name: tensor.clone() for name, tensor in leaves.items()}, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    return leaves, meant, config, f"compressed-tensors 0.20.0: compress and decompress of {format}"


def fp8() -> Golden:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = types.SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=(16, GROUP)))
    made = Fp8Quantize(quantizer).convert({"weight": weight()})
    leaves = {"weight": made["weight"], "weight_scale_inv": made["weight_scale_inv"]}
    meant = Fp8Dequantize(quantizer).convert(dict(leaves))["weight"]
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, GROUP],
    }
    return leaves, meant, config, "transformers 5.23.0: Fp8Quantize, Fp8Dequantize"


TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
MX = {"symmetric": True, "scale_dtype": "torch.uint8"}
CT: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any] | None]] = {
    "ct_int4": ("pack-quantized", {**GROUPS, "type": "int", "symmetric": False}, None),
    "ct_int8": ("int-quantized", {**CHANNEL, "type": "int"}, {**TOKEN, "type": "int"}),
    "ct_float8": ("float-quantized", {**CHANNEL, "type": "float"}, {**TOKEN, "type": "float"}),
    "ct_mxfp4": ("mxfp4-pack-quantized", {**GROUPS, **MX, "type": "float"}, None),
}
FILES: Mapping[str, Callable[[], Golden]] = {
    "awq": awq,
    "gptq": partial(gptq, act=False),
    "gptq_desc_act": partial(gptq, act=True),
    **{name: partial(compressed_tensors, *arguments) for name, arguments in CT.items()},
    "fp8": fp8,
}

if __name__ == "__main__":
    for name, make in FILES.items():
        leaves, meant, config, origin = make()
        tensors = {f"{MODULE}.{leaf}": tensor.detach().contiguous() for leaf, tensor in leaves.items()}
        save_file(
            tensors | {"expected": meant.detach().contiguous()},
            HERE / f"{name}.safetensors",
            {"quantization_config": json.dumps(config), "origin": origin},
        )
        print(name, {leaf: (list(t.shape), str(t.dtype)) for leaf, t in leaves.items()}, meant.dtype)
