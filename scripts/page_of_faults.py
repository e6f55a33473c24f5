"""tests/faults/README.md: the faults, the answers, and the tests that show them. A test names the rows it covers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_HEAD = """# Faults

<!-- Written by scripts/generate_docs.py from scripts/page_of_faults.py and the tests; `make docs` writes it again. -->

The table lists faults of clients, networks, models, plugins and processes, and the server's answer to each. `make
faults` causes them on running servers, in minutes and without a GPU, and `make slow` those that take longest. The
servers are `llmcore testserver`: only the model is a fake, with known answers. Some rows have their tests beside the
code, in `make test-unit` and `make test-servers`.

The same must hold after every row. No request runs, waits or holds KV. Threads, descriptors, shared memory and
temporary files of the server's processes are as before. The server is ready, and its log has no prompt and no key. The
next request gets the same bytes as before. In rows marked *N* another request streams meanwhile. Its answer has the
same bytes as alone, and 99 of 100 events come within 200 ms of the one before, or 500 ms while grammars compile. `make
idle` tests these times on a machine that does nothing else; `make faults` allows ten times as much.

Row 38 asks for 600 schemas. `pytest tests/faults/test_grammars.py -k many_schemas -s --schemas 10000` asks for 10,000
in some minutes, and prints by how much the server's memory grew after the first 300.

An error is `{"error": {"message", "type", "param", "code"}}`, or the dialect's own shape. If the answer has begun, the
error is one event of the stream, and `[DONE]` does not follow.

| # | What goes wrong | Answer | N | Tests |
| --- | --- | --- | --- | --- |"""

ROWS: Mapping[int, tuple[str, str, bool]] = {
    1: ("Content-Length beside Transfer-Encoding", "400; what follows is never read", False),
    2: ("two Content-Lengths; one with a sign, in hex, of 5,000 digits", "400 with a body", False),
    3: ("another transfer coding than chunked", "400 or 501", False),
    4: ("a chunk's size line, or a trailer, without end", "400 at its bound", False),
    5: ("three million chunks of a byte", "400 or 413, early", True),
    6: ("a body beyond the limit, announced or in chunks", "413, without holding it", False),
    7: ("headers of 300 KB, 2,000 headers, NUL, bare LF", "400 or 431", False),
    8: ("no Host, two, or one with a path in it", "400", False),
    9: ("two requests at once, then away", "both are freed", False),
    10: ("500 headers at a byte a second", "closed at the deadline; new clients are served", True),
    11: ("a body that drips; `Expect: 100-continue`, then silence", "408 at the deadline", False),
    12: ("a TLS hello, an HTTP/2 preface, a method in lower case", "400 and closed", False),
    13: ("more connections than may be", "503 for those beyond", False),
    14: ("JSON that is cut, empty, not UTF-8 or not an object, or begins with a mark", "400", False),
    15: ("JSON 100,000 deep, an integer of 5,000 digits, 1e999, NaN", "400", False),
    16: ("half a surrogate pair in any text", "400", False),
    17: ("every field with wrong types and ranges", "400, `param` names the field; unknown ones are ignored", False),
    18: ("another Content-Type; a Content-Encoding", "415", False),
    19: (
        "no key, a wrong, an empty, a huge one; two; one in the query",
        "401, WWW-Authenticate; 400 for two",
        False,
    ),
    20: ("every route without a key, every method, odd spellings", "401, 404 or 405; open routes are listed", False),
    21: ("preflights and requests of pages elsewhere; origin null", "no CORS header", False),
    22: ("a model's name that is unknown, a path, 10 KB", "404 or 400", False),
    23: ("no messages, no content, unknown roles, 10,000 messages", "400", False),
    24: (
        "empty and small prompts; the context's edge",
        "200; 400 `context_length_exceeded` beyond it",
        False,
    ),
    25: ("a prompt of 30 MB", "400 before it is tokenized", True),
    26: ("100,000 prompts; mixed and nested lists", "400 in 20 ms of a worker's time, in no more memory", False),
    27: ("invalid token ids", "400", True),
    28: ("n and best_of out of range", "400", False),
    29: ("max_tokens and min_tokens out of range", "400", False),
    30: ("temperature, filters, penalties out of range; and at its edge", "400; 200 at the edge", True),
    31: ("too many log-probabilities; of long prompts and answers", "400; bounded memory", False),
    32: ("stops that are empty, too many, too long; stops across tokens", "400; the right cut", False),
    33: ("100,000 biases, keys that are not ids, values out of range", "400", True),
    34: ("ids beyond the vocabulary wherever a request names ids", "400", True),
    35: ("seeds out of range, a megabyte of user, 10,000 tools, odd names", "400", False),
    36: ("regular expressions that are hostile or invalid", "400 within 1.2 s; those that compile are served", True),
    37: ("schemas without end, too deep, remote, of unknown types", "400; `{}` is served; no network", True),
    38: ("recursive grammars; hundreds of new schemas", "400; 200, in bounded memory", False),
    39: ("a grammar that allows no token", "500 for that request", True),
    40: ("a chat template, or its inner variables, from a client", "400", False),
    41: (
        "a model directory with code: auto_map, pickles, chat templates that attack at once or on a word",
        "the start refuses, and nothing of it runs; 400 for the request",
        True,
    ),
    42: ("special tokens as text, and images beside them", "200 as text; images 400 `unsupported`", True),
    43: ("images: tiny, huge, broken, of other kinds, a hundred", "400 `unsupported`; nothing is decoded", False),
    44: ("addresses of images: this machine, files, other schemes", "400 `unsupported`; no address is called", True),
    45: ("addresses that redirect, drip, never end", "400 `unsupported`; no address is called", True),
    46: ("images of equal bytes and other shapes", "400 `unsupported`", False),
    47: ("a prefix that another key's request left", "no hit: `cached_tokens` is 0", False),
    48: ("one x-request-id on fifty requests, one of which is left", "all the others finish", False),
    49: (
        "a client leaves: queued, in its prompt, at any token, before its grammar is made",
        "aborted, slots freed",
        True,
    ),
    50: ("thousands of connections that send something and close", "nothing grows", True),
    51: ("a client that does not read", "cut off; nothing waits for it", True),
    52: ("a client that only stops sending", "the whole answer", False),
    53: ("more requests than may wait", "429 with Retry-After; those admitted finish", False),
    54: ("a request whose KV can never fit", "400 at once", False),
    55: ("sixty-four streams in the KV of two", "200, each as alone", False),
    56: (
        "an exception in tokenizer, admission, grammar, sampler, detokenizer, parser or hook",
        "500 for that one",
        True,
    ),
    57: ("scores that are not finite, a token outside the vocabulary", "500 for that request", True),
    58: ("no memory in a step", "503 for its cause; the others finish", True),
    59: ("a process is killed", "streams end with an error; another starts, or the server ends with 1", False),
    60: ("a process hangs; all stand still", "killed, its stacks in a file, and others serve; none is killed", False),
    61: ("SIGTERM idle, in 100 streams, twice, to all; SIGKILL", "drained, code 0; nothing is left behind", False),
    62: ("strangers on the inner sockets", "dropped and counted", False),
    64: (
        "a full disk, few descriptors, clocks that jump, a log that is not read",
        "degraded, and the log says so",
        False,
    ),
    67: (
        "33 bodies without a key, each a byte short of 32 MB; bodies of preflights and probes",
        "401; none is kept",
        True,
    ),
    68: ("33 bodies of one key, of one address, of many addresses", "503 beyond a share; others are served", False),
    69: (
        "pages of other origins, or of a name that an attacker points at this machine, without keys",
        "403; 415",
        False,
    ),
}
"""Row -> the fault, the answer, and whether another request streams meanwhile."""

EXCLUDED: Mapping[int, str] = {
    63: "transfers of KV between prefill and decode servers: there are none",
    65: "adapters (LoRA): there are none",
    66: "hours under load, with steps that find no memory (row 58): `python benchmarks/soak.py --minutes 480`",
}
"""Row -> why it has no test here."""

_TAIL = """
Not here, and why:

| # | Why |
| --- | --- |"""

PARTS = (
    "| 22, 46 | the parts about adapters: there are none |",
    "| 31 | the memory of a GPU: `benchmarks/` measures it there |",
    "| 36, 37 | expressions that compile at once are served, not refused: `(a+)+b` is an automaton to it |",
    "| 23 | the chat template decides whether a conversation needs a user's message |",
    "| 49 | while an image is fetched, or KV moves: the server does neither |",
    "| 58 | shown with the error that a device raises; a real shortage needs a GPU |",
    "| 59, 60 | ranks of tensor parallelism and processes for images: there are none |",
)

_NAMED = re.compile(r"^def (test_rows?_([\d_]+(?:to_\d+_|and_\d+_)*)\w*)", re.MULTILINE)
_NOTED = re.compile(r"^def (test_\w+)\([^\n]*# rows? ([\d, to]+?)$", re.MULTILINE)
_WHOLE = re.compile(r'^"""[^"]*\b[Rr]ows? (\d[\d, ]*(?:(?:to|and) \d+)?)')


def faults_page() -> str:
    """Returns every row with its tests."""
    return "\n".join(_lines()) + "\n"


def tests_by_row() -> dict[int, list[str]]:
    """Returns row -> "file::test" of every test that names it: `test_rows_14_to_16_...`, `test_row_7_...`, or `# rows
    10, 11` at the end of its first line. If only the file's first lines name the row, the value is "file"."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for pattern in (_NAMED, _NOTED):
            for name, rows in pattern.findall(text):
                for row in numbers(rows):
                    found.setdefault(row, []).append(f"{path.relative_to(ROOT / 'tests')}::{name}")
        whole = _WHOLE.match(text)
        for row in numbers(whole[1]) if whole else ():
            file = str(path.relative_to(ROOT / "tests"))
            if not any(name.startswith(file) for name in found.get(row, ())):
                found.setdefault(row, []).append(file)
    return found


def numbers(text: str) -> Iterator[int]:
    """Yields the numbers of 14_to_16_and_35: 14, 15, 16, 35. It also reads "10, 11"."""
    for first, last in re.findall(r"(\d+)(?:[ _]to[ _](\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _lines() -> Iterator[str]:
    yield _HEAD
    tests = tests_by_row()
    for row, (fault, answer, neighbour) in ROWS.items():
        names = "<br>".join(f"`{name}`" for name in sorted(set(tests.get(row, ()))))
        yield f"| {row} | {fault} | {answer} | {'N' if neighbour else ''} | {names} |"
    yield _TAIL
    yield from (f"| {row} | {why} |" for row, why in EXCLUDED.items())
    yield from PARTS
