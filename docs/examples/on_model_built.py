"""Log the kernels that were chosen."""

import logging

from llmcore.api import hookimpl

log = logging.getLogger("my_plugin")


@hookimpl
def on_model_built(report):
    log.info("%s, %d KV tokens", report.config.architecture, report.kv_tokens)
    for op, kernel in report.kernels.items():
        log.info("%s: %s", op, kernel)
