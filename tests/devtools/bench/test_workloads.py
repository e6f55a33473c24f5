"""Lengths are the ones that every engine got, prompts the ones that none has seen."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from llmcore.api.errors import ConfigError
from llmcore_devtools.bench.workloads import Prompts, chat, fixed, parse_workload, read_lengths

ROOT = Path(__file__).resolve().parents[3]


def test_the_chat_mix_is_the_one_every_engine_got() -> None:
    draw = random.Random(7)
    expected = []
    for _ in range(50):
        prompt = int(min(max(draw.lognormvariate(4.8, 1.1), 8), 2048))
        expected.append((prompt, int(min(max(draw.lognormvariate(4.95, 0.9), 8), 1024))))
    assert chat(50).lengths == tuple(expected)
    assert chat(3).lengths == ((82, 181), (135, 35), (26, 72))
    whole = chat(1000)
    assert round(whole.prompt_tokens / 1000) == 218 and round(whole.output_tokens / 1000) == 191


def test_workloads_by_name() -> None:
    assert parse_workload("fixed:2,10,3").lengths == ((10, 3), (10, 3))
    assert parse_workload("chat:5") == chat(5)
    assert fixed(1, 4, 2).cut(3).lengths == ((4, 2),) * 3
    assert chat(9).cut(4).lengths == chat(4).lengths


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens\n3,4\n5,6\n")
    found = read_lengths(file, 20, seed=1)
    assert set(found.lengths) == {(3, 4), (5, 6)} and len(found.lengths) == 20
    assert read_lengths(file, 20, seed=1) == found != read_lengths(file, 20, seed=2)
    real = read_lengths(ROOT / "benchmarks" / "lengths" / "sharegpt_qwen3.csv", 1000, seed=7)
    assert min(min(pair) for pair in real.lengths) >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one column `prompt`"),
        ("prompt,answer\n1,2\n", "one column `output`"),
        ("prompt,output\n", "holds no pair"),
        ("prompt,output\n1,2\n3\n", "line 3: two whole numbers"),
        ("prompt,output\n1,x\n", "line 2: two whole numbers"),
        ("prompt,output\n0,1\n", "line 2: lengths are at least 1"),
    ],
)
def test_a_bad_file_of_lengths_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(tmp_path / "x.csv", 1, 7)


def test_prompts_are_new_and_within_the_vocabulary() -> None:
    prompts = Prompts(200_000)
    first, second = prompts.draw(50_000), prompts.draw(50_000)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, Prompts(200_000).draw(50_000))
    assert first.min() >= 10 and 99_000 < first.max() <= 99_999
    small = Prompts(300).draw(20_000)
    assert (small.min(), small.max()) == (10, 299)
    assert Prompts(5).draw(9).max() <= 4
