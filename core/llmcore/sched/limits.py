"""What can be served at all: limits that fit together, requests that fit the limits."""

from __future__ import annotations

from dataclasses import replace

from llmcore.bridge import Submit
from llmcore.errors import ConfigError, RequestError
from llmcore.kv.space import KVSpace
from llmcore.protocols import SchedulerLimits


def fitting(limits: SchedulerLimits, space: KVSpace) -> SchedulerLimits:
    """`limits` that leave room for a chunk in a step in which all requests decode: fewer of them may run at once, and
    `stall_tokens` is a granule at least.

    Raises ConfigError where chunks cannot be formed.
    """
    granule = space.granule
    if limits.chunk_tokens < granule or limits.batch_tokens < granule:
        raise ConfigError(
            f"a step of {limits.batch_tokens} tokens in chunks of {limits.chunk_tokens} cannot fill a KV granule of "
            f"{granule}; raise --batch_max_tokens and --chunked_prefill_size to at least {granule}"
        )
    if not limits.chunked and limits.batch_tokens < limits.max_input_len:
        raise ConfigError(
            f"without chunked prefill a prompt of {limits.max_input_len} tokens must fit a step of "
            f"{limits.batch_tokens}; raise --batch_max_tokens, lower --max_req_input_len, or drop "
            "--disable_chunked_prefill"
        )
    return replace(
        limits,
        max_running=min(limits.max_running, limits.batch_tokens - granule + 1),
        stall_tokens=max(limits.stall_tokens, granule) if limits.stall_tokens else 0,
    )


def check_submit(submit: Submit, limits: SchedulerLimits, space: KVSpace, *, guaranteed: bool) -> None:
    """Raise RequestError if the request can never be served."""
    tokens, rest = divmod(len(submit.prompt), 4)
    if rest or not tokens:
        raise RequestError("the prompt holds no token", param="prompt", code="invalid_value")
    if submit.max_new_tokens < 1:
        raise RequestError("max_new_tokens must be at least 1", param="max_new_tokens", code="invalid_value")
    if not 1 <= submit.n <= limits.max_running:
        raise RequestError(
            f"n must be between 1 and {limits.max_running}, the requests this server runs at once; it is {submit.n}",
            param="n",
            code="invalid_value",
        )
    beams = 1 if submit.beams is None else submit.beams.width
    if submit.beams is not None and not max(2, submit.n) <= beams <= limits.max_running:
        raise RequestError(
            f"a search needs from {max(2, submit.n)} beams, n and at least 2, to {limits.max_running}, the requests "
            f"that this server runs at once; it has {beams}",
            param="num_beams",
            code="invalid_value",
        )
    total = tokens + submit.max_new_tokens
    if tokens > limits.max_input_len:
        _too_long(f"the prompt has {tokens} tokens; at most {limits.max_input_len} are allowed", "prompt")
    if total > limits.max_total_len:
        _too_long(
            f"{tokens} prompt tokens and max_new_tokens {submit.max_new_tokens} make {total}; "
            f"at most {limits.max_total_len} are allowed in all",
            "max_new_tokens",
        )
    for group in space.groups:
        answer = submit.max_new_tokens - 1
        need = group.granules(tokens + answer)
        # Beams run and end together, so there must be room for all of them.
        if (guaranteed or beams > 1) and answer:
            shared = tokens // group.granule
            need = shared + max(submit.n, beams) * (need - shared)
        if need > group.pool.total:
            _too_long(
                f"the request may need {need * group.granule} KV slots; this server has "
                f"{group.pool.total * group.granule}: lower max_new_tokens"
                + (" or the number of beams" if beams > 1 else " or n" if submit.n > 1 else "")
                + ", or start the server with a larger --max_total_token_num",
                "max_new_tokens",
            )


def _too_long(message: str, param: str) -> None:
    raise RequestError(message, param=param, code="context_length_exceeded")
