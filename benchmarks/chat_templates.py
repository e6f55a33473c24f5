"""The cost of the limits on chat templates: `python benchmarks/chat_templates.py [TEMPLATE.jinja ...]`.

Renders conversations with Jinja's own sandbox, as transformers does, and with llmcore, in turns. Prints the best time
of each. Without arguments it takes the templates of tests/parsers/chat_templates.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llmcore.text.templates import ChatTemplate

HERE = Path(__file__).parent.parent / "tests" / "plugins" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place on some days.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town."},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}
TURNS = (1, 20, 400)
"""Questions with answers before the last question."""


def conversation(turns: int) -> list[dict[str, Any]]:
    """Returns messages of about a hundred characters."""
    said = [{"role": "system", "content": "You are a helpful assistant. " * 5}]
    for i in range(turns):
        said.append({"role": "user", "content": f"Question {i}: what is the weather like in Köln? " * 5})
        said.append({"role": "assistant", "content": f"Answer {i}: it rains. " * 20})
    return [*said, {"role": "user", "content": "And tomorrow?"}]


def plain(source: str) -> Callable[..., str]:
    """Returns the template in Jinja's sandbox alone."""
    import json

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(
        value, **{"ensure_ascii": False, "default": list, **kwargs}
    )
    environment.globals["raise_exception"] = lambda message: (_ for _ in ()).throw(jinja2.TemplateError(message))
    environment.globals["strftime_now"] = time.strftime
    template = environment.from_string(source)
    return lambda messages, **given: template.render(messages=messages, add_generation_prompt=True, **TOKENS, **given)


def seconds(render: Callable[[], Any], times: int) -> float:
    """Returns the CPU time of one call."""
    began = time.thread_time()
    for _ in range(times):
        render()
    return (time.thread_time() - began) / times


def main(paths: list[Path]) -> None:
    """Print a row for each template, with tools and without, and for each length."""
    print(f"{'template':46}{'turns':>6}{'tools':>6}{'Jinja, us':>12}{'llmcore, us':>13}{'ratio':>7}")
    for path in paths:
        source = path.read_text(encoding="utf-8")
        ours, theirs = ChatTemplate({"default": source}, TOKENS), plain(source)
        for turns in TURNS:
            messages = conversation(turns)
            for given in ({}, {"tools": [TOOL] * 4}):
                both = lambda: ours.render(messages, **given), lambda: theirs(messages, **given)  # noqa: B023
                if both[0]() != both[1]():
                    raise SystemExit(f"{path.name}: the prompts differ")
                times = max(2, 400 // turns)
                best = [min(seconds(render, times) for render in both) for both in zip(*[both] * 9, strict=True)]
                jinja, llmcore = best[1] * 1e6, best[0] * 1e6
                row = f"{path.stem[:45]:46}{turns:6}{'yes' if given else 'no':>6}"
                print(f"{row}{jinja:12.1f}{llmcore:13.1f}{llmcore / jinja:7.2f}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.jinja")))
