"""The contract of the record files: tables, columns, words and units (pure).

Three tables are written, each below a folder of its own name, in files
``<table>/date=YYYY-MM-DD/hour=HH/<node>-<start>-<n>.parquet`` (UTC; zstd; date and hour are those of the first row, and
are no columns of the file). A file is written beside its place and renamed when it is complete; a name that begins
with ``.`` or ``_`` is not data.

- ``flow_events``, one row per event of a connection, or of the server itself (`conn_id` 0);
- ``flow_samples``, one row per connection and sampling interval: what happened *in* the interval, and how it stood at
  its end;
- ``flight``, one row per input of the flow core of a recorded connection, and one per change that came out.

Identity. `conn_id` is ``start_s << 30 | number``: the second since the epoch in which the process started, and the
number of the connection in it; so (`node`, `conn_id`) names a connection over restarts. `seq` grows within a node
(microsecond of the start of the process + number of the record): (`node`, `seq`) names a record of a table.
A file of records carries these keys in its metadata: ``flowctl.table``, ``flowctl.format``, ``flowctl.node``,
``flowctl.start``, ``flowctl.number`` and ``flowctl.uid`` (unique; two files of the same uid are copies of each other).

Source: CTA-2066 for the words of quality of experience; RFC 5424 for what a record needs to stand alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from flowctl.flow.state import MessageClass

FORMAT: Final = 2
"""Counted up when a column goes or changes its meaning; new columns at the end do not count."""
METADATA_PREFIX: Final = "flowctl."
CONN_NUMBER_BITS: Final = 30
CONN_NUMBERS: Final = 10**9
"""Numbers that a process has for connections: where several are one server, each begins at a multiple of this."""


class Kind(enum.Enum):
    """Type of a column: the names that pyarrow and Spark give it are in `ARROW_TYPES` and `SPARK_TYPES`."""

    TIMESTAMP = "timestamp"
    INT = "int"
    REAL = "real"
    TEXT = "text"
    FLAG = "flag"


ARROW_TYPES: Final = {
    Kind.TIMESTAMP: "timestamp[us, tz=UTC]",
    Kind.INT: "int64",
    Kind.REAL: "double",
    Kind.TEXT: "string",
    Kind.FLAG: "bool",
}
SPARK_TYPES: Final = {
    Kind.TIMESTAMP: "timestamp",
    Kind.INT: "bigint",
    Kind.REAL: "double",
    Kind.TEXT: "string",
    Kind.FLAG: "boolean",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: as in the file.
        kind: type.
        meaning: what it says, with its unit.
        nullable: whether it may be empty.
    """

    name: str
    kind: Kind
    meaning: str
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Args:
        name: of the table and of its folder.
        grain: what a row stands for.
        columns: in the order of the file.
    """

    name: str
    grain: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def spark_ddl(self) -> str:
        """The schema as Spark reads it (`StructType.fromDDL`); everything may be null, as files from elsewhere have."""
        return ", ".join(f"`{column.name}` {SPARK_TYPES[column.kind]}" for column in self.columns)


class EventName(enum.Enum):
    """What an event is about: the values of `flow_events.event`."""

    SERVER_STARTED = "server_started"  # detail: limits, policy, audiences, times, version; first record of a process
    SERVER_STOPPED = "server_stopped"
    CONFIG_CHANGED = "config_changed"  # limits or bans were changed; detail says what, reason by which file or command
    CONN_OPENED = "conn_opened"
    CONN_REFUSED = "conn_refused"  # at accept: reason names the limit, or "banned"
    HANDSHAKE_DONE = "handshake_done"  # value: ms since the connection was opened
    COMMAND = "command"  # reason: name of the command
    PUBLISH_STARTED = "publish_started"
    PLAY_STARTED = "play_started"
    STATE_CHANGED = "state_changed"  # value, limit of `axis`; to READY, value: ms since it was left; `state_ms`
    PICTURES_LATE = "pictures_late"  # the first picture since the viewer kept up was left out, for it would be late
    STEP_CHANGED = "step_changed"  # in records of format 1: of a step-down ladder; state_from, state_to: its steps
    DROPPED = "dropped"  # an episode of drops has ended: dropped_*; detail: by reason and class; value: its ms
    RETURNED = "returned"  # brought back to live; value: ms of delay removed
    INPUT_PAUSED = "input_paused"
    INPUT_RESUMED = "input_resumed"  # value: ms that the pause lasted
    LIMIT_HIT = "limit_hit"  # axis: name of the limit; value; limit
    SAMPLE = "sample"  # as flow_samples, for one who is in trouble: kernel figures, delay
    BANNED = "banned"  # an open connection was ended because its address was banned
    CONN_CLOSED = "conn_closed"  # reason; state_from, state_ms: the last state; sent_*, dropped_*, detail: totals
    OVERFLOW = "overflow"  # value: records that were lost because the recorder's queue was full


class Role(enum.Enum):
    """What a connection is used for: the values of `role`."""

    UNKNOWN = "unknown"
    PUBLISH = "publish"
    PLAY = "play"
    HTTP_FLV = "http_flv"
    RPC = "rpc"


VIEWING: Final = (Role.PLAY.value, Role.HTTP_FLV.value)
"""Values of `role` of those who watch."""
CLASS_NAMES: Final = tuple(item.name.lower() for item in MessageClass)
"""In the order of `MessageClass`: control, header, key, inter, disposable, audio, data."""

_IDENTITY: Final = (
    Column("ts", Kind.TIMESTAMP, "when, UTC, microseconds", nullable=False),
    Column("node", Kind.TEXT, "name of the server", nullable=False),
    Column("seq", Kind.INT, "grows within a node and table; (node, seq) is unique in a table", nullable=False),
    Column("conn_id", Kind.INT, "connection; 0: the server itself", nullable=False),
)
_PEER: Final = (
    Column("peer_ip", Kind.TEXT, "address of the peer, as the privacy setting lets it through"),
    Column("peer_port", Kind.INT, "port of the peer"),
    Column("role", Kind.TEXT, "what the connection is used for: see `Role`"),
    Column("app", Kind.TEXT, "application"),
    Column("stream", Kind.TEXT, "stream; a keyed hash where the name is a secret"),
)
_QUEUE: Final = (
    Column("queued_bytes", Kind.INT, "queued and not yet taken by the kernel, bytes"),
    Column("queued_messages", Kind.INT, "the same in messages"),
    Column("queued_age_ms", Kind.REAL, "age of the oldest queued message, ms"),
)
_KERNEL: Final = (
    Column("rtt_us", Kind.INT, "smoothed round-trip time of the kernel, us; null: not asked"),
    Column("unsent_bytes", Kind.INT, "taken by the kernel and not acknowledged, bytes; null: not asked"),
    Column("viewer_delay_ms", Kind.REAL, "how far behind the viewer is: our queue and the kernel's over its rate, ms"),
)

FLOW_EVENTS: Final = Table(
    "flow_events",
    "one event of one connection, or of the server",
    (
        *_IDENTITY,
        *_PEER,
        Column("event", Kind.TEXT, "see `EventName`", nullable=False),
        Column("state_from", Kind.TEXT, "state before: READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT"),
        Column("state_to", Kind.TEXT, "state after"),
        Column("state_ms", Kind.REAL, "how long state_from had lasted, ms"),
        Column("cause", Kind.TEXT, "input of the flow core that caused it"),
        Column("axis", Kind.TEXT, "axis that decided (bytes, messages, age), or name of the limit that was hit"),
        Column("value", Kind.REAL, "load on that axis, in its unit (bytes, messages, ms); or as the event says"),
        Column("limit", Kind.REAL, "mark that was crossed, in the same unit"),
        *_QUEUE,
        Column("dropped_messages", Kind.INT, "dropped by what the event tells of"),
        Column("dropped_bytes", Kind.INT, "the same in bytes"),
        Column("sent_bytes", Kind.INT, "wire bytes taken by the kernel since the connection was opened"),
        *_KERNEL,
        Column("reason", Kind.TEXT, "why: close reason, name of a command, or one line"),
        Column("detail", Kind.TEXT, "more, as JSON text"),
    ),
)

FLOW_SAMPLES: Final = Table(
    "flow_samples",
    "one connection and sampling interval",
    (
        *_IDENTITY,
        *_PEER,
        Column("interval_ms", Kind.REAL, "length of the interval that ends at ts, ms", nullable=False),
        Column("state", Kind.TEXT, "state at its end", nullable=False),
        Column("step", Kind.TEXT, "in records of format 1: step of a step-down ladder at its end"),
        Column("picture_share", Kind.REAL, "share of the pictures of the last 20 s that were sent, 0 to 1"),
        *_QUEUE,
        Column("stalled_ms", Kind.REAL, "for how long the kernel has taken nothing while something waits, ms"),
        Column("drain_bytes_per_s", Kind.REAL, "what the peer takes while there is always something; null: unknown"),
        Column("thread_busy", Kind.REAL, "share of the time in which the connection's thread was busy, 0 to 1"),
        Column("strained", Kind.FLAG, "whether the thread had no room, so that the peer may seem slow and not be"),
        Column("input_paused", Kind.FLAG, "whether input is paused"),
        *_KERNEL,
        Column("sent_bytes", Kind.INT, "wire bytes taken by the kernel in the interval", nullable=False),
        *(
            Column(f"{what}_{unit}_{name}", Kind.INT, f"{what} in the interval, class {name}, {unit}", nullable=False)
            for what in ("accepted", "sent", "dropped")
            for unit in ("messages", "bytes")
            for name in CLASS_NAMES
        ),
    ),
)


class FlightKind(enum.Enum):
    """What a row of a flight is: an input of the flow core, an answer of its surroundings, or what came out."""

    BEGIN = "begin"  # detail: limits, settings, table of the policy, versions
    QUEUED = "queued"  # input: a message was published or sent: message_class, size_bytes; detail: where it lies
    SENT = "sent"  # input: a write; size_bytes: offered, taken_bytes: taken by the kernel
    WOULD_BLOCK = "would_block"  # input: a write met EAGAIN
    DRAINED = "drained"  # a write left nothing
    LIMITS_SET = "limits_set"  # input; detail: the limits
    TICK = "tick"  # input: time passed
    CALL = "call"  # input: any other call of the Sender that matters; detail: which, with its arguments
    STATE = "state"  # output: an edge
    DROPPED = "dropped"  # output: an episode of drops; detail by reason and class
    STEP = "step"  # output, in flights of format 1: a move of a step-down ladder
    LATE = "late"  # output: the first message since the peer kept up was left out for being late
    RETURN = "return"  # output: brought back to live
    CLOSE = "close"  # output: the end
    END = "end"  # detail: final figures, for the comparison; absent where the recording was cut off


FLIGHT: Final = Table(
    "flight",
    "one input of the flow core of a recorded connection, or one change that came out of it",
    (
        *_IDENTITY,
        *_PEER,
        Column("offset_us", Kind.INT, "microseconds since the flight began", nullable=False),
        Column("kind", Kind.TEXT, "see `FlightKind`", nullable=False),
        Column("message_class", Kind.TEXT, "class of a queued message"),
        Column("size_bytes", Kind.INT, "of the message, or offered to the kernel"),
        Column("taken_bytes", Kind.INT, "taken by the kernel"),
        *_QUEUE,
        Column("state_from", Kind.TEXT, "of an edge or move"),
        Column("state_to", Kind.TEXT, "of an edge or move"),
        Column("cause", Kind.TEXT, "of an edge"),
        Column("axis", Kind.TEXT, "of an edge"),
        Column("value", Kind.REAL, "of an edge"),
        Column("limit", Kind.REAL, "of an edge"),
        Column("dropped_messages", Kind.INT, "of an episode of drops"),
        Column("dropped_bytes", Kind.INT, "of an episode of drops"),
        Column("reason", Kind.TEXT, "of a close or call"),
        Column("detail", Kind.TEXT, "more, as JSON text"),
        Column("number", Kind.INT, "of the row in its flight, from 0 without a gap"),
    ),
)

TABLES: Final = {table.name: table for table in (FLOW_EVENTS, FLOW_SAMPLES, FLIGHT)}


def conn_id_of(start_s: int, number: int) -> int:
    """Return the identity of connection `number` of a process that started in second `start_s` since the epoch."""
    return start_s << CONN_NUMBER_BITS | number % CONN_NUMBERS
