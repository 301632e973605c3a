"""Samples of many connections as columns: what all of a crowd share is written once, and not once per viewer.

Viewers who keep up have been sent exactly what lies between two places of the log (`Mark`), so their records differ in
identity alone (`SharedRows`). Who is in trouble has a whole row. A `SampleBlock` becomes one Arrow array per column
without going over the viewers in Python: that makes a sample a second of a thousand viewers cheap.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import sub
from typing import Any, Final, NamedTuple

from flowctl.core.flow.counts import NO_FIGURES, Figures
from flowctl.core.flow.state import SendState
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.records.telemetry.schema import FLOW_SAMPLES, Row
from flowctl.records.telemetry.writer import arrow_type

_COLUMNS: Final = tuple(column for column in FLOW_SAMPLES.columns if column.name in FLOW_SAMPLES.row_names)
_NAMES: Final = FLOW_SAMPLES.row_names
_SHARED: Final = (_COLUMNS[0], *_COLUMNS[4:])
"""All but conn_id, address and port, which belong to one connection each."""
_KERNEL: Final = ("rtt_us", "unsent_bytes")
_RTT: Final = _NAMES.index("rtt_us")
READY: Final = SendState.READY.name


class Mark(NamedTuple):
    """A place in a log and the log's end at the same moment, without holding the log."""

    log: StreamLog
    offset: int  # wire bytes before the place
    sequence: int
    place: Figures
    end_offset: int  # wire bytes of the whole log
    end_sequence: int
    end: Figures
    since: float  # when the message at the place was published, in seconds; 0 where the log ends there

    @classmethod
    def of(cls, log: StreamLog, entry: Entry, tail: Entry) -> Mark:
        """Return the mark of a viewer that stands at `entry` while the log ends at `tail`."""
        return cls(
            log,
            entry.offset,
            entry.sequence,
            (*entry.counts, *entry.sizes),
            tail.offset,
            tail.sequence,
            (*tail.counts, *tail.sizes),
            entry.enqueued_at,
        )


def minus(after: Figures, before: Figures) -> Figures:
    return tuple(map(sub, after, before))


class SampledCondition(NamedTuple):
    """How a connection stands at the end of an interval: the columns between identity and sums."""

    interval_ms: float
    state: str = READY
    picture_share: float = 1.0
    queued_bytes: int = 0
    queued_messages: int = 0
    queued_age_ms: float = 0.0
    stalled_ms: float = 0.0
    drain_bytes_per_s: float | None = None
    thread_busy: float | None = None
    strained: bool | None = None
    input_paused: bool = False
    rtt_us: int | None = None
    unsent_bytes: int | None = None
    viewer_delay_ms: float | None = 0.0
    retransmits: int | None = None
    probes: int | None = None
    backoff: int | None = None
    unacked_segments: int | None = None
    heard_ms: int | None = None
    acked_bytes: int | None = None
    window_bytes: int | None = None
    rendition: str | None = None


def sums(sent_bytes: int, accepted: Figures, sent: Figures, dropped: Figures) -> Row:
    """Return the last columns of a record: what happened in the interval."""
    return (sent_bytes, *accepted, *sent, *dropped)


def following(before: Mark, after: Mark) -> Row:
    """Return the last columns for a viewer that was sent the log from `before` to `after`, and nothing else."""
    return sums(
        after.offset - before.offset, minus(after.end, before.end), minus(after.place, before.place), NO_FIGURES
    )


NOTHING: Final = sums(0, NO_FIGURES, NO_FIGURES, NO_FIGURES)


@dataclass(slots=True, eq=False)
class Identities:
    """Identities of connections, in an order that does not change: written once, and used by each round they share."""

    conn_ids: list[int] = field(default_factory=list)
    addresses: list[str | None] = field(default_factory=list)
    ports: list[int | None] = field(default_factory=list)
    _columns: tuple[int, list[Any]] = (0, [])  # (how many they are of, columns); the recorder's thread

    def __len__(self) -> int:
        return len(self.conn_ids)

    def add(self, conn_id: int, address: str | None, port: int | None) -> None:
        self.conn_ids.append(conn_id)
        self.addresses.append(address)
        self.ports.append(port)

    def columns(self) -> list[Any]:
        """Return conn_ids, addresses and ports as pyarrow arrays; made once. The recorder's thread."""
        import pyarrow as pa

        size, columns = self._columns
        if size != len(self):
            kinds = [arrow_type(column.kind) for column in _COLUMNS[1:4]]
            parts = (self.conn_ids, self.addresses, self.ports)
            columns = [pa.array(part, kind) for part, kind in zip(parts, kinds, strict=True)]
            self._columns = len(self), columns
        return columns


