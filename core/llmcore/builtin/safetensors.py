"""Checkpoints in safetensors files, as Hugging Face saves them."""

from collections.abc import Iterable

from llmcore.api import WeightLoaderSpec, hookimpl


@hookimpl
def register_weight_loaders() -> Iterable[WeightLoaderSpec]:
    """The loader for a directory with config.json and *.safetensors."""
    yield WeightLoaderSpec(
        name="safetensors",
        sniff="llmcore.weights.safetensors:sniff",
        open="llmcore.weights.safetensors:SafetensorsCheckpoint",
        summary="config.json and *.safetensors, sharded or not",
    )
