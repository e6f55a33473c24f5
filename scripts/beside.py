"""Print the figures that two JSON files share, with their ratio.

    python scripts/beside.py BASE.json HERE.json [--below rows] [--only median p50]

A figure's name is its path in the file. `--below` keeps the figures under one key. `--only` keeps the figures whose
last key is one of these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of a JSON value with its path. Lists of more than 8 entries are samples, not figures."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= 8:
        for index, inner in enumerate(value):
            yield from figures(inner, (*path, str(index)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("here", type=Path)
    parser.add_argument("--below", metavar="KEY")
    parser.add_argument("--only", nargs="+", metavar="KEY")
    options = parser.parse_args()
    base, here = (dict(figures(json.loads(file.read_text()))) for file in (options.base, options.here))
    for path, old in base.items():
        if path not in here or (options.below and options.below not in path):
            continue
        if options.only and path[-1] not in options.only:
            continue
        ratio = f"{here[path] / old - 1:+.1%}" if old else ""
        print(f"{'.'.join(path):44} {old:12,.3f} {here[path]:12,.3f} {ratio:>8}")


if __name__ == "__main__":
    main()
