"""Which modes a model can be served with: one answer for `serve`, `plan`, `modes` and `kernels --explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcore.engine.explain import dry_model
from llmcore.errors import ConfigError, ResolveError
from llmcore.models import ModelConfig
from llmcore.modes import Pins, check_mode, mode_misfit
from llmcore.registry import Registry
from llmcore.specs import DeviceInfo, ModelSpec, ModeSpec
from llmcore.weights.quant import find_quantization
from llmcore.weights.source import open_checkpoint, read_model

STEP_OPS = frozenset({"sample", "step_inputs", "step_outputs", "kv_slots"})
"""The ops that surround every model's forward."""


@dataclass(frozen=True, kw_only=True)
class ModeFit:
    """One model on one device. `described`: its config.json; `granule`: what `--cache_block_seq_len` asks for."""

    registry: Registry
    device: DeviceInfo
    family: ModelSpec
    model: ModelConfig
    described: Mapping[str, Any]
    deterministic: bool = False
    granule: int | None = None

    def misfit(self, mode: ModeSpec) -> str | None:
        """Why the model cannot be built with this mode alone, or None if it can."""
        if (why := mode_misfit(mode, self.registry, self.device)) is not None:
            return why
        try:
            used = self._ops(Pins(mode.kernels, mode.layout, mode.quant))
        except (ConfigError, ResolveError) as error:
            return str(error).partition("\n")[0].removesuffix("; there are:")
        return mode_misfit(mode, self.registry, self.device, used | STEP_OPS)

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for the first mode that is not there or does not fit, with those that do fit;
        ResolveError where the model cannot be built without any mode either."""
        if names:
            self._ops(Pins())
        for name in names:
            check_mode(name, self.registry, f"{self.model.architecture} on {self.device.type}", self.misfit)

    def _ops(self, pins: Pins) -> set[str]:
        quantized = find_quantization(self.registry, self.described, self.model, pins.quant)
        _, build = dry_model(
            self.family, self.model, self.registry, self.device, pins, self.deterministic, quantized, self.granule
        )
        return {resolution.context.op for resolution in build.resolutions}


def mode_fit_of(
    path: Path, registry: Registry, device: DeviceInfo, dtype: str | None = None, deterministic: bool = False
) -> ModeFit:
    """The same for the checkpoint at `path`, of which only the config is read. `dtype`: as `--data_type` spells it."""
    described = open_checkpoint(registry, path, weights=False).config()
    family, model = read_model(registry, described, dtype)
    return ModeFit(
        registry=registry,
        device=device,
        family=family,
        model=model,
        described=described,
        deterministic=deterministic,
    )
