"""lm-eval's loglikelihoods over the completions endpoint, held against transformers' own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from llmcore_devtools.server import RunningServer
from transformers import AutoTokenizer, LlamaForCausalLM

from .conftest import Tool

QUESTIONS = [
    {"question": "The cat sat on", "choices": ["the mat", "stop"], "answer": 0},
    {"question": "Then the other one", "choices": ["stopped", "in the end", "an", "there"], "answer": 2},
    {"question": "é and 😀 cost 5 €", "choices": ["in Rome", "the 😀"], "answer": 1},
]


def write_task(folder: Path) -> None:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": "local_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "local_questions.yaml").write_text(yaml.safe_dump(task))


def test_loglikelihoods(small_server: RunningServer, small_model: Path, tool: Tool) -> None:
    write_task(tool.home)
    served = f"model={small_model.name},base_url={small_server.url}/v1/completions,num_concurrent=2,max_length=250"
    tokens = f"tokenizer_backend=huggingface,tokenizer={small_model}"
    task = ("--include_path", str(tool.home), "--tasks", "local_questions", "--log_samples", "-o", str(tool.home))
    tool.run("lm_eval", "run", "--model", "local-completions", "--model_args", f"{served},{tokens}", *task)
    [written] = tool.home.rglob("samples_local_questions_*.jsonl")
    found = {}
    for line in written.read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc_id"]] = [float(answer[0][0]) for answer in sample["resps"]]
    assert found.keys() == set(range(len(QUESTIONS)))
    model = LlamaForCausalLM.from_pretrained(small_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    for index, question in enumerate(QUESTIONS):
        for choice, logprob in zip(question["choices"], found[index], strict=True):
            context = tokenizer.encode(question["question"], add_special_tokens=False)
            ids = tokenizer.encode(f"{question['question']} {choice}", add_special_tokens=False)
            with torch.inference_mode():
                known = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
            expected = sum(float(known[i - 1, ids[i]]) for i in range(len(context), len(ids)))
            assert logprob == pytest.approx(expected, abs=1e-3)
