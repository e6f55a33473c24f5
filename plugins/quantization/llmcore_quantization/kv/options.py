"""The options of LightLLM and LMDeploy that say how KV is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmcore.api import Config, ConfigError, Origins, option

from llmcore_quantization.kv.names import FIXED, GROUP, GROUPS, KINDS, POLICIES

_NO_FORM = (
    "fp8 with 5 bits of exponent and 2 of mantissa loses four times as much as --quant_policy fp8 in equal bytes"
)
_NO_TURBO = "TurboQuant is not implemented; --quant_policy 4 has about its size"

_NO_POLICY: Mapping[str, str] = {"17": _NO_FORM, "fp8_e5m2": _NO_FORM, "42": _NO_TURBO, "turbo_quant": _NO_TURBO}


@dataclass(frozen=True, kw_only=True)
class KVQuantization:
    """Storage of keys and values."""

    quant_policy: str = option(
        "0",
        "KV as LMDeploy stores it: 8 or int8, 4 or int4, 16, fp8 or fp8_e4m3 (fixed scales), 0 or none (as the model "
        "computes).",
    )
    llm_kv_type: str | None = option(
        None,
        "KV as LightLLM names it; fp8kv_* have fixed scales, per head or per tensor.",
        choices=("int8kv", "int4kv", "fp8kv_sph", "fp8kv_spt"),
        unset="None",
    )
    llm_kv_quant_group_size: int | None = option(
        None,
        f"Elements of a head that share a scale: {', '.join(map(str, sorted((GROUP, *GROUPS))))} in 4 bits (default: "
        f"{GROUP}), 8 in int8 (default: the whole head).",
    )
    kv_quant_calibration_config_path: str | None = option(
        None,
        "File with the fixed scales of fp8 KV, as LightLLM and `llmcore calibrate` write it (default: the "
        "checkpoint's scales).",
    )

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields no warning. Raises ConfigError for a policy or a group that does not exist, or has no effect."""
        known = [value for values in POLICIES.values() for value in values]
        if self.quant_policy not in known:
            why = _NO_POLICY.get(self.quant_policy, f"there are {', '.join(known)}")
            raise ConfigError(f"{origins['quant_policy']} {self.quant_policy}: {why}.")
        self._check_group(origins)
        fixed = self.quant_policy in POLICIES["16"] or self.llm_kv_type in KINDS or FIXED in config.kernels.mode
        if self.kv_quant_calibration_config_path is not None and not fixed:
            raise ConfigError(
                f"{origins['kv_quant_calibration_config_path']} is for KV with fixed scales; add --quant_policy fp8, "
                "or --llm_kv_type fp8kv_sph or fp8kv_spt."
            )
        yield from ()

    def _check_group(self, origins: Origins) -> None:
        group, four = self.llm_kv_quant_group_size, self.quant_policy in POLICIES["4"] or self.llm_kv_type == "int4kv"
        if group is None:
            return
        where = origins["llm_kv_quant_group_size"]
        if not four and self.llm_kv_type != "int8kv":
            raise ConfigError(
                f"{where} is for --llm_kv_type int4kv or int8kv and for --quant_policy 4; add one of them, or leave "
                "it out."
            )
        groups = sorted((GROUP, *GROUPS)) if four else [8]
        if group not in groups:
            raise ConfigError(f"{where} {group}: groups have {', '.join(map(str, groups))} elements here.")
