"""What the choice of renditions gives: the real StreamSet and Sender on simulated lines, in virtual time.

Run ``python bench rendition_simulation``. A set of two to five renditions, 2.5 Mbit/s the largest, with the same sound,
goes for two minutes to one viewer behind a line of 30 to 1000 % of that, or one that jumps, falls, rises, or rests now
and then. The line is that of an even reader with a small receive buffer, or has a round trip and TCP's slow start, or
a shaper that lets a burst pass. What counts is what came of the pictures published while the viewer was there, how late
they were, the longest freeze after the first switch, the share of time in the largest rendition that fits the line, and
the switches. ``key_s`` is what the largest key frame of that rendition alone takes: no freeze can be shorter. Seeded
dice and virtual time: the same figures on any machine. ``bench renditions`` has some of these lines with real sockets.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

from core.slow_simulation import LineKernel
from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import LEAST_TARGET_S, MOST_TARGET_S
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.sender import Sender
from flowctl.streamset import StreamSet
from flowctl.testing import ManualGroup, ManualHost
from kit.tables import print_rows, table

LARGEST_BITS_PER_S: Final = 2_500_000
SETS: Final = {
    2: (500_000, LARGEST_BITS_PER_S),
    3: (500_000, 1_200_000, LARGEST_BITS_PER_S),
    4: (500_000, 900_000, 1_500_000, LARGEST_BITS_PER_S),
    5: (400_000, 800_000, 1_200_000, 1_800_000, LARGEST_BITS_PER_S),
}
STEADY: Final = (0.3, 0.5, 0.85, 1.2, 2.0, 10.0)
CHANGING: Final[dict[str, Callable[[float], float]]] = {
    "jump": lambda now: 1.2 if now % 10 < 5 else 0.3,
    "drop": lambda now: 1.2 if now < 61 else 0.3,
    "rise": lambda now: 0.3 if now < 60 else 1.2,
    "wave": lambda now: 1.2 if now % 40 < 20 else 0.3,
    "rests": lambda now: 0.0 if now % 2.3 < 0.4 else 1.1,
}
"""Share of the largest rate that a line carries, by seconds since the viewer came."""
LINES: Final = (*map(str, STEADY), *CHANGING)
QUICK: Final[dict[str, Any]] = {"worlds": ({},), "lines": ("0.5", "drop"), "seconds": 30.0}
"""Arguments of `run` for a look at whether it works."""
WORLDS: Final[tuple[dict[str, Any], ...]] = (
    {},
    *({"gop_s": gop_s} for gop_s in (1.0, 4.0, 10.0)),
    *({"round_trip_s": round_trip_s} for round_trip_s in (0.005, 0.05, 0.2)),
    *({"renditions": count} for count in (2, 4, 5)),
    *({"shaper_bytes": size} for size in (64_000, 256_000)),
    *({"shaper_bytes": size, "key_share": 0.07} for size in (6_000, 64_000)),
    *({"key_share": share} for share in (0.15, 0.35)),
)
"""What differs from the usual case, one thing at a time."""

_SOUND_BYTES_PER_S: Final = 12_000
_SOUND_PER_S: Final = 43
_FPS: Final = 30
_STEP_S: Final = 0.005
_BEFORE_S: Final = 13.0
"""What is published before the viewer comes: then the rates of the renditions are known."""
_RECEIVE_BUFFER_BYTES: Final = 2800
"""What an even reader's kernel takes ahead, two segments: `flowctl.wire.client.throttle`."""
_SEGMENT_BYTES: Final = 1400
_FIRST_WINDOW_BYTES: Final = 10 * _SEGMENT_BYTES
_HELD_ACK_S: Final = 0.04
"""How long the acknowledgement of a last single segment is held back."""
_ROUTER_BYTES: Final = 150_000
"""What fits into the queue before a line."""
_SHAPER_BITS_PER_S: Final = 50_000_000
_SOUND: Final = 0xFF
_HEAD_BYTES: Final = 8
LIMITS: Final = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")

