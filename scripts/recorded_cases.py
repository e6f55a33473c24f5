"""The requests and command lines of record_answers.py, as tables. Reading them needs no code of llmcore."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DIALOG = [
    {"role": "system", "content": "You answer in one word."},
    *QUESTION,
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "of Italy?"}]},
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city", "n"],
}
LOOSE = {"type": "object", "properties": {"a": {"type": "boolean"}}, "not": {"required": ["b"]}}


def tool(name: str, *fields: str, **more: Any) -> Body:
    properties = {field: {"type": "string", "maxLength": 6} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> Body:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", "place"), tool("stop")]
CALLED = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]

# --- requests to OpenAI's endpoints: name -> the members beside the base --------------------------------------------

OPENAI_BOTH: dict[str, Body] = {
    "plain": {},
    "model": {"model": "demo"},
    "alias": {"model": "other"},
    "one token": {"max_tokens": 1},
    "sampled with a seed": {"temperature": 0.9, "seed": 7},
    "negative seed": {"temperature": 0.9, "seed": -5},
    "top_p": {"temperature": 1, "top_p": 0.5, "seed": 1},
    "top_k": {"temperature": 1, "top_k": 3, "seed": 1},
    "min_p": {"temperature": 1, "min_p": 0.2, "seed": 1},
    "typical_p": {"temperature": 1, "typical_p": 0.5, "seed": 1},
    "do_sample false": {"temperature": 1.5, "do_sample": False},
    "several answers": {"n": 3, "temperature": 1, "seed": 3, "max_tokens": 5},
    "best_of": {"n": 2, "best_of": 4, "temperature": 1, "seed": 3, "max_tokens": 5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence and frequency penalties": {"presence_penalty": 1.5, "frequency_penalty": -1},
    "logit_bias": {"logit_bias": {"28": 100, "30": -100}, "max_tokens": 3},
    "stop text": {"stop": "a"},
    "stop texts, shown": {"stop": ["zzz", " is"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [314, 282, 30, 28]},
    "ignore_eos": {"ignore_eos": True, "min_tokens": 4, "max_tokens": 6},
    "ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
    "allowed ids": {"allowed_token_ids": [28, 30, 282], "max_tokens": 4},
    "bad words": {"bad_words": ["Paris", " the capital"]},
    "truncated prompt": {"truncate_prompt_tokens": 5},
    "truncated prompt, right": {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    "special tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": True, "max_tokens": 12},
    "salt": {"cache_salt": "s"},
    "accepted without effect": {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    "unknown field": {"never_heard_of": [1]},
    "nulls": {"n": None, "stop": None, "seed": None, "logit_bias": None},
    "beams": {"num_beams": 3, "n": 2, "max_tokens": 5, "temperature": None},
    "beams of vLLM": {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": True},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 16},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "max_tokens": 32,
    },
    "schema not wholly enforced": {"guided_json": LOOSE, "max_tokens": 12},
    "schema not wholly enforced, strict": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE, "strict": True}}
    },
    "regex": {"guided_regex": "[A-C]{2,4}-[0-9]", "max_tokens": 16},
    "choice": {"guided_choice": ["Berlin", "Rome", "Paris"], "max_tokens": 16},
    "grammar": {"guided_grammar": 'root ::= "a" root | "b"', "max_tokens": 8},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "max_tokens": 32},
    "processor": {"logits_processors": [{"name": "guided", "args": {"regex": "x+y"}}], "max_tokens": 6},
    # refused
    "unknown model": {"model": "gpt-5"},
    "priority": {"priority": 3},
    "too hot": {"temperature": 2.1},
    "no tokens": {"max_tokens": 0},
    "too many tokens": {"max_tokens": 5000},
    "n beyond best_of": {"n": 3, "best_of": 2},
    "min beyond max": {"min_tokens": 9},
    "stop without text": {"stop": ["a", ""]},
    "bias of no token": {"logit_bias": {"99999999": 1}},
    "bias of no number": {"logit_bias": {"x": 1}},
    "too many beams": {"num_beams": 3, "best_of": 4},
    "beams with a temperature": {"num_beams": 2, "temperature": 0.5},
    "beams that must fit": {"num_beams": 2, "guided_regex": "a", "temperature": None},
    "wrong regex": {"guided_regex": "(("},
    "wrong schema": {"guided_json": {"type": "nothing"}},
    "wrong grammar": {"guided_grammar": "root ::= ("},
    "two formats": {"guided_regex": "a", "guided_choice": ["a"]},
    "format of no type": {"response_format": {"type": "xml"}},
    "format without schema": {"response_format": {"type": "json_schema"}},
    "unknown processor": {"logits_processors": [{"name": "never", "args": {}}]},
    "lora": {"lora_path": "x"},
    "transfer": {"kv_transfer_params": {"do_remote_decode": True}},
}
"""For /v1/chat/completions and /v1/completions, whole and streamed."""

CHAT_BASE: Body = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}
CHAT_ONLY: dict[str, Body] = {
    "until it ends": {"max_tokens": 40},
    "max_completion_tokens": {"max_completion_tokens": 3, "max_tokens": 9},
    "logprobs": {"logprobs": True, "max_tokens": 3},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    "tokens as ids": {"logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 2},
    "dialog": {"messages": DIALOG},
    "no generation prompt": {"add_generation_prompt": False},
    "continued": {
        "messages": [*QUESTION, {"role": "assistant", "content": "The city is"}],
        "continue_final_message": True,
    },
    "prefix": {"messages": [*QUESTION, {"role": "assistant", "content": "The city is", "prefix": True}]},
    "hints": {"reasoning_effort": "low", "verbosity": "high", "chat_template_kwargs": {"a": 1}},
    "empty tools": {"tools": [], "functions": []},
    "tools": {"tools": TOOLS},
    "tools that the model does not see": {"tools": TOOLS, "tool_choice": "none"},
    # refused
    "no messages": {"messages": []},
    "no role": {"messages": [{"content": "x"}]},
    "unknown role": {"messages": [{"role": "model", "content": "x"}]},
    "no content": {"messages": [{"role": "user"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "sound": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    "too long": {"messages": [{"role": "user", "content": "hello " * 5000}]},
    "much too long": {"messages": [{"role": "user", "content": "hello " * 60000}]},
    "top_logprobs alone": {"top_logprobs": 2},
    "unknown effort": {"reasoning_effort": "huge"},
    "kwargs of Jinja": {"chat_template_kwargs": {"loop": 1}},
    "both ends": {"continue_final_message": True, "add_generation_prompt": True},
    "continued question": {"continue_final_message": True},
    "thinking": {"enable_thinking": True},
    "modalities": {"modalities": ["audio"]},
    "own template": {"chat_template": "{{ messages }}"},
}

TOOL_CASES: dict[str, Body] = {
    "auto": {"tools": TOOLS},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 48},
    "required, one": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 48},
    "named": {"tools": TOOLS, "tool_choice": named("weather"), "max_tokens": 48},
    "cut": {"tools": TOOLS, "tool_choice": named("weather"), "max_tokens": 12},
    "named, without arguments": {"tools": TOOLS, "tool_choice": named("stop"), "max_tokens": 48},
    "allowed, required": {
        "tools": TOOLS,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named("stop")]},
        },
        "max_tokens": 48,
    },
    "allowed, auto": {
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("stop")]}},
    },
    "strict": {"tools": [tool("weather", "place", strict=True)]},
    "call or schema": {"tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 24},
    "two answers": {"tools": TOOLS, "tool_choice": named("weather"), "n": 2, "seed": 1, "temperature": 1},
    "answered": {"messages": CALLED, "tools": TOOLS},
    "choice without a tool": {"tool_choice": "required"},
    "unknown choice": {"tools": TOOLS, "tool_choice": "sometimes"},
    "unknown tool": {"tools": TOOLS, "tool_choice": named("never")},
    "choice without function": {"tools": TOOLS, "tool_choice": {"type": "function"}},
    "choice of no type": {"tools": TOOLS, "tool_choice": {"type": "any"}},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "tool of another type": {"tools": [{"type": "web_search"}]},
    "wrong parameters": {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
    "one name twice": {"tools": [TOOLS[0], TOOLS[0]]},
    "wrong call": {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "old functions": {"functions": [{"name": "f"}], "function_call": "auto"},
}
"""For /v1/chat/completions of a server with a template and a parser for tools, whole and streamed."""

COMPLETION_BASE: Body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
COMPLETION_ONLY: dict[str, Body] = {
    "ids": {"prompt": [504, 3575, 282, 4649, 314]},
    "batch": {"prompt": ["One, two,", "The sea is"], "max_tokens": 4},
    "batch of ids": {"prompt": [[504, 3575], [282]], "max_tokens": 3},
    "batch with several answers": {"prompt": ["One,", "The"], "n": 2, "seed": 5, "temperature": 1, "max_tokens": 3},
    "logprobs": {"logprobs": 2, "max_tokens": 3},
    "tokens as ids": {"logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 2},
    "echo": {"echo": True, "max_tokens": 3},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo with logprobs": {"echo": True, "logprobs": 1, "max_tokens": 2},
    "suffix": {"suffix": " is big."},
    "no special tokens": {"add_special_tokens": False},
    "end token in the prompt": {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 16},
    # refused
    "no prompt": {"prompt": None},
    "empty prompt": {"prompt": ""},
    "empty list": {"prompt": []},
    "empty prompt in a list": {"prompt": [[]]},
    "mixed": {"prompt": [1, "a"]},
    "id beyond the vocabulary": {"prompt": [49152]},
    "negative id": {"prompt": [-1]},
    "fraction": {"prompt": [1.5]},
    "too long": {"prompt": "hello " * 5000},
    "much too long": {"prompt": "hello " * 60000},
    "too many ids": {"prompt": [1] * 5000},
    "too many prompts": {"prompt": ["a"] * 257},
    "too many answers": {"prompt": ["a"] * 200, "n": 6},
    "embeds": {"prompt_embeds": "AAAA"},
    "echo of a cut prompt": {"echo": True, "truncate_prompt_tokens": 1},
    "top_logprobs": {"logprobs": 1, "top_logprobs": 1},
}

TEXTS: list[tuple[str, str, Body]] = [
    ("embedding", "/v1/embeddings", {"input": "How do I bake bread?"}),
    ("embeddings", "/v1/embeddings", {"input": ["Mix flour.", [504, 3575]], "dimensions": 8}),
    ("base64", "/v1/embeddings", {"input": "Mix flour.", "dimensions": 4, "encoding_format": "base64"}),
    ("mean", "/v1/embeddings", {"input": "Mix flour.", "pooling": "mean", "normalize": False, "dimensions": 8}),
    ("embedding, cut", "/v1/embeddings", {"input": "Mix flour and water", "truncate_prompt_tokens": 2}),
    ("no input", "/v1/embeddings", {}),
    ("empty input", "/v1/embeddings", {"input": ""}),
    ("too many dimensions", "/v1/embeddings", {"input": "x", "dimensions": 4096}),
    ("unknown pooling", "/v1/embeddings", {"input": "x", "pooling": "cls"}),
    ("unknown model of embeddings", "/v1/embeddings", {"input": "x", "model": "never"}),
    ("too long an input", "/v1/embeddings", {"input": "hello " * 5000}),
    ("score", "/v1/score", {"text_1": "bread", "text_2": "flour"}),
    ("scores", "/score", {"text_1": "bread", "text_2": ["flour", "the sea"]}),
    ("uneven scores", "/v1/score", {"text_1": ["a", "b"], "text_2": "c"}),
    ("rerank", "/v1/rerank", {"query": "bread", "documents": ["the sea", {"text": "flour"}]}),
    ("top_n", "/rerank", {"query": "bread", "documents": ["the sea", "flour"], "top_n": 1}),
    ("no documents", "/v2/rerank", {"query": "bread", "documents": ["sea"], "return_documents": False}),
    ("rank_fields", "/v1/rerank", {"query": "x", "documents": ["y"], "rank_fields": ["a"]}),
    ("tokenize", "/tokenize", {"prompt": "Hello, world", "return_token_strs": True}),
    ("tokenize without special tokens", "/tokenize", {"prompt": "Hello", "add_special_tokens": False}),
    ("tokenize messages", "/tokenize", {"messages": QUESTION}),
    ("tokenize open messages", "/tokenize", {"messages": QUESTION, "add_generation_prompt": False}),
    ("tokenize both", "/tokenize", {"prompt": "x", "messages": QUESTION}),
    ("tokenize nothing", "/tokenize", {}),
    ("detokenize", "/detokenize", {"tokens": [504, 3575, 2]}),
    ("detokenize beyond", "/detokenize", {"tokens": [49152]}),
    ("detokenize texts", "/detokenize", {"tokens": ["a"]}),
    ("tokens", "/tokens", {"text": "How long is this?"}),
    ("tokens with parameters", "/tokens", {"text": "How", "parameters": {"add_special_tokens": False}}),
    ("tokens of nothing", "/tokens", {}),
    ("score of a reward model", "/get_score", {"chat": "Hello"}),
]
"""(name, path, body) of requests that generate nothing."""

LIGHTLLM_BASE: Body = {"max_new_tokens": 6}
LIGHTLLM: dict[str, Body] = {
    "plain": {},
    "one token": {"max_new_tokens": 1},
    "details": {"return_details": True, "max_new_tokens": 3},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4},
    "min_p": {"do_sample": True, "min_p": 0.3, "seed": 4},
    "typical_p": {"do_sample": True, "typical_p": 0.3, "seed": 4},
    "several": {"n": 2, "best_of": 2, "do_sample": True, "seed": 4, "return_details": True, "max_new_tokens": 2},
    "best_of": {"best_of": 2, "do_sample": True, "seed": 4},
    "beams": {"num_beams": 3, "best_of": 2, "n": 2},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.3, "input_penalty": True},
    "decay": {"exponential_decay_length_penalty": [2, 50.0], "max_new_tokens": 12},
    "stop": {"stop_sequences": [" Paris"]},
    "stop ids": {"stop_sequences": ["zzz", [28]]},
    "min_new_tokens": {"min_new_tokens": 4, "ignore_eos": True},
    "end shown": {"print_eos_token": True, "skip_special_tokens": False},
    "no special tokens": {"add_special_tokens": False, "add_spaces_between_special_tokens": False},
    "allowed": {"allowed_token_ids": [28, 30]},
    "regex": {"regular_constraint": "[A-C]{2}", "max_new_tokens": 8},
    "json": {"guided_json": SCHEMA, "max_new_tokens": 32},
    "grammar": {"guided_grammar": "json", "max_new_tokens": 8},
    "grammar of TGI": {"grammar": {"type": "regex", "value": "[0-9]{3}"}},
    "group": {"group_request_id": 5, "suggested_dp_index": 0},
    "unknown field": {"never_heard_of": 1},
    # refused
    "hot": {"temperature": 101},
    "top_k": {"top_k": 0},
    "uneven": {"n": 1, "best_of": 2},
    "min beyond max": {"min_new_tokens": 9},
    "too many": {"max_new_tokens": 5000},
    "empty stop": {"stop_sequences": [[]]},
    "wrong decay": {"exponential_decay_length_penalty": [1, 0.5]},
    "exclusive": {"regular_constraint": "a", "guided_json": "{}"},
    "exclusive ids": {"regular_constraint": "a", "allowed_token_ids": [1]},
    "wrong regex": {"regular_constraint": "(("},
    "priority": {"priority": 2},
    "images": {"multimodal_params": {"images": [{"type": "url", "data": "x"}]}},
}
"""`parameters` of /generate and /generate_stream."""

NATIVE_BODIES: list[tuple[str, str, Body]] = [
    ("ids", "/generate", {"inputs": [504, 3575, 282], "parameters": {"max_new_tokens": 3}}),
    ("no parameters", "/generate", {"inputs": "The"}),
    ("no inputs", "/generate", {"parameters": {}}),
    ("empty inputs", "/generate", {"inputs": "", "parameters": {}}),
    ("id beyond", "/generate", {"inputs": [49152], "parameters": {}}),
    ("too long", "/generate", {"inputs": "hello " * 5000, "parameters": {}}),
    ("too long, streamed", "/generate_stream", {"inputs": "hello " * 5000, "parameters": {}}),
    ("images", "/generate", {"inputs": "x", "parameters": {}, "multimodal_params": {"images": [{"type": "url"}]}}),
    ("root", "/", {"inputs": "The", "parameters": {"max_new_tokens": 2}}),
    ("root, streamed", "/", {"inputs": "The", "parameters": {"max_new_tokens": 2}, "stream": True}),
    ("root, wrong stream", "/", {"inputs": "The", "parameters": {}, "stream": "yes"}),
]

TGI: dict[str, Body] = {
    "plain": {},
    "one token": {"max_new_tokens": 1},
    "details": {"details": True, "max_new_tokens": 3},
    "top_n_tokens": {"details": True, "top_n_tokens": 2, "max_new_tokens": 2},
    "decoder_input_details": {"details": True, "decoder_input_details": True, "max_new_tokens": 2},
    "seeded": {"do_sample": True, "temperature": 0.8, "seed": 9, "details": True, "max_new_tokens": 3},
    "top": {"top_k": 5, "top_p": 0.5, "seed": 9},
    "typical_p": {"typical_p": 0.5, "seed": 9},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1},
    "best_of without a seed": {"best_of": 2},
    "best_of with a seed": {"best_of": 2, "do_sample": True, "seed": 1},
    "stop": {"stop": [" Paris", "zzz"]},
    "truncate": {"truncate": 3},
    "truncate, right": {"truncate": 3, "truncation_side": "right"},
    "full text": {"return_full_text": True},
    "regex": {"grammar": {"type": "regex", "value": "[A-C]{2}"}},
    "json": {"grammar": {"type": "json", "value": SCHEMA}, "max_new_tokens": 32},
    # refused
    "unknown grammar": {"grammar": {"type": "xml", "value": ""}},
    "watermark": {"watermark": True},
    "adapter": {"adapter_id": "x"},
    "cold": {"temperature": 0},
    "top_p beyond": {"top_p": 1.5},
    "too many": {"max_new_tokens": 5000},
    "too many stops": {"stop": ["a"] * 33},
    "too much truncated": {"truncate": 100000},
}
"""`parameters` of /generate and /generate_stream with --use_tgi_api."""

TGI_BODIES: list[tuple[str, str, Body]] = [
    ("no inputs", "/generate", {"parameters": {"max_new_tokens": 2}}),
    ("list", "/generate", {"inputs": ["The"]}),
    ("too long", "/generate", {"inputs": "hello " * 5000}),
    ("root", "/", {"inputs": "The", "parameters": {"max_new_tokens": 2}}),
    ("root, streamed", "/", {"inputs": "The", "parameters": {"max_new_tokens": 2}, "stream": True}),
    ("chat under TGI's name", "/v1/chat/completions", {**CHAT_BASE, "model": "tgi", "max_tokens": 2}),
    ("chat under a dummy name", "/v1/chat/completions", {**CHAT_BASE, "model": "dummy", "max_tokens": 2}),
]

SPECIAL: list[tuple[str, str, Body]] = [
    ("beams by best_of", "/generate", {"inputs": "The sea", "parameters": {"best_of": 2, "max_new_tokens": 3}}),
    ("all logprobs", "/generate", {"inputs": "The sea is", "parameters": {"max_new_tokens": 2}}),
    ("inside a word", "/v1/completions", {"prompt": "The capital of Fran", "max_tokens": 5, "temperature": 0}),
    ("healed stream", "/generate_stream", {"inputs": "The capital of Fran", "parameters": {"max_new_tokens": 3}}),
    ("priority", "/v1/completions", {"prompt": "The sea", "max_tokens": 2, "temperature": 0, "priority": -3}),
    ("native priority", "/generate", {"inputs": "The", "parameters": {"max_new_tokens": 2, "priority": 3}}),
    ("cut at its head", "/v1/completions", {"prompt": "one two three " * 50, "max_tokens": 4, "temperature": 0}),
]
"""For a server with --beam_mode, --token_healing_mode, --long_truncation_mode head and --scheduler priority."""

# --- pages ----------------------------------------------------------------------------------------------------------

STATUS_PATHS = (
    *("/health", "/healthz", "/ping", "/liveness", "/readiness", "/version", "/get_model_name"),
    *("/v1/models", "/v1/models/demo", "/v1/models/other", "/v1/models/never", "/info"),
)
"""Paths for GET, HEAD and POST, also on servers that do not have them."""
ADMIN_PATHS = ("/", "/live", "/ready", "/server_info", "/grafana.json", "/never")

WRONG_METHODS = [
    *(("GET", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize")),
    *(("GET", path) for path in ("/generate", "/generate_stream", "/", "/get_score", "/rerank")),
    *(("POST", path) for path in ("/v1/models", "/metrics", "/version", "/server_info", "/openapi.json", "/docs")),
    *(("DELETE", path) for path in ("/v1/models/demo", "/health", "/generate")),
    *(("PATCH", path) for path in ("/v1/chat/completions",)),
    *(("OPTIONS", path) for path in ("/v1/chat/completions", "/generate", "/never")),
    *(("GET", path) for path in ("/never", "/v1", "/v1/", "/v1/never", "/v1/models/", "//health", "/health/")),
    *(("POST", path) for path in ("/v1/never", "/generate/", "/v1/chat/completions/")),
]

JSON = "Content-Type: application/json\r\n"
BODIES: list[tuple[str, str, bytes]] = [
    ("no body", JSON, b""),
    ("not JSON", JSON, b"{'a': 1}"),
    ("half a body", JSON, b'{"messages": ['),
    ("a list", JSON, b"[]"),
    ("a text", JSON, b'"x"'),
    ("null", JSON, b"null"),
    ("an empty object", JSON, b"{}"),
    ("not UTF-8", JSON, b'{"prompt": "\xff"}'),
    ("half a surrogate", JSON, b'{"prompt": "\\ud800", "inputs": "\\ud800", "messages": "\\ud800"}'),
    ("NaN", JSON, b'{"temperature": NaN}'),
    ("huge number", JSON, b'{"temperature": 1e999}'),
    ("nested", JSON, b'{"x": ' + b"[" * 600 + b"]" * 600 + b"}"),
    ("one name twice", JSON, b'{"prompt": "a", "prompt": 3}'),
    ("form", "Content-Type: application/x-www-form-urlencoded\r\n", b"{}"),
    ("text", "Content-Type: text/plain\r\n", b"{}"),
    ("without a type", "", b"{}"),
    ("charset", "Content-Type: application/json; charset=latin-1\r\n", b"{}"),
    ("gzip", JSON + "Content-Encoding: gzip\r\n", b"\x1f\x8b"),
    ("odd timeout", JSON + "X-Request-Timeout: soon\r\n", b"{}"),
    ("odd request id", JSON + "X-Request-Id: a b\r\n", b"{}"),
    ("odd accept", JSON + "Accept: text/html\r\n", b"{}"),
]
"""(name, header lines, body), for each route that takes a body."""
BODY_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize"),
    *("/detokenize", "/generate", "/generate_stream", "/", "/tokens", "/get_score"),
)

HOST = b"Host: localhost\r\n"
END = b"Connection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
HEADS: dict[str, bytes] = {
    "not a request": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\n" + HOST + END,
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.1": b"GET /health HTTP/3.1\r\n" + HOST + END,
    "two spaces": b"GET  /health HTTP/1.1\r\n" + HOST + END,
    "bare newlines": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "no host": b"GET /health HTTP/1.1\r\n" + END,
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + END,
    "foreign host": b"GET /health HTTP/1.1\r\nHost: evil.test\r\n" + END,
    "foreign host of a request": b"POST /v1/completions HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 2\r\n"
    + END
    + b"{}",
    "foreign origin": b"GET /v1/models HTTP/1.1\r\nOrigin: https://evil.test\r\n" + HOST + END,
    "whole address": b"GET http://localhost/health HTTP/1.1\r\n" + HOST + END,
    "odd path": b"GET /a%zz\x01 HTTP/1.1\r\n" + HOST + END,
    "encoded path": b"GET /%68ealth?x=%20 HTTP/1.1\r\n" + HOST + END,
    "dots": b"GET /../health HTTP/1.1\r\n" + HOST + END,
    "long path": b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n" + HOST + END,
    "long header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * 300000 + b"\r\n" + END,
    "many headers": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: b\r\n" * 5000 + END,
    "space before the colon": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A : b\r\n" + END,
    "folded header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: b\r\n c\r\n" + END,
    "header without a colon": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A\r\n" + END,
    "NUL in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: \x00\r\n" + END,
    "lower-case method": b"get /health HTTP/1.1\r\n" + HOST + END,
    "unknown method": b"BREW /health HTTP/1.1\r\n" + HOST + END,
    "CONNECT": b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + END,
    "TRACE": b"TRACE / HTTP/1.1\r\n" + HOST + END,
    "options of all": b"OPTIONS * HTTP/1.1\r\n" + HOST + END,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n" + END + b"{}",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n" + END + b"{}",
    "listed lengths": POST + b"Content-Length: 2, 2\r\n" + END + b"{}",
    "negative length": POST + b"Content-Length: -1\r\n" + END,
    "signed length": POST + b"Content-Length: +2\r\n" + END + b"{}",
    "no length": POST + END,
    "length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n" + END + b"0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: gzip, chunked\r\n" + END + b"0\r\n\r\n",
    "chunked": POST + b"Transfer-Encoding: chunked\r\n" + END + b"2\r\n{}\r\n0\r\n\r\n",
    "wrong chunk": POST + b"Transfer-Encoding: chunked\r\n" + END + b"zz\r\n{}\r\n0\r\n\r\n",
    "chunk without an end": POST + b"Transfer-Encoding: chunked\r\n" + END + b"2\r\n{}xx0\r\n\r\n",
    "too large": POST + b"Content-Length: 99999999\r\n" + END,
    "far too large": POST + b"Content-Length: 99999999999999999999\r\n" + END,
    "too large a chunk": POST + b"Transfer-Encoding: chunked\r\n" + END + b"FFFFFFF\r\n",
    "expect": POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n" + END + b"{}",
    "expect a miracle": POST + b"Expect: miracle\r\nContent-Length: 2\r\n" + END + b"{}",
    "HEAD": b"HEAD /health HTTP/1.1\r\n" + HOST + END,
    "two requests": b"GET /health HTTP/1.1\r\n" + HOST + b"\r\nGET /liveness HTTP/1.1\r\n" + HOST + END,
    "request after an error": b"GET /never HTTP/1.1\r\n" + HOST + b"\r\nGET /liveness HTTP/1.1\r\n" + HOST + END,
    "HTTP/1.0, kept open": b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /ping HTTP/1.0\r\n\r\n",
}
"""Bytes that are sent over a bare socket until it closes."""

FAULTS = (
    *("forward", "forward_once", "oom", "oom_once", "nan", "sample", "illegal", "slow", "cache"),
    *("tokenize", "detokenize", "parser"),
)
"""For `llmcore testserver --fault_injection`. hang, exit and device end the server."""

# --- keys and origins -----------------------------------------------------------------------------------------------

KEY = "Authorization: Bearer sk-one\r\n"
PAGE = "Origin: https://app.test\r\n"
ASK = "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"
CLOSED: list[tuple[str, str, str, str]] = [
    *((f"{method} without a key", method, path, "") for method, path in (("POST", "/v1/chat/completions"),)),
    *(
        (f"{path} without a key", "GET", path, "")
        for path in ("/v1/models", "/metrics", "/server_info", "/version", "/docs", "/openapi.json", "/never")
    ),
    *((f"{path} is open", "GET", path, "") for path in ("/health", "/healthz", "/ping", "/liveness", "/readiness")),
    *((f"{path} with a key", "GET", path, KEY) for path in ("/v1/models", "/version", "/docs", "/openapi.json")),
    ("native without a key", "POST", "/generate", ""),
    ("native with a key", "POST", "/generate", KEY),
    ("wrong key", "GET", "/v1/models", "Authorization: Bearer sk-three\r\n"),
    ("no bearer", "GET", "/v1/models", "Authorization: sk-one\r\n"),
    ("basic", "GET", "/v1/models", "Authorization: Basic c2stb25l\r\n"),
    ("second key", "GET", "/v1/models", "Authorization: bearer sk-two\r\n"),
    ("key in a header of its own", "GET", "/v1/models", "X-Api-Key: sk-two\r\n"),
    ("preflight", "OPTIONS", "/v1/chat/completions", PAGE + ASK),
    ("preflight of another", "OPTIONS", "/v1/chat/completions", "Origin: https://evil.test\r\n" + ASK),
    ("page", "GET", "/v1/models", PAGE + KEY),
    ("page without a key", "GET", "/v1/models", PAGE),
    ("page of another", "GET", "/v1/models", "Origin: https://evil.test\r\n" + KEY),
    ("page of another without a key", "GET", "/v1/models", "Origin: https://evil.test\r\n"),
]
"""(name, method, path, header lines) for a server with keys sk-one and sk-two, an origin, and without docs."""

# --- command lines --------------------------------------------------------------------------------------------------

HELP = [
    *("", "serve", "testserver", "chat", "generate", "bench", "bench latency", "bench throughput", "bench serve"),
    *("plan", "models", "kernels", "modes", "plugins", "plugins new", "hooks", "config", "config show", "env"),
]
HELP_ALL = ["serve", "testserver", "chat", "generate", "plan", "config show"]

LISTS = [
    *("plugins", "plugins --json", "plugins --hook register_dialects", "plugins --plugins=-tgi"),
    *("models", "models --json", "models --plugins llama", "hooks", "hooks --json", "hooks register_dialects"),
    *("modes", "modes --json", "modes --device sm90", "modes --device sm90 --json", "modes --model {model}"),
    *("kernels", "kernels --json", "kernels --device sm90", "kernels --device sm90 --json", "kernels rms_norm"),
    *("kernels --explain", "kernels --explain --device sm90", "kernels rms_norm --check --seed 1 --dtype f32"),
    *("kernels --explain --model {model}", "kernels --explain --device sm90 --model {model} --json"),
    *("config show", "config show --origin", "config show --json", "config show --origin --json"),
    *("config show {model} --origin --port 9 --plugins=-tgi", "config show --config {dir}/good.yaml --origin"),
    *("plan {model} --device sm90 --memory 80GiB", "plan {model} --device sm90 --memory 80GiB --json"),
    *(
        "plan {model} --device cpu --data_type f32 --max_total_token_num 4096",
        "config show --use_dynamic_prompt_cache",
    ),
    *("generate {dir}/prompts.txt --model_dir {model} --device cpu --data_type f32 --max_new_tokens 6",),
    *("generate {dir}/prompts.jsonl --model_dir {model} --device cpu --data_type f32 --max_new_tokens 4 --chat",),
    *("plugins new plugin-mine --kind op --out {dir}/new", "plugins new my-dialect --kind dialect --out {dir}/new"),
]
"""Commands that succeed. All output is recorded."""

WRONG = [
    *("never", "--never", "serve", "serve {dir}/never", "serve --model_dir {dir}/never", "serve {dir}/empty"),
    *("serve {dir}/broken", "serve {dir}/unknown", "serve {dir}/stranger", "serve {dir}/not.gguf", "serve a b"),
    *("serve {model} --never 1", "serve {model} --por 80", "serve {model} --port x", "serve {model} --port 70000"),
    *("serve {model} --port {taken}", "serve {model} --host 192.0.2.1", "serve {model} --dtype f64"),
    *("serve {model} --max_total_token_num 0", "serve {model} --mem_fraction 1.5", "serve {model} --tp 2"),
    *("serve {model} --device tpu", "serve {model} --device cuda", "serve {model} --mode never --device cpu"),
    *("serve {model} --mode triton_gqa_attention --device cpu", "serve {model} --kernel rms_norm=never --device cpu"),
    *("serve {model} --kernel never=torch --device cpu", "serve {model} --kernel rms_norm"),
    *("serve {model} --plugins never", "serve {model} --plugins=-never", "serve {model} --plugins llama --device cpu"),
    *("serve {model} --scheduler never", "serve {model} --kv_manager never", "serve {model} --length_estimator never"),
    *("serve {model} --tool_call_parser never", "serve {model} --reasoning_parser never", "serve {model} --ssl"),
    *("serve {model} --chat_template {dir}/never.jinja", "serve {model} --generation_config {dir}/never.json"),
    *("serve {model} --admin_host 0.0.0.0", "serve {model} --allow_origins * --allow_credentials"),
    *("serve {model} --max_req_total_len 100000", "serve {model} --max_req_input_len 100 --max_req_total_len 50"),
    *("serve {model} --use_reward_model --device cpu", "serve {model} --cache_max_entry_count 0.5 --mem_fraction 0.5"),
    *("serve {model} --config {dir}/never.yaml", "serve {model} --config {dir}/bad.yaml"),
    *("serve {model} --config {dir}/unknown.yaml", "serve {model} --log_level LOUD", "serve {model} --zmq_mode x"),
    "serve {model} --quant_type ppl-w4a16-128",
    # vLLM's and SGLang's
    *(
        "serve {model} --max-model-len 4096",
        "serve {model} --tensor-parallel-size 2",
        "serve {model} --quantization x",
    ),
    *("serve {model} --gpu-memory-utilization 0.9", "serve {model} --enforce-eager", "serve {model} --enable-lora"),
    *("serve {model} --served-model-name x", "serve {model} --model-path x", "serve {model} -tp 2"),
    *("serve {model} --speculative-config x", "serve {model} --mem-fraction-static 0.8", "serve {model} --api-key x"),
    # other commands
    *("generate", "generate {dir}/never.txt --model_dir {model}", "generate {dir}/prompts.txt"),
    *("generate {dir}/prompts.txt --model_dir {model} --temperature -1", "chat", "chat --url http://127.0.0.1:9"),
    *("plan", "plan {dir}/never", "plan {model} --memory much", "plan {model} --device never"),
    *("kernels never", "kernels --device never", "kernels --kernel x", "modes --device never", "hooks never"),
    *("plugins --plugins never", "plugins --hook never", "plugins new x", "plugins new x --kind never", "config"),
    *("models --plugins never", "bench", "bench serve", "bench serve --url http://127.0.0.1:9 --num_requests 1"),
    *("bench serve --url http://127.0.0.1:9 --workload x", "bench latency {dir}/never", "env --never"),
    *("testserver --step_ms -1", "testserver --context 3", "testserver --api_keys a --admin_host x y"),
]
"""Commands that fail. The exit code and the last lines are recorded."""

ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"LLMCORE_PORT": "9000"}, "config show --origin"),
    ({"LLMCORE_PORT": "x"}, "config show"),
    ({"LLMCORE_NEVER": "1"}, "config show --json"),
    ({"LLMCORE_PORT": "9000"}, "config show --origin --port 9001"),
    ({"LLMCORE_MAX_MODEL_LEN": "9"}, "config show"),
    ({"LLMCORE_DEBUG": "1"}, "hooks never"),
]
