"""`llmcore testserver` as a process: it needs nothing, says where it is, fails when told to, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llmcore_devtools import fake_answer, sockets
from llmcore_devtools.faults import STEP_FAULTS, fault, fault_texts, later

COMMAND = [sys.executable, "-m", "llmcore.cli", "testserver"]


@contextmanager
def running(scratch: Path, *args: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Its port and process; ended with SIGTERM, after which its exit code is 0 and its files are gone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), "LLMCORE_PLUGINS": "-guided"}
    command = [*COMMAND, "--port", "0", "--step_ms", "1", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        guard = threading.Timer(90, process.kill)
        guard.start()
        try:
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"serving at\W+http://127\.0\.0\.1:(\d+)$", line.strip()):
                    break
            else:
                pytest.fail("".join(lines))
            yield int(found[1]), process
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait() == 0
        finally:
            guard.cancel()
            process.kill()
    assert list(scratch.iterdir()) == []


def test_faults_on_request(tmp_path: Path) -> None:
    with running(tmp_path, "--fault_injection", "--max_total_token_num", "2000") as (port, _):
        body = {"prompt": [1, 2], "max_tokens": 9, "temperature": 0}
        status, _, answer = sockets.call(port, "POST", "/v1/completions", body)
        text = json.loads(answer)["choices"][0]["text"]
        assert (status, text) == (200, "".join(chr(33 + token) for token in fake_answer([1, 2], 9)))
        status, _, answer = sockets.call(port, "POST", "/v1/completions", {"prompt": "a" + fault("forward")})
        assert (status, json.loads(answer)["error"]["type"]) == (500, "server_error")
        stream = {"prompt": "a" + later("nan"), "max_tokens": 20, "temperature": 0, "stream": True}
        status, _, answer = sockets.call(port, "POST", "/v1/completions", stream)
        events = [event for event in answer.split(b"\n\n") if event.startswith(b"data:")]
        texts = [json.loads(event[5:])["choices"][0]["text"] for event in events[:-1]]
        assert status == 200 and b'"error"' in events[-1] and len("".join(texts)) == 7 + len(fault("nan")), answer


def test_without_the_option_they_are_text(tmp_path: Path) -> None:
    with running(tmp_path, "--context", "500", "--max_total_token_num", "2000") as (port, _):
        for text in fault_texts():
            body = {"prompt": text, "max_tokens": 3, "logprobs": 0}
            status, _, answer = sockets.call(port, "POST", "/v1/completions", body)
            assert (status, json.loads(answer)["usage"]["prompt_tokens"] > 5) == (200, True), answer
        processor = {"prompt": "x", "logits_processors": [{"name": "fault"}]}
        assert sockets.call(port, "POST", "/v1/completions", processor)[0] == 400
        assert sockets.call(port, "POST", "/v1/completions", {"prompt": "x" * 501})[0] == 400


def test_it_brings_its_own_model(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--model_dir", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "leave --model_dir out" in done.stderr) == (2, True), done.stderr


def test_names_of_faults() -> None:
    assert len(set(fault_texts())) == len(fault_texts()) > 2 * len(STEP_FAULTS)
    with pytest.raises(KeyError):
        fault("nothing")
