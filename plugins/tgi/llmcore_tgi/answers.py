"""Answers to clients of text-generation-inference, for the OpenAPI document; tests check real answers against them.

A member that is UNSET here is left out of an answer where it does not apply.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Reason = Literal["length", "eos_token", "stop_sequence"]


class Token(Struct):
    """A token of an answer."""

    id: int
    """The token's id."""
    text: str
    """The text that it released, or, of a special token, its own."""
    logprob: float
    """Its natural log-probability; -9999 stands for minus infinity."""
    special: bool
    """True for a special token."""


class PrefillToken(Struct):
    """A token of the prompt."""

    id: int
    """The token's id."""
    text: str
    """Its text."""
    logprob: float | None
    """Its natural log-probability; null for the first."""


class Sequence(Struct, kw_only=True):
    """The details of an answer."""

    finish_reason: Reason
    """`eos_token`: at its end; `stop_sequence`: at a stop text; `length`: at a limit of tokens."""
    generated_tokens: int
    """The number of tokens that were generated."""
    seed: int | None
    """The seed with which it was drawn; null for a greedy answer."""
    prefill: list[PrefillToken]
    """The prompt's tokens, where `decoder_input_details` asked for them."""
    tokens: list[Token]
    """The answer's tokens."""
    top_tokens: list[list[Token]] | UnsetType = UNSET
    """The likeliest tokens in the place of each, where `top_n_tokens` asked for them."""


class OtherSequence(Sequence):
    """An answer that `best_of` drew and that is not the best."""

    generated_text: str
    """Its text."""


class Details(Sequence):
    """The details of the answer that is returned."""

    best_of_sequences: list[OtherSequence] | UnsetType = UNSET
    """The other answers that `best_of` drew."""


class GenerateAnswer(Struct):
    """The answer of POST /generate. POST / answers with a list of one."""

    generated_text: str
    """The text, after the prompt where `return_full_text` is true."""
    details: Details | UnsetType = UNSET
    """More of it, where `details` or `decoder_input_details` asked for it."""


class StreamDetails(Struct):
    """The details of a streamed answer."""

    finish_reason: Reason
    """`eos_token`: at its end; `stop_sequence`: at a stop text; `length`: at a limit of tokens."""
    generated_tokens: int
    """The number of tokens that were generated."""
    seed: int | None
    """The seed with which it was drawn; null for a greedy answer."""
    input_length: int
    """The number of tokens in the prompt."""


class TokenEvent(Struct):
    """An event of POST /generate_stream: one token."""

    index: int
    """The token's number, from 1 on."""
    token: Token
    """The token."""
    generated_text: str | None
    """The whole text, in the last event; else null."""
    details: StreamDetails | None
    """In the last event, where `details` asked for it; else null."""
    top_tokens: list[Token] | UnsetType = UNSET
    """The likeliest tokens in this place, where `top_n_tokens` asked for them."""


class InfoAnswer(Struct):
    """The answer of GET /info."""

    model_id: str
    """The served model's name."""
    model_sha: None
    """Always null."""
    model_pipeline_tag: str
    """Always `text-generation`."""
    max_concurrent_requests: int
    """The most answers that are generated at the same time."""
    max_best_of: int
    """The most that `best_of` may be."""
    max_stop_sequences: int
    """The most stop texts that a request may have."""
    max_input_tokens: int
    """The most tokens that a prompt may have."""
    max_total_tokens: int
    """The most tokens that prompt and answer may have together."""
    validation_workers: int
    """The number of HTTP workers."""
    max_client_batch_size: int
    """Always 1: a request has one prompt."""
    router: str
    """Always `llmcore`."""
    version: str
    """The version of llmcore."""
    sha: None
    """Always null."""
    docker_label: None
    """Always null."""


class ErrorAnswer(Struct):
    """An answer with a status of 400 or more."""

    error: str
    """The problem, and its fix."""
    error_type: Literal["validation", "overloaded", "generation"]
    """The class of errors that clients raise."""
