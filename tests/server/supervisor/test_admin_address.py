"""Where the admin listener may be, and where it is."""

from __future__ import annotations

import logging
import socket
from functools import partial

import pytest
from llmcore.api.errors import ConfigError
from llmcore.config import make_config
from llmcore_server.plugin import register_options
from llmcore_server.settings import Server
from llmcore_server.supervisor.admin import _bind

server_config = partial(make_config, tuple(register_options()))


def test_an_address_that_others_reach_needs_keys(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"--admin_host 0\.0\.0\.0 .*--api_keys"):
        server_config(admin_host="0.0.0.0")
    server_config(admin_host="0.0.0.0", disable_admin=True)
    with caplog.at_level(logging.WARNING):
        server_config(admin_host="0.0.0.0", api_keys=["sk-1"])
    assert "API keys travel as they are" in caplog.text


def test_a_port_that_was_asked_for_has_to_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* is in use.*--admin_port"):
            _bind(server_config(admin_port=port).section(Server))


def test_without_one_it_is_beside_the_servers_or_any_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with _bind(server_config(port=port - 1).section(Server)) as other:
            assert other.getsockname()[1] not in (port, 0)
    with _bind(server_config(port=port - 1).section(Server)) as beside:
        assert beside.getsockname()[1] == port
