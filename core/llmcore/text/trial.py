"""`python -m llmcore.text.trial PARENT CPU_SECONDS`: render a model's chat templates once, in a separate process.

A template is a program that came with a download. In a server each render has limits (`render_budget`). This child
process prevents a server from starting with a template that exceeds them for a message of one word.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
from jinja2.exceptions import SecurityError

from llmcore.api.errors import ConfigError, RequestError
from llmcore.config.process import die_with_parent
from llmcore.text.companions import Companions, read_companions
from llmcore.text.render_budget import OverBudget
from llmcore.text.templates import ChatTemplate

CPU_SECONDS = 10
"""Most CPU seconds for compiling and rendering all templates. Each render ends after one second by itself."""
WALL_SECONDS = 600
"""Most seconds of real time. A template cannot sleep, so only an overloaded machine reaches this limit."""
MEMORY_BYTES = 1 << 30
"""Most bytes of address space beyond those that the child has before it reads the templates."""
MOST_TEXT = 1 << 20
"""Most characters of the rendered prompt for a message of one word."""

_REFUSED = 2
_READY = b"ready"
_FIX = "take chat_template.jinja from a source you trust, or give --chat_template"


def try_templates(directory: Path) -> None:
    """Raise ConfigError if a chat template beside the tokenizer in `directory` cannot be served."""
    companions = read_companions(directory)
    if not companions.templates:
        return
    given = orjson.dumps({"templates": companions.templates, "tokens": companions.tokens})
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(CPU_SECONDS)]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the process that tries the model's chat template did not end within {WALL_SECONDS} s; "
            "start the server when the machine is less busy"
        ) from error
    if not done.returncode:
        return
    said = done.stderr.decode(errors="replace").strip().splitlines()
    last = said[-1] if said else f"it was ended by {_ending(done.returncode)}"
    if done.returncode == _REFUSED:
        raise ConfigError(last)
    if not done.stdout.startswith(_READY):
        raise ConfigError(
            f"the process that tries the model's chat template could not start: {last}; "
            "check the limits of this shell (ulimit -a) and the free memory"
        )
    if done.returncode == -signal.SIGXCPU:
        last = f"it does not end within {CPU_SECONDS} s of CPU time"
    raise ConfigError(f"the model's chat template cannot be tried: {last}; {_FIX}")


def _ending(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def main(parent: int, cpu_seconds: int) -> int:
    """Run the trial; returns the child's exit code: 0, or 2 with the reason on stderr.

    It writes `_READY` to stdout before it compiles the templates.
    """
    die_with_parent(parent)
    given = orjson.loads(sys.stdin.buffer.read())
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_seconds)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    try:
        problem = _problem(Companions(given["tokens"], templates=given["templates"]))
    except MemoryError:
        problem = "it takes too much memory"
    if problem is None:
        return 0
    sys.stderr.write(f"the model's chat template cannot be served: {problem}; {_FIX}\n")
    return _REFUSED


def _limit(kind: int, value: int) -> None:
    """Lower a limit of this process, unless its limit is lower already."""
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or value < soft:
        resource.setrlimit(kind, (value, hard))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _problem(companions: Companions) -> str | None:
    """The reason why a template cannot be served, or None.

    A template that refuses this message, or fails on it, may still work for others.
    """
    for source in companions.templates.values():
        try:
            template = ChatTemplate({"default": source}, companions.tokens)
            text = template.render([{"role": "user", "content": "Hello"}])
        except ConfigError as error:
            return str(error)
        except RequestError as error:
            cause = error.__cause__
            if isinstance(cause, OverBudget):
                return f"for one word it takes {cause}"
            if isinstance(cause, (SecurityError, ArithmeticError, RecursionError, MemoryError)):
                return str(cause) or "it takes too much memory"
            continue
        if len(text) > MOST_TEXT:
            return f"it makes {len(text):,} characters of one word"
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
