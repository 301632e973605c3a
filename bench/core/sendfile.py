"""Pieces: writing the same bytes to many sockets by `send` and by `sendfile` from a memory file, by size.

Run ``python bench sendfile``. Loopback connections to a process that reads everything; the ways take turns.
What counts is the processor time of both ends, for on loopback the writer does some of the reader's work: of the
server per write, and of the reader for the same bytes. The reader copies what it reads, as players do.
`flowctl.core.fanout.cohort` uses `sendfile` from the size on at which it is the cheaper one here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kit.processes import raise_open_files
from kit.tables import table

SIZES: Final = (3_000, 12_500, 20_000, 30_000, 40_000, 110_000, 250_000, 500_000)
"""A flush of 40 ms at 600 kbit/s and at 2.5, 4, 6 and 8 Mbit/s; key frames, those of a 4k stream last."""
_LOWAT_BYTES: Final = 128 * 1024
_READ_BYTES: Final = 1 << 20


def processor_s() -> float:
    """Return user and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def read_everything(port: int, viewers: int, commands: int, answers: int) -> None:
    """Be the reader: connect, read, and answer each byte of `commands` with the processor time so far."""
    poll, socks = select.epoll(), {}
    for _ in range(viewers):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        socks[sock.fileno()] = sock
        poll.register(sock, select.EPOLLIN)
    poll.register(commands, select.EPOLLIN)
    buffer = bytearray(_READ_BYTES)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != commands:
                with contextlib.suppress(BlockingIOError):
                    socks[descriptor].recv_into(buffer)
            elif not os.read(commands, 1):
                return
            else:
                os.write(answers, f"{processor_s()!r}\n".encode())


class Crowd:
    """Connections to a reading process, for the time of a block."""

    def __init__(self, viewers: int) -> None:
        (theirs, self._commands), (answers, ours) = os.pipe(), os.pipe()
        with socket.create_server(("127.0.0.1", 0), backlog=min(viewers, 4096)) as listener:
            self.pid = os.fork()
            if not self.pid:
                os.close(self._commands)
                with contextlib.suppress(BaseException):
                    read_everything(listener.getsockname()[1], viewers, theirs, ours)
                os._exit(0)
            os.close(theirs)
            os.close(ours)
            self._answers = os.fdopen(answers)
            self.socks = [listener.accept()[0] for _ in range(viewers)]
        for sock in self.socks:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LOWAT_BYTES)

    def processor_s(self) -> float:
        """Return the processor time of the reader."""
        os.write(self._commands, b"?")
        return float(self._answers.readline())

    def close(self) -> None:
        """End the reader."""
        os.close(self._commands)
        for sock in self.socks:
            sock.close()
        os.waitpid(self.pid, 0)
        self._answers.close()


def by_send(socks: Sequence[socket.socket], data: bytes) -> int:
    """Write by copying; return how many did not take all."""
    partial = 0
    for sock in socks:
        try:
            partial += sock.send(data) != len(data)
        except BlockingIOError:
            partial += 1
    return partial


def by_sendfile(socks: Sequence[socket.socket], data: bytes) -> int:
    """Write by reference, the making of the file included; return how many did not take all."""
    partial = 0
    descriptor = os.memfd_create("bench")
    os.write(descriptor, data)
    for sock in socks:
        try:
            partial += os.sendfile(sock.fileno(), descriptor, 0, len(data)) != len(data)
        except BlockingIOError:
            partial += 1
    os.close(descriptor)
    return partial


WAYS: Final[dict[str, Callable[[Sequence[socket.socket], bytes], int]]] = {"send": by_send, "sendfile": by_sendfile}


def measure(crowd: Crowd, size: int, rounds: int, repeat: int) -> dict[str, Any]:
    """Return the row of one size."""
    data = os.urandom(size)
    used = {way: [0.0, 0.0, 0.0] for way in WAYS}
    pause_s = 0.03 + len(crowd.socks) * size / 4e9  # so that the reader has read everything when the next round comes
    for _ in range(repeat):
        for way, write in WAYS.items():
            time.sleep(0.1)
            reader, totals = crowd.processor_s(), used[way]
            for _ in range(rounds):
                began = processor_s()
                totals[2] += write(crowd.socks, data)
                totals[0] += processor_s() - began
                time.sleep(pause_s)
            time.sleep(0.1)
            totals[1] += crowd.processor_s() - reader
    writes = len(crowd.socks) * rounds * repeat
    row: dict[str, Any] = {"bytes": size}
    for way, totals in used.items():
        row[f"{way}_us"] = round(totals[0] / writes * 1e6, 1)
        row[f"{way}_reader_us"] = round(totals[1] / writes * 1e6, 1)
        row[f"{way}_not_all"] = f"{totals[2] / writes:.1%}"
    row["server_ratio"] = round(used["sendfile"][0] / used["send"][0], 2)
    row["both_ratio"] = round(sum(used["sendfile"][:2]) / sum(used["send"][:2]), 2)
    return row


def run(*, quick: bool = False, viewers: int = 500, rounds: int = 12, repeat: int = 3) -> list[dict[str, Any]]:
    """Measure all sizes."""
    if quick:
        viewers, rounds, repeat = 20, 3, 1
    raise_open_files()
    crowd = Crowd(viewers)
    try:
        return [measure(crowd, size, rounds, repeat) for size in SIZES]
    finally:
        crowd.close()


QUICK: Final[dict[str, Any]] = {"quick": True}
"""What `run` is called with for a look at whether it works."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    if not hasattr(os, "memfd_create"):
        sys.exit("error: this system has no anonymous memory files")
    print(table(run(viewers=arguments.viewers, rounds=arguments.rounds, repeat=arguments.repeat)))


if __name__ == "__main__":
    main()
