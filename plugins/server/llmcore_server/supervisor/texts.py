"""The supervisor reads a model's tokenizer, chat templates and output parsers before its workers do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmcore.api.processors import LogitsProcessorSpec
from llmcore.api.specs import BalancerSpec, OutputParserSpec, TokenizerSpec
from llmcore.config import Config
from llmcore.registry.official import parsers_that_help, processors_that_help
from llmcore.registry.registry import Registry
from llmcore.text.chosen_template import choose_template
from llmcore.text.companions import read_companions
from llmcore.text.source import prepare
from llmcore.text.templates import ChatTemplate

from llmcore_server.chat.parser_choice import chat_templates, check_parsers, choose_parsers
from llmcore_server.settings import Server
from llmcore_server.templates import ChildTemplate

logger = logging.getLogger(__name__)


def check_options(registry: Registry, config: Config) -> None:
    """Raise ConfigError for an operator's parser that does not exist, or chat template that cannot be served, and
    PluginError for a balancer that does not exist."""
    registry.find(BalancerSpec, config.section(Server).routing_strategy)
    specs = _parser_specs(registry)
    check_parsers(specs, config.model)
    if config.model.chat_template is not None:
        ChildTemplate(choose_template(config.model.chat_template, specs).with_tokens({})).check()


def prepare_tokenizer(registry: Registry, config: Config, directory: Path) -> str:
    """The directory from which workers load the tokenizer, after a conversion if it needs one.

    Raises ConfigError also for a chat template beside it that cannot be served.
    """
    specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
    model, out = config.model.path, directory / "tokenizer"
    tokenizer = prepare(specs, config.model, model, out)
    if config.model.chat_template is None:
        companions = read_companions(tokenizer)
        ChildTemplate(ChatTemplate(companions.templates, companions.tokens)).check()
    return str(tokenizer)


def with_parsers(registry: Registry, config: Config, tokenizer_dir: str) -> tuple[Config, Sequence[tuple[str, str]]]:
    """Settings for workers, which name this model's parsers, and the parsers' rows of the start-up summary.

    If no parser here reads the model's chat template, the log names an official plugin whose parser does.
    """
    parser_specs = _parser_specs(registry)
    templates = chat_templates(parser_specs, config.model, Path(tokenizer_dir))
    parsers = choose_parsers(parser_specs, config.model, templates)
    for kind in parsers.unread:
        for line in parsers_that_help(kind, templates):
            logger.warning(line)
    lacking = processors_that_help(spec.name for spec, _ in registry.specs(LogitsProcessorSpec))
    rows = (*parsers.rows(), *(("not installed", line) for line in lacking))
    return replace(config, model=parsers.named(config.model)), rows


def _parser_specs(registry: Registry) -> list[OutputParserSpec]:
    return [spec for spec, _ in registry.specs(OutputParserSpec)]
