"""The engine's figures on one GPU, beside the GPU's own ceilings and other engines' figures.

    python benchmarks/gpu.py [--rows decode_1 chat ...] [--json FILE] [--set disable_cudagraph=true]

Weights are random, from a config.json alone; nothing is downloaded. The prefix cache is off, and prompts are new in
every run. A decode row begins when its steps are captured, as those of a server that has served such requests for a
while. If a step of a measured run was launched all the same, a line says so. The script prints the start-up summary,
every row when it is measured, and the whole table last. Other engines' figures are those of peers.json, which has some
for lists of modes (`--set mode=fp8w8a8`). Some of its marks are shares of another run, such as one without modes:
`--beside FILE` names its `--json`. Rows of a dense model in bf16 on H200s stand beside the model of cost (cost.py).

`start_cold` and `start_warm` start the engine in two further processes first, the first of them without compiled
kernels. Both count from the start of the process. `--shrink 100` divides batches and lengths, to try the script itself
on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import cost
import torch
from llmcore.api.specs import OptionSpec
from llmcore.config import Config, resolve_config
from llmcore.engine.graphs import CAPTURED_AT, Action
from llmcore.engine.model_runner import Prepared
from llmcore.registry.loader import build_registry, select
from llmcore.sched.plan import padded
from llmcore_devtools.bench.engine_runs import BenchEngine, measure_latency
from llmcore_devtools.bench.figures import Spread, machine, versions
from llmcore_devtools.bench.workloads import Lengths, chat
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs"
PEERS = json.loads((HERE / "peers.json").read_text())
BESIDE = 24
"""Tokens of answers that last until the last of 256 prompts of 512 tokens was computed."""
SETTINGS = {"load_format": "dummy", "max_req_total_len": "8192"}


@dataclass
class Bench:
    """The engine and options for the rows. `n` reduces a count or a length when the script itself is tried."""

    engine: BenchEngine
    repeats: int
    shrink: int
    host: list[tuple[float, float]] = field(default_factory=list)
    """(milliseconds of the host, of all) per step, of each run of `seconds`."""
    rare: int = 0
    """Steps of the last row that were launched, or captured, although a CUDA graph can run them."""

    def n(self, count: int) -> int:
        return max(1, count // self.shrink)

    def requests(self, count: int, prompt: int, output: int) -> list[Lengths]:
        return [(self.n(prompt), self.n(output))] * self.n(count)

    def capture(self, rows: int, prompt: int, length: int) -> None:
        """Captures the steps of `rows` prompts whose answers follow, up to `length` tokens with the prompt.

        Attention divides contexts among programs. The number of programs belongs to a graph, and depends on the
        contexts and on how many rows of a size are padding. So each size is captured with the most and the least, and
        then the steps in which prompts come beside answers.
        """
        answer, sizes = 2 * CAPTURED_AT, {padded(count) for count in range(1, rows + 1)}
        for count in sorted({min(size, rows) for size in sizes} | {size + 1 for size in sizes if size < rows}):
            self.engine.run([(max(length - answer, 1), answer)], choices=count)
        for _ in range(CAPTURED_AT):
            with self.watched():
                self.engine.run([(prompt, min(BESIDE, length - prompt))] * rows)
            if not self.rare:
                break

    def seconds(
        self,
        lengths: Sequence[Lengths],
        warmup: Sequence[Lengths],
        repeats: int | None = None,
        warmups: int = CAPTURED_AT,
    ) -> Spread:
        """The seconds of `lengths`, submitted at once. First it runs `warmup` until its step sizes are captured."""
        for _ in range(warmups):
            self.engine.run(warmup)
        waits, runs = Waits(self.engine), []
        self.host.clear()
        with self.watched():
            for _ in range(repeats or self.repeats):
                before = waits.seconds
                runs.append(run := self.engine.run(lengths))
                busy = run.seconds - (waits.seconds - before)
                self.host.append((1e3 * busy / run.steps, 1e3 * run.seconds / run.steps))
        waits.end()
        return Spread.of([run.seconds for run in runs])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts steps that were not replayed although a CUDA graph can run them."""
        actions = Actions(self.engine)
        try:
            yield
        finally:
            actions.end()
            self.rare = sum(action != Action.REPLAY for action in actions.captured.values())


class Waits:
    """Counts the seconds for which the host waits for steps of an engine, until `end`."""

    def __init__(self, engine: BenchEngine) -> None:
        self._device, self.seconds = engine.engine._device, 0.0
        event = self._device.event
        self._device.event = lambda: _Timed(event(), self)  # type: ignore[method-assign]

    def end(self) -> None:
        del self._device.event


