"""Choose a model's tokenizer among those that plugins contribute, and convert it if necessary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llmcore.config import Model
from llmcore.errors import ConfigError
from llmcore.plugins import load
from llmcore.protocols import Tokenizer
from llmcore.specs import OutputParserSpec, TokenizerSpec
from llmcore.text.byte_tokenizer import write_stand_in
from llmcore.text.chosen_template import choose_template
from llmcore.text.companions import read_companions
from llmcore.text.convert import convert
from llmcore.text.templates import Renderer

log = logging.getLogger(__name__)


class Templated:
    """A `protocols.Tokenizer`: `inner` with another chat template. `stop_words` end every answer."""

    def __init__(self, inner: Tokenizer, template: Renderer, stop_words: Sequence[str] = ()) -> None:
        self._inner = inner
        self.template = template
        self.stop_words = stop_words

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt that the template renders. Raises RequestError with the template's own message."""
        return self.template.render(messages, **variables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


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
    chosen = choose_template(chat_template, parsers)
    template = chosen.with_tokens(read_companions(directory).tokens)
    templated: Any = Templated(tokenizer, template, chosen.stop_words)
    return cast(Tokenizer, templated)
