"""Settings: precedence, origins, spellings, and errors that name the fix."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import (
    Config,
    Origins,
    Setting,
    child_environment,
    environment,
    find_setting,
    make_config,
    option,
    options_of,
    plugin_settings,
    read_yaml,
    resolve_config,
    resolve_model,
    settings,
    shown_settings,
    shown_value,
    without_effect,
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a plugin listens, and whom it lets in."""

    host: str = option("127.0.0.1", "Address.", aliases=("server_name",), first_page=True)
    port: int = option(8000, "Port.", aliases=("server_port",), low=0, high=65535)
    pause: float = option(1.0, "Seconds.", low=0)
    budget: int | None = option(None, "Tokens.", unit="tokens", low=1)
    cut: str | None = option(None, "How to cut.", choices=("head", "center"), unset="None")
    quiet: bool = option(False, "Say less.")
    title: tuple[str, ...] = option((), "Names.", one_word=True)
    api_keys: tuple[str, ...] = option((), "Keys.", secret=True)
    metric_gateway: str | None = option(None, "Where figures go.", login=True)
    certificate: str | None = option(None, "PEM.", variables=("SSL_CERTFILE",))

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Raises ConfigError for a port that a model cannot have; yields a warning."""
        if self.port == 1 and config.model.model_dir is not None:
            raise ConfigError(f"{origins['port']} 1 serves no model")
        if self.quiet:
            yield from without_effect(origins, ("pause",), "quiet is set")


SITE = tuple(options_of(Site, serving=True))
"""What a plugin's `register_options` returns."""


def make(**values: Any) -> Config:
    """A Config with the settings of a plugin beside core's."""
    return make_config(SITE, **values)


LMDEPLOY = {
    "session-len": "max_req_total_len",
    "max-batch-size": "running_max_req_size",
    "max-prefill-token-num": "chunked_prefill_size",
    "num-tokens-per-iter": "batch_max_tokens",
    "dtype": "data_type",
}


def test_defaults_are_those_of_the_tree() -> None:
    assert resolve_config({}, {}, {})[0] == Config()


def test_command_line_beats_environment_beats_yaml_beats_default() -> None:
    yaml = {"port": 1, "host": "yaml", "mem_fraction": 0.5}
    env = {"LLMCORE_PORT": "2", "LLMCORE_HOST": "env"}
    config, origins = resolve_config({"port": "3"}, env, yaml, extra=SITE, yaml_name="server.yaml")
    site = config.section(Site)
    assert (site.port, site.host, config.memory.mem_fraction) == (3, "env", 0.5)
    assert origins["port"] == "--port"
    assert origins["host"] == "LLMCORE_HOST"
    assert origins["mem_fraction"] == "mem_fraction in server.yaml"
    assert origins["pause"] == origins["mode"] == "default"
    assert set(origins) == {setting.name for setting in (*settings(), *plugin_settings(SITE))}


@pytest.mark.parametrize("name", ["max_total_token_num", "max-total-token-num", "--max_total-token_num"])
def test_names_take_dashes_or_underscores(name: str) -> None:
    assert make_config(**{name: "100"}).memory.max_total_token_num == 100


@pytest.mark.parametrize(("alias", "name"), LMDEPLOY.items())
def test_lmdeploys_names_are_aliases(alias: str, name: str) -> None:
    assert find_setting(alias, settings()).name == name


def test_a_name_and_its_alias_together_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--port and --server_port are the same setting"):
        make(port=1, server_port=2)


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


