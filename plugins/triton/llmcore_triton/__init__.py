"""Triton kernels for NVIDIA GPUs, and the modes that pin some of them. Nothing here imports torch or triton."""

from collections.abc import Iterable

from llmcore.api import KernelSpec, ModeSpec, hookimpl

from llmcore_triton.specs import attention as attention_specs
from llmcore_triton.specs import linear as linear_specs
from llmcore_triton.specs import mla as mla_specs
from llmcore_triton.specs import moe as moe_specs
from llmcore_triton.specs import rows as rows_specs
from llmcore_triton.specs import sampling as sampling_specs

# `llmcore_triton.linear` is the kernels' module, and importing it here would bind the name `linear`


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    """The kernels, by kind of op."""
    for part in (attention_specs, linear_specs, mla_specs, moe_specs, rows_specs, sampling_specs):
        yield from part.kernels()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """The modes for decoding, under LightLLM's names."""
    yield from attention_specs.modes()
