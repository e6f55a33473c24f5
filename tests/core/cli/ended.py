"""Runs the command line in this process, to its exit."""

from __future__ import annotations

import pytest
from llmcore.cli import main


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `llmcore ARGS`, in this process."""
    with pytest.raises(SystemExit) as end:
        main(args)
    out, err = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 1), out, err
