"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable

from llmcore.api import KVLayoutSpec, ModeSpec, OptionSpec, hookimpl, options_of

from llmcore_quantization.kv import names
from llmcore_quantization.kv.options import KVQuantization


@hookimpl
def register_kv_layouts() -> Iterable[KVLayoutSpec]:
    """Layouts that store KV in 8 and 4 bits."""
    yield from names.layouts()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """The modes of LightLLM and the policies of LMDeploy that quantize KV."""
    yield from names.modes()


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The options of LightLLM and LMDeploy that quantize KV."""
    yield from options_of(KVQuantization)
