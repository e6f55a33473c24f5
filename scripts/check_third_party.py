"""Check that a third-party package, installed from its wheel beside a broken one, does all that it says.

`check` runs the content of tests/third_party through the commands and the server of a clean environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

DISTRIBUTIONS = ("acme-serving", "acme-broken")
START_SECONDS = 300
CALL = '<call add>{"a": 1, "b": 2}</call>'
READY = re.compile(r"^serving at: (http://\S+)$", re.MULTILINE)


def check(bin_folder: Path, source: Path, scratch: Path) -> None:
    """Raises AssertionError or CalledProcessError with the mistake. `source`: tests/third_party."""
    scratch.mkdir()
    model = scratch / "model"
    _run(bin_folder / "python", source / "make_model.py", model)
    llmcore = bin_folder / "llmcore"
    _check_listing(llmcore)
    assert "GPTNeoXForCausalLM" in _run(llmcore, "card", model), "the command does not say what it is for"
    _check_kernels(llmcore, model)
    shutil.copy(source / "acme" / "test_acme.py", scratch)
    _run(bin_folder / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", scratch / "test_acme.py", cwd=scratch)
    _check_server(llmcore, model, scratch)


def _check_listing(llmcore: Path) -> None:
    states = {row["name"]: row for row in json.loads(_run(llmcore, "plugins", "--json"))}
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
        rows = json.loads(_run(llmcore, "kernels", op, "--explain", "--json", *arguments))
        chosen = {row["chosen"] for row in rows}
        assert chosen == {expected}, f"{op} with {arguments} is {chosen}, not {expected}"


def _check_server(llmcore: Path, model: Path, scratch: Path) -> None:
    """Run the server once with Acme's plugin alone, and once with everything that is installed."""
    chosen = ("--plugins", "acme", "--mode", "acme", "--scheduler", "shortest-prompt", "--tool_call_parser", "acme")
    with _serving(llmcore, model, scratch / "acme.log", *chosen) as url:
        message = _answer(url)
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}, message
        assert message["content"] == "Well: ", message
    assert "attn.gqa.decode=acme" in (scratch / "acme.log").read_text(), "the server runs another kernel"
    with _serving(llmcore, model, scratch / "all.log", "--tool_call_parser", "acme") as url:
        assert _answer(url)["tool_calls"], "with a broken plugin beside it, it does not work"
    assert "acme-broken" in (scratch / "all.log").read_text(), "the server does not report the broken plugin"


def _answer(url: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "What is 1 + 2?"}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "logits_processors": [{"name": "say", "args": {"text": f"Well: {CALL}"}}],
        "max_tokens": 100,
    }
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=120) as reply:
        [choice] = json.load(reply)["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    message: dict[str, Any] = choice["message"]
    return message


@contextmanager
def _serving(llmcore: Path, model: Path, log: Path, *options: str) -> Iterator[str]:
    """Yields the URL of `llmcore serve`, which the log names. The end of the block ends the server."""
    command = [str(llmcore), "serve", "--model_dir", str(model), "--host", "127.0.0.1", "--port", "0", *options]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, cwd=model, env=_environment()) as server,
    ):
        try:
            yield _wait_for(server, log)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(20)
    assert code == 0, f"the server ended with exit code {code}:\n{log.read_text()}"


def _wait_for(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if found := READY.search(log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server does not start:\n{log.read_text()}")


def _run(*command: object, cwd: Path | None = None) -> str:
    """Returns the standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=_environment(), timeout=600)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    """Returns this environment without variables that lead to the built tree."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LLMCORE_PLUGINS")}
