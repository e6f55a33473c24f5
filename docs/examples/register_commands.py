"""A subcommand: `llmcore hello NAME`."""

import click
from llmcore.api import CommandSpec, hookimpl


@hookimpl
def register_commands():
    yield CommandSpec(name="hello", command=f"{__name__}:hello", summary="Greet somebody.")


@click.command()
@click.argument("name")
def hello(name):
    """Greet NAME."""
    click.echo(f"Hello {name}!")
