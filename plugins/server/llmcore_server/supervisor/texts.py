"""The parts of a model that the supervisor reads before its workers: tokenizer, chat templates, output parsers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
from llmcore.api.bridge import ModelFacts
from llmcore.api.processors import LogitsProcessorSpec
from llmcore.api.specs import OutputParserSpec, TokenizerSpec
from llmcore.config import Config
from llmcore.registry.official import parsers_that_help, processors_that_help
from llmcore.registry.registry import Registry
from llmcore.text.chosen_template import choose_template
from llmcore.text.source import prepare
from llmcore.text.trial import try_templates

from llmcore_server.chat.parser_choice import chat_templates, check_parsers, choose_parsers

logger = logging.getLogger(__name__)


def check_options(registry: Registry, config: Config) -> None:
    """Raises ConfigError for a parser or a chat template of the operator's that cannot be."""
    specs = _parser_specs(registry)
    check_parsers(specs, config.model)
    if config.model.chat_template is not None:
        choose_template(config.model.chat_template, specs)


def prepare_tokenizer(registry: Registry, config: Config, directory: Path) -> str:
    """The directory that workers load the tokenizer from, after a conversion where one is needed.

    Raises ConfigError too for chat templates beside it that no server should render.
    """
    specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
    model, out = config.model.path, directory / "tokenizer"
    tokenizer = prepare(specs, config.model, model, out)
    if config.model.chat_template is None:
        try_templates(tokenizer)
    return str(tokenizer)


def with_parsers(
    registry: Registry, config: Config, facts: ModelFacts, tokenizer_dir: str
) -> tuple[Config, ModelFacts]:
    """Settings and facts for workers: the parsers of this model chosen, and named in the start-up summary.

    The log names an official plugin that would read what no parser here does.
    """
    parser_specs = _parser_specs(registry)
    templates = chat_templates(parser_specs, config.model, Path(tokenizer_dir))
    parsers = choose_parsers(parser_specs, config.model, templates)
    for kind in parsers.unread:
        for line in parsers_that_help(kind, templates):
            logger.warning(line)
    lacking = processors_that_help(spec.name for spec, _ in registry.specs(LogitsProcessorSpec))
    rows = (*parsers.rows(), *(("not installed", line) for line in lacking))
    told = msgspec.structs.replace(facts, report=(*facts.report, *rows))
    return replace(config, model=parsers.named(config.model)), told


def _parser_specs(registry: Registry) -> list[OutputParserSpec]:
    return [spec for spec, _ in registry.specs(OutputParserSpec)]
