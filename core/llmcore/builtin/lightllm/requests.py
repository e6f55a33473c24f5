"""What LightLLM's clients send. Names, defaults and ranges are LightLLM's, except that `top_p` may be 0; `seed`,
`min_p`, `typical_p`, `grammar`, `num_beams` and what follows it are new.

null means absent everywhere. A field that would change the answer and that this server gives no meaning to is typed
`Any` and listed in `REFUSED`; one that changes nothing is checked and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmcore.api.http import TypedGrammar

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
    n: Copies = None
    do_sample: Flag = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float, Meta(ge=1, le=100)] | None = None
    input_penalty: Flag = None
    ignore_eos: Flag = None
    max_new_tokens: Count = None
    min_new_tokens: Count = None
    stop_sequences: StopText | Annotated[list[StopText | StopTokens], Meta(max_length=32)] | None = None
    skip_special_tokens: Flag = None
    add_special_tokens: Flag = None
    print_eos_token: Flag = None
    return_details: Flag = None
    num_beams: Annotated[int, Meta(ge=1, le=128)] | None = None
    length_penalty: Annotated[float, Meta(ge=-5, le=5)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    add_spaces_between_special_tokens: Flag = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    group_request_id: int | None = None
    suggested_dp_index: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None

    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    exponential_decay_length_penalty: (
        tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[float, Meta(ge=1, le=1000)]] | None
    ) = None

    guided_grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    regular_constraint: str | None = None
    grammar: TypedGrammar | None = None

    image_max_patch_num: Any = None
    move_kv_to_decode_node: Any = None


class GenerateRequest(Struct):
    """POST /generate, /generate_stream and /. `stream` counts only at /."""

    inputs: str | Annotated[list[TokenId], Meta(min_length=1)]
    parameters: Parameters
    multimodal_params: dict[str, Any] | None = None
    stream: Flag = None


class ScoreRequest(Struct):
    """/get_score: `chat` is the prompt, a conversation that went through the model's template."""

    chat: str | Annotated[list[TokenId], Meta(min_length=1)]
    multimodal_params: dict[str, Any] | None = None


class TokensRequest(Struct):
    """/tokens."""

    text: str
    parameters: Parameters | None = None
    multimodal_params: dict[str, Any] | None = None


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
