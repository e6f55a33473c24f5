"""A model family, ArceeForCausalLM: Llama's attention with an MLP of its own, squared ReLU without a gate.

A single file imports torch wherever it is loaded, so use it only to try a family: `--plugins ./register_models.py`. In
a package the hook stands in `__init__.py`, and everything else in a module beside it.
"""

import torch
from llmcore.api import AttnSpec, ModelSpec, Shard, WeightMap, hookimpl
from llmcore.layers import (
    Attention,
    Decoder,
    DenseConfig,
    Embedding,
    Linear,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    read_dense,
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


def read_config(hf):
    """config.json -> the fields that core and the blocks below read. A family with more fields subclasses
    DenseConfig."""
    return DenseConfig(**read_dense(hf, "ArceeForCausalLM", partial_rotary=False))


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
    """norm, attention, norm, MLP. The residual stream runs beside the hidden states."""

    def __init__(self, build, config, rope, index):
        super().__init__()
        size = config.head_size
        heads = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**heads, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=QKVLinear(build, config.hidden_size, **heads),
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
    """Returns the whole model. Every layer asks `build` for ops, never for a kernel."""
    rope = Rope(build, config.rope)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=Embedding(build, config.vocab_size, config.hidden_size),
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size),
    )
