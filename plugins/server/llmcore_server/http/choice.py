"""One answer of a generation: its text, and what parsers make of it."""

from __future__ import annotations

from collections.abc import Sequence

from llmcore.api.bridge import Finish
from llmcore.text.events import Event, ReasoningTokens, ToolCallBegun, ToolCallEnded
from llmcore.text.parsing import OutputParser
from llmcore.text.request_parsing import RequestParsing
from llmcore.text.stream import ChoiceText


class Choice:
    """One answer. `index` counts over the whole HTTP request, all choices of the first prompt first.

    `events`: what the job's parsers made of the texts that `Writer.write` gets with it; None without parsers. `calls`:
    how many tool calls there were so far. `came`: when its newest token came (time.monotonic()), 0.0 before the
    first. `thought`: counts the tokens of reasoning; None without a reasoning parser.
    """

    __slots__ = ("calls", "came", "events", "index", "parser", "prompt", "text", "thought")

    def __init__(self, index: int, prompt: int, text: ChoiceText, parsing: RequestParsing | None = None):
        self.index = index
        self.prompt = prompt
        self.text = text
        self.parser = None if parsing is None else parsing.make()
        self.events: list[Event] | None = None
        self.calls = 0
        self.came = 0.0
        self.thought = ReasoningTokens() if parsing is not None and parsing.reasons else None

    def parse(self, parser: OutputParser, texts: Sequence[str], *, single_call: bool) -> None:
        """Parse `texts` into `events`: text, reasoning and tool calls. `single_call`: the first call is the end."""
        events: list[Event] = []
        if self.thought is not None and not self.thought.over:
            for text in texts:
                piece = list(parser.feed(text))
                self.thought.add(piece)
                events += piece
        elif text := "".join(texts):
            events += parser.feed(text)
        if self.text.finish is not Finish.RUNNING:
            events += parser.finish()
        if single_call:
            ends = [i for i, event in enumerate(events) if isinstance(event, ToolCallEnded)]
            if ends:
                del events[ends[0] + 1 :]
                self.text.end()
        self.calls += sum(isinstance(event, ToolCallBegun) for event in events)
        self.events = events
