"""Answers that are cut and go on elsewhere: the same tokens follow, whatever the request asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from llmcore.api.bridge import BeamSearch, ChoiceEvent, Finish, LogitsProcessor, Prompt, SamplingParams, Submit
from llmcore.api.errors import RequestError
from llmcore.engine.llm import LLM
from llmcore_devtools.tokenizer import write_tokenizer
from steered import AHEAD
from transformers import LlamaConfig, LlamaForCausalLM

MakeLLM = Callable[..., LLM]
IDS = itertools.count(1 << 40)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PENALIZED = SamplingParams(
    temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logprobs=2
)
PROMPT = Prompt.of([5, 77, 200, 9, 9, 31])


def answer(llm: LLM, submit: Submit) -> tuple[list[list[int]], list[Finish]]:
    """The tokens and the finish of each choice; those of choices that have ended elsewhere stay empty."""
    events: SimpleQueue[ChoiceEvent] = SimpleQueue()
    llm._bridge.submit(submit, events.put)
    tokens: list[list[int]] = [[] for _ in range(submit.n)]
    finish = [Finish.RUNNING] * submit.n
    open_ones = set(submit.produced or range(submit.n))
    while Finish.RUNNING in (finish[number] for number in open_ones):
        event = events.get(timeout=60)
        assert event.error is None, event.error
        tokens[event.choice] += event.tokens
        finish[event.choice] = event.finish
    return tokens, finish


def goes_on(llm: LLM, submit: Submit, cuts: tuple[int, ...] = (0, 1, 6, 13)) -> list[list[int]]:
    """Every choice of the request ends as it did when it goes on after each of `cuts` tokens: alone, and together with
    the others, of which each has some tokens more. Returns the choices."""
    whole, finish = answer(llm, submit)
    for cut in cuts:
        begun = {number: tokens[: cut + number] for number, tokens in enumerate(whole) if cut + number < len(tokens)}
        for some in (begun, *({number: tokens} for number, tokens in begun.items())):
            produced = {number: tuple(tokens) for number, tokens in some.items()}
            rest, ends = answer(llm, msgspec.structs.replace(submit, id=next(IDS), produced=produced))
            assert {number: (rest[number], ends[number]) for number in some} == {
                number: (whole[number][len(tokens) :], finish[number]) for number, tokens in some.items()
            }
    return whole


def request(sampling: SamplingParams, **more: Any) -> Submit:
    return Submit(id=next(IDS), prompt=PROMPT, sampling=sampling, **{"max_new_tokens": 20, **more})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=275,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=257,
        bos_token_id=256,
        pad_token_id=258,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def test_a_llama_goes_on(llama: Path) -> None:
    with LLM(llama, data_type="fp32", device="cpu", max_total_token_num=600, chunked_prefill_size=8) as llm:
        goes_on(llm, request(GREEDY))
        assert len({tuple(tokens) for tokens in goes_on(llm, request(SAMPLED, n=2))}) == 2
        goes_on(llm, request(PENALIZED))


@AHEAD
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
def test_the_rest_is_the_same(make_llm: MakeLLM, ahead: int, sampling: SamplingParams) -> None:
    llm = make_llm(ahead=ahead, granule=4)
    goes_on(llm, request(sampling))
    choices = goes_on(llm, request(sampling, n=3))
    assert (len({tuple(tokens) for tokens in choices}) == 3) == (sampling is not GREEDY)


@AHEAD
def test_it_stops_where_it_would_have(make_llm: MakeLLM, ahead: int) -> None:
    """A stop id counts only after `min_new_tokens`, those of the other engine included."""
    llm = make_llm(ahead=ahead)
    ((*tokens,),), _ = answer(llm, request(SAMPLED))
    last = next(at for at in range(8, 20) if tokens[at] not in tokens[:at])
    stops = (tokens[last],)
    whole, (finish,) = answer(llm, request(SAMPLED, stop_ids=stops, min_new_tokens=3))
    assert (whole[0], finish) == (tokens[: last + 1], Finish.STOP)
    goes_on(llm, request(SAMPLED, stop_ids=stops, min_new_tokens=3), (1, 5, last))
    later = goes_on(llm, request(SAMPLED, stop_ids=stops, min_new_tokens=last + 4), (2, last))
    assert later[0][:last] == tokens[:last] and len(later[0]) >= last + 4


@AHEAD
def test_logits_processors_know_what_was_produced(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    listed = LogitsProcessor("lists", {"lists": [[token, token + 30] for token in range(20)]})
    pushed = LogitsProcessor("push", {"token": 7, "value": 3.0})
    for processors in ((listed,), (pushed,)):
        goes_on(llm, request(msgspec.structs.replace(PENALIZED, logits_processors=processors)))


@AHEAD
def test_usage_goes_on(make_llm: MakeLLM, ahead: int) -> None:
    """The prompt counts as the prompt, and only tokens of this engine as its output."""
    llm = make_llm(ahead=ahead, granule=4)
    before = llm.load()
    ((*rest,),), _ = answer(llm, request(GREEDY, produced={0: tuple(range(40, 50))}))
    after = llm.load()
    assert len(rest) == 10
    assert after.output_tokens - before.output_tokens == 10
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    answer(llm, request(GREEDY, produced={0: tuple(range(40, 50))}))
    assert llm.load().cached_tokens - after.cached_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"produced": {0: (1,) * 20}}, "has all of its 20"),
        ({"produced": {1: (1,), 2: ()}, "n": 2}, "its choices are 0 to 1"),
        ({"produced": {0: (1,)}, "beams": BeamSearch(2)}, "they begin again"),
        ({"produced": {0: (1,)}, "prompt_logprobs": True}, "came with the first token of choice 0"),
        ({"produced": {1: ()}, "n": 2, "prompt_logprobs": True}, "came with the first token of choice 0"),
        ({"produced": {1: (275,)}, "n": 2}, "produced: token id 275 is outside"),
    ],
)
def test_what_cannot_continue(make_llm: MakeLLM, more: dict[str, Any], says: str) -> None:
    engine: Any = make_llm()._bridge
    with pytest.raises(RequestError, match=says) as caught:
        engine._engine.submit(request(GREEDY, **more))
    assert caught.value.param == "produced"
