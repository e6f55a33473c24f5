"""Requests that ask for logits processors of steering.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llmcore.engine.llm import LLM

HERE = Path(__file__).parent
PLUGINS = [str(HERE / "ahead_device.py"), str(HERE / "steering.py")]
AHEAD = pytest.mark.parametrize("ahead", [0, 1])
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
ANSWERS = 94
"""The fake model answers with ids below this."""


def use(name: str, **args: Any) -> dict[str, Any]:
    return {"logits_processors": [{"name": name, "args": args}]}


def together(
    llm: LLM, prompts: list[list[int]], options: list[dict[str, Any]], n: int, **more: Any
) -> list[list[int]]:
    """All prompts at once, each with its own options."""

    def ask(i: int) -> list[int]:
        return llm.generate([prompts[i]], max_new_tokens=n, **{**GREEDY, **more, **options[i % len(options)]})[
            0
        ].token_ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, range(len(prompts))))
