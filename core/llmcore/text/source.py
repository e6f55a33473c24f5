"""Which tokenizer a model gets: chosen among what plugins contribute, converted first where it must be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from llmcore.errors import ConfigError
from llmcore.plugins import load
from llmcore.protocols import Tokenizer
from llmcore.specs import TokenizerSpec
from llmcore.text.convert import convert

log = logging.getLogger(__name__)


def choose(specs: Sequence[TokenizerSpec], model: Path, mode: str) -> TokenizerSpec:
    """The spec of the highest priority that recognises `model`; of equal ones the first by name.

    `mode` is `--tokenizer_mode`. A model without a slow tokenizer gets the fast one, with a warning that says so.
    Raises ConfigError when nothing recognises the model.
    """
    fitting = [spec for spec in specs if load(spec.sniff)(model)]
    if not fitting:
        known = ", ".join(sorted(spec.name for spec in specs)) or "none"
        raise ConfigError(
            f"no tokenizer found for {model}; it needs tokenizer.json or another format that a plugin reads "
            f"(known: {known})"
        )
    wanted = "slow" if mode == "slow" else "fast"
    preferred = [spec for spec in fitting if spec.mode == wanted]
    chosen = min(preferred or fitting, key=lambda spec: (-spec.priority, spec.name))
    if not preferred:
        log.warning("--tokenizer_mode %s: %s has no %s tokenizer; %r is used", mode, model.name, wanted, chosen.name)
    return chosen


def prepare(
    specs: Sequence[TokenizerSpec], model: Path, mode: str, out: Path, *, trust_remote_code: bool = False
) -> Path:
    """The directory that HTTP workers load their tokenizer from: the model's own, or `out` after a conversion."""
    spec = choose(specs, model, mode)
    if spec.convert is None:
        return model
    return convert(spec.convert, model, out, trust_remote_code=trust_remote_code)


def open_tokenizer(specs: Sequence[TokenizerSpec], directory: Path, mode: str) -> Tokenizer:
    """The tokenizer in a directory that `prepare` returned."""
    spec = choose([spec for spec in specs if spec.load is not None], directory, mode)
    opener: Callable[[Path], Tokenizer] = load(spec.load or "")
    return opener(directory)
