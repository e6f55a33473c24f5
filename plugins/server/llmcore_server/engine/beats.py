"""The beats of a rank: a thread that tells the supervisor what the rank does, whatever its main thread waits for."""

from __future__ import annotations

import os
import threading

import zmq
from llmcore.api.engine import Doing
from llmcore.registry.devices import best_device
from llmcore.registry.registry import Registry

from llmcore_server.messages import Beat, Outlet, ToSupervisor

_TOLD_SECONDS = 1.0
"""The longest wait until the thread has told that a capture begins."""


def device_name(registry: Registry, kind: str, number: int) -> str:
    """Device number `number` of the kind that `--device` names, for people: "cuda:1"."""
    return f"{best_device(registry).name if kind == 'auto' else kind}:{number}"


class Beats:
    """A Pulse. The process called `name` sends a Beat to `control` every `seconds`, from when this is made.

    `device`: its device, for people.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, control: str, seconds: float, device: str
    ) -> None:
        self._context = context
        self._name = name
        self._control = control
        self._seconds = seconds
        self._device = device
        self._now: tuple[int, Doing] = (0, "loading")
        self._wake, self._told = threading.Event(), threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def __call__(self, number: int, doing: Doing) -> None:
        """Note that the rank does this in step `number`. A capture is told before this returns: it may keep every
        thread of the process from running."""
        self._now = (number, doing)
        if doing == "capturing":
            self._told.clear()
            self._wake.set()
            self._told.wait(_TOLD_SECONDS)

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        outlet, pid = Outlet(self._context, self._control), os.getpid()
        while not self._ended:
            self._wake.clear()
            number, doing = self._now
            outlet.send(ToSupervisor(self._name, Beat(pid, number, doing, self._device)))
            self._told.set()
            self._wake.wait(self._seconds)
        outlet.close(0.0)
