"""The hook of a plugin with rms_norm in Triton. It does not import triton: plugins are listed without it."""

from llmcore.api import KernelSpec, OpContext, Requires, hookimpl

LONGEST = 16384
"""Elements of a row that one program can hold."""


def refuses(context: OpContext):
    """Returns why the kernel cannot run, for a limit that `when` cannot express."""
    size = context.shape.get("size", 0)
    return f"takes rows of at most {LONGEST} elements, has {size}" if size > LONGEST else None


@hookimpl
def register_kernels():
    yield KernelSpec(
        op="rms_norm",
        name="fast-norm",
        make="fast_norm_kernel:make",
        when=Requires(device="cuda", capability=(80, 129)),
        refuses=refuses,
        batch_invariant=True,
    )
