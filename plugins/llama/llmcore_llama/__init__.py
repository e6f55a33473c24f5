"""The Llama family: Llama 1 to 3.x, and everything saved as LlamaForCausalLM, such as SmolLM2."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl

_MODULE = f"{__name__}.llama"


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """LlamaForCausalLM."""
    yield ModelSpec(
        name="llama",
        architectures=("LlamaForCausalLM",),
        read_config=f"{_MODULE}:read_config",
        build=f"{_MODULE}:build",
        weights=f"{_MODULE}:weights",
        summary="Llama 1 to 3.x: grouped heads, tied or untied embeddings, biases, every rope scaling",
    )
