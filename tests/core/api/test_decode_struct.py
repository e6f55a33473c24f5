"""Values made into structs by many threads at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from llmcore.api.decode_struct import convert

CROWD = """
import sys, threading
import msgspec
from llmcore.api.decode_struct import convert

sys.setswitchinterval(1e-6)

def ask(gate, kind):
    gate.wait()
    assert convert({"inner": {"deep": {"x": 1}}}, kind).inner.deep.x == 1

for i in range(60):
    names = [(f"f{j}", dict[str, list[int]] | None, None) for j in range(20)]
    deep = msgspec.defstruct(f"Deep{i}", [("x", int), *names])
    inner = msgspec.defstruct(f"Inner{i}", [("deep", deep), *names])
    kind = msgspec.defstruct(f"Outer{i}", [("inner", inner), *names])
    gate = threading.Barrier(8)
    crowd = [threading.Thread(target=ask, args=(gate, kind)) for _ in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
"""


def test_a_crowd_may_bring_the_first_values_of_a_type() -> None:
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_does_not_fit_is_an_error_every_time() -> None:
    for _ in range(2):
        with pytest.raises(msgspec.ValidationError):
            convert({"x": "1"}, msgspec.defstruct("Point", [("x", int)]))
