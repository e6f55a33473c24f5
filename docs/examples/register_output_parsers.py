"""A parser of tool calls that a model writes on lines of their own: `CALL add {"a": 1, "b": 2}`."""

import re

from llmcore.api import OutputParserSpec, hookimpl
from llmcore.api.text import ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded

CALL = re.compile(r"CALL (\w+) (\{.*\})\s*")


@hookimpl
def register_output_parsers():
    yield OutputParserSpec(
        name="call-lines",
        kind="tool",
        make=f"{__name__}:CallLines",
        samples=f"{__name__}:samples",
        summary="CALL name {JSON}",
    )


class CallLines:
    """api.text.OutputParser: the state of one choice. It holds a line until it is complete."""

    def __init__(self, context: ParserContext):
        self.tools = context.tools
        self.line = ""
        self.calls = 0

    def feed(self, text):
        """Text comes in pieces of any length; the events, joined, may not depend on how it is cut."""
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            yield from self.events(line + "\n")

    def finish(self):
        yield from self.events(self.line)

    def events(self, line):
        call = CALL.fullmatch(line)
        if call is None or call[1] not in self.tools:
            yield TextDelta(line)  # what is no call stays visible
            return
        yield ToolCallBegun(self.calls, call[1])
        yield ToolCallDelta(self.calls, call[2])
        yield ToolCallEnded(self.calls)
        self.calls += 1


def samples():
    """What the conformance check cuts in many ways, with the events it must become."""
    from llmcore.api.text import ParserSample

    call = (ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": 1}'), ToolCallEnded(0))
    yield ParserSample(
        text='Let me see.\nCALL add {"a": 1}\nCALL no {}',
        context=ParserContext(tools={"add": {}}),
        events=(TextDelta("Let me see.\n"), *call, TextDelta("CALL no {}")),
    )
