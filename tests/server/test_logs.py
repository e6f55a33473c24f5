"""Log lines: JSON where it is asked for, and nobody waits for who does not read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from llmcore_server.settings import Logging
from llmcore_server.logs import fields, log_to_stderr
log_to_stderr(Logging(log_format=sys.argv[1], log_level="INFO"), "worker-3")
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


def test_the_middle_of_very_long_texts_is_left_out() -> None:
    program = """
try:
    raise ValueError("first " + "x" * 3_000_000 + " last")
except ValueError as error:
    logger.exception("it said %s", error)
"""
    [line] = (json.loads(line) for line in run("json", program))
    for text in (line["message"], line["exception"]):
        assert 1_000_000 < len(text) < 1_100_000
        assert "first xxx" in text and "xxx last" in text and "characters left out] xxx" in text
    text = "\n".join(run("text", program))
    assert text.count("it said first xxx") == 1 and 1_000_000 < len(text) < 1_100_000


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    program = """
for i in range(60_000):
    logger.info("%s", "x" * 100)
from llmcore.api.counters import TALLIES
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


NO_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")


@pytest.mark.parametrize("full", [pytest.param(True, marks=NO_FULL), False], ids=["full disk", "no reader"])
def test_a_command_ends_as_ever_where_standard_error_takes_nothing(full: bool) -> None:
    """Neither what it says nor what Python writes out at the end changes its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    if full:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        command = [sys.executable, "-m", "llmcore.cli", "serve", "/nowhere"]
        done = subprocess.run(command, stderr=writer, stdout=subprocess.DEVNULL, timeout=300, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 2


def test_no_socket_gets_the_number_of_standard_error() -> None:
    """Else its client would be sent the log."""
    program = """
import os, socket, sys
from llmcore.cli.streams import guard_standard_streams
guard_standard_streams()
assert socket.socket().fileno() > 2
names = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
sys.exit(7 if names == {os.devnull} and all(map(os.get_inheritable, range(3))) else 1)
"""
    shell = ["bash", "-c", '"$0" -c "$1" 0<&- 1>&- 2>&-', sys.executable, program]
    assert subprocess.run(shell, timeout=300, check=False).returncode == 7
