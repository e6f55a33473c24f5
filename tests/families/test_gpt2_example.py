"""The family of docs/examples/gpt2: ends of names, transposed matrices, positions from a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore_devtools import registry_of
from llmcore_devtools.family import assert_family_matches_transformers, small_model
from llmcore_devtools.loaded_model import LoadedModel
from safetensors.torch import load_file, save_file

FILE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt2" / "gpt2.py"
ARCHITECTURE = "GPT2LMHeadModel"


@pytest.fixture(scope="module")
def registry() -> Any:
    return registry_of(str(FILE))


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False, "n_inner": 100}])
def test_gpt2(registry: Any, overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(1, 13, 30), **overrides)


def test_a_file_with_masks_and_one_that_lacks_a_matrix(registry: Any, tmp_path: Path) -> None:
    theirs = small_model(ARCHITECTURE)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)}
    masks["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file({**tensors, **masks}, file)
    with torch.inference_mode():
        expected = theirs(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(
        LoadedModel(tmp_path, registry=registry).all_logits([3, 1, 4]), expected, rtol=1e-4, atol=1e-4
    )
    gone = ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight", "transformer.wpe.weight")
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, file)
    with pytest.raises(ConfigError) as error:
        LoadedModel(tmp_path, registry=registry)
    listed = str(error.value).partition("missing: ")[2].partition("; ")[0].split(", ")
    assert set(listed) == set(gone)
