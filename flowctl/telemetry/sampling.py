"""Samples of many connections as columns: what all of a crowd share is written once, and not once per viewer.

Theory of operation. Viewers who keep up with a stream have been sent exactly what lies between two places of its log:
accepted, sent and queued are differences of the totals at two `Mark`s, equal for all who stood at the same marks. Their
records differ in identity alone. A `Run` is such a group: lists of identities, and one tuple of everything else. Who
is in trouble, or did anything of its own, has a whole row. A `Block` of runs and rows becomes one Arrow array per
column without going over the viewers in Python: at a thousand viewers that is what makes a sample a second cheap.
"""

from __future__ import annotations

from operator import sub
from typing import Any, Final, NamedTuple

from flowctl.counts import Counts
from flowctl.flow import CLASS_COUNT, SendState
from flowctl.ladder import LadderStep
from flowctl.streamlog import Entry, StreamLog
from flowctl.telemetry.schema import FLOW_SAMPLES
from flowctl.telemetry.writer import arrow_type

Row = tuple[Any, ...]
Totals = tuple[int, ...]

NO_TOTALS: Final[Totals] = (0,) * (2 * CLASS_COUNT)
"""Messages by class, then bytes by class: how accounts are kept here, so that a difference is one `map`."""
_COLUMNS: Final = tuple(column for column in FLOW_SAMPLES.columns if column.name not in {"node", "seq"})
_NAMES: Final = tuple(column.name for column in _COLUMNS)
_IDENTITY: Final = ("ts", "conn_id", "peer_ip", "peer_port", "role", "app", "stream")
_KERNEL: Final = ("rtt_us", "unsent_bytes")
READY: Final = SendState.READY.name
FULL: Final = LadderStep.FULL.name


class Mark(NamedTuple):
    """A place in a log and the log's end at the same moment, without holding the log.

    Attributes:
        log: which log.
        offset: wire bytes before the place.
        sequence: messages before it.
        place: totals before it.
        end_offset: wire bytes of the whole log.
        end_sequence: messages of it.
        end: totals of it.
        since: when the message at the place was published, in seconds; 0 where the log ends there.
    """

    log: StreamLog
    offset: int
    sequence: int
    place: Totals
    end_offset: int
    end_sequence: int
    end: Totals
    since: float

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


def totals_of(counts: Counts) -> Totals:
    """Return counts as totals."""
    return (*counts.messages, *counts.sizes_bytes)


def minus(after: Totals, before: Totals) -> Totals:
    """Return `after` - `before`."""
    return tuple(map(sub, after, before))


class Condition(NamedTuple):
    """How a connection stands at the end of an interval: the columns between identity and sums.

    Attributes:
        interval_ms: and the others: the columns of these names.
    """

    interval_ms: float
    state: str = READY
    step: str = FULL
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


def sums(sent_bytes: int, accepted: Totals, sent: Totals, dropped: Totals) -> Row:
    """Return the last columns of a record: what happened in the interval."""
    return (sent_bytes, *accepted, *sent, *dropped)


def following(before: Mark, after: Mark) -> Row:
    """Return the last columns for who was sent the log from `before` to `after`, and nothing else."""
    return sums(after.offset - before.offset, minus(after.end, before.end), minus(after.place, before.place), NO_TOTALS)


NOTHING: Final = sums(0, NO_TOTALS, NO_TOTALS, NO_TOTALS)


class Run:
    """Connections whose records differ in identity alone.

    Args:
        use: role, application and stream.
        condition: how all of them stand.
        happened: what happened to each in the interval: see `sums`.

    Attributes:
        conn_ids: identities, in order.
        addresses: of their peers.
        ports: of their peers.
        kernel: (rtt_us, unsent_bytes) of those whose kernel was asked, by index.
    """

    __slots__ = ("addresses", "condition", "conn_ids", "happened", "kernel", "ports", "use")

    def __init__(self, use: tuple[str | None, ...], condition: Condition, happened: Row) -> None:
        self.use = use
        self.condition = condition
        self.happened = happened
        self.conn_ids: list[int] = []
        self.addresses: list[str | None] = []
        self.ports: list[int | None] = []
        self.kernel: dict[int, tuple[int, int]] = {}

    def add(self, conn_id: int, address: str | None, port: int | None) -> None:
        """Add a connection."""
        self.conn_ids.append(conn_id)
        self.addresses.append(address)
        self.ports.append(port)

    def column(self, index: int, ts_us: int) -> Any:
        """Return a column of these connections: one value for all of them, or a list."""
        name = _NAMES[index]
        if index >= len(_IDENTITY):
            if name in _KERNEL and self.kernel:
                part, kernel = _KERNEL.index(name), self.kernel
                return [kernel[item][part] if item in kernel else None for item in range(len(self.conn_ids))]
            position = index - len(_IDENTITY)
            own = len(self.condition)
            return self.condition[position] if position < own else self.happened[position - own]
        if name == "ts":
            return ts_us
        identities: list[list[Any]] = [self.conn_ids, self.addresses, self.ports]
        return identities[index - 1] if index <= 3 else self.use[index - 4]


class SampleBlock:
    """One round of samples. Made on the sampler's thread, turned into columns on the recorder's.

    Args:
        ts_us: when it was taken, microseconds since the epoch.
    """

    __slots__ = ("_rows", "_runs", "ts_us")

    def __init__(self, ts_us: int) -> None:
        self.ts_us = ts_us
        self._runs: list[Run] = []
        self._rows: list[Row] = []

    def add_run(self, run: Run) -> None:
        """Add connections who share everything but identity."""
        if run.conn_ids:
            self._runs.append(run)

    def add_row(self, who: tuple[Any, ...], condition: Condition, happened: Row, ts_us: int | None = None) -> None:
        """Add one connection.

        Args:
            who: conn_id, address, port, role, application and stream.
            condition: how it stands.
            happened: see `sums`.
            ts_us: when. None: as the block.
        """
        self._rows.append((self.ts_us if ts_us is None else ts_us, *who, *condition, *happened))

    @property
    def rows(self) -> int:
        """How many records it has."""
        return sum(len(run.conn_ids) for run in self._runs) + len(self._rows)

    def arrays(self) -> list[Any]:
        """Return a pyarrow array per column, `node` and `seq` left out."""
        import pyarrow as pa

        result = []
        columns = list(zip(*self._rows, strict=True)) if self._rows else []
        for index, column in enumerate(_COLUMNS):
            kind = arrow_type(column.kind)
            parts = []
            for run in self._runs:
                values = run.column(index, self.ts_us)
                if isinstance(values, list):
                    parts.append(pa.array(values, kind))
                elif values is None:
                    parts.append(pa.nulls(len(run.conn_ids), kind))
                else:
                    parts.append(pa.repeat(pa.scalar(values, kind), len(run.conn_ids)))
            if columns:
                parts.append(pa.array(columns[index], kind))
            result.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
        return result
