"""What the rule for slow viewers gives: the real Sender on simulated lines, in virtual time.

Run ``python bench slow_simulation``. A stream of 1.5 Mbit/s, with sound and without, of which each group of pictures
lasts 1 to 20 s and its key frame takes 5 to 95 % of it (a camera at one end, a shared screen at the other), goes to one
viewer behind a line that carries 5 to 200 % of the rate, through log, fan-out, Sender and a kernel with a low mark.
The limits are those of a live server. What counts are the pictures and the sound that came of those published after two
groups, how late the pictures were, and why the viewer was closed, if it was. Seeded dice and virtual time: the same
figures on any machine. ``bench slow`` has some of these lines with real sockets and real H.264.
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.sender import Sender
from flowctl.testing import ManualGroup, ManualHost
from kit.tables import print_rows, table

BYTES_PER_S: Final = 1_500_000 / 8
SOUND_BYTES_PER_S: Final = 16_000
FPS: Final = 30
SOUND_PER_S: Final = 43
LIMITS: Final = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")
GOPS_S: Final = (1.0, 2.0, 10.0, 20.0)
KEY_SHARES: Final = (0.05, 0.2, 0.4, 0.8, 0.95)
LINES: Final = (0.05, 0.2, 0.5, 0.6, 0.8, 0.95, 1.05, 2.0)
QUICK: Final[dict[str, Any]] = {"gops_s": (1.0,), "key_shares": (0.2,), "lines": (0.5, 1.5)}
"""Arguments of `run` for a look at whether it works."""
_STEP_S: Final = 0.005
_FLUSH_S: Final = 0.04
_KERNEL_BYTES: Final = 128 * 1024
_SEGMENT_BYTES: Final = 16 * 1024
_HEAD_BYTES: Final = 8
_LEAST_S: Final = 60.0

Message = tuple[float, MessageClass, int]
"""(when it is published, class, size)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One viewer of one stream.

    Args:
        gop_s: time between key frames.
        line: share of the stream's rate that the line carries.
        groups: how many are published, but for a minute at least.
    """

    gop_s: float
    key_share: float
    line: float
    sound: bool
    groups: int

    @property
    def seconds(self) -> float:
        """Length of the stream."""
        return max(self.groups * self.gop_s, _LEAST_S)


class LineKernel:
    """A kernel with a low-water mark, and a line behind it that carries `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.host = ManualHost()
        self.received = bytearray()
        self.carried = 0.0
        self.arrived: list[tuple[int, float]] = []  # (number of the message, when)
        self._parsed = 0

    @property
    def held_bytes(self) -> int:
        """What was taken and not carried yet."""
        return len(self.received) - int(self.carried)

    @property
    def mark_bytes(self) -> int:
        """What is taken ahead."""
        return self.host.unsent_limit_bytes or _KERNEL_BYTES

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Take what there is room for."""
        return self.send(b"".join(buffers))

    def send(self, data: bytes, /) -> int:
        """Take what there is room for, and a segment beyond."""
        room = self.mark_bytes - self.held_bytes
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "enough is unsent")
        count = min(len(data), room + _SEGMENT_BYTES)
        self.received += data[:count]
        return count

    def carry(self, now: float) -> bool:
        """Let the line carry what it can in a step; return whether the kernel tells that it takes more."""
        self.carried = min(self.carried + self.bytes_per_s * _STEP_S, len(self.received))
        self.note_arrived(now)
        return self.held_bytes < self.mark_bytes / 2

    def note_arrived(self, now: float) -> None:
        """Note the messages that the line has carried whole."""
        while self._parsed + _HEAD_BYTES <= self.carried:
            head = self.received[self._parsed : self._parsed + _HEAD_BYTES]
            size = int.from_bytes(head[4:], "big")
            if self._parsed + size > self.carried:
                break
            self.arrived.append((int.from_bytes(head[:4], "big"), now))
            self._parsed += size


def stream_of(case: Case) -> list[Message]:
    """Return what is published; sizes vary by a fifth either way."""
    dice, count = Random(1), int(case.gop_s * FPS)
    video = (BYTES_PER_S - case.sound * SOUND_BYTES_PER_S) * case.gop_s
    key, other = video * case.key_share, video * (1 - case.key_share) / (count - 1)
    kinds = [MessageClass.INTER if number % count else MessageClass.KEY for number in range(int(case.seconds * FPS))]
    sizes = {MessageClass.KEY: key, MessageClass.INTER: other}
    pictures = [(at / FPS, item, int(sizes[item] * dice.uniform(0.8, 1.2))) for at, item in enumerate(kinds)]
    pieces = range(int(case.seconds * SOUND_PER_S) if case.sound else 0)
    sound = [(at / SOUND_PER_S, MessageClass.AUDIO, int(SOUND_BYTES_PER_S / SOUND_PER_S)) for at in pieces]
    return sorted(pictures + sound)


def play(case: Case) -> dict[str, Any]:
    """Let one viewer follow one stream; return its row."""
    group, messages = ManualGroup(), stream_of(case)
    kernel = LineKernel(case.line * BYTES_PER_S)
    host = kernel.host = ManualHost(group)
    host.unacknowledged = lambda: kernel.held_bytes
    sender = host.sender = Sender(host, kernel, limits=LIMITS, policy=LivePolicy())
    log = StreamLog()
    sender.follow(Fanout(log, group, flush_interval_s=_FLUSH_S))
    began, steps, place = group.now(), 0, 0
    while steps * _STEP_S < case.seconds:
        while place < len(messages) and messages[place][0] <= steps * _STEP_S:
            _, item, size = messages[place]
            wire = place.to_bytes(4, "big") + max(size, _HEAD_BYTES).to_bytes(4, "big")
            log.append(wire.ljust(size, b"."), item, group.now())
            place += 1
        group.run(_STEP_S)
        steps += 1
        if kernel.carry(group.now() - began):
            host.poll_writable()
            group.run()
    return _row(case, messages, kernel.arrived, [reason.value for reason, _ in host.closed])


def _row(case: Case, messages: list[Message], arrived: list[tuple[int, float]], closed: list[str]) -> dict[str, Any]:
    since, until = 2 * case.gop_s, case.seconds - min(case.gop_s, 10.0) - 2.0
    counts = [number for number, (at, _, _) in enumerate(messages) if since <= at < until]
    offered, came = set(counts), [entry for entry in arrived if counts[0] <= entry[0] <= counts[-1]]
    sound = {number for number in offered if messages[number][1] is MessageClass.AUDIO}
    delays = sorted(at - messages[number][0] for number, at in came if number not in sound)
    heard = sum(number in sound for number, _ in came)
    return {
        "sound": "yes" if case.sound else "no",
        "gop_s": case.gop_s,
        "key_percent": round(100 * case.key_share),
        "line_percent": round(100 * case.line),
        "pictures_percent": round(100 * len(delays) / len(offered - sound), 1),
        "sound_percent": round(100 * heard / len(sound), 1) if sound else None,
        "delay_p50_s": round(delays[len(delays) // 2], 1) if delays else None,
        "delay_p95_s": round(delays[int(0.95 * len(delays))], 1) if delays else None,
        "closed": closed[0] if closed else "",
    }


def run(
    *,
    gops_s: Sequence[float] = GOPS_S,
    key_shares: Sequence[float] = KEY_SHARES,
    lines: Sequence[float] = LINES,
    sound: Sequence[bool] = (True, False),
    groups: int = 5,
) -> list[dict[str, Any]]:
    """Play every case; return a row for each."""
    return [
        play(Case(gop_s=gop_s, key_share=share, line=line, sound=with_sound, groups=groups))
        for with_sound in sound
        for gop_s in gops_s
        for share in key_shares
        for line in lines
    ]


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per stream, with a cell for each line."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        head = {"sound": row["sound"], "GOP": f"{row['gop_s']:g} s", "key frame": f"{row['key_percent']} %"}
        cell = f"{row['pictures_percent']:.0f} %"
        if row["sound"] == "yes":
            cell += f", {row['sound_percent']:.0f} %"
        if row["delay_p95_s"] is not None:
            cell += f", {row['delay_p50_s']:.1f} / {row['delay_p95_s']:.1f} s"
        cell += f", {row['closed']}" if row["closed"] else ""
        found.setdefault(tuple(head.values()), head)[f"{row['line_percent']} %"] = cell
    return list(found.values())


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document."""
    del images
    closed = sum(bool(row["closed"]) for row in rows)
    return f"{table(shown(rows))}\n\nClosed: {closed} of {len(rows)} viewers."


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gop", type=float, action="append", help="time between key frames, s; default: 1 to 20")
    parser.add_argument("--key", type=float, action="append", help="share of the key frame; default: 0.05 to 0.8")
    parser.add_argument("--line", type=float, action="append", help="share of the rate; default: 0.05 to 2")
    parser.add_argument("--json", action="store_true", help="every row instead of the table")
    given = parser.parse_args()
    rows = run(gops_s=given.gop or GOPS_S, key_shares=given.key or KEY_SHARES, lines=given.line or LINES)
    print_rows(rows, as_json=True) if given.json else print(table(shown(rows)))


if __name__ == "__main__":
    main()
