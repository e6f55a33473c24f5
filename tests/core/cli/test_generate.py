"""`llmcore generate` on the fake model, whose answers are known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.cli import main
from llmcore.cli.generate import read_items
from llmcore_devtools import write_fake_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake"))


def generate(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, *args: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, rows and stderr."""
    with pytest.raises(SystemExit) as end:
        main(["generate", str(prompts), "--model_dir", str(model), "--max_total_token_num", "2k", *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), [json.loads(line) for line in out.splitlines()], err


def test_a_prompt_per_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nhello world\nhello\n")
    code, rows, err = generate(capsys, model, prompts, "--max_new_tokens", "5")
    assert code == 0, err
    assert [row["prompt"] for row in rows] == ["hello", "hello world", "hello"]
    assert rows[0]["text"] == rows[2]["text"]
    assert all(row["output_tokens"] <= 5 and row["finish_reason"] in ("stop", "length") for row in rows)


def test_lines_keep_their_fields_and_a_file_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"id": 7, "prompt": "hello"}) + "\n")
    code, rows, err = generate(capsys, model, prompts, "--max_new_tokens", "3", "--output", str(answers))
    assert (code, rows) == (0, []), err
    assert json.loads(answers.read_text())["id"] == 7


def test_a_file_that_is_not_a_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "model.gguf"
    prompts.write_bytes(b"GGUF\xff\xfe\x00")
    code, rows, err = generate(capsys, model, prompts)
    assert (code, rows) == (2, [])
    assert "model.gguf is not a text; give one prompt per line" in err


def test_a_prompt_that_is_too_long_does_not_stop_the_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a " * 500 + "\nhello\n")
    code, rows, _ = generate(capsys, model, prompts, "--max_req_total_len", "64", "--max_new_tokens", "60")
    assert code == 1
    assert "it may have 1 to 63" in rows[0]["error"]
    assert rows[1]["text"] and "error" not in rows[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "prompts.jsonl, line 2 is not JSON"),
        ('{"text": "x"}', 'line 2: give "prompt", a text, or "messages", a list'),
        ('{"prompt": "x", "messages": []}', "line 2: give"),
        ('{"prompt": 3}', "line 2: give"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str) -> None:
    lines = io.StringIO(f"fine\n{text}\n")
    lines.name = "prompts.jsonl"
    with pytest.raises(ConfigError, match=message):
        list(read_items(lines))


def test_chat_makes_messages_of_lines(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    prompts.write_text(f"hi\n{json.dumps(conversation)}\n")
    code, rows, err = generate(capsys, model, prompts, "--chat", "--max_new_tokens", "3")
    assert code == 0, err
    assert rows[0]["prompt"] == "hi" and rows[1]["messages"] == conversation["messages"]
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"] and rows[0]["text"] == rows[1]["text"]
    _, plain, _ = generate(capsys, model, prompts, "--max_new_tokens", "3")
    assert plain[0]["prompt_tokens"] < rows[0]["prompt_tokens"]
