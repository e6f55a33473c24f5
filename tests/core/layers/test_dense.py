"""The common part of configs: what is read, what is missing, and which layers have a window."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.models import KVGroupSpec
from llmcore.layers import DenseConfig, dense_weights, read_dense, read_scoring, scoring_weights, windowed_groups

HF: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def read(**changed: Any) -> DenseConfig:
    return DenseConfig(**read_dense(HF | changed, "Any"))


def test_what_the_file_leaves_out() -> None:
    config = read()
    assert (config.heads, config.kv_heads, config.head_size, config.tied) == (4, 4, 16, False)
    assert (config.dtype, config.eos_ids, config.max_position) == ("bf16", (), 128)
    assert [group.layers for group in config.kv_groups] == [(0, 1, 2)]
    assert read_dense(HF, "Any", defaults={"tie_word_embeddings": True, "eos_token_id": 7})["tied"]


@pytest.mark.parametrize(
    ("given", "default", "ids"), [(2, 7, (2,)), ([2, 3], 7, (2, 3)), (None, 7, ()), ("absent", 7, (7,))]
)
def test_a_null_end_token_is_none(given: Any, default: int, ids: tuple[int, ...]) -> None:
    hf = HF if given == "absent" else HF | {"eos_token_id": given}
    assert read_dense(hf, "Any", defaults={"eos_token_id": default})["eos_ids"] == ids


def test_what_contradicts_itself_or_is_missing() -> None:
    with pytest.raises(ConfigError, match="4 attention heads cannot share 3 KV heads"):
        read(num_key_value_heads=3)
    with pytest.raises(KeyError, match="intermediate_size"):
        read_dense({name: value for name, value in HF.items() if name != "intermediate_size"}, "Any")


WHOLE = KVGroupSpec(name="all", layers=(0, 1, 2), kv_heads=2, key_size=4, value_size=4)
FULL, SLIDING = "full_attention", "sliding_attention"


def test_layers_with_and_without_a_window_are_two_groups() -> None:
    full, window = windowed_groups(WHOLE, (SLIDING, FULL, SLIDING), 8)
    assert (full.name, full.layers, full.reach) == ("full", (1,), "all")
    assert (window.name, window.layers, window.reach) == ("window", (0, 2), "window:8")
    assert [group.name for group in windowed_groups(WHOLE, (FULL,) * 3, 8)] == ["full"]


@pytest.mark.parametrize(
    ("types", "window", "message"),
    [
        ((FULL,) * 3, 0, "sliding_window is 0"),
        ((FULL,) * 2, 8, "for 2 layers, num_hidden_layers is 3"),
        ((FULL, FULL, "chunked"), 8, "layer type chunked is not known; known: full_attention, sliding_attention"),
    ],
)
def test_layer_types_that_no_model_has(types: tuple[str, ...], window: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windowed_groups(WHOLE, types, window)


def test_names_of_transformers_become_those_of_the_modules() -> None:
    names = dense_weights(read(), skip=("*.mtp.*",))
    (target,) = names.targets("model.layers.1.self_attn.k_proj.weight")
    assert (target.name, target.part) == ("layers.1.self_attn.qkv_proj.weight", "k_proj")
    assert not names.targets("model.mtp.weight")
    scoring = scoring_weights(names)
    assert [target.name for target in scoring.targets("score.weight")] == ["lm_head.weight"]
    assert not scoring.targets("lm_head.weight")


@pytest.mark.parametrize(
    ("labels", "count"), [({}, 2), ({"num_labels": 3}, 3), ({"id2label": {"0": "bad", "1": "good", "2": "best"}}, 3)]
)
def test_a_score_has_as_many_numbers_as_labels(labels: dict[str, Any], count: int) -> None:
    fields = read_scoring({"architectures": ["AnyForSequenceClassification"], **labels})
    assert (fields["scores"], fields["tied"]) == (count, False)
