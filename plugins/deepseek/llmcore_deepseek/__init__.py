"""The DeepSeek families V2 and V3, and the ops and KV layout of their attention."""

from collections.abc import Iterable

from llmcore.api import KVLayoutSpec, ModelSpec, OpSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""
    yield _family("v2", "DeepseekV2ForCausalLM", "DeepSeek-V2, V2-Lite and V2.5: latent attention, shared experts")
    yield _family("v3", "DeepseekV3ForCausalLM", "DeepSeek-V3 and R1: V2 with corrected sigmoid routing")


@hookimpl
def register_ops() -> Iterable[OpSpec]:
    """The ops of latent attention."""
    for kind in ("decode", "prefill", "mixed"):
        yield OpSpec(
            name=f"attn.mla.{kind}",
            module=f"{__name__}.ops.attn_mla",
            signature=f"attn.gqa.{kind} over latent rows, with absorbed queries",
        )
    yield OpSpec(
        name="head_linear",
        module=f"{__name__}.ops.head_linear",
        signature="(x [T, heads, inputs], weight [heads, outputs, inputs], beside) -> [T, heads, outputs]",
    )
    yield OpSpec(
        name="latent_rope_kv_write",
        module=f"{__name__}.ops.latent_rope_kv_write",
        signature="(q [T, heads, size], row [T, latent + rotated], weight [latent], eps, cos, sin, kv, slots) -> "
        "(rotated q, the row as stored)",
        expands_to=("rms_norm", "rope"),
    )


@hookimpl
def register_kv_layouts() -> Iterable[KVLayoutSpec]:
    """`mla-latent`: one row per token for all heads."""
    yield KVLayoutSpec(
        name="mla-latent",
        make="llmcore_deepseek.layout:LatentLayout",
        summary="one row per token for all heads: the latent and the rotated part of the key",
    )


def _family(version: str, architecture: str, summary: str) -> ModelSpec:
    return ModelSpec(
        name=f"deepseek_{version}",
        architectures=(architecture,),
        read_config=f"{__name__}.config:read_{version}",
        build=f"{__name__}.deepseek:build",
        weights=f"{__name__}.deepseek:weights",
        summary=summary,
    )
