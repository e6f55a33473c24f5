"""The tokenizer of a model: choose it among those that plugins contribute, convert it once, open it.

A tokenizer that only transformers or a plugin can read becomes a directory with tokenizer.json and its companions. So
long-running processes import only the `tokenizers` package. The conversion runs in a process of its own, which then
exits: `python -m llmcore.text.source PARENT CONVERTER MODEL OUT [--trust-remote-code]`.
"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from llmcore.api.errors import ConfigError
from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import ImportString, OutputParserSpec, TokenizerSpec
from llmcore.config import Model
from llmcore.config.process import die_with_parent, memory_note, shortage_of
from llmcore.registry.loader import load
from llmcore.text.chosen_template import choose_template
from llmcore.text.companions import read_companions
from llmcore.text.templates import Renderer

log = logging.getLogger(__name__)

_TRUST = "--trust-remote-code"
_SECONDS = 600

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
    ConfigError if no spec recognises the model, or none reads the slow tokenizer that it has.
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
    if wanted == "slow" and not preferred and (model / "tokenizer.model").is_file():
        raise ConfigError(
            "--tokenizer_mode slow needs a plugin that reads tokenizer.model: pip install plugin-sentencepiece (where "
            "--plugins names plugins, name it there), or leave the option out"
        )
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
    return cast(Tokenizer, Templated(tokenizer, template, chosen.stop_words))


def write_stand_in(out: Path) -> Path:
    """Write a tokenizer with one id per byte, 0 to 255, and a plain chat template to directory `out` and return it."""
    out.mkdir(parents=True, exist_ok=True)
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Backend(models.BPE(vocab={text: i for i, text in enumerate(bytes_as_text)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return out


# --- conversion --------------------------------------------------------------------------------------------------


def convert(converter: ImportString, model: Path, out: Path, *, trust_remote_code: bool = False) -> Path:
    """Run `converter` on `model` in a child process, which fills `out`; returns `out`.

    If the child fails, raises ConfigError with the last line of its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", __name__, str(os.getpid()), converter, str(model), str(out)]
    try:
        done = subprocess.run(
            command + [_TRUST] * trust_remote_code, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the tokenizer of {model} was not converted within {_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}{memory_note()}").splitlines()[-1]
        raise ConfigError(f"the tokenizer of {model} cannot be converted: {reason}")
    if not (out / "tokenizer.json").is_file():
        raise ConfigError(f"{converter} wrote no tokenizer.json for {model}; report it to the plugin's authors")
    return out


def main(arguments: list[str]) -> None:
    """Run the conversion. If it fails for a known reason, the last line of the output says why.

    The converter is called with (model, out), and with `trust_remote_code` if it takes that argument.
    """
    parent, converter, model, out = arguments[:4]
    die_with_parent(int(parent))
    try:
        function = load(converter)
        takes_trust = "trust_remote_code" in inspect.signature(function).parameters
        function(Path(model), Path(out), **({"trust_remote_code": _TRUST in arguments[4:]} if takes_trust else {}))
    except ConfigError as error:
        sys.exit(str(error))
    except BaseException as error:
        if shortage := shortage_of(error):
            sys.exit(shortage)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
