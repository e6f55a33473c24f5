"""The process of a rank: what it gives to the part that follows rank 0."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from llmcore.config import make_config
from llmcore.registry.loader import select
from llmcore_server import child
from llmcore_server.engine import rank
from llmcore_server.messages import RankLaunch


def test_it_freezes_its_objects_once_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 does: else a full collection of one rank looks through all objects, and the others wait for it."""
    given = list[tuple[Any, ...]]()

    class Follower:
        def __init__(self, *arguments: Any) -> None:
            given.append(arguments)

        def run(self, *_: Any) -> None:
            """Ends at once."""

    monkeypatch.setattr(rank, "Follower", Follower)
    monkeypatch.setattr(rank, "join", lambda *_: None)
    config = make_config(model_dir=str(tmp_path), device="cpu", tp=2)
    launch = RankLaunch(
        name="rank-1",
        parent=os.getpid(),
        log=str(tmp_path / "log"),
        control=f"ipc://{tmp_path}/control",
        config=replace(config, discovered=select(None).plugins),
        rank=1,
        device=1,
        store=str(tmp_path / "store"),
        link=f"ipc://{tmp_path}/link",
        answers=f"ipc://{tmp_path}/answers",
        beat_seconds=1.0,
    )
    with zmq.Context() as context:
        rank.run(launch, context)
    ((number, *_, device, ready),) = given
    assert (number, device, ready) == (1, 1, child.freeze)
