"""What requests tell the scheduler: the field `priority` of every dialect, and the hints of a plugin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmcore.api import RequestError, SamplingParams
from llmcore_devtools.dialect import Side
from llmcore_server.api import intake

MakeSide = Callable[..., Side]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
    ],
)
def test_openai(openai: MakeSide, path: str, body: dict[str, Any]) -> None:
    side = openai(facts={"embedding_size": 3})
    side.post(path, **body, priority=-7)
    assert {submit.priority for submit in side.bridge.submitted} == {-7}
    side.post(path, **body, priority=2**31)
    assert side.post(path, **body, priority=2**31).json["error"]["param"] == "priority"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_lightllm(lightllm: MakeSide, path: str) -> None:
    side = lightllm()
    side.post(path, inputs="x", parameters={"priority": 3})
    side.post(path, inputs="x", parameters={})
    assert [submit.priority for submit in side.bridge.submitted] == [3, 0]


def test_hints_are_few_and_short(openai: MakeSide) -> None:
    front = openai().front

    def hinted(hints: dict[str, Any]) -> dict[str, Any]:
        return intake.submit(front, [1], SamplingParams(), max_new_tokens=1, hints=hints).hints

    some = {"due": 2.5, "tenant": "a" * 256, "tries": -(2**63) + 1, "batch": True}
    assert hinted(some) == some and hinted({}) == {}
    wrongs: list[dict[Any, Any]] = [
        {str(i): i for i in range(17)},
        {"a": "b" * 257},
        {"a" * 257: 1},
        {"a": 2**63},
        {"a": [1]},
        {"a": None},
        {1: 2},
    ]
    for wrong in wrongs:
        with pytest.raises(RequestError, match="a request has at most 16, with names of up to 256"):
            hinted(wrong)
