"""What the router reads of a body: the model, and about how long the prompt is and how it begins.

It knows no dialect. Whatever it does not understand goes on as it is, and the node says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson
from llmcore.api.balancing import Arrival

TOKEN_BYTES = 4
"""Bytes of text that count as one token."""

KEY_BYTES = 256 * TOKEN_BYTES
"""Bytes of a prompt's beginning by which requests are alike."""

PROMPTS = ("tools", "system", "instructions", "messages", "prompt", "inputs", "input", "text")
"""Fields that hold parts of a prompt, in the order in which templates write them."""


@dataclass(frozen=True)
class Wish:
    """A request as the choice of a node sees it. `model`: None where it names none."""

    model: str | None
    arrival: Arrival


NO_BODY = Wish(None, Arrival(tokens=0, key=0))


def wish_of(body: bytes) -> Wish:
    """The wish in a body. A body that is not a JSON object names no model, and counts with all its bytes."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        return Wish(None, _arrival(body)) if body else NO_BODY
    model = fields.get("model")
    parts = [fields[name] for name in PROMPTS if fields.get(name) is not None]
    text = b"\n".join(map(_bytes, parts))
    tokens = sum(_tokens(part) for part in parts)
    return Wish(model if isinstance(model, str) else None, Arrival(tokens=tokens, key=_key(text)))


def _bytes(part: Any) -> bytes:
    return part.encode() if isinstance(part, str) else orjson.dumps(part)


def _tokens(part: Any) -> int:
    if isinstance(part, list) and part and all(isinstance(one, int) for one in part):
        return len(part)  # token ids
    return -(-len(_bytes(part)) // TOKEN_BYTES)


def _arrival(text: bytes) -> Arrival:
    return Arrival(tokens=-(-len(text) // TOKEN_BYTES), key=_key(text))


def _key(text: bytes) -> int:
    return int.from_bytes(blake2b(text[:KEY_BYTES], digest_size=8).digest()) if text else 0