class Actions:
    """Notes how the engine enqueues each step, until `end`."""

    def __init__(self, engine: BenchEngine) -> None:
        runner = engine.engine._runner
        self._runner: Any = getattr(runner, "_runner", runner)  # rank 0's own, if there are more ranks
        self.of: dict[int, Action] = {}
        """By the number of the step."""
        self.captured: dict[int, Action] = {}
        """The same for steps that a CUDA graph can run."""
        decide = self._runner.decide

        def and_note(step: Prepared) -> Action:
            action: Action = decide(step)
            self.of[step.plan.number] = action
            if step.frame is not None and self._runner.graph_rows:
                self.captured[step.plan.number] = action
            return action

        self._runner.decide = and_note

    def end(self) -> None:
        del self._runner.decide


class _Timed:
    """An event of a device, whose `wait` is counted."""

    def __init__(self, event: Any, waits: Waits) -> None:
        self._event, self._waits = event, waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def wait(self) -> None:
        began = time.perf_counter()
        self._event.wait()
        self._waits.seconds += time.perf_counter() - began


HOST_MOST = 0.6
"""The share of an eager step for which the host may work, so that it stays ahead of the GPU."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `measure` is None for rows that are measured in processes of their own."""

    key: str
    title: str
    unit: str
    measure: Callable[[Bench], Spread] | None

    @property
    def better(self) -> int:
        """1 if more is better, -1 if less is better."""
        return 1 if self.unit == "tok/s" else -1


def decode(batch: int) -> Row:
    """(T(in 512, out 129) - T(in 512, out 1)) / 128."""

    def measure(bench: Bench) -> Spread:
        steps = max(2, bench.n(128))
        rows = bench.n(batch)
        # requests end at different times, so that steps have all numbers of rows
        bench.capture(rows, bench.n(512), bench.n(512) + steps)
        with bench.watched():
            found = measure_latency(bench.engine, rows, bench.n(512), 1 + steps, repeats=bench.repeats, warmup=0)
        return found.step.scaled(1e3)

    return Row(f"decode_{batch}", f"decode step, batch {batch}", "ms", measure)


def rate(key: str, title: str, count: int, lengths: Lengths, warmup: tuple[int, Lengths]) -> Row:
    """Tokens per second of `count` requests at once. Tokens of prompts count, and those of answers longer than one
    token."""

    def measure(bench: Bench) -> Spread:
        load = bench.requests(count, *lengths)
        tokens = sum(prompt + (output if lengths[1] > 1 else 0) for prompt, output in load)
        found = bench.seconds(load, bench.requests(warmup[0], *warmup[1]))
        return Spread(*(tokens / seconds for seconds in (found.median, found.high, found.low)))

    return Row(key, title, "tok/s", measure)


def first_token(bench: Bench) -> Spread:
    lengths = bench.requests(1, 512, 1)
    return bench.seconds(lengths, lengths, 3 * bench.repeats).scaled(1e3)


def chats(bench: Bench) -> Spread:
    lengths = chat(bench.n(1000)).lengths
    # the rows get fewer so slowly that each size of a step is captured in the first run
    return bench.seconds(lengths, lengths, warmups=1)


def long_prompts(bench: Bench) -> Spread:
    return bench.seconds(bench.requests(16, 6144, 256), bench.requests(16, 2048, 32))


ROWS = (
    *(decode(batch) for batch in (1, 8, 32, 64, 128, 256)),
    rate("prefill", "prefill, 32 x 4,096", 32, (4096, 1), (8, (4096, 1))),
    Row("first_token", "first token of one 512-token prompt", "ms", first_token),
    Row("chat", "chat mix, 1,000 at once", "s", chats),
    rate("throughput", "512 x (1,024 in, 128 out), in + out", 512, (1024, 128), (128, (1024, 32))),
    Row("long", "16 x (6,144 in, 256 out)", "s", long_prompts),
)
STARTS = tuple(
    Row(f"start_{kind}", f"process start to ready, {what}", "s", None)
    for kind, what in (("cold", "nothing compiled"), ("warm", "kernels compiled"))
)


# --- the GPU's own ceilings --------------------------------------------------------------------------------------

COPY_BYTES = 2 << 30
SIDE = 8192
HIDDEN, INNER, QKV = 4096, 14336, 6144
"""The sizes of Llama-3.1-8B."""
LINEARS = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
"""(in, out) of one layer: 436 MB in bf16, more than any cache holds."""
LINEAR_ROWS = (16, 256, 2048)


