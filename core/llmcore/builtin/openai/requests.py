"""What OpenAI's clients send, with the de-facto extensions; types and ranges are checked when a body is read.

null means absent everywhere. A field that would change the answer and that this server gives no meaning to is typed
`Any` and listed in `REFUSED`; one that changes nothing (`user`, `store`) is checked and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmcore.api.http import TypedGrammar

Text = Annotated[str, Meta(max_length=512)]
Flag = bool | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None
Fraction = Annotated[float, Meta(ge=0, le=1)] | None
Most = Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None
Side = Literal["left", "right"] | None
BestTokens = Annotated[int, Meta(ge=0, le=20)] | None
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None
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


class JsonSchema(Struct):
    """A schema as OpenAI wraps it. Without `strict`, what of it cannot be enforced is left to the model."""

    name: Text | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: Flag = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What the answer has to be; `regex_schema` is LMDeploy's. The types json and regex, and `value`, are TGI's;
    `schema` is that of clients which leave out OpenAI's wrapping."""

    type: Literal["text", "json_object", "json_schema", "regex_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    regex_schema: str | None = None
    value: str | dict[str, Any] | bool | None = None
    schema: str | dict[str, Any] | bool | None = None
    strict: Flag = None

    name: Text | None = None
    description: str | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's; there is no other backend to fall back to, so `disable_fallback` changes nothing."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Flag = None
    disable_fallback: Flag = None
    disable_any_whitespace: Flag = None
    whitespace_pattern: str | None = None

    disable_additional_properties: Any = None
    structural_tag: Any = None


class Sampled(Struct, kw_only=True):
    """What both completions endpoints take."""

    model: Text | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    do_sample: Flag = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Most = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
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

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | TypedGrammar | None = None
    guided_json_object: Flag = None
    guided_decoding_backend: str | None = None
    whitespace_pattern: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Any = None
    guided_structural_tag: Any = None

    use_beam_search: Flag = None
    num_beams: Annotated[int, Meta(ge=1, le=128)] | None = None
    length_penalty: Annotated[float, Meta(ge=-5, le=5)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    user: Annotated[str, Meta(max_length=1024)] | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    store: Flag = None
    service_tier: Text | None = None
    session_id: int | Text | None = None
    priority: Priority = None
    spaces_between_special_tokens: Flag = None

    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
    return_token_ids: Flag = None
    prompt_logprobs: BestTokens = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Side = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1024)] | None = None

    custom_logit_processor: Any = None
    kv_transfer_params: Any = None
    logprob_token_ids: Any = None
    lora_path: Any = None
    no_repeat_ngram_size: Any = None
    no_stop_trim: Any = None
    repetition_detection: Any = None
    repetition_ngram_size: Any = None
    return_hidden_states: Any = None
    return_logprob: Any = None
    stop_regex: Any = None
    thinking_token_budget: Any = None
    vllm_xargs: Any = None

    def __post_init__(self) -> None:
        """-1 tokens are as many as fit, as for llama.cpp and LM Studio: the field is absent."""
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name, None) == -1:
                setattr(self, name, None)


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


class ToolName(Struct):
    """A function by its name."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]


class NamedTool(Struct):
    """A tool by its name."""

    function: ToolName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    """The only tools that may be called (`mode` auto), or of which one must be (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=1024)]


class ToolChoice(Struct):
    """`tool_choice` as an object."""

    type: Literal["function", "allowed_tools"]
    function: ToolName | None = None
    allowed_tools: AllowedTools | None = None


class Part(Struct):
    """A piece of a message's content; only `text` pieces are understood."""

    type: str
    text: str | None = None


class Message(Struct, omit_defaults=True):
    """One message of a conversation. `prefix` or `partial` of the last one: the answer goes on with it."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    prefix: Flag = None
    partial: Flag = None


class ChatRequest(Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Most = None
    logprobs: Flag = None
    top_logprobs: BestTokens = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: Flag = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = None

    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None

    audio: Any = None
    character_settings: Any = None
    chat_template: Any = None
    do_preprocess: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    include_reasoning: Any = None
    input_ids: Any = None
    modalities: Any = None
    role_settings: Any = None
    separate_reasoning: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampled, kw_only=True):
    """POST /v1/completions. `prompt`: text, ids, or a list of either. `max_tokens` 0: only with `echo`."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: Flag = None
    logprobs: BestTokens = None
    suffix: str | None = None

    prompt_embeds: Any = None
    top_logprobs: Any = None


_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "kv_transfer_params": ({},),
    "logprob_token_ids": ([],),
    "lora_path": ("", []),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "repetition_ngram_size": (0,),
    "return_hidden_states": (False,),
    "guided_structural_tag": ("",),
    "structural_tag": ("",),
    "return_logprob": (False,),
    "stop_regex": ("", []),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
}

REFUSED: Mapping[type[Sampled], Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: {
        **_REFUSED,
        "audio": (),
        "character_settings": ({},),
        "chat_template": (),
        "do_preprocess": (True,),
        "documents": ([],),
        "echo": (False,),
        "include_reasoning": (True,),
        "input_ids": ([],),
        "modalities": (["text"],),
        "role_settings": ({},),
        "separate_reasoning": (True,),
        "web_search_options": (),
    },
    CompletionRequest: {**_REFUSED, "prompt_embeds": ([],), "top_logprobs": (0,)},
}
"""Fields that are refused, by kind of request, with the values beside null that change nothing."""

PENALTIES: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
}
"""Fields that a beam search does not take, with the values beside null that change nothing."""
