"""The stream log: one append-only list of messages that any number of viewers follow, each with a cursor.

How it works. A published message is serialised once and becomes an `Entry`; entries are linked forwards only. The log
always ends in an empty entry, its *tail*, which the next append fills: a cursor is therefore always simply a
reference to the entry to be sent next, also when it has caught up. Every entry knows the totals before it (offset,
sequence, and both per class), so the length of any viewer's queue, and what it was given, sent and spared by class,
is a subtraction.

The log is never trimmed. An entry lives exactly as long as a cursor stands at or before it, or the GOP cache holds it:
Python's reference counts do the book-keeping that a ring buffer would need a "slowest reader" for, and a viewer that
falls behind costs no memory of its own. How far behind one may fall is bounded by its limits. For this to hold, every
reference in here points forwards: an entry to the next one and to its group, a group to the *next* key frame, never
to its own. A group that held its own key frame would be a cycle, which only the garbage collector could free, and
would keep all of a group alive for a viewer at its end.

Appending is for one thread at a time (the publisher's). Reading is for any thread and needs no lock: an entry is
filled before its `next` is set, and `tail` is replaced last.

A log may have *keys*: a message with a key is superseded by the next one of the same key, and a viewer that is behind
gets only what is not superseded (`core.outgoing.conflation`). Such a log keeps the newest value of each key, and a
second list of its messages without a key, *loose*: that is all that viewers which lag hold of it.

A log may have a *twin*: the same messages in another form, deflated say, for viewers that take that. It has the same
values, which are brought into its form when one of them is first handed over: it costs nothing to begin and to end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast

from flowctl.core.flow.state import CLASS_COUNT, VIDEO_CLASSES, MessageClass
from flowctl.core.flow.timing import fill_bytes
from flowctl.core.outgoing.latest import LatestValues, Value
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, LocalProtocolError

Wire = bytes | bytearray | memoryview
"""A message as the application hands it over."""

_ZEROS: Final = (0,) * CLASS_COUNT
_LARGEST_LASTS_NOTES: Final = 60
"""Notes, one a second, after which a message no longer counts as one of the log's largest recent ones."""
# Bound once: an attribute of an Enum class is looked up by code in Python, for each message.
_KEY, _CONTROL = MessageClass.KEY, MessageClass.CONTROL

NOTE_S: Final = 1.0
"""Time between two notes."""
NOTES: Final = 12
"""Number of notes that are kept."""
_MOST_KEYS: Final = 64
"""Key frames that are kept at most: with one each 250 ms, sixteen seconds."""
_LEAST_RATE_S: Final = 3.0
"""Shortest time for a rate: a shorter one says more about one burst than about the stream."""

_new: Final = object.__new__

Totals = tuple[int, ...]


class ClassRates:
    """The rates of a log by message class: totals noted once a second, of the last twelve seconds.

    That is long enough to hold several key frames of any usual stream, and costs one comparison a message. Written by
    the publisher's thread, read by any: a note is one object, set at once.

    Attributes:
        due: when the next note is to be made, in seconds.
        bytes_per_s: rate of all classes at the last note; 0 while it is not known.
        by_class: the same by class; empty while it is not known.
    """

    __slots__ = ("_notes", "by_class", "bytes_per_s", "due", "messages_per_s")

    def __init__(self) -> None:
        self._notes: deque[tuple[float, Totals, Totals]] = deque(maxlen=NOTES)
        self.due = float("-inf")
        self.bytes_per_s = self.messages_per_s = 0.0
        self.by_class: Sequence[float] = ()

    @property
    def notes(self) -> tuple[tuple[float, Totals, Totals], ...]:
        """The notes kept, oldest first, as (time, messages, bytes); a copy. Any thread."""
        return tuple(self._notes)

    def note(self, now: float, counts: Totals, sizes: Totals) -> None:
        """Keep the totals of now; to be called when `due` has come."""
        if self._notes and now - self._notes[-1][0] > NOTES * NOTE_S:
            self.bytes_per_s = self.messages_per_s = 0.0
            self.by_class = ()
            self._notes.clear()  # what was published before a pause says nothing about what comes after it
        self._notes.append((now, counts, sizes))
        self.due = now + NOTE_S
        per_second = self.per_second(now, counts, sizes)
        if per_second is not None:
            self.messages_per_s, self.bytes_per_s = map(sum, per_second)
            self.by_class = per_second[0]

    def per_second(self, now: float, counts: Totals, sizes: Totals) -> tuple[list[float], list[float]] | None:
        """Return (messages, bytes) per second by class up to the totals of `now`; None: too short to tell."""
        try:
            began, first_counts, first_sizes = self._notes[0]
        except IndexError:
            return None
        seconds = now - began
        if seconds < _LEAST_RATE_S:
            return None
        return (
            [(after - before) / seconds for after, before in zip(counts, first_counts, strict=True)],
            [(after - before) / seconds for after, before in zip(sizes, first_sizes, strict=True)],
        )


