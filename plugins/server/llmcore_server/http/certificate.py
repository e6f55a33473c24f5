"""The certificate of `--ssl`."""

from __future__ import annotations

import ssl

from llmcore.api.errors import ConfigError

from llmcore_server.settings import Access


def server_context(access: Access) -> ssl.SSLContext:
    """TLS 1.2 or newer with the operator's certificate. Raises ConfigError that names the file at fault."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate, key = access.ssl_certfile or "", access.ssl_keyfile or ""
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"--{name} {path}: {error.strerror}; check the path and its permissions") from error
    try:
        # without a password there is a prompt on the terminal for a key that has one
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"--ssl_certfile {certificate} and --ssl_keyfile {key} do not work together ({error.reason}); they have "
            "to be a certificate chain and its key, both PEM, the key without a password"
        ) from error
    return context
