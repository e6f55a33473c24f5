"""Write the pages of docs/ that come from code. `--check` writes nothing and fails if a page is out of date."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from llmcore.cli.options import grouped
from llmcore.config import RETIRED, Setting
from llmcore.config.setting import GROUPS
from options_elsewhere import HEADING as ELSEWHERE
from options_elsewhere import known, options_elsewhere
from page_of_faults import faults_page
from page_of_metrics import metrics_page
from page_of_objects import anchor, object_pages
from pages_from_plugins import hooks_page, known_plugins, official_plugins, plugin_templates

ROOT = Path(__file__).resolve().parent.parent

INTRODUCTION = """# Options

<!-- Written by scripts/generate_docs.py from core/llmcore/config/tree.py; `make docs` writes it again. -->

Every option of `llmcore serve` is also a key of the YAML file that `--config` names, and a variable:
`--max_req_total_len`, `max_req_total_len:` and `LLMCORE_MAX_REQ_TOTAL_LEN` are one setting. The command line wins over
the environment, and the environment over the file. Names may have `_` or `-`. Counts may be written `32k` (32,000) or
`32K` (32,768). `llmcore config show --origin` prints each value and its origin. Plugins may bring options. This page
has those of this repository; `llmcore serve --help-all` lists all installed ones."""


ALWAYS_ON = "Flags for behaviour that is always on"


def options_page() -> str:
    """Returns docs/options.md: every setting, by section."""
    return "\n".join(_options()) + "\n"


def _options() -> Iterator[str]:
    sections = list(grouped(known()))
    yield INTRODUCTION
    yield ""
    yield from (
        f"- [{title}](#{anchor(title)})" for title in (*(title for title, _ in sections), ALWAYS_ON, ELSEWHERE)
    )
    for title, among in sections:
        yield ""
        yield f"## {title}"
        yield ""
        yield f"In code: {_place(among[0])}."
        yield ""
        yield "| Option | Values | Default | Meaning |"
        yield "| --- | --- | --- | --- |"
        for setting in among:
            yield f"| {_names(setting)} | {_values(setting)} | {_default(setting)} | {_cell(setting.summary)} |"
    yield ""
    yield f"## {ALWAYS_ON}"
    yield ""
    for name, why in RETIRED.items():
        yield f"- `--{name}`: {why}. Using it is a warning."
    yield from options_elsewhere()


def _place(setting: Setting) -> str:
    """Returns the Python expression that reads a setting."""
    if setting.group in GROUPS:
        return f"`config.{setting.group}`"
    section = setting.section
    return f"`config.section({section.__module__}.{section.__name__})`" if section else "`config.plugin_options[name]`"


def _names(setting: Setting) -> str:
    aliases = "".join(f"<br>`--{alias}`" for alias in setting.aliases)
    return f"`--{setting.name}`{aliases}"


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    kind = setting.unit or {int: "number", float: "number", bool: "flag", str: "text"}[setting.type]
    return f"{kind}, several" if setting.multiple else kind


def _default(setting: Setting) -> str:
    if setting.default is None or setting.default is False or setting.default == ():
        return ""
    return f"`{' '.join(setting.default) if setting.multiple else setting.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def shown_files(page: Path) -> str:
    """Returns a handwritten page in which the blocks `file=NAME` show the current files of docs/examples."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{(ROOT / 'docs' / 'examples' / found[2]).read_text()}```"

    return re.sub(r"^(```\w+ file=(\S+)\n).*?^```$", block, page.read_text(), flags=re.DOTALL | re.MULTILINE)


def pages_by_hand() -> dict[str, Callable[[], str]]:
    """Returns the handwritten pages for authors, whose code is in files."""
    found = [ROOT / "docs" / "authors.md", *sorted((ROOT / "docs" / "authors").glob("*.md"))]
    return {str(page.relative_to(ROOT)): partial(shown_files, page) for page in found}


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/options.md": options_page,
    "docs/hooks.md": hooks_page,
    **object_pages(),
    "docs/metrics.md": metrics_page,
    "tests/faults/README.md": faults_page,
    "core/llmcore/registry/known_plugins.json": known_plugins,
    "core/llmcore/registry/official_plugins.json": official_plugins,
    "plugins/devtools/llmcore_devtools/plugin_templates.json": plugin_templates,
    **pages_by_hand(),
}


def main(check: bool) -> int:
    """Write every page, or print which ones differ."""
    stale = []
    for name, render in PAGES.items():
        path, text = ROOT / name, render()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    if stale:
        print(f"{'out of date, run make docs' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
