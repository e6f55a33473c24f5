"""A plugin that was written against a library that is not there."""

import a_library_that_nobody_installed
from llmcore.api import CommandSpec, hookimpl


@hookimpl
def register_commands():
    yield CommandSpec(name="never", command=f"{__name__}:{a_library_that_nobody_installed.__name__}")
