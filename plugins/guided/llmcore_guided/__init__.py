"""Guided decoding: answers that fit a JSON schema, a regular expression, a grammar or a list of choices."""

from collections.abc import Iterable

from llmcore.api import LogitsProcessorSpec, OptionSpec, hookimpl


@hookimpl
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:
    """The processor `guided`. The dialects' own fields ask for it."""
    yield LogitsProcessorSpec(
        name="guided",
        make=f"{__name__}.processor:make",
        warm=f"{__name__}.processor:warm",
        kind="mask",
        example={"regex": "[a-z]{1,9}"},
        summary="json, json_object, regex, grammar (Lark, GBNF) or choice, on llguidance",
    )


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The option that leaves schemas' objects as open as the standard has them."""
    yield OptionSpec(
        name="guided_open_objects",
        type=bool,
        default=False,
        summary="objects of a JSON schema that names properties may have others too, as the standard says; without "
        "this option, only where the schema says so",
    )
