"""Plugins in a folder on sys.path, for the tests of the loader and the registry."""

from __future__ import annotations

from pathlib import Path

from llmcore.config import Config, Plugins

HEAD = "from llmcore.api import *\nfrom llmcore.api import hookimpl\n"
SCHEDULER = HEAD + "@hookimpl\ndef register_schedulers():\n    yield SchedulerSpec(name='{name}', make='m:make')\n"


class Site:
    """A folder that distributions can be installed into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, name: str, code: str, *, dist: str | None = None, version: str = "1.0") -> str:
        dist = dist or f"plugin-{name}"
        module = "dist_" + dist.replace("-", "_")
        (self.path / f"{module}.py").write_text(code)
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[llmcore]\n{name} = {module}\n")
        return module

    def file(self, name: str, code: str) -> str:
        (self.path / name).write_text(code)
        return str(self.path / name)


def config(*named: str) -> Config:
    return Config(plugins=Plugins(plugins=named or None))


def names(infos: object) -> list[str]:
    return [info.name for info in infos]  # type: ignore[attr-defined]
