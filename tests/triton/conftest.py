"""A table of measurements for tests of which kernel is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llmcore.api.specs import OpContext
from llmcore_triton import tuned


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes that these kernels were measured in a context, and nothing else was: (context, kernel=microseconds, ...).
    Until then, nothing was."""

    def write(asked: OpContext, **times: float) -> None:
        told = {"op": asked.op, "dtype": asked.dtype, "bucket": asked.bucket, "shape": dict(asked.shape), "config": {}}
        entries = [{**told, "kernel": kernel, "us": us} for kernel, us in times.items()]
        text = json.dumps({"gpu": asked.device.name, "capability": asked.device.capability, "entries": entries})
        (tmp_path / "measured.json").write_text(text, encoding="utf-8")
        tuned._table.cache_clear()

    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    tuned._table.cache_clear()
    yield write
    tuned._table.cache_clear()
