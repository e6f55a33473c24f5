"""For every suite."""

from __future__ import annotations

import signal

for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    # Shells' `&` and nohup have this process ignore them, and then so would every server under test. A handler that
    # does nothing is not inherited.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)
