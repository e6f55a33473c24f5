"""Events of an answer as the blocks that they belong to: texts, thoughts and calls, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmcore.text.events import Event, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta


@dataclass
class TextBlock:
    """A piece of the answer itself."""

    text: str


@dataclass
class ReasoningBlock:
    """Thoughts."""

    text: str


@dataclass
class CallBlock:
    """A tool call. `arguments`: JSON text, which is incomplete where the end of the answer cut it."""

    name: str
    arguments: str = ""


Block = TextBlock | ReasoningBlock | CallBlock


def blocks(events: Iterable[Event]) -> list[Block]:
    """The blocks of a whole answer, none of them an empty text. Neighbouring pieces of one kind are one block."""
    found: list[Block] = []
    calls: dict[int, CallBlock] = {}
    for event in events:
        match event:
            case TextDelta(text) | ReasoningDelta(text):
                kind = TextBlock if isinstance(event, TextDelta) else ReasoningBlock
                if found and isinstance(found[-1], kind):
                    found[-1].text += text
                elif text:
                    found.append(kind(text))
            case ToolCallBegun():
                calls[event.index] = CallBlock(event.name)
                found.append(calls[event.index])
            case ToolCallDelta():
                calls[event.index].arguments += event.arguments
    return found
