"""Community families, one file each. Each file also works as a plugin: ``--plugins ./contrib_models/mistral.py``."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl

FAMILIES: dict[str, tuple[str, ...]] = {
    "cohere": ("CohereForCausalLM",),
    "cohere2": ("Cohere2ForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "glm4": ("Glm4ForCausalLM", "GlmForCausalLM"),
    "granite": ("GraniteForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "olmo2": ("Olmo2ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "stablelm": ("StableLmForCausalLM",),
    "starcoder2": ("Starcoder2ForCausalLM",),
}
"""File of this directory -> the architectures that it reads."""


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Every family here. Its file is imported only when its model is served."""
    for name, architectures in FAMILIES.items():
        module = f"{__name__}.{name}"
        yield ModelSpec(
            name=name,
            architectures=architectures,
            read_config=f"{module}:read_config",
            build=f"{module}:build",
            weights=f"{module}:weights",
        )
