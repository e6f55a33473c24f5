"""What Acme brings to llmcore. No torch here: what a spec names is imported when it was chosen."""

from llmcore.api import (
    CommandSpec,
    KernelSpec,
    LogitsProcessorSpec,
    ModelSpec,
    ModeSpec,
    OutputParserSpec,
    Requires,
    SchedulerSpec,
    hookimpl,
)


def _no_other_masks(context):
    """Nothing is known of the attention where no model is."""
    if context.shape.get("sinks"):
        return "has no sinks"
    mask = context.shape.get("mask", "causal")
    return None if mask in ("causal", "full") else f"has no {mask} mask"


@hookimpl
def register_models():
    yield ModelSpec(
        name="gpt-neox",
        architectures=("GPTNeoXForCausalLM",),
        read_config=f"{__name__}.neox:read_config",
        build=f"{__name__}.neox:build",
        weights=f"{__name__}.neox:weights",
        summary="GPT-NeoX, Pythia, StableLM Alpha",
    )


@hookimpl
def register_kernels():
    """One kernel: the first choice on compute capability 9.0, and elsewhere for those who ask for it."""
    common = {
        "op": "attn.gqa.decode",
        "make": f"{__name__}.attention:make",
        "refuses": _no_other_masks,
        "summary": "rows padded to a power of two, in torch",
    }
    hopper = Requires(device="cuda", capability=(90, 90), layouts=frozenset({"token"}))
    yield KernelSpec(name="acme-hopper", when=hopper, priority=70, **common)
    yield KernelSpec(name="acme", when=Requires(layouts=frozenset({"token"})), priority=5, **common)


@hookimpl
def register_modes():
    yield ModeSpec(name="acme", kernels={"attn.gqa.decode": "acme"}, summary="Acme's attention on any device")


@hookimpl
def register_schedulers():
    yield SchedulerSpec(
        name="shortest-prompt", make=f"{__name__}.scheduler:ShortestPrompt", summary="short prompts overtake long ones"
    )


@hookimpl
def register_output_parsers():
    yield OutputParserSpec(
        name="acme",
        kind="tool",
        make=f"{__name__}.calls:Calls",
        samples=f"{__name__}.calls:samples",
        summary="<call NAME>{JSON}</call>",
    )


@hookimpl
def register_logits_processors():
    yield LogitsProcessorSpec(
        name="say",
        make=f"{__name__}.say:make",
        kind="mask",
        example={"text": "yes"},
        summary="the answer is the given text, whatever the model",
    )


@hookimpl
def register_commands():
    yield CommandSpec(name="card", command=f"{__name__}.card:command", summary="Describe a model directory.")
