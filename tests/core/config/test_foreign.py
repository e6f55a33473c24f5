"""Options of vLLM and SGLang: wherever one is given, the error names what there is here."""

from __future__ import annotations

import re

import click
import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.cli import main, root
from llmcore.cli.group import commands
from llmcore.config import RETIRED, make_config, resolve_config, settings
from llmcore.config.foreign import FOREIGN, SHORT, absent_settings
from llmcore.config.setting import canonical, names
from llmcore.registry.loader import build_registry

PRESENT = settings(spec for spec, _ in build_registry(make_config()).specs(OptionSpec))
OURS = {**names(PRESENT), **names(absent_settings(PRESENT))}

COMMON = {
    "--max-model-len": "max_req_total_len",
    "--context-length": "max_req_total_len",
    "--tensor-parallel-size": "tp",
    "--tp-size": "tp",
    "--data-parallel-size": "dp",
    "--gpu-memory-utilization": "mem_fraction",
    "--mem-fraction-static": "mem_fraction",
    "--served-model-name": "model_name",
    "--max-num-seqs": "running_max_req_size",
    "--max-running-requests": "running_max_req_size",
    "--max-num-batched-tokens": "batch_max_tokens",
    "--max-total-tokens": "max_total_token_num",
    "--enforce-eager": "disable_cudagraph",
    "--disable-cuda-graph": "disable_cudagraph",
    "--cuda-graph-max-bs": "graph_max_batch_size",
    "--disable-radix-cache": "disable_dynamic_prompt_cache",
    "--block-size": "cache_block_seq_len",
    "--page-size": "cache_block_seq_len",
    "--model-path": "model_dir",
    "--model": "model_dir",
    "--api-key": "api_keys",
    "--kv-cache-dtype": "data_type",
    "--allowed-origins": "allow_origins",
    "--uvicorn-log-level": "log_level",
    "-tp": "tp",
}


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_hint_names_only_what_there_is(name: str) -> None:
    _, instead = FOREIGN[name]
    assert name not in OURS and name not in RETIRED
    for option in re.findall(r"--(\w+)", re.sub("`.*?`", "", instead)):
        assert option in OURS, option
    for command in re.findall(r"`llmcore (\w+)", instead):
        assert command in commands(click.Context(root))


def test_short_spellings_are_known_options() -> None:
    assert set(SHORT.values()) <= set(FOREIGN)


@pytest.mark.parametrize(("flag", "ours"), COMMON.items())
def test_the_command_line_names_ours(flag: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "config show"):
        said = error_of(capsys, *command.split(), "model", flag, "sk-value")
        assert f"error: {flag} is an option of " in said and f"--{ours}" in said
        assert "sk-value" not in said and len(said.splitlines()) == 1


def test_so_do_variables_files_and_arguments() -> None:
    for values, env, yaml in (
        ({"max_model_len": 8}, {}, {}),
        ({}, {"LLMCORE_MAX_MODEL_LEN": "8"}, {}),
        ({}, {}, {"max-model-len": "8"}),
    ):
        with pytest.raises(ConfigError, match="is an option of vLLM; give --max_req_total_len"):
            resolve_config(values, env, yaml)


@pytest.mark.parametrize("name", ["host", "port", "dtype", "tokenizer-mode", "device", "trust-remote-code"])
def test_what_is_the_same_stays(name: str) -> None:
    assert canonical(name) in OURS and canonical(name) not in FOREIGN


def test_a_plugin_may_bring_one() -> None:
    spec = OptionSpec(name="max_model_len", type=int, default=1)
    assert make_config([spec], max_model_len=2).plugin_options == {"max_model_len": 2}


def test_a_command_may_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--seed is an option" not in error_of(capsys, "generate", "/none", "--seed", "1", "--model_dir", "/none")
