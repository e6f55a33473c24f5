#!/usr/bin/env bash
# clients.sh [PYTEST-ARGUMENTS...]: other people's clients and their suites against servers on loopback, offline.
# It is no part of `make test`. `tox -e clients` (`make clients`) runs it in an environment that has them.
set -euo pipefail
cd "$(dirname "$0")/.."
one_loop=(-o asyncio_mode=auto -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session)
ours=(tests/server/http/test_openai_on_a_server.py tests/server/http/test_tools_on_a_server.py tests/tgi/test_tgi_client.py)
exec python -m pytest "${one_loop[@]}" -p no:cacheprovider --durations=10 tests/clients "${ours[@]}" "$@"
