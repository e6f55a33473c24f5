"""The model of cost: the times of steps of a dense model in bf16, on one H200 and on two.

    python benchmarks/cost.py [--model llama-3.1-70b] [--tp 2]

Constants with a physical meaning are fit to measured steps of Llama-3.1-8B on one GPU and on two (measured.json names
the source of each figure). The script prints the constants, the measured steps beside those of the model, and what the
model predicts for `--model`. No GPU is needed. `benchmarks/gpu.py` prints the predictions beside what it measures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs"
MEASURED: dict[str, dict[str, Any]] = json.loads((HERE / "measured.json").read_text())
CEILINGS = json.loads((HERE / "peers.json").read_text())["ceilings"]["H200"]

FITTED = "llama-3.1-8b"
WITHIN = 0.08
"""The model counts as right if a measured row is off by no more than this share."""

BYTES = 2
"""Of a weight, of an activation, and of a number of KV."""
READ = CEILINGS["copy_tb_s"] * 1e12
"""Bytes/s at which weights are read: the measured rate of copies."""
MULTIPLY = CEILINGS["matmul_tflop_s"][0] * 1e12
"""FLOP/s of linears: the measured rate of a large matmul."""
ATTEND = MULTIPLY / 2
"""FLOP/s of attention over prompts: half of that, because softmax and products take turns."""
STEP = 50e-6
"""Seconds of a step for its inputs, its draw and its outputs."""
KERNELS, NORMS = 7, 2
"""Kernels of a layer. With several ranks the sums do the work of the norms."""
TILED = 5
"""Those of them that take another form as soon as there is more than one row: four linears, and attention."""
SLOT = 64 << 20
"""Bytes of a sum that go at once."""
PROMPT, ANSWER, BATCH_TOKENS, LONG_PROMPT = 512, 129, 8192, 4096
"""The tokens of benchmarks/gpu.py: of its decode rows, and of a prefill step and of each prompt in it."""


@dataclass(frozen=True)
class Constants:
    """The constants that are fit.

    `launch`: seconds of a kernel besides its work. `tile`: seconds more for a kernel over several rows.
    `kv`: bytes/s at which decode attention reads KV. `rows`: bytes/s at which small kernels read and write rows.
    `wait`: with several ranks, the share of a step's work that is added, because ranks wait for the slower one and
      kernels of half the size fill a GPU less well.
    """

    launch: float = 1e-6
    tile: float = 1e-6
    kv: float = 4e12
    rows: float = 2e12
    wait: float = 0.05


UNITS = {
    **dict.fromkeys(("launch", "tile"), (1e6, "us")),
    **dict.fromkeys(("kv", "rows"), (1e-12, "TB/s")),
    "wait": (1e2, "%"),
}
"""Constant -> the factor and the unit in which it is shown."""


@dataclass(frozen=True)
class Sizes:
    """A dense model: the fields of its config.json that count."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int

    @staticmethod
    def of(folder: Path) -> Sizes | None:
        """Those of a model directory; None if the model is not a dense one of this form."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if config.get("model_type") not in ("llama", "mistral", "qwen2", "qwen3"):
            return None
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        return Sizes(**{one.name: config[one.name] for one in fields(Sizes)})


@dataclass(frozen=True)
class Work:
    """A step of `rows` tokens, `samples` of which are sampled, each after `context` tokens. `prompts`: they are all of
    prompts, whose attention multiplies; else each row reads its KV."""

    rows: int
    samples: int
    context: float
    prompts: bool


ROWS: Mapping[str, Work] = {
    **{f"decode_{n}": Work(n, n, PROMPT + ANSWER / 2, False) for n in (1, 8, 32, 64, 128, 256)},
    "prefill": Work(BATCH_TOKENS, BATCH_TOKENS // LONG_PROMPT, LONG_PROMPT / 2, True),
}
"""The rows of benchmarks/gpu.py that the model knows."""


def sum_seconds(size: int) -> float:
    """Seconds of a sum of `size` bytes over two ranks, with the residual and the norm, from measured ones."""
    known = sorted((float(kib) * 1024, us * 1e-6) for kib, us in MEASURED["sums tp=2"]["rows"].items())
    whole, rest = divmod(size, SLOT)
    return whole * known[-1][1] + (float(np.interp(rest, *zip(*known, strict=True))) if rest else 0.0)


@dataclass(frozen=True)
class Model:
    """The model of cost of a model's steps on `ranks` ranks."""

    sizes: Sizes
    ranks: int
    constants: Constants = field(default_factory=Constants)

    def seconds(self, work: Work) -> float:
        """Of one step."""
        of, constants, alone = self.sizes, self.constants, self.ranks == 1
        layer = self._linears(work.rows) + self._attention(work) + self._moved(work.rows) / constants.rows
        layer += (KERNELS + NORMS * alone) * constants.launch + TILED * constants.tile * (work.rows > 1)
        head = self._multiplied(of.hidden_size * of.vocab_size, work.samples) + constants.launch
        head += 2 * BYTES * work.samples * of.vocab_size / self.ranks / constants.rows
        sums = 0.0 if alone else NORMS * sum_seconds(BYTES * work.rows * of.hidden_size)
        waits = 1.0 if alone else 1 + constants.wait
        return (of.num_hidden_layers * layer + head) * waits + of.num_hidden_layers * sums + STEP

    def row(self, name: str) -> float:
        """The figure of a row of benchmarks/gpu.py: milliseconds of a decode step, or tokens/s of prompts."""
        seconds = self.seconds(ROWS[name])
        return ROWS[name].rows / seconds if ROWS[name].prompts else 1e3 * seconds

    def _multiplied(self, weights: int, rows: int) -> float:
        """Seconds of linears: their reads and their products overlap in part, so squares are added."""
        return math.hypot(BYTES * weights / READ, 2 * weights * rows / MULTIPLY) / self.ranks

    def _linears(self, rows: int) -> float:
        of, heads = self.sizes, self.sizes.num_attention_heads
        attention = of.hidden_size * of.head_dim * 2 * (heads + of.num_key_value_heads)
        return self._multiplied(attention + 3 * of.hidden_size * of.intermediate_size, rows)

    def _attention(self, work: Work) -> float:
        of = self.sizes
        if work.prompts:
            return 4 * work.rows * work.context * of.num_attention_heads * of.head_dim / self.ranks / ATTEND
        kv_heads = max(1.0, of.num_key_value_heads / self.ranks)
        return work.rows * work.context * 2 * BYTES * kv_heads * of.head_dim / self.constants.kv

    def _moved(self, rows: int) -> float:
        """Bytes that the other kernels of a layer read and write: rope and KV, what linears leave, and the norms."""
        of = self.sizes
        heads = of.num_attention_heads + of.num_key_value_heads
        cut = 4 * heads * of.head_dim + 3 * of.intermediate_size
        normed = 4 * NORMS * of.hidden_size if self.ranks == 1 else 0
        return BYTES * rows * (cut / self.ranks + normed)


