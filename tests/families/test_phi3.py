"""Phi3ForCausalLM against transformers: stacked checkpoints, windows, heads that turn in part, longrope."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.engine.llm import LLM
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers, oracle, small_model
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer

FILE = Path(__file__).parents[2] / "contrib_models" / "phi3.py"
ARCHITECTURE = "Phi3ForCausalLM"


def partial(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}}


CASES: dict[str, dict[str, Any]] = {
    "every head its own": {"num_key_value_heads": None},
    "window": {"sliding_window": 8},
    "window longer than any prompt": {"sliding_window": 200},
    "three quarters of a head turn, tied": {"tie_word_embeddings": True, "num_attention_heads": 6, **partial(0.75)},
    "half a head turns, one KV head, window": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 60,
        "head_dim": 12,
        "sliding_window": 13,
        **partial(0.5),
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_phi3(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 8, 30, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3, sliding_window=6)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})[1]


def test_what_a_config_leaves_out() -> None:
    config = read(max_position_embeddings=None, partial_rotary_factor=0.75)
    assert (config.max_position, config.eps, config.window, config.rope.rotated) == (4096, 1e-5, None, 6)
    assert config.kv_groups[0].reach == "all"
    assert read(sliding_window=2047).kv_groups[0].reach == "window:2047"


def longrope(pairs: int, original: int, **more: Any) -> dict[str, Any]:
    """Factors as drawn, and what a config with them says of lengths."""
    draw = random.Random(pairs * original)
    short, long = ([round(draw.uniform(low, high), 3) for _ in range(pairs)] for low, high in ((1, 1.5), (2, 12)))
    given = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long, **more}
    return {"original_max_position_embeddings": original, "rope_parameters": given}


LONG: dict[str, dict[str, Any]] = {
    "as Phi-3.5 mini": {"num_key_value_heads": None, "sliding_window": 200, **longrope(4, 16)},
    "as Phi-4 mini, three quarters of a head turn": {
        "hidden_size": 96,
        "head_dim": 16,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
        **longrope(6, 16, partial_rotary_factor=0.75),
    },
    "its own attention factor": longrope(4, 16, attention_factor=1.7),
}


@pytest.mark.parametrize("overrides", LONG.values(), ids=LONG)
def test_longrope_on_both_sides_of_the_original_length(overrides: dict[str, Any]) -> None:
    # transformers chooses by each prompt: these are all on one side, with their answers
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 5, 10), new=6, longest_request=16, **overrides)
    assert_family_matches_transformers(ARCHITECTURE, prompts=(17, 40, 55), new=6, **overrides)


def test_a_server_says_which_factors_it_took_and_why(tmp_path: Path) -> None:
    theirs = small_model(ARCHITECTURE, bos_token_id=1, eos_token_id=2, **longrope(4, 16))
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompt = [7, 30, 5, 9, 21]
    settings: dict[str, Any] = {"device": "cpu", "data_type": "fp32", "max_total_token_num": 100}

    def serve(**more: Any) -> tuple[tuple[int, ...], str]:
        with LLM(tmp_path, **settings, **more) as llm:
            [answer] = llm.generate([prompt], max_new_tokens=8, temperature=0.0, ignore_eos=True)
            return tuple(answer.token_ids), dict(llm.facts.report)["rope"]

    tokens, said = serve(max_req_total_len=16)
    assert tokens == tuple(oracle(theirs, prompt, 8).tokens)
    assert said.startswith("short factors, as no request has more than the 16 tokens")
    other, said = serve()
    assert other != tokens
    assert said.startswith("long factors") and said.endswith("--max_req_total_len 16 takes the short ones")


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_longrope_has_many_names(name: str, key: str, place: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read(max_position_embeddings=131072, **{place: {key: name, **factors}})
    assert (config.rope.kind, config.rope.original, config.max_position) == ("longrope", 4096, 131072)
    assert (config.rope.scaling["factor"], config.fixed_angles_up_to) == (32, None)
    whole = read(max_position_embeddings=128, original_max_position_embeddings=64, **{place: {key: name, **factors}})
    assert (whole.rope.original, whole.rope.scaling["factor"]) == (64, 2)


def test_longrope_without_its_factors_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope type 'longrope' needs short_factor, long_factor in rope_parameters"):
        read(rope_scaling={"type": "longrope"})


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not known"):
        read(hidden_act="gelu")
