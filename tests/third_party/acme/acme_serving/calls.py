"""Tool calls as Acme's models write them: `<call NAME>{"argument": ...}</call>`."""

import json

from llmcore.api.text import (
    ParserContext,
    ParserSample,
    TextDelta,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallEnded,
    before_tag,
)

OPEN, CLOSE = "<call ", "</call>"


class Calls:
    """llmcore.api.text.OutputParser. A call is reported when it is complete; what is no call stays text."""

    def __init__(self, context):
        self.tools = context.tools
        self.held = ""
        self.calls = 0

    def feed(self, text):
        self.held += text
        while True:
            before, after = before_tag(self.held, OPEN)
            yield TextDelta(before)
            self.held = self.held[len(before) :]
            if after is None or CLOSE not in after:
                return
            body, _, self.held = after.partition(CLOSE)
            yield from self.call(body)

    def finish(self):
        yield TextDelta(self.held)

    def call(self, body):
        """What stood between the tags."""
        name, _, arguments = body.partition(">")
        if name not in self.tools or not is_object(arguments):
            yield TextDelta(OPEN + body + CLOSE)
            return
        yield ToolCallBegun(self.calls, name)
        yield ToolCallDelta(self.calls, arguments)
        yield ToolCallEnded(self.calls)
        self.calls += 1


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def samples():
    """For the conformance check: what is written, and what it must become however it is cut."""
    context = ParserContext(tools={"add": {}, "weather": {}})
    yield ParserSample(
        text='Let me see.<call weather>{"place": "Rom"}</call><call add>{}</call> Done',
        context=context,
        events=(
            TextDelta("Let me see."),
            *(ToolCallBegun(0, "weather"), ToolCallDelta(0, '{"place": "Rom"}'), ToolCallEnded(0)),
            *(ToolCallBegun(1, "add"), ToolCallDelta(1, "{}"), ToolCallEnded(1)),
            TextDelta(" Done"),
        ),
    )
    for text in ("<call nobody>{}</call>", "<call add>[1]</call>", "<call add>{</call>", "1 <call 2", "<call add>{}"):
        yield ParserSample(text=text, context=context, events=(TextDelta(text),))
