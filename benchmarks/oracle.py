"""Runs transformers on the weights that llmcore serves, and compares logits: shared by other scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llmcore_devtools.loaded_model import LoadedModel, Row
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


@torch.inference_mode()
def their_logits(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    """Returns f32 logits of the last tokens."""
    given = torch.tensor([list(tokens)], device=model.device)
    found: torch.Tensor = model(input_ids=given, use_cache=False, logits_to_keep=last).logits[0].float()
    return found


def decoded_logits(ours: LoadedModel, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Returns logits of the last `count` tokens, each decoded in a step of its own."""
    start = len(tokens) - count
    ours.step([Row(0, tuple(tokens[:start]), 0, start)])
    rows = [Row(0, (tokens[at],), at, start, decode=True) for at in range(start, len(tokens))]
    return torch.cat([ours.step([row]) for row in rows])


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the relative L2 error."""
    return float((got - expected).norm() / expected.norm())
