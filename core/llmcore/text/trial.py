"""`python -m llmcore.text.trial PARENT`: render a model's chat templates once, where nothing they do hurts anybody.

A template is a program that came with a download. The sandbox keeps it from Python's insides; this child keeps a
server from starting with one that tries, or that does not end.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import orjson
from jinja2.exceptions import SecurityError

from llmcore.child import die_with_parent
from llmcore.errors import ConfigError, RequestError
from llmcore.text.companions import Companions, read_companions
from llmcore.text.templates import ChatTemplate

CPU_SECONDS = 3
"""What all of them may take together, the start of the process included."""
WALL_SECONDS = 60
MEMORY_BYTES = 1 << 30
MOST_TEXT = 1 << 20
"""Characters that a prompt of one word may become."""

_REFUSED = 2
_FIX = "take chat_template.jinja from a source you trust, or give --chat_template"


def try_templates(directory: Path) -> None:
    """Raises ConfigError where a chat template beside the tokenizer in `directory` is no template to serve with."""
    companions = read_companions(directory)
    if not companions.templates:
        return
    given = orjson.dumps({"templates": companions.templates, "tokens": companions.tokens})
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the model's chat template was not rendered within {WALL_SECONDS} s; {_FIX}") from error
    if done.returncode < 0:
        raise ConfigError(f"the model's chat template does not end within {CPU_SECONDS} s; {_FIX}")
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or "no word").splitlines()[-1]
        refused = done.returncode == _REFUSED
        raise ConfigError(last if refused else f"the model's chat template cannot be tried: {last}; {_FIX}")


def main(parent: int) -> int:
    """The child's exit code: 0, or 2 with the reason on stderr."""
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    given = orjson.loads(sys.stdin.buffer.read())
    try:
        problem = _problem(Companions(given["tokens"], templates=given["templates"]))
    except MemoryError:
        problem = "it takes too much memory"
    if problem is None:
        return 0
    sys.stderr.write(f"the model's chat template cannot be served: {problem}; {_FIX}\n")
    return _REFUSED


def _problem(companions: Companions) -> str | None:
    """What speaks against these templates. One that refuses this message, or cannot do with it, may be a good one."""
    for source in companions.templates.values():
        try:
            template = ChatTemplate({"default": source}, companions.tokens)
            text = template.render([{"role": "user", "content": "Hello"}])
        except ConfigError as error:
            return str(error)
        except RequestError as error:
            cause = error.__cause__
            if isinstance(cause, (SecurityError, ArithmeticError, RecursionError)):
                return str(cause)
            continue
        if len(text) > MOST_TEXT:
            return f"it makes {len(text):,} characters of one word"
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
