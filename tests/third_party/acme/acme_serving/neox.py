"""GPTNeoXForCausalLM: LayerNorm, rope on part of each head, attention and MLP side by side or one after the other.

A checkpoint holds q, k and v of each head together: [head, q or k or v, element]. Attention wants all of q first.
"""

from dataclasses import dataclass

import torch
from llmcore.api import AttnSpec, ConfigError, Shard, WeightMap
from llmcore.layers import (
    Attention,
    Decoder,
    DenseConfig,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    QKVLinear,
    Rope,
    read_dense,
)
from torch import nn
from torch.nn import functional

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
DEFAULTS = {"eos_token_id": 2, "max_position_embeddings": 2048}
"""What transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(DenseConfig):
    """What a GPT-NeoX block reads, beside what every dense decoder has."""

    bias: bool
    parallel: bool
    activation: str


def read_config(hf):
    """From config.json; every head has keys of its own, and a quarter of it turns where the file does not say."""
    activation = hf.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not known; known: {', '.join(ACTIVATIONS)}")
    given = {
        "partial_rotary_factor": hf.get("rotary_pct", 0.25),
        "rope_theta": hf.get("rotary_emb_base", 10000.0),
        **hf,
        "num_key_value_heads": hf["num_attention_heads"],
        "rms_norm_eps": hf.get("layer_norm_eps", 1e-5),
    }
    return NeoXConfig(
        **read_dense(given, "GPTNeoXForCausalLM", defaults=DEFAULTS),
        bias=bool(hf.get("attention_bias", True)),
        parallel=bool(hf.get("use_parallel_residual", True)),
        activation=activation,
    )


def weights(config):
    """Names in a checkpoint -> names of the modules below."""
    return WeightMap(
        rename={
            "gpt_neox.embed_in.": "embed_tokens.",
            "gpt_neox.final_layer_norm.": "norm.",
            "gpt_neox.": "",
            "embed_out.": "lm_head.",
        },
        suffix={"query_key_value": "qkv_proj", "attention.dense": "attention.o_proj"},
    )


class HeadsAttention(Attention):
    """Attention that puts its projections in order when they are loaded."""

    def finish(self):
        """Called once by the loader, before the linears bind what they hold."""
        spec = self.spec
        rows = torch.arange(3 * spec.heads * spec.key_size).view(spec.heads, 3, spec.key_size)
        self.qkv_proj.reorder(rows.transpose(0, 1).flatten())


class MLP(nn.Module):
    def __init__(self, build, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.inner
        self.dense_h_to_4h = Linear(build, hidden, inner, bias=True, shard=Shard("attn_tp", 0))
        self.dense_4h_to_h = Linear(build, inner, hidden, bias=True, shard=Shard("attn_tp", 1))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x, step):
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x, step)), step)


class Block(nn.Module):
    def __init__(self, build, config, rope, index):
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        heads = {"heads": config.heads, "kv_heads": config.heads, "key_size": size}
        self.parallel = config.parallel
        self.input_layernorm = LayerNorm(build, hidden, config.eps)
        self.attention = HeadsAttention(
            build,
            AttnSpec(**heads, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, bias=config.bias, **heads),
            out=Linear(build, hidden, hidden, bias=config.bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = LayerNorm(build, hidden, config.eps)
        self.mlp = MLP(build, config)

    def forward(self, x, step):
        """(hidden, residual) -> (hidden, residual): the sum of both is what goes on."""
        hidden, residual = self.input_layernorm.add(*x, step)
        attended = self.attention(hidden, step)
        if self.parallel:
            return attended + self.mlp(self.post_attention_layernorm(residual, step), step), residual
        hidden, residual = self.post_attention_layernorm.add(attended, residual, step)
        return self.mlp(hidden, step), residual


def build(config, build):
    """The whole model."""
    if build.mesh.size("attn_tp") > 1:
        raise ConfigError("GPT-NeoX holds q, k and v by head, which this family does not cut over several ranks")
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
