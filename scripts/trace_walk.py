"""Follow one streamed chat through a real server, and write docs/walk.md.

    python scripts/trace_walk.py            # write the page
    python scripts/trace_walk.py --check    # write nothing, and fail if the page is out of date
    python scripts/trace_walk.py --files    # print every file that the chat enters, with its functions

The script starts supervisor, HTTP worker and engine on a small Llama with random weights, and sends it two chats. The
plugin `walk_probe.py` records which functions run in the worker and in the engine. Each recording ends when every loop
in the background has turned and no function begins for the first time. The second recording is the walk: what is made
only once was made for the first chat.

STOPS names the functions of the page. Everything else comes from the run and from the source.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import http.client
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from walk_probe import MODULES, OFF

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walk.md"
PROBE = Path(__file__).with_name("walk_probe.py")

MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_act": "silu"},
    **{"vocab_size": 275, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
}
CHAT = {"model": "walk", "stream": True, "max_tokens": 6, "ignore_eos": True, "temperature": 0}

MODEL_FILES = (
    *("core/llmcore/layers/", "core/llmcore/ops/", "core/llmcore/builtin/cpu/", "core/llmcore/builtin/devices/"),
    *("core/llmcore/builtin/token_layout.py", "plugins/llama/"),
)
"""Layers, ops, kernels, device, layout and family: what one model brings. The walk counts these files apart."""

QUIET_SECONDS = 1.2
"""The trace ends when no function has begun for the first time for so long; the slowest loop turns once a second."""

PATIENCE = 60.0
"""Seconds that the script waits at most for an answer, and for the end of a recording."""

KEY = ("file", "function", "process", "thread")


@dataclass(frozen=True)
class Stop:
    """One line of the page.

    `function`: its qualified name, which no other function of its thread has. `arrives`: names of the arguments to
    show, all if it is empty. `leaves`: "Function(argument)" for what the stop hands to another function, or "" for
    what it returns.
    """

    function: str
    arrives: str = ""
    leaves: str = ""

    @property
    def handover(self) -> tuple[str, str]:
        """The function and the argument of `leaves`."""
        function, argument = self.leaves.removesuffix(")").split("(")
        return function, argument


@dataclass(frozen=True)
class Section:
    """Stops of one thread, in the order in which they are reached. `thread`: a pattern for its name."""

    title: str
    text: str
    process: str
    thread: str
    stops: Sequence[Stop]


STOPS = (
    Section(
        "Into the worker: bytes become a request",
        "Process: HTTP worker. Thread: the main loop, which reads all connections.",
        "worker",
        "MainThread",
        (
            Stop("HttpServer._open", leaves="StreamChannel.__init__(owner)"),
            Stop("StreamChannel.received", leaves="StreamChannel._take(request)"),
            Stop("StreamRequest.received"),
            Stop("parse_head", "line data"),
            Stop("Doorman.admit"),
            Stop("StreamChannel._enqueue"),
        ),
    ),
    Section(
        "The dialect: a request becomes token ids",
        "Process: HTTP worker. Thread: one of waitress's pool. It returns there when the request has left.",
        "worker",
        "waitress-*",
        (
            Stop("StreamTask.service", leaves="Arrivals.process_resource(req)"),
            Stop("Arrivals.process_resource", "req resource", "Gate.check(client)"),
            Stop("ChatCompletions.on_post", leaves="ChatCompletions._request(body)"),
            Stop("read"),
            Stop("conversation_of"),
            Stop("ChildTemplate.render"),
            Stop("FastTokenizer.encode"),
            Stop("submits", "body prompts rules"),
            Stop("Front.detach"),
            Stop("Generation.start", leaves="FleetBridge.submit(request)"),
            Stop("FleetBridge.submit", leaves="Fleet.send(request)"),
            Stop("Fleet.send", leaves="Outlet.send(message)"),
        ),
    ),
    Section(
        "Through the engine: token ids become the next token",
        "Process: engine. It has one loop. Each turn takes what has come and runs one step for all requests.",
        "engine",
        "MainThread",
        (
            Stop("EngineProcess._submit", "request owner"),
            Stop("Engine.submit"),
            Stop("Scheduler.submit", "submit owner", "State.add(request)"),
            Stop("Engine.step"),
            Stop("Scheduler.plan"),
            Stop("FCFS.plan"),
            Stop("RadixCache.match"),
            Stop("RequestTable.admit"),
            Stop("KVSpace.secure"),
            Stop("enqueue"),
            Stop("ModelRunner.prepare"),
            Stop("BatchPacker.pack"),
            Stop("ModelRunner.enqueue"),
            Stop("Tables.apply"),
            Stop("ModelRunner._forward"),
            Stop("Decoder.forward", "step"),
            Stop("Block.forward"),
            Stop("Attention.forward"),
            Stop("TokenLayout.write"),
            Stop("Prefill.run"),
            Stop("RowSampler.draw"),
            Stop("sample"),
            Stop("ModelRunner.read"),
            Stop("Results.take", leaves="_events(accepted)"),
            Stop("RequestTable.accept"),
            Stop("Workers.post"),
            Stop("State.end", leaves="KVSpace.release(row)"),
        ),
    ),
    Section(
        "Back through the worker: tokens become bytes",
        "Process: HTTP worker. Thread: the hub, which writes all streams.",
        "worker",
        "hub",
        (
            Stop("explode"),
            Stop("Subscribers.deliver", leaves="Generation._take(event)"),
            Stop("Generation._take"),
            Stop("ChoiceText.feed"),
            Stop("BytesDetokenizer.add"),
            Stop("StreamWriter.write", leaves="StreamWriter._send(parts)"),
            Stop("StreamTask.send_part", leaves="StreamChannel.post(data)"),
            Stop("StreamChannel.send", "data"),
            Stop("StreamTask.send_end"),
            Stop("Front.finished"),
        ),
    ),
)

LOOPS = ("HttpServer._channels", "Workers.heard", "Threads.tend", "log_request")
"""Functions of the loops in the background, for which a recording waits: the worker's sweep, its heartbeat, which the
engine hears, the engine's look at processors, and the log of requests."""


