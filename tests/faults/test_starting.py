"""Model directories that attack, and machines that lack something. Rows 41 and 64."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from conftest import MakeHouse
from harness import PATIENCE, until
from llmcore_devtools import sockets, write_fake_model
from llmcore_devtools.server import ENGINE_MODULE

WORKER = "llmcore_server.http.worker"

CANARY = """\
import pathlib
pathlib.Path({path!r}).write_text("executed")
class CanaryConfig: ...
class CanaryModel: ...
class CanaryTokenizer: ...
"""

PICKLE = b"cos\nsystem\n(S'touch %b'\ntR."


def rewrite(path: Path, **fields: object) -> None:
    """Change fields of a JSON file, which may not be there yet; None takes one away."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= fields
    path.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


def with_code(model: Path, canary: Path) -> None:
    """An architecture that only the code beside it knows."""
    (model / "modeling_canary.py").write_text(CANARY.format(path=str(canary)))
    names = {"AutoConfig": "modeling_canary.CanaryConfig", "AutoModelForCausalLM": "modeling_canary.CanaryModel"}
    rewrite(model / "config.json", architectures=["CanaryModel"], model_type="canary", auto_map=names)


def with_tokenizer_code(model: Path, canary: Path) -> None:
    """A tokenizer that only the code beside it reads."""
    (model / "modeling_canary.py").write_text(CANARY.format(path=str(canary)))
    (model / "tokenizer.json").unlink()
    names = {"AutoTokenizer": ["modeling_canary.CanaryTokenizer", None]}
    rewrite(model / "tokenizer_config.json", tokenizer_class="CanaryTokenizer", auto_map=names)


def with_pickle(model: Path, canary: Path) -> None:
    """Weights as torch saves them."""
    for weights in model.glob("*.safetensors*"):
        weights.unlink()
    (model / "pytorch_model.bin").write_bytes(PICKLE % os.fsencode(canary))


def with_hostile_template(model: Path, canary: Path) -> None:
    """A chat template that looks for a way out of its sandbox."""
    way = "messages.__class__.__base__.__subclasses__()[0].__init__.__globals__['os'].system"
    (model / "chat_template.jinja").write_text("{{ " + way + f"('touch {canary}') }}}}")