def fitted_rows() -> Iterator[tuple[int, str, float]]:
    """(ranks, row, figure) of every measured row of the fitted model."""
    for ranks in (1, 2):
        measured = MEASURED[FITTED if ranks == 1 else f"{FITTED} tp={ranks}"]["rows"]
        yield from ((ranks, name, measured[name]) for name in ROWS)


def fit() -> Constants:
    """The constants with the least sum of squared relative errors over `fitted_rows` (Gauss-Newton on logarithms)."""
    sizes, rows, tiny = Sizes.of(CONFIGS / FITTED), list(fitted_rows()), 1e-4
    assert sizes is not None

    def errors(logs: Any) -> Any:
        constants = Constants(*map(float, np.exp(logs)))
        return np.array([math.log(Model(sizes, ranks, constants).row(name) / figure) for ranks, name, figure in rows])

    logs = np.log(astuple(Constants()))
    for _ in range(60):
        now = errors(logs)
        slopes = np.stack([(errors(logs + tiny * one) - now) / tiny for one in np.eye(len(logs))], 1)
        logs = logs - 0.5 * np.linalg.lstsq(slopes, now, rcond=None)[0]
    return Constants(*map(float, np.exp(logs)))


def predicted(folder: Path, ranks: int) -> dict[str, float]:
    """Row of benchmarks/gpu.py -> the figure for bf16 on one H200 or two; {} for models that it is not for."""
    sizes = Sizes.of(folder) if ranks in (1, 2) else None
    if sizes is None:
        return {}
    model = Model(sizes, ranks, fit())
    return {name: model.row(name) for name in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-70b", help="a name in benchmarks/configs")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=2)
    options = parser.parse_args()
    print("constant    value          from")
    for name, value in zip(UNITS, astuple(fit()), strict=True):
        factor, unit = UNITS[name]
        print(f"{name:<8} {value * factor:>8.3g} {unit:<5}  the fit")
    for name, value in (("read", READ), ("multiply", MULTIPLY), ("attend", ATTEND)):
        print(f"{name:<8} {value * 1e-12:>8.4g} T/s    peers.json, ceilings of an H200")
    for name in (FITTED, f"{FITTED} tp=2", "sums tp=2"):
        print(f"{name}: {MEASURED[name]['source']}")
    print(f"\n{FITTED:<14} {'row':<12} {'measured':>10} {'model':>10}")
    at = {ranks: predicted(CONFIGS / FITTED, ranks) for ranks in (1, 2)}
    for ranks, name, figure in fitted_rows():
        off = at[ranks][name] / figure - 1
        print(f"{f'tp={ranks}':<14} {name:<12} {figure:>10,.5g} {at[ranks][name]:>10,.5g}  {off:+.1%}")
    print(f"\n{options.model}, tp={options.tp}, predicted:")
    for name, figure in predicted(CONFIGS / options.model, options.tp).items():
        print(f"{'':<14} {name:<12} {figure:>10,.4g} {'tokens/s' if ROWS[name].prompts else 'ms'}")


if __name__ == "__main__":
    main()
