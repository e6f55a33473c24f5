"""Logits processors: the words of a mask, and processors that need an option."""

from __future__ import annotations

import pytest
from llmcore.api.processors import LogitsProcessorSpec, words_of


@pytest.mark.parametrize(("vocabulary", "words"), [(1, 1), (32, 1), (33, 2), (151_936, 4748)])
def test_a_mask_has_a_bit_for_every_token(vocabulary: int, words: int) -> None:
    assert words_of(vocabulary) == words


def test_a_processor_may_need_an_option() -> None:
    always = LogitsProcessorSpec(name="a", make="m:m")
    asked = LogitsProcessorSpec(name="b", make="m:m", option="heal")
    assert always.enabled({}) and asked.enabled({"heal": True})
    assert not asked.enabled({"heal": False}) and not asked.enabled({}), "its plugin may be left out"
