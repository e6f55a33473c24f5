"""Settings that contradict each other or have no effect, and models that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.config import (
    make_config,
    resolve_config,
    resolve_model,
)
from site_settings import SITE, Site, make


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, r"no setting 'prot'. Did you mean port"),
        ({"api_keys": ""}, "--api_keys holds nothing"),
        ({"api_keys": " , "}, "--api_keys holds nothing"),
        ({"api_keys": None}, "--api_keys holds nothing"),
        ({"cache_max_entry_count": 0.5, "mem_fraction": 0.5}, "leave one out"),
        ({"cache_max_entry_count": 0}, "leaves no memory"),
        ({"tokenizer_mode": "LOUD"}, "is not one of fast"),
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
        ({"max_total_token_num": 10, "cache_max_entry_count": 0.5}, "--cache_max_entry_count has no effect"),
        ({"dp": 2, "tp": 2, "rank_timeout": 5}, "--rank_timeout has no effect: an engine has one process"),
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root, "is empty"),
        (lambda root: _touch(root / "weights.bin"), "or a .gguf file"),
    ],
)
def test_model_directory_errors(make: Any, message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(path))


def _touch(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(("name", "ratio"), [("past_future", 0.5), ("capped", 0.0), ("conservative", 0.5)])
def test_ratio_and_estimator_that_clash_are_an_error(name: str, ratio: float) -> None:
    with pytest.raises(ConfigError, match="--router_token_ratio"):
        make_config(length_estimator=name, router_token_ratio=ratio)


def test_a_section_checks_its_values_beside_those_of_core(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="--port 1 serves no model"):
        make(port=1, model_dir="m")
    with pytest.raises(ConfigError, match="port in server 1 serves no model"):
        resolve_config({"model_dir": "m"}, {}, {"port": 1}, extra=SITE, yaml_name="server")
    assert not caplog.records
    assert make(port=1).section(Site).port == 1