@torch.inference_mode()
def ceilings() -> Iterator[tuple[str, float]]:
    """Yields the best rates of this GPU: memory copies, one large matmul, and one layer's linears through cuBLAS."""
    yield "copy_tb_s", copy()
    yield "matmul_tflop_s", matmul()
    yield "int8_tflop_s", matmul_of_codes(torch.int8)
    if torch.cuda.get_device_capability() >= (8, 9):
        yield "fp8_tflop_s", matmul_of_codes(torch.float8_e4m3fn)
    weights = [torch.randn(size, width, dtype=torch.bfloat16, device="cuda") * 0.02 for width, size in LINEARS]
    for rows in LINEAR_ROWS:
        inputs = [torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device="cuda") for weight in weights]
        yield f"linears_{rows}_us", layer(inputs, weights)


def copy() -> float:
    """Returns TB/s, read and written, within the GPU's memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds(lambda: target.copy_(source)) / 1e6


def matmul() -> float:
    """Returns TFLOP/s of one square bf16 product of random data."""
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * SIDE**3 / microseconds(lambda: left @ right) / 1e6


def matmul_of_codes(kind: torch.dtype) -> float:
    """Returns T(FL)OP/s of one square product of random codes, float8_e4m3fn or int8."""
    left, right = (torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8, device="cuda") for _ in range(2))
    if kind == torch.int8:
        return 2 * SIDE**3 / microseconds(lambda: torch._int_mm(left, right.t())) / 1e6
    left, right = ((matrix.half() / 32).to(kind) for matrix in (left, right))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * SIDE**3 / microseconds(product) / 1e6


def layer(inputs: list[torch.Tensor], weights: list[torch.Tensor], rounds: int = 8) -> float:
    """The microseconds of one pass over the linears, in a graph of `rounds`, so that the host does not count."""

    def work() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            work()
    return microseconds(graph.replay) / rounds


def microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Returns the median of `repeats` on the GPU's own clock, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


# --- the run -----------------------------------------------------------------------------------------------------


def config_of(options: argparse.Namespace) -> Config:
    """Returns the settings of this run, as `llmcore serve` would take them."""
    model = options.model if os.path.sep in options.model else str(CONFIGS / options.model)
    given: dict[str, Any] = {**SETTINGS, "model_dir": model}
    for text in options.set:
        name, _, value = text.partition("=")
        given[name] = [*given[name], value] if isinstance(given.get(name), list) else [value]
    given = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in given.items()}
    plugins = given.get("plugins")
    listed = tuple(plugins) if isinstance(plugins, list) else (plugins,) if plugins else None
    registry = build_registry(Config(discovered=select(listed).plugins))
    config, _ = resolve_config(given, {}, {}, extra=[spec for spec, _ in registry.specs(OptionSpec)])
    return replace(config, discovered=registry.offered)


def start_apart(environment: Mapping[str, str]) -> tuple[float, float]:
    """The seconds until an engine in a new process was ready: since the process began, and those of building it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--start-only"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    began, building = done.stdout.splitlines()[-1].split()
    return float(began), float(building)


def measure(rows: Sequence[Row], bench: Bench) -> dict[str, Spread]:
    """Measures every row and prints it at once. A row that fails ends the measuring, not the script."""
    found: dict[str, Spread] = {}
    for row in rows:
        if row.measure is None:
            continue
        began = time.perf_counter()
        try:
            found[row.key] = row.measure(bench)
        except Exception:  # noqa: BLE001 - the rows before it are worth printing
            print(f"{row.title}: FAILED\n{traceback.format_exc()}", flush=True)
            break
        print(f"{row.title}: {found[row.key]} {row.unit}, in {time.perf_counter() - began:.0f} s", flush=True)
        if bench.rare:
            print(f"  {bench.rare} steps were launched or captured although a CUDA graph can run them", flush=True)
        if bench.host and row.key == "prefill" and torch.cuda.is_available():
            host, step = (statistics.median(column) for column in zip(*bench.host, strict=True))
            verdict = "ok" if host <= HOST_MOST * step else f"MISSED: at most {HOST_MOST:.0%}"
            print(
                f"  the host works {host:.2f} ms of {step:.2f} ms per step, {host / step:.0%}: {verdict}", flush=True
            )
    return found


