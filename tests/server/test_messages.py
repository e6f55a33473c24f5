"""The messages between processes, and the mailboxes they go through."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from llmcore.api.bridge import Abort, Load, ModelFacts, Prompt, SamplingParams, StepEvents, Submit
from llmcore.api.errors import ConfigError
from llmcore.api.protocols import RequestRecord
from llmcore.config import Config
from llmcore.registry.loader import configure
from llmcore_server.messages import (
    MAX_MESSAGE_BYTES,
    EngineBack,
    EngineGone,
    EngineLaunch,
    EngineLoad,
    EngineReady,
    EngineStatus,
    EngineToWorker,
    Finished,
    Heartbeat,
    Intake,
    Mailbox,
    Outlet,
    Routed,
    Shutdown,
    Snapshot,
    State,
    ToEngine,
    ToSupervisor,
    ToWorker,
    WorkerLaunch,
    decode_launch,
    encode,
    encode_launch,
    read_facts,
)

RECORD = RequestRecord(
    request_id="r",
    dialect="d",
    prompt_tokens=1,
    cached_tokens=0,
    output_tokens=2,
    max_new_tokens=3,
    finish="stop",
    first_token=None,
    duration=0.5,
)
ONE = Prompt.of([1])
EVENTS = StepEvents(
    stamp=1.0, request=[1], choice=[0], count=[2], tokens=[3, 4], finish=[0], top={0: [[(1, -0.5)], []]}
)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.mark.parametrize(
    "message",
    [
        ToEngine(3, Submit(id=1, prompt=ONE, max_new_tokens=5, sampling=SamplingParams(logit_bias={7: 1.0}))),
        ToEngine(3, Submit(id=1, prompt=ONE, max_new_tokens=5, priority=-9, hints={"a": 1, "b": 0.5, "c": True})),
        ToEngine(3, Submit(id=1, prompt=Prompt.of([-1, 1 << 30]), produced={1: (4, 5), 2: ()}, n=3, max_new_tokens=5)),
        ToEngine(3, Abort(1)),
        ToEngine(-1, Shutdown()),
    ],
)
def test_messages_to_the_engine_come_back_equal(message: ToEngine) -> None:
    assert msgspec.msgpack.decode(encode(message), type=ToEngine) == message


def test_a_prompt_of_broken_ids_is_not_read() -> None:
    broken = encode(ToEngine(3, Submit(id=1, prompt=ONE, max_new_tokens=5))).replace(
        b"\xc4\x04\1\0\0\0", b"\xc4\x03\1\0\0"
    )
    with pytest.raises(msgspec.ValidationError, match="multiple of element size"):
        msgspec.msgpack.decode(broken, type=ToEngine)


@pytest.mark.parametrize("message", [EVENTS, Intake(full=True, retry_after=3)])
def test_messages_of_an_engine_to_a_worker_come_back_equal(message: EngineToWorker) -> None:
    assert msgspec.msgpack.decode(encode(message), type=EngineToWorker) == message


@pytest.mark.parametrize(
    "message",
    [
        State(ready=False, reason="x", page=("t", b"p"), engines=(EngineStatus("engine-0", True, 1.0, Load()),)),
        Shutdown(3.0),
        EngineGone(1, "x"),
        EngineBack(1),
        EngineLoad(1, Load(waiting=3)),
        Routed(1, 300, [(1 << 64) - 1, 0]),
    ],
)
def test_messages_to_a_worker_come_back_equal(message: ToWorker) -> None:
    assert msgspec.msgpack.decode(encode(message), type=ToWorker) == message


@pytest.mark.parametrize("body", [Finished(RECORD), Snapshot(State(ready=True).load), Routed(0, 0, [])])
def test_messages_to_the_supervisor_come_back_equal(body: Finished | Snapshot | Routed) -> None:
    message = ToSupervisor("worker-1", body)
    assert msgspec.msgpack.decode(encode(message), type=ToSupervisor) == message


def test_a_launch_carries_the_whole_config() -> None:
    config = configure(port=1234, api_keys="a,b", eos_id="1,2")[0]
    assert config.discovered
    engine = EngineLaunch(name="e", parent=1, log="l", control="ipc:///b", config=config, report_seconds=0.25)
    assert decode_launch(encode_launch(engine), EngineLaunch) == engine
    facts = ModelFacts(
        architecture="A",
        vocab_size=1,
        max_input_len=2,
        max_total_len=3,
        kv_tokens=4,
        max_running=5,
        report=(("a", "b"),),
    )
    reader, writer = os.pipe()
    worker = WorkerLaunch(
        name="w",
        parent=1,
        log="l",
        control="ipc:///b",
        engines=("ipc:///a",),
        config=Config(plugin_options={"port": 1}),
        worker=0,
        mailbox="m",
        listen_fd=3,
        tokenizer_dir="t",
        facts_fd=reader,
    )
    assert decode_launch(encode_launch(worker), WorkerLaunch) == worker
    os.write(writer, encode(facts))
    os.close(writer)
    assert read_facts(worker) == facts


def test_what_is_no_message_is_dropped_counted_and_logged_once(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box: Mailbox[ToEngine] = Mailbox(context, f"ipc://{tmp_path}/box", ToEngine)
    stranger = context.socket(zmq.PUSH)
    stranger.connect(box.endpoint)
    canary = tmp_path / "canary"
    pickled = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    for data in (
        b"",
        b"\xff\x00rubbish",
        pickled,
        encode(["x", {"type": "abort", "id": 1}]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        encode({"type": "abort"}),
    ):
        stranger.send(data)
    stranger.send_multipart([b"a", b"b"])
    stranger.send(encode(ToEngine(1, Heartbeat(2.0))))
    got: list[ToEngine] = []
    while not got:
        assert box.wait(30)
        got = box.drain()
    assert got == [ToEngine(1, Heartbeat(2.0))]
    assert box.dropped == 8
    assert len([record for record in caplog.records if "is not one of ours" in record.message]) == 1
    assert not canary.exists()
    stranger.close()
    box.close()


def test_a_message_beyond_the_limit_closes_only_its_connection(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcore_server.messages.MAX_MESSAGE_BYTES", 1000)
    box: Mailbox[ToEngine] = Mailbox(context, f"ipc://{tmp_path}/box", ToEngine)
    large, small = Outlet(context, box.endpoint), Outlet(context, box.endpoint)
    large.send(ToEngine(1, Submit(id=1, prompt=Prompt.of([0] * 500), max_new_tokens=1)))
    small.send(ToEngine(1, Abort(7)))
    assert box.wait(30)
    assert box.drain() == [ToEngine(1, Abort(7))]
    for end in (large, small):
        end.close(0)
    box.close()


def test_an_outlet_that_nobody_reads_says_so_instead_of_blocking(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    outlet = Outlet(context, f"ipc://{tmp_path}/nobody", most=3)
    sent = [outlet.send(ToSupervisor("e", EngineReady(FACTS))) for _ in range(5)]
    assert [size > 0 for size in sent] == [True, True, True, False, False]
    outlet.close(0)


FACTS = ModelFacts(architecture="A", vocab_size=1, max_input_len=2, max_total_len=3, kv_tokens=4, max_running=5)


def test_drain_stops_at_its_limit(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    box: Mailbox[ToEngine] = Mailbox(context, "inproc://box", ToEngine)
    outlet = Outlet(context, box.endpoint)
    for i in range(5):
        outlet.send(ToEngine(0, Abort(i)))
    assert box.wait(30)
    assert [m.body for m in box.drain(3)] == [Abort(0), Abort(1), Abort(2)]
    assert [m.body for m in box.drain()] == [Abort(3), Abort(4)]
    assert not box.wait(0)
    outlet.close(0)
    box.close()


def test_a_launch_of_another_version_says_to_restart() -> None:
    with pytest.raises(ConfigError, match=r"runs llmcore 0\.0\.9 .* restart the server"):
        decode_launch(b"0.0.9\n\x80", EngineLaunch)


def test_a_message_in_parts_is_dropped(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    mailbox: Mailbox[ToEngine] = Mailbox(context, f"ipc://{tmp_path}/x", ToEngine)
    with context.socket(zmq.PUSH) as peer:
        peer.connect(mailbox.endpoint)
        peer.send_multipart([encode(ToEngine(1, Abort(2))), b"more"])
        assert mailbox.wait(30)
        assert mailbox.drain() == [] and mailbox.dropped == 1
    mailbox.close()


# row 62
def test_only_this_user_may_connect(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    mailbox: Mailbox[ToEngine] = Mailbox(context, f"ipc://{tmp_path}/x", ToEngine)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert mailbox.socket.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
    mailbox.close()


# row 62
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_let_in_even_where_the_file_system_would(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        mailbox: Mailbox[ToEngine] = Mailbox(context, f"ipc://{directory}/x", ToEngine)
        Path(directory).chmod(0o777)
        Path(directory, "x").chmod(0o777)
        for user, heard in ((65534, False), (0, True)):
            program = (
                f"import os, zmq; os.setgid({user}); os.setuid({user})\n"
                f"peer = zmq.Context().socket(zmq.PUSH); peer.connect({mailbox.endpoint!r}); peer.send(b'x')\n"
                "peer.close(linger=300); peer.context.term()"
            )
            subprocess.run([sys.executable, "-c", program], check=True)
            assert mailbox.wait(0.2) is heard
        mailbox.close()
