"""Runs transformers on the weights that llmcore serves, for comparisons in one run."""

from __future__ import annotations

from pathlib import Path

import torch
from llmcore_gguf.checkpoint import GGUFCheckpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def transformers_model(path: str, data_type: str) -> PreTrainedModel:
    """Returns the GGUF file at `path` as a transformers model in `data_type`: the same tensors, dequantized in the
    same way."""
    checkpoint = GGUFCheckpoint(Path(path))
    config = checkpoint.config()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=DTYPES[data_type])
    state = {name: read() for name, read in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise SystemExit(f"weights do not match: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()
