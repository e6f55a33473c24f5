"""The YAML file of settings, without anchors, tags or deep nesting.

Values stay text, as on the command line, so that a setting reads values of every source alike. An error gives the
number of a line and never its text, because any line may hold an API key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml

from llmcore.api.errors import ConfigError

MOST_CHARACTERS = 1 << 20
MOST_DEPTH = 8
"""Most nested lists and mappings. No setting takes more than a list."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "timestamp", "merge", "value"))
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_TOKENS = frozenset(token.id for token in vars(yaml.tokens).values() if hasattr(token, "id"))
_FORM = "write one `name: value` per line, for instance `port: 8000`"


class YamlSettings(dict[str, Any]):
    """The top level of a file: name -> text, None, or lists and mappings of them. `lines`: name -> line number."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def read_yaml(path: str | Path) -> YamlSettings:
    """The settings of a file. Raises ConfigError if it cannot be read, is not valid here, or sets a name twice."""
    where = f"--config {path}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; check the path and its permissions.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not YAML: it is not UTF-8 text; save it as UTF-8.") from None
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has more than {MOST_CHARACTERS:,} characters; give a file of settings.")
    try:
        _refuse_growth(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return YamlSettings() if root is None else _top_level(root)
    except _Refused as error:
        raise ConfigError(f"{where}{error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {_without_content(error)}") from None


class _Refused(Exception):
    """YAML that is not accepted here. Its text follows the name of the file."""

    def __init__(self, node: yaml.Node | yaml.Event, what: str) -> None:
        super().__init__(f", line {_line(node)}: {what}.")


def _refuse_growth(text: str) -> None:
    """Refuse anchors, aliases and deep nesting: settings need none, and they could grow without end."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Refused(
                event, "anchors and aliases (& and *) are not read; write the value, in quotes if it is text"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise _Refused(event, f"it is nested more than {MOST_DEPTH} levels deep; {_FORM}")


def _top_level(root: yaml.Node) -> YamlSettings:
    if not isinstance(root, yaml.MappingNode):
        raise _Refused(root, f"it is not a mapping; {_FORM}")
    found = YamlSettings()
    for key, value in root.value:
        name = _plain(key)
        if not isinstance(name, str) or key.tag != _TAG + "str":
            raise _Refused(key, f"its key is not a name; {_FORM}")
        if name in found:
            raise _Refused(key, f"it sets again what line {found.lines[name]} sets; keep one of the two")
        found[name] = _plain(value)
        found.lines[name] = _line(key)
    return found


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(_plain(key)): _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_plain(item) for item in node.value]
    if node.tag == _TAG + "null":
        return None
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        raise _Refused(node, "tags (!) are not read; write the value, in quotes if it is text")
    if node.style != "|" and node.end_mark.line != node.start_mark.line:
        raise _Refused(
            node, "its text goes on after this line; close its quote, or write text of several lines as a block (|)"
        )
    return cast(str, node.value)


def _without_content(error: yaml.YAMLError) -> str:
    """The parser's message and line number, without the words that it quotes from the file."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return "it holds a character that YAML does not allow; save it as plain text."
    words = " ".join(_QUOTED.sub(_if_syntax, error.problem).split())
    fix = "indent with spaces" if "'\\t'" in words else "quote text that has signs in it"
    where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    return f"{where}{words}; {fix}."


def _if_syntax(quoted: re.Match[str]) -> str:
    inner = quoted[0][1:-1]
    return quoted[0] if len(inner) == 1 or inner in _TOKENS or inner == "\\t" else ""


def _line(node: yaml.Node | yaml.Event) -> int:
    return cast(yaml.Mark, node.start_mark).line + 1
