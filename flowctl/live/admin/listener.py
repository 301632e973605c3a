"""Serves the admin surface: uvicorn on a thread and a loop of its own, in front of the one table of operations.

The poll groups know nothing of it. What is asked for runs on two threads (`live.admin.asking`): one that looks and
one that changes. It stands beside one server, or beside the supervisor of several workers: both carry out operations.
"""

from __future__ import annotations

import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from flowctl.control.operations import answer
from flowctl.core.loop.faults import ErrorHook
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.listener import socket_of
from flowctl.core.text.addresses import is_loopback, join_host_port
from flowctl.core.text.extras import missing_extra
from flowctl.errors import ConfigError
from flowctl.live.admin.asking import CarryOut, OperationAsker
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer

try:
    from flowctl.live.admin.app import AdminApp
    from flowctl.live.admin.guard import Tokens
    from flowctl.live.admin.protocol import make_server
except ModuleNotFoundError as error:
    raise missing_extra(error, "admin", "admin") or error from error

if TYPE_CHECKING:
    import ssl

    import uvicorn

_log: Final = structlog.get_logger("flowctl.admin")
_GRACE_S: Final = 1.0
"""Time in which requests that are cut may end."""


def tokens_of(config: LiveConfig) -> Tokens | None:
    """Return the tokens that callers have to show. None: everybody on this machine may call."""
    if config.admin_token_file is None and not is_loopback(config.admin_address[0]):
        raise ConfigError(
            f"admin is {config.admin}, which others can reach, and there is no token: anybody could operate the server",
            hint="give admin_token_file, or listen on 127.0.0.1",
        )
    return None if config.admin_token_file is None else Tokens(config.admin_token_file)


def admin_of(server: LiveServer) -> AdminListener:
    return AdminListener(server.config, partial(answer, server), server.hub.oversight.report)


class AdminListener:
    """The admin surface of a server; a companion of it."""

    def __init__(self, config: LiveConfig, carry_out: CarryOut, report: ErrorHook | None = None) -> None:
        self._address: Final = config.admin_address
        self._handed: Final = config.listen_fds.get("admin", ())
        self._report: Final = report
        self._tokens: Final = tokens_of(config)
        self._certificate: Certificate | None = None
        if config.admin_secure and config.tls_certificate is not None and config.tls_key is not None:
            self._certificate = Certificate(config.tls_certificate, config.tls_key)
        self._asking: Final = OperationAsker(carry_out)
        self._app: Final = AdminApp(self._asking, self._tokens)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.bound: list[str] = []  # the address of the dashboard, once it has started
        self.sockets: list[tuple[str, socket.socket]] = []  # on which it listens, by what they are for

    def start(self) -> None:
        sock = socket_of(self._handed[0]) if self._handed else self._listen()
        self.sockets = [("admin", sock)]
        host, port = sock.getsockname()[:2]
        scheme = "http" if self._certificate is None else "https"
        self.bound = [f"{scheme}://{join_host_port(host, port)}/"]
        context = None if self._certificate is None else partial(self._context_of, self._certificate)
        self._server = server = make_server(self._app, context)
        self._thread = threading.Thread(target=self._run, args=(server, sock), name="flowctl-admin", daemon=True)
        self._thread.start()
        _log.info("admin", address=self.bound[0], tokens=self._tokens is not None)

    def _listen(self) -> socket.socket:
        host, port = self._address
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if self._tokens is None and not is_loopback(str(address[0])):
                raise ConfigError(f"admin: {host} is {address[0]}, which others can reach", hint="write 127.0.0.1")
            sock = socket.socket(family, kind, number)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen()
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"admin cannot listen on {join_host_port(host, port)}: {error.strerror or error}",
                hint="another port, or end what listens there",
            ) from error
        return sock

    def _context_of(self, certificate: Certificate) -> ssl.SSLContext:
        """Return what the next connection speaks TLS with; files that have changed are read again first."""
        try:
            if certificate.reload_if_changed():
                _log.info("admin certificate changed", file=str(certificate.certificate))
        except ConfigError as error:
            _log.error("the new certificate is not valid, that of before stays in force", fault=str(error))
        return certificate.context

    def _run(self, server: uvicorn.Server, sock: socket.socket) -> None:
        try:
            server.run(sockets=[sock])
        except Exception as error:  # noqa: BLE001 - the server goes on without it
            if self._report is not None:
                self._report("the admin surface", error)
        finally:
            sock.close()

    def stop(self, deadline_s: float) -> None:
        server, self._server, self.sockets = self._server, None, []
        if server is not None and self._thread is not None:
            self._app.end()
            server.should_exit = True
            self._thread.join(deadline_s)
            server.force_exit = True
            self._thread.join(_GRACE_S)
        self._asking.stop()
