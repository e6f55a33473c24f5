"""A family whose checkpoints have other names and other matrices than ours: GPT2LMHeadModel.

Its linears are saved as [inputs, outputs], and two of them are both called `c_proj`. Positions come from a table that
is added to the embedding, not from rope.
"""

from llmcore.api import AttnSpec, ConfigError, ModelSpec, Shard, WeightMap, hookimpl
from llmcore.layers import (
    MLP,
    Attention,
    Decoder,
    DenseConfig,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    NoRope,
    QKVLinear,
    read_dense,
)
from torch import nn


@hookimpl
def register_models():
    yield ModelSpec(
        name="gpt2",
        architectures=("GPT2LMHeadModel",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf):
    """Reads config.json. Its fields have names of their own."""
    if (activation := hf.get("activation_function", "gelu_new")) != "gelu_new":
        raise ConfigError(f"GPT2LMHeadModel with activation_function {activation!r} is not known; known: gelu_new")
    if hf.get("scale_attn_by_inverse_layer_idx"):
        raise ConfigError("GPT2LMHeadModel with scale_attn_by_inverse_layer_idx is not known")
    hidden, heads = hf["n_embd"], hf["n_head"]
    given = {
        "eos_token_id": hf.get("eos_token_id", 50256),
        "dtype": hf.get("dtype") or hf.get("torch_dtype"),
        "vocab_size": hf["vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": hf["n_layer"],
        "num_attention_heads": heads,
        "max_position_embeddings": hf["n_positions"],
        "intermediate_size": hf.get("n_inner") or 4 * hidden,
        "rms_norm_eps": hf.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": hf.get("tie_word_embeddings", True),
    }
    return DenseConfig(**read_dense(given, "GPT2LMHeadModel"))


def weights(config):
    """Maps names in the checkpoint to names of the modules below. Causal masks have no rule and are skipped."""
    return WeightMap(
        rename={
            "transformer.wte.": "embed_tokens.",
            "transformer.wpe.": "embed_tokens.wpe.",
            "transformer.ln_f.": "norm.",
            "transformer.h.": "layers.",
        },
        suffix={
            "attn.c_attn": "attn.qkv_proj",
            "attn.c_proj": "attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        transpose=("*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"),
    )


class PlacedEmbedding(Embedding):
    """The row of the token plus the row of its position."""

    def __init__(self, build, config):
        super().__init__(build, config.vocab_size, config.hidden_size)
        self.wpe = Embedding(build, config.max_position, config.hidden_size)

    def forward(self, tokens, step):
        return super().forward(tokens, step) + self.wpe(step.positions[0].long(), step)


class Block(nn.Module):
    """norm, attention, norm, MLP. Modules with the checkpoint's names need no rule."""

    def __init__(self, build, config, rope, index):
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        heads = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.ln_1 = LayerNorm(build, hidden, config.eps)
        self.attn = Attention(
            build,
            AttnSpec(**heads, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, bias=True, **heads),
            out=Linear(build, hidden, hidden, bias=True, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.ln_2 = LayerNorm(build, hidden, config.eps)
        self.mlp = MLP(build, hidden, config.inner, bias=True)

    def forward(self, x, step):
        hidden, residual = self.ln_1.add(*x, step)
        hidden, residual = self.ln_2.add(self.attn(hidden, step), residual, step)
        return self.mlp(hidden, step), residual


def build(config, build):
    rope = NoRope(build, config.rope)
    embedding = PlacedEmbedding(build, config)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
