"""Fan-out: writes a stream log to the viewers of one poll group, one system call per viewer and flush.

Theory of operation. Viewers that keep up all stand at the same place of the log. They form the *cohort*: the place is
kept once, the bytes from there to the log's tail are joined once per flush, and a flush is a loop over the members'
`socket.send` with those bytes. Nothing else is done per viewer: no lock, no queue, no counter (what a member was sent
is the distance the cohort moved, see `Sender.statistics`).

A member for which the kernel takes less leaves the cohort with its cursor where it stands, and is served alone, from
its own cursor, whenever its socket is writable. Once it has taken everything and nothing is refused for it, it enters
the cohort again. New viewers start alone, with the GOP cache.

A flush happens at most every `flush_interval_s`, and at once after a pause: the first message after a quiet interval
does not wait. What has not been offered to the kernel yet does not count against a viewer's limits, so members have
none to cross. Those who lag are looked at when the log has grown to where their next limit can be crossed, and after
each key frame: who is far from any limit costs nothing there either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flowctl.crossings import Crossings
from flowctl.errors import ClosedError, ConfigError
from flowctl.sender import FlushResult, Sender
from flowctl.streamlog import Entry, Place, StreamLog

DEFAULT_FLUSH_INTERVAL_S: Final = 0.040
"""Two and a half frames at 60 fps: the delay nobody sees, at a third of the cost of writing each message."""


class FanoutHost(Protocol):
    """What a fan-out needs of its poll group."""

    bytes_out: int

    def now(self) -> float:
        """Return the time in seconds."""

    def in_thread(self) -> bool:
        """Return whether the caller is on the group's thread."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Call on the group's thread. Any thread."""

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Call on the group's thread after a while. The group's thread."""


@dataclass(frozen=True, slots=True)
class FanoutStatistics:
    """A snapshot of one fan-out.

    Args:
        members: viewers in the cohort.
        alone: viewers served from their own cursor.
        rounds: flushes so far.
        left: times a member left the cohort.
        longest_round_s: longest flush so far.
        cohort_bytes: bytes written to members.
    """

    members: int
    alone: int
    rounds: int
    left: int
    longest_round_s: float
    cohort_bytes: int


