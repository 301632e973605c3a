"""Exactly once in effect: messages over a faulty link between two processes that are killed again and again.

Run ``python bench messenger_faults``, a minute. A sender puts numbers into its outbox, a receiver writes each number
into a table of its own, in the transaction that notes the message as received. Between them stands a link that loses,
doubles, delays and cuts. At random moments one of the two is killed (SIGKILL) and started again with its file. At the
end the numbers in the table are counted: each has to be there once, and the outbox has to be empty.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from kit import processes
from kit.machine import HERE
from kit.tables import print_rows
from messenger.link import Faults, FaultyLink

FAULTS: Final = Faults(drop=0.2, duplicate=0.05, late=0.1, late_s=0.02, cut_messages=5000)
PAUSE_S: Final = (0.05, 1.0)
SIZE_EVERY_S: Final = 0.02
FILES: Final = ("", "-wal", "-shm", "-lock")


@dataclass
class Worker:
    """The sender or the receiver: a process that is started again after it was killed."""

    command: list[str]
    kills: int = 0
    child: subprocess.Popen[str] | None = None
    last: dict[str, Any] = field(default_factory=dict)  # what it said last
    ended: threading.Event = field(default_factory=threading.Event)  # it has said that all is done

    def start(self) -> None:
        """Start it, and return once it runs."""
        command = [sys.executable, "-m", *self.command]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE, env=processes.environment())
        processes.read_json(self.child)
        threading.Thread(target=self._listen, args=(self.child,), daemon=True).start()

    def kill(self) -> None:
        """Kill it at once, whatever it is doing, and start it again."""
        self.end(signal.SIGKILL)
        self.kills += 1
        self.start()

    def end(self, number: signal.Signals) -> None:
        """Send it a signal and wait for its end."""
        if self.child is not None:
            self.child.send_signal(number)
            self.child.wait()

    def _listen(self, child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(RuntimeError):  # it was killed instead
            self.last = processes.read_json(child)
            self.ended.set()
        processes.stream_of(child.stdout).close()


class Sizes:
    """The most that the files of a store took of the disk, looked at all the time."""

    def __init__(self, *stores: Path) -> None:
        self.most = dict.fromkeys(stores, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(SIZE_EVERY_S):
            for store in self.most:
                self.most[store] = max(self.most[store], size_bytes(store))


def size_bytes(store: Path) -> int:
    """Return what the files of a store take of the disk now."""
    total = 0
    for ending in FILES:
        with contextlib.suppress(FileNotFoundError):
            total += Path(f"{store}{ending}").stat().st_size
    return total


@contextlib.contextmanager
def running(*workers: Worker) -> Iterator[None]:
    """Start workers, and let none of them outlive the block."""
    try:
        for worker in workers:
            worker.start()
        yield
    finally:
        for worker in workers:
            worker.end(signal.SIGKILL)


def counted(store: Path, statement: str) -> tuple[int, ...]:
    """Return the first row of what a statement finds in a store."""
    connection = sqlite3.connect(store)
    try:
        row: tuple[int, ...] = connection.execute(statement).fetchone()
    finally:
        connection.close()
    return row


def run(
    *,
    messages: int = 100_000,
    body_bytes: int = 100,
    kills: int = 60,
    pause_s: tuple[float, float] = PAUSE_S,
    limit_s: float = 900.0,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Send messages over the link while sender and receiver are killed."""
    dice = random.Random(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outbox, inbox = Path(folder, "outbox.db"), Path(folder, "inbox.db")
        port = processes.free_port()
        link = FaultyLink(port, FAULTS, seed)
        link.start()
        receiver = Worker(["messenger.applier", f"tcp://127.0.0.1:{port}", str(inbox)])
        sender = Worker(["messenger.counter", link.address, str(outbox), str(messages), str(body_bytes)])
        with running(receiver, sender), Sizes(outbox, inbox) as sizes:
            for _ in range(kills):
                if sender.ended.wait(dice.uniform(*pause_s)) or time.monotonic() - began > limit_s:
                    break
                dice.choice((sender, receiver)).kill()
            sender.ended.wait(max(0.0, limit_s - (time.monotonic() - began)))
            seconds = time.monotonic() - began
            link.stop()
        applied, different = counted(inbox, "SELECT count(*), count(DISTINCT number) FROM effects")
        rows_seen = counted(inbox, "SELECT count(*) FROM messenger_seen")[0]
        left = counted(outbox, "SELECT count(*) FROM messenger_outbox")[0]
    passed = link.passed
    return [
        {
            "messages": messages,
            "applied": applied,
            "missing": messages - different,
            "twice": applied - different,
            "left": left,
            "sender_killed": sender.kills,
            "receiver_killed": receiver.kills,
            "seconds": round(seconds, 1),
            "per_s": round(messages / seconds),
            "passed": passed.messages,
            "dropped": passed.dropped,
            "doubled": passed.duplicated,
            "late": passed.late,
            "cuts": passed.cuts,
            "rows_seen": rows_seen,
            "outbox_most_mb": round(sizes.most[outbox] / 1e6, 1),
            "inbox_most_mb": round(sizes.most[inbox] / 1e6, 1),
        }
    ]


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that fit on a screen: a figure each."""
    return [{"figure": key.replace("_", " "), "value": value} for row in rows for key, value in row.items()]


def document(rows: list[dict[str, Any]], _images: object = None) -> str:
    """Return the part of the document."""
    row = rows[0]
    return (
        f"{row['messages']:,} messages, each applied once: {row['missing']} missing, {row['twice']} applied twice, "
        f"{row['left']} left in the outbox. It took {row['seconds']:g} s ({row['per_s']:,} a second), in which the "
        f"sender was killed {row['sender_killed']} times and the receiver {row['receiver_killed']} times. Of "
        f"{row['passed']:,} messages and acknowledgements on the link {row['dropped']:,} were lost, {row['doubled']:,} "
        f"doubled, {row['late']:,} late; it was cut {row['cuts']} times. The outbox took up to "
        f"{row['outbox_most_mb']:g} MB of the disk, the inbox with its table {row['inbox_most_mb']:g} MB, "
        f"{row['rows_seen']} of its rows for what was seen."
    )


QUICK: Final[dict[str, Any]] = {"messages": 5000, "kills": 6, "limit_s": 60.0}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000, help="how many (default %(default)s)")
    parser.add_argument("--body", type=int, default=100, metavar="BYTES", help="size of each (default %(default)s)")
    parser.add_argument("--kills", type=int, default=60, help="at most so many (default %(default)s)")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="give up after (default 900)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and kills (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="the row as JSON instead of a table")
    arguments = parser.parse_args()
    rows = run(
        messages=arguments.messages,
        body_bytes=arguments.body,
        kills=arguments.kills,
        limit_s=arguments.limit,
        seed=arguments.seed,
    )
    print_rows(rows if arguments.json else shown(rows), as_json=arguments.json)
    if rows[0]["missing"] or rows[0]["twice"] or rows[0]["left"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