@dataclass
class Call:
    """One call of a watched function."""

    file: str
    function: str
    process: str
    thread: str
    at: float
    arrives: dict[str, str]
    leaves: str = ""

    def argument(self, name: str) -> str:
        """Returns "name: type" of one argument."""
        if name not in self.arrives:
            raise LookupError(f"{self.function} takes no argument {name}")
        return f"{name}: {self.arrives[name]}"


class Trace:
    """One recording. `functions`: file -> function -> the threads that ran it, in the order of their first lines."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.functions: dict[str, dict[str, set[str]]] = {}
        self._calls: list[Call] = []
        running: dict[tuple[str, ...], list[Call]] = {}
        for line in sorted(lines, key=lambda line: float(line["at"])):
            file, function, process, thread = key = tuple(line[name] for name in KEY)
            if line["event"] == "run":
                self.functions.setdefault(file, {}).setdefault(function, set()).add(f"{process} {thread}")
            elif line["event"] == "call":
                call = Call(file, function, process, thread, line["at"], line["arrives"])
                running.setdefault(key, []).append(call)
                self._calls.append(call)
            elif running.get(key):
                running[key].pop().leaves = line["leaves"]

    def files(self, *, of_the_model: bool = False) -> list[str]:
        """Returns the files that the chat enters, without or only those of MODEL_FILES, in order."""
        return [file for file in self.functions if file.startswith(MODEL_FILES) == of_the_model]

    def find(self, function: str, process: str, thread: str, after: float) -> Call:
        """Returns the first call that began `after` a time, in a thread whose name matches `thread`.

        Raises LookupError if there is none, or if two files have a function of this name.
        """
        calls = [call for call in self._calls if call.function == function and call.process == process]
        calls = [call for call in calls if fnmatch(call.thread, thread)]
        if len({call.file for call in calls}) > 1:
            raise LookupError(f"{function} is a function of several files: {sorted({call.file for call in calls})}")
        for call in calls:
            if call.at >= after:
                return call
        when = "after the stop before it" if calls else "at all"
        raise LookupError(f"the chat does not reach {function} {when} (process {process}, thread {thread})")


def trace() -> Trace:
    """Run the server and the chat."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(folder / "walk")
        (folder / "walk" / "config.json").write_text(json.dumps(MODEL))
        (folder / "round").write_bytes(bytes([OFF]))
        (folder / "watched").write_text("\n".join(watched()))
        with serving(
            folder / "walk",
            plugins=("llama", str(PROBE)),
            plugin_options={"walk_dir": str(folder)},
            load_format="dummy",
            device="cpu",
        ) as server:
            for number, text in enumerate(("Hello there", "the stop of the walk is near"), 1):
                record(folder, number)
                connection = chat(server, text)
                settle(folder, number)
                connection.close()
            record(folder, OFF)
        return Trace(recorded(folder, number))


