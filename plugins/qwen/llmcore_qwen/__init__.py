"""The Qwen families: Qwen2 (with 1.5 and 2.5) and Qwen3, one file each, and what they share in `common`."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Qwen2ForCausalLM and Qwen3ForCausalLM."""
    yield _family("qwen2", "Qwen2ForCausalLM", "Qwen1.5, 2 and 2.5: biases on q, k and v, windows on some layers")
    yield _family("qwen3", "Qwen3ForCausalLM", "Qwen3: norms over each head of q and k, windows on some layers")


def _family(name: str, architecture: str, summary: str) -> ModelSpec:
    module = f"{__name__}.{name}"
    return ModelSpec(
        name=name,
        architectures=(architecture,),
        read_config=f"{module}:read_config",
        build=f"{module}:build",
        weights=f"{module}:weights",
        summary=summary,
    )
