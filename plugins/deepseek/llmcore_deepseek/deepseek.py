"""DeepSeek's decoder: latent attention, and a mixture of experts in all layers after some dense ones."""

from __future__ import annotations

from dataclasses import replace

from llmcore.api import WeightMap
from llmcore.layers import (
    Bucketed,
    Build,
    Decoder,
    Embedding,
    GatedMLP,
    Hidden,
    Layer,
    LMHead,
    MoE,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    expert_names,
)

from llmcore_deepseek.config import GROUP, DeepseekConfig
from llmcore_deepseek.mla import MLA, MLA_FUSE


def weights(config: DeepseekConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    further = (config.num_layers + index for index in range(config.skipped))
    names = dense_weights(config, skip=tuple(f"model.layers.{index}.*" for index in further))
    fuse = {name: parts for name, parts in names.fuse.items() if name != "qkv_proj"}
    return replace(names, fuse={**fuse, **MLA_FUSE}, stack=expert_names())


def experts(build: Build, config: DeepseekConfig) -> MoE:
    """Returns a mixture of experts. The experts that all tokens see are one MLP beside it."""
    corrected = config.route.scoring == "sigmoid"
    size, inner = config.hidden_size, config.expert_inner
    return MoE(build, size, inner, config.route, corrected=corrected, shared=config.shared, partial=True)


class Block(Layer):
    """norm, attention, norm, MLP or experts. The residual stream runs beside the hidden states."""

    def __init__(self, build: Build, config: DeepseekConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = MLA(build, hidden, config.latent, group=GROUP, index=index, rope=rope)
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        if config.sparse[index]:
            self.mlp: MoE | GatedMLP = experts(build, config)
        else:
            self.mlp = GatedMLP(build, hidden, config.inner, partial=True, source=self.post_attention_layernorm)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP."""
        hidden, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(hidden, step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP or the experts. Each token is computed by itself."""
        hidden, residual = self.post_attention_layernorm.add(*x, step)
        return self.mlp(hidden, step), residual


def build(config: DeepseekConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
