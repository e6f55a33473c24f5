"""The YAML file of settings: what is refused, and that no error shows a key."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import (
    read_yaml,
    resolve_config,
)
from site_settings import SECRET, SITE, Site


def test_an_unknown_name_in_a_file_is_found_there() -> None:
    with pytest.raises(ConfigError, match=r"^prot in server.yaml: there is no setting 'prot'. Did you mean port"):
        resolve_config({}, {}, {"prot": 1}, extra=SITE, yaml_name="server.yaml")


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
    told = told.partition("tests/core/config/test_yaml_file.py")[0] + str(error.value)
    assert "Topsecret" not in told.casefold().replace("topsecret", "Topsecret"), told
    assert len(str(error.value)) < 400


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("host: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match=r"tags \(!\) are not read"):
        read_yaml(path)


def test_a_missing_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")
