"""The Qwen families, one file each: Qwen2 (with 1.5 and 2.5), Qwen3, and the sparse models of both.

All families share `common`, and the sparse ones share `sparse`.
"""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """The dense and the sparse families."""
    yield _family("qwen2", "Qwen2ForCausalLM", "Qwen1.5, 2 and 2.5: biases on q, k and v, windows on some layers")
    yield _family("qwen3", "Qwen3ForCausalLM", "Qwen3: norms over each head of q and k, windows on some layers")
    yield _family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen1.5-MoE and Qwen2-MoE: experts beside one all tokens see")
    yield _family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-MoE: Qwen3 with experts, and dense layers among them")
    heads = "Qwen2 with a head that scores a prompt: classifiers, and reward models with an MLP"
    yield _family("score", "Qwen2ForSequenceClassification", heads, "Qwen2ForRewardModel", name="qwen2_score")


def _family(module: str, architecture: str, summary: str, *more: str, name: str | None = None) -> ModelSpec:
    name, module = name or module, f"{__name__}.{module}"
    return ModelSpec(
        name=name,
        architectures=(architecture, *more),
        read_config=f"{module}:read_config",
        build=f"{module}:build",
        weights=f"{module}:weights",
        summary=summary,
    )
