"""`python -m llmcore.text.convert PARENT CONVERTER MODEL OUT [--trust-remote-code]`: build a tokenizer, then exit.

A tokenizer that only transformers or a plugin can read becomes a directory with tokenizer.json and its companions. So
long-running processes import only the `tokenizers` package.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

from llmcore.api.errors import ConfigError
from llmcore.api.specs import ImportString
from llmcore.config.process import die_with_parent, memory_note, shortage_of
from llmcore.registry.loader import load

_TRUST = "--trust-remote-code"
_SECONDS = 600
_BAD_INPUT = 2


def convert(converter: ImportString, model: Path, out: Path, *, trust_remote_code: bool = False) -> Path:
    """Run `converter` on `model` in a child process, which fills `out`; returns `out`.

    If the child fails, raises ConfigError with the last line of its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", __name__, str(os.getpid()), converter, str(model), str(out)]
    try:
        done = subprocess.run(
            command + [_TRUST] * trust_remote_code, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the tokenizer of {model} was not converted within {_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}{memory_note()}").splitlines()[-1]
        raise ConfigError(f"the tokenizer of {model} cannot be converted: {reason}")
    if not (out / "tokenizer.json").is_file():
        raise ConfigError(f"{converter} wrote no tokenizer.json for {model}; report it to the plugin's authors")
    return out


def run(converter: ImportString, model: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Call `converter(model, out)`, with `trust_remote_code` if it takes that argument."""
    function = load(converter)
    if "trust_remote_code" in inspect.signature(function).parameters:
        function(model, out, trust_remote_code=trust_remote_code)
    else:
        function(model, out)


def main(arguments: list[str]) -> int:
    """Run the conversion; returns the child's exit code: 0, or 2 with the reason in one line on stderr."""
    parent, converter, model, out = arguments[:4]
    die_with_parent(int(parent))
    try:
        run(converter, Path(model), Path(out), trust_remote_code=_TRUST in arguments[4:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_INPUT
    except BaseException as error:
        if shortage := shortage_of(error):
            sys.stderr.write(f"{shortage}\n")
            return _BAD_INPUT
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
