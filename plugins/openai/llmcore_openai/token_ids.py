"""What `return_token_ids` adds to answers, under vLLM's names: `token_ids` of choices, `prompt_token_ids`."""

from __future__ import annotations

from array import array
from typing import Any

from llmcore.api import ChoiceEvent
from llmcore_server.api import Choice, Generation


class TokenIds:
    """The tokens of every choice that no chunk has shown yet; of a whole answer all. End tokens are among them. The
    members' values are arrays.

    `beside`: the prompt's tokens stand in the choice and not beside the choices, as completions have it.
    """

    def __init__(self, generation: Generation, *, beside: bool) -> None:
        self._submits = generation.request.submits
        self._beside = beside
        self._waiting = [array("i") for _ in generation.choices]
        self._first = [True for _ in generation.choices]
        self._prompt_shown = False

    def hear(self, choice: Choice, event: ChoiceEvent) -> None:
        """Tokens after a stop are none of the answer."""
        self._waiting[choice.index].extend(event.tokens[: len(choice.text.starts)])

    def of_choice(self, choice: Choice) -> dict[str, Any]:
        """The members of a choice, or of its next chunk; the prompt's come once."""
        members: dict[str, Any] = {"token_ids": self._waiting[choice.index]}
        self._waiting[choice.index] = array("i")
        if self._beside and self._first[choice.index]:
            members["prompt_token_ids"] = self._prompt(choice.prompt)
        self._first[choice.index] = False
        return members

    def of_answer(self) -> dict[str, Any]:
        """The members of the answer, or of the next chunk."""
        if self._beside or self._prompt_shown:
            return {}
        self._prompt_shown = True
        return {"prompt_token_ids": self._prompt(0)}

    def _prompt(self, index: int) -> array[int]:
        return array("i", self._submits[index].prompt)
