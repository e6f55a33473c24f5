"""LightLLM's constraints of an answer: one at a time, as with LightLLM; and TGI's, which huggingface_hub sends."""

from __future__ import annotations

from llmcore.api import LogitsProcessor, RequestError
from llmcore_server.api import Front, guided, typed

from llmcore_lightllm.requests import Parameters

_KINDS = {"regular_constraint": "regex", "guided_grammar": "grammar", "guided_json": "json"}


def guide(front: Front, given: Parameters) -> LogitsProcessor | None:
    """The processor that makes answers fit, or None where all do. Raises RequestError for several constraints."""
    asked = [name for name in (*_KINDS, "grammar", "allowed_token_ids") if getattr(given, name)]
    if not set(asked) - {"allowed_token_ids"}:
        return None
    if len(asked) > 1:
        raise RequestError(
            f"parameters.{asked[1]}: it cannot be combined with {asked[0]}",
            param=f"parameters.{asked[1]}",
            code="invalid_value",
        )
    if given.grammar is not None:
        constraint = typed("parameters.grammar", given.grammar)
        return guided(front, constraint.param, **{constraint.kind: constraint.value}, **constraint.options)
    if given.guided_grammar == "json":  # the name of a grammar that LightLLM brings: any JSON
        return guided(front, "parameters.guided_grammar", json=True)
    return guided(front, f"parameters.{asked[0]}", **{_KINDS[asked[0]]: getattr(given, asked[0])})