def table(
    rows: Sequence[Row], found: dict[str, Spread], peers: dict[str, Any], beside: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Returns lines: our figure, what must and should be reached, the best other figure, and whether we reach it.

    `beside`: the rows of another run, which marks like "1.03x" multiply. Without them such marks do not count.
    """

    def absolute(mark: Any, key: str) -> Any:
        known = isinstance(mark, str) and key in beside
        return round(float(mark[:-1]) * beside[key]["median"], 2) if known else mark

    layout = "{:<38} {:>28} {:>8} {:>8} {:>8}  {:<17} {:>8}  {}"
    lines = [layout.format("row", "median (lowest-highest)", "must", "aim", "peer", "", "to peer", "")]
    for row in rows:
        line, got = peers.get(row.key, {}), found.get(row.key)
        must, aim, peer = (absolute(line.get(name), row.key) for name in ("must", "aim", "peer"))
        verdict, gain = "not measured", ""
        if got is not None:
            reached = [
                name
                for name, mark in (("aim", aim), ("must", must))
                if isinstance(mark, (int, float)) and row.better * (got.median - mark) >= 0
            ]
            verdict = reached[0] if reached else "MISSED" if isinstance(must, (int, float)) else ""
            gain = f"{row.better * (got.median / peer - 1):+.1%}" if peer else ""
        shown = (f"{mark:,}" if isinstance(mark, (int, float)) else mark or "" for mark in (must, aim, peer))
        lines.append(
            layout.format(row.title, f"{got or '-'} {row.unit}", *shown, line.get("engine", ""), gain, verdict)
        )
    return lines


def beside_cost(rows: Sequence[Row], found: Mapping[str, Spread], predicted: Mapping[str, float]) -> list[str]:
    """Returns a line per measured row that the model of cost predicts: by how much the figure is off."""
    lines = []
    for row in rows:
        if row.key in predicted and row.key in found:
            off = found[row.key].median / predicted[row.key] - 1
            verdict = "ok" if abs(off) <= cost.WITHIN else f"MISSED: within {cost.WITHIN:.0%}"
            lines.append(f"model of cost, {row.title}: {predicted[row.key]:,.4g} {row.unit}, {off:+.1%}: {verdict}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [row.key for row in (*STARTS, *ROWS)]
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--rows", nargs="+", choices=keys, default=keys, help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="the --json of a run whose figures marks multiply")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    config = config_of(options)
    if options.start_only:
        with BenchEngine(config) as engine:
            print(engine.since_start, engine.ready)
        return 0
    rows = [row for row in (*ROWS, *STARTS) if row.key in options.rows]
    found: dict[str, Spread] = {}
    with tempfile.TemporaryDirectory() as fresh:
        if "start_cold" in options.rows:
            os.environ["TRITON_CACHE_DIR"] = fresh
        for row in STARTS:
            if row in rows:
                began, building = start_apart(os.environ)
                found[row.key] = Spread.of([began])
                print(f"{row.title}: {began:.1f} s, of which {building:.1f} s to build the engine", flush=True)
        return run(options, config, rows, found)


def run(options: argparse.Namespace, config: Config, rows: Sequence[Row], found: dict[str, Spread]) -> int:
    """Runs everything in this process. Returns 0 if every row was measured."""
    limits: dict[str, float] = {}
    modes = config.kernels.mode  # which peers.json knows by name
    if torch.cuda.is_available():
        limits.update(ceilings())
        torch.cuda.empty_cache()
    with BenchEngine(config) as engine:
        report = dict(engine.facts.report)
        for label, text in report.items():
            print(f"{label}: {text}")
        print(f"ready: {engine.ready:.1f} s to build\n", flush=True)
        found |= measure(rows, Bench(engine, options.repeats, options.shrink))
        known, ready = versions(engine.registry), engine.ready
    chip = next((name for name in ("H200", "H100") if name in report["device"]), "H200")
    beside = json.loads(options.beside.read_text())["rows"] if options.beside else {}
    model = Path(options.model).name
    ranks = [f"tp={config.model.tp}"] if config.model.tp > 1 else []
    name = " ".join([model, *ranks, *sorted(modes)])
    peers = PEERS.get(name, {} if ranks else PEERS.get(model, {})).get(chip, {})
    print(f"\n{name} on {report['device']}, {machine()['cpu']}; peers on {chip}")
    print(", ".join(f"{name} {version}" for name, version in known.items()))
    for name, value in limits.items():
        print(f"ceiling {name}: {value:,.2f} (the peers' run: {PEERS['ceilings'][chip].get(name, '-')})")
    print("\n".join(table(rows, found, peers, beside)), flush=True)
    if "H200" in report["device"] and not modes:
        print("\n".join(beside_cost(rows, found, cost.predicted(config.model.path, config.model.ranks))), flush=True)
    if options.json:
        content = {
            "model": options.model,
            "settings": options.set,
            "machine": machine(),
            "versions": known,
            "engine": report,
            "ready_s": ready,
            "ceilings": limits,
            "rows": {key: asdict(spread) for key, spread in found.items()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if len(found) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
