"""Choose a model's tokenizer among those that plugins contribute, and convert it if necessary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from llmcore.api.errors import ConfigError
from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import OutputParserSpec, TokenizerSpec
from llmcore.config import Model
from llmcore.registry.loader import load
from llmcore.text.byte_tokenizer import write_stand_in
from llmcore.text.chosen_template import Templated, choose_template
from llmcore.text.companions import read_companions
from llmcore.text.convert import convert

log = logging.getLogger(__name__)


def choose(specs: Sequence[TokenizerSpec], model: Path, mode: str) -> TokenizerSpec:
    """The spec with the highest priority that recognises `model`; of equal ones, the first by name.

    `mode` is `--tokenizer_mode`. A model without a slow tokenizer gets the fast one, with a warning. Raises
    ConfigError if no spec recognises the model.
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


def prepare(specs: Sequence[TokenizerSpec], config: Model, model: Path, out: Path) -> Path:
    """The directory from which HTTP workers load the tokenizer: `model`, or `out` with a converted tokenizer.

    With dummy weights and without a tokenizer, `out` gets a byte tokenizer.
    """
    if config.load_format == "dummy" and not any(load(spec.sniff)(model) for spec in specs):
        log.warning("%s has no tokenizer; one id per byte stands in for it", model.name)
        return write_stand_in(out)
    spec = choose(specs, model, config.tokenizer_mode)
    if spec.convert is None:
        return model
    return convert(spec.convert, model, out, trust_remote_code=config.trust_remote_code)


def open_tokenizer(
    specs: Sequence[TokenizerSpec],
    directory: Path,
    mode: str,
    chat_template: str | None = None,
    parsers: Sequence[OutputParserSpec] = (),
) -> Tokenizer:
    """The tokenizer in a directory that `prepare` returned.

    `chat_template`: the value of the option, which may name the template of one of `parsers`.
    """
    spec = choose([spec for spec in specs if spec.load is not None], directory, mode)
    opener: Callable[[Path], Tokenizer] = load(spec.load or "")
    tokenizer = opener(directory)
    if chat_template is None:
        return tokenizer
    templated: Any = Templated(tokenizer, choose_template(chat_template, parsers), read_companions(directory).tokens)
    return cast(Tokenizer, templated)