Message = tuple[float, MessageClass, int, int]
"""(when it is published, class, size, number)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One viewer of one set.

    Args:
        line: name of a changing line, or the share of the largest rate that a steady one carries.
        renditions: their number.
        key_share: share of a group of pictures that its key frame takes.
        round_trip_s: 0: the viewer is an even reader on the same machine.
        shaper_bytes: what passes at full speed before the line's rate counts; 0: there is no shaper.
        seconds: how long the viewer stays.
    """

    line: str
    renditions: int = 3
    gop_s: float = 2.0
    key_share: float = 0.27
    round_trip_s: float = 0.0
    shaper_bytes: int = 0
    seconds: float = 120.0

    @property
    def rates(self) -> dict[str, int]:
        """Bits per second by name, smallest first."""
        return {f"{rate / 1e6:g}": rate for rate in SETS[self.renditions]}

    def bytes_per_s(self, now: float) -> float:
        """Return what the line carries `now` seconds after the viewer came."""
        changing = CHANGING.get(self.line)
        return (float(self.line) if changing is None else changing(now)) * LARGEST_BITS_PER_S / 8

    @property
    def fitting(self) -> str | None:
        """The largest rendition that fits; None: that changes."""
        if self.line in CHANGING:
            return None
        names = [name for name, rate in self.rates.items() if rate <= float(self.line) * LARGEST_BITS_PER_S]
        return names[-1] if names else next(iter(self.rates))


class PathKernel(LineKernel):
    """A kernel with a low-water mark, a network and a line behind it."""

    def __init__(self, case: Case) -> None:
        super().__init__(0.0)
        self._case = case
        self._now = 0.0
        self._window = float(_FIRST_WINDOW_BYTES)
        self._tokens = float(case.shaper_bytes)
        self._sent = self.acknowledged = 0
        self._on_way: deque[tuple[float, int]] = deque()  # (when its acknowledgement comes, carried up to there)
        self._seen, self._seen_at = 0, 0.0  # how far acknowledgements came, and when

    @property
    def held_bytes(self) -> int:
        """What was taken and is not on the network."""
        return len(self.received) - self._sent

    def carry(self, now: float) -> bool:
        """Let the line carry what it can in a step; return whether the kernel tells that it takes more."""
        case, self._now = self._case, now
        offered = len(self.received)
        if case.round_trip_s:
            offered = self._sent = max(self._sent, min(offered, self.acknowledged + int(self._window)))
        able = case.bytes_per_s(now) * _STEP_S
        if case.shaper_bytes:
            self._tokens = min(self._tokens + able, case.shaper_bytes)
            able = min(self._tokens, _SHAPER_BITS_PER_S / 8 * _STEP_S)
        before = self.carried
        self.carried = min(before + able, offered)
        self._tokens -= self.carried - before
        self.note_arrived(now + case.round_trip_s / 2)
        self._acknowledge(now)
        return self.held_bytes < self.mark_bytes / 2

    def _acknowledge(self, now: float) -> None:
        case = self._case
        self._on_way.append((now + case.round_trip_s, int(self.carried)))
        while self._on_way and self._on_way[0][0] <= now:
            place = self._on_way.popleft()[1]
            if not case.round_trip_s:
                place = self._sent = min(len(self.received), place + _RECEIVE_BUFFER_BYTES)
            if place > self._seen:
                self._seen, self._seen_at = place, now
        pairs = self._seen - self._seen % (2 * _SEGMENT_BYTES)
        found = self._seen if now - self._seen_at >= _HELD_ACK_S else max(pairs, self.acknowledged)
        if self._sent - self.acknowledged >= self._window - 2 * _SEGMENT_BYTES:  # else it does not grow
            most = case.bytes_per_s(now) * case.round_trip_s + _ROUTER_BYTES
            self._window = min(self._window + found - self.acknowledged, most)
        self.acknowledged = found


