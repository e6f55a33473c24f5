"""The built-in KV layouts."""

from collections.abc import Iterable

from llmcore.api import KVLayoutSpec, hookimpl


@hookimpl
def register_kv_layouts() -> Iterable[KVLayoutSpec]:
    """`token`, one slot per token in the model's dtype."""
    yield KVLayoutSpec(
        name="token",
        make="llmcore.layers.layout:TokenLayout",
        summary="one slot per token, in the model's dtype",
    )
