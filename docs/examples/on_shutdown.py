"""Close what the plugin opened."""

import logging

from llmcore.api import hookimpl

log = logging.getLogger("my_plugin")


@hookimpl
def on_shutdown():
    log.info("bye")
