"""What the tests of the flow-controlled core share: framed messages, viewers, and what a viewer must have received.

Every message is a frame that says what it is and has a payload that follows from its number, so that what a fake peer
has received can be taken apart and checked byte by byte: nothing lost, nothing twice, nothing reordered.
"""

from __future__ import annotations

import errno
from collections import Counter
from math import inf

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.counts import total
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import Standing
from flowctl.reasons import DropReason
from flowctl.sender import Sender
from flowctl.testing import ManualGroup, ManualHost

CONTROL, HEADER, KEY, INTER, DISPOSABLE, AUDIO, DATA = MessageClass
HEAD_BYTES = 11
LOG, OWN, RESTART = b"L", b"O", b"R"
FRAMES = (KEY, INTER, DISPOSABLE)


def frame(origin: bytes, message_class: MessageClass, number: int, size: int = HEAD_BYTES) -> bytes:
    size = max(size, HEAD_BYTES)
    head = origin + bytes([message_class]) + number.to_bytes(4, "big") + size.to_bytes(5, "big")
    return head + bytes([number * 7 % 251]) * (size - HEAD_BYTES)


def parse(data: bytes) -> tuple[list[tuple[bytes, MessageClass, int, int]], bytes]:
    """Return the complete frames in `data` as (origin, class, number, size), and the incomplete rest."""
    frames, at = [], 0
    data = bytes(data)
    while len(data) - at >= HEAD_BYTES:
        origin, message_class = data[at : at + 1], MessageClass(data[at + 1])
        number = int.from_bytes(data[at + 2 : at + 6], "big")
        size = int.from_bytes(data[at + 6 : at + 11], "big")
        whole = frame(origin, message_class, number, size)
        assert whole.startswith(data[at : at + size]), f"bytes at {at} are not those of message {number}"
        if at + size > len(data):
            break
        frames.append((origin, message_class, number, size))
        at += size
    return frames, data[at:]


class Peer:
    """A transport with a kernel buffer that the test empties.

    Attributes:
        room: bytes that are taken before EAGAIN. None: no end.
        most: bytes that one call takes at most. None: no bound.
        failure: raised by the next write.
    """

    def __init__(self, room: int | None = None, most: int | None = None) -> None:
        self.room = room
        self.most = most
        self.received = bytearray()
        self.failure: OSError | None = None
        self.writes = 0
        self.eagains = 0

    def send(self, data, /) -> int:
        self.writes += 1
        if self.failure is not None:
            raise self.failure
        count = len(data)
        if self.room is not None:
            count = min(count, self.room)
        if self.most is not None:
            count = min(count, self.most)
        if not count:
            self.eagains += 1
            raise BlockingIOError(errno.EAGAIN, "no room")
        if self.room is not None:
            self.room -= count
        self.received += data[:count]
        return count

    def sendmsg(self, buffers, /) -> int:
        assert len(buffers) <= 1024, "one system call takes 1024 parts at most (IOV_MAX)"
        return self.send(b"".join(buffers))


class Edges:
    def __init__(self) -> None:
        self.changes = []
        self.hook = None

    def send_state_changed(self, state, change) -> None:
        assert state is change.new
        self.changes.append(change)
        if self.hook is not None:
            self.hook(state, change)


