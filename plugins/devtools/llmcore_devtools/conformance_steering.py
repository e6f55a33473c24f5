"""Conformance of logits processors: does each keep its protocol? Torch is imported only for device processors."""

from __future__ import annotations

import copy
import importlib
import math
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llmcore.api.processors import LogitsProcessorSpec, ProcessorContext, words_of
from llmcore.api.protocols import Int32, Tokenizer
from llmcore.api.specs import TokenizerSpec
from llmcore.registry.registry import Registry
from llmcore.text.source import open_tokenizer

from llmcore_devtools.conformance import all_problems, check_each, loaded
from llmcore_devtools.tokenizer import EOS, write_tokenizer

VOCAB = 300
"""More than the tokenizer has, as in many models, and not a multiple of 32."""
_STEPS = 40
_PROMPT = (72, 101, 108)
_UNKNOWN = {"no such argument": [3, None]}


def check_register_logits_processors(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Each processor keeps its protocol over random tokens, with its `example`, and refuses other arguments."""
    random, context = np.random.default_rng(0), _context(registry)

    def check(spec: LogitsProcessorSpec) -> None:
        make = loaded(spec.make, "make")
        with all_problems() as problems:
            with problems.of():
                _check_refusal(make, context)
            start = make(copy.deepcopy(dict(spec.example)), context)
            assert callable(start), f"make returned a {type(start).__name__}, needs start(prompt)"
            for run in range(3):
                prompt = np.array(_PROMPT[: run + 1], np.int32)
                if spec.kind == "device":
                    _check_device(start(prompt))
                else:
                    _check_host(start, prompt, spec.kind, random)

    return check_each(registry, plugin, LogitsProcessorSpec, "logits processor", check)


def _check_refusal(make: Any, context: ProcessorContext) -> None:
    try:
        make(dict(_UNKNOWN), context)
    except ValueError as error:
        assert str(error), "it refuses arguments and does not say why"
    else:
        raise AssertionError(f"it takes {_UNKNOWN}; it must refuse unknown arguments with a ValueError")


def _context(registry: Registry) -> ProcessorContext:
    @cache
    def tokenizer() -> Tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            return open_tokenizer(
                [spec for spec, _ in registry.specs(TokenizerSpec)], write_tokenizer(Path(folder)), "fast"
            )

    return ProcessorContext(VOCAB, (EOS,), tokenizer)


def _check_host(start: Any, prompt: Int32, kind: str, random: np.random.Generator) -> None:
    """Run two choices side by side: the tokens of one must not change the other."""
    one, other = start(prompt.copy()), start(prompt.copy())
    fresh = _said(other, kind)
    for _ in range(_STEPS):
        allowed = _said(one, kind)
        token = int(random.choice(allowed))
        one.accept(token)
        finished = one.finished()
        assert isinstance(finished, bool), f"finished() returned a {type(finished).__name__}"
        if finished:
            break
    assert np.array_equal(_said(other, kind), fresh), "choices of one request share their state"


def _said(processor: Any, kind: str) -> Int32:
    """Tokens that the processor allows."""
    if kind == "bias":
        bias = processor.bias()
        for token, value in bias.items():
            assert 0 <= token < VOCAB, f"its bias names token {token} of {VOCAB}"
            assert value < math.inf, f"its bias of token {token} is {value}"
        return np.array([t for t in range(VOCAB) if bias.get(t, 0.0) > -math.inf], np.int32)
    mask = processor.mask()
    if mask is None:
        return np.arange(VOCAB, dtype=np.int32)
    count = words_of(VOCAB)
    assert mask.shape == (count,) and mask.dtype in (np.int32, np.uint32), (
        f"its mask is {mask.dtype} {list(mask.shape)}, needs int32 [{count}]"
    )
    tokens = np.arange(VOCAB)
    allowed = np.flatnonzero(mask.view(np.uint32)[tokens // 32] >> (tokens % 32).astype(np.uint32) & 1)
    assert allowed.size, "its mask allows no token"
    return allowed.astype(np.int32)


def _check_device(processor: Any) -> None:
    torch = importlib.import_module("torch")
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    ids = torch.full((16,), -1, dtype=torch.int32)
    ids[: len(_PROMPT)] = torch.tensor(_PROMPT, dtype=torch.int32)
    given = logits.clone()
    first, again = (processor(given, ids, torch.tensor(len(_PROMPT), dtype=torch.int32)) for _ in range(2))
    assert torch.equal(given, logits), "it writes into the logits; return others"
    assert first.shape == logits.shape, f"it returned {list(first.shape)} for {list(logits.shape)} scores"
    assert bool((first < math.inf).all()), "it returned NaN or plus infinity"
    assert bool((first > -math.inf).any()), "it forbids every token"
    assert torch.equal(first, again), "it returned something else the second time; it must have no state"
