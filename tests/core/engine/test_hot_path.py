"""Hooks run at start, at build and a fixed number of times per request; never in a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llmcore.api.bridge import LogitsProcessor, SamplingParams, Submit
from llmcore.api.hookspecs import HOOKS
from llmcore.config import make_config
from llmcore.engine.build import build_engine
from llmcore.engine.llm import LLM
from llmcore.registry.loader import build_registry
from llmcore.registry.registry import Registry
from llmcore_devtools import write_fake_model

EVERY_HOOK = """
from llmcore.api import LogitsProcessorSpec, hookimpl
@hookimpl
def register_logits_processors(): yield LogitsProcessorSpec(name="push", make=f"{__name__}:push", kind="bias")
def push(args, context): return lambda prompt: Push()
class Push:
    def accept(self, token): ...
    def finished(self): return False
    def bias(self): return {7: 100.0}
@hookimpl
def build_layer(layer, info): return None
@hookimpl
def on_startup(config): ...
@hookimpl
def on_model_built(report): ...
@hookimpl
def on_request_finished(record): ...
@hookimpl
def on_shutdown(): ...
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "model")


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "watching.py"
    path.write_text(EVERY_HOOK)
    return str(path)


def watch(registry: Registry) -> list[str]:
    """The names of all hook calls from now on."""
    called: list[str] = []
    registry.manager.add_hookcall_monitoring(
        before=lambda name, impls, kwargs: called.append(name), after=lambda outcome, name, impls, kwargs: None
    )
    return called


def test_decoding_calls_no_hook(model: Path, plugin: str) -> None:
    config = make_config(model_dir=str(model), plugins=[plugin], max_total_token_num=512)
    registry = build_registry(config)
    called = watch(registry)
    engine = build_engine(config, registry)
    assert "on_model_built" in called, "the monitor sees calls"
    called.clear()
    for request in range(3):
        prompt = np.arange(1, 6 + request, dtype="<i4").tobytes()
        processors = (LogitsProcessor("push"),) if request == 2 else ()
        sampling = SamplingParams(temperature=float(request), logits_processors=processors)
        engine.submit(Submit(id=request, prompt=prompt, max_new_tokens=16, sampling=sampling))
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
    assert steps >= 16
    assert called == []


def test_a_request_calls_hooks_once_whatever_its_length(
    model: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    original = build_registry

    def watched(config):
        registry = original(config)
        calls.append(watch(registry))
        return registry

    monkeypatch.setattr("llmcore.registry.loader.build_registry", watched)
    with LLM(model, plugins=[plugin], max_total_token_num=512) as llm:
        (called,) = calls
        counts = []
        for length in (2, 40):
            called.clear()
            llm.generate([[1, 2, 3]], max_new_tokens=length, ignore_eos=True)
            counts.append(list(called))
    assert counts == [["on_request_finished"], ["on_request_finished"]]


def test_the_hooks_that_may_run_per_request_are_known() -> None:
    assert {name for name in HOOKS if name.startswith("on_")} == {
        "on_startup",
        "on_model_built",
        "on_request_finished",
        "on_shutdown",
    }
