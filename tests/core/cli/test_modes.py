"""`llmcore modes`: what each pins, and why some do not fit."""

from __future__ import annotations

from pathlib import Path

from listed import plugin, rows, run


def test_modes_say_what_they_pin_and_what_does_not_fit(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='int8kv', layouts={'token': 'token-int8'})\n"
    code += "    yield ModeSpec(name='plain', kernels={'linear': 'torch'})\n"
    found = {row["name"]: row for row in rows("modes", "--plugins", plugin(tmp_path, code))}
    assert list(found) == sorted(found)
    assert found["int8kv"]["misfit"] == "needs layout token-int8, which no plugin brings"
    assert found["plain"]["misfit"] is None and found["plain"]["kernels"] == {"linear": "torch"}
    text = run("modes", "--plugins", plugin(tmp_path, code)).output
    assert "no: needs layout token-int8" in text and "linear=torch" in text
