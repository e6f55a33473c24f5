"""The names in a quantization_config, and the modules that they mean."""

from __future__ import annotations

import pytest
from llmcore.api import ConfigError
from llmcore_quantization.targets import in_layers, listed, names, overridden, targeted

GATE, GATE_PROJ = "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("pattern", "module", "wanted"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        ("gate", GATE, True),
        ("gate", GATE_PROJ, False),
        ("model.layers.1", GATE_PROJ, True),
        ("model.layers.1", "model.layers.10.mlp.gate", False),
        ("mlp.gate_proj", GATE_PROJ, True),
        ("re:.*gate$", GATE, True),
        ("re:.*gate$", GATE_PROJ, False),
        ("model.layers.*.mlp.gate*", GATE_PROJ, True),
        ("model.layers.*.self_attn*", GATE_PROJ, False),
    ],
)
def test_lists(pattern: str, module: str, wanted: bool) -> None:
    assert listed(module, ["other", pattern]) is wanted
    assert not listed(module, [])


@pytest.mark.parametrize(
    ("target", "close"),
    [
        ("Linear", 1),
        (GATE, 2),
        ("re:.*gate", 2),
        ("re:gate", 0),
        ("gate", 0),
        ("Embedding", 0),
        ("torch.nn.Linear", 1),
    ],
)
def test_targets_of_compressed_tensors(target: str, close: int) -> None:
    assert targeted(GATE, [target]) == close


def test_overrides_of_gptq() -> None:
    dynamic = {r"-:.*\.gate$": {}, r"+:.*gate_proj": {"bits": 8}, r".*": {"bits": 4}}
    assert overridden(GATE, dynamic) is None
    assert overridden(GATE_PROJ, dynamic) == {"bits": 8}
    assert overridden("lm_head", dynamic) == {"bits": 4}
    assert overridden("lm_head", {}) == {}


def test_layers() -> None:
    assert in_layers(GATE) and in_layers("transformer.h.0.attn.c_attn")
    assert not in_layers("lm_head") and not in_layers("model.embed_tokens")


def test_names() -> None:
    assert names({"a": None, "b": ["x"]}, "a", "b") == ("x",)
    assert names({}, "a") == ()
    for wrong in ("x", [1], {"x": 1}):
        with pytest.raises(ConfigError, match=r"a in quantization_config is .* has to be a list of names"):
            names({"a": wrong}, "a")


def test_broken_expressions() -> None:
    for ask in (lambda: listed("x", ["re:["]), lambda: targeted("x", ["re:["]), lambda: overridden("x", {"[": {}})):
        with pytest.raises(ConfigError, match=r"'\[' in quantization_config is not a regular expression"):
            ask()