class Viewer:
    """A Sender with host, peer and frontend; `make_sender` makes another kind of Sender."""

    make_sender = Sender

    def __init__(self, group: ManualGroup, peer: Peer | None = None, **settings) -> None:
        self.group = group
        self.peer = peer or Peer()
        self.host = ManualHost(group)
        self.edges = Edges()
        self.sender = self.make_sender(self.host, self.peer, frontend=self.edges, **settings)
        self.host.sender = self.sender
        self.joined = 0  # log sequence from which on it follows
        self._frames: list[tuple[bytes, MessageClass, int, int]] = []
        self._parsed = 0  # bytes received that they stand for

    def follow(self, fanout: Fanout) -> None:
        """Join as a live server does: with the GOP cache, else wait for a key frame if there is video."""
        log = fanout.log
        cached = log.cached
        if cached is not None:
            self.joined = cached.sequence
            self.sender.follow(fanout, start=cached, prefix=cached.gop.restart)
        else:
            self.joined = log.tail.sequence
            self.sender.follow(fanout, wait_for_key=log.has_video)

    def give(self, room: int | None) -> None:
        self.peer.room = room
        if room != 0:
            self.host.poll_writable()

    def drain(self) -> None:
        """Let everything out: who is given only so much ahead asks again and again."""
        self.give(None)
        self.group.run(0.1)
        while self.host.wants_writable and not self.sender.closed:
            self.host.poll_writable()
            self.group.run(0.1)

    @property
    def frames(self):
        received = self.peer.received
        if len(received) > self._parsed:
            more, rest = parse(received[self._parsed :])
            self._frames += more
            self._parsed = len(received) - len(rest)
        return self._frames

    @property
    def rest_bytes(self) -> int:
        return len(self.peer.received) - self._parsed if self.frames is not None else 0

    def numbers(self, origin: bytes = LOG) -> list[int]:
        return [number for kind, _, number, _ in self.frames if kind == origin]

    def classes(self) -> str:
        return "".join("CHKIDAX"[message_class] for _, message_class, _, _ in self.frames)


def move(sender: Sender, fanout: Fanout) -> None:
    """Have a viewer served by another fan-out of the same log from the same byte on."""
    sender.suspend_following()
    sender.resume_following(fanout)


class Published:
    """A log, and by number what was published on it; the first `leads` pictures of a group are leading ones."""

    def __init__(self, group: ManualGroup, *, leads: int = 0, **settings) -> None:
        self.group = group
        self.leads = leads
        self.leading: set[int] = set()
        self._since_key = leads  # pictures
        self.log = StreamLog(**settings)
        self.classes: list[MessageClass] = []
        self.sizes: list[int] = []

    def publish(self, message_class: MessageClass, size: int = HEAD_BYTES) -> int:
        number = len(self.classes)
        wire = frame(LOG, message_class, number, size)
        self.classes.append(message_class)
        self.sizes.append(len(wire))
        restart = ()
        if message_class is KEY:
            restart = (frame(RESTART, HEADER, number), frame(RESTART, HEADER, number, 20))
            self._since_key = 0
        elif message_class in FRAMES:
            if self._since_key < self.leads:
                self.leading.add(number)
            self._since_key += 1
        leading = number in self.leading or bool(self.leads and message_class is KEY)
        entry = self.log.append(wire, message_class, self.group.now(), restart=restart, leading=leading)
        assert entry.sequence == number
        return number

    def script(self, text: str, size: int = HEAD_BYTES) -> None:
        """Publish one message per letter of `text`: C H K I D A X."""
        for letter in text:
            self.publish(CLASS_OF[letter], size)


CLASS_OF = dict(zip("CHKIDAX", MessageClass, strict=True))


def check_accounts(viewer: Viewer, offered: Counter | None = None) -> None:
    """Check accepted = sent + dropped + queued, with `sent` being what the peer really received."""
    statistics = viewer.sender.statistics()
    received, sizes = Counter(), Counter()
    for _, message_class, _, size in viewer.frames:
        received[message_class] += 1
        sizes[message_class] += size
    dropped = total(statistics.dropped.values())
    assert len(viewer.peer.received) == statistics.bytes_sent
    for item in MessageClass:
        context = f"{item.name}: {statistics}"
        assert received[item] == statistics.sent.messages[item], context
        assert sizes[item] == statistics.sent.sizes_bytes[item], context
        parts = received[item] + dropped.messages[item] + statistics.queued.messages[item]
        assert statistics.accepted.messages[item] == parts, context
        assert min(dropped.messages[item], statistics.queued.messages[item]) >= 0, context
        assert min(dropped.sizes_bytes[item], statistics.queued.sizes_bytes[item]) >= 0, context
        if offered is not None and item is not HEADER:
            assert statistics.accepted.messages[item] == offered[item], context
        elif offered is not None:
            assert statistics.accepted.messages[item] >= offered[item], context
    for reason, counts in statistics.dropped.items():
        leaves = reason in {DropReason.UNFOLLOWED, DropReason.CLOSED}
        assert leaves or not counts.messages[CONTROL], "control is never dropped while the peer stays"
    if statistics.close_reason is None:
        # The load is another way to the same: what is queued, less what a write has taken of a message in flight.
        assert statistics.queued.total_messages == statistics.load.messages
        overhead = viewer.sender.limits.overhead_bytes * statistics.load.messages
        assert statistics.queued.total_bytes - viewer.rest_bytes == statistics.load.size_bytes - overhead
    for reason, counts in statistics.dropped.items():
        assert min(counts.messages) >= 0, reason


