"""The options and modes that say how KV is stored: which layout each means, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmcore.api import Config, ConfigError, DeviceInfo, KVGroupSpec, OptionSpec
from llmcore.cli import main
from llmcore.config import make_config
from llmcore.engine.blueprint import Blueprint, blueprint_at
from llmcore.registry.modes import chosen_modes
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization.kv.names import FORMS, LATENT, modes

REGISTRY = registry_for_tests()
OPTIONS = [spec for spec, _ in REGISTRY.specs(OptionSpec)]
CPU = DeviceInfo("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads have 48 elements, which groups of 32 do not divide."""
    path = tmp_path_factory.mktemp("llama")
    small_model("LlamaForCausalLM", head_dim=48).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    small_model("DeepseekV3ForCausalLM").save_pretrained(path)
    return path


def set_to(**settings: Any) -> Config:
    return make_config(OPTIONS, **settings)


def pinned(model: Path, *names: str, **settings: Any) -> Blueprint:
    """The blueprint of a model under modes and options."""
    return blueprint_at(model, REGISTRY, CPU).pinned(chosen_modes(set_to(mode=names, **settings), REGISTRY))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("token", {}),
        ("token", {"quant_policy": "0"}),
        ("token", {"quant-policy": "none"}),
        ("token", {"llm_kv_type": "None"}),
        ("token-int8-min", {"quant-policy": 8}),
        ("token-int8-min", {"quant_policy": "int8"}),
        ("token-int4-g16", {"quant_policy": "4", "llm_kv_quant_group_size": 16}),
        ("token-int4-g8", {"quant_policy": "int4", "llm_kv_quant_group_size": 8}),
        ("token-fp8", {"quant_policy": "16"}),
        ("token-fp8", {"quant_policy": "fp8"}),
        ("token-fp8", {"quant_policy": "fp8_e4m3"}),
        ("token-int8", {"llm_kv_type": "int8kv"}),
        ("token-int8-g8", {"llm_kv_type": "int8kv", "llm_kv_quant_group_size": 8}),
        ("token-int4-g16", {"llm_kv_type": "int4kv", "llm_kv_quant_group_size": 16}),
        ("token-int4-g128", {"llm_kv_type": "int4kv", "llm_kv_quant_group_size": 128}),
        ("token-fp8", {"llm_kv_type": "fp8kv_sph"}),
        ("token-fp8", {"llm_kv_type": "fp8kv_spt"}),
        ("token-int8", {"mode": ("triton_int8kv",)}),
        ("token-int8", {"llm_kv_type": "int8kv", "mode": ("triton_int8kv",)}),
    ],
)
def test_what_an_option_means(llama: Path, layout: str, settings: dict[str, Any]) -> None:
    plan = pinned(llama, *settings.pop("mode", ()), **settings)
    assert {plan.pins.stored(group).layout for group in plan.model.kv_groups} == {layout}


def test_groups_of_32_are_the_default() -> None:
    for settings in ({"quant_policy": "4"}, {"llm_kv_type": "int4kv"}):
        for more in ({}, {"llm_kv_quant_group_size": 32}):
            (name,) = chosen_modes(set_to(**settings, **more), REGISTRY)
            (mode,) = (mode for mode in modes() if mode.name == name)
            assert mode.layouts == {"token": "token-int4"} and FORMS["token-int4"][0].group == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_policy": "3"}, r"quant_policy 3: there are 0, none, 4, int4, 8, int8, 16, fp8, fp8_e4m3\."),
        ({"quant_policy": "17"}, "quant_policy 17: fp8 with 5 bits of exponent"),
        ({"quant_policy": "fp8_e5m2"}, "quant_policy fp8_e5m2: fp8 with 5 bits of exponent"),
        ({"quant_policy": "42"}, "quant_policy 42: TurboQuant is not implemented"),
        ({"quant_policy": "turbo_quant"}, "quant_policy turbo_quant: TurboQuant is not implemented"),
        ({"llm_kv_type": "int2kv"}, "llm_kv_type"),
        ({"llm_kv_quant_group_size": 16}, "is for --llm_kv_type int4kv or int8kv and for --quant_policy 4"),
        ({"llm_kv_quant_group_size": 16, "quant_policy": "8"}, "is for --llm_kv_type int4kv or int8kv"),
        ({"llm_kv_quant_group_size": 24, "quant_policy": "4"}, "24: groups have 8, 16, 32, 64, 128 elements here"),
        ({"llm_kv_quant_group_size": 16, "llm_kv_type": "int8kv"}, "16: groups have 8 elements here"),
        ({"kv_quant_calibration_config_path": "a.json"}, "is for KV with fixed scales; add --quant_policy fp8"),
        ({"kv_quant_calibration_config_path": "a.json", "quant_policy": "8"}, "is for KV with fixed scales"),
    ],
)
def test_options_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_to(**settings)