def with_endless_template(model: Path, canary: Path) -> None:
    """A chat template that a prompt of one word takes for ever."""
    (model / "chat_template.jinja").write_text("{% for i in range(10**9) %}x{% endfor %}")


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (with_code, "CanaryModel"),
        (with_tokenizer_code, "tokenizer"),
        (with_pickle, "a pickle, which can run any code and is never loaded"),
        (with_hostile_template, "chat template cannot be served: access to attribute '__class__'"),
        (with_endless_template, "chat template cannot be served: Range too big"),
    ],
)
def test_hostile_model_directories_end_the_start(
    tmp_path: Path, attack: Callable[[Path, Path], None], why: str
) -> None:
    """One of them also where Python drops its asserts. There every module is compiled anew."""
    model, canary = write_fake_model(tmp_path / "fake"), tmp_path / "canary"
    attack(model, canary)
    command = [sys.executable, "-m", "llmcore.cli", "serve", str(model), "--port", "0"]
    environment = os.environ | ({"PYTHONOPTIMIZE": "1"} if attack is with_code else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert why in line and "Traceback" not in done.stderr
    assert not canary.exists()


def test_code_beside_a_model_that_needs_none_is_never_looked_at(tmp_path: Path) -> None:
    model, canary = write_fake_model(tmp_path / "fake"), tmp_path / "canary"
    (model / "modeling_canary.py").write_text(CANARY.format(path=str(canary)))
    for name in ("config.json", "tokenizer_config.json"):
        rewrite(model / name, auto_map={"AutoConfig": "modeling_canary.CanaryConfig"})
    server = Started("serve", str(model))
    try:
        assert server.post({"prompt": [1], "max_tokens": 2}) == 200
    finally:
        assert server.stop() == 0
    assert not canary.exists()


# --- 64: a machine that lacks something ------------------------------------------------------------------------------


class Started:
    """`llmcore ARGUMENTS` on a free port; its log goes to a pipe that is read up to the last line of the summary."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "llmcore.cli", *arguments, "--port", "0", "--disable_admin"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        said = b""
        while b"serving at" not in said:
            line = self.stderr.readline()
            assert line, said.decode()
            said += line
        self.port = int(said.rstrip().rpartition(b":")[2])

    @property
    def stderr(self) -> IO[bytes]:
        """The reader's end of the pipe."""
        assert self.process.stderr is not None
        return self.process.stderr

    def post(self, body: object) -> int:
        """The status of a completion."""
        return sockets.call(self.port, "POST", "/v1/completions", body)[0]

    def children(self) -> list[int]:
        """Process ids of its children."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.stderr.close()


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    server = Started("testserver", "--step_ms", "1", "--log_level", "DEBUG", "--drain_timeout", "2")
    fcntl.fcntl(server.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    body = {"prompt": "a prompt that is logged " * 40, "max_tokens": 2}
    for _ in range(60):
        assert server.post(body) == 200

    def unread() -> int:
        return int.from_bytes(fcntl.ioctl(server.stderr.fileno(), 0x541B, bytes(4)), sys.byteorder)  # FIONREAD

    until(lambda: unread() > 3000, "the pipe is full")
    victim = next(pid for pid in server.children() if WORKER in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(victim, signal.SIGKILL)  # the supervisor logs this
    until(lambda: victim not in server.children(), "it is noticed")
    assert server.post(body) == 200
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-v 100000", "address space of a process is limited to 98 MiB (RLIMIT_AS)"),
        ("-v 900000", "address space of a process is limited to 879 MiB (RLIMIT_AS)"),
        ("-f 0", "size of a file is limited to 0 bytes (RLIMIT_FSIZE)"),
        ("-f 1", "size of a file is limited to 1,024 bytes (RLIMIT_FSIZE)"),
        ("-n 10", "number of open files is limited to 10 (RLIMIT_NOFILE)"),
    ],
)
def test_a_limit_that_is_too_low_ends_the_start_with_its_name(limit: str, said: str) -> None:
    command = ["bash", "-c", f'ulimit {limit} && exec "$0" -m llmcore.cli testserver --port 0', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line and "raise it with `ulimit -" in line


def test_memory_that_runs_out_while_the_engine_loads_is_named(tmp_path: Path) -> None:
    """Just enough address space to begin with, and a pool of KV that does not fit into it."""
    model = write_fake_model(tmp_path / "fake")
    limited = 'ulimit -v 1100000 && exec "$0" -m llmcore.cli "$@"'
    arguments = ["serve", str(model), "--port", "0", "--max_total_token_num", "500M"]
    command = ["bash", "-c", limited, sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "RLIMIT_AS" in done.stderr and "template" not in done.stderr and "bug" not in done.stderr


def test_a_full_temporary_directory_is_named(tmp_path: Path) -> None:
    """On a file system of its own, which only a superuser can mount."""
    full = tmp_path / "full"
    full.mkdir()
    program = f'mount -t tmpfs -o size=16k full {full} && TMPDIR={full} exec "$0" -m llmcore.cli testserver --port 0'
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = ["unshare", "-m", "bash", "-c", program, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "there is no room left on the disk; make room, or set TMPDIR" in done.stderr


def test_a_limit_of_256_descriptors_ends_the_start_with_what_to_do() -> None:
    limited = 'ulimit -n 256 && exec "$0" -m llmcore.cli testserver --port 0'
    command = ["bash", "-c", limited, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "ulimit -Hn" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_costs_logs_only(make_house: MakeHouse) -> None:
    """No file of the engine and its workers may grow by a byte, as on a full disk; memory, sockets and pipes go on."""
    with make_house(health_monitor=True, restart_pause=0.1, restart_limit=0) as house:
        for name, pid in house.server.children().items():
            if name != ENGINE_MODULE:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        with house.neighbour():
            for _ in range(20):
                assert house.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})[0] == 200
            status, _, _ = house.post("/v1/completions", {"prompt": [1] * 200_000, "max_tokens": 3})
            assert status == 400  # a body beyond what is kept in memory, where a server would use a file
        os.kill(house.server.children()[WORKER], signal.SIGKILL)
        until(lambda: WORKER in house.server.children(), "another worker")
        house.check(processes=False)


def test_a_temporary_directory_that_takes_nothing_ends_the_start_with_what_to_do(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "fake")
    arguments = ["serve", str(model), "--port", "0", "--zmq_mode", "tcp://"]
    program = "import tempfile, sys; tempfile.tempdir = '/proc'; from llmcore.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "no directory can be made" in done.stderr and "TMPDIR" in done.stderr and "Traceback" not in done.stderr
