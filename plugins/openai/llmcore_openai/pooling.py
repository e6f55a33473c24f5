"""How a checkpoint makes one vector of a text, as its sentence-transformers files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from llmcore.api import ConfigError

_KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True)
class Pooling:
    """`kind`: last or mean; "" with the reason in `missing` where this server cannot do what the checkpoint says.

    `normalize`: whether vectors get length 1 where a request does not say.
    """

    kind: str = "last"
    normalize: bool = True
    missing: str = ""


def read_pooling(model: Path) -> Pooling:
    """What `modules.json` and the file of its pooling module say; of the last token where there are none.

    Raises ConfigError for files that cannot be read.
    """
    listed = _read(model / "modules.json")
    modules = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    kinds = {str(one.get("type", "")).rpartition(".")[2]: str(one.get("path", "")) for one in modules}
    beyond = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if beyond:
        return Pooling(kind="", missing=f"its vectors go through {beyond[0]}, which this server does not have")
    normalize = not modules or "Normalize" in kinds
    found = _read(model / kinds.get("Pooling", "1_Pooling") / "config.json")
    return _pooling(found, normalize) if isinstance(found, dict) else Pooling(normalize=normalize)


def _pooling(described: Mapping[str, Any], normalize: bool) -> Pooling:
    named = described.get("pooling_mode")
    asked = (
        [named]
        if isinstance(named, str)
        else [
            name.removeprefix("pooling_mode_")
            for name, on in described.items()
            if name.startswith("pooling_mode_") and on
        ]
    )
    if len(asked) == 1 and asked[0] in _KINDS:
        return Pooling(_KINDS[asked[0]], normalize)
    what = " and ".join(map(str, asked)) or "nothing"
    return Pooling(kind="", missing=f"it pools {what}, and this server the last token or the mean")


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path.name} of the model cannot be read ({error}); download the model again") from error
