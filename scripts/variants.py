"""Lists the kernels that would be compiled while requests are served, because the start met none like them. No GPU.

    OMP_NUM_THREADS=1 python scripts/variants.py [--model llama-3.1-8b ...] [--steps 1000] [--mode NAME ...] [--narrow]

A compilation takes a second, in which all requests wait. Triton compiles a kernel for its compile-time arguments, the
types of the others, and whether addresses and integers are multiples of 16. An engine with few layers on
pretended_gpu.py runs the steps of a start. Then it runs requests that draw in every way, of random lengths at random
times. The script lists the variants that are new in these, each beside the nearest known one. Exit code 1 if there are
any.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pretended_gpu
import torch
from llmcore.api import SamplingParams
from llmcore.api.bridge import LengthDecay
from llmcore.engine.profile import measure, run_worst_case, warm_up

LENGTH = 4096
WAYS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.7, top_p=0.9, typical_p=0.95),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={5: 1.0}),
    SamplingParams(temperature=0.7, allowed_ids=(5, 6, 7)),
    SamplingParams(temperature=0.7, length_decay=LengthDecay(1, 1.1, (3,))),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.7, logprobs=5),
)

Variant = tuple[tuple[str, object], ...]


def variant_of(kernel: Any, arguments: Sequence[Any], fixed: Mapping[str, Any]) -> Variant:
    """Returns everything that Triton compiles `kernel` for in a launch, by name."""
    named = [
        (parameter.name, _kind(parameter, value)) for parameter, value in zip(kernel.params, arguments, strict=False)
    ]
    return (("kernel", kernel.__name__), *sorted((name, str(value)) for name, value in fixed.items()), *named)


def _kind(parameter: Any, value: Any) -> object:
    if isinstance(value, torch.Tensor):
        told = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        return value.dtype, None if told else value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        wide = value.bit_length() > 31
        return wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0)
    return type(value).__name__, *getattr(value, "block_shape", ())


class Launches:
    """The variants of all kernels launched so far, and those of `serving` that the start did not meet."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.known: set[Variant] = set()
        self.serving = False
        self.news = 0
        launch = JITFunction.run

        def seen(kernel: Any, *arguments: Any, **fixed: Any) -> Any:
            options = {name: value for name, value in fixed.items() if name not in ("grid", "warmup")}
            self._see(variant_of(kernel, arguments, options))
            return launch(kernel, *arguments, **fixed)

        JITFunction.run = seen

    def _see(self, variant: Variant) -> None:
        if variant in self.known:
            return
        if self.serving:
            self.news += 1
            near = min(map(frozenset, self.known), key=lambda other: len(other ^ set(variant)), default=frozenset())
            unlike = {name for name, _ in near ^ set(variant)}
            was, now = ({name: value for name, value in one if name in unlike} for one in (near, variant))
            print(f"  {variant[0][1]}: {now}, known: {was}", flush=True)
        self.known.add(variant)


def requests_of(bench: Any, steps: int, launches: Launches) -> None:
    """Serve requests: each way to draw alone, then all of them at once."""
    engine, chance = bench.engine, random.Random(7)

    def ask(prompt: int, answer: int, way: SamplingParams) -> None:
        engine.submit(msgspec.structs.replace(bench.request(prompt, answer), sampling=way))

    launches.serving = True
    for way in WAYS:
        for prompt in (7, 300, 700, 40):
            ask(prompt, 5, way)
            for _ in range(4):
                engine.step()
        while not engine.idle:
            engine.step()
    for step in range(steps):
        for _ in range(chance.choice((1, 2, 3, 8)) if chance.random() < 0.1 else 0):
            lengths = chance.lognormvariate(4.6, 1.4), chance.lognormvariate(4.2, 1.2)
            # greedy rows alone, so that their steps are captured, and others beside them
            way = WAYS[0] if step < steps // 2 else chance.choice(WAYS)
            ask(max(4, min(3000, int(lengths[0]))), max(1, min(600, int(lengths[1]))), way)
        engine.step()


def report(model: str, sizes: Mapping[str, int], mode: Sequence[str], steps: int, launches: Launches) -> None:
    """Print one model's variants."""
    settings = {
        "mode": mode,
        "max_req_total_len": LENGTH,
        "max_total_token_num": 60_000,
        "batch_max_tokens": 8192,
        "running_max_req_size": 256,
    }
    launches.known, launches.serving, before = set(), False, launches.news
    with pretended_gpu.engine_of(model, sizes, **settings) as bench:
        runner, limits = bench.engine._runner, bench.engine._scheduler.limits
        granules = tuple(group.layout.granule for group in runner.groups)
        with torch.inference_mode():
            measure(runner, runner._device, limits, granules)
            run_worst_case(runner, runner._device, limits, granules)
            warm_up(runner, runner._device, limits)
        print(f"{model}: {len(launches.known)} variants at the start", flush=True)
        requests_of(bench, steps, launches)
    print(f"{model}: {launches.news - before} new ones while requests were served")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["llama-3.1-8b", "deepseek-v2-lite"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--narrow", action="store_true", help="of narrow tensors: quicker, other tables of kernels")
    parser.add_argument("--mode", nargs="*", default=[], help="as in llmcore serve")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pretended_gpu.pretend()
    sizes = (pretended_gpu.NARROW if options.narrow else {}) | {"num_hidden_layers": options.layers}
    launches = Launches()
    for model in options.model:
        report(model, sizes, options.mode, options.steps, launches)
    return int(launches.news > 0)


if __name__ == "__main__":
    sys.exit(main())
