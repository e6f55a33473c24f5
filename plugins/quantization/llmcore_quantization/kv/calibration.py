"""The fixed scales of `token-fp8`: from LightLLM's calibration file, else from the checkpoint, else 1.

The file is JSON: `version` "1.0", `architectures` (the model's first), `quant_type` per_head or per_tensor, `qmin` and
`qmax` (-448 and 448), `num_layers`, `num_head` (KV heads of the whole model), `scales_shape` and `scales`, a row per
layer: (keys, values), or all KV heads of the keys and then of the values. A value is code * scale.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from llmcore.api import Checkpoint, ConfigError, ModelConfig

from llmcore_quantization.kv.layouts import TokenCodes
from llmcore_quantization.kv.names import KINDS

logger = logging.getLogger(__name__)

LARGEST = 448.0
"""The largest number of e4m3."""

_STORED = re.compile(
    r"layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:[kv]_proj\.|attn\.)?(?P<side>[kv])_scale|(?P<proj>[kv])_proj\.output_scale|(?:attn\.)?(?P<both>kv)_scale)$"
)
"""A checkpoint's scales: compressed-tensors', ModelOpt's and vLLM's names, AutoFP8's, and its old one for both."""

Scales = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> the scales of keys and of values, f32 [1] or [KV heads]."""


class File(msgspec.Struct, kw_only=True):
    """A calibration file."""

    version: str = "1.0"
    architectures: str
    quant_type: Literal["per_head", "per_tensor"]
    qmin: float = -LARGEST
    qmax: float = LARGEST
    num_layers: int
    num_head: int
    scales_shape: list[int]
    scales: list[list[float]]


def calibrate(layout: TokenCodes, model: ModelConfig, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
    """Fill the fixed scales of a layout. Raises ConfigError for scales that do not fit the model."""
    path, heads = options.get("kv_quant_calibration_config_path"), layout.whole.kv_heads
    if path is not None:
        found = read_file(Path(path).expanduser(), model, heads, KINDS.get(str(options.get("llm_kv_type"))))
    else:
        found = stored_scales(checkpoint)
    missing = [layer for layer in layout.group.layers if layer not in found]
    if found and missing:
        raise ConfigError(f"the checkpoint has scales of fp8 KV for other layers, and none for layer {missing[0]}")
    if missing:
        logger.warning(
            "fp8 KV has the scale 1: the checkpoint has no scales of keys and values, and there is no "
            "--kv_quant_calibration_config_path. Numbers beyond 448 are cut; `llmcore calibrate` measures scales."
        )
    for layer in layout.group.layers if found else ():
        key, value = (_spread(scale, heads, layer) for scale in found[layer])
        layout.scales[layer] = key, value


def _spread(scale: torch.Tensor, heads: int, layer: int) -> torch.Tensor:
    """One scale per head, from one for all or one for each. Raises ConfigError for other shapes and numbers."""
    flat = scale.float().flatten()
    if len(flat) not in (1, heads) or not bool(((flat > 0) & flat.isfinite()).all()):
        raise ConfigError(
            f"the scales of fp8 KV in layer {layer} are {flat.tolist()[:4]}; the model has {heads} KV heads, and "
            "scales are greater than 0"
        )
    return flat.expand(heads).clone()


def stored_scales(checkpoint: Checkpoint) -> Scales:
    """The scales that a checkpoint has; {} if it has none. Raises ConfigError if it has only a layer's half."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    if not any(_STORED.search(name) for name in checkpoint.sizes()):
        return {}
    for name, read in checkpoint.tensors():
        if (match := _STORED.search(name)) is not None:
            sides = match["side"] or match["proj"] or match["both"]
            found.setdefault(int(match["layer"]), {}).update(dict.fromkeys(sides, read()))
    for layer, sides_of in found.items():
        if len(sides_of) != 2:
            raise ConfigError(f"the checkpoint has a scale for {'/'.join(sides_of)} of layer {layer} alone")
    return {layer: (sides_of["k"], sides_of["v"]) for layer, sides_of in found.items()}


def read_file(path: Path, model: ModelConfig, heads: int, kind: str | None = None) -> Scales:
    """The scales in a calibration file. `kind`: the quant_type that it has to have, None for any.

    Raises ConfigError if it is not such a file, or is of another model.
    """
    where = f"--kv_quant_calibration_config_path {path}"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=File, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: {reason}") from error
    width = 2 * (heads if file.quant_type == "per_head" else 1)
    for what, has, needs in (
        ("version", file.version, "1.0"),
        ("quant_type", file.quant_type, kind or file.quant_type),
        ("architectures", file.architectures, model.architecture),
        ("num_layers", file.num_layers, model.num_layers),
        ("num_head", file.num_head, heads),
        ("qmax", file.qmax, LARGEST),
        ("scales_shape", file.scales_shape, [file.num_layers, width]),
        ("the shape of scales", [len(file.scales), *{len(row) for row in file.scales}], [file.num_layers, width]),
    ):
        if has != needs:
            raise ConfigError(f"{where}: {what} is {has!r}, this model needs {needs!r}")
    rows = torch.tensor(file.scales, dtype=torch.float32)
    return {layer: (row[: width // 2], row[width // 2 :]) for layer, row in enumerate(rows)}


def write_file(path: Path, architecture: str, kind: Literal["per_head", "per_tensor"], largest: torch.Tensor) -> None:
    """Write the file for the largest absolute keys and values [layers, 2, KV heads] that a model was seen to have."""
    scales = largest if kind == "per_head" else largest.amax(-1, keepdim=True)
    rows = (scales.double().clamp(min=1e-8) / LARGEST).flatten(1)
    file = File(
        architectures=architecture,
        quant_type=kind,
        num_layers=len(rows),
        num_head=largest.shape[-1],
        scales_shape=list(rows.shape),
        scales=rows.tolist(),
    )
    path.write_text(json.dumps(msgspec.to_builtins(file), indent=1) + "\n", encoding="utf-8")
