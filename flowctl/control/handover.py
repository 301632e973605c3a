"""A server that starts finds the one whose place it takes, asks for its place, and gets its sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import structlog

from flowctl.control.client import call_operation
from flowctl.control.place import server_answers, usual_socket
from flowctl.core.server.handover import Successor
from flowctl.core.server.listener import listening_socket
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig

_log = structlog.get_logger("flowctl.control")


def ask_predecessor(options: LiveConfig, within_s: float) -> tuple[Successor, dict[str, tuple[int, ...]]] | None:
    """Ask the server that operators reach where they will reach this one for its place, and return its sockets.

    It drains once `Successor.take_over` was called, and goes on where that never is. None: there is no server. Sockets
    that the settings have no use for are closed.
    """
    path = _socket_of(options)
    if not server_answers(path):
        _log.info("there is no server to replace", socket=str(path))
        return None
    successor = Successor(path.with_name(f"successor-{os.getpid()}.hand"))
    try:
        call_operation(f"ipc://{path}", "drain", {"within": within_s, "successor": str(successor.path)})
        kept = _kept(successor.receive_sockets(), options)
        _check_ports(options, kept)
    except BaseException:
        successor.__exit__()
        raise
    _log.info("sockets handed over", of=str(path), names=sorted(kept))
    return successor, kept


def _check_ports(options: LiveConfig, kept: Mapping[str, tuple[int, ...]]) -> None:
    """See that a port is free that is not handed over, before clients come that the failure would cut."""
    for name, addresses in options.listening_all:
        for host, port in () if name in kept or name in options.listen_fds else addresses:
            listening_socket(host, port, name).close()


def _kept(found: Mapping[str, tuple[int, ...]], options: LiveConfig) -> dict[str, tuple[int, ...]]:
    """Return what is on ports of the settings, by their names; the rest is closed."""
    kept: dict[str, tuple[int, ...]] = {}
    wanted = {name: {port for _, port in addresses} for name, addresses in options.listening_all}
    for name, descriptors in found.items():
        ports = wanted.get(name, set())
        if name not in options.listen_fds and (0 in ports or ports & set(map(_port_of, descriptors))):
            kept[name] = descriptors
        else:
            for descriptor in descriptors:
                os.close(descriptor)
    return kept


def _port_of(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        return int(sock.getsockname()[1])


def _socket_of(options: LiveConfig) -> Path:
    """Return the unix socket at which operators reach a server of these settings."""
    for address in getattr(options, "control_addresses", ()):
        if address.startswith("ipc://"):
            return Path(address.removeprefix("ipc://"))
        if address == "ipc":
            return usual_socket(*_address_of(options))
    raise ConfigError("--replace needs a socket for operators", hint='write control = "ipc", which is the default')


def _address_of(options: LiveConfig) -> tuple[str, int]:
    handed = options.listen_fds.get("rtmp")
    if handed:
        with socket.socket(fileno=os.dup(handed[0])) as sock:
            return sock.getsockname()[0], sock.getsockname()[1]
    (_, ((host, port), *_)), *_ = options.listening
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
    return str(found[0]), port
