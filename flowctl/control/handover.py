"""A server that starts finds the one whose place it takes, has it drain, and gets its sockets."""

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


def drain_predecessor(options: LiveConfig, within_s: float) -> tuple[Successor, dict[str, tuple[int, ...]]] | None:
    """Have the server that operators reach where they will reach this one drain, and return its sockets.

    None: there is no server. Sockets that the settings have no use for are closed.
    """
    path = _socket_of(options)
    if not server_answers(path):
        _log.info("there is no server to replace", socket=str(path))
        return None
    _check_ports(options, call_operation(f"ipc://{path}", "stats", {})["server"]["listeners"])
    successor = Successor(path.with_name(f"successor-{os.getpid()}.hand"))
    try:
        call_operation(f"ipc://{path}", "drain", {"within": within_s, "successor": str(successor.path)})
        found = successor.receive_sockets()
    except BaseException:
        successor.__exit__()
        raise
    _log.info("sockets taken over", of=str(path), names=sorted(found))
    wanted = {name for name, addresses in options.listening if addresses and name not in options.listen_fds}
    return successor, _kept(found, wanted)


def _check_ports(options: LiveConfig, theirs: list[dict[str, str]]) -> None:
    """See that a port is free that is not handed over: once the other server drains it is too late to say so."""
    handed = {item["name"] for item in theirs} | options.listen_fds.keys()
    for name, addresses in options.listening:
        for host, port in () if name in handed else addresses:
            listening_socket(host, port, name).close()


def _kept(found: Mapping[str, tuple[int, ...]], wanted: set[str]) -> dict[str, tuple[int, ...]]:
    for name, descriptors in found.items():
        if name not in wanted:
            for descriptor in descriptors:
                os.close(descriptor)
    return {name: descriptors for name, descriptors in found.items() if name in wanted}


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
