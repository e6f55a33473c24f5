"""`llmcore models`: families and their architectures."""

from __future__ import annotations

from listed import rows, run


def test_models_lists_families() -> None:
    found = {row["name"]: row for row in rows("models")}
    assert list(found) == sorted(found)
    assert found["llama"]["architectures"] == ["LlamaForCausalLM"]
    assert "LlamaForCausalLM" in run("models").output