def watched() -> Iterator[str]:
    """Yield the functions whose calls are to be recorded."""
    for section in STOPS:
        for stop in section.stops:
            yield stop.function
            if stop.leaves:
                yield stop.handover[0]


def record(folder: Path, number: int) -> None:
    """Begin the recording `number` in all processes."""
    with (folder / "round").open("r+b") as file:
        file.write(bytes([number]))


def chat(server: RunningServer, text: str) -> http.client.HTTPConnection:
    """Send a chat, read its answer, and return the connection, which is still open."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": text}]})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = reply.read()
    assert reply.status == 200 and answer.endswith(b"data: [DONE]\n\n"), answer
    return connection


def recorded(folder: Path, number: int, having: str = "") -> Iterator[dict[str, Any]]:
    """Yield the lines of one recording that contain a text, without a line that is just being written."""
    for module, process in MODULES.items():
        whole, _, _ = (folder / f"{module}.jsonl").read_text().rpartition("\n")
        for line in map(json.loads, (text for text in whole.splitlines() if having in text)):
            if line["round"] == number:
                yield {"process": process, **line}


def settle(folder: Path, number: int) -> None:
    """Wait until every loop has turned and nothing new has begun for QUIET_SECONDS."""
    deadline = time.monotonic() + PATIENCE
    known, since, missing = 0, time.monotonic(), set(LOOPS)
    while missing or time.monotonic() < since + QUIET_SECONDS:
        if time.monotonic() > deadline:
            raise LookupError(f"the recording does not end; functions that did not run: {sorted(missing)}")
        time.sleep(0.2)
        lines = list(recorded(folder, number, having='"run"'))
        missing = set(LOOPS) - {line["function"] for line in lines}
        if len(lines) > known:
            known, since = len(lines), time.monotonic()


# --- the page -------------------------------------------------------------------------------------------------------

HEAD = """# The walk of one streamed chat

<!-- Written by scripts/trace_walk.py from a run; `make docs` writes it again. -->

A streamed chat enters **{count} files** in HTTP worker and engine, from its first byte to its last. Loops in the
background are included. The model brings {brought} more files: layers, ops, kernels, device, layout and family.

The chat reaches these functions in this order. *Arrives* has the names and types of arguments. *Leaves* has the type
of the result, or the argument that the function hands to the one behind the arrow. A script takes all of them from a
run on the CPU. On a GPU the model runner replays a CUDA graph where it has one."""

REST = """## The other files

