"""The router reads three things in a body: the model, about how long the prompt is, and how it begins.

It knows no dialect. A body that it does not understand goes on as it is, and the node says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from llmcore.api.balancing import Arrival
from llmcore.fleet.destinations import arrival_of
from llmcore.fleet.hits import chunks_of
from numpy.typing import NDArray

TOKEN_BYTES = 4
"""Bytes of text that count as one token."""

CHUNKED_TOKENS = 1 << 18
"""Tokens of a prompt's beginning that the router remembers. Longer beginnings are rare, and take time and memory."""

PROMPTS = ("tools", "system", "instructions", "messages", "prompt", "inputs", "input", "text")
"""Fields that hold parts of a prompt, in the order in which templates write them."""


@dataclass(frozen=True)
class Wish:
    """A request as the choice of a node sees it. `model`: None where it names none. `chunks`: those of its prompt, as
    llmcore.fleet.hits numbers them."""

    model: str | None
    arrival: Arrival
    chunks: tuple[int, ...] = ()


NO_BODY = Wish(None, Arrival(tokens=0, key=0))


def wish_of(body: bytes) -> Wish:
    """The wish in a body. One that is not a JSON object names no model, and all its bytes count."""
    if not body:
        return NO_BODY
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        return _wish(None, _packed(body))
    parts = [_ids(fields[name]) for name in PROMPTS if fields.get(name) is not None]
    model = fields.get("model")
    return _wish(model if isinstance(model, str) else None, np.concatenate(parts) if parts else _packed(b""))


def _wish(model: str | None, ids: NDArray[np.int32]) -> Wish:
    salt = (model or "").encode()
    return Wish(model, arrival_of(ids, salt), tuple(chunks_of(ids[:CHUNKED_TOKENS], salt)))


def _ids(part: Any) -> NDArray[np.int32]:
    """Token ids as they are, anything else as text."""
    if isinstance(part, list) and part and all(isinstance(one, int) for one in part):
        return np.array([one & 0x7FFFFFFF for one in part], np.int32)
    return _packed(part.encode() if isinstance(part, str) else orjson.dumps(part))


def _packed(text: bytes) -> NDArray[np.int32]:
    return np.frombuffer(text + bytes(-len(text) % TOKEN_BYTES), "<i4").astype(np.int32)
