"""A kernel for an existing op: rms_norm, written out, for f32 on the CPU and rows of even width."""

from llmcore.api import KernelSpec, OpContext, Requires, hookimpl


def refuses(context: OpContext):
    """Returns why the kernel cannot run, for limits that `when` cannot express. `llmcore kernels --explain` shows
    it."""
    width = context.shape.get("size")
    return f"needs an even size, has {width}" if isinstance(width, int) and width % 2 else None


@hookimpl
def register_kernels():
    yield KernelSpec(
        op="rms_norm",
        name="written-out",
        make=f"{__name__}:make",
        when=Requires(device="cpu", dtypes=frozenset({"f32"})),
        priority=40,
        refuses=refuses,
    )


def make(context: OpContext):
    """Called once per shape and token bucket. The layer calls only the returned function."""

    def run(x, weight, eps):
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    return run
