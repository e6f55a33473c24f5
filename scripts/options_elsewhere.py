"""The part of docs/options.md for users of other servers: each of their options, and its name here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import RETIRED, Setting, make_config, settings
from llmcore.config.foreign import FOREIGN, Absent, absent_settings
from llmcore.config.setting import canonical, names
from llmcore.registry.loader import build_registry

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "seed_options.json"

HEADING = "Coming from another server"
INTRODUCTION = f"""
## {HEADING}

The tables have every option that LightLLM and LMDeploy document, with its default there and its name and default here.
LightLLM's defaults are those of its newest document that has the option. "Theirs" means the same default. The server
never ignores an option. If this version does not have it, the start ends with an error that gives the reason, unless
the given value asks for the behaviour that the server has anyway."""


FOREIGNERS = """
### vLLM and SGLang

Many options have the same name and meaning here (`--host`, `--port`, `--dtype`, `--tokenizer_mode`,
`--chat_template`, `--tool_call_parser`, `--reasoning_parser`, ...). Each option in the table ends the start with an
error that names the option here, on the command line, in the YAML file and as a variable.

| There | Server | Here |
| --- | --- | --- |"""


def options_elsewhere() -> Iterator[str]:
    """Yields the section, line by line."""
    yield from INTRODUCTION.split("\n")
    documents: dict[str, dict[str, Any]] = json.loads(DATA.read_text())["options"]
    lightllm = {name: default for document in documents.values() for name, default in document.items()}
    for server, given in (
        ("LightLLM", {n: d for n, d in lightllm.items() if n not in documents["lmdeploy"]} | _shared(documents)),
        ("LMDeploy", documents["lmdeploy"]),
    ):
        yield ""
        yield f"### {server}"
        yield ""
        yield "| There | Default there | Here | Default here |"
        yield "| --- | --- | --- | --- |"
        for name, default in sorted(given.items(), key=lambda item: canonical(item[0])):
            yield f"| `--{name}` | {_shown(default)} | {' | '.join(_here(name, default))} |"
    yield ""
    yield from _modes()
    yield from FOREIGNERS.split("\n")
    for name, (whose, instead) in sorted(FOREIGN.items()):
        yield f"| `--{name}` | {whose} | {instead[0].upper()}{instead[1:]}. |"


@cache
def known() -> tuple[Setting, ...]:
    """Returns the settings of core and of all plugins in this repository."""
    return settings(spec for spec, _ in build_registry(make_config()).specs(OptionSpec))


def _modes() -> Iterator[str]:
    """Yields the names of LightLLM's modes."""
    names = ", ".join(f"`{name}`" for name in json.loads(DATA.read_text())["modes"])
    yield f"LightLLM's modes are modes here: {names}. `llmcore modes` says what each pins and where it fits."


def _shared(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns LightLLM's options that LMDeploy has too. A later document wins."""
    theirs = [document for title, document in documents.items() if title != "lmdeploy"]
    return {n: d for document in theirs for n, d in document.items() if n in documents["lmdeploy"]}


def _here(name: str, default: Any) -> tuple[str, str]:
    """Returns (the option's help here, its default and whether that is the other server's)."""
    name = canonical(name)
    if name in RETIRED:
        return f"A warning: {RETIRED[name]}.", ""
    setting = names(known()).get(name) or names(absent_settings(known()))[name]
    if isinstance(setting, Absent):
        return _absent(setting), ""
    same = "" if setting.name == name else f"`--{setting.name}`: "
    return f"{same}{setting.summary}".replace("|", "\\|"), _default(setting, default)


def _absent(option: Absent) -> str:
    text = f"An error: {option.why}."
    if None in option.idle:
        return f"A warning: {option.idle[None]}."
    if option.accepts:
        text += f" {', '.join(f'`{value}`' for value in option.accepts)} is taken, for that is what happens."
    warned = "".join(f" `{value}` is a warning: {why}." for value, why in option.idle.items())
    return text + warned


def _default(setting: Setting, theirs: Any) -> str:
    ours = setting.default
    try:
        same = theirs is not None and setting.parse(theirs, "there") == ours
    except ConfigError:
        same = False
    origin = "theirs" if same else "llmcore's own"
    if ours is None or ours is False or ours == ():
        return "theirs" if same or theirs is None else "none" if ours is False else "see the text"
    return f"`{_text(ours)}` ({origin})"


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _shown(default: Any) -> str:
    if default in (None, False, []):
        return ""
    return f"`{' '.join(default) if isinstance(default, list) else default}`"