@dataclass(slots=True, eq=False)
class SharedRows:
    """Connections whose records differ in identity alone."""

    shared: Row  # columns but those of `Identities`
    size: int = 0
    crowds: list[Identities] = field(default_factory=list)
    kernel: dict[int, tuple[int | None, int]] = field(default_factory=dict)  # of those whose kernel was asked, by index
    _single: Identities | None = None  # those who came one by one

    def add(self, conn_id: int, address: str | None, port: int | None) -> None:
        single = self._single
        if single is None or self.crowds[-1] is not single:  # the order is what `kernel` is about
            single = self._single = Identities()
            self.crowds.append(single)
        single.add(conn_id, address, port)
        self.size += 1

    def add_crowd(self, crowd: Identities) -> None:
        """Add many, at the cost of one."""
        self.crowds.append(crowd)
        self.size += len(crowd)


@dataclass(slots=True, eq=False)
class SampleBlock:
    """Rounds of samples. Made on the sampler's thread, turned into columns on the recorder's.

    What a run shares is one row of a small table; columns are picked from it by row numbers, in a loop of Arrow's that
    holds no interpreter: they cost by run and not by viewer.
    """

    ts_us: int
    items: list[SharedRows | Row] = field(default_factory=list)  # runs, and rows of those who stand for themselves
    rows: int = 0

    def add_run(self, run: SharedRows) -> None:
        if run.size:
            self.items.append(run)
            self.rows += run.size

    def add_row(
        self, who: tuple[Any, ...], condition: SampledCondition, happened: Row, ts_us: int | None = None
    ) -> None:
        self.items.append((self.ts_us if ts_us is None else ts_us, *who, *condition, *happened))
        self.rows += 1

    def absorb(self, other: object) -> bool:
        """Take what a later block has as well; return whether it was taken. The recorder's thread."""
        if not isinstance(other, SampleBlock):
            return False
        self.items += other.items
        self.rows += other.rows
        return True

    def arrays(self) -> list[Any]:
        """Return a pyarrow array per column, `node` and `seq` left out."""
        import pyarrow as pa

        shared: list[Row] = []  # rows of the small table: `_SHARED` columns
        numbers = array("i")  # of the row of it that each record has
        who: list[list[Any]] = []  # columns of the identities of each crowd, in order
        single = Identities()
        kernel: tuple[list[int | None], ...] = ([None] * self.rows, [None] * self.rows)
        for item in self.items:
            first = len(numbers)
            numbers.extend(array("i", [len(shared)]) * (item.size if isinstance(item, SharedRows) else 1))
            if not isinstance(item, SharedRows):
                shared.append((item[0], *item[4:]))
                single.add(*item[1:4])
                kernel[0][first], kernel[1][first] = item[_RTT], item[_RTT + 1]
                continue
            shared.append(item.shared)
            for index, figures in item.kernel.items():
                kernel[0][first + index], kernel[1][first + index] = figures
            if len(single):
                who.append(single.columns())
                single = Identities()
            who += [crowd.columns() for crowd in item.crowds]
        if len(single):
            who.append(single.columns())
        taken = pa.Array.from_buffers(pa.int32(), self.rows, [None, pa.py_buffer(numbers)])
        columns = [pa.concat_arrays(parts) for parts in zip(*who, strict=True)]
        found = dict(zip(_NAMES[1:4], columns, strict=True))
        found.update(zip(_KERNEL, [pa.array(values, pa.int64()) for values in kernel], strict=True))
        for column, values in zip(_SHARED, zip(*shared, strict=True), strict=True):
            if column.name in found:
                continue
            kind, value = arrow_type(column.kind), values[0]
            if values.count(value) < len(values):
                found[column.name] = pa.array(values, kind).take(taken)
            else:  # most columns, most of the time: nothing was dropped, nobody is in trouble
                found[column.name] = pa.repeat(pa.scalar(value, kind), self.rows)
        return [found[name] for name in _NAMES]
