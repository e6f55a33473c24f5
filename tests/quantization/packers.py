"""Checkpoints of every format, packed here, and a second witness for each: what its tensors mean, by the definition.

Nothing here comes from the readers. A packer rounds to nearest. A witness looks up every weight by its own indices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Case:
    """A format under one config. `pack` makes the leaves of a module from its weight; `meaning` reads them."""

    config: Mapping[str, Any]
    pack: Callable[[torch.Tensor], Tensors]
    meaning: Callable[[Tensors], torch.Tensor]
    inputs: Literal["plain", "row", "static", "group"] = "plain"
    """The rounding of the inputs of its linears."""


def grid(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of the block of every weight: indices [N, 1] and [1, K]."""
    high, wide = (torch.arange(size) for size in weight.shape)
    return (high // (rows or len(high)))[:, None], (wide // (columns or len(wide)))[None, :]


def blockwise(weight: torch.Tensor, rows: int, columns: int, of: str) -> torch.Tensor:
    """The "amax" or "amin" of every block."""
    i, j = grid(weight, rows, columns)
    shape = (int(i.max()) + 1, int(j.max()) + 1)
    flat = (i * shape[1] + j).flatten()
    return torch.zeros(shape).flatten().scatter_reduce(0, flat, weight.flatten(), of).view(shape)


def rounded(
    weight: torch.Tensor, bits: int, columns: int, symmetric: bool, g_idx: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 [N, K], f16 scales and zeros [N, groups]. `g_idx`: the group of each input, if not in order."""
    order = torch.arange(weight.shape[1]) if g_idx is None else g_idx.argsort(stable=True)
    weight = weight[:, order]
    most = 2**bits - 1
    high, low = (blockwise(weight, 1, columns, of) for of in ("amax", "amin"))
    if symmetric:
        scale = (torch.maximum(high, -low) * 2 / most).half()
        zero = torch.full_like(scale, 2 ** (bits - 1)).int()
    else:
        scale = ((high - low) / most).half()
        zero = (-low / scale.float()).round().clamp(0, most).int()
    j = grid(weight, 1, columns)[1][0]
    codes = ((weight / scale.float()[:, j]).round() + zero[:, j]).clamp(0, most).int()
    return codes[:, order.argsort()], scale, zero


def words(values: torch.Tensor, bits: int, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 words along `dim`, whose field i is value `order[i]`. The last word may have unused fields."""
    per = 32 // bits
    values = values.movedim(dim, -1).long()
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per)).unflatten(-1, (-1, per))
    packed = sum(values[..., place] << (bits * index) for index, place in enumerate(order[:per]))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def field(packed: torch.Tensor, bits: int, dim: int, size: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """The first `size` fields along `dim`, each found by its own index."""
    per = 32 // bits
    places = [order.index(index % per) for index in range(size)]
    picked = packed.movedim(dim, -1)[..., torch.arange(size) // per].long()
    return (picked >> (bits * torch.tensor(places)) & (2**bits - 1)).movedim(-1, dim)


# --- AWQ ---------------------------------------------------------------------------------------------------------


def pack_awq(group: int, weight: torch.Tensor) -> Tensors:
    codes, scale, zero = rounded(weight, 4, group or weight.shape[1], symmetric=False)
    return {
        "qweight": words(codes.t(), 4, 1, AWQ_ORDER),
        "qzeros": words(zero.t(), 4, 1, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }


def read_awq(group: int, t: Tensors) -> torch.Tensor:
    inputs, outputs = t["qweight"].shape[0], t["scales"].shape[1]
    codes, zeros = (field(t[name], 4, 1, outputs, AWQ_ORDER) for name in ("qweight", "qzeros"))
    groups = torch.arange(inputs) // (group or inputs)
    return ((codes - zeros[groups]).float() * t["scales"].float()[groups]).t()


def awq(group: int = 32) -> Case:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Case(config, partial(pack_awq, group), partial(read_awq, group))


# --- GPTQ --------------------------------------------------------------------------------------------------------


Order = Literal["no", "shared", "own"]
"""Of inputs after act-order: the same for all modules with as many inputs, or another for each module."""


def groups_of(weight: torch.Tensor, columns: int, act: Order) -> torch.Tensor:
    """The group of each input."""
    inputs = weight.shape[1]
    seed = {"no": 0, "shared": inputs, "own": int(weight.abs().sum() * 1000)}[act]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
    found = torch.arange(inputs) // columns
    return found if act == "no" else found[order]


def pack_gptq(bits: int, group: int, sym: bool, act: Order, less: int, weight: torch.Tensor) -> Tensors:
    columns = group or weight.shape[1]
    g_idx = groups_of(weight, columns, act)
    codes, scale, zero = rounded(weight, bits, columns, sym, g_idx)
    return {
        "qweight": words(codes.t(), bits, 0),
        "qzeros": words(((zero - less) & (2**bits - 1)).t(), bits, 1),
        "scales": scale.t().contiguous(),
        "g_idx": g_idx.int(),
    }


def read_gptq(bits: int, less: int, t: Tensors) -> torch.Tensor:
    inputs, outputs = t["g_idx"].shape[0], t["scales"].shape[1]
    codes = field(t["qweight"], bits, 0, inputs)
    zeros = (field(t["qzeros"], bits, 1, outputs) + less) % 2**bits
    groups = t["g_idx"].long()
    return ((codes - zeros[groups]).float() * t["scales"].float()[groups]).t()


def gptq(bits: int = 4, group: int = 32, *, sym: bool = True, act: Order = "no", version: str | None = None) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": sym, "desc_act": act != "no"}
    if version is not None:
        config["checkpoint_format"] = version
    less = 0 if version == "gptq_v2" else 1
    return Case(config, partial(pack_gptq, bits, group, sym, act, less), partial(read_gptq, bits, less))


# --- compressed-tensors ------------------------------------------------------------------------------------------


def ct(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def pack_ct_words(bits: int, group: int, sym: bool, act: Order, weight: torch.Tensor) -> Tensors:
    columns = group or weight.shape[1]
    g_idx = None if act == "no" else groups_of(weight, columns, act)
    codes, scale, zero = rounded(weight, bits, columns, sym, g_idx)
    found = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    found |= {} if sym else {"weight_zero_point": words(zero, bits, 0)}
    return found if g_idx is None else found | {"weight_g_idx": g_idx.int()}


def read_ct_words(bits: int, group: int, t: Tensors) -> torch.Tensor:
    outputs, inputs = t["weight_shape"].tolist()
    scale = t["weight_scale"].float()
    zeros = torch.full(scale.shape, 2 ** (bits - 1))
    if "weight_zero_point" in t:
        zeros = field(t["weight_zero_point"], bits, 0, outputs)
    groups = t["weight_g_idx"].long() if "weight_g_idx" in t else torch.arange(inputs) // (group or inputs)
    return (field(t["weight_packed"], bits, 1, inputs) - zeros[:, groups]).float() * scale[:, groups]


def ct_words(bits: int = 4, group: int = 32, *, sym: bool = True, act: Order = "no") -> Case:
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "actorder": None if act == "no" else "group"}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    config = ct("pack-quantized", weights)
    return Case(config, partial(pack_ct_words, bits, group, sym, act), partial(read_ct_words, bits, group))


def pack_ct_int8(static: bool, most: int, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / most
    found = {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    return found | static_scale(static, 127, weight)


def static_scale(static: bool, limit: int, weight: torch.Tensor) -> Tensors:
    """A scale for inputs up to about 5, another for each module, if it is static."""
    return {"input_scale": (4 + weight.abs().mean() * 10).view(1) / limit} if static else {}


def read_scaled(rows: int, columns: int, scale: str, t: Tensors) -> torch.Tensor:
    weight = t["weight"].float()
    i, j = grid(weight, rows, columns)
    high, wide = int(i.max()) + 1, int(j.max()) + 1
    return weight * t[scale].float().view(high, wide)[i, j]


def activations(kind: str, static: bool) -> dict[str, Any]:
    strategy = "tensor" if static else "token"
    return {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": not static, "strategy": strategy}


def ct_int8(*, bits: int = 8, static: bool = False) -> Case:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    config = ct("int-quantized", weights, activations("int", static))
    pack = partial(pack_ct_int8, static, 2 ** (bits - 1) - 1)
    return Case(config, pack, partial(read_scaled, 1, 0, "weight_scale"), inputs(static))


def inputs(static: bool) -> Literal["static", "row"]:
    return "static" if static else "row"


def pack_float(rows: int, columns: int, scale: str, static: bool, weight: torch.Tensor) -> Tensors:
    scales = torch.maximum(blockwise(weight, rows, columns, "amax"), -blockwise(weight, rows, columns, "amin")) / 448
    i, j = grid(weight, rows, columns)
    weights = {"weight": (weight / scales[i, j]).to(torch.float8_e4m3fn), scale: scales if rows else scales.view(1)}
    return weights | static_scale(static, 448, weight)


def ct_float(strategy: str, *, static: bool = False, by: int = 0, block: tuple[int, int] = (16, 32)) -> Case:
    """`by`: inputs are quantized in groups of that many."""
    rows, columns = {"tensor": (0, 0), "channel": (1, 0), "block": block}[strategy]
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    given = activations("float", static) | ({"strategy": "group", "group_size": by} if by else {})
    config = ct("float-quantized", weights, given)
    pack, read = partial(pack_float, rows, columns, "weight_scale", static), partial(read_scaled, rows, columns)
    # No op quantizes inputs by token for weights with a scale per block.
    rounds = ("group" if by else "plain") if strategy == "block" else inputs(static)
    return Case(config, pack, partial(read, "weight_scale"), rounds)


def pack_mx(blocks: str, scales: str, weight: torch.Tensor) -> Tensors:
    """A power of two per 32 inputs, and the nearest of E2M1."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    steps = groups / exponent.exp2()[..., None]
    nearest = (steps.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    codes = (nearest + 8 * (steps < 0)).to(torch.uint8).flatten(-2)
    return {blocks: codes[..., 0::2] | codes[..., 1::2] << 4, scales: (exponent + 127).to(torch.uint8)}


def read_mx(blocks: str, scales: str, t: Tensors) -> torch.Tensor:
    index = torch.arange(t[blocks].shape[-1] * 2)
    codes = (t[blocks][..., index // 2] >> (4 * (index % 2))) & 15
    values = torch.tensor(E2M1)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    return values * torch.exp2(t[scales].float() - 127)[..., index // 32]


def ct_mxfp4() -> Case:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    names = ("weight_packed", "weight_scale")
    return Case(ct("mxfp4-pack-quantized", weights), partial(pack_mx, *names), partial(read_mx, *names))


# --- FP8 ---------------------------------------------------------------------------------------------------------


def fp8_block(block: tuple[int, int] = (16, 32)) -> Case:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    leaf = "weight_scale_inv"
    return Case(config, partial(pack_float, *block, leaf, False), partial(read_scaled, *block, leaf), "group")


def pack_fp8_tensor(static: bool, weight: torch.Tensor) -> Tensors:
    found = pack_float(0, 0, "weight_scale", static, weight)
    return {leaf: tensor if leaf == "weight" else tensor.reshape(()) for leaf, tensor in found.items()}


def fp8_tensor(*, static: bool = True) -> Case:
    scheme = "static" if static else "dynamic"
    config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    read = partial(read_scaled, 0, 0, "weight_scale")
    return Case(config, partial(pack_fp8_tensor, static), read, inputs(static))


CASES: Mapping[str, Case] = {
    "awq": awq(),
    "awq, groups of 128 of 192 and 64 inputs": awq(128),
    "awq, rows": awq(0),
    "gptq": gptq(),
    "gptq, asymmetric": gptq(sym=False, version="gptq"),
    "gptq, desc_act": gptq(act="shared"),
    "gptq, desc_act, an order for each": gptq(act="own"),
    "gptq, desc_act, asymmetric": gptq(sym=False, act="shared"),
    "gptq_v2": gptq(version="gptq_v2"),
    "gptq_v2, desc_act, asymmetric": gptq(sym=False, act="shared", version="gptq_v2"),
    "gptq, 8 bits": gptq(8),
    "gptq, 8 bits, rows, asymmetric": gptq(8, 0, sym=False),
    "ct, 4 bits": ct_words(),
    "ct, 4 bits, asymmetric": ct_words(sym=False),
    "ct, 4 bits, actorder": ct_words(act="shared"),
    "ct, 4 bits, rows": ct_words(group=0),
    "ct, 8 bits": ct_words(8, 0),
    "ct, 8 bits, asymmetric": ct_words(8, sym=False),
    "ct, int8": ct_int8(),
    "ct, int8, static": ct_int8(static=True),
    "ct, 4 bits in int8": ct_int8(bits=4),
    "ct, fp8 per tensor": ct_float("tensor", static=True),
    "ct, fp8 per channel": ct_float("channel"),
    "ct, fp8 per block": ct_float("block"),
    "ct, fp8 per block, inputs too": ct_float("block", by=32),
    "ct, mxfp4": ct_mxfp4(),
    "fp8": fp8_block(),
    "fp8, blocks beyond the edges": fp8_block((48, 128)),
    "autofp8": fp8_tensor(),
    "autofp8, dynamic": fp8_tensor(static=False),
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def converted(name: str) -> bool:
    """True for the weights of decoder linears, and of experts."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "_proj_with_mqa.weight"))


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint in `folder`."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def packed_model(
    tensors: Mapping[str, torch.Tensor], case: Case, left: Sequence[str] = (), cases: Mapping[str, Case] | None = None
) -> tuple[Tensors, Tensors]:
    """The tensors of a model whose decoder linears but those in `left` are packed, and what its weights then are.

    `cases`: modules that are packed by another case.
    """
    stored, means, other = dict(tensors), dict(tensors), cases or {}
    for name in tensors:
        module = name.removesuffix(".weight")
        if name in left or not (converted(name) or module in other):
            continue
        made = other.get(module, case)
        leaves = made.pack(stored.pop(name).float())
        stored |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        means[name] = made.meaning(leaves)
    return stored, means
