"""The Llama family: Llama 1 to 3.x, and everything saved as LlamaForCausalLM, such as SmolLM2."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """LlamaForCausalLM, and the same with a `score` head."""
    summary = "Llama 1 to 3.x: grouped heads, tied or untied embeddings, biases, every rope scaling"
    yield _family("llama", "LlamaForCausalLM", f"{__name__}.llama", summary)
    summary = "reward models and classifiers: Llama with a linear head that scores a prompt"
    yield _family("llama_score", "LlamaForSequenceClassification", f"{__name__}.score", summary)


def _family(name: str, architecture: str, module: str, summary: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        architectures=(architecture,),
        read_config=f"{module}:read_config",
        build=f"{module}:build",
        weights=f"{module}:weights",
        summary=summary,
    )
