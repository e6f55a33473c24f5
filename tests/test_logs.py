"""Log lines: JSON where it is asked for, and nobody waits for who does not read them."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, sys
from llmcore.config import Reports
from llmcore.logs import fields, log_to_stderr
log_to_stderr(Reports(log_format=sys.argv[1], log_level="INFO"), "worker-3")
logger = logging.getLogger("llmcore.test")
"""


def run(form: str, program: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM + program, form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_json_lines_are_one_object_each() -> None:
    program = """
logger.info("a line\\nof two", extra=fields(request="r-1", cached=3))
logger.warning("half of a pair: %s", "\\ud800")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("it broke")
"""
    first, second, third = (json.loads(line) for line in run("json", program))
    assert (first["message"], first["request"], first["cached"]) == ("a line\nof two", "r-1", 3)
    assert (first["level"], first["logger"], first["process"]) == ("INFO", "llmcore.test", "worker-3")
    assert second["message"].startswith("half of a pair")
    assert "ZeroDivisionError" in third["exception"] and "Traceback" in third["exception"]


def test_text_lines_say_when_how_bad_and_who() -> None:
    [line] = run("text", 'logger.info("hello", extra=fields(request="r"))')
    assert line.endswith(" INFO llmcore.test: hello")


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    program = """
for i in range(60_000):
    logger.info("%s", "x" * 100)
from llmcore.tallies import TALLIES
print(TALLIES.figures().counts[("dropped_log_lines", ("worker-3",))], flush=True)
"""
    command = [sys.executable, "-c", PROGRAM + program, "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.wait(120) == 0, "it ends in order, with its pipe still full"
    finally:
        process.kill()
    assert process.stdout is not None
    dropped = process.stdout.read()
    assert int(dropped) > 1000
