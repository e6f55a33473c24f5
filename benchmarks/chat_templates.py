"""The time that chat templates take: `python benchmarks/chat_templates.py [TEMPLATE.jinja ...]`.

Renders conversations in this process, as `LLM` does, and in a child process, as a server does, in turns. Prints the
median of each, and the CPU time that the server's own thread needs for the child's answer. Without arguments it takes
the templates of tests/parsers/chat_templates.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmcore.text.templates import ChatTemplate
from llmcore_server.templates import ChildTemplate

HERE = Path(__file__).parent.parent / "tests" / "parsers" / "chat_templates"
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


def medians(renders: Sequence[Callable[[], Any]], times: int) -> list[float]:
    """Microseconds that each of `renders` takes, in turns, then the CPU time of this thread in the last of them."""
    taken: list[list[float]] = [[] for _ in (*renders, "CPU")]
    for _ in range(times):
        for render, found in zip(renders, taken, strict=False):
            began, cpu = time.perf_counter(), time.thread_time()
            render()
            found.append(time.perf_counter() - began)
        taken[-1].append(time.thread_time() - cpu)
    return [statistics.median(found) * 1e6 for found in taken]


def main(paths: list[Path]) -> None:
    """Print a row for each template, with tools and without, and for each length."""
    print(f"{'us':46}{'turns':>6}{'tools':>6}{'in process':>12}{'in a child':>12}{'own CPU':>9}")
    for path in paths:
        template = ChatTemplate({"default": path.read_text(encoding="utf-8")}, TOKENS)
        child = ChildTemplate(template)
        for turns in TURNS:
            messages = conversation(turns)
            for given in ({}, {"tools": [TOOL] * 4}):
                both = lambda: template.render(messages, **given), lambda: child.render(messages, **given)  # noqa: B023
                if both[0]() != both[1]():
                    raise SystemExit(f"{path.name}: the prompts differ")
                here, there, own = medians(both, max(20, 4000 // turns))
                row = f"{path.stem[:45]:46}{turns:6}{'yes' if given else 'no':>6}"
                print(f"{row}{here:12.1f}{there:12.1f}{own:9.1f}")
    (process,) = (idle._process for idle in child._pool._idle)
    print("a child has", Path(f"/proc/{process.pid}/status").read_text().partition("VmRSS:")[2].split("\n")[0].strip())


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.jinja")))