class Fanout:
    """The viewers of one log on one poll group. All methods but `appended` belong to the group's thread.

    Args:
        log: what is fanned out.
        host: the poll group.
        flush_interval_s: least time between two flushes; 0 writes each message at once.

    Raises:
        ConfigError: the interval is not between 0 and 10 s.
    """

    def __init__(self, log: StreamLog, host: FanoutHost, *, flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S) -> None:
        if not 0 <= flush_interval_s <= 10:
            raise ConfigError(f"flush_interval_s is {flush_interval_s}, it must be between 0 and 10 s")
        self.log = log
        self.place = Place(log.tail)  # where all members stand; their cursors share it
        self.flush_interval_s = flush_interval_s
        self._host = host
        self._members: list[Sender] = []
        self._sends: list[Callable[[bytes], int]] = []  # of the members, in the same order: the hot loop's only data
        self._alone: dict[Sender, None] = {}  # everybody else, in the order in which they came
        self._runnable: dict[Sender, None] = {}  # those of them that the kernel has not refused
        self._armed = False  # a flush is on its way
        self._looking = False  # a look at the crossings is on its way
        self._last_flush = host.now() - flush_interval_s
        self._crossings: Crossings[Sender] = Crossings()  # the lagging viewers, by where to look at them next
        # Number of the key frame that was newest at the last look. The group itself would hold all that came after it.
        self._key_sequence = log.gop.key_sequence
        self._closed = False
        self._rounds = self._left = self._cohort_bytes = 0
        self._longest_round_s = 0.0
        log.listen(self)

    # -- viewers come and go

    def add(self, sender: Sender) -> None:
        """Serve `sender` from its own cursor until it has caught up."""
        self._alone[sender] = None
        self._runnable[sender] = None
        self._arm()

    def left(self, sender: Sender) -> None:
        """Serve a member from its own cursor from now on."""
        self._forget_member(sender)
        self._left += 1
        self._alone[sender] = None
        self._runnable[sender] = None
        self._arm()

    def runnable(self, sender: Sender) -> None:
        """Serve `sender` in the next flush: the kernel takes more again."""
        if sender in self._alone:
            self._runnable[sender] = None
            self._arm()

    def remove(self, sender: Sender) -> None:
        """Serve `sender` no longer; harmless when it is not served."""
        if sender.slot >= 0:
            self._forget_member(sender)
        self._alone.pop(sender, None)
        self._runnable.pop(sender, None)
        self._crossings.forget(sender)

    def limits_changed(self, sender: Sender) -> None:
        """Take note that the limits of `sender` are new."""
        if sender in self._alone:
            self._crossings.watch(sender, 0, 0)  # with the next message

    def close(self) -> None:
        """Listen to the log no longer; the viewers must have been removed."""
        self._closed = True
        self.log.unlisten(self)

    @property
    def empty(self) -> bool:
        """Whether nobody is served."""
        return not self._members and not self._alone

    def _forget_member(self, sender: Sender) -> None:
        slot = sender.slot
        last, last_send = self._members.pop(), self._sends.pop()
        if last is not sender:
            self._members[slot], self._sends[slot] = last, last_send
            last.slot = slot
        sender.slot = -1

    def _admit(self, sender: Sender) -> None:
        """Take `sender`, who stands where the cohort does, into it."""
        self._alone.pop(sender, None)
        self._runnable.pop(sender, None)
        self._crossings.forget(sender)
        sender.slot = len(self._members)
        self._members.append(sender)
        self._sends.append(sender.transport_send)
        sender.enter_cohort()

    # -- flushing

    def appended(self, log: StreamLog) -> None:
        """Take note that the log has grown: see that a flush comes, and look at limits. The publisher's thread."""
        if self._closed:
            return
        try:
            self._note_growth(log)
        except ClosedError:
            # The group is gone: the publisher and its other listeners go on. It stays on the log's list, for this is
            # not the thread to change that list; whoever releases the fan-out does it.
            self._closed = True

    def _note_growth(self, log: StreamLog) -> None:
        if not self._armed:
            self._armed = True
            if self._host.in_thread():
                self._schedule()
            else:
                self._host.call_soon(self._schedule)
        tail, crossings = log.tail, self._crossings
        if (
            tail.sequence >= crossings.next_sequence
            or tail.offset >= crossings.next_offset
            or (log.gop.key_sequence != self._key_sequence and len(crossings))
        ):
            if self._host.in_thread():
                self._look_at_crossings()
            elif not self._looking:
                self._looking = True
                self._host.call_soon(self._look_at_crossings)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._schedule()

    def _schedule(self) -> None:
        delay_s = self._last_flush + self.flush_interval_s - self._host.now()
        if delay_s <= 0:
            self._host.call_soon(self.flush)
        else:
            self._host.call_later(delay_s, self.flush)

    def flush(self) -> None:
        """Write to everybody who can take something what was published before this call."""
        # Cleared before the tail is read: an append that comes later finds it cleared and arms the next flush.
        self._armed = False
        if self._closed:
            return
        began = self._last_flush = self._host.now()
        tail = self.log.tail
        if self._members and tail is not self.place.entry:
            self._write_members(tail)
        self.place.entry = tail
        for sender in list(self._runnable):
            if sender in self._runnable:  # an earlier one's handler may have ended it
                self._flush_alone(sender, tail)
        self._rounds += 1
        self._longest_round_s = max(self._longest_round_s, self._host.now() - began)

    def _flush_alone(self, sender: Sender, tail: Entry) -> None:
        """Flush a viewer from its own cursor, and see where it belongs now."""
        try:
            result = sender.flush()
        except Exception as error:  # noqa: BLE001 - a fault in one viewer must not cost the others their stream
            self.remove(sender)
            sender.broken(error)
            return
        if sender not in self._runnable:
            return  # it has ended, or its handler has ended the following
        if result is FlushResult.DRAINED and sender.ready_for_cohort(tail):
            self._admit(sender)
        elif result is FlushResult.BLOCKED:
            self._runnable.pop(sender, None)
            self._watch(sender)

    def _write_members(self, tail: Entry) -> None:
        """The hot loop: the same bytes to all members; who does not take all of them is collected."""
        data = gather(self.place.entry, tail)
        size = len(data)
        slow: list[tuple[Sender, int, OSError | None]] = []
        members = self._members
        for index, send in enumerate(self._sends):
            try:
                count = send(data)
            except BlockingIOError:
                slow.append((members[index], 0, None))
            except OSError as error:
                slow.append((members[index], 0, error))
            else:
                if count != size:
                    slow.append((members[index], count, None))
        written = size * (len(members) - len(slow)) + sum(count for _, count, _ in slow)
        self._cohort_bytes += written
        self._host.bytes_out += written
        for sender, count, failure in slow:
            sender.leave_cohort(count)
            if failure is not None:
                sender.broken(failure)

    # -- limits

    def _watch(self, sender: Sender) -> None:
        """Look at a lagging viewer again when the log has grown to where its next limit can be crossed."""
        offset, sequence = sender.log_grew()
        if sender in self._alone:  # looking at it may have ended it
            self._crossings.watch(sender, offset, sequence)

    def _look_at_crossings(self) -> None:
        """Show the viewers whose next limit may be reached their load; after a key frame, all that lag."""
        log, self._looking = self.log, False
        due = self._crossings.due(log.tail.offset, log.tail.sequence)
        if log.gop.key_sequence != self._key_sequence:
            self._key_sequence = log.gop.key_sequence
            due = [sender for sender in self._alone if sender not in self._runnable]
        for sender in due:
            if sender in self._alone and sender not in self._runnable:
                self._watch(sender)

    def statistics(self) -> FanoutStatistics:
        """Return a snapshot."""
        return FanoutStatistics(
            members=len(self._members),
            alone=len(self._alone),
            rounds=self._rounds,
            left=self._left,
            longest_round_s=self._longest_round_s,
            cohort_bytes=self._cohort_bytes,
        )


def gather(start: Entry, end: Entry) -> bytes:
    """Return the wire bytes of the entries from `start` up to, not including, `end`."""
    parts: list[bytes] = []
    entry = start
    while entry is not end and entry.next is not None:
        parts.append(entry.wire)
        entry = entry.next
    return parts[0] if len(parts) == 1 else b"".join(parts)
