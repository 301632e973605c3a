"""A server takes the place of another on the same machine: it is handed the sockets on which that one listens.

The successor listens at a unix socket and has the other drain, naming its path. Before that one closes its sockets it
sends copies of them there (SCM_RIGHTS), so that there is no moment at which nobody listens: a client that connects
meanwhile waits in the same queue. The connection stays until the drained server has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

from flowctl.core.server.systemd import NAMES
from flowctl.errors import FlowctlError

MOST_SOCKETS: Final = 250
"""Sockets of one server at most; the kernel passes 253 at a time."""
_WAIT_S: Final = 5.0
"""Longest wait for the sockets of a server that has said that it drains: it has sent them before."""


def send_sockets(path: Path, sockets: Iterable[tuple[str, socket.socket]]) -> socket.socket:
    """Send copies of sockets, by what they are for, to the server that waits at `path`; return the connection."""
    given = [(name, sock) for name, sock in sockets if name in NAMES][:MOST_SOCKETS]
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.settimeout(_WAIT_S)
        conn.connect(str(path))
        socket.send_fds(conn, [json.dumps([name for name, _ in given]).encode()], [sock.fileno() for _, sock in given])
    except OSError as error:
        conn.close()
        raise FlowctlError(f"cannot hand the sockets to {path}: {error.strerror or error}") from error
    return conn


class Successor:
    """The server that takes the place of another one, while it starts and while that one drains.

    Args:
        path: of the unix socket at which it waits for the sockets; in a folder of this user alone.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._listener: Final = socket.socket(socket.AF_UNIX)
        self._conn: socket.socket | None = None
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1)
        self._listener.settimeout(_WAIT_S)

    def receive_sockets(self) -> Mapping[str, tuple[int, ...]]:
        """Return the descriptors that the other server has sent, by what they are for."""
        try:
            self._conn, _ = self._listener.accept()
            self._conn.settimeout(_WAIT_S)
            octets, descriptors, _, _ = socket.recv_fds(self._conn, 64 * 1024, MOST_SOCKETS)
            names = json.loads(octets)
        except (OSError, ValueError) as error:
            raise FlowctlError(f"the server that drains has handed no sockets over: {error}") from error
        finally:
            self._close_listener()
        self._conn.settimeout(None)
        found: dict[str, tuple[int, ...]] = {}
        for name, descriptor in zip(names, descriptors, strict=True):
            os.set_inheritable(descriptor, False)
            found[name] = (*found.get(name, ()), descriptor)
        return found

    def wait_for_end(self) -> None:
        """Wait until the other server has ended."""
        if self._conn is not None:
            with contextlib.suppress(OSError):
                self._conn.recv(1)

    def __enter__(self) -> Self:
        return self

    def _close_listener(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def __exit__(self, *exc_info: object) -> None:
        self._close_listener()
        if self._conn is not None:
            with contextlib.suppress(OSError):
                self._conn.shutdown(socket.SHUT_RDWR)  # wakes who waits
            self._conn.close()
