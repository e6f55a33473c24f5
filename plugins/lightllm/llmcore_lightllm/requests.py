"""Requests of LightLLM's clients. Names, defaults and ranges are LightLLM's, except that `top_p` may be 0; `seed`,
`min_p`, `typical_p`, `grammar`, `num_beams` and what follows it are new.

null means absent everywhere. A field that would change the answer and that this server gives no meaning to is typed
`Any` and listed in `REFUSED`; one that changes nothing is checked and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llmcore_server.api import TypedGrammar
from msgspec import Meta, Struct

Flag = bool | None
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None
Copies = Annotated[int, Meta(ge=1, le=8)] | None
Penalty = Annotated[float, Meta(ge=0, le=100)] | None
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTokens = Annotated[list[TokenId], Meta(min_length=1, max_length=256)]


class Parameters(Struct):
    """`parameters` of a request."""

    best_of: Copies = None
    """Equal to n; with --beam_mode the number of beams."""
    n: Copies = None
    """The number of answers to return; a stream has one."""
    do_sample: Flag = None
    """Draw tokens. Absent: false, which is greedy."""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """The temperature at which tokens are drawn. Absent: 1."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Draw from the likeliest tokens that have this share of the probability; 0 is greedy. Absent: 1."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Draw from this number of the likeliest tokens; -1 or absent: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Draw from tokens that have at least this share of the likeliest one's probability."""
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Draw from the tokens whose surprise is nearest to the expected one and that have this share of the
    probability; 1 for all."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Equal requests with equal seeds get equal answers; -1 or absent: one is drawn."""
    presence_penalty: Penalty = None
    """Taken from the score of each token that the answer has already."""
    frequency_penalty: Penalty = None
    """Taken from a token's score once for each time that the answer has it."""
    repetition_penalty: Annotated[float, Meta(ge=1, le=100)] | None = None
    """Divides the scores of tokens that the answer has already; 1 changes nothing."""
    input_penalty: Flag = None
    """The three penalties look at the prompt, too."""
    ignore_eos: Flag = None
    """Go on after the model's own end token."""
    max_new_tokens: Count = None
    """The most tokens that an answer may have. Absent: 16."""
    min_new_tokens: Count = None
    """The fewest tokens that an answer may have. Absent: 1."""
    stop_sequences: StopText | Annotated[list[StopText | StopTokens], Meta(max_length=32)] | None = None
    """Texts or lists of token ids at which an answer ends. The answer shows them."""
    skip_special_tokens: Flag = None
    """Leave the text of special tokens out. Absent: true."""
    add_special_tokens: Flag = None
    """Put the tokenizer's own tokens around the prompt. Absent: true."""
    print_eos_token: Flag = None
    """Show the text of the end token."""
    return_details: Flag = None
    """List the tokens of the answer."""
    num_beams: Annotated[int, Meta(ge=1, le=128)] | None = None
    """The number of beams that search for the answers; 1: they are not searched for."""
    length_penalty: Annotated[float, Meta(ge=-5, le=5)] | None = None
    """In a beam search: above 0 longer answers are preferred, below 0 shorter ones."""
    early_stopping: bool | Literal["never"] | None = None
    """The end of a beam search: true at the first answers, false when better ones are unlikely, "never" when there
    can be none."""

    add_spaces_between_special_tokens: Flag = None
    """Put a space beside each special token that is shown. Absent: true."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Requests with lower numbers are served earlier, with --scheduler priority; other schedulers refuse all but 0."""
    group_request_id: int | None = None
    """Accepted without effect."""
    suggested_dp_index: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Accepted without effect: there is one engine."""

    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    """The only tokens that may be drawn. Absent: all."""
    exponential_decay_length_penalty: (
        tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[float, Meta(ge=1, le=1000)]] | None
    ) = None
    """A start and a factor: after that number of tokens, an end becomes likelier with each token, by the factor."""

    guided_grammar: str | None = None
    """A grammar that the answer has to fit, in Lark or GBNF."""
    guided_json: str | dict[str, Any] | None = None
    """A JSON schema that the answer has to fit, as an object or its text."""
    regular_constraint: str | None = None
    """A regular expression that the answer has to fit."""
    grammar: TypedGrammar | None = None
    """The form of the answer, as TGI's clients say it."""

    image_max_patch_num: Any = None
    """Refused, except -1: this server takes text only."""
    move_kv_to_decode_node: Any = None
    """Refused: KV does not go to other servers."""


class GenerateRequest(Struct):
    """POST /generate, /generate_stream and /. `stream` counts only at /."""

    inputs: str | Annotated[list[TokenId], Meta(min_length=1)]
    """The prompt, as a text or as token ids."""
    parameters: Parameters
    """The parameters of the generation."""
    multimodal_params: dict[str, Any] | None = None
    """Refused unless it is empty: this server takes text only."""
    stream: Flag = None
    """At / only: send the answer as server-sent events while it is generated."""


class ScoreRequest(Struct):
    """/get_score: `chat` is the prompt, a conversation that went through the model's template."""

    chat: str | Annotated[list[TokenId], Meta(min_length=1)]
    """The conversation as the model's template writes it, or its token ids."""
    multimodal_params: dict[str, Any] | None = None
    """Refused unless it is empty: this server takes text only."""


class TokensRequest(Struct):
    """/tokens."""

    text: str
    """The text."""
    parameters: Parameters | None = None
    """Of these only add_special_tokens counts."""
    multimodal_params: dict[str, Any] | None = None
    """Refused unless it is empty: this server takes text only."""


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "image_max_patch_num": (-1,),
    "move_kv_to_decode_node": (),
}
"""Fields of `parameters` that are refused, with the values beside null that change nothing."""

PENALTIES: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "allowed_token_ids": ([],),
    "exponential_decay_length_penalty": (),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "regular_constraint": ("",),
    "grammar": (),
}
"""Fields of `parameters` that a beam search does not take, with the values beside null that change nothing."""
