"""Every option that LightLLM's and LMDeploy's documents name works, warns or says why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import RETIRED, make_config, settings
from llmcore.config.foreign import absent_settings
from llmcore.config.setting import canonical, names
from llmcore.registry.loader import build_registry

ROOT = Path(__file__).resolve().parent.parent
DATA = json.loads((ROOT / "tests" / "data" / "seed_options.json").read_text())
OPTIONS = {canonical(name): default for document in DATA["options"].values() for name, default in document.items()}
BROUGHT = [spec for spec, _ in build_registry(make_config()).specs(OptionSpec)]
PRESENT = settings(BROUGHT)
ABSENT = {setting.name: setting for setting in absent_settings(PRESENT)}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_it_is_a_setting_or_says_why_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert (name in names(PRESENT)) + (name in RETIRED) + (name in ABSENT) == 1
    page = (ROOT / "docs" / "options.md").read_text()
    assert f"`--{name}`" in page or f"`--{name.replace('_', '-')}`" in page
    if name in RETIRED:
        make_config(**{name: True})
        assert f"--{name} has no effect" in caplog.text


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_is_absent_is_an_error_or_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    value: Any = True if ABSENT[name].type is bool else "something"
    if None in ABSENT[name].idle:
        make_config(**{name: value})
        assert f"--{name} has no effect: " in caplog.text
    else:
        with pytest.raises(ConfigError, match=rf"^--{name}.* is not available in this version: "):
            make_config(**{name: value})


@pytest.mark.parametrize("name", sorted(name for name in ABSENT if ABSENT[name].type is bool))
def test_an_absent_flag_may_be_false(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make_config(**{name: False})
    assert not caplog.records


def test_all_that_is_absent_is_in_a_document() -> None:
    assert set(ABSENT) <= set(OPTIONS)


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 1, "dp": "1", "nnodes": 1, "node_rank": 0, "run_mode": "normal"},
        {"backend": "pytorch", "max-prefill-iters": 1},
        {"dtype": "auto", "num-tokens-per-iter": 0},
    ],
)
def test_what_asks_for_what_happens_anyway_is_taken(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(**values)
    assert not caplog.records
    assert config == make_config()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nnodes": 2}, "--nnodes 2 is not available in this version: a server runs on one host"),
        ({"tp": 4, "dp": 3}, "--tp 4 processes cannot be divided among --dp 3 engines; .* dp can be 1, 2, 4"),
        ({"run-mode": "prefill"}, "--run_mode prefill is not available|--run-mode prefill is not available"),
        ({"adapters": ["a=b"]}, "LoRA"),
        ({"max_prefill_iters": 2}, "chunked_prefill_size"),
        ({"cache_chunk_size": -1}, "never an option"),
        ({"download_dir": "/tmp"}, "pip install plugin-hub"),
    ],
)
def test_errors_say_what_there_is(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**values)


def test_the_other_backend_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_config(backend="turbomind")
    assert "--backend turbomind has no effect: there is one engine" in caplog.text


def test_a_plugin_may_bring_one() -> None:
    spec = OptionSpec(name="adapters", type=str, multiple=True, default=(), summary="LoRA adapters.")
    assert make_config([spec], adapters=["a=b"]).plugin_options == {"adapters": ("a=b",)}


def test_every_mode_is_listed() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert [name for name in DATA["modes"] if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("alias", "name", "group"),
    [
        ("session-len", "max_req_total_len", "memory"),
        ("max-batch-size", "running_max_req_size", "memory"),
        ("num-tokens-per-iter", "batch_max_tokens", "scheduling"),
        ("max-prefill-token-num", "chunked_prefill_size", "scheduling"),
        ("cache-block-seq-len", "cache_block_seq_len", "memory"),
    ],
)
def test_lmdeploys_names(alias: str, name: str, group: str) -> None:
    assert getattr(getattr(make_config(**{alias: 64}), group), name) == 64