@pytest.mark.parametrize(("given", "meant"), [("debug", "DEBUG"), ("Info", "INFO")])
def test_a_choice_may_be_written_in_any_case(given: str, meant: str) -> None:
    assert make_config(log_level=given).reports.log_level == meant


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, r"no setting 'prot'. Did you mean port"),
        ({"api_keys": ""}, "--api_keys holds nothing"),
        ({"api_keys": " , "}, "--api_keys holds nothing"),
        ({"api_keys": None}, "--api_keys holds nothing"),
        ({"cache_max_entry_count": 0.5, "mem_fraction": 0.5}, "leave one out"),
        ({"cache_max_entry_count": 0}, "leaves no memory"),
        ({"log_level": "LOUD"}, "is not one of CRITICAL"),
        ({"port": "x"}, "--port: 'x' is not a whole number; give a whole number from 0 to 65535"),
        ({"port": 65536}, "out of range"),
        ({"port": True}, "not a whole number"),
        ({"port": None}, "is empty"),
        ({"port": "8k"}, "not a whole number"),
        ({"max_req_total_len": "1.0001k"}, "not a whole number"),
        ({"max_total_token_num": 1e400}, "not a whole number"),
        ({"mem_fraction": "nan"}, "not a number"),
        ({"mem_fraction": 1.1}, "out of range"),
        ({"mem_fraction": 0}, "leaves no memory"),
        ({"host": {"a": 1}}, "is not text"),
        ({"quiet": "perhaps"}, "true or false"),
        ({"data_type": "fp61"}, "one of bf16, f16, f32, .* Did you mean fp16"),
        ({"cut": "tail"}, "is not one of head, center"),
        ({"load_way": "DS"}, "zero_to_fp32.py"),
        ({"max_req_input_len": 10, "max_req_total_len": 10}, "lower it to 9"),
        ({"max_total_token_num": 10, "max_req_total_len": 20}, "cannot hold one request"),
        ({"chunked_prefill_size": 20, "batch_max_tokens": 10}, "above --batch_max_tokens 10"),
        ({"chunked_prefill_size": 20, "disable_chunked_prefill": True}, "contradict"),
        ({"kv_manager": "radix", "disable_dynamic_prompt_cache": True}, "contradict"),
        ({"router_token_ratio": 0.5, "length_estimator": "past_future"}, "stands for --length_estimator capped"),
        ({"kernel": ["rms_norm"]}, "form op=kernel"),
        ({"eos_id": -1}, "out of range"),
    ],
)
def test_errors_name_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


def test_an_unknown_name_in_a_file_is_found_there() -> None:
    with pytest.raises(ConfigError, match=r"^prot in server.yaml: there is no setting 'prot'. Did you mean port"):
        resolve_config({}, {}, {"prot": 1}, extra=SITE, yaml_name="server.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dynamic_prompt_cache": True}, "prefix cache is always on; --disable_dynamic_prompt_cache"),
        ({"enable-prefix-caching": True}, "prefix cache is always on"),
        ({"splitfuse_mode": True}, "--disable_chunked_prefill turns it off"),
        ({"max_total_token_num": 10, "mem_fraction": 0.5}, "--mem_fraction has no effect"),
        ({"quiet": True, "pause": 5}, "--pause has no effect: quiet is set"),
        ({"router_token_ratio": 0, "router_max_new_token_len": 5}, "--router_max_new_token_len has no effect"),
        ({"model_dir": "m.gguf", "trust_remote_code": True}, "a GGUF file carries no code"),
        ({"max_log_len": 5}, "--max_log_len has no effect: prompts"),
        ({"max_total_token_num": 10, "cache_max_entry_count": 0.5}, "--cache_max_entry_count has no effect"),
    ],
)
def test_what_has_no_effect_is_a_warning(
    values: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(**values)
    assert message in caplog.text


def test_defaults_never_warn(caplog: pytest.LogCaptureFixture) -> None:
    make(max_total_token_num=10, quiet=True, device="cpu", api_keys="k")
    assert not caplog.records


def test_a_foreign_variable_is_a_warning_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_config({}, {"LLMCORE_PROT": "1", "LLMCORE_DEBUG": "1"}, {}, extra=SITE)
    assert "LLMCORE_PROT is not a setting and has no effect. Did you mean port" in caplog.text
    assert "DEBUG" not in caplog.text


def test_the_variable_kubernetes_writes_is_explained() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        resolve_config({}, {"LLMCORE_PORT": "tcp://10.0.0.1:8000"}, {}, extra=SITE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: [", "is not YAML"),
        ("- port", "write one `name: value`"),
        ("8000: port", "write one"),
        ("prot: 1", "Did"),
        ("port: 1\nhost: x\nport: 2", "line 3: it sets again what line 1 sets; keep one of the two"),
        ("port: 1\nserver-port: 2", "are the same setting; give one of them"),
        ("frobnicate: 1", "the word before the colon is not the name of a setting"),
        ("a: &a x\nhost: *a", "line 1: anchors and aliases"),
        ("port: " + "[" * 100_000, "line 1: it is nested more than 8 levels deep"),
        ("".join(f"{' ' * i}a:\n" for i in range(200)), "nested more than 8 levels deep"),
        ("host:\n\tx: 1", r"line 2: found character '\\t' that cannot start any token; indent with spaces"),
        ("host: a\x00b", "a character that YAML does not allow"),
        ("host: x\n---\nport: 1", "is not YAML"),
        ("port: " + "9" * 5000, "is not a whole number"),
        ("port: 2024-13-45", "is not a whole number"),
        ("[1, 2]: x", "its key is not a name"),
        ("port: 'x\nhost: '", "line 1: its text goes on after this line; close its quote"),
        ("max-model-len: 8k", "max-model-len in the file is an option of vLLM; give --max_req_total_len"),
    ],
)
def test_broken_yaml(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve_config({}, {}, read_yaml(path), extra=SITE)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"host: \xff", "it is not UTF-8 text; save it as UTF-8"), (b"#" * (1 << 21), "more than 1,048,576 characters")],
)
def test_a_file_that_is_no_text_of_settings(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)


