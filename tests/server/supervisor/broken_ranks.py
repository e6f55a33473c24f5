"""What ranks of a group do wrong, on order: a file in the directory of orders, named after the fault.

A sitecustomize calls `break_on_order` in every process of a server that is a rank but the first.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

LONG = 1000.0

SITE = """
import sys
if "llmcore_server.engine.rank" in sys.orig_argv:
    sys.path.insert(0, {here!r})
    from broken_ranks import break_on_order
    break_on_order({orders!r})
"""


def site(folder: Path, orders: Path) -> None:
    """Write the sitecustomize into `folder`."""
    (folder / "sitecustomize.py").write_text(SITE.format(here=str(Path(__file__).parent), orders=str(orders)))


def break_on_order(directory: str) -> None:
    """Have this process heed orders. The order `absent` counts at once."""
    orders = Path(directory)
    if (orders / "absent").exists():
        time.sleep(LONG)
    from llmcore.engine.model_runner import ModelRunner

    prepare, enqueue = ModelRunner.prepare, ModelRunner.enqueue

    def preparing(self: Any, plan: Any) -> Any:
        if (orders / "raises").exists():
            raise RuntimeError("told to raise")
        step = prepare(self, plan)
        if (orders / "packs").exists():
            return dataclasses.replace(step, draw=None)
        return step

    def enqueuing(self: Any, *args: Any) -> Any:
        if (orders / "slow").exists():
            time.sleep(LONG)
        return enqueue(self, *args)

    ModelRunner.prepare, ModelRunner.enqueue = preparing, enqueuing  # type: ignore[method-assign]
