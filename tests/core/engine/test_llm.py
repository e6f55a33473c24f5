"""LLM: what it takes, what it gives back, and that bad input costs nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.bridge import ChoiceEvent, Finish, Prompt, SamplingParams, Submit
from llmcore.api.errors import ConfigError, RequestError, ResolveError
from llmcore.api.protocols import Device, SchedulerLimits
from llmcore.engine import build, profile
from llmcore.engine.leader import Runner
from llmcore.engine.llm import LLM
from llmcore.sched.plan import StepPlan
from llmcore.sched.scheduler import Scheduler
from llmcore_devtools import fake_answer

MakeLLM = Callable[..., LLM]


def settled(llm: LLM) -> None:
    for _ in range(200):
        load = llm.load()
        assert load.kv_live + load.kv_cached + load.kv_free == load.kv_total
        if (load.running, load.waiting, load.kv_live) == (0, 0, 0):
            return
        time.sleep(0.01)
    pytest.fail(f"still busy: {load}")


def test_texts_ids_and_lists(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ids = llm.tokenizer.encode("hello")
    for prompts in ("hello", ["hello"], ids, [ids]):
        (result,) = llm.generate(prompts, temperature=0.0)
        assert result.token_ids == fake_answer(ids, 16)
        assert result.text == llm.tokenizer.decode(result.token_ids)
        assert result.prompt_ids == tuple(ids)
    assert llm.generate([]) == []
    several = llm.generate(["a", "bcd", "e"], SamplingParams(temperature=0.0), max_new_tokens=3)
    assert [r.token_ids for r in several] == [fake_answer(llm.tokenizer.encode(p), 3) for p in ("a", "bcd", "e")]


def test_to_the_end_of_the_context(make_llm: MakeLLM) -> None:
    llm = make_llm(fake={"max_position": 40})
    (result,) = llm.generate([[1] * 10], temperature=0.0, max_new_tokens=None)
    assert (len(result.token_ids), result.finish_reason) == (30, "length")


def test_a_sampled_answer_of_the_fake_model_does_not_end_by_chance(make_llm: MakeLLM) -> None:
    llm = make_llm()
    answers = llm.generate([[i] for i in range(8)], temperature=1.0, seed=7, max_new_tokens=200)
    assert {(len(answer.token_ids), answer.finish_reason) for answer in answers} == {(200, "length")}
    assert len({tuple(answer.token_ids[:20]) for answer in answers}) == 8


def test_a_chat_template_of_ones_own(make_llm: MakeLLM, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    llm = make_llm(chat_template=str(file))
    answer = llm.chat([{"role": "user", "content": "hi"}], temperature=0.0, max_new_tokens=1)
    assert answer.prompt_ids == tuple(llm.tokenizer.encode("hi!", add_special_tokens=False))
    file.write_text("{{ messages[0].no.such }}")
    with pytest.raises(
        ConfigError, match=r"^--chat_template: 'dict object' has no attribute 'no'; correct the template$"
    ):
        make_llm(chat_template=str(file))


def test_chat_and_stream_chat(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    whole = llm.chat(messages, temperature=0.0, max_new_tokens=9)
    pieces = list(llm.stream_chat(messages, temperature=0.0, max_new_tokens=9))
    assert "".join(pieces) == whole.text and len(pieces) > 1
    for _ in llm.stream_chat(messages, temperature=0.0, max_new_tokens=500):
        break
    for _ in range(200):
        if llm.load().aborts:
            break
        time.sleep(0.01)
    assert llm.load().aborts == 1
    settled(llm)


def test_logprobs(make_llm: MakeLLM) -> None:
    llm = make_llm()
    (result,) = llm.generate([[1, 2]], temperature=0.0, max_new_tokens=4, logprobs=3)
    answer = result.answers[0]
    assert len(answer.logprobs) == len(answer.top_logprobs) == 4
    for token, logprob, best in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        assert len(best) == 3 and best[0] == (token, pytest.approx(logprob)) and logprob < 0


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {}, "no token|empty"),
        ([[1] * 5000], {}, "4095|at most"),
        ([[1, 275]], {}, "275"),
        ([[1, -1]], {}, "-1"),
        ([[1 << 40]], {}, "ids"),
        ([[1]], {"logit_bias": {900: 1.0}}, "900"),
        ([[1]], {"stop_token_ids": (900,)}, "900"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"n": 10**12}, "16"),
        ([[1]], {"temperature": "hot"}, "temperature"),
    ],
)
def test_bad_requests(make_llm: MakeLLM, prompts: list[list[int]], options: dict[str, object], words: str) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, **options)
    assert llm.generate([[3]], temperature=0.0)[0].token_ids == fake_answer([3], 16)
    settled(llm)


def test_options_of_plugins_have_their_defaults_and_can_be_given(make_llm: MakeLLM) -> None:
    plugins = [str(Path(__file__).parents[3] / "docs/examples/register_options.py")]
    options = make_llm(plugins=plugins, probe_layers=2).config.plugin_options
    assert (options["probe_layers"], options["probe_format"]) == (2, "csv")
    with pytest.raises(ConfigError, match="--probe_layers: -1 is out of range"):
        make_llm(plugins=plugins, probe_layers=-1)


def test_unknown_options_are_named(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("a", temprature=0.0)
    with pytest.raises(TypeError, match="not both"):
        llm.generate("a", SamplingParams(), temperature=0.0)
    with pytest.raises(TypeError, match="one answer"):
        next(llm.stream_chat([{"role": "user", "content": "a"}], n=2))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["forward", "nan"])
def test_a_failure_stays_with_its_request(make_llm: MakeLLM, ahead: int, kind: str) -> None:
    llm = make_llm(ahead=ahead, fake={"faults": {kind: 250}})
    events: dict[int, list[ChoiceEvent]] = {1: [], 2: [], 3: []}
    prompts = {1: [4, 5, 6], 2: [7, 250], 3: [8, 9]}
    for number, prompt in prompts.items():
        submit = Submit(
            id=number,
            prompt=Prompt.of(prompt),
            max_new_tokens=20,
            sampling=SamplingParams(temperature=0.0),
        )
        llm._bridge.submit(submit, events[number].append)
    for _ in range(500):
        if all(seen and seen[-1].finish is not Finish.RUNNING for seen in events.values()):
            break
        time.sleep(0.01)
    for number in (1, 3):
        assert [token for event in events[number] for token in event.tokens] == fake_answer(prompts[number], 20)
        assert events[number][-1].finish is Finish.LENGTH
    assert events[2][-1].finish is Finish.ERROR
    code, message = events[2][-1].error or ("", "")
    assert code == "internal_error" and "250" not in message
    settled(llm)


def test_the_pool_can_be_measured(make_llm: MakeLLM) -> None:
    llm = make_llm(ahead=1, max_total_token_num=None)
    assert llm.facts.kv_tokens == 10_000
    assert llm.generate([[3] * 50], temperature=0.0)[0].token_ids == fake_answer([3] * 50, 16)
    labels = [label for label, _ in llm.facts.report]
    assert labels == ["model", "device", "kernels", "start", "sampling", "predicted", "measured"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_beside_answers_are_cut_to_what_was_measured(
    make_llm: MakeLLM, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that takes a second for prompts, and next to nothing for a step without them."""
    measured, built = profile._fastest, list[SchedulerLimits]()

    def slow(runner: Runner, device: Device, plan: StepPlan, times: int) -> float:
        assert measured(runner, device, plan, times) > 0
        return 1e-6 if plan.n_decode else 1e3

    class Noting(Scheduler):
        def __init__(self, limits: SchedulerLimits, *others: Any, **more: Any) -> None:
            super().__init__(limits, *others, **more)
            built.append(self.limits)

    monkeypatch.setattr(profile, "_fastest", slow)
    monkeypatch.setattr(build, "Scheduler", Noting)
    llm = make_llm(ahead=ahead, prefill_stall_ms=1e-6)
    line = dict(llm.facts.report)["prompts"]
    assert line.startswith("1 tokens of a step beside answers (1e-06 ms more than the 0.0 ms of a step without ")
    assert [limits.stall_tokens for limits in built] == [1]
    prompts = [[3] * 5, [4] * 9, [5] * 7]
    answers = llm.generate(prompts, temperature=0.0, max_new_tokens=6)
    assert [one.token_ids for one in answers] == [fake_answer(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "gpu9"}, "gpu9"),
        ({"kernel": ["sample=nope"]}, "nope"),
        ({"kernel": ["rms_norm=torch"]}, "does not use rms_norm"),
        ({"kernel": ["rms_nrom=torch"]}, "there is no op 'rms_nrom'"),
        ({"scheduler": "fcsf"}, "Did you mean fcfs"),
        ({"length_estimator": "past_futur"}, "Did you mean past_future"),
        ({"mode": ["fast_mode"]}, "--mode fast_mode: there is no such mode"),
        ({"max_req_total_len": 5000, "max_total_token_num": 9000}, "4096"),
        ({"max_req_total_len": 2500}, "2500"),
        ({"batch_max_tokens": 8, "chunked_prefill_size": 9}, "9"),
    ],
)
def test_settings_that_cannot_work(make_llm: MakeLLM, settings: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, ResolveError), match=words):
        make_llm(fake={"max_position": 4096}, **settings)


def test_a_closed_engine_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("a")


def test_what_is_said_of_captured_steps_where_there_are_none(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    make_llm(disable_cudagraph=True)
    assert "--disable_cudagraph has no effect: steps on cpu are never captured" in caplog.text
    caplog.clear()
    make_llm(ahead=1, disable_cudagraph=True)
    assert "has no effect" not in caplog.text
