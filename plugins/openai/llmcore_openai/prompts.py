"""The prompts of a completions request: several at once, text before a gap, and what an echo shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcore.api import ChoiceEvent, Finish, RequestError, Tokenizer
from llmcore.api.text import ChoiceText, TextRules
from llmcore_server.api import Front, Places, intake

from llmcore_openai.logprobs import Columns, TokenNames, completion_columns, joined

Prompt = str | list[int]

FILLS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens that stand before the text, between it and what follows the gap, and after both, as models are trained."""


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


def filled(front: Front, prompt: Prompt, suffix: str) -> str:
    """The prompt that makes a model fill the gap between `prompt` and `suffix`. Raises RequestError."""
    if not isinstance(prompt, str):
        raise _refusal("it goes with prompts that are texts, not token ids")
    for before, between, after in FILLS:
        if all(_is_token(front.tokenizer, token) for token in (before, between, after)):
            return f"{before}{prompt}{between}{suffix}{after}"
    raise _refusal("this model's tokenizer has no tokens to fill in the middle with; leave it out")


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(ids) == 1 and tokenizer.token(ids[0]) == text


def _refusal(why: str) -> RequestError:
    return RequestError(f"suffix: {why}", param="suffix", code="unsupported_parameter")


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
