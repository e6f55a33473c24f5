"""Runs on any machine, in Triton's interpreter: `TRITON_INTERPRET=1 pytest test_fast_norm.py`."""

from pathlib import Path

from llmcore_devtools import check_interpreted, registry_of

PLUGIN = Path(__file__).parent / "fast_norm.py"


def test_the_kernel_computes_what_its_op_means(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN.parent)  # an installed plugin is found without this line
    assert check_interpreted(registry_of(str(PLUGIN)), "fast_norm", "sm90") == 1
