"""Two ranks of one model as two processes, which do what a test asks of them, one task after the other.

Run as a program, this file is one rank: `two_ranks.py STORE RANK RANKS SECONDS` reads tasks from its standard input, a
JSON object on each line, and answers each with one line. Tensors go through files.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RANKS = 2
CALL_S = 20.0
"""Seconds that a rank waits for the other in one call."""
TASK_S = 50.0
"""Seconds after which both ranks are killed."""


class Broken(Exception):
    """A rank failed. The text says which, and has its traceback."""


class TwoRanks:
    """Both processes. A task that fails ends both: what one rank did alone cannot be taken back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def ask(self, task: str, *, limit: float = TASK_S, **fields: Any) -> list[dict[str, Any]]:
        """What the ranks' function `task` returns, in rank order. Starts the ranks if none run.

        Raises Broken if a rank raises, ends, or does not answer within `limit` seconds.
        """
        if not self._processes:
            self._start()
        line = json.dumps({"task": task, **fields}).encode() + b"\n"
        end, answers = time.monotonic() + limit, []
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            for rank, process in enumerate(self._processes):
                answers.append(self._answer(rank, process, end))
        except (OSError, Broken):
            self.kill()
            raise
        if failed := [f"rank {rank}: {found['error']}" for rank, found in enumerate(answers) if "error" in found]:
            self.kill()
            raise Broken("\n".join(failed))
        return answers

    def _start(self) -> None:
        self._count += 1
        store = self._folder / f"store-{self._count}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for rank in range(RANKS):
            command = [sys.executable, __file__, str(store), str(rank), str(RANKS), str(CALL_S)]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )

    def _answer(self, rank: int, process: subprocess.Popen[bytes], end: float) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            raise Broken(f"rank {rank} does not answer")
        if not (line := process.stdout.readline()):
            raise Broken(f"rank {rank} ended with {process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()


def main(store: str, rank: int, ranks: int, seconds: float) -> None:
    """One rank."""
    import torch
    from llmcore.ops.comm import connect

    torch.set_num_threads(1)
    peers = connect(torch.distributed.FileStore(store, ranks), rank, ranks, seconds)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = TASKS[fields.pop("task")](peers, **fields)
        except Exception:  # noqa: BLE001 - the test shows it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


def generate(peers: Any, path: str, prompts: Sequence[Sequence[int]], new: int, into: str, **options: Any) -> Any:
    """Greedy tokens after each prompt by itself, and after all in mixed steps; the logits go into a file."""
    import torch
    from llmcore.layers.mesh import tensor_parallel
    from llmcore_devtools.loaded_model import LoadedModel
    from safetensors.torch import save_file

    mesh = tensor_parallel(peers.rank, peers.ranks, peers)
    model = LoadedModel(Path(path), mesh=mesh, granule=4, **options)
    runs = [model.generate(prompt, new, chunk=5) for prompt in prompts]
    runs += model.generate_mixed(prompts, new, chunk=7)
    logits = {str(index): torch.stack(run.logits) for index, run in enumerate(runs)}
    save_file(logits, f"{into}.{peers.rank}")
    held = sum(parameter.nbytes for parameter in model.model.parameters())
    kv = {name: layout.group.kv_heads for name, layout in model.layouts.items()}
    return {"tokens": [run.tokens for run in runs], "kv_heads": kv, "held": held, "weights": model.weight_bytes}


def own_logits(peers: Any, path: str, prompt: Sequence[int]) -> Any:
    """The largest own logit of each rank and the width of its part, beside the greedy token of all logits."""
    import torch
    from llmcore.layers import held_tokens
    from llmcore.layers.mesh import tensor_parallel
    from llmcore_devtools.loaded_model import LoadedModel, Row

    model = LoadedModel(Path(path), mesh=tensor_parallel(peers.rank, peers.ranks, peers))
    step = model.make_step([Row(0, tuple(prompt), 0, len(prompt))])
    with torch.inference_mode():
        states = model.model(step)
        own, logits = model.model.own_logits(*states)[0], model.model.logits(*states)[0]
    first, number = held_tokens(model.model.lm_head.build, len(logits))
    return {
        "first": first,
        "width": len(own),
        "same": bool(torch.equal(own, logits[first : first + number])),
        "best": first + int(own.argmax()),
        "score": float(own.max()),
        "token": int(logits.argmax()),
        "vocab": len(logits),
    }


def comm(peers: Any, dtype: str, shapes: Sequence[Sequence[int]]) -> Any:
    """Every op comm.* on both ranks, against what it means; and a checksum of the bits of its results."""
    import zlib

    import torch
    from llmcore.api import DeviceInfo, OpContext
    from llmcore.builtin.ops import register_ops
    from llmcore.ops import DTYPES
    from llmcore.registry.loader import load

    of = {
        "comm.all_reduce": lambda parts: sum(part.float() for part in parts).to(DTYPES[dtype]),
        "comm.all_gather": lambda parts: torch.cat(parts, -1),
        "comm.broadcast": lambda parts: parts[0],
        "comm.exchange": lambda parts: torch.stack(parts),
    }
    digests, wrong = {}, []
    for spec in register_ops():
        if spec.name not in of:
            continue
        for tokens, size in shapes:
            shape = {"group": "attn_tp", "ranks": peers.ranks, "size": size}
            context = OpContext(op=spec.name, device=DeviceInfo("cpu"), dtype=dtype, shape=shape, peers=peers)
            parts = [
                torch.randn(tokens, size, generator=torch.Generator().manual_seed(rank)).to(DTYPES[dtype])
                for rank in range(peers.ranks)
            ]
            mine = parts[peers.rank].clone()
            got = load(f"{spec.module}:make")(context)(mine)
            if not torch.equal(got, of[spec.name](parts)) or not torch.equal(mine, parts[peers.rank]):
                wrong.append(f"{spec.name} {tokens} {size}")
            digests[f"{spec.name} {tokens} {size}"] = zlib.crc32(got.contiguous().view(torch.uint8).numpy().tobytes())
    return {"wrong": wrong, "digests": digests}


def fail(peers: Any, rank: int, end: bool) -> Any:
    """One rank raises, or ends, while the other waits for it."""
    import torch

    if peers.rank == rank:
        if end:
            os._exit(3)
        raise ValueError("this rank has had enough")
    peers.gathered(torch.zeros(1))
    return {}


def late(peers: Any, seconds: float) -> Any:
    """Rank 0 waits for rank 1 for `seconds`; rank 1 never comes."""
    import torch

    peers.set_limit(seconds)
    if peers.rank == 0:
        peers.gathered(torch.zeros(1))
    return {}


TASKS: Mapping[str, Any] = {"generate": generate, "own_logits": own_logits, "comm": comm, "fail": fail, "late": late}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
