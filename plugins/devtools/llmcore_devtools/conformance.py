"""Conformance: do a plugin's contributions keep their contracts? Every hook has one check, and all have one signature.

    check_register_kernels(registry, "my-plugin", samples) -> the number of contributions that were tried

`samples` are files or folders that the plugin can read (a checkpoint, a tokenizer). Some checks ignore them. A check
goes on after a problem, and raises one `Nonconformance` at the end that lists every problem. A contribution that could
not run here, such as a kernel for another device, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from llmcore.api.errors import reraise_if_stopping
from llmcore.api.hookspecs import HOOKS
from llmcore.api.specs import Spec
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry

S = TypeVar("S", bound=Spec)

Check = Callable[[Registry, str, Sequence[Path]], int]

_MODULES: Mapping[str, tuple[str, ...]] = {
    "contributions": (
        *("register_modes", "register_devices", "register_commands", "register_options"),
        *("register_metric_sinks", "register_dialects", "register_tokenizers", "register_weight_loaders"),
        "register_model_sources",
    ),
    "parsing": ("register_output_parsers",),
    "steering": ("register_logits_processors",),
    "computing": (
        "register_models",
        "register_ops",
        "register_kernels",
        "register_kv_layouts",
        "register_quant_methods",
    ),
    "scheduling": ("register_schedulers", "register_length_estimators", "register_balancers", "register_kv_managers"),
    "observing": ("build_layer", "on_startup", "on_model_built", "on_request_finished", "on_shutdown"),
}

CHECKS: Mapping[str, str] = {
    hook: f"llmcore_devtools.conformance_{module}:check_{hook}" for module, hooks in _MODULES.items() for hook in hooks
}
"""Hook -> import string of its check. The checks of `computing` import torch."""


class Nonconformance(AssertionError):
    """A plugin breaks a contract. `problems`: one sentence for each broken contract."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Problems:
    """Collects the problems of one check."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.cause: BaseException | None = None
        """The first exception that a plugin's code raised, for its traceback."""

    @contextmanager
    def of(self, what: str = "") -> Iterator[None]:
        """Note an exception that ends the block, under the name `what` if it has one. The check goes on after it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - what a plugin raises is the finding
            reraise_if_stopping(error)
            self.keep(error, f"{what}: " if what else "")

    def keep(self, error: BaseException, prefix: str = "") -> None:
        """Note an exception's text."""
        expected = isinstance(error, AssertionError)
        text = str(error).partition("\nassert ")[0]  # pytest adds the asserted expression to the message
        said = getattr(error, "problems", None) or [text if expected else f"{type(error).__name__}: {text}"]
        self.found += [prefix + problem for problem in said]
        self.cause = self.cause or (error.__cause__ if expected else error)


@contextmanager
def all_problems() -> Iterator[Problems]:
    """Raises Nonconformance at the end of the block if a problem was noted."""
    problems = Problems()
    try:
        yield problems
    except BaseException as error:
        reraise_if_stopping(error)
        if not problems.found:
            raise
        problems.keep(error)
    if problems.found:
        raise Nonconformance(problems.found) from problems.cause


def check_plugin(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> dict[str, int]:
    """Run the check of every hook that `plugin` implements, `on_startup` first.

    Returns the number of contributions that each check tried. Raises Nonconformance with the problems of all checks.
    """
    if plugin not in [info.name for info in registry.plugins]:
        known = ", ".join(info.name for info in registry.plugins)
        raise AssertionError(f"plugin {plugin!r} takes no part; there are {known}")
    found = {}
    with all_problems() as problems:
        for hook in sorted(HOOKS, key=lambda hook: hook != "on_startup"):
            if plugin in [info.name for info in registry.implementers(hook)]:
                check: Check = load(CHECKS[hook])
                with problems.of(hook):
                    found[hook] = check(registry, plugin, samples)
    return found


def contributed(registry: Registry, plugin: str, kind: type[S]) -> list[S]:
    """The contributions of one kind by `plugin`. Raises AssertionError if it has none."""
    found = [spec for spec, owner in registry.specs(kind) if owner.name == plugin]
    declined = [str(d) for d in registry.declined if d.plugin.name == plugin and isinstance(d.spec, kind)]
    assert not declined, "; ".join(declined)
    assert found, f"plugin {plugin!r} contributes no {kind.__name__}"
    return found


def check_each(registry: Registry, plugin: str, kind: type[S], word: str, check: Callable[[S], object]) -> int:
    """Run `check` on every contribution of one kind by `plugin`. Problems call a contribution by `word` and its name.

    Returns the number that could be tried here: `check` returns False for one that could not. Raises Nonconformance.
    """
    tried = 0
    with all_problems() as problems:
        for spec in contributed(registry, plugin, kind):
            with problems.of(f"{word} {spec.name}"):
                tried += check(spec) is not False
    return tried


def check_readers(
    registry: Registry,
    plugin: str,
    kind: type[S],
    word: str,
    samples: Sequence[Path],
    check: Callable[[S], Sequence[Path]],
) -> int:
    """As `check_each`, for contributions that read files: `check` returns the samples that its contribution read.

    Raises AssertionError if there are samples and none was read.
    """
    read: list[Path] = []
    tried = check_each(registry, plugin, kind, word, lambda spec: read.extend(check(spec)))
    assert read or not samples, f"no {word} of plugin {plugin!r} recognises {list(map(str, samples))}"
    return tried


def loaded(target: str | None, what: str) -> Any:
    """The callable that an import string names. Raises AssertionError if it is missing or not callable."""
    assert target is not None, f"{what} is missing"
    value = load(target)
    assert callable(value), f"{what}: {target} is {type(value).__name__}, which cannot be called"
    return value
