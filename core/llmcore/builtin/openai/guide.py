"""What a request says its answers have to fit, under the names that OpenAI, vLLM, SGLang and LMDeploy have for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcore.api import LogitsProcessor, RequestError
from llmcore.api.http import Front, guided
from llmcore.builtin.openai.requests import ResponseFormat, Sampled, StructuredOutputs

Asked = tuple[str, dict[str, Any]]
"""(the client's field, arguments of `guided`)."""


def guide(front: Front, body: Sampled, **more: Any) -> LogitsProcessor | None:
    """The processor that makes the answers fit, or None where all do; `more`: further arguments for `guided`.

    Raises RequestError where several fields say what fits, or one of them makes no sense.
    """
    asked = _asked(body)
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise RequestError(
            f"{second}: {first} says already what answers have to be; give one of them",
            param=second,
            code="invalid_value",
        )
    return guided(front, asked[0][0], **asked[0][1], **more) if asked else None


def _asked(body: Sampled) -> list[Asked]:
    """All that the body asks for; empty values ask for nothing."""
    found: list[Asked] = []
    if body.response_format is not None and body.response_format.type != "text":
        found.append(_response_format(body.response_format))
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    plain = {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_grammar": "grammar",
        "guided_choice": "choice",
        "json_schema": "json",
        "regex": "regex",
        "ebnf": "grammar",
    }
    for name, kind in plain.items():
        value = getattr(body, name)
        if value not in (None, "", []):
            found.append((name, {kind: value}))
    return found


def _response_format(given: ResponseFormat) -> Asked:
    if given.type == "json_object":
        return "response_format", {"json_object": True}
    member = "json_schema" if given.type == "json_schema" else "regex_schema"
    param = f"response_format.{member}"
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema is None:
            param += "" if given.json_schema is None else ".schema"
            raise RequestError(f"{param}: this field is required", param=param, code="missing_required_parameter")
        # A client that says that it is not strict takes what can be enforced of the schema.
        lenient = True if given.json_schema.strict is False else None
        return f"{param}.schema", {"json": given.json_schema.schema, "lenient": lenient}
    if not given.regex_schema:
        raise RequestError(f"{param}: this field is required", param=param, code="missing_required_parameter")
    return param, {"regex": given.regex_schema}


def _structured(given: StructuredOutputs) -> list[Asked]:
    values: Mapping[str, Any] = {
        "json": given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object or None,
    }
    options = {
        "whitespace": False if given.disable_any_whitespace else None,
        "whitespace_pattern": given.whitespace_pattern,
    }
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(given, name) and given.json is None and not given.json_object:
            param = f"structured_outputs.{name}"
            raise RequestError(f"{param}: it is for json and json_object", param=param, code="invalid_value")
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name) not in (None, False):
            param = f"structured_outputs.{name}"
            raise RequestError(
                f"{param}: this server does not support it; leave it out", param=param, code="unsupported_parameter"
            )
    return [
        (f"structured_outputs.{name}", {name: value, **options}) for name, value in values.items() if value is not None
    ]
