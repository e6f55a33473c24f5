"""GraniteForCausalLM: a Llama whose embeddings, blocks, scores and logits are multiplied by constants."""

from dataclasses import dataclass

import torch
from llmcore.api import AttnSpec, Shard
from llmcore.layers import (
    Attention,
    Decoder,
    DenseConfig,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    dense_weights,
    read_dense,
)


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DenseConfig):
    """The fields that our block reads in addition to those of every dense decoder."""

    embedding: float
    residual: float
    attention: float
    logits: float


def read_config(hf):
    """Reads config.json, given as a dict."""
    return GraniteConfig(
        **read_dense(hf, "GraniteForCausalLM", partial_rotary=False),
        embedding=hf.get("embedding_multiplier", 1.0),
        residual=hf.get("residual_multiplier", 1.0),
        attention=hf.get("attention_multiplier", 1.0),
        logits=hf.get("logits_scaling", 1.0),
    )


def weights(config):
    """Maps names in a checkpoint to names of the modules below, as in every model that is built like Llama."""
    return dense_weights(config)


class ScaledEmbedding(Embedding):
    def __init__(self, build, config):
        super().__init__(build, config.vocab_size, config.hidden_size)
        self.factor = config.embedding

    def forward(self, tokens, step):
        return super().forward(tokens, step) * self.factor


class ScaledHead(LMHead):
    def __init__(self, build, config, weight):
        super().__init__(build, config.hidden_size, config.vocab_size, weight=weight)
        self.divisor = config.logits

    def scores(self, x, step):
        return super().scores(x, step).float() / self.divisor


class Block(torch.nn.Module):
    def __init__(self, build, config, rope, index):
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        heads = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.factor = config.residual
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**heads, value_size=size, scale=config.attention),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, **heads),
            out=Linear(build, config.heads * size, hidden, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner)

    def forward(self, x, step):
        """(hidden, residual) -> (hidden, residual). `add` returns the norm of their sum, and the sum."""
        hidden, residual = self.input_layernorm.add(*x, step)
        hidden = self.self_attn(hidden, step) * self.factor
        hidden, residual = self.post_attention_layernorm.add(hidden, residual, step)
        return self.mlp(hidden, step) * self.factor, residual


def build(config, build):
    """Returns the model. Each op is bound to the kernel that was chosen for this machine."""
    rope = Rope(build, config.rope)
    embedding = ScaledEmbedding(build, config)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=ScaledHead(build, config, embedding.weight if config.tied else None),
    )
