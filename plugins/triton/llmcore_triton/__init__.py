"""Triton kernels for NVIDIA GPUs, and the modes that pin some of them. Nothing here imports torch or triton."""

from collections.abc import Iterable

from llmcore.api import KernelSpec, ModeSpec, hookimpl

from llmcore_triton.specs import attention as attention_specs
from llmcore_triton.specs import comm as comm_specs
from llmcore_triton.specs import linear as linear_specs
from llmcore_triton.specs import quantized as quantized_specs
from llmcore_triton.specs import rows as rows_specs

# `llmcore_triton.linear` is the kernels' module, and importing it here would bind the name `linear`


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    """The kernels, by kind of op."""
    yield from attention_specs.kernels()
    yield from attention_specs.latent_kernels()
    yield from linear_specs.kernels()
    yield from rows_specs.kernels()
    yield from comm_specs.kernels()
    yield from quantized_specs.row_kernels()
    yield from quantized_specs.eight_bit_kernels()
    yield from quantized_specs.weight_only_kernels()
    yield from quantized_specs.expert_kernels()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """The modes for decoding, under LightLLM's names."""
    yield from attention_specs.modes()