def check_edges(viewer: Viewer) -> None:
    """Check that every change of state was announced exactly once, in order and without a gap."""
    changes = viewer.edges.changes
    statistics = viewer.sender.statistics()
    assert [change.sequence for change in changes] == list(range(1, statistics.transitions + 1))
    states = [0, *[change.new for change in changes]]
    assert [change.old for change in changes] == states[:-1]
    assert statistics.state == states[-1]
    assert all(change.old is not change.new for change in changes)
    check_life(viewer)


def check_life(viewer: Viewer) -> None:
    """Check that what a Sender has beside its state is a legal combination: see "Life" in `flowctl.sender`."""
    sender = viewer.sender
    with sender._lock:
        core, cursor = sender._core, sender._outbox.cursor
        if sender._close_reason is not None:
            assert sender.closed
            assert cursor is sender._cohort is sender._episode is None
            assert not sender._waiters
            assert not any(sender._outbox.figures()[2])
        assert (sender.stands is Standing.GONE) is (cursor is None)
        assert (sender.stands in {Standing.GONE, Standing.SUSPENDED}) is (sender._cohort is None)
        if sender.stands is Standing.COHORT:
            assert not sender._judgement.mask
            assert not sender.blocked
        if sender.blocked:
            assert core.would_block
            assert sender._judgement.lagging
            assert sender._judgement.slow is not None
        if sender._close_reason is None:
            assert (sender._judgement.held is not None) is (core.state is SendState.HARD_LIMIT)
            # A closing Sender with nothing left to write, nor to do for other threads, is over: whatever emptied it.
            assert not sender.closed or sender._pending or not sender._outbox.empty(with_log=True)
            assert sender._judgement.closes_at > viewer.group.now() - 1.0
        assert sender._judgement.closes_at == inf or sender.closed


def check_stream(
    viewer: Viewer, published: Published, *, key_wait_expired: bool = False, headers_known: bool = False
) -> None:
    """Check what a viewer of a log received against what can be decoded.

    Order is that of the log; after the loss of a key or inter frame neither inter nor disposable frames come before
    the restart messages and a key frame (unless the wait for one is known to have expired); after a key frame that
    ended a loss, nothing that is older than it comes, and no leading pictures. With `headers_known` no restart messages
    are asked for.
    """
    numbers = viewer.numbers()
    assert numbers == sorted(set(numbers)), "reordered or twice"
    assert not numbers or numbers[0] >= viewer.joined
    classes = published.classes
    needed = [DISPOSABLE if number in published.leading else item for number, item in enumerate(classes)]
    decodable_to = None  # all frames from the last key frame on were received up to here
    restart_of = went_on = None
    for origin, message_class, number, _ in viewer.frames:
        if origin == RESTART:
            restart_of = number
            continue
        if origin != LOG:
            continue
        assert classes[number] is message_class
        before = viewer.joined - 1 if decodable_to is None else decodable_to
        gap = lost_between(needed, before, number) and not key_wait_expired
        assert number not in published.leading or went_on is None, f"frame {number} refers to ones before {went_on}"
        if message_class in FRAMES:
            went_on = number if message_class is KEY and gap else None
        if message_class is KEY:
            assert not gap or headers_known or restart_of == number, f"key frame {number} after a loss has no headers"
        elif message_class in (INTER, DISPOSABLE):
            assert not gap, f"frame {number} refers to one that was lost after {before}"
        if message_class in (KEY, INTER):
            decodable_to = number


def lost_between(classes: list[MessageClass], after: int, before: int) -> bool:
    """Whether there is a key or inter frame between two numbers; called for neighbours of what was received."""
    return any(item in (KEY, INTER) for item in classes[after + 1 : before])
