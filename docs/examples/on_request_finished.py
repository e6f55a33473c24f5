"""Log requests that waited long for their first token."""

import logging

from llmcore.api import hookimpl

log = logging.getLogger("my_plugin")


@hookimpl
def on_request_finished(record):
    if record.first_token is not None and record.first_token > 1.0:
        log.warning("request %s waited %.1f s for its first token", record.request_id, record.first_token)
