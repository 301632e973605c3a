"""A server takes the place of another on the same machine: it is handed the sockets on which that one listens.

Theory of operation. The successor listens at a unix socket and has the other drain, naming its path. That one sends
copies of its sockets there (SCM_RIGHTS) and lends what only one process can have (`Loan`), but goes on accepting. The
successor starts with all of it, and only then says so: that is the point of no return, at which the other one closes
its sockets and drains. So there is no moment at which nobody listens. Where the connection breaks before, as the
successor could not start or was killed, or where it takes too long, the other one takes back what it has lent and goes
on as if nothing had been. The connection stays until the drained server has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Self, TypeAlias

import structlog

from flowctl.core.server.systemd import NAMES
from flowctl.errors import FlowctlError

_log: Final = structlog.get_logger("flowctl.server")
HANDED: Final = (*NAMES, "admin", "origin")
"""Purposes of the sockets that are handed over."""
MOST_SOCKETS: Final = 250
"""Sockets of one server at most; the kernel passes 253 at a time."""
_WAIT_S: Final = 5.0
"""Longest wait for the sockets of a server that has said that it hands them over: it has sent them before."""
SERVE_WITHIN_S: Final = 90.0
"""Longest wait for a successor to serve: workers may take 60 s to start."""
_SERVES: Final = b"s"
_GO: Final = b"g"
_TOO_LATE: Final = b"l"

Loan: TypeAlias = Callable[[Path], Callable[[], object]]
"""Lends something to the successor that waits at a path; returns what takes it back."""


def send_sockets(path: Path, sockets: Iterable[tuple[str, socket.socket]]) -> socket.socket:
    """Send copies of sockets, by what they are for, to the server that waits at `path`; return the connection."""
    given = [(name, sock) for name, sock in sockets if name in HANDED][:MOST_SOCKETS]
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.settimeout(_WAIT_S)
        conn.connect(str(path))
        socket.send_fds(conn, [json.dumps([name for name, _ in given]).encode()], [sock.fileno() for _, sock in given])
    except OSError as error:
        conn.close()
        raise FlowctlError(f"cannot hand the sockets to {path}: {error.strerror or error}") from error
    return conn


class Heir:
    """The server that is to take the place of this one, as this one sees it.

    Args:
        path: where it waits.
        sockets: copies of which it is sent, by what they are for.
        loans: what it is lent, in this order.
        give_way: called once it serves, on a thread of its own.
        go_on: called there if it does not come to that, once all is taken back.
    """

    def __init__(
        self,
        path: Path,
        sockets: Iterable[tuple[str, socket.socket]],
        loans: Iterable[Loan],
        give_way: Callable[[], object],
        go_on: Callable[[], object],
    ) -> None:
        self._path: Final = path
        self._give_way: Final = give_way
        self._go_on: Final = go_on
        self._taken_back: Final[list[Callable[[], object]]] = []
        self._ended = False
        self.waited_for = True  # it may still come to nothing
        self._conn: Final = send_sockets(path, sockets)
        try:
            for lend in loans:
                self._taken_back.append(lend(path))
        except BaseException:
            self._take_back("something could not be lent")
            raise
        self._thread: Final = threading.Thread(target=self._wait, name="flowctl-heir", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let it know that this server has ended; nothing is taken back any more."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._conn.shutdown(socket.SHUT_RDWR)  # wakes who waits
        self._thread.join(_WAIT_S)
        self._conn.close()

    def _wait(self) -> None:
        said, why = b"", "it ended before it served"
        try:
            self._conn.settimeout(SERVE_WITHIN_S)
            said = self._conn.recv(1)
        except TimeoutError:
            why = f"it did not serve within {SERVE_WITHIN_S:g} s"
            with contextlib.suppress(OSError):
                self._conn.sendall(_TOO_LATE)
        except OSError as error:
            why = str(error)
        if said != _SERVES:
            self._take_back(why)
            return
        self.waited_for = False
        try:
            self._give_way()
        except Exception as error:  # noqa: BLE001 - it serves, and is not to wait
            _log.error("not everything could be left to the server that takes the place of this one", fault=str(error))
        with contextlib.suppress(OSError):  # else it was killed just now
            self._conn.sendall(_GO)

    def _take_back(self, why: str) -> None:
        self._conn.close()
        self._path.unlink(missing_ok=True)  # it may have been killed
        for take_back in () if self._ended else reversed(self._taken_back):
            try:
                take_back()
            except Exception as error:  # noqa: BLE001 - the rest is to be taken back all the same
                _log.error("not everything that was lent to another server could be taken back", fault=str(error))
        self.waited_for = False
        if not self._ended:
            _log.warning("no other server takes the place of this one, it goes on", why=why)
            self._go_on()


class Successor:
    """The server that takes the place of another one, while it starts and while that one drains.

    Args:
        path: of the unix socket at which it waits for the sockets; in a folder of this user alone.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._listener: Final = socket.socket(socket.AF_UNIX)
        self._conn: socket.socket | None = None
        self._served: Final = threading.Event()  # or it never will
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
            raise FlowctlError(f"the other server has handed no sockets over: {error}") from error
        finally:
            self._close_listener()
        self._conn.settimeout(None)
        found: dict[str, tuple[int, ...]] = {}
        for name, descriptor in zip(names, descriptors, strict=True):
            os.set_inheritable(descriptor, False)
            found[name] = (*found.get(name, ()), descriptor)
        return found

    def take_over(self) -> None:
        """Say that this server serves, and have the other one drain; it accepts nothing any more on return.

        Raises:
            FlowctlError: it has waited too long, and goes on serving.
        """
        if self._conn is None:
            return
        answer = b""
        self._conn.settimeout(SERVE_WITHIN_S)
        with contextlib.suppress(OSError):  # it has ended by itself: this one is alone
            self._conn.sendall(_SERVES)
        with contextlib.suppress(OSError):  # as above; what it said before is there still
            answer = self._conn.recv(1)
        if answer == _TOO_LATE:
            raise FlowctlError(
                f"this server took more than {SERVE_WITHIN_S:g} s to start, and the other one goes on",
                hint="look at the lines above for what took so long, and start it again",
            )
        self._conn.settimeout(None)
        self._served.set()

    def wait_for_end(self) -> None:
        """Wait until this server serves, and the other one has ended."""
        self._served.wait()
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
        self._served.set()
