"""What systemd gives a service, sockets that listen already, and what it wants to hear of it.

Both are a few lines of text: variables of the environment (man sd_listen_fds), and datagrams to a socket (sd_notify).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Final

from flowctl.errors import ConfigError

NAMES: Final = ("rtmp", "rtmps", "http", "https")
"""Purposes of a socket: ``FileDescriptorName=`` of the socket unit."""
_FIRST_DESCRIPTOR: Final = 3
"""Number of the first handed descriptor, SD_LISTEN_FDS_START: after standard input, output and error."""
_MOST: Final = 1024
STATUS_S: Final = 10.0
"""Time between two lines on how the service is."""


def handed_sockets(environment: MutableMapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the descriptors of the sockets that systemd handed to this process, by what they are for.

    They, and the variables that tell of them, are not for processes that this one starts.
    """
    pid, count, names = (environment.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal() or not 0 < int(count) <= _MOST:
        return {}
    words = names.split(":") if names else []
    words += ["unknown"] * (int(count) - len(words))
    places: dict[str, tuple[int, ...]] = {}
    for descriptor, word in enumerate(words[: int(count)], _FIRST_DESCRIPTOR):
        if word not in NAMES:
            raise ConfigError(
                f"systemd handed over a socket with the name {word!r:.60}",
                hint=f"say what it is for: FileDescriptorName={'|'.join(NAMES)} in the socket unit",
            )
        os.set_inheritable(descriptor, False)
        places[word] = (*places.get(word, ()), descriptor)
    return places


class Notifier:
    """Tells systemd how the service is. Without systemd it does nothing, and `active` is False. Main thread."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        # A name in the abstract namespace is written with @ and begins with a zero octet.
        self._address: Final = "\0" + path[1:] if path.startswith("@") else path
        self.active: Final = bool(path)
        usec = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        watched = usec.isdecimal() and int(usec) > 0 and pid == str(os.getpid())
        self.watchdog_s: Final = int(usec) / 2e6 if watched and path else None
        """How often to say `alive`: half of what systemd waits for. None: it does not wait."""

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.settimeout(1.0)
            sock.sendto("\n".join(lines).encode(), self._address)

    def ready(self, status: str) -> None:
        """The service serves; also when it has taken other settings."""
        self._tell("READY=1", f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """The service is taking other settings; `ready` says that it has."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def status(self, text: str) -> None:
        self._tell(f"STATUS={_line(text)}")

    def alive(self) -> None:
        """Keep the watchdog from ending the service."""
        self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")


class ThreadProbe:
    """Checks that all threads of a server come to what they are asked to do. Main thread."""

    def __init__(self, threads: Iterable[Callable[[Callable[[], None]], None]]) -> None:
        self._threads: Final = tuple(threads)  # `call_soon` of each
        self._answered = [True] * len(self._threads)

    def probe_threads(self) -> bool:
        """Return whether all have answered since the last probe, and ask those again that have."""
        alive = all(self._answered)
        for number, call_soon in enumerate(self._threads):
            if self._answered[number]:
                self._answered[number] = False
                with contextlib.suppress(Exception):  # it has ended: it does not answer
                    call_soon(partial(self._answer, number))
        return alive

    def _answer(self, number: int) -> None:
        self._answered[number] = True


def _line(text: str) -> str:
    return text.replace("\n", " ")
