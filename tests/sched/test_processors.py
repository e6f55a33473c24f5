"""What a choice's masks are checked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from llmcore.errors import RequestError
from llmcore.processors import OVERLOADED, words_of
from llmcore.protocols import Int32
from llmcore.sched.processors import ChoiceProcessors


class Says:
    """A processor that says one mask."""

    def __init__(self, words: Int32) -> None:
        self.words = words

    def mask(self) -> Int32:
        return self.words


def now(work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("size", [31, 32, 33, 100, 150_000])
@pytest.mark.parametrize("behind", [False, True])
def test_a_mask_is_cut_at_the_vocabulary_and_its_owner_keeps_its_own(size: int, behind: bool) -> None:
    bits = np.random.default_rng(size).random(words_of(size) * 32) < 0.5
    bits[size:], bits[size - 1] = behind, True
    words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    before = words.copy()
    processors = ChoiceProcessors([("says", "mask", Says(words))], [], size, now)
    assert processors.error is None and processors.mask is not None
    found = np.unpackbits(processors.mask.view(np.uint8), bitorder="little").astype(bool)
    assert (found[:size] == bits[:size]).all() and not found[size:].any()
    assert (words == before).all()


@pytest.mark.parametrize("size", [31, 32, 33, 150_000])
def test_a_mask_that_allows_only_what_is_behind_the_vocabulary_allows_nothing(size: int) -> None:
    bits = np.arange(words_of(size) * 32) >= size
    words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    processors = ChoiceProcessors([("says", "mask", Says(words))], [], size, now)
    assert processors.error is not None and "allows no token" in processors.error[1]


CODES = [(7, "invalid_value"), ("its_own", "invalid_value"), (OVERLOADED, OVERLOADED)]


@pytest.mark.parametrize(("code", "told"), CODES)
def test_a_refusal_in_the_middle_of_an_answer_can_be_sent(code: object, told: str) -> None:
    """Whatever a plugin puts into it: what no message can carry would end the engine."""

    class Refuses:
        def mask(self) -> Int32:
            raise RequestError("half \ud83d of a pair", code=code)  # type: ignore[arg-type]

    processors = ChoiceProcessors([("refuses", "mask", Refuses())], [], 32, now, fields={"refuses": "guided_x"})
    assert processors.error == (told, "guided_x: half ? of a pair")
