"""Qwen2 with a head that scores a prompt: Qwen2ForSequenceClassification, and Qwen2ForRewardModel with its MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import WeightMap
from llmcore.layers import Bucketed, Build, Decoder, Linear, LMHead, read_scoring, scoring_weights
from torch import Tensor, nn

from llmcore_qwen import qwen2
from llmcore_qwen.common import QwenConfig

REWARD = "Qwen2ForRewardModel"


class RewardHead(nn.Module):
    """Linear, ReLU, linear. The module names are the checkpoint's numbers."""

    def __init__(self, build: Build, size: int, scores: int) -> None:
        super().__init__()
        first, last = Linear(build, size, size, bias=True), Linear(build, size, scores, bias=True)
        self.linears = nn.ModuleDict({"0": first, "2": last})

    def forward(self, x: Tensor, step: Bucketed) -> Tensor:
        """x [S, size] -> [S, scores]."""
        y: Tensor = self.linears["2"](self.linears["0"](x, step).relu_(), step)
        return y


def read_config(hf: Mapping[str, Any]) -> QwenConfig:
    """Reads config.json. Reward models have one score, whatever number of labels the config implies."""
    scoring = read_scoring(hf)
    if scoring["architecture"] == REWARD:
        scoring["scores"] = 1
    return replace(qwen2.read_config(hf), **scoring)


def weights(config: QwenConfig) -> WeightMap:
    """Maps names as they are saved."""
    names = scoring_weights(qwen2.weights(config))
    if config.architecture == REWARD:
        return replace(names, rename={**names.rename, "score.": "lm_head.linears."})
    return names


def build(config: QwenConfig, build: Build) -> Decoder:
    """The whole model."""
    head = RewardHead if config.architecture == REWARD else LMHead
    return qwen2.with_head(config, build, head(build, config.hidden_size, config.scores))