def pictures(rate: int, case: Case) -> list[Message]:
    """Return the pictures of a rendition; groups vary by a tenth, pictures by a quarter, the same in all of them."""
    dice, count = Random(1), int(case.gop_s * _FPS)
    group = (rate / 8 - _SOUND_BYTES_PER_S) * case.gop_s
    key, other = group * case.key_share, group * (1 - case.key_share) / (count - 1)
    found: list[Message] = []
    for number in range(int((case.seconds + _BEFORE_S) * _FPS)):
        if number % count == 0:
            of_group = dice.uniform(0.9, 1.1)
        item, size = (MessageClass.INTER, other) if number % count else (MessageClass.KEY, key)
        found.append((number / _FPS, item, max(int(size * of_group * dice.uniform(0.75, 1.25)), _HEAD_BYTES), number))
    return found


def published(case: Case) -> Iterator[tuple[float, list[str], MessageClass, bytes]]:
    """Yield what is published, in order: (when, renditions that get it, class, message)."""
    names, count = list(case.rates), int((case.seconds + _BEFORE_S) * _SOUND_PER_S)
    sound = [
        (number / _SOUND_PER_S, MessageClass.AUDIO, _SOUND_BYTES_PER_S // _SOUND_PER_S, number)
        for number in range(count)
    ]
    streams = {index: pictures(rate, case) for index, rate in enumerate(case.rates.values())} | {_SOUND: sound}
    events = [(message, index) for index, stream in streams.items() for message in stream]
    for (at, item, size, number), index in sorted(events, key=lambda event: event[0][0]):
        wire = (index << 24 | number).to_bytes(4, "big") + size.to_bytes(4, "big")
        yield at, names if index == _SOUND else [names[index]], item, wire.ljust(size, b".")


class Watcher:
    """One viewer, as a set wants it."""

    def __init__(self, group: ManualGroup, kernel: PathKernel) -> None:
        self.group: Any = group
        self.place: FollowPlace | None = None
        self.renditions: RenditionBook | None = RenditionBook()
        host = kernel.host = ManualHost(group)
        host.unacknowledged = lambda: len(kernel.received) - kernel.acknowledged
        self.sender = host.sender = Sender(host, kernel, limits=LIMITS, policy=LivePolicy())

    def window_bytes(self) -> None:
        """Tell nothing: its program reads at once."""


def play(case: Case) -> dict[str, Any]:
    """Let one viewer follow one set; return its row."""
    group, kernel, streams = ManualGroup(), PathKernel(case), StreamSet()
    logs = {name: StreamLog(name) for name in case.rates}
    for name, log in logs.items():
        streams.put(name, log)
    came_at, watcher, steps, coming = group.now() + _BEFORE_S, Watcher(group, kernel), 0, published(case)
    at, names, item, wire = next(coming)
    while (now := steps * _STEP_S) < case.seconds + _BEFORE_S:
        while at <= now:
            for name in names:
                logs[name].append(wire, item, group.now())
            at, names, item, wire = next(coming, (inf, [], item, b""))
        if watcher.place is None and now >= _BEFORE_S:
            streams.view(watcher)
        group.run(_STEP_S)
        steps += 1
        if kernel.carry(group.now() - came_at):
            kernel.host.poll_writable()
            group.run()
    return _row(case, kernel, watcher, came_at)


def _row(case: Case, kernel: PathKernel, watcher: Watcher, came_at: float) -> dict[str, Any]:
    target_s, fitting = min(max(LEAST_TARGET_S, 0.75 * case.gop_s), MOST_TARGET_S), case.fitting
    until = case.seconds - target_s - 1.0  # what is later may be on its way
    came = [(at, (number & 0xFFFFFF) / _FPS - _BEFORE_S) for number, at in kernel.arrived if number >> 24 != _SOUND]
    delays = sorted(at - due for at, due in came if due >= 0)
    switches = [entry.at - came_at for entry in watcher.sender.ledger() if entry.kind is LedgerKind.SWITCH]
    arrivals = [at for at, _ in came if switches and at > switches[0]]
    book, keys = watcher.renditions or RenditionBook(), [0]
    seconds = book.seconds(came_at + case.seconds)
    if fitting is not None:
        keys = [size for _, item, size, _ in pictures(case.rates[fitting], case) if item is MessageClass.KEY]
    return {
        "line": case.line,
        "renditions": case.renditions,
        "gop_s": case.gop_s,
        "key_percent": round(100 * case.key_share),
        "round_trip_ms": round(1000 * case.round_trip_s),
        "shaper_kb": case.shaper_bytes // 1000,
        "target_s": target_s,
        "pictures_percent": round(100 * len({due for _, due in came if 0 <= due < until}) / (until * _FPS), 1),
        "delay_p50_s": round(delays[len(delays) // 2], 2),
        "delay_p95_s": round(delays[int(0.95 * len(delays))], 2),
        "freeze_s": round(max((after - before for before, after in pairwise(arrivals)), default=0.0), 2),
        "key_s": round(max(keys) / case.bytes_per_s(0.0), 2) if fitting else None,
        "fitting_percent": round(100 * seconds.get(fitting, 0.0) / case.seconds) if fitting else None,
        "seconds": {name: round(stay) for name, stay in seconds.items()},
        "switches": len(switches),
        "failed": book.failed,
        "closed": "".join(reason.value for reason, _ in kernel.host.closed),
    }


def run(
    *, worlds: Sequence[dict[str, Any]] = WORLDS, lines: Sequence[str] = LINES, seconds: float = 120.0
) -> list[dict[str, Any]]:
    """Play every case; return a row for each."""
    return [play(Case(line=line, seconds=seconds, **world)) for world in worlds for line in lines]


def _world(row: dict[str, Any]) -> str:
    words = (
        f"{row['renditions']} renditions" if row["renditions"] != Case.renditions else "",
        f"GOP {row['gop_s']:g} s" if row["gop_s"] != Case.gop_s else "",
        f"key frame {row['key_percent']} %" if row["key_percent"] != round(100 * Case.key_share) else "",
        f"round trip {row['round_trip_ms']} ms" if row["round_trip_ms"] else "",
        f"shaper of {row['shaper_kb']} kB" if row["shaper_kb"] else "",
    )
    return ", ".join(filter(None, words)) or "usual"


def _line(row: dict[str, Any]) -> str:
    return row["line"] if row["line"] in CHANGING else f"{100 * float(row['line']):.0f} %"


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per world, with a cell for each line: share of time in what fits, else pictures; delay; failed."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        share = row["pictures_percent"] if row["fitting_percent"] is None else row["fitting_percent"]
        cell = f"{share:.0f} %, {row['delay_p95_s']:.1f} s" + (f", {row['failed']} failed" if row["failed"] else "")
        found.setdefault(_world(row), {"set and way": _world(row)})[_line(row)] = cell
    return list(found.values())


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document."""
    del images
    usual = [
        {
            "line": _line(row),
            "pictures": f"{row['pictures_percent']:g} %",
            "delay p50 / p95": f"{row['delay_p50_s']:.2f} / {row['delay_p95_s']:.2f} s",
            "longest freeze": f"{row['freeze_s']:.2f} s",
            "largest key frame": "" if row["key_s"] is None else f"{row['key_s']:.2f} s",
            "time in renditions": ", ".join(f"{name}: {stay} s" for name, stay in row["seconds"].items()),
            "switches": row["switches"],
            "failed": row["failed"],
        }
        for row in rows
        if _world(row) == "usual"
    ]
    return f"{table(usual)}\n\n{table(shown(rows))}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--line", action="append", choices=LINES, help="the lines; default: all")
    parser.add_argument("--usual", action="store_true", help="the usual set and way only")
    parser.add_argument("--json", action="store_true", help="every row instead of the table")
    given = parser.parse_args()
    rows = run(worlds=WORLDS[:1] if given.usual else WORLDS, lines=given.line or LINES)
    print_rows(rows, as_json=True) if given.json else print(document(rows, Path()))


if __name__ == "__main__":
    main()
