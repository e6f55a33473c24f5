"""A logits processor of a plugin over a real socket, with the real engine: the example of docs/hooks.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from llmcore_devtools import write_fake_model
from llmcore_devtools.server import RunningServer, serving

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "register_logits_processors.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_fake_model(tmp_path_factory.mktemp("models") / "fake")
    with serving(model, plugins=[str(EXAMPLE)], max_total_token_num=1000, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, processors: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        extra_body={"logits_processors": processors},
        **more,
    )


def choice(*texts: str) -> list[dict[str, Any]]:
    return [{"name": "choice", "args": {"texts": list(texts)}}]


def test_the_answer_is_one_of_the_texts(client: openai.OpenAI) -> None:
    answer = ask(client, choice("yes", "no way"), n=5, max_tokens=20)
    assert {c.message.content for c in answer.choices} <= {"yes", "no way"}
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    stream = ask(client, choice("only this"), max_tokens=20, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == "only this"


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        ([{"name": "chioce"}], "there is no 'chioce'; known: bad_words, choice. Did you mean choice?"),
        ([{"name": "choice", "args": {"texts": "yes"}}], "'choice' refuses its arguments: texts must be a list"),
        ([{"name": "choice", "args": {"texts": ["a"], "b": 1}}], "there is no argument 'b'"),
        ([{"name": "choice", "arguments": {}}], "logits_processors[0]"),
        ([{"args": {}}], "logits_processors[0]"),
        ([{"name": "choice", "args": []}], "logits_processors[0].args"),
        (choice("a") * 17, "logits_processors"),
        ("choice", "logits_processors"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_meant_is_refused(client: openai.OpenAI, processors: Any, words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, processors, stream=stream)
    assert words in caught.value.message


def test_none_is_nothing(client: openai.OpenAI) -> None:
    plain = ask(client, None, temperature=0, max_tokens=5).choices[0].message.content
    assert ask(client, [], temperature=0, max_tokens=5).choices[0].message.content == plain
