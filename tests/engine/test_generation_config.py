from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.engine.generation import describe, sampling_defaults
from llmcore.errors import ConfigError

OWN = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}


def test_the_models_own() -> None:
    assert sampling_defaults("auto", OWN) == OWN
    text = "temperature 0.6, top_k 20 (the model's generation_config.json); the rest as each API says"
    assert describe("auto", OWN) == text


def test_without_sampling_the_filters_mean_nothing(tmp_path: Path) -> None:
    greedy = {**OWN, "do_sample": False, "repetition_penalty": 1.1}
    left = {"temperature": 0.0, "repetition_penalty": 1.1, "do_sample": False, "eos_token_id": [1, 2]}
    assert sampling_defaults("auto", greedy) == left
    assert describe("auto", left).startswith("temperature 0, repetition_penalty 1.1 (the model's")
    (tmp_path / "g.json").write_text('{"do_sample": false, "top_p": 0.5}')
    assert sampling_defaults(str(tmp_path / "g.json"), OWN) == {"do_sample": False, "temperature": 0.0}


def test_none_keeps_what_ends_an_answer() -> None:
    assert sampling_defaults("none", OWN) == {"eos_token_id": [1, 2]}
    assert describe("none", {"eos_token_id": [1, 2]}).startswith("as each API says")


@pytest.mark.parametrize("name", ["", "generation_config.json"])
def test_another_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    choice = str(tmp_path / name)
    assert sampling_defaults(choice, OWN) == {"temperature": 1}
    assert describe(choice, {"temperature": 1}) == f"temperature 1 ({choice}); the rest as each API says"


def test_nothing_is_said_plainly() -> None:
    assert describe("auto", {}) == "as each API says; the model's generation_config.json sets nothing"


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_a_file_that_is_none(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"--generation_config .*give auto, none, or"):
        sampling_defaults(str(path), OWN)
