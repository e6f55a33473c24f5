"""What the machine withholds is named, with what raises it, and nothing else is blamed for it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError, PluginError
from llmcore.config import process
from llmcore.config.process import check_limits, memory_note, shortage_of
from llmcore.text.source import convert
from llmcore_server.child import last_words_of


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Limits of this process as they seem to be: what is not in it has none."""
    found: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found.get(kind, (resource.RLIM_INFINITY,) * 2))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: found.update({kind: values}))
    return found


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (resource.RLIMIT_AS, 500 << 20, "address space of a process is limited to 500 MiB (RLIMIT_AS)"),
        (resource.RLIMIT_FSIZE, 1024, "size of a file is limited to 1,024 bytes (RLIMIT_FSIZE)"),
        (resource.RLIMIT_NOFILE, 10, "number of open files is limited to 10 (RLIMIT_NOFILE)"),
    ],
)
def test_a_limit_under_which_nothing_starts_is_named(
    limited: dict[int, tuple[int, int]], kind: int, value: int, words: str
) -> None:
    check_limits()
    limited[kind] = (value, value)
    with pytest.raises(ConfigError) as error:
        check_limits()
    assert words in str(error.value) and "raise it with `ulimit -" in str(error.value)


def test_open_files_are_raised_as_far_as_they_may(limited: dict[int, tuple[int, int]]) -> None:
    limited[resource.RLIMIT_NOFILE] = (10, 4096)
    check_limits()
    assert limited[resource.RLIMIT_NOFILE] == (64, 4096)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EFBIG, "File too large"), "RLIMIT_FSIZE"),
        (OSError(errno.EMFILE, "Too many open files"), "RLIMIT_NOFILE"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "RLIMIT_AS"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room left on the disk; make room"),
        (Exception("No space left on device (os error 28)"), "no room left on the disk; make room"),
        (MemoryError(), "RLIMIT_AS"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "RLIMIT_AS"),
        (RuntimeError("can't start new thread"), "RLIMIT_AS"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "RLIMIT_AS"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "set TMPDIR to a directory"),
    ],
)
def test_an_error_of_the_machine_names_what_ran_out(
    limited: dict[int, tuple[int, int]], error: Exception, words: str
) -> None:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        limited[kind] = (1 << 30, 1 << 30)
    assert words in str(shortage_of(error))
    outer = PluginError("cannot import 'x'")
    outer.__cause__ = error
    said = last_words_of(outer)
    assert words in said.message and said.usage


def test_other_errors_are_what_they_are(limited: dict[int, tuple[int, int]]) -> None:
    for error in (ValueError("no"), OSError(errno.ENOENT, "gone"), FileNotFoundError(2, "no model")):
        assert shortage_of(error) is None
    assert last_words_of(ConfigError("mend --this")).message == "mend --this"
    assert last_words_of(ValueError("a bug")).usage is False
    assert "no memory left" in str(shortage_of(MemoryError())) and memory_note() == ""
    limited[resource.RLIMIT_AS] = (2 << 30, 2 << 30)
    assert "limited to 2,048 MiB (RLIMIT_AS; raise it with" in memory_note()


def test_a_tokenizer_that_finds_no_room_blames_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full_disk.py").write_text(
        "def convert(model, out):\n    raise Exception('No space left on device (os error 28)')\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ConfigError, match="there is no room left on the disk; make room, or set TMPDIR"):
        convert("full_disk:convert", tmp_path, tmp_path / "out")


def test_every_limit_says_how_it_is_raised() -> None:
    for limit in (process.MEMORY, process.FILE_SIZE, process.OPEN_FILES):
        assert "ulimit -" in limit.raised_by and limit.name.startswith("RLIMIT_")
