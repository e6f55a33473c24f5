"""The layouts that quantize, by name, and the modes that pin them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcore.api import KVLayoutSpec, ModeSpec

GROUP = 32
"""Elements of a head that share a scale in `token-int4`, unless `--llm_kv_quant_group_size` says otherwise."""

GROUPS = (8, 16, 64, 128)
"""Other groups of `token-int4`."""

POLICIES: Mapping[str, tuple[str, ...]] = {
    "0": ("0", "none"),
    "4": ("4", "int4"),
    "8": ("8", "int8"),
    "16": ("16", "fp8", "fp8_e4m3"),
}
"""LMDeploy's number of a policy -> the values of its `--quant-policy` that mean it."""

KINDS: Mapping[str, str] = {"fp8kv_sph": "per_head", "fp8kv_spt": "per_tensor"}
"""Value of LightLLM's `--llm_kv_type` -> the `quant_type` of the calibration file."""


@dataclass(frozen=True)
class Form:
    """The form in which the keys or the values of a head are stored.

    `codes`: the type of an element. `group`: elements that share a scale, 0: the whole head. `least`: a group also
    stores its least value, from which its codes count (asymmetric). `fixed`: scales are constants of the layout.
    """

    codes: Literal["i8", "u4", "e4m3"]
    group: int = 0
    least: bool = False
    fixed: bool = False


_INT8 = Form("i8")
_INT4 = Form("u4", group=GROUP, least=True)

FORMS: Mapping[str, tuple[Form, Form]] = {
    "token-int8": (_INT8, _INT8),
    "token-int8-g8": (Form("i8", group=8),) * 2,
    "token-int8-min": (Form("i8", least=True),) * 2,
    "token-int4": (_INT4, _INT4),
    **{f"token-int4-g{group}": (replace(_INT4, group=group),) * 2 for group in GROUPS},
    "token-int8-int4": (_INT8, _INT4),
    "token-fp8": (Form("e4m3", fixed=True),) * 2,
    "token-fp8-dynamic": (Form("e4m3"),) * 2,
}
"""Layout -> how it stores keys and values."""

_WORDS = {"i8": "int8", "u4": "4 bits", "e4m3": "fp8 (e4m3)"}

_TOLERANCES = {"i8": 0.01, "u4": 0.08, "e4m3": 0.07}
"""Half of a step of the codes, and what the scale and the model's type round."""

LATENT = "mla-latent-fp8"


def layouts() -> Iterable[KVLayoutSpec]:
    """The layouts."""
    where = "llmcore_quantization.kv"
    for name, (key, value) in FORMS.items():
        yield KVLayoutSpec(
            name=name,
            make=f"{where}.layouts:TokenCodes",
            tolerance=max(_TOLERANCES[key.codes], _TOLERANCES[value.codes]),
            calibrate=f"{where}.calibration:calibrate" if key.fixed else None,
            summary=_summary(key) if key == value else f"keys: {_summary(key)}; values: {_summary(value)}",
        )
    yield KVLayoutSpec(
        name=LATENT,
        make=f"{where}.layouts:LatentCodes",
        tolerance=_TOLERANCES["e4m3"],
        summary="rows of latent attention: the latent as fp8 (e4m3), a scale per 128 elements; the rotated part as is",
    )


def _summary(form: Form) -> str:
    per = f"per token and {form.group} elements of a head" if form.group else "per token and head"
    least = " and a least value" if form.least else ""
    return f"{_WORDS[form.codes]}, {'fixed scales' if form.fixed else f'a scale{least} {per}'}"


_Asked = tuple[Mapping[str, tuple[Any, ...]], ...]


def _asks(option: str, *values: str, groups: tuple[int | None, ...] = (None,)) -> Mapping[str, tuple[Any, ...]]:
    """An option with one of `values`, beside one of `groups`."""
    return {option: values, "llm_kv_quant_group_size": groups}


FIXED = "offline_calibration_fp8kv"
"""The mode whose scales are fixed."""

_MODES: tuple[tuple[str, str, _Asked], ...] = (
    ("triton_int8kv", "token-int8", ()),
    ("ppl_int8kv", "token-int8-g8", ()),
    ("ppl_int8kv_flashdecoding", "token-int8-g8", ()),
    ("ppl_int4kv_flashdecoding", "token-int4", ()),
    (FIXED, "token-fp8", (_asks("llm_kv_type", *KINDS), _asks("quant_policy", *POLICIES["16"]))),
    ("int8kv", "token-int8", (_asks("llm_kv_type", "int8kv"),)),
    ("int8kv_g8", "token-int8-g8", (_asks("llm_kv_type", "int8kv", groups=(8,)),)),
    ("int4kv", "token-int4", (_asks("llm_kv_type", "int4kv", groups=(None, GROUP)),)),
    ("fp8kv_dynamic", "token-fp8-dynamic", ()),
    ("int8k_int4v", "token-int8-int4", ()),
    ("quant_policy_4", "token-int4", (_asks("quant_policy", *POLICIES["4"], groups=(None, GROUP)),)),
    ("quant_policy_8", "token-int8-min", (_asks("quant_policy", *POLICIES["8"]),)),
    *(
        (
            f"int4kv_g{group}",
            f"token-int4-g{group}",
            (_asks("llm_kv_type", "int4kv", groups=(group,)), _asks("quant_policy", *POLICIES["4"], groups=(group,))),
        )
        for group in GROUPS
    ),
)
"""(mode, its layout, the options that ask for it): LightLLM's modes and the values of its `--llm_kv_type`, LMDeploy's
policies, and others."""


def modes() -> Iterable[ModeSpec]:
    """The modes."""
    for name, layout, asked in _MODES:
        yield ModeSpec(
            name=name,
            layouts={"token": layout},
            asked=asked,
            summary=f"KV is stored as {layout}",
        )
    yield ModeSpec(
        name="triton_fp8kv", layouts={"mla-latent": LATENT}, summary="KV of latent attention as fp8, a scale per 128"
    )
