"""The faults that the text of a request can cause in a server of the fake model. No torch.

`<|fault:NAME|>` in a prompt is one token. It causes the fault NAME when the engine computes it. With `<|later:NAME|>`
the eighth token of the model's answer is the fault's token, so the fault comes after a stream has begun.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP_FAULTS: Mapping[str, str] = {
    "forward": "The step raises, whenever it is tried.",
    "forward_once": "The step raises, but not when it is tried again.",
    "nan": "The row's scores are not finite.",
    "oom": "The step finds no memory, whenever it is tried.",
    "oom_once": "The step finds no memory, but does when it is tried again.",
    "sample": "Drawing the row's token raises.",
    "illegal": "The token drawn for the row is not in the vocabulary.",
    "device": "The device fails for good: no step can follow.",
    "slow": "The step takes `SLOW_SECONDS`.",
    "hang": "The step never ends.",
    "exit": "The engine's process ends without a word.",
}
"""Name -> what happens in the engine's step that computes the token."""

ENGINE_FAULTS: Mapping[str, str] = {
    "cache": "The prefix cache raises when the prompt is looked up; it is dismissed, as any policy that raises.",
}
"""Name -> what happens in the engine beside a step."""

WORKER_FAULTS: Mapping[str, str] = {
    "tokenize": "The tokenizer panics on the prompt.",
    "detokenize": "The detokenizer panics on the answer; ask with `later:`.",
    "parser": "The tool-call parser `faults` calls sys.exit() on the answer of a chat with tools; ask with `later:`.",
}
"""Name -> what happens in the HTTP worker."""

HOOK_REQUEST_ID = "fault-hook"
"""`on_request_finished` raises for requests whose `x-request-id` begins like this."""

FAULTS: Mapping[str, str] = {**STEP_FAULTS, **ENGINE_FAULTS, **WORKER_FAULTS}


class Panic(BaseException):
    """Like the panic of a native library: a BaseException that is not an Exception."""


SLOW_SECONDS = 0.5
LATER = 8
"""The number of the token of an answer that `<|later:NAME|>` makes the fault's."""


def fault(name: str) -> str:
    """The text that causes a fault at once. Raises KeyError for an unknown name."""
    return f"<|fault:{name}|>" if FAULTS[name] else ""


def later(name: str) -> str:
    """The text that makes the eighth token of the answer the fault's. Put it at the end of a prompt."""
    return f"<|later:{name}|>" if FAULTS[name] else ""


def fault_texts() -> tuple[str, ...]:
    """All these texts. The tokenizer of a fake model with faults has a token for each."""
    return tuple(make(name) for make in (fault, later) for name in FAULTS)
