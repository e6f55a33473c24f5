"""The kernel that docs/authors/kernel.md shows to authors, checked as the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from llmcore_devtools import Nonconformance, check_interpreted, registry_of

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "triton_kernel"


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    runpy.run_path(str(EXAMPLE / "test_fast_norm.py"))["test_the_kernel_computes_what_its_op_means"](monkeypatch)


def test_a_wrong_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("fast_norm.py", "fast_norm_kernel.py"):
        code = (EXAMPLE / file).read_text()
        (tmp_path / file.replace("fast", "wrong")).write_text(
            code.replace("fast_norm_kernel", "wrong_norm_kernel").replace("/ SIZE", "/ BLOCK")
        )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Nonconformance) as failed:
        check_interpreted(registry_of(str(tmp_path / "wrong_norm.py")), "wrong_norm", "sm90")
    first, *_ = failed.value.problems
    assert re.match(r"kernel fast-norm: rms_norm on cuda 90, f32, 1 tokens, size=40: .* off by .*, allowed", first)


def test_a_device_without_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    registry = registry_of(str(EXAMPLE / "fast_norm.py"))
    with pytest.raises(AssertionError, match="no kernel of plugin 'fast_norm' is for cpu"):
        check_interpreted(registry, "fast_norm", "cpu")
    with pytest.raises(AssertionError, match="abacus is not a name that --device takes"):
        check_interpreted(registry, "fast_norm", "abacus")
