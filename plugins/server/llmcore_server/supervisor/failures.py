"""Why a child ended, for people: its last words, and where its traceback or its stacks are."""

from __future__ import annotations

import logging

from llmcore.api.errors import ConfigError, LlmcoreError, ServerError, StartupError
from llmcore.config.process import memory_note

from llmcore_server.supervisor.backoff import MOST_IN_VAIN
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.rundir import PREFIX, RunDirectory

logger = logging.getLogger(__name__)


class Failures:
    """Words for children that have ended."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def obituary(self, child: Child) -> str:
        """What became of a child that has ended: "failed: ... (log: ...)"."""
        words = child.last_words
        cause = f"failed: {words.message}" if words else child.ending + memory_note()
        kept = self._directory.keep_log(child.name)
        return cause + (f" (log: {kept})" if kept else "")

    def lost(self, end: str) -> ServerError:
        """The error that ends a server whose run directory was deleted; `end`: what it was needed for."""
        path = self._directory.path
        return ServerError(
            f"{end}, and no process can be started, because {path} was deleted, where this server's sockets are; "
            f"start the server again, and keep what cleans {path.parent} away from {path.parent}/{PREFIX}*"
        )

    def hopeless(self, end: str) -> ServerError:
        """The error that ends a server nobody can reach; `end`: what became of the last who should have served."""
        return ServerError(
            f"{end}, as all {MOST_IN_VAIN} that were started in a row; mend its cause, and start the server again"
        )

    def kill_hung(self, child: Child, what: str) -> None:
        """End a child that hangs; its stacks go with the message to the log."""
        child.kill_with_stacks()
        kept = self._directory.keep_log(child.name)
        logger.error("%s and is killed%s", what, f"; its stacks are in {kept}" if kept else "")

    def startup_error(self, child: Child) -> LlmcoreError:
        """The error that ends a start-up because of this child."""
        words = child.last_words
        if words is not None and words.usage:
            return ConfigError(words.message)
        cause = words.message if words else f"it {child.ending}{memory_note()}"
        if child.killed:
            cause += "; start the server again, or give --health_monitor, which starts another in its place"
        kept = self._directory.keep_log(child.name)
        return StartupError(f"{child.name} could not start: {cause}", log=None if kept is None else str(kept))
