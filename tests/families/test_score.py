"""Heads that score a prompt, against transformers: the head's numbers at the last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmcore import LLM
from llmcore.api import RequestError
from llmcore.api.bridge import Submit
from llmcore.engine.engine import Engine
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn

PROMPTS = ([7], [5, 99, 3, 77, 20, 41, 8, 130, 0, 64, 2], list(range(30, 60)))
REGISTRY = registry_for_tests()


def reward_model(folder: Path) -> Any:
    """Qwen2ForRewardModel, which transformers does not have: its decoder, and the MLP that its checkpoints hold."""
    theirs = small_model("Qwen2ForSequenceClassification", num_labels=1)
    size = theirs.config.hidden_size
    theirs.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen2ForRewardModel"]}
    del config["id2label"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    assert {"score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"} <= tensors.keys()
    save_file(tensors | {"lm_head.weight": torch.ones(3, 3)}, folder / "model.safetensors")
    return theirs


@torch.inference_mode()
def expected(theirs: Any, prompt: list[int]) -> torch.Tensor:
    hidden = theirs.model(input_ids=torch.tensor([prompt])).last_hidden_state
    found: torch.Tensor = theirs.score(hidden[0, -1])
    return found


@pytest.mark.parametrize(
    ("architecture", "labels", "tied"),
    [
        ("LlamaForSequenceClassification", 1, False),
        ("LlamaForSequenceClassification", 5, True),
        ("LlamaForSequenceClassification", 2, False),
        ("Qwen2ForSequenceClassification", 3, True),
        ("Qwen2ForRewardModel", 1, False),
    ],
)
def test_scores_are_those_of_transformers(tmp_path: Path, architecture: str, labels: int, tied: bool) -> None:
    if architecture == "Qwen2ForRewardModel":
        theirs = reward_model(tmp_path)
    else:
        theirs = small_model(architecture, num_labels=labels, tie_word_embeddings=tied)
        theirs.save_pretrained(tmp_path)
    ours = LoadedModel(tmp_path, registry=REGISTRY)
    assert (ours.config.scores, ours.config.architecture) == (labels, architecture)
    rows = [Row(index, tuple(prompt), 0, len(prompt)) for index, prompt in enumerate(PROMPTS)]
    want = torch.stack([expected(theirs, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(ours.step(rows), want, rtol=1e-4, atol=1e-4)
    for start in range(0, 30, 7):
        got = ours.step([Row(3, tuple(PROMPTS[2][start : start + 7]), start, 30)])
    torch.testing.assert_close(got, want[2:], rtol=1e-4, atol=1e-4)


def test_the_engine_scores_prompts(tmp_path: Path) -> None:
    theirs = small_model("LlamaForSequenceClassification", num_labels=3, vocab_size=400)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    many = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in (1, 2, 13, 30, 47, 63)]
    with LLM(tmp_path, device="cpu", chunked_prefill_size=16, batch_max_tokens=64) as llm:
        for _ in range(2):  # the second time with prefix hits
            for prompt, got in zip(many, llm.score(many), strict=True):
                assert got == pytest.approx(expected(theirs, prompt).tolist(), rel=1e-4, abs=1e-4)
        text = "a prompt in words"
        (scored,) = llm.score(text)
        assert scored == pytest.approx(expected(theirs, llm.tokenizer.encode(text)).tolist(), rel=1e-4, abs=1e-4)
        load = llm.load()
        assert (load.output_tokens, load.running, load.kv_live) == (0, 0, 0) and load.cached_tokens > 0
        with pytest.raises(
            RequestError, match=r"LlamaForSequenceClassification\) scores prompts and generates nothing"
        ):
            llm.generate(text)
        with pytest.raises(RequestError, match="token id 400 is outside"):
            llm.score([[400]])


def test_a_model_without_such_a_head_says_so(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM", vocab_size=400).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as llm, pytest.raises(RequestError, match="generates; it has no head that score"):
        llm.score("x")


def test_a_score_is_one(tmp_path: Path) -> None:
    small_model("LlamaForSequenceClassification", vocab_size=400).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as llm:
        engine: Engine = llm._bridge._engine
        request = Submit(id=1, prompt=np.array([5], "<i4").tobytes(), max_new_tokens=1, n=2, score=True)
        with pytest.raises(RequestError, match="a score is one"):
            engine.submit(request)


def test_broken_scores_end_with_an_error(tmp_path: Path) -> None:
    theirs = small_model("LlamaForSequenceClassification", vocab_size=400)
    theirs.score.weight.data[0, 0] = float("nan")
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as llm, pytest.raises(RequestError, match="not finite"):
        llm.score("x")
