"""Commands that take settings: click options made from the tree, and from what plugins bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import click

from llmcore.config import (
    RETIRED,
    Config,
    Origins,
    Setting,
    environment,
    plugin_settings,
    read_yaml,
    resolve_config,
    settings,
    with_plugins,
)
from llmcore.config.setting import ELSEWHERE, GROUPS, absent_settings, canonical, names
from llmcore.errors import ConfigError
from llmcore.plugins import build_registry
from llmcore.registry import Registry
from llmcore.specs import OptionSpec

_EVERY_GROUP = (*GROUPS, "plugin_options")
_TITLES = {"plugin_options": "Options of plugins"}
_METAVARS = {int: "N", float: "X", bool: "", str: "TEXT"}


@dataclass(frozen=True)
class Resolved:
    """What a command's settings came to."""

    config: Config
    origins: Origins
    registry: Registry


class SettingsCommand(click.Command):
    """A command whose options are settings; its callback gets them as `resolved`.

    `groups`: which sections of the tree it offers on the command line. All of them are read from YAML and the
    environment, so that one file serves every command.
    """

    def __init__(self, *args: Any, groups: Sequence[str] = _EVERY_GROUP, **more: Any) -> None:
        more.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **more)
        self.groups = tuple(groups)
        self.own = list(self.params)
        self.params += [
            click.Option(["--config"], metavar="FILE", help="YAML file of settings, `name: value`."),
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="All options.",
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Plugins first, because they bring options; then click parses, then the tree is resolved."""
        plain = list(joined(args, self._offered()))
        ctx.meta["llmcore.registry"] = registry = _registry(plain)
        ctx.meta["llmcore.settings"] = offered = self._offered(registry)
        rest = super().parse_args(ctx, list(joined(args, offered)))
        file = ctx.params.pop("config", None)
        given = {name: ctx.params.pop(name) for name in [*(s.name for s in offered), *RETIRED] if name in ctx.params}
        config, origins = resolve_config(
            {name: value for name, value in given.items() if value not in (None, (), False)},
            environment(),
            read_settings(file),
            extra=[spec for spec, _ in registry.specs(OptionSpec)],
            yaml_name=str(file_name(file)),
        )
        ctx.params["resolved"] = Resolved(with_plugins(config, registry.offered), origins, registry)
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and one option per setting."""
        offered = ctx.meta.get("llmcore.settings") or self._offered()
        retired = [click.Option([f"--{name}"], hidden=True, is_flag=True) for name in RETIRED]
        return [*super().get_params(ctx), *(_option(setting) for setting in offered), *retired]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options, then settings by group: those of the first page, or all."""
        everything = ctx.meta.get("llmcore.all", False)
        with formatter.section("Options"):
            own = [parameter.get_help_record(ctx) for parameter in super().get_params(ctx)]
            formatter.write_dl([record for record in own if record])
        shown = [s for s in ctx.meta.get("llmcore.settings") or self._offered() if everything or s.first_page]
        for group in self.groups:
            rows = [help_row(setting) for setting in shown if setting.group == group]
            if rows:
                with formatter.section(group_title(group)):
                    formatter.write_dl(rows)
        if not everything:
            formatter.write_text("More options: --help-all. Names may be written with _ or -.")

    def _offered(self, registry: Registry | None = None) -> list[Setting]:
        brought = plugin_settings(spec for spec, _ in registry.specs(OptionSpec)) if registry else ()
        known = (*settings(), *brought)
        absent = absent_settings(known) if self.groups == _EVERY_GROUP else ()
        return [setting for setting in (*known, *absent) if setting.group in (*self.groups, ELSEWHERE)]


def joined(args: Sequence[str], among: Sequence[Setting]) -> Iterator[str]:
    """`args` with every setting as one `--name=value` token, in the tree's spelling.

    A flag becomes `=true`; of `--mode a b` both words become a token, as in LightLLM. What is not a setting, and
    everything after `--`, stays as it is.
    """
    by_name = names(among)
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            yield from (word, *words)
            return
        setting = by_name.get(canonical(name)) if name.startswith("--") else None
        if setting is None:
            yield f"--{canonical(name)}" if canonical(name) in RETIRED else word
            continue
        if equals:
            values = [value]
        elif setting.kind is bool:
            values = ["true"]
        elif setting.multiple and not setting.one_word:
            values = []
            while words and not words[0].startswith("-"):
                values.append(words.pop(0))
        else:
            values = [words.pop(0)] if words else []
        if not values:
            raise click.UsageError(f"--{setting.name} needs a value.")
        yield from (f"--{setting.name}={one}" for one in values)


def help_row(setting: Setting) -> tuple[str, str]:
    """How one setting looks in `--help`: its names, and its help with choices and default."""
    flags = ", ".join(f"--{name}" for name in (setting.name, *setting.aliases))
    metavar = "|".join(setting.choices) or _METAVARS[setting.kind] + ("..." if setting.multiple else "")
    shown = setting.default not in (None, (), False, "")
    return f"{flags} {metavar}".rstrip(), f"{setting.help} [{setting.default}]" if shown else setting.help


def group_title(group: str) -> str:
    """A section's heading: the first line of its class's docstring."""
    return _TITLES.get(group) or (GROUPS[group].__doc__ or group).strip().rstrip(".")


def _option(setting: Setting) -> click.Option:
    return click.Option(
        [setting.name, *(f"--{name}" for name in (setting.name, *setting.aliases))],
        multiple=setting.multiple,
        type=str,
    )


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["llmcore.all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def file_name(given: str | None) -> str | None:
    """The YAML file that `--config` or LLMCORE_CONFIG names."""
    return given or environment().get("LLMCORE_CONFIG")


def read_settings(given: str | None) -> dict[str, Any]:
    """What the YAML file says; {} where there is none."""
    name = file_name(given)
    return read_yaml(name) if name else {}


def named_plugins(given: Sequence[str] = (), file: str | None = None) -> Config:
    """A config that holds only what some source says of `--plugins`; `given` is the command line's."""
    config, _ = resolve_config(
        {"plugins": list(given)} if given else {},
        {name: value for name, value in environment().items() if name == "LLMCORE_PLUGINS"},
        {name: value for name, value in read_settings(file).items() if canonical(name) == "plugins"},
    )
    return config


def _registry(tokens: Sequence[str]) -> Registry:
    given = [token.partition("=")[2] for token in tokens if token.startswith("--plugins=")]
    file = None
    for token, following in pairwise([*tokens, ""]):
        if token == "--config":
            file = following
        elif token.startswith("--config="):
            file = token.partition("=")[2]
    return build_registry(named_plugins(given, file))


def with_model(config: Config, argument: str | None) -> Config:
    """`config` with the model that the argument MODEL names, which is another way to say --model_dir."""
    if argument is None:
        return config
    given = config.model.model_dir
    if given is not None and given != argument:
        raise ConfigError(f"MODEL {argument} and --model_dir {given} are different; give one of them.")
    return replace(config, model=replace(config.model, model_dir=argument))
