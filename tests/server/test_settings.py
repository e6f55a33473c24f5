"""The settings of the server: what contradicts, what has no effect, and what no error shows."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api import ConfigError
from llmcore.config import Config, environment, make_config, options_of, resolve_config, settings
from llmcore.registry.loader import configure
from llmcore_server.settings import SECTIONS, Access, Server, is_loopback

OPTIONS = tuple(spec for section in SECTIONS for spec in options_of(section, serving=True))
BROUGHT = [setting for setting in settings(OPTIONS) if setting not in settings()]
SECRET = "sk-Topsecret1"


def make(**values: Any) -> Config:
    """A Config with the settings of the server."""
    return make_config(OPTIONS, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_keys": "schlüssel"}, "holds a key that no header can carry"),
        ({"api_keys": "one two"}, "holds a key that no header can carry"),
        ({"allow_credentials": True, "allow_origins": "*"}, "list origins"),
        ({"allowed_hosts": "https://llm.example.com"}, "without scheme or port"),
        ({"allowed_hosts": ["llm.example.com", "llm:80"]}, "--allowed_hosts holds 'llm:80'"),
        ({"ssl": True}, "--ssl needs --ssl_certfile"),
        ({"ssl": True, "ssl_certfile": "x"}, "--ssl needs --ssl_keyfile"),
        ({"metric_gateway": "g:9091", "grouping_key": "a"}, "needs the form key=value"),
        ({"metric_gateway": "g:9091", "grouping_key": "job=b"}, "--job_name"),
        ({"metric_gateway": "g:9091", "grouping_key": ["a=b", "a=c"]}, "names a key twice"),
        ({"admin_host": "0.0.0.0"}, "there are no --api_keys"),
        ({"zmq_mode": "ipc:///var"}, "one of ipc:///tmp/, tcp://"),
        ({"port": 65536}, "whole number from 0 to 65535"),
    ],
)
def test_errors_name_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"disable_log_stats": True, "log_stats_interval": 5}, "--log_stats_interval has no effect"),
        ({"api_keys": "k", "host": "0.0.0.0"}, "API keys travel as they are"),
        ({"api_keys": "k", "admin_host": "0.0.0.0"}, "--admin_host 0.0.0.0: API keys travel as they are"),
        ({"disable_admin": True, "admin_port": 5}, "--admin_port has no effect: disable_admin is set"),
        ({"restart_limit": 5}, "--restart_limit has no effect: without health_monitor"),
        ({"allow_headers": ["x"]}, "--allow_headers has no effect: allow_origins"),
        ({"ssl_keyfile": "key.pem"}, "--ssl_keyfile has no effect: ssl is not set"),
        ({"push_interval": 5}, "--push_interval has no effect: metric_gateway"),
        ({"max_log_len": 5}, "--max_log_len has no effect: prompts are logged with log_level DEBUG only"),
    ],
)
def test_what_has_no_effect_or_is_a_risk_is_a_warning(
    values: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(**values)
    assert message in caplog.text


def test_defaults_never_warn(caplog: pytest.LogCaptureFixture) -> None:
    config = make(api_keys="k", disable_log_stats=True)
    assert config.section(Server) == Server(disable_log_stats=True)
    assert not caplog.records


@pytest.mark.parametrize("key", [f"schlüssel-{SECRET}", f"{SECRET} {SECRET}"])
def test_no_error_shows_a_key(key: str) -> None:
    for values, env in (({"api_keys": [key]}, {}), ({}, {"LLMCORE_API_KEYS": key})):
        with pytest.raises(ConfigError) as error:
            resolve_config(values, env, {}, extra=OPTIONS)
        assert "api_keys" in str(error.value).lower() and SECRET not in str(error.value)


def test_lmdeploys_variables_name_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERTFILE", "theirs.pem")
    monkeypatch.setenv("SSL_KEYFILE", "key.pem")
    monkeypatch.setenv("LLMCORE_SSL_CERTFILE", "ours.pem")
    given = environment(settings(OPTIONS))
    config, origins = resolve_config({"ssl": "true"}, given, {}, extra=OPTIONS)
    access = config.section(Access)
    assert (access.ssl_certfile, access.ssl_keyfile) == ("ours.pem", "key.pem")
    assert origins["ssl_keyfile"] == "SSL_KEYFILE"


@pytest.mark.parametrize("name", ["server-name", "server_port"])
def test_lmdeploys_names_are_aliases(name: str) -> None:
    assert make(**{name: "0"}) == make(**{name.removeprefix("server")[1:].replace("name", "host"): "0"})


def test_the_servers_plugin_brings_every_section() -> None:
    config, _ = configure(port=7, ssl=True, ssl_certfile="c", ssl_keyfile="k")
    assert config.section(Server).port == 7 and config.section(Access).ssl_keyfile == "k"
    assert {setting.name for setting in BROUGHT} <= set(config.plugin_options)


@pytest.mark.parametrize("setting", BROUGHT, ids=lambda setting: setting.name)
def test_every_setting_is_described_and_reads_its_own_default(setting: Any) -> None:
    assert setting.summary.endswith(".") and setting.serving
    assert setting.parse(setting.default, "here") == setting.default


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("Localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_addresses_that_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
