"""The files beside a tokenizer in a model directory: special tokens, end ids, chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from llmcore.api.errors import ConfigError

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Companions:
    """The content of the files beside a tokenizer.

    `tokens`: text of special tokens by name. `eos_ids`: end ids of config.json and generation_config.json.
    `templates`: Jinja text by name. `settings`: tokenizer_config.json.
    """

    tokens: Mapping[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_companions(directory: Path) -> Companions:
    """Read the companions in `directory`. Any file may be missing. Raises ConfigError for a broken file."""
    settings = _read_json(directory / "tokenizer_config.json")
    special = _read_json(directory / "special_tokens_map.json")
    texts = {name: _token_text(settings.get(name)) or _token_text(special.get(name)) for name in _TOKEN_NAMES}
    tokens = {name: text for name, text in texts.items() if text is not None}
    return Companions(tokens, _eos_ids(directory), _templates(directory, settings), settings)


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} if the file does not exist. Raises ConfigError if it is broken."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path.name} is not valid JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} must hold a JSON object; download the model again")
    return value


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(directory: Path) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        config = _read_json(directory / name)
        nested = config.get("text_config")
        value = config.get("eos_token_id")
        if value is None and isinstance(nested, Mapping):
            value = nested.get("eos_token_id")
        if isinstance(value, int):
            found.append(value)
        elif isinstance(value, list):
            found += [int(item) for item in value]
    return tuple(dict.fromkeys(found))


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. chat_template.jinja and its neighbours win over those in tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates.update({item["name"]: item["template"] for item in value})
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return templates
