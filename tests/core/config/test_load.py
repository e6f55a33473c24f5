"""Sources of settings: which one wins, where a value comes from, and what a child process gets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import (
    child_environment,
    environment,
    hide_private,
    make_config,
    resolve_config,
    settings,
    shown_settings,
    without_private,
)
from site_settings import SECRET, SITE, Site, make


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
    assert set(origins) == {setting.name for setting in settings(SITE)}


def test_a_name_and_its_alias_together_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--port and --server_port are the same setting"):
        make(port=1, server_port=2)


def test_a_foreign_variable_is_a_warning_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_config({}, {"LLMCORE_PROT": "1", "LLMCORE_DEBUG": "1"}, {}, extra=SITE)
    assert "LLMCORE_PROT is not a setting and has no effect. Did you mean port" in caplog.text
    assert "DEBUG" not in caplog.text


def test_the_variable_kubernetes_writes_is_explained() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        resolve_config({}, {"LLMCORE_PORT": "tcp://10.0.0.1:8000"}, {}, extra=SITE)


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
    config, origins = resolve_config({}, environment(settings(SITE)), {}, extra=SITE)
    assert (config.section(Site).certificate, origins["certificate"]) == ("theirs.pem", "SSL_CERTFILE")
    monkeypatch.setenv("LLMCORE_CERTIFICATE", "ours.pem")
    config, origins = resolve_config({}, environment(settings(SITE)), {}, extra=SITE)
    assert (config.section(Site).certificate, origins["certificate"]) == ("ours.pem", "LLMCORE_CERTIFICATE")


def test_what_a_section_hides_is_not_shown() -> None:
    config = make(api_keys=["k"], metric_gateway="http://user:word@g:9091", port=3)
    known = settings(SITE)
    shown = shown_settings(config, known)
    assert (shown["api_keys"], shown["port"]) == ("(hidden)", 3)
    assert shown["metric_gateway"] == "http://(hidden)@g:9091"
    assert set(shown) == {setting.name for setting in known}
    unknown = shown_settings(config, settings())
    brought = [setting.name for setting in known if setting not in settings()]
    assert brought and all(unknown[name] == "(hidden)" for name in brought), "nothing says which of them are secret"


def test_a_private_setting_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [setting for setting in settings(SITE) if setting.name in ("token", "certificate")]
    for variable in ("SITE_TOKEN", "LLMCORE_TOKEN", "SSL_CERTFILE"):
        monkeypatch.setenv(variable, SECRET)
    assert environment(known)["SSL_CERTFILE"] == SECRET
    hide_private(known)
    assert {"SITE_TOKEN", "LLMCORE_TOKEN", "SSL_CERTFILE"} & {*child_environment()} == {"SSL_CERTFILE"}
    config = make(token=SECRET, certificate="cert")
    assert SECRET in str(config.plugin_options)
    assert without_private(config, known).plugin_options == {**config.plugin_options, "token": None}


def test_engines_without_tp_have_one_process_each() -> None:
    assert (make_config(dp=3).model.tp, make_config(dp=3).model.ranks) == (3, 1)
    assert make_config(dp=2, tp=4).model.ranks == 2
    _, origins = resolve_config({"dp": "2"}, {}, {})
    assert origins["tp"] == "--dp"
