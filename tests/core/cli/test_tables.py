"""What all listing commands have in common: plain text for pipes, and few imports."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from listed import run


@pytest.mark.parametrize("command", ["plugins", "hooks", "models", "modes", "kernels"])
def test_every_listing_pipes_plain_text(command: str) -> None:
    result = run(command)
    assert result.exit_code == 0
    assert "\x1b" not in result.output


def test_listing_plugins_imports_little() -> None:
    program = "import sys\nfrom llmcore.cli import main\ntry:\n    main(['plugins'])\nexcept SystemExit: pass\n"
    program += "heavy = {'torch', 'transformers', 'falcon', 'zmq', 'rich'} & set(sys.modules)\n"
    program += "print(heavy or 'light', file=sys.stderr)"
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "light", f"after {time.monotonic() - started:.2f} s"
