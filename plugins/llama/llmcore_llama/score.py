"""LlamaForSequenceClassification: Llama with a linear `score` head, as reward models and classifiers have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import WeightMap
from llmcore.layers import Build, Decoder, Embedding, LMHead, read_scoring, scoring_weights

from llmcore_llama import llama


def read_config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Reads config.json."""
    return replace(llama.read_config(hf), **read_scoring(hf))


def weights(config: llama.LlamaConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return scoring_weights(llama.weights(config))


def build(config: llama.LlamaConfig, build: Build) -> Decoder:
    """The whole model."""
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return llama.decoder(config, build, embedding, LMHead(build, config.hidden_size, config.scores))
