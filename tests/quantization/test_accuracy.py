"""What modes that quantize weights at load cost the real SmolLM2-135M: KL(plain || quantized) over real text.

There are two witnesses. The limits of benchmarks/accuracy.py are figures of an earlier study, for which
transformers computed the same tokens with rounded weights. And transformers with the roundings of witness.py computes
the first tokens here, for modes that leave inputs as they are. Rounded inputs have no such witness over 30 layers: an
input that lies between two codes becomes either, by the last bits of the sums before it. transformers in f64 differs
from itself in f32 by a KL of 0.03 in w8a8, which is as much as the mode costs.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.checkpoint import GGUFCheckpoint
from safetensors.torch import save_file
from witness import MODES, rounded_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

GATED = ("triton_w4a16 g64", "fp8w8a8")
"""A mode of weights alone, and one that rounds inputs too. `accuracy.py --only quantized` compares all `KL_LIMITS`."""

COMPARED = 16
"""Tokens that transformers computes here."""


@pytest.fixture(scope="module")
def accuracy() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("accuracy")


@pytest.fixture(scope="module")
def demo(accuracy: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The model as safetensors, which load in a third of the time, and in transformers, in f32."""
    checkpoint, folder = GGUFCheckpoint(accuracy.DEMO), tmp_path_factory.mktemp("demo")
    tensors = {name: read() for name, read in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config()))
    own = {key: value for key, value in checkpoint.config().items() if key not in ("architectures", "dtype")}
    theirs = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**own), dtype=torch.float32).eval()
    theirs.load_state_dict(tensors, strict=False)
    theirs.tie_weights()
    return folder, theirs


def loaded(folder: Path, *modes: str) -> LoadedModel:
    return LoadedModel(folder, data_type="f32", modes=modes, tokens=512, requests=1)


@pytest.fixture(scope="module")
def windows(accuracy: Any) -> torch.Tensor:
    found: torch.Tensor = accuracy.windows_of(accuracy.DEMO)
    assert found.shape == (2, accuracy.TOKENS)
    return found


@pytest.fixture(scope="module")
def plain(accuracy: Any, demo: tuple[Path, Any], windows: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the unquantized model."""
    found: torch.Tensor = accuracy.log_probabilities(loaded(demo[0]), windows)
    loss = -found.gather(-1, windows[:, 1:, None])
    assert float(loss.mean().exp()) == pytest.approx(23.395, abs=1e-3), "the study's perplexity"
    return found


@pytest.mark.parametrize("modes", GATED)
def test_kl_is_that_of_the_witnesses(
    accuracy: Any, demo: tuple[Path, Any], windows: torch.Tensor, plain: torch.Tensor, modes: str
) -> None:
    folder, theirs = demo
    found = accuracy.log_probabilities(loaded(folder, *modes.split()), windows)
    assert accuracy.kl_of(plain, found) == pytest.approx(accuracy.KL_LIMITS[modes], rel=accuracy.NEAR)
    if MODES[modes].inputs is None:
        expected = of_the_witness(rounded_model(copy.deepcopy(theirs), MODES[modes]), windows[0, :COMPARED])
        torch.testing.assert_close(found[0, : COMPARED - 1], expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def of_the_witness(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens - 1, vocabulary]."""
    logits: torch.Tensor = model(input_ids=window[None]).logits[0, :-1]
    return logits.log_softmax(-1)
