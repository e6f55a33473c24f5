"""Prompts with a gap: the model writes what stands between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from llmcore.api.protocols import Tokenizer

from llmcore_server.http.errors import refusal
from llmcore_server.http.front import Front

FILLS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens that stand before the text, between it and what follows the gap, and after both, as models are trained."""


def filled(front: Front, prompt: str | Sequence[int], suffix: str, *, param: str = "suffix") -> str:
    """The prompt that makes a model fill the gap between `prompt` and `suffix`, which is in field `param`.

    Raises RequestError where `prompt` is token ids, or the model was not trained for it.
    """
    if not isinstance(prompt, str):
        raise refusal(param, "it goes with prompts that are texts, not token ids", "unsupported_parameter")
    for before, between, after in FILLS:
        if all(_is_token(front.tokenizer, token) for token in (before, between, after)):
            return f"{before}{prompt}{between}{suffix}{after}"
    raise refusal(
        param, "this model's tokenizer has no tokens to fill in the middle with; leave it out", "unsupported_parameter"
    )


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(ids) == 1 and tokenizer.token(ids[0]) == text
