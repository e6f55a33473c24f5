"""A model family, ArceeForCausalLM: Llama's attention with an MLP of its own, squared ReLU without a gate.

As one file it brings torch along wherever it is loaded, so it is for trying out: `--plugins ./register_models.py`. In
a package the hook stands in `__init__.py` and everything else in a module beside it.
"""

from dataclasses import dataclass

import torch
from llmcore.api import AttnSpec, KVGroupSpec, ModelConfig, ModelSpec, Shard, WeightMap, hookimpl, read_dtype
from llmcore.layers import (
    Attention,
    Decoder,
    Embedding,
    Linear,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    read_rope,
)
from torch import nn


@hookimpl
def register_models():
    yield ModelSpec(
        name="arcee",
        architectures=("ArceeForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(ModelConfig):
    """What a block reads beyond what core needs to know."""

    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float
    rope: RopeConfig


def read_config(hf):
    """config.json -> ArceeConfig."""
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    head_size = hf.get("head_dim") or hf["hidden_size"] // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    layout = {"kv_heads": kv_heads, "key_size": head_size, "value_size": head_size}
    eos, rope = hf.get("eos_token_id"), read_rope(hf, head_size)
    return ArceeConfig(
        architecture="ArceeForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=layers,
        max_position=hf["max_position_embeddings"],
        dtype=read_dtype(hf),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        fixed_angles_up_to=rope.fixed_angles_up_to,
        kv_groups=(KVGroupSpec(name="all", layers=tuple(range(layers)), **layout),),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        inner=hf["intermediate_size"],
        eps=hf["rms_norm_eps"],
        rope=rope,
    )


def weights(config):
    """Names in the checkpoint -> parameters of the model."""
    return WeightMap(rename={"model.": ""}, fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")})


class MLP(nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, build, config):
        super().__init__()
        self.up_proj = Linear(build, config.hidden_size, config.inner, shard=Shard("attn_tp", 0))
        self.down_proj = Linear(build, config.inner, config.hidden_size, shard=Shard("attn_tp", 1))

    def forward(self, x, step):
        return self.down_proj(torch.relu(self.up_proj(x, step)).square(), step)


class Block(nn.Module):
    """norm, attention, norm, MLP; the residual stream runs beside the hidden states."""

    def __init__(self, build, config, rope, index):
        super().__init__()
        ranks, size = build.mesh.size("attn_tp"), config.head_size
        spec = AttnSpec(
            heads=config.heads // ranks,
            kv_heads=config.kv_heads // ranks,
            key_size=size,
            value_size=size,
            scale=size**-0.5,
        )
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.self_attn = Attention(
            build,
            spec,
            group="all",
            index=index,
            qkv=QKVLinear(build, config.hidden_size, heads=config.heads, kv_heads=config.kv_heads, key_size=size),
            out=Linear(build, config.heads * size, config.hidden_size, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.mlp = MLP(build, config)

    def forward(self, x, step):
        hidden, residual = self.input_layernorm.add(*x, step)
        hidden, residual = self.post_attention_layernorm.add(self.self_attn(hidden, step), residual, step)
        return self.mlp(hidden, step), residual


def build(config, build):
    """The whole model; every layer asks `build` for ops, never for a kernel."""
    rope = Rope(build, config.rope)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=Embedding(build, config.vocab_size, config.hidden_size),
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size),
    )