@dataclass(eq=False, slots=True)
class Gop:
    """A group of pictures: a key frame and what follows it up to the next one.

    Attributes:
        key_sequence: sequence number of its key frame; -1 for what came before the first one. A number and not the
            entry: see the module.
        next_key: the key frame that ends this group and opens the following one, `next_key.gop`. None while open.
        restart: wire messages to send before its key frame to a viewer that starts there (metadata and codec
            configuration).
        started_at: enqueue time of its key frame in seconds.
        offset: wire bytes of the log before its key frame.
        key_bytes: size of its key frame.
        key: that, where in the log it ends, and `started_at`, for those who are behind it (`LogCursor.behind`).
    """

    key_sequence: int
    restart: tuple[bytes, ...]
    started_at: float
    offset: int = 0
    key_bytes: int = 0
    key: tuple[int, int, float] = (0, 0, 0.0)
    next_key: Entry | None = None


class Entry:
    """One message of a log, or its empty tail.

    Attributes:
        sequence: number of messages before this one since the log began.
        offset: wire bytes before this one.
        counts: messages before this one by class (index: `MessageClass`).
        sizes: wire bytes before this one by class.
        wire: the serialised message; empty in the tail.
        message_class: class of the message; meaningless in the tail.
        enqueued_at: time of the append in seconds; 0 in the tail.
        gop: the group that was open when this entry was linked; for a key frame the group that it opens.
        leading: whether it is a picture that may refer to ones from before its group's key frame (open GOP): who
            started at that one cannot decode it. No picture behind the leading ones refers to them. Of a key frame:
            whether such pictures may follow.
        next: the following entry. None exactly in the tail.
    """

    __slots__ = (
        *("counts", "enqueued_at", "gop", "leading", "message_class"),
        *("next", "offset", "sequence", "sizes", "wire"),
    )

    def __init__(self, sequence: int, offset: int, counts: tuple[int, ...], sizes: tuple[int, ...], gop: Gop) -> None:
        self.sequence = sequence
        self.offset = offset
        self.counts = counts
        self.sizes = sizes
        self.wire = b""
        self.message_class = _CONTROL
        self.enqueued_at = 0.0
        self.gop = gop
        self.leading = False
        self.next: Entry | None = None


class KeyedEntry(Entry):
    """An entry of a log with keys.

    Attributes:
        loose: what comes next, from here on, of the messages without a key: an entry of the log's `loose`.
        value_bytes: wire bytes of the messages with a key before this one, not in the form of a twin.
    """

    __slots__ = ("loose", "value_bytes")
    loose: Entry  # set by the log at once, both: a constructor of its own would cost a fifth of an append
    value_bytes: int


