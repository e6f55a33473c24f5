"""An op of our own: x + 1. This file is its module. A layer asks for it with `build.op("add_one", size=64)`."""

from llmcore.api import OpContext, OpSpec, hookimpl

TOLERANCE = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}


@hookimpl
def register_ops():
    yield OpSpec(name="add_one", module=__name__, signature="(x [T, size]) -> [T, size]")


def reference(x):
    """x [T, size] -> [T, size]."""
    return x + 1


def samples(context: OpContext):
    """Yields difficult inputs: one token and many, zeros, large numbers."""
    import torch

    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[context.dtype]
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 17):
        x = torch.randn(tokens, 8, generator=generator).to(dtype)
        yield (x,)
        yield (x * 1000,)
    yield (torch.zeros(3, 8, dtype=dtype),)


def cost(shape):
    """(bytes, flops): each number is read once and written once, with one addition."""
    elements = shape["tokens"] * shape["size"]
    return 2.0 * elements * shape["element"], float(elements)
