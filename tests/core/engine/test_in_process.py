"""InProcessBridge: figures that are true when they are asked for, and nobody left waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llmcore.api.bridge import ChoiceEvent, Finish, SamplingParams, Submit
from llmcore.api.errors import RequestError
from llmcore.engine.llm import LLM
from llmcore.text.stream import ChoiceText
from llmcore_devtools import fake_answer, write_fake_model

MakeLLM = Callable[..., LLM]


def submit(number: int, **more: object) -> Submit:
    sampling = SamplingParams(temperature=0.0)
    return Submit(**{"id": number, "prompt": b"\3\0\0\0", "max_new_tokens": 5, "sampling": sampling, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 1])
def test_load_right_after_generate_is_that_of_an_idle_engine(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead)
    text = llm.generate([[3, 4]], temperature=0.0)[0].text
    for stop in ((), text[3:5]):
        for _ in range(10):
            llm.generate([[3, 4]] * 3, temperature=0.0, stop=stop)
            load = llm.load()
            assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)


def test_a_sink_may_ask_for_the_load(make_llm: MakeLLM) -> None:
    bridge, seen, done = make_llm()._bridge, [], threading.Event()

    def sink(event: ChoiceEvent) -> None:
        seen.append(bridge.load().running)
        if event.finish is not Finish.RUNNING:
            done.set()

    bridge.submit(submit(1), sink)
    assert done.wait(60)
    assert seen == [1, 1, 1, 1, 0]


def test_who_cannot_read_his_answer_gets_an_error(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm()
    with monkeypatch.context() as broken:
        broken.setattr(ChoiceText, "feed", lambda *_: 1 / 0)
        with pytest.raises(RequestError, match="failed to handle"):
            llm.generate([[3]], temperature=0.0)
    assert "ZeroDivisionError" in caplog.text
    assert llm.generate([[3]], temperature=0.0)[0].token_ids == fake_answer([3], 16)
    assert llm.load().running == 0


def test_whoever_submits_while_the_engine_closes_hears_of_it(make_llm: MakeLLM) -> None:
    llm = make_llm()
    accepted, ended = [], []

    def sink(event: ChoiceEvent) -> None:
        if event.finish is not Finish.RUNNING:
            ended.append(event)

    def keep_submitting() -> None:
        with pytest.raises(RequestError, match="closed"):
            for number in range(1, 100_000):
                llm._bridge.submit(submit(number, max_new_tokens=1), sink)
                accepted.append(number)
                time.sleep(0.0001)  # or a busy machine sees them all before it sees the end

    thread = threading.Thread(target=keep_submitting)
    thread.start()
    while len(accepted) < 50:
        pass
    llm._bridge.close()
    thread.join(60)
    assert len(ended) == len(accepted)
    assert llm.load().kv_total == 2000, "a closed engine still has figures"


AT_EXIT = """
import sys
from llmcore import LLM
from llmcore.api.bridge import SamplingParams, Submit

llm = LLM(sys.argv[1], device="cpu", max_total_token_num=2000)
request = Submit(id=1, prompt=bytes(4), max_new_tokens=1500, sampling=SamplingParams(temperature=0.0))
llm._bridge.submit(request, lambda event: event.error and print(event.error, flush=True))
"""


def test_python_ends_the_engine_at_its_exit(tmp_path: Path) -> None:
    """Or it would end its thread within torch, which is a crash."""
    model = write_fake_model(tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", AT_EXIT, str(model)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "('engine_failed', 'the engine was closed')\n"), done.stderr
