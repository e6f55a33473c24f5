"""`--chat_template`: the operator's chat template, in place of the model's.

The option takes the name of a tool parser that brings a template, a Jinja file, or LMDeploy's JSON as a file or as
text. LMDeploy's JSON gives the text before and after each role's messages:
https://lmdeploy.readthedocs.io/en/latest/advance/chat_template.html
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.specs import ImportString, OutputParserSpec
from llmcore.registry.loader import load
from llmcore.text.templates import ChatTemplate

log = logging.getLogger(__name__)

_FRAMES = """\
{%- if messages and messages[0].role != "system" and frame.meta_instruction is not none -%}
{{- frame.system + frame.meta_instruction + frame.eosys -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}{{- frame.system + message.content + frame.eosys -}}
{%- elif message.role == "user" -%}{{- frame.user + message.content + frame.eoh -}}
{%- elif message.role == "tool" -%}{{- frame.tool + message.content + frame.eotool -}}
{%- elif message.role != "assistant" -%}
{{- raise_exception("the server's chat template knows no role " + message.role) -}}
{%- elif loop.last -%}{{- frame.assistant + message.content -}}
{%- else -%}{{- frame.assistant + message.content + frame.eoa + frame.separator -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not (messages and messages[-1].role == "assistant") -%}
{{- frame.assistant -}}
{%- endif -%}
"""
"""A template that writes conversations as LMDeploy does. The model continues an assistant message that is the last."""


class _Frames(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of LMDeploy's JSON."""

    model_name: str | None = None
    system: str = ""
    meta_instruction: str | None = ""
    eosys: str = ""
    user: str = ""
    eoh: str = ""
    assistant: str = ""
    eoa: str = ""
    tool: str = ""
    eotool: str = ""
    separator: str = ""
    capability: str = "chat"
    stop_words: list[str] | None = None


@dataclass(frozen=True)
class ChosenTemplate:
    """A template's Jinja text and its own variables. `stop_words` end every answer."""

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    stop_words: tuple[str, ...] = ()

    def with_tokens(self, tokens: Mapping[str, str]) -> ChatTemplate:
        """The template for a model with these special tokens."""
        return ChatTemplate({"default": self.source}, tokens, origin="--chat_template", constants=self.variables)


def named_templates(specs: Iterable[OutputParserSpec]) -> dict[str, ImportString]:
    """The templates that come with parsers, by the names that `--chat_template` accepts."""
    return {spec.name: spec.template for spec in specs if spec.kind == "tool" and spec.template is not None}


def choose_template(given: str, specs: Iterable[OutputParserSpec] = ()) -> ChosenTemplate:
    """The template that `--chat_template` names. Raises ConfigError if there is none."""
    named = named_templates(specs)
    chosen: ChosenTemplate = load(named[given]) if given in named else _read(given, named)
    return chosen


def _read(given: str, named: Iterable[str]) -> ChosenTemplate:
    text = given.strip()
    if text.startswith("{"):
        return _frames(text, "--chat_template")
    path = Path(given).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        names = f"one of {', '.join(sorted(named))}, " if named else ""
        raise ConfigError(
            f"--chat_template {given}: {reason}; give {names}a Jinja file, or LMDeploy's JSON as a file or as text."
            f"{did_you_mean(given, named)}"
        ) from error
    return _frames(text, f"--chat_template {given}") if path.suffix == ".json" else ChosenTemplate(text)


def _frames(text: str, where: str) -> ChosenTemplate:
    try:
        frames = msgspec.json.decode(text, type=_Frames)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}; its fields are {', '.join(_Frames.__struct_fields__)}") from error
    if frames.capability != "chat":
        raise ConfigError(
            f"{where}: capability {frames.capability!r} is not known; /v1/completions and /generate take prompts as "
            "they are, without any template"
        )
    if not any((frames.system, frames.user, frames.eoh, frames.assistant, frames.eoa)):
        raise ConfigError(f"{where}: there are no built-in templates to name; give system, user, assistant and so on")
    if frames.model_name is not None:
        log.warning("%s: model_name has no effect: there are no built-in templates for it to name.", where)
    return ChosenTemplate(_FRAMES, {"frame": msgspec.to_builtins(frames)}, tuple(frames.stop_words or ()))