class Place:
    """A position in a log that viewers can share: moving it moves all of them, and holds the log once."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


class LogListener(Protocol):
    """Flushes viewers of a log: one per log and poll group."""

    def appended(self, log: StreamLog) -> None:
        """The log has grown; called on the publisher's thread, must not block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLimits:
    """Bounds of the GOP cache; passing any of them empties it until the next key frame.

    Without them a publisher that sends no key frame for minutes would make the log grow without end
    (precedents: SRS ``gop_cache_max_frames`` 2500; nginx-http-flv issue 29).

    Args:
        size_bytes: wire bytes from the key frame on. 0: no cache.
        messages: messages from the key frame on.
        duration_s: wall-clock seconds since the key frame.
    """

    size_bytes: int = 16 * 1024 * 1024
    messages: int = 4096
    duration_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("size_bytes", "messages", "duration_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} of the GOP cache is {getattr(self, name)}, it must be 0 or more")

    def passed(self, cached: Entry, tail: Entry, now: float) -> bool:
        return (
            tail.offset - cached.offset > self.size_bytes
            or tail.sequence - cached.sequence > self.messages
            or now - cached.enqueued_at > self.duration_s
        )


MAX_VALUE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the newest values of all keys that a log keeps at most by default: 64 kB for each of a thousand keys."""
_MOST_LOOKS: Final = 10_000
"""Times a look at log and values is tried again while another thread appends. That ends at once, or when that thread
gets the interpreter, in 5 ms. It does not where the look was made within the append itself, by a finaliser, or that was
broken off: then it is of a moment between two, which the next one sets right."""

_names = itertools.count(1)
_T = TypeVar("_T")


class StreamLog:
    """An append-only log of serialised messages in one wire format.

    Args:
        name: for logs and statistics. None: a number.
        cache: bounds of the GOP cache.
        max_keys: most keys that its messages may have. 0: they have none. A log with keys takes no pictures.
        max_value_bytes: most wire bytes of the newest values of all keys together, and characters of the keys.

    Attributes:
        batched: whether what is appended has been gathered already, by another server that flushes about as often.
        ended: whether viewers were told of its end, by the last message: one that comes now would not hear of it. Set
            by the publisher, before that message.
        keys: the last key frames, oldest first, where they are kept (`keep_keys`); replaced whole, so any thread.
        latest: the newest value of each key. None: its messages have no keys.
        loose: the messages without a key once more, of a log with keys.
        twin: what is appended to along with this log. None: there is none. Set by the publisher.
        transform: of a twin, brings a value into its form. None: it is no twin.

    Raises:
        ConfigError: a limit is below 0.
    """

    __slots__ = (
        "_cached",
        "_keep_keys_s",
        "_largest_lately",
        "_listeners",
        "batched",
        "cache",
        "ended",
        "fill_bytes",
        "gop",
        "gop_bytes",
        "gop_duration_s",
        "has_video",
        "headers",
        "keys",
        "largest_bytes",
        "latest",
        "loose",
        "name",
        "rates",
        "tail",
        "transform",
        "twin",
    )

    def __init__(
        self,
        name: str | None = None,
        *,
        cache: CacheLimits | None = None,
        max_keys: int = 0,
        max_value_bytes: int = MAX_VALUE_BYTES,
    ) -> None:
        if min(max_keys, max_value_bytes) < 0:
            raise ConfigError(f"max_keys={max_keys} and max_value_bytes={max_value_bytes} must be 0 or more")
        self.name = name or f"log-{next(_names)}"
        self.cache = cache or CacheLimits()
        self.batched = self.ended = False
        self.gop = Gop(-1, (), 0.0)
        self.tail = Entry(0, 0, _ZEROS, _ZEROS, self.gop)
        self.has_video = False
        self.headers: tuple[bytes, ...] = ()  # the newest, for a viewer that goes on in the middle of a group
        self.largest_bytes = 0  # largest message seen: a soft limit below twice of it cannot work
        self.rates = ClassRates()  # what a second of it holds, by class
        self.fill_bytes = 0  # what the kernel is given ahead of a viewer that keeps up; 0: as usual
        self.gop_duration_s = 0.0  # length of the last complete group
        self.gop_bytes = 0  # what was published in that time
        self._cached: Entry | None = None  # first entry of the GOP cache
        self.keys: tuple[Entry, ...] = ()
        self._keep_keys_s = 0.0
        self._largest_lately: deque[int] = deque(
            [0], maxlen=_LARGEST_LASTS_NOTES
        )  # largest message between two notes of the rates
        self._listeners: tuple[LogListener, ...] = ()
        self.latest: LatestValues | None = None
        self.loose: StreamLog | None = None
        self.twin: StreamLog | None = None
        self.transform: Callable[[bytes], bytes] | None = None
        if max_keys:
            self.latest = LatestValues(self.name, max_keys, max_value_bytes)
            self.loose = StreamLog(f"{self.name}, without keys")
            self.tail = tail = KeyedEntry(0, 0, _ZEROS, _ZEROS, self.gop)
            tail.loose, tail.value_bytes = self.loose.tail, 0

    def append(
        self,
        wire: Wire,
        message_class: MessageClass,
        now: float,
        key: str | None = None,
        *,
        restart: tuple[Wire, ...] = (),
        droppable: bool | None = None,
        leading: bool = False,
        twin_wire: bytes | None = None,
    ) -> Entry:
        """Add one message at the end; O(1) in the number of viewers.

        Args:
            wire: the message as it goes to the socket, complete; not empty. What is no `bytes` is copied, here and in
                `restart`.
            message_class: its class; KEY opens a new group.
            now: time in seconds.
            key: of DATA in a log with keys: what it is the value of; who is behind gets only the newest of each key.
            restart: for KEY: the wire messages that a viewer who starts at this one needs before it.
            droppable: whether viewers may be spared it. None: all classes but CONTROL and HEADER. What differs from
                that counts as another: AUDIO and DATA that may not be dropped as CONTROL, HEADER that may as DATA.
            leading: of a picture, see `Entry`.
            twin_wire: the message in the form of the twin, no longer than `wire`. None: as it is.

        Returns:
            The entry that holds the message.

        Raises:
            LocalProtocolError: a message is no bytes, or empty, which nobody could pass; a frame was to be kept at any
                price; its key is one too many, or its value too large, or the log takes none.
        """
        if droppable is not None:
            message_class = _filed_under(message_class, droppable=droppable)
        if type(wire) is not bytes:
            wire = owned_bytes(wire)
        size = len(wire)
        headers = _owned(restart) if restart else ()
        if not size or (headers and not all(headers)):
            raise LocalProtocolError("an empty message cannot be published", hint="leave it out")
        latest = self.latest
        if latest is not None or key is not None:
            self._check_keyed(key, message_class, size)
        entry = self.tail
        counts, sizes = list(entry.counts), list(entry.sizes)
        if now >= self.rates.due:
            self.rates.note(now, entry.counts, entry.sizes)
            self._note_largest()
        if not self.has_video and message_class in VIDEO_CLASSES:
            self.has_video = True
        if size > self._largest_lately[-1]:
            self._largest_lately[-1] = size
            self.largest_bytes = max(self.largest_bytes, size)
        counts[message_class] += 1
        sizes[message_class] += size
        entry.wire, entry.message_class, entry.enqueued_at = wire, message_class, now
        entry.leading = leading
        if message_class is _KEY:
            self._open_gop(entry, headers, now)
        if latest is None:
            tail = _new(Entry)  # and what its constructor does, without a call from C, which costs as much again
            tail.sequence, tail.offset, tail.gop = entry.sequence + 1, entry.offset + size, self.gop
            tail.counts, tail.sizes, tail.wire = tuple(counts), tuple(sizes), b""
            tail.message_class, tail.enqueued_at, tail.leading, tail.next = _CONTROL, 0.0, False, None
        else:
            tail = KeyedEntry(entry.sequence + 1, entry.offset + size, tuple(counts), tuple(sizes), self.gop)
            tail.loose = self._sort(entry, key, latest, twin_wire)
            tail.value_bytes = latest.put_bytes
        # The order of these two lines is what lets other threads read without a lock.
        entry.next = tail
        self.tail = tail
        if self.twin is not None:  # before anybody is told: looks at the twin wait for it
            self.twin.append(twin_wire or wire, message_class, now, key)
        if self._cached is not None and self.cache.passed(self._cached, tail, now):
            self.drop_cache()
        for listener in self._listeners:
            listener.appended(self)
        return entry

    # -- keys

    def forget(self, key: str) -> None:
        """Forget the value of `key`, if there is one: newcomers do not get it, nor does who is still behind it.

        To tell viewers that it is gone, append a message without a key. The publisher's thread.
        """
        latest = self.latest
        if latest is not None:
            latest.forgets += 1
            latest.forget(key)
            latest.forgets += 1

    def values(self) -> list[bytes]:
        """Return the newest message of each key, in the order in which they were published. Any thread."""
        latest = self.latest
        return [] if latest is None else [value.wire for value in self.look(latest.values)[1]]

    @property
    def reach(self) -> tuple[int, int]:
        """How far the queue of a viewer can have grown by now, as (wire bytes, messages) that never become fewer.

        That is the log itself; of one with keys its messages without a key.
        """
        tail = (self.loose or self).tail
        return tail.offset, tail.sequence

    def look(self, read: Callable[[], _T]) -> tuple[Entry, _T]:
        """Return the tail, and what `read` returns of `latest`, at one moment. Any thread."""
        latest = self.latest
        for _ in range(_MOST_LOOKS):
            forgets = 0 if latest is None else latest.forgets
            tail, result = self.tail, read()
            # No message has come, or is about to, and no key was forgotten.
            if latest is None or (latest.begun == tail.sequence and latest.forgets == forgets and not forgets & 1):
                break
        return tail, result

    def begin_twin(self, transform: Callable[[bytes], bytes]) -> StreamLog:
        """Return a twin that begins here; it ends when `twin` is None again. The publisher's thread; no pictures."""
        twin, tail, loose = StreamLog(self.name), self.tail, self.loose
        here = tail.sequence, tail.offset, tail.counts, tail.sizes, twin.gop
        twin.tail = Entry(*here)
        if isinstance(tail, KeyedEntry) and loose is not None:
            twin.latest, twin.loose = self.latest, loose.begin_twin(transform)
            loose.twin = None  # for what has no key is appended to both by the twin
            twin.tail = keyed = KeyedEntry(*here)
            keyed.loose, keyed.value_bytes = twin.loose.tail, tail.value_bytes
        twin.transform, self.twin = transform, twin
        return twin

    def _sort(self, entry: Entry, key: str | None, latest: LatestValues, twin_wire: bytes | None) -> Entry:
        """Keep `entry`, which is not linked yet, as the value of `key` or beside them; return the end of the others."""
        latest.begun = entry.sequence + 1
        loose = self.loose or self
        if key is None:
            loose.append(entry.wire, entry.message_class, entry.enqueued_at)
        elif self.transform is None:  # else it is kept already
            since = entry.enqueued_at
            latest.put(Value(entry.sequence, loose.tail.sequence, entry.wire, since, key, twin_wire))
        return loose.tail

    def _check_keyed(self, key: str | None, message_class: MessageClass, size_bytes: int) -> None:
        latest = self.latest
        if latest is None:
            raise LocalProtocolError(f"log {self.name!r} takes no keys", hint="make it with max_keys=...")
        if message_class in VIDEO_CLASSES:
            raise LocalProtocolError(f"log {self.name!r} has keys and takes no pictures", hint="use a log for each")
        if key is not None:
            if message_class is not MessageClass.DATA:
                raise LocalProtocolError(
                    f"a message with a key is DATA that may be dropped, not {message_class.name}",
                    hint="leave the key out where every message is to arrive",
                )
            latest.check(key, size_bytes)

    # -- key frames

    def _note_largest(self) -> None:
        """Settle what kernels take ahead. The largest message by far, a cover picture at the start, does not count."""
        notes = max(NOTES, int(2 * self.gop_duration_s / NOTE_S) + 1)  # two key frames, however far apart
        largest_bytes = sorted([*self._largest_lately][-notes:])[-2:][0]
        self.fill_bytes = fill_bytes(self.rates.bytes_per_s, largest_bytes, self.fill_bytes)
        self._largest_lately.append(0)

    def _open_gop(self, entry: Entry, restart: tuple[bytes, ...], now: float) -> None:
        previous = self.gop
        size = len(entry.wire)
        gop = Gop(entry.sequence, restart, now, entry.offset, size, (size, entry.offset + size, now))
        if previous.key_sequence >= 0:
            self.gop_duration_s = now - previous.started_at
            self.gop_bytes = entry.offset - previous.offset
        # Who finds the key frame through the previous group finds it filled and with its own group.
        entry.gop = gop
        previous.next_key = entry
        self.gop = gop
        self.headers = restart
        self._cached = entry
        if self._keep_keys_s:
            kept = [
                key
                for key in self.keys[1 - _MOST_KEYS :]
                if now - key.enqueued_at <= self._keep_keys_s and entry.offset - key.offset <= self.cache.size_bytes
            ]
            self.keys = (*kept, entry)

    def keep_keys(self, seconds: float) -> None:
        """Keep the key frames of the last `seconds`, and with them all that came since; 0: none, as at first.

        No more than the GOP cache may hold is kept before the last one.

        Viewers of other logs with the same content go on here at one of them (`flowctl.StreamSet`).
        """
        self._keep_keys_s = seconds
        if not seconds:
            self.keys = ()
        elif not self.keys and self._cached is not None:
            self.keys = (self._cached,)

    def drop_cache(self) -> None:
        """Empty the GOP cache: the next viewer to join waits for a key frame. For a publisher that went away."""
        self._cached = None
        self.keys = ()

    @property
    def cached(self) -> Entry | None:
        """The key frame at which a viewer can start now. None: there is none within the bounds of the cache."""
        return self._cached

    def key_since(self, since: float | None) -> Entry | None:
        """Return the first key frame kept from `since` on, in seconds; `cached` for None, and where there is none."""
        keys = () if since is None else (key for key in self.keys if key.enqueued_at >= since)
        return next(iter(keys), self._cached)

    @property
    def oldest(self) -> Entry | None:
        """From where on the log keeps what was published, for the GOP cache or its key frames. None: nothing."""
        return self.keys[0] if self.keys else self._cached

    @property
    def bytes_per_s(self) -> float:
        """Rate of the last complete group of pictures, else that of the last seconds; 0 while neither is known.

        Seconds that hold the key frames of two groups of 10 s, or of none, say little where those are large.
        """
        return (
            self.gop_bytes / self.gop_duration_s if self.gop_bytes and self.gop_duration_s else self.rates.bytes_per_s
        )

    @property
    def sounds(self) -> bool:
        """Whether it is known that sound is published."""
        by_class = self.rates.by_class
        return bool(by_class) and by_class[MessageClass.AUDIO] > 0

    def listen(self, listener: LogListener) -> None:
        """Call `listener.appended` after each append from now on."""
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: LogListener) -> None:
        """Stop calling `listener`; harmless when it is not listening."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)


def _filed_under(message_class: MessageClass, *, droppable: bool) -> MessageClass:
    if message_class in VIDEO_CLASSES:
        if not droppable:
            raise LocalProtocolError(
                f"a {message_class.name} of a log cannot be kept from being dropped",
                hint="what a viewer gets of the frames follows from the key frames it gets; see DropPolicy",
            )
        return message_class
    if message_class is MessageClass.HEADER:
        return MessageClass.DATA if droppable else message_class
    return message_class if droppable else MessageClass.CONTROL


def owned_bytes(data: object) -> bytes:
    """Return `data` as bytes of our own: it is sent later, when the caller may have reused its buffer."""
    try:
        return data if isinstance(data, bytes) else bytes(memoryview(data))  # type: ignore[arg-type]  # the check: bytes() alone takes numbers and lists
    except TypeError:
        raise LocalProtocolError(
            f"a message must be bytes, not {type(data).__name__}", hint="encode text, for example with str.encode()"
        ) from None


def _owned(messages: tuple[bytes | bytearray | memoryview, ...]) -> tuple[bytes, ...]:
    """Return messages as bytes of our own; those that are bytes as the same objects, which key frames share."""
    if all(type(message) is bytes for message in messages):
        return cast("tuple[bytes, ...]", messages)
    return tuple(map(owned_bytes, messages))
