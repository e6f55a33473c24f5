"""GraniteForCausalLM: a Llama whose embeddings, blocks, scores and logits are multiplied by constants."""

from dataclasses import dataclass

import torch
from llmcore.api import AttnSpec, KVGroupSpec, ModelConfig, Shard, WeightMap, read_dtype
from llmcore.layers import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    read_rope,
)


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """What our block reads, beside what every model has."""

    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float
    rope: RopeConfig
    tied: bool
    embedding: float
    residual: float
    attention: float
    logits: float


def read_config(hf):
    """From config.json, as a dict."""
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    size = hf["hidden_size"] // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    eos, rope = hf.get("eos_token_id"), read_rope(hf, size)
    return GraniteConfig(
        architecture="GraniteForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=layers,
        max_position=hf["max_position_embeddings"],
        dtype=read_dtype(hf),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        fixed_angles_up_to=rope.fixed_angles_up_to,
        kv_groups=(
            KVGroupSpec(name="all", layers=tuple(range(layers)), kv_heads=kv_heads, key_size=size, value_size=size),
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        inner=hf["intermediate_size"],
        eps=hf["rms_norm_eps"],
        rope=rope,
        tied=hf.get("tie_word_embeddings", False),
        embedding=hf.get("embedding_multiplier", 1.0),
        residual=hf.get("residual_multiplier", 1.0),
        attention=hf.get("attention_multiplier", 1.0),
        logits=hf.get("logits_scaling", 1.0),
    )


def weights(config):
    """From the names in a checkpoint to the names of the modules below."""
    return WeightMap(
        rename={"model.": ""},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        skip=("lm_head.weight",) if config.tied else (),
    )


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

    def forward(self, x, step):
        return super().forward(x, step) / self.divisor


class Block(torch.nn.Module):
    def __init__(self, build, config, rope, index):
        super().__init__()
        hidden, heads, size = config.hidden_size, config.heads, config.head_size
        ranks = build.mesh.size("attn_tp")
        spec = AttnSpec(
            heads=heads // ranks,
            kv_heads=config.kv_heads // ranks,
            key_size=size,
            value_size=size,
            scale=config.attention,
        )
        self.factor = config.residual
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            spec,
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, heads=heads, kv_heads=config.kv_heads, key_size=size),
            out=Linear(build, heads * size, hidden, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner)

    def forward(self, x, step):
        """(hidden, residual) -> (hidden, residual); `add` returns the norm of their sum, and the sum."""
        hidden, residual = self.input_layernorm.add(*x, step)
        hidden = self.self_attn(hidden, step) * self.factor
        hidden, residual = self.post_attention_layernorm.add(hidden, residual, step)
        return self.mlp(hidden, step) * self.factor, residual


def build(config, build):
    """The model, with every op bound to the kernels chosen for this machine."""
    rope = Rope(build, config.rope)
    embedding = ScaledEmbedding(build, config)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=ScaledHead(build, config, embedding.weight if config.tied else None),
    )
