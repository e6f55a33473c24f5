"""Answers to clients of LightLLM's dialect, for the OpenAPI document. Tests check real answers against these types.

A member that is UNSET here is left out of an answer where it does not apply.
"""

from __future__ import annotations

from llmcore_server.api import ErrorMembers
from msgspec import UNSET, Struct, UnsetType


class Token(Struct):
    """A token of a stream."""

    id: int
    """The token's id."""
    text: str
    """The text that it released: empty while that could still become part of a stop text or of a character."""
    logprob: float
    """Its natural log-probability; -9999 stands for minus infinity."""
    special: bool
    """True for a special token."""
    count_output_tokens: int
    """The number of tokens so far."""
    prompt_tokens: int
    """The number of tokens in the prompt."""


class Detail(Token):
    """A token of a whole answer."""

    cumlogprob: float
    """The mean log-probability of all tokens so far, which is what LightLLM gives under this name."""
    mtp_accepted_token_num: int
    """Always 0: no tokens are drafted."""


class GenerateAnswer(Struct):
    """The answer of POST /generate. A number or text that each choice has is a list where there are several."""

    generated_text: list[str]
    """The text of each choice."""
    count_output_tokens: int | list[int]
    """The number of tokens that were generated."""
    finish_reason: str | list[str]
    """`stop`: at its end or a stop text; `length`: at a limit of tokens."""
    prompt_tokens: int
    """The number of tokens in the prompt."""
    tokens: list[Detail | list[Detail]] | UnsetType = UNSET
    """The tokens, where `return_details` asked for them."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The prompt's tokens, on a server with `--return_all_prompt_logprobs`."""
    prompt_logprobs: list[tuple[int, dict[str, float]]] | UnsetType = UNSET
    """On such a server, for each prompt token but the last: its id, and the next token's id and log-probability."""


class TokenEvent(Struct):
    """An event of POST /generate_stream: one token."""

    token: Token
    """The token."""
    generated_text: None
    """Always null."""
    finished: bool
    """True for the last one."""
    finish_reason: str | None
    """The reason of the answer's end, in the last event: `stop` or `length`."""
    details: None
    """Always null."""


class ScoreAnswer(Struct):
    """The answer of POST /get_score."""

    score: float | list[float]
    """The reward model's score; a list if its head gives several numbers."""
    prompt_tokens: int
    """The number of tokens in the prompt."""
    finish_reason: str
    """Always `length`."""


class TokensAnswer(Struct):
    """The answer of /tokens."""

    ntokens: int
    """The number of tokens in the text."""


class LoadAnswer(Struct):
    """The answer of GET /token_load: shares of the KV slots."""

    current_load: float
    """The share that requests hold now, 0 to 1."""
    logical_max_load: float
    """The largest share that they are expected to hold."""
    dynamic_max_load: float
    """The same under another name."""


class NameAnswer(Struct):
    """The answer of /get_model_name."""

    model_name: str
    """The first `--model_name`."""


class ErrorAnswer(Struct):
    """An answer with a status of 400 or more."""

    message: str
    """The problem, and its fix."""
    error: ErrorMembers
    """The same with more."""
