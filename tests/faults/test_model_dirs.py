"""Row 41: directories of models that bring code along. A start refuses them, and none of it runs, with -O neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llmcore.testing import write_fake_model

CODE = "from pathlib import Path\nPath({canary!r}).touch()\nclass Config: pass\nModel = Tokenizer = Config\n"


def remote_code(model: Path, canary: Path) -> None:
    """A family that nobody brings, with code that would be it."""
    (model / "code.py").write_text(CODE.format(canary=str(canary)))
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokenizer"]}
    change(model, architectures=["CodeForCausalLM"], model_type="code", auto_map=classes)


def remote_tokenizer(model: Path, canary: Path) -> None:
    """A tokenizer that is only code."""
    (model / "code.py").write_text(CODE.format(canary=str(canary)))
    (model / "tokenizer.json").unlink()
    mapped = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(mapped))


def escaping_template(model: Path, canary: Path) -> None:
    """A template that looks for Python."""
    call = f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
    (model / "chat_template.jinja").write_text(call)


def endless_template(model: Path, canary: Path) -> None:
    """A template that counts to a billion."""
    (model / "chat_template.jinja").write_text("{% for i in range(10**9) %}{{ i }}{% endfor %}")


def pickled_weights(model: Path, canary: Path) -> None:
    """Weights in a format that runs what is in it."""
    (model / "model.safetensors").unlink()
    pickled = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (model / "pytorch_model.bin").write_bytes(pickled)


def change(model: Path, **more: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **more}))


DIRECTORIES = (remote_code, remote_tokenizer, escaping_template, endless_template, pickled_weights)


@pytest.mark.parametrize("make", DIRECTORIES, ids=lambda make: make.__name__)
def test_row_41_code_in_a_model_directory(make: Callable[[Path, Path], None], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    model = write_fake_model(tmp_path / "model")
    make(model, canary)
    command = [sys.executable, "-O", "-m", "llmcore.cli", "serve", "--port", "0", "--model_dir", str(model)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not canary.exists()
