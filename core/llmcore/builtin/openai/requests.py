"""What OpenAI's clients send, with the de-facto extensions; types and ranges are checked when a body is read.

null means absent everywhere. A field that would change the answer and that this server gives no meaning to is typed
`Any` and listed in `REFUSED`; one that changes nothing (`user`, `store`) is checked and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=512)]
Flag = bool | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None
Fraction = Annotated[float, Meta(ge=0, le=1)] | None
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None
BestTokens = Annotated[int, Meta(ge=0, le=20)] | None
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct):
    """How a stream reports usage."""

    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    include_obfuscation: Flag = None


class Processor(Struct, forbid_unknown_fields=True):
    """A logits processor of a plugin, with its arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    args: dict[str, Any] = {}


class Sampled(Struct, kw_only=True):
    """What both completions endpoints take."""

    model: Text | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: Flag = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    add_special_tokens: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = None
    logits_processors: Annotated[list[Processor], Meta(max_length=16)] | None = None

    user: Annotated[str, Meta(max_length=1024)] | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    store: Flag = None
    service_tier: Text | None = None
    priority: int | None = None
    spaces_between_special_tokens: Flag = None

    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    num_beams: Any = None


class Function(Struct):
    """The called function of a message in the history; `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, omit_defaults=True):
    """A call that the assistant made earlier."""

    function: Function
    id: str | None = None
    type: str | None = None


class ToolFunction(Struct):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None


class Tool(Struct):
    """What the model may use; there are only functions."""

    function: ToolFunction
    type: Literal["function"] = "function"


class Part(Struct):
    """A piece of a message's content; only `text` pieces are understood."""

    type: str
    text: str | None = None


class Message(Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ChatRequest(Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count = None
    logprobs: Flag = None
    top_logprobs: BestTokens = None
    add_generation_prompt: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = None

    verbosity: Text | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None

    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampled, kw_only=True):
    """POST /v1/completions. `prompt`: text, ids, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: Flag = None
    logprobs: BestTokens = None
    suffix: Any = None


_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "guided_regex": ("",),
    "structured_outputs": ({},),
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": ("",),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "num_beams": (1,),
}

REFUSED: Mapping[type[Sampled], Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: {
        **_REFUSED,
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "modalities": (["text"],),
        "web_search_options": (),
    },
    CompletionRequest: {**_REFUSED, "suffix": ("",)},
}
"""Fields that are refused, by kind of request, with the values beside null that change nothing."""
