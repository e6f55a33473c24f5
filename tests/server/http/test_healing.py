"""Token healing: what is taken from a prompt, which tokens may stand in its place, and what of the answer is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import BeamSearch, ChoiceEvent, Finish, LogitsProcessor, SamplingParams, Submit
from llmcore.api.errors import ConfigError
from llmcore.api.processors import ProcessorContext
from llmcore.text.stops import StopStrings
from llmcore.text.stream import ChoiceText, Healing, TextRules
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.tokenizer import EOS, write_sentencepiece_like, write_tokenizer
from llmcore_server.http.healing import check_healing, heal, make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def submit(ids: list[int], **more: Any) -> Submit:
    return Submit(id=1, prompt=np.array(ids, "<i4").tobytes(), max_new_tokens=10, **more)


def taken(made: Submit, ids: list[int]) -> list[int]:
    kept = np.frombuffer(made.prompt, "<i4").tolist()
    assert ids[: len(kept)] == kept
    return ids[len(kept) :]


def test_the_last_two_tokens_are_taken(tokenizer: FastTokenizer) -> None:
    ids = tokenizer.encode("go to the")
    made, healing = heal(submit(ids), tokenizer, 100)
    assert tokenizer.decode(taken(made, ids)) == " the" and healing == Healing(2, 4, 10)
    assert made.sampling.logits_processors == (LogitsProcessor("token_healing", {"prefix": b" the".hex()}),)
    assert made.max_new_tokens == 10 + 2 + 6
    assert heal(submit(ids), tokenizer, len(ids) + 11)[0].max_new_tokens == 10 + 2 + 1


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a", ""),
        ("ab", "b"),
        ("ab😀", "😀"),
        ("ab€", "€"),
        ("<|im_start|>a", "a"),
        ("ab<|im_start|>", ""),
        ("a<|im_end|>bc", "bc"),
    ],
)
def test_whole_characters_of_text_are_taken_and_one_token_stays(tokenizer: FastTokenizer, text: str, end: str) -> None:
    ids = tokenizer.encode(text)
    made, healing = heal(submit(ids), tokenizer, 100)
    assert tokenizer.decode(taken(made, ids), skip_special_tokens=False) == end
    assert (healing is None) == (end == "")


@pytest.mark.parametrize(
    "more",
    [
        {"beams": BeamSearch(2)},
        {"prompt_logprobs": True},
        {"score": True},
        {"sampling": SamplingParams(allowed_ids=(1, 2))},
        {"sampling": SamplingParams(logits_processors=(LogitsProcessor("guided"),))},
    ],
)
def test_who_settles_the_first_token_otherwise_keeps_the_prompt(
    tokenizer: FastTokenizer, more: dict[str, Any]
) -> None:
    request = submit([1, 2, 3, 4], **more)
    assert heal(request, tokenizer, 100) == (request, None)


def test_only_what_continues_the_prefix_is_allowed(tokenizer: FastTokenizer) -> None:
    size = 300
    start = make({"prefix": b" the".hex()}, ProcessorContext(size, (EOS,), lambda: tokenizer))
    random = np.random.default_rng(0)
    for _ in range(20):
        processor, text = start(np.array([1], np.int32)), b""
        while not processor.free():
            mask = processor.mask()
            assert mask is not None and mask.shape == (10,)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            rest = b" the"[len(text) :]
            expected = [
                token
                for token in range(tokenizer.vocab_size)
                if token not in tokenizer.special_ids
                and (piece := tokenizer.token_bytes(token))
                and (piece.startswith(rest) or rest.startswith(piece))
            ]
            assert allowed.tolist() == expected
            token = int(random.choice(allowed))
            processor.accept(token)
            text += tokenizer.token_bytes(token)
        assert text.startswith(b" the") and processor.mask() is None and not processor.finished()


@pytest.mark.parametrize("args", [{}, {"prefix": 3}, {"prefix": "zz"}, {"prefix": "61", "more": 1}])
def test_arguments_that_are_none(tokenizer: FastTokenizer, args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prefix|hexadecimal"):
        make(args, ProcessorContext(300, (EOS,), lambda: tokenizer))


def feed(text: ChoiceText, ids: list[int], finish: Finish = Finish.RUNNING, group: int = 1) -> list[str]:
    texts: list[str] = []
    for at in range(0, len(ids), group):
        part = tuple(ids[at : at + group])
        last = at + group >= len(ids)
        texts += text.feed(ChoiceEvent(choice=0, tokens=part, finish=finish if last else Finish.RUNNING))
        if text.finish is not Finish.RUNNING:
            break
    return texts


@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize(
    "pieces", [["t", "h", "e", " ", "s", "t"], ["t", "he", " ", "s", "t"], ["the", " t", "he", "s"]]
)
def test_the_prefix_is_not_shown_and_not_counted(tokenizer: FastTokenizer, pieces: list[str], group: int) -> None:
    ids = [tokenizer.encode(piece) for piece in pieces]
    text = ChoiceText(tokenizer, TextRules(), Healing(1, 2, 3))
    texts = feed(text, [token for one in ids for token in one], group=group)
    seen, counted = "", 0
    for token in (token for one in ids for token in one):
        if counted < 3:
            seen += tokenizer.decode([token])
            counted += len(seen) > 2
    assert "".join(texts) == seen[2:]
    assert text.finish is Finish.LENGTH and text.must_finish and text.tokens == len(texts)


def test_a_stop_text_in_the_prefix_does_not_count(tokenizer: FastTokenizer) -> None:
    text = ChoiceText(tokenizer, TextRules(stops=StopStrings(["ab"])), Healing(2, 2, 9))
    texts = feed(text, tokenizer.encode("abcabd"))
    assert ("".join(texts), text.finish) == ("c", Finish.STOP)


def test_the_end_token_counts_more_than_the_length(tokenizer: FastTokenizer) -> None:
    text = ChoiceText(tokenizer, TextRules(stop_ids=frozenset({EOS})), Healing(1, 1, 2))
    texts = feed(text, [*tokenizer.encode("xy"), EOS], Finish.STOP)
    assert ("".join(texts), text.finish, text.must_finish) == ("y", Finish.STOP, False)


def test_a_leading_space_that_text_loses(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece_like(tmp_path))
    check_healing(tokenizer)
    ids = tokenizer.encode("b a")
    made, healing = heal(submit(ids), tokenizer, 100)
    assert healing is not None
    text = ChoiceText(tokenizer, TextRules(), healing)
    assert "".join(feed(text, [*taken(made, ids), *tokenizer.encode("b", add_special_tokens=False)])).strip() == "b"


def test_a_tokenizer_without_bytes_is_refused() -> None:
    class Strange:
        special_ids: frozenset[int] = frozenset()

    with pytest.raises(ConfigError, match="token_healing_mode"):
        check_healing(Strange())  # type: ignore[arg-type]