The chat enters these files too: for checks that it passes, for features that it does not use, and for loops in the
background."""


def page(traced: Trace) -> str:
    """Returns docs/walk.md. Raises LookupError if the chat does not reach a stop after the stop before it."""
    lines = [HEAD.format(count=len(traced.files()), brought=len(traced.files(of_the_model=True)))]
    shown: set[str] = set()
    number, began = 0, 0.0
    for section in STOPS:
        lines += ["", f"## {section.title}", "", section.text, ""]
        lines += ["| | Where | What | Arrives | Leaves |", "| --- | --- | --- | --- | --- |"]
        calls = calls_of(section, traced, began)
        began = calls[0].at
        for stop, call in zip(section.stops, calls, strict=True):
            number += 1
            where = f"{link(call.file)}<br>`{call.function}`"
            cells = (str(number), where, sentence(call), arrives(stop, call), leaves(stop, call, traced))
            lines.append(f"| {' | '.join(cells)} |")
        shown |= {call.file for call in calls}
    lines += ["", REST, "", "| File | Subject |", "| --- | --- |"]
    others = sorted(set(traced.files()) - shown)
    lines += [f"| {link(file)} | {first_sentence(docstrings(file)[''])} |" for file in others]
    return "\n".join(lines) + "\n"


def calls_of(section: Section, traced: Trace, after: float) -> list[Call]:
    """Returns the calls of a section's stops, each the first after the one before it."""
    calls: list[Call] = []
    for stop in section.stops:
        calls.append(traced.find(stop.function, section.process, section.thread, calls[-1].at if calls else after))
    return calls


def arrives(stop: Stop, call: Call) -> str:
    """Returns the names and types of what arrives, without the object whose method it is."""
    names = stop.arrives.split() or [name for name in call.arrives if name not in ("self", "cls")]
    return ", ".join(f"`{call.argument(name)}`" for name in names or ["self"])


def leaves(stop: Stop, call: Call, traced: Trace) -> str:
    """Returns the type of the result, or what the stop hands to another function."""
    if not stop.leaves:
        return f"`{call.leaves}`"
    function, argument = stop.handover
    taker = traced.find(function, call.process, call.thread, call.at)
    return f"`{taker.argument(argument)}` → `{function}`"


def link(file: str) -> str:
    """Returns a link to a file, named from its package on."""
    parts = file.split("/")
    return f"[{'/'.join(parts[2 if parts[0] == 'plugins' else 1 :])}](../{file})"


@cache
def docstrings(file: str) -> dict[str, str]:
    """Returns the docstrings of a file by qualified name; "" is the module."""
    found: dict[str, str] = {}

    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> None:
        found[name] = ast.get_docstring(node) or ""
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                visit(child, f"{name}.{child.name}".removeprefix("."))

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def sentence(call: Call) -> str:
    """Returns the first sentence of the docstring of a stop; an `__init__` may leave it to its class."""
    texts = docstrings(call.file)
    text = texts[call.function] or texts[call.function.removesuffix(".__init__")]
    if not text or text.startswith("See "):
        raise LookupError(
            f"{call.file}: {call.function} is a stop of docs/walk.md, and its docstring does not describe it"
        )
    return first_sentence(text)


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring, for a cell of a table."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=[.:])(?= [A-Z])", paragraph)[0].replace("|", "\\|")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is out of date")
    parser.add_argument("--files", action="store_true", help="print the files and their functions")
    asked = parser.parse_args()
    traced = trace()
    if asked.files:
        print_files(traced)
        return 0
    text = page(traced)
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    if asked.check:
        print("docs/walk.md is out of date, run make docs")
        before = PAGE.read_text() if PAGE.exists() else ""
        print(*difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=0), sep="\n")
        return 1
    PAGE.write_text(text)
    print(f"written: docs/walk.md, {len(traced.files())} files")
    return 0


def print_files(traced: Trace) -> None:
    """Print every file that the chat enters, with the threads that enter it and the functions that run."""
    print(f"{len(traced.files())} files; {len(traced.files(of_the_model=True))} more of the model")
    for file in traced.files():
        functions = traced.functions[file]
        print(f"{file}\n    {', '.join(sorted(set().union(*functions.values())))}: {', '.join(functions)}")


if __name__ == "__main__":
    sys.exit(main())
