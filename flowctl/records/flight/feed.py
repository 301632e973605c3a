"""The private log of a recorded viewer, filled from the stream's log under the Sender's lock.

It costs 450 bytes and a row per message and recorded viewer, for as long as the message waits; the octets are those of
the stream's log. What a viewer would know from before it joined (rates, groups of pictures, the largest message) is
given to the private log at its beginning, so that what is late is decided as it would have been.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import add, sub
from typing import Any, Final

from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits, Entry, StreamLog
from flowctl.core.sending.contract import CohortLike
from flowctl.records.flight.tape import Tape
from flowctl.records.flight.words import LOG_LANE, MICROSECONDS, dump
from flowctl.records.telemetry.schema import CLASS_NAMES
from flowctl.sender import Sender

_NO_CACHE: Final = CacheLimits(size_bytes=0)
"""A private log has one reader, who stands in it already: a cache would only hold what it has read."""
_KEY: Final = MessageClass.KEY


def new_private_log(name: str, seed: Mapping[str, Any], clock_us: int) -> StreamLog:
    """Return an empty log that knows what `seed_of` wrote."""
    log = StreamLog(name, cache=_NO_CACHE)
    log.has_video = seed["has_video"]
    log.largest_bytes = seed["largest_bytes"]
    log.gop_duration_s = seed["gop_duration_us"] / MICROSECONDS
    log.gop_bytes = seed["gop_bytes"]
    for at_us, counts, sizes in seed["rates"]:
        log.rates.note((clock_us + at_us) / MICROSECONDS, tuple(counts), tuple(sizes))
    return log


def seed_of(log: StreamLog, start: Entry, clock_us: int) -> dict[str, Any]:
    """Return what a viewer of `log` knows of the time before `start`; totals as seen from there, so mostly negative."""
    return {
        "has_video": log.has_video,
        "largest_bytes": log.largest_bytes,
        "gop_duration_us": round(log.gop_duration_s * MICROSECONDS),
        "gop_bytes": log.gop_bytes,
        "rates": [
            [
                round(at * MICROSECONDS) - clock_us,
                list(map(sub, counts, start.counts)),
                list(map(sub, sizes, start.sizes)),
            ]
            for at, counts, sizes in log.rates.notes
        ],
    }


class LogFeed:
    """Copies what is new in a stream's log to a private one. Not thread-safe: its Sender's lock guards it."""

    __slots__ = ("_base", "_base_totals", "_next", "_tape", "log", "private")

    def __init__(self, log: StreamLog, start: Entry, tape: Tape, seed: Mapping[str, Any]) -> None:
        self.log = log
        self._next: Entry | None = start  # None: nothing more is copied
        self._base = (start.offset, start.sequence)
        self._base_totals = (start.counts, start.sizes)
        self._tape = tape
        self.private = new_private_log(log.name, seed, tape.began_us)

    def run(self) -> None:
        """Copy what is new, before a call, with a row where new headers came in the middle of a group."""
        headers = self.copy()
        if headers is not None:
            self._tape.call("restart", {"restart": headers})

    def copy(self, lane: str = LOG_LANE) -> list[int] | None:
        """Copy what is new, a row for each message, with the time for which it has waited in the stream's log.

        Returns:
            Sizes of the newest headers, where the messages do not tell them.
        """
        tape, private, entry = self._tape, self.private, self._next
        while entry is not None and (following := entry.next) is not None:
            wire, item = entry.wire, entry.message_class
            restart = entry.gop.restart if item is _KEY else ()
            age_us = tape.age_us(entry.enqueued_at)
            more: dict[str, Any] = {"restart": [len(part) for part in restart]} if restart else {}
            if entry.leading:
                more["leading"] = True
            detail = dump(more) if more else None
            tape.queued(CLASS_NAMES[item], len(wire), lane, age_us / 1000, detail)
            private.append(wire, item, (tape.now_us - age_us) / MICROSECONDS, restart=restart, leading=entry.leading)
            entry = following
        self._next = entry
        headers = self.log.headers
        if private.headers is not headers and private.headers != headers:
            private.headers = headers
            return [len(part) for part in headers]
        return None

    def end(self) -> None:
        """Copy nothing more: the place would hold all that is published while a peer reads the rest."""
        self._next = None

    def to_stream(self, offset: int, sequence: int) -> tuple[int, int]:
        """Return a place of the private log, as (offset, sequence), as one of the stream's log."""
        return (
            offset if offset >= OFF_MARK else offset + self._base[0],
            sequence if sequence >= OFF_MARK else sequence + self._base[1],
        )

    def entry_in_stream(self, entry: Entry) -> Entry:
        """Return an entry that stands in the stream's log where `entry` stands in the private one, with its message."""
        offset, sequence = self.to_stream(entry.offset, entry.sequence)
        counts, sizes = self._base_totals
        there = Entry(
            sequence, offset, tuple(map(add, entry.counts, counts)), tuple(map(add, entry.sizes, sizes)), entry.gop
        )
        there.wire, there.message_class, there.enqueued_at = entry.wire, entry.message_class, entry.enqueued_at
        there.leading, there.next = entry.leading, entry.next
        return there


class PrivateCohort:
    """The fan-out of a stream as a recorded viewer's Sender sees it: with the private log. See `CohortLike`."""

    __slots__ = ("add", "guide_changed", "limits_changed", "log", "remove", "serve_alone", "serve_in_turn")

    def __init__(self, fanout: CohortLike[Sender], private: StreamLog) -> None:
        self.log: Final = private
        self.add: Final = fanout.add
        self.serve_alone: Final = fanout.serve_alone
        self.serve_in_turn: Final = fanout.serve_in_turn
        self.remove: Final = fanout.remove
        self.limits_changed: Final = fanout.limits_changed
        self.guide_changed: Final = fanout.guide_changed

    def brings_on(self, start: Entry) -> bool:
        """Return False: a recorded viewer is in no cohort."""
        del start
        return False
