"""What we use of waitress's insides is there."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import waitress.channel
import waitress.server
import waitress.task
from llmcore_server.http import streaming
from llmcore_server.http.errors import openai_error
from llmcore_server.http.streaming import Limits
from llmcore_server.http.streaming.tasks import StreamRequest
from llmcore_server.http.strict import Pool


def test_the_internals_that_are_used_are_as_they_were() -> None:
    assert version("waitress") == streaming.WAITRESS
    theirs, server = waitress.channel.HTTPChannel, waitress.server.BaseWSGIServer
    used = {
        theirs: (
            "self.requests_lock = threading.Lock()",
            "self.outbuf_lock = threading.Condition()",
            "task = self.task_class(self, request)",
            "task = self.error_task_class(self, request)",
            "err_request = self.parser_class(self.adj)",
            "err_request.error = InternalServerError(body)",
            "except Exception:",
            "if not self.requests:",
            "return self.total_outbufs_len or self.will_close or self.close_when_flushed",
        ),
        theirs._flush_some: ("num_sent = self.send(chunk, do_close=do_close)",),
        theirs.handle_write: ("if self.will_close:\n            self.handle_close()",),
        theirs.write_soon: ("self.total_outbufs_len += num_bytes",),
        theirs.add_channel: ("self.server.active_channels[self._fileno] = self",),
        theirs.del_channel: ("del ac[fd]",),
        server.__init__: ("self.trigger = trigger.trigger(map)", "self.task_dispatcher = dispatcher"),
        server.pull_trigger: ("self.trigger.pull_trigger()",),
        waitress.server.TcpWSGIServer.set_socket_options: ("conn.setsockopt(",),
        waitress.server.UnixWSGIServer.fix_addr: ('return ("localhost", None)',),
        waitress.task.ThreadedTaskDispatcher: ("self.threads.discard(thread_no)",),
    }
    for owner, texts in used.items():
        source = inspect.getsource(owner)
        for text in texts:
            assert text in source, f"{owner} has no {text}"
    service = inspect.getsource(waitress.task.Task.service)
    assert "except OSError" in service and "BaseException" not in service
    for name in ("received", "readable", "writable", "handle_read", "handle_write", "handle_close", "service", "send"):
        assert callable(getattr(theirs, name))
    for name in ("build_response_header", "set_close_on_finish", "get_environment", "start"):
        assert callable(getattr(waitress.task.WSGITask, name))


def test_a_request_has_every_attribute_that_waitress_reads() -> None:
    request = StreamRequest(Limits(), Pool(100), lambda path: openai_error, lambda head: None)
    sources = (waitress.channel.HTTPChannel, waitress.task.WSGITask, waitress.task.ErrorTask, waitress.task.Task)
    names = set(re.findall(r"\brequest\.([a-z_]+)", "".join(map(inspect.getsource, sources))))
    assert {"headers", "completed", "get_body_stream"} <= names
    assert not [name for name in names if not hasattr(request, name)]