def test_aliases_that_double_take_no_time(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)))
    with pytest.raises(ConfigError, match="line 1: anchors"):
        read_yaml(path)


def test_values_of_a_file_are_read_like_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 8001\nmem_fraction: 0.5\nquiet: off\nhost: ~\nmode: [a, b]\nmodel_name: 1.0\n")
    with pytest.raises(ConfigError, match="host in the file is empty"):
        resolve_config({}, {}, read_yaml(path), extra=SITE)
    path.write_text(path.read_text().replace("host: ~\n", ""))
    config = resolve_config({}, {}, read_yaml(path), extra=SITE)[0]
    assert (config.section(Site).port, config.memory.mem_fraction, config.section(Site).quiet) == (8001, 0.5, False)
    assert (config.kernels.mode, config.model.model_name) == (("a", "b"), ("1.0",))


SECRET = "sk-Topsecret1"
"""It stands in for any key."""


@pytest.mark.parametrize(
    "content",
    [
        "api_keys: [SECRET",
        "api_keys: 'SECRET",
        "api_keys:\n\t- SECRET",
        "api_keys: *SECRET",
        "api_keys: &SECRET x",
        "api_keys: !SECRET x",
        "api_keys: !!SECRET x",
        "api_keys: SECRET: x",
        "api_keys: {SECRET: x}",
        "api_keys: [[SECRET]]",
        "api_keys: SECRET\napi_keys: SECRET",
        "api_keys: SECRET\napi-keys: SECRET",
        "api_keys: SECRET\nport: x",
        'port: "8000\napi_keys: SECRET\nhost: "',
        "port: !!str [SECRET]",
        "port: 8000\n  SECRET",
        "dtype: >\n  bf16\n  SECRET",
        "port: |\n  8000\n  api_keys: SECRET",
        "dtype: |\n  bf16\n  api_keys: SECRET",
        "tokenizer_mode: |\n  a\n  api_keys: SECRET",
        "api_keys SECRET",
        "api_keys SECRET: x",
        "api_keys SECRET\nport: 1",
        "api_keys=SECRET",
        "api_keys:SECRET",
        "api_keys:SECRET: x",
        "api_keys:\nSECRET: x",
        "SECRET: api_keys",
        "- SECRET",
        "SECRET",
        'api_keys: "\\SECRET"',
        "api_keys: SECRET\x00",
        "api_keys: %SECRET\n%SECRET",
        "api_keys: |SECRET",
        "? SECRET\n: x\n? [SECRET]\n: x",
        "metric_gateway: [http://u:SECRET@g:9091]",
        "metric_gateway: {http://u:SECRET@g:9091: x}",
        "proxy_url: http://u:SECRET@h",
        "probe_token: [[SECRET]]",
        "probe_count: SECRET",
        "api_key: SECRET",
    ],
)
def test_no_error_about_a_file_shows_a_key(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content.replace("SECRET", SECRET), encoding="utf-8")
    extra = [*SITE, OptionSpec(name="probe_token", secret=True), OptionSpec(name="probe_count", type=int, secret=True)]
    with pytest.raises(ConfigError) as error:
        resolve_config({}, {}, read_yaml(path), extra=extra, yaml_name=str(path))
    told = "".join(traceback.format_exception(error.value)) + caplog.text  # as LLMCORE_DEBUG=1 shows it
    told = told.partition("tests/core/config/test_config.py")[0] + str(error.value)
    assert "Topsecret" not in told.casefold().replace("topsecret", "Topsecret"), told
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("values", "env"),
    [
        ({}, {"LLMCORE_API_KEY": SECRET}),
        ({}, {"LLMCORE_PROBE_COUNT": SECRET}),
        ({"api_keys": {SECRET: 1}}, {}),
        ({"api_keys": [[SECRET]]}, {}),
        ({"api_keys": [b"x" + SECRET.encode()]}, {}),
        ({"probe_count": SECRET}, {}),
        ({"probe_kind": SECRET}, {}),
        ({"metric_gateway": [[f"http://u:{SECRET}@g"]]}, {}),
    ],
)
def test_no_error_about_another_source_shows_a_key(values: dict[str, Any], env: dict[str, str]) -> None:
    extra = [
        *SITE,
        OptionSpec(name="probe_count", type=int, secret=True),
        OptionSpec(name="probe_kind", choices=("a", "b"), secret=True),
    ]
    with pytest.raises(ConfigError) as error:
        resolve_config(values, env, {}, extra=extra)
    assert SECRET not in str(error.value)


