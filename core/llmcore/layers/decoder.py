"""Decoder: any slice of a model's layers, with or without embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from llmcore.api.models import ModelConfig
from llmcore.api.specs import bucket_of
from llmcore.layers.build import AttentionKernels, Build
from llmcore.layers.embedding import Embedding, LMHead
from llmcore.layers.layer import Layer
from llmcore.layers.norm import LayerNorm, RMSNorm
from llmcore.layers.partial import Partial
from llmcore.layers.step import Bucketed, Rows, Step

Hidden = tuple[torch.Tensor, torch.Tensor | None]
"""(hidden, residual), both [T, hidden_size]. The next norm normalizes their sum.

With several ranks, a block whose last linear or mixture is `partial` gives a Partial as hidden to the next block.
"""


@runtime_checkable
class Halves(Protocol):
    """A block in two parts: `attend` up to the last operation that reads other tokens, and `feed` for the rest."""

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) [T, hidden_size] -> (hidden, residual)."""

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The same shapes, for any subset of the tokens."""


class Decoder(Layer):
    """The model that a family's `build` returns and the engine runs.

    `block(i)` makes layer i, called as ``block((hidden, residual), step) -> (hidden, residual)``. A block that
      implements `Halves` saves work: after the last attention only sampled tokens matter, so the last block's `feed`
      gets only these.
    `layers`: the layers that this process holds; None: all.
    `embedding`: without it the hidden states come from the previous stage.
    `norm`, `head`: without them the hidden states go to the next stage.
    `attention_kernels`: KV group -> the kernels that the model runner plans.
    `wrapped`: path of a block or module that a plugin wrapped -> its path inside the wrapper, for example "layers.0"
      -> "layers.0.inner". The weight loader uses it.
    """

    def __init__(
        self,
        build: Build,
        block: Callable[[int], nn.Module],
        *,
        layers: range | None = None,
        embedding: Embedding | None = None,
        norm: RMSNorm | LayerNorm | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config: ModelConfig = build.config
        self.embed_tokens, self.norm, self.lm_head = embedding, norm, head
        held = range(build.config.num_layers) if layers is None else layers
        self.wrapped: dict[str, str] = {}
        self.layers = nn.ModuleDict({str(i): self._layer(build, block(i), i) for i in held})
        self.attention_kernels: Mapping[str, AttentionKernels] = build.attention_kernels
        self._blocks = tuple(self.layers.values())

    def _layer(self, build: Build, block: nn.Module, index: int) -> nn.Module:
        name = f"layers.{index}"
        known = {module: f"{name}.{path}".rstrip(".") for path, module in block.named_modules()}
        layer = build.layer(block, name, index)
        for path, module in layer.named_modules():
            found = f"{name}.{path}".rstrip(".")
            if module in known and family_path(self.wrapped, found) != known[module]:
                self.wrapped[known[module]] = found
        return layer

    def forward(self, step: Step, hidden: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> Hidden:
        """Run the layers; returns (hidden, residual), [T, hidden_size] each.

        `hidden` and `residual` come from the previous stage, or are given embeddings. With a head and `step.sampled`,
        the result has only the sampled tokens, [S, hidden_size].
        """
        if hidden is None:
            assert self.embed_tokens is not None, "a slice without embedding needs hidden states"
            hidden = self.embed_tokens(step.tokens, step)
        x: Hidden = (hidden, residual)
        for block in self._blocks[:-1]:
            x = block(x, step)
        last = self._blocks[-1]
        if self.lm_head is None or step.sampled is None:
            x = last(x, step)
        elif isinstance(last, Halves):
            x = chosen(last.attend(x, step), step.sampled)
            x = last.feed(x, Rows(bucket_of(len(x[0])))) if len(x[0]) else x
        else:
            x = chosen(last(x, step), step.sampled)
        last_hidden, residual = x
        if isinstance(last_hidden, Partial):
            last_hidden = last_hidden.sum(Rows(bucket_of(len(last_hidden))))
        return last_hidden, residual

    def logits(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab_size] (or [S, config.scores]) in the model's dtype, from the sampled tokens' states."""
        assert self.lm_head is not None, "a slice without head has no logits"
        y: torch.Tensor = self.lm_head(self.normed(hidden, residual), Rows(bucket_of(len(hidden))))
        return y

    def own_logits(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, N] of this rank's part of the vocabulary, without padding, from the same states as `logits`.

        No rank waits for another.
        """
        assert isinstance(self.lm_head, LMHead), "only the logits of a vocabulary have parts"
        return self.lm_head.own(self.normed(hidden, residual), Rows(bucket_of(len(hidden))))

    def normed(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The normalized hidden states [S, hidden_size] that the head reads, in the model's dtype."""
        assert self.norm is not None, "a slice without norm has no last hidden states"
        normed: torch.Tensor = self.norm.add(hidden, residual, Rows(bucket_of(len(hidden))))[0]
        return normed

    def elsewhere(self, parameter: str) -> bool:
        """True if the parameter with this name belongs to another slice of the model."""
        first, _, rest = parameter.partition(".")
        if first == "layers":
            return rest.partition(".")[0] not in self.layers
        return first in ("embed_tokens", "norm", "lm_head") and getattr(self, first) is None


def family_path(wrapped: Mapping[str, str], path: str) -> str | None:
    """The family's name of the module or parameter at `path`; None if it belongs to a wrapper.

    `wrapped`: as in a Decoder.
    """
    inside = [name for name, place in wrapped.items() if path == place or path.startswith(f"{place}.")]
    base = max(inside, key=len, default="")
    name = base + path.removeprefix(wrapped[base]) if base else path
    own = (other for other in wrapped if len(other) > len(base) and (name == other or name.startswith(f"{other}.")))
    return None if any(own) else name


def chosen(x: Hidden, tokens: torch.Tensor) -> Hidden:
    """The rows `tokens` [S] of the hidden states and of the residual, if there is one."""
    hidden, residual = x
    some = hidden.rows(tokens) if isinstance(hidden, Partial) else hidden.index_select(0, tokens)
    return some, None if residual is None else residual.index_select(0, tokens)
