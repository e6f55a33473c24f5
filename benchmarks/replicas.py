"""`llmcore serve --dp 2` against one engine: the same load for each engine, through HTTP.

    python benchmarks/replicas.py MODEL_DIR                    # 2 GPUs, 1,000 requests for each engine
    python benchmarks/replicas.py --tiny --requests 20         # a small model on the CPU, to see that it works

Mixes: `chat` has the lengths of conversations; `turns` has sessions of six turns, whose prompts repeat all before;
`hot` has prompts that begin with the same 1,024 tokens. The column `times one` has the requests per second beside
those of one engine; the number of engines is ideal. `prefix hits` is the share of prompt tokens that came from prefix
caches. `front end` has the cores that the HTTP workers and the supervisor used together. All requests of a mix must be
answered in full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from llmcore_devtools.bench.client import DIALECTS, Answer, Target, ask
from llmcore_devtools.bench.figures import percentile
from llmcore_devtools.bench.workloads import chat
from llmcore_devtools.server import RunningServer, serving
from llmcore_server.supervisor import Pace
from processes import Window

HOT = 1024
"""Tokens that all prompts of `hot` begin with."""
TURNS = 6
LOWEST_ID, HIGHEST_ID = 10, 100

Session = list[tuple[list[int], int]]
"""Requests that follow each other: prompt ids, and tokens of the answer."""


@dataclass(frozen=True)
class Result:
    """A mix that was played. `first`: seconds to each first token. `hits`: the share of prompt tokens. `cores`: of the
    front end."""

    requests: int
    seconds: float
    first: list[float]
    hits: float
    cores: float


def drawn(random: Random, length: int) -> list[int]:
    return [random.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def sessions(mix: str, requests: int, seed: int) -> list[Session]:
    random, lengths = Random(seed), chat(requests, seed).lengths
    if mix == "chat":
        return [[(drawn(random, prompt), answer)] for prompt, answer in lengths]
    if mix == "hot":
        common = drawn(random, HOT)
        return [[([*common, *drawn(random, min(prompt, 256))], min(answer, 64))] for prompt, answer in lengths]
    found: list[Session] = []
    for at in range(0, requests - TURNS + 1, TURNS):
        before: list[int] = []
        turns: Session = []
        for prompt, answer in lengths[at : at + TURNS]:
            before = [*before, *drawn(random, min(prompt, 400))]
            turns.append((before, min(answer, 128)))
            before = [*before, *drawn(random, min(answer, 128))]  # stands for the answer, which differs
        found.append(turns)
    Random(seed).shuffle(found)
    return found


async def play(target: Target, name: str, given: Sequence[Session], concurrent: int) -> list[Answer]:
    """Play sessions, `concurrent` at once."""
    slots, answers = asyncio.Semaphore(concurrent), []

    async def one(session: Session) -> None:
        async with slots:
            for ids, output in session:
                answer = Answer(len(ids), output)
                await ask(target, target.request(ids, "", output, name), answer)
                if answer.error is not None:
                    raise SystemExit(f"a request failed: {answer.error}")
                answers.append(answer)

    await asyncio.gather(*(one(session) for session in given))
    return answers


def totals(server: RunningServer) -> tuple[float, float]:
    """(prompt tokens, those from prefix caches) of all engines so far."""
    with urllib.request.urlopen(f"{server.admin}/server_info") as answer:
        load = json.load(answer)["load"]
    return load["prompt_tokens"], load["cached_tokens"]


def measure(server: RunningServer, mix: str, requests: int, concurrent: int) -> Result:
    target = Target(server.url, DIALECTS["openai-completions"])
    given, before = sessions(mix, requests, seed=len(mix)), totals(server)
    workers = [pid for module, pid in server.children().items() if ".http." in module]
    front = Window([server.process.pid, *workers])
    began = time.perf_counter()
    answers = asyncio.run(play(target, "model", given, concurrent))
    seconds, cores = time.perf_counter() - began, sum(front.cores()[0].values())
    time.sleep(1.0)  # until the engines have reported
    prompts, cached = (now - then for now, then in zip(totals(server), before, strict=True))
    first = [answer.arrivals[0][0] - answer.sent for answer in answers]
    return Result(len(answers), seconds, first, cached / prompts, cores)


@contextmanager
def model_of(given: str | None, tiny: bool) -> Iterator[Path]:
    """The model's directory; with `tiny` a small model with random weights."""
    if not tiny:
        if given is None:
            raise SystemExit("give MODEL_DIR, or --tiny")
        yield Path(given)
        return
    from llmcore_devtools.family import small_model
    from llmcore_devtools.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        small_model("LlamaForCausalLM", max_position_embeddings=4096).save_pretrained(folder)
        write_tokenizer(Path(folder))
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1000, help="of a mix, for each engine")
    parser.add_argument("--concurrent", type=int, default=256, help="requests at once, for each engine")
    parser.add_argument("--workers", type=int, default=2, help="HTTP workers")
    parser.add_argument("--mixes", nargs="+", choices=("chat", "turns", "hot"), default=("chat", "turns", "hot"))
    parser.add_argument("--routing_strategy", default="cost")
    parser.add_argument("--load_format", default="auto", help="dummy draws random weights")
    given = parser.parse_args()
    settings = {
        "model_name": "model",
        "max_req_total_len": 4096,
        "httpserver_workers": given.workers,
        "load_format": given.load_format,
        "disable_log_stats": True,
        **({"device": "cpu", "data_type": "f32", "max_total_token_num": 30_000} if given.tiny else {}),
    }
    print("| mix | engines | requests | seconds | times one | first token p50 s | p99 s | prefix hits | front end |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    one: dict[str, float] = {}
    with model_of(given.model_dir, given.tiny) as model:
        for engines in (1, given.dp):
            several = {"dp": engines, "routing_strategy": given.routing_strategy} if engines > 1 else {}
            with serving(model, pace=Pace(), timeout=600.0, **settings, **several) as server:
                for mix in given.mixes:
                    found = measure(server, mix, given.requests * engines, given.concurrent * engines)
                    rate = found.requests / found.seconds
                    one.setdefault(mix, rate)
                    p50, p99 = percentile(found.first, 50), percentile(found.first, 99)
                    print(
                        f"| {mix} | {engines} | {found.requests} | {found.seconds:.1f} | {rate / one[mix]:.2f} | "
                        f"{p50:.3f} | {p99:.3f} | {found.hits:.1%} | {found.cores:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