def test_what_a_plugins_secret_option_holds_is_not_shown() -> None:
    spec = OptionSpec(name="probe_token", secret=True)
    (setting,) = plugin_settings([spec])
    config = make_config([spec], probe_token=SECRET)
    assert config.plugin_options == {"probe_token": SECRET}
    assert shown_value(config, setting) == "(hidden)"


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("host: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match=r"tags \(!\) are not read"):
        read_yaml(path)


def test_a_missing_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_plugins_bring_options() -> None:
    spec = OptionSpec(name="probe-rate", type=float, default=0.5, summary="How often to probe.")
    config, origins = resolve_config({"probe_rate": "0.25"}, {}, {}, extra=[spec])
    assert config.plugin_options == {"probe_rate": 0.25}
    assert origins["probe_rate"] == "--probe_rate"
    assert resolve_config({}, {}, {}, extra=[spec])[0].plugin_options == {"probe_rate": 0.5}


@pytest.mark.parametrize("name", ["mem_fraction", "max-batch-size"])
def test_a_plugin_cannot_take_an_options_name(name: str) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        plugin_settings([OptionSpec(name=name)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "--model_dir PATH"),
        (lambda root: root / "nowhere", "does not exist"),
        (lambda root: root, "is empty"),
        (lambda root: _touch(root / "weights.bin"), "or a .gguf file"),
    ],
)
def test_model_directory_errors(make: Any, message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve_model(None if path is None else str(path))


def test_a_name_from_the_hub_says_how_to_fetch_it() -> None:
    with pytest.raises(ConfigError, match="hf download org/model --local-dir model"):
        resolve_model("org/model")


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_every_setting_is_described_and_reads_its_own_default(setting: Setting) -> None:
    assert setting.help.endswith(".")
    assert setting.parse(setting.default, "here") == setting.default


def _touch(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(
    ("name", "ratio", "meant"),
    [
        (None, None, "past_future"),
        ("capped", None, "capped"),
        (None, 0.0, "conservative"),
        (None, 0.5, "capped"),
        ("capped", 0.5, "capped"),
    ],
)
def test_ratio_and_estimator_agree(name: str | None, ratio: float | None, meant: str) -> None:
    config = make_config(length_estimator=name, router_token_ratio=ratio)
    assert config.scheduling.estimator == meant


@pytest.mark.parametrize(("name", "ratio"), [("past_future", 0.5), ("capped", 0.0), ("conservative", 0.5)])
def test_ratio_and_estimator_that_clash_are_an_error(name: str, ratio: float) -> None:
    with pytest.raises(ConfigError, match="--router_token_ratio"):
        make_config(length_estimator=name, router_token_ratio=ratio)


def test_a_childs_threads_spin_briefly_unless_the_operator_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert child_environment()["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in child_environment()


def test_a_childs_threads_share_their_memory_unless_the_operator_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert child_environment()["MALLOC_ARENA_MAX"] == "1"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert child_environment()["MALLOC_ARENA_MAX"] == "4"
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.arena_max=4")
    assert "MALLOC_ARENA_MAX" not in child_environment()


def test_a_childs_threads_cache_no_memory_where_that_is_asked_unless_the_operator_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "GLIBC_TUNABLES" not in child_environment()
    assert child_environment(thread_caches=False)["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=0"
    for given, wanted in (("a.b=1", "a.b=1:glibc.malloc.tcache_count=0"), (own := "glibc.malloc.tcache_count=3", own)):
        monkeypatch.setenv("GLIBC_TUNABLES", given)
        assert child_environment(thread_caches=False)["GLIBC_TUNABLES"] == wanted


def test_a_child_tokenizes_in_the_thread_that_asks_unless_the_operator_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert child_environment()["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert child_environment()["TOKENIZERS_PARALLELISM"] == "true"


def test_a_variable_of_another_name_counts_less_than_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERTFILE", "theirs.pem")
    config, origins = resolve_config({}, environment(plugin_settings(SITE)), {}, extra=SITE)
    assert (config.section(Site).certificate, origins["certificate"]) == ("theirs.pem", "SSL_CERTFILE")
    monkeypatch.setenv("LLMCORE_CERTIFICATE", "ours.pem")
    config, origins = resolve_config({}, environment(plugin_settings(SITE)), {}, extra=SITE)
    assert (config.section(Site).certificate, origins["certificate"]) == ("ours.pem", "LLMCORE_CERTIFICATE")


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


def test_a_section_may_have_the_name_of_one_of_core_or_of_another_plugin() -> None:
    classes = []
    for field_name in ("colour", "size"):
        fields = [(field_name, str, option("any", "Help."))]
        classes.append(make_dataclass("Model", fields, frozen=True, kw_only=True))
        classes[-1].__module__ = f"plugin_{field_name}"
    extra = [spec for one in classes for spec in options_of(one)]
    config = make_config(extra, colour="red", size="large", data_type="f32")
    assert [config.section(one) for one in classes] == [classes[0](colour="red"), classes[1](size="large")]
    assert config.model.data_type == "f32"
    assert len({setting.group for setting in plugin_settings(extra)}) == 2


def test_a_section_has_the_values_of_its_fields() -> None:
    config = make(server_port="9", budget="32k", cut="None", title="a,b", api_keys=["k"])
    site = config.section(Site)
    assert site == Site(port=9, budget=32_000, title=("a", "b"), api_keys=("k",))
    assert config.section(Site) is site
    assert Config().section(Site) == Site()
    assert make(cut="head").section(Site).cut == "head"


def test_a_section_checks_its_values_beside_those_of_core(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="--port 1 serves no model"):
        make(port=1, model_dir="m")
    with pytest.raises(ConfigError, match="port in server 1 serves no model"):
        resolve_config({"model_dir": "m"}, {}, {"port": 1}, extra=SITE, yaml_name="server")
    assert not caplog.records
    assert make(port=1).section(Site).port == 1


def test_what_a_section_hides_is_not_shown() -> None:
    config = make(api_keys=["k"], metric_gateway="http://user:word@g:9091", port=3)
    known = plugin_settings(SITE)
    shown = shown_settings(config, known)
    assert (shown["api_keys"], shown["port"]) == ("(hidden)", 3)
    assert shown["metric_gateway"] == "http://(hidden)@g:9091"
    assert set(shown) == {setting.name for setting in (*settings(), *known)}
    unknown = shown_settings(config, ())
    assert all(unknown[setting.name] == "(hidden)" for setting in known), "nothing says which of them are secret"


def test_the_settings_of_a_section_are_listed_under_its_name() -> None:
    assert {setting.group for setting in plugin_settings(SITE)} == {f"{__name__}.Site"}
    (plain,) = plugin_settings([OptionSpec(name="probe")])
    assert plain.group == "plugin_options"


@pytest.mark.parametrize("spec", [OptionSpec(name="server_port"), OptionSpec(name="probe", aliases=("host",))])
def test_two_plugins_cannot_have_one_name_or_alias(spec: OptionSpec) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        plugin_settings([*SITE, spec])


def test_a_config_that_was_sent_has_its_sections() -> None:
    config = make(title="a,b", port=5)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config)
    assert sent == config and sent.section(Site) == config.section(Site)
