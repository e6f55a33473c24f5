"""A family that computes something else than transformers: the error names the first layer that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools import registry_of
from llmcore_devtools.family import assert_family_matches_transformers, small_model, where_they_part
from llmcore_devtools.loaded_model import LoadedModel

WRONG = """
import torch
from llmcore.api import hookimpl


class Wrong(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, step):
        hidden, residual = self.inner(x, step)
        return (hidden * 1.1 if {when} else hidden), residual


@hookimpl
def build_layer(layer, info):
    {inside}
    return Wrong(layer) if info.index == 1 and {wraps} else None
"""


def wrong(folder: Path, when: str = "True", wraps: bool = True, inside: str = "pass") -> Any:
    path = folder / "wrong.py"
    path.write_text(WRONG.format(when=when, wraps=wraps, inside=inside))
    return registry_of("llama", "qwen", "deepseek", "contrib-models", str(path))


def error_of(registry: Any, architecture: str = "LlamaForCausalLM", **fields: Any) -> str:
    with pytest.raises(AssertionError) as error:
        assert_family_matches_transformers(architecture, registry=registry, prompts=(6,), new=4, **fields)
    return str(error.value)


def test_a_layer(tmp_path: Path) -> None:
    assert "; the first layer that differs is layers.1: off by " in error_of(wrong(tmp_path))


@pytest.mark.parametrize(
    ("part", "inside"),
    [
        ("self_attn", "layer.self_attn.o_proj.register_forward_hook(lambda module, given, y: y.abs())"),
        ("mlp", "layer.mlp.register_forward_hook(lambda module, given, y: y.abs())"),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteForCausalLM", "Gemma2ForCausalLM"])
def test_a_part_of_a_layer(architecture: str, part: str, inside: str, tmp_path: Path) -> None:
    only = f"{inside} if info.index == 2 else None"
    text = error_of(wrong(tmp_path, wraps=False, inside=only), architecture)
    assert f"; the first layer that differs is layers.2, in its {part}: off by " in text


def test_decoding_alone(tmp_path: Path) -> None:
    text = error_of(wrong(tmp_path, when="step.n_decode"))
    assert "logits of token 1 are off" in text
    assert "; the prompt agrees, and when token 0 is decoded, the first layer that differs is layers.1: off" in text


def test_rows_of_one_step_alone(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"in mixed steps.*every layer agrees when this request is"):
        assert_family_matches_transformers(
            "LlamaForCausalLM",
            registry=wrong(tmp_path, when="step.n_decode and len(hidden) > 1"),
            prompts=(6, 9),
            new=4,
        )


def test_both_ends(tmp_path: Path) -> None:
    theirs = small_model("LlamaForCausalLM", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    ours = LoadedModel(tmp_path)
    ours.model.norm.weight.data.mul_(1.1)
    text = where_they_part(theirs, ours, [5, 6, 7], [], 1e-4)
    assert text.startswith("; every layer agrees, and what comes after them does not (norm, lm_head): off by ")
    ours.model.embed_tokens.weight.data[6].mul_(1.1)
    assert where_they_part(theirs, ours, [5, 6, 7], [], 1e-4).startswith(
        "; the first that differs is embed_tokens: off by "
    )
    ours.model.embed_tokens.weight.data[6].fill_(float("nan"))
    assert "embed_tokens: off by nan at token 1 of 3" in where_they_part(theirs, ours, [5, 6, 7], [], 1e-4)


@pytest.mark.parametrize(
    "architecture",
    [
        *("CohereForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        *("Glm4ForCausalLM", "GraniteForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "LlamaForSequenceClassification"),
    ],
)
def test_states_are_those_of_transformers_in_every_family(architecture: str, tmp_path: Path) -> None:
    """However a family divides its stream into hidden states and residual."""
    small = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
    theirs = small_model(architecture, **(small if "Mo" in architecture or "Mix" in architecture else {}))
    theirs.save_pretrained(tmp_path)
    generated = [] if "Sequence" in architecture else [3, 2]
    text = where_they_part(theirs, LoadedModel(tmp_path), [5, 6, 7, 8, 9], generated, 1e-4, chunk=3)
    assert text.startswith("; every layer agrees when this request is computed alone")
