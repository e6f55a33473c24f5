"""Check that a third-party package, installed from its wheel beside a broken one, does all that it says.

`check` runs the content of tests/third_party through the commands and the server of a clean environment.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from running import fetched, run, serving

DISTRIBUTIONS = ("acme-serving", "acme-broken")
CALL = '<call add>{"a": 1, "b": 2}</call>'


def check(bin_folder: Path, source: Path, scratch: Path) -> None:
    """Raises AssertionError or CalledProcessError with the mistake. `source`: tests/third_party."""
    scratch.mkdir()
    model = scratch / "model"
    run(bin_folder / "python", source / "make_model.py", model, "GPTNeoXForCausalLM")
    llmcore = bin_folder / "llmcore"
    _check_listing(llmcore)
    assert "GPTNeoXForCausalLM" in run(llmcore, "card", model), "the command does not say what it is for"
    _check_kernels(llmcore, model)
    shutil.copy(source / "acme" / "test_acme.py", scratch)
    run(bin_folder / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", scratch / "test_acme.py", cwd=scratch)
    _check_server(llmcore, model, scratch)


def _check_listing(llmcore: Path) -> None:
    states = {row["name"]: row for row in json.loads(run(llmcore, "plugins", "--json"))}
    assert states["acme"]["state"] == "active", states["acme"]
    assert states["acme-broken"]["state"] == "failed", states["acme-broken"]
    assert "a_library_that_nobody_installed" in json.dumps(states["acme-broken"]), "the listing does not say why"
    failed = {name for name, row in states.items() if row["state"] != "active"}
    assert failed == {"acme-broken"}, f"{failed} do not work"


def _check_kernels(llmcore: Path, model: Path) -> None:
    op = "attn.gqa.decode"
    for arguments, expected in (
        (("--device", "sm90"), "acme-hopper"),
        (("--device", "cpu"), "sdpa"),
        (("--device", "cpu", "--mode", "acme", "--model", model), "acme"),
    ):
        rows = json.loads(run(llmcore, "kernels", op, "--explain", "--json", *arguments))
        chosen = {row["chosen"] for row in rows}
        assert chosen == {expected}, f"{op} with {arguments} is {chosen}, not {expected}"


def _check_server(llmcore: Path, model: Path, scratch: Path) -> None:
    """Run the server once with Acme's plugin alone, and once with everything that is installed."""
    chosen = ("--plugins", "acme", "--mode", "acme", "--scheduler", "shortest-prompt", "--tool_call_parser", "acme")
    with serving(llmcore, model, scratch / "acme.log", *chosen) as url:
        message = _answer(url)
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}, message
        assert message["content"] == "Well: ", message
    assert "attn.gqa.decode=acme" in (scratch / "acme.log").read_text(), "the server runs another kernel"
    with serving(llmcore, model, scratch / "all.log", "--tool_call_parser", "acme") as url:
        assert _answer(url)["tool_calls"], "with a broken plugin beside it, it does not work"
    assert "acme-broken" in (scratch / "all.log").read_text(), "the server does not report the broken plugin"


def _answer(url: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "What is 1 + 2?"}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "logits_processors": [{"name": "say", "args": {"text": f"Well: {CALL}"}}],
        "max_tokens": 100,
    }
    [choice] = json.loads(fetched(f"{url}/v1/chat/completions", body))["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    message: dict[str, Any] = choice["message"]
    return message
