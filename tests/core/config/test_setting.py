"""One setting: its names, how its value is read from text, and options that plugins bring."""

from __future__ import annotations

import math
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import (
    Setting,
    make_config,
    options_of,
    resolve_config,
    settings,
    value_of,
)
from llmcore.config.setting import GROUPS, canonical, names
from site_settings import SECRET, SITE, Site, make

LMDEPLOY = {
    "session-len": "max_req_total_len",
    "max-batch-size": "running_max_req_size",
    "max-prefill-token-num": "chunked_prefill_size",
    "num-tokens-per-iter": "batch_max_tokens",
    "dtype": "data_type",
}


@pytest.mark.parametrize("name", ["max_total_token_num", "max-total-token-num", "--max_total-token_num"])
def test_names_take_dashes_or_underscores(name: str) -> None:
    assert make_config(**{name: "100"}).memory.max_total_token_num == 100


@pytest.mark.parametrize(("alias", "name"), LMDEPLOY.items())
def test_lmdeploys_names_are_aliases(alias: str, name: str) -> None:
    assert names(settings())[canonical(alias)].name == name


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("2M", 2 << 20)])
def test_counts_are_written_for_people(text: str, tokens: int) -> None:
    assert make_config(max_req_total_len=text).memory.max_req_total_len == tokens


@pytest.mark.parametrize(
    "text", ["1_0", "+5", " 5", "5\n", "٥", "0x5", "5.0", "1e3", "", "--5", "9" * 5000, "1_0k", "+1k"]
)
def test_whole_numbers_are_plain_digits(text: str) -> None:
    for name in ("running_max_req_size", "max_req_total_len"):  # without a unit, and with one
        with pytest.raises(ConfigError, match="is not a whole number"):
            make_config(**{name: text})


@pytest.mark.parametrize("text", ["0_.5", "nan", "inf", "-inf", "Infinity", "+0.5", "0.5 ", "٠.٥", "1e400", ".", "e5"])
def test_numbers_are_plain_and_finite(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        make(pause=text)
    with pytest.raises(ConfigError, match="is not a number"):
        make(pause=math.inf)


@pytest.mark.parametrize(("text", "number"), [("5", 5), (".5", 0.5), ("5.", 5), ("1e-3", 0.001), ("2.5E1", 25)])
def test_numbers_as_they_are_written(text: str, number: float) -> None:
    assert make(pause=text).section(Site).pause == number


@pytest.mark.parametrize("raw", ["2,3", ["2", "3"], [2, 3], (2, 3), "2, 3"])
def test_several_values(raw: Any) -> None:
    assert make_config(eos_id=raw).model.eos_id == (2, 3)


@pytest.mark.parametrize(("given", "meant"), [("SLOW", "slow"), ("Fast", "fast")])
def test_a_choice_may_be_written_in_any_case(given: str, meant: str) -> None:
    assert make_config(tokenizer_mode=given).model.tokenizer_mode == meant


def test_what_a_plugins_secret_option_holds_is_not_shown() -> None:
    spec = OptionSpec(name="probe_token", secret=True)
    setting = settings([spec])[-1]
    config = make_config([spec], probe_token=SECRET)
    assert config.plugin_options == {"probe_token": SECRET}
    assert setting.shown(value_of(config, setting)) == "(hidden)"


def test_plugins_bring_options() -> None:
    spec = OptionSpec(name="probe-rate", type=float, default=0.5, summary="How often to probe.")
    config, origins = resolve_config({"probe_rate": "0.25"}, {}, {}, extra=[spec])
    assert config.plugin_options == {"probe_rate": 0.25}
    assert origins["probe_rate"] == "--probe_rate"
    assert resolve_config({}, {}, {}, extra=[spec])[0].plugin_options == {"probe_rate": 0.5}


@pytest.mark.parametrize("name", ["mem_fraction", "max-batch-size"])
def test_a_plugin_cannot_take_an_options_name(name: str) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        settings([OptionSpec(name=name)])


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_every_setting_is_described_and_reads_its_own_default(setting: Setting) -> None:
    assert setting.summary.endswith(".")
    assert setting.parse(setting.default, "here") == setting.default


def test_the_fields_of_a_dataclass_are_options() -> None:
    specs = {spec.name: spec for spec in SITE}
    assert list(specs) == list(Site.__dataclass_fields__)
    assert all(spec.section is Site and spec.serving for spec in SITE)
    port = specs["port"]
    assert (port.type, port.default, port.summary) == (int, 8000, "Port.")
    assert (port.aliases, port.low, port.high, port.first_page) == (("server_port",), 0, 65535, False)
    assert specs["host"].first_page and specs["api_keys"].secret and specs["metric_gateway"].login
    assert (specs["budget"].type, specs["budget"].unit, specs["cut"].unset) == (int, "tokens", "None")
    assert (specs["title"].type, specs["title"].multiple, specs["title"].one_word) == (str, True, True)
    assert specs["certificate"].variables == ("SSL_CERTFILE",)
    assert not any(spec.serving for spec in options_of(Site))


def test_the_settings_of_a_section_are_listed_under_its_name() -> None:
    assert {setting.group for setting in settings(SITE)} - set(GROUPS) == {"site_settings.Site"}
    plain = settings([OptionSpec(name="probe")])[-1]
    assert plain.group == "plugin_options"


@pytest.mark.parametrize("spec", [OptionSpec(name="server_port"), OptionSpec(name="probe", aliases=("host",))])
def test_two_plugins_cannot_have_one_name_or_alias(spec: OptionSpec) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        settings([*SITE, spec])
