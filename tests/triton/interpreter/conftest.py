"""Triton decides when it decorates a kernel whether to interpret it, so these tests have a process of their own:
`make test-interpreter` sets TRITON_INTERPRET=1; any other run leaves them out."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
