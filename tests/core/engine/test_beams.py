"""Beam search gives what transformers' generate(num_beams=...) gives, whatever happens beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import RequestError
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

MakeLLM = Callable[..., LLM]

PROMPTS = [[5, 77, 200], list(range(30, 70)), [1], [260, 3, 3, 3, 9, 120, 44]]
EOS = (59, 105, 141)
"""Tokens that this model likes, so that answers end at different lengths."""

Oracle = tuple[Path, LlamaForCausalLM]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=275,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=list(EOS),
        bos_token_id=256,
        pad_token_id=258,
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory, model


@pytest.fixture(scope="module")
def llm(oracle: Oracle) -> Any:
    with LLM(oracle[0], data_type="fp32", device="cpu", max_total_token_num=1200) as made:
        yield made


def expected(model: LlamaForCausalLM, prompt: list[int], tokens: int, n: int, **options: Any) -> list[list[int]]:
    if options.get("early_stopping", False) is None:
        options["early_stopping"] = "never"
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, num_return_sequences=n, do_sample=False, **options
        )
    answers = []
    for row in out[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in EOS and i >= options.get("min_new_tokens", 0)]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


SEARCHES: list[tuple[int, int, dict[str, Any]]] = [
    (12, 1, {"num_beams": 2}),
    (20, 4, {"num_beams": 4}),
    (1, 3, {"num_beams": 3}),
    (2, 2, {"num_beams": 3, "early_stopping": True}),
    (25, 3, {"num_beams": 5, "early_stopping": True}),
    (18, 5, {"num_beams": 5, "early_stopping": None}),
    (18, 2, {"num_beams": 3, "length_penalty": 0.0}),
    (18, 3, {"num_beams": 3, "length_penalty": 2.5, "early_stopping": None}),
    (18, 3, {"num_beams": 4, "length_penalty": -1.0}),
    (15, 4, {"num_beams": 4, "min_new_tokens": 6}),
]


@pytest.mark.parametrize(("tokens", "n", "options"), SEARCHES)
def test_answers_are_those_of_transformers(
    oracle: Oracle, llm: LLM, tokens: int, n: int, options: dict[str, Any]
) -> None:
    found = llm.generate(PROMPTS, max_new_tokens=tokens, n=n, **options)
    for prompt, result in zip(PROMPTS, found, strict=True):
        answers = [answer.token_ids for answer in result.answers]
        assert answers == expected(oracle[1], prompt, tokens, n, **options)
        for answer in result.answers:
            assert answer.finish_reason == ("stop" if answer.token_ids[-1] in EOS else "length")


def test_some_answers_end_early_and_some_do_not(llm: LLM) -> None:
    found = llm.generate(PROMPTS, max_new_tokens=20, n=4, num_beams=4)
    lengths = [len(answer.token_ids) for result in found for answer in result.answers]
    assert 20 in lengths and len(set(lengths)) > 4


def test_log_probabilities_are_of_the_found_tokens(oracle: Oracle, llm: LLM) -> None:
    (found,) = llm.generate(PROMPTS[:1], max_new_tokens=9, n=2, num_beams=3, logprobs=2, prompt_logprobs=True)
    for answer in found.answers:
        ids = torch.tensor([[*PROMPTS[0], *answer.token_ids]])
        with torch.inference_mode():
            every = torch.log_softmax(oracle[1](ids).logits[0].float(), -1)[len(PROMPTS[0]) - 1 : -1]
        for at, token in enumerate(answer.token_ids):
            assert answer.logprobs[at] == pytest.approx(float(every[at, token]), abs=1e-4)
            best = [best for best, _ in answer.top_logprobs[at]]
            assert best == every[at].topk(2).indices.tolist()
    assert len(found.prompt_logprobs) == len(PROMPTS[0]) - 1


def test_what_is_sampled_beside_a_search_is_what_it_is_alone(make_llm: MakeLLM) -> None:
    prompts = [[1, 2, 3, 4, 5], list(range(40, 60)), [7]]
    alone = make_llm().generate(prompts, max_new_tokens=12, n=3, num_beams=4)
    for granule, ahead, slots in [(1, 1, 2000), (4, 0, 2000), (4, 1, 2000), (1, 1, 120)]:
        llm = make_llm(granule=granule, ahead=ahead, max_total_token_num=slots, max_req_total_len=40)
        submits = [*prompts, *prompts]
        mixed = llm.generate(submits, max_new_tokens=12, n=3, num_beams=4)
        for result, other in zip(mixed, [*alone, *alone], strict=True):
            assert [a.token_ids for a in result.answers] == [a.token_ids for a in other.answers]
        plain = llm.generate(prompts, max_new_tokens=12, temperature=0.0)
        assert [result.token_ids for result in plain] == [fake_answer(prompt, 12) for prompt in prompts]
        load = llm.load()
        assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)
        assert load.kv_cached + load.kv_free == load.kv_total


def test_a_search_that_meets_what_is_not_finite_ends_alone(make_llm: MakeLLM) -> None:
    bad = make_llm().generate([[1, 2]], max_new_tokens=6, num_beams=2)[0].token_ids[2]
    llm = make_llm(fake={"faults": {"nan": bad}})
    with pytest.raises(RequestError, match="finite"):
        llm.generate([[1, 2]], max_new_tokens=6, num_beams=2)
    assert llm.load().kv_live == 0
    other = [prompt for prompt in ([3], [4, 4]) if bad not in fake_answer(prompt, 6)]
    assert [r.token_ids for r in llm.generate(other, max_new_tokens=6, temperature=0.0)] == [
        fake_answer(prompt, 6) for prompt in other
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2, "n": 3}, "needs from 3 beams"),
        ({"num_beams": 17}, "to 16"),
        ({"num_beams": 0}, "at least 2"),
        ({"num_beams": 2, "top_k": 5}, "top_k"),
        ({"num_beams": 2, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "length_penalty": 9.0}, "length_penalty"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 2.0}, "num_beams"),
        ({"num_beams": 16, "stop_token_ids": tuple(range(20))}, "vocabulary"),
        ({"num_beams": 16, "max_new_tokens": 200}, "number of beams"),
        ({"num_beams": 16, "logprobs": 80, "max_new_tokens": 120}, "might keep 155,520"),
        ({"num_beams": 16, "n": 2, "logprobs": 0, "max_new_tokens": 1 << 17}, "might keep 262,144"),
    ],
)
def test_what_cannot_be_searched_for(make_llm: MakeLLM, options: dict[str, Any], words: str) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=words):
        llm.generate([[1, 2, 3]], **options)
    assert llm.generate([[1, 2]], max_new_tokens=2, temperature=0.0)[0].token_ids == fake_answer([1, 2], 2)
