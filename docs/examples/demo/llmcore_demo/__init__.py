"""The hooks of plugin-demo, without torch. core imports what a spec names when the spec is chosen."""

from llmcore.api import CommandSpec, KernelSpec, ModelSpec, Requires, hookimpl


@hookimpl
def register_kernels():
    yield KernelSpec(
        op="silu_and_mul",
        name="demo",
        make=f"{__name__}.kernel:make",
        when=Requires(device="cpu", dtypes=frozenset({"f32", "bf16"})),
        priority=40,
        summary="two calls into torch",
    )


@hookimpl
def register_models():
    yield ModelSpec(
        name="demo-granite",
        architectures=("GraniteForCausalLM",),
        read_config=f"{__name__}.granite:read_config",
        weights=f"{__name__}.granite:weights",
        build=f"{__name__}.granite:build",
        summary="Granite 3",
    )


@hookimpl
def register_commands():
    yield CommandSpec(name="parameters", command=f"{__name__}.command:command", summary="Count a model's parameters.")
