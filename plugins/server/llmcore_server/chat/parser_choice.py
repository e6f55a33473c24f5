"""The choice of a server's output parsers: those that its options name, or those that recognise the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import OutputParserSpec
from llmcore.config import Model
from llmcore.text.chosen_template import choose_template, named_templates
from llmcore.text.companions import read_companions

from llmcore_server.chat.request_parsing import OutputParsers, open_parser

_OPTIONS = {"tool": "tool_call_parser", "reasoning": "reasoning_parser"}
_UNRECOGNISED = "no parser recognises the chat template"
_SHOWN = {"tool": "tool calls", "reasoning": "reasoning"}


@dataclass(frozen=True)
class ParserChoice:
    """The chosen parser of each kind, or None, and the reason."""

    specs: Mapping[str, OutputParserSpec | None]
    reasons: Mapping[str, str]

    @property
    def unread(self) -> tuple[str, ...]:
        """The kinds for which no parser recognised the chat template."""
        return tuple(kind for kind, reason in self.reasons.items() if reason == _UNRECOGNISED)

    def named(self, config: Model) -> Model:
        """`config` with this choice in its options, so that other processes do not choose again."""
        names = {_OPTIONS[kind]: "none" if spec is None else spec.name for kind, spec in self.specs.items()}
        return replace(config, **names)  # type: ignore[arg-type]

    def rows(self) -> tuple[tuple[str, str], ...]:
        """(label, text) lines for the start-up summary."""
        return tuple(
            (_SHOWN[kind], f"{'not read' if spec is None else spec.name} ({self.reasons[kind]})")
            for kind, spec in self.specs.items()
        )


def check_parsers(specs: Sequence[OutputParserSpec], config: Model) -> dict[str, OutputParserSpec]:
    """The specs that `config` names, by kind. Raises ConfigError that lists the known names for an unknown one."""
    wanted = {kind: getattr(config, option) for kind, option in _OPTIONS.items()}
    return {kind: _find(specs, kind, name) for kind, name in wanted.items() if name not in (None, "auto", "none")}


def choose_parsers(specs: Sequence[OutputParserSpec], config: Model, templates: Iterable[str]) -> ParserChoice:
    """Choose the parsers for a model with these chat templates (Jinja texts)."""
    named = check_parsers(specs, config)
    texts = tuple(templates)
    chosen: dict[str, OutputParserSpec | None] = {}
    reasons: dict[str, str] = {}
    for kind, option in _OPTIONS.items():
        word = getattr(config, option)
        if word in (None, "auto"):
            chosen[kind] = spec = _recognising(specs, kind, texts)
            reasons[kind] = _UNRECOGNISED if spec is None else "by the chat template"
        else:
            chosen[kind] = named.get(kind)
            reasons[kind] = f"--{option}"
    return ParserChoice(chosen, reasons)


def chat_templates(specs: Sequence[OutputParserSpec], config: Model, directory: Path) -> tuple[str, ...]:
    """The operator's chat template if there is one, else those of the model whose tokenizer is in `directory`."""
    if config.chat_template is not None:
        return (choose_template(config.chat_template, specs).source,)
    return tuple(read_companions(directory).templates.values())


def _recognising(specs: Sequence[OutputParserSpec], kind: str, texts: Sequence[str]) -> OutputParserSpec | None:
    fitting = [
        spec for spec in specs if spec.kind == kind and any(m.fit(text) for m in spec.recognises for text in texts)
    ]
    return min(fitting, key=lambda spec: (-spec.priority, spec.name), default=None)


def _find(specs: Sequence[OutputParserSpec], kind: str, name: str) -> OutputParserSpec:
    known = {spec.name: spec for spec in specs if spec.kind == kind}
    if name not in known:
        exist = (
            ", ".join(sorted(known))
            or "none; plugin-parsers brings some (pip install it; where --plugins names plugins, name it there)"
        )
        raise ConfigError(
            f"--{_OPTIONS[kind]}: there is no {kind} parser {name!r}; known: {exist}.{did_you_mean(name, known)}"
        )
    return known[name]


def open_parsers(specs: Sequence[OutputParserSpec], config: Model, tokenizer: Tokenizer) -> OutputParsers:
    """The parsers that `config` names, for a worker. The supervisor has chosen them (`ParserChoice.named`)."""
    chosen = check_parsers(specs, config)
    return OutputParsers(
        tool_names=tuple(sorted(spec.name for spec in specs if spec.kind == "tool")),
        template_names=tuple(sorted(named_templates(specs))),
        **{kind: open_parser(spec, tokenizer) for kind, spec in chosen.items()},
    )
