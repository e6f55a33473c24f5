"""The prompts of a completions request: several at once, and what an echo shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcore.api import ChoiceEvent, Finish, RequestError
from llmcore.api.text import ChoiceText, TextRules
from llmcore_server.api import Front, Places, TokenNames, intake

from llmcore_openai.logprobs import Columns, completion_columns, joined

Prompt = str | list[int]


def split_prompts(front: Front, prompt: str | list[Any], *, param: str = "prompt") -> list[Prompt]:
    """The prompts of a request: one text, one list of ids, or a list in which each is either."""
    intake.check_readable(front, prompt, param=param)
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # there may be a hundred thousand, and they are looked at before they are counted
    if kinds == {int}:
        return [prompt]
    if int not in kinds:
        return prompt
    raise RequestError(
        f"{param}: a list holds token ids, or prompts that are texts or lists of token ids",
        param=param,
        code="invalid_type",
    )


class Echoes:
    """What is shown of a request's prompts: texts, and columns of log-probabilities, once the engine has sent them.

    `ids`: the prompts' tokens, as they were submitted. `top`: how many of the best tokens are shown beside each;
    None: no columns are.
    """

    def __init__(
        self, front: Front, given: Sequence[Prompt], ids: Sequence[Sequence[int]], top: int | None, *, special: bool
    ):
        self._tokenizer = front.tokenizer
        self._ids = ids
        self._skip = not special
        self._top = top
        self._known: dict[int, Places] = {}
        self.texts = [
            one if isinstance(one, str) else front.tokenizer.decode(one, skip_special_tokens=self._skip)
            for one in given
        ]

    def hear(self, prompt: int, event: ChoiceEvent) -> None:
        """Keep what an event says of prompt number `prompt`."""
        if event.prompt_logprobs and self._top is not None:
            self._known[prompt] = self._places(self._ids[prompt], event, self._top)

    def columns(self, names: TokenNames, prompt: int) -> Columns:
        """`logprobs` of a prompt. Its first token has no log-probability."""
        token = names.text(self._ids[prompt][0])
        first: Columns = {"tokens": [token], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        known = self._known.get(prompt, Places())  # a prompt of one token has none
        return joined(first, completion_columns(names, known))

    def _places(self, ids: Sequence[int], event: ChoiceEvent, top: int) -> Places:
        text = ChoiceText(self._tokenizer, TextRules(skip_special_tokens=self._skip))
        text.feed(ChoiceEvent(choice=0, tokens=tuple(ids), finish=Finish.RUNNING))
        places = Places()
        best = event.prompt_top or ((),) * len(event.prompt_logprobs)
        for start, token, logprob, likely in zip(text.starts[1:], ids[1:], event.prompt_logprobs, best, strict=True):
            places.add(start, token, logprob, likely[:top])
        return places