def test_a_file_of_scales_goes_with_every_way_to_ask_for_fixed_scales() -> None:
    for asked in (
        {"quant_policy": "fp8"},
        {"llm_kv_type": "fp8kv_sph"},
        {"llm_kv_type": "fp8kv_spt"},
        {"mode": ("offline_calibration_fp8kv",)},
    ):
        set_to(kv_quant_calibration_config_path="a.json", **asked)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ((), {"quant_policy": "8", "llm_kv_type": "int8kv"}, "--mode int8kv pins layout token to 'token-int8'"),
        (
            ("triton_int8kv", "int4kv_g8"),
            {},
            "--mode triton_int8kv pins layout token to 'token-int8', --mode int4kv_g8",
        ),
        (
            ("int4kv",),
            {},
            "--mode int4kv .*does not fit Llama.*groups of 32 do not divide a head of 48.*groups of 8 or 16",
        ),
        ((), {"quant_policy": "4"}, "--quant_policy 4 does not fit .*groups of 32 do not divide a head of 48"),
        (
            ("triton_fp8kv",),
            {},
            "--mode triton_fp8kv does not fit .*is for KV of layout mla-latent, this model has token",
        ),
    ],
)
def test_what_does_not_go_together(llama: Path, names: tuple[str, ...], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pinned(llama, *names, **settings)


@pytest.mark.parametrize("name", ["triton_int8kv", "ppl_int8kv", "int4kv", "quant_policy_8", "fp8kv_dynamic"])
def test_latents_have_a_mode_of_their_own(deepseek: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        pinned(deepseek, name)
    said, fitting = str(error.value).split("; modes that fit: ")
    assert "is for KV of layout token, this model has mla-latent" in said
    assert "triton_fp8kv" in fitting and name not in fitting
    plan = pinned(deepseek, "triton_fp8kv")
    assert [plan.pins.stored(group).layout for group in plan.model.kv_groups] == [LATENT]


def test_a_mode_for_kv_goes_with_one_for_weights(llama: Path) -> None:
    plan = pinned(llama, "triton_w8a16", "triton_int8kv")
    assert (plan.pins.quant, plan.pins.layouts) == ("online_w8a16", {"token": "token-int8"})
    plan.dry()


def test_every_layout_has_a_mode() -> None:
    pins = {layout for mode in modes() for layout in mode.layouts.values()}
    assert pins == {*FORMS, LATENT}


def test_the_commands_take_them(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*args: str) -> Any:
        with pytest.raises(SystemExit, match="0"):
            main(["plan", str(llama), "--device", "cpu", "--json", *args])
        return json.loads(capsys.readouterr().out)

    group = KVGroupSpec(name="kv", layers=(0,), kv_heads=3, key_size=48, value_size=48)
    plain, small = planned(), planned("--quant-policy", "8")
    layers = plain["budget"]["kv_token"] // (2 * 3 * 48 * 4)
    assert (plain["layouts"], small["layouts"]) == (["token"], ["token-int8-min"])
    assert small["budget"]["kv_token"] == layers * group.kv_heads * 2 * (48 + 2 * 4)
    for command in ("serve", "plan", "generate"):
        with pytest.raises(SystemExit, match="2"):
            main(
                [command, *(["-"] if command == "generate" else []), "--model_dir", str(llama), "--quant-policy", "17"]
            )
        assert "loses four times as much" in " ".join(capsys.readouterr().err.split())


def test_the_list_of_modes_shows_what_they_pin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["modes", "--device", "cpu", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["triton_int8kv"]["layouts"] == {"token": "token-int8"} and rows["triton_int8kv"]["misfit"] is None
    assert rows["triton_fp8kv"]["layouts"] == {"mla-latent": LATENT}
