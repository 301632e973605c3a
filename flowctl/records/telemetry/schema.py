"""The contract of the record files: tables, columns, words and units (pure).

Five tables are written, each below a folder of its own name, in files
``<table>/date=YYYY-MM-DD/hour=HH/<node>-<start>-<n>.parquet`` (UTC; zstd; date and hour are those of every row in the
file, of flights those of their begin, and are no columns of it). A file is written beside its place and renamed when it
is complete; a name that begins with ``.`` or ``_`` is not data.

- ``flow_closes``, one row per connection, when it has ended, with everything that is known of it then;
- ``flow_opens``, the same columns for a connection that is still open: once soon after it asked to play, was given
  media or published, and then every `OPENS_EVERY_S`, so that connections of a server that died are not missing;
- ``flow_events``, what happened in between (edges, drops, pauses, limits, evidence), and what the server itself did
  (`conn_id` 0);
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
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.state import MessageClass
from flowctl.reasons import DropReason

FORMAT: Final = 3
"""Number of the file format: raised when a column goes or changes its meaning, not for new columns."""
METADATA_PREFIX: Final = "flowctl."
CONN_NUMBER_BITS: Final = 30
CONN_NUMBERS: Final = 10**9
"""Range of connection numbers of a process: where several are one server, each begins at a multiple of this."""
OPENS_FIRST_S: Final = 10.0
"""Time for which a connection waits for media, plays or publishes before it gets its first row in `flow_opens`."""
OPENS_EVERY_S: Final = 300.0
"""Time between the further rows of a connection in `flow_opens`: at most this much is lost when a server dies."""


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
    """One column."""

    name: str
    kind: Kind
    meaning: str
    nullable: bool = True


Row = tuple[Any, ...]
"""A record on its way to a file: the columns of its table in order; `node` and `seq` are added by the recorder."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    name: str
    columns: tuple[Column, ...]
    names: tuple[str, ...] = field(init=False)  # of the columns, in order
    row_names: tuple[str, ...] = field(init=False)  # those of a `Row`
    row: Callable[..., Row] = field(init=False, repr=False, compare=False)
    """Makes a record of values by column; what is not given is null, and a name of no column a `TypeError`."""

    def __post_init__(self) -> None:
        names = tuple(column.name for column in self.columns)
        row_names = tuple(name for name in names if name not in {"node", "seq"})
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "row_names", row_names)
        object.__setattr__(self, "row", namedtuple(self.name, row_names, defaults=[None] * len(row_names)))  # noqa: PYI024 - of the schema's names

    @property
    def spark_ddl(self) -> str:
        """The schema as Spark reads it (`StructType.fromDDL`); everything may be null, as files from elsewhere have."""
        return ", ".join(f"`{column.name}` {SPARK_TYPES[column.kind]}" for column in self.columns)


class EventName(enum.Enum):
    """What an event is about: the values of `flow_events.event`."""

    SERVER_STARTED = "server_started"  # detail: limits, policy, levels, times, version; first record of a process
    SERVER_STOPPED = "server_stopped"
    CONFIG_CHANGED = "config_changed"  # limits or bans were changed; detail: those in force; reason: file or command
    CONN_OPENED = "conn_opened"
    CONN_REFUSED = "conn_refused"  # at accept: reason names the limit, or "banned"
    HANDSHAKE_DONE = "handshake_done"  # value: ms since the connection was opened
    COMMAND = "command"  # reason: name of the command
    PUBLISH_STARTED = "publish_started"
    PLAY_STARTED = "play_started"
    STATE_CHANGED = "state_changed"  # value, limit of `axis`; to READY, value: ms since it was left; `state_ms`
    PICTURES_LATE = "pictures_late"  # the first picture since the viewer kept up was left out, for it would be late
    DROPPED = "dropped"  # an episode of drops has ended: dropped_*; detail: by reason and class; value: its ms
    RETURNED = "returned"  # brought back to live; value: ms of delay removed
    RENDITION_SWITCHED = "rendition_switched"  # reason: which, and why; value: ms that it was in the one before
    INPUT_PAUSED = "input_paused"
    INPUT_RESUMED = "input_resumed"  # value: ms that the pause lasted
    LIMIT_HIT = "limit_hit"  # axis: name of the limit; value; limit
    SAMPLE = "sample"  # as flow_samples, for one who is in trouble: kernel figures, delay
    BANNED = "banned"  # an open connection was ended because its address was banned
    CONN_CLOSED = "conn_closed"  # reason; state_from, state_ms: the last state; sent_bytes, dropped_*: totals
    OVERFLOW = "overflow"  # value: records that were lost because the recorder's queue was full


RECORDED: Final = frozenset(
    event.value
    for event in EventName
    if event
    not in {
        EventName.CONN_OPENED,
        EventName.HANDSHAKE_DONE,
        EventName.COMMAND,
        EventName.PUBLISH_STARTED,
        EventName.PLAY_STARTED,
        EventName.CONN_CLOSED,
    }
)
"""Events that are written to files; the others go to live surfaces only: `flow_closes` has what they say."""


class RecordedRole(enum.Enum):
    """What a connection is used for: the values of `role`."""

    UNKNOWN = "unknown"
    PUBLISH = "publish"
    PLAY = "play"
    HTTP_FLV = "http_flv"
    RPC = "rpc"


VIEWING: Final = (RecordedRole.PLAY.value, RecordedRole.HTTP_FLV.value)
"""Values of `role` for viewers."""
CLASS_NAMES: Final = tuple(item.name.lower() for item in MessageClass)
"""Names of the members of `MessageClass`, in its order: control, header, key, inter, disposable, audio, data."""

_IDENTITY: Final = (
    Column("ts", Kind.TIMESTAMP, "when, UTC, microseconds", nullable=False),
    Column("node", Kind.TEXT, "name of the server", nullable=False),
    Column("seq", Kind.INT, "grows within a node and table; (node, seq) is unique in a table", nullable=False),
    Column("conn_id", Kind.INT, "connection; 0: the server itself", nullable=False),
)
_PEER: Final = (
    Column("peer_ip", Kind.TEXT, "address of the peer, as the privacy setting lets it through"),
    Column("peer_port", Kind.INT, "port of the peer"),
    Column("role", Kind.TEXT, "what the connection is used for: see `RecordedRole`"),
    Column("app", Kind.TEXT, "application"),
    Column("stream", Kind.TEXT, "stream; a keyed hash where the name is a secret"),
)
PEER_NAMES: Final = tuple(column.name for column in _PEER)
_QUEUE: Final = (
    Column("queued_bytes", Kind.INT, "queued and not yet taken by the kernel, bytes"),
    Column("queued_messages", Kind.INT, "the same in messages"),
    Column("queued_age_ms", Kind.REAL, "age of the oldest queued message, ms"),
)
_KERNEL: Final = (
    Column("rtt_us", Kind.INT, "smoothed round-trip time of the kernel, us; null: not asked"),
    Column("unsent_bytes", Kind.INT, "taken by the kernel and not acknowledged, bytes; null: not asked"),
    Column(
        "viewer_delay_ms",
        Kind.REAL,
        "age of the oldest that was meant for the viewer and it has not taken, here or in the kernel, ms",
    ),
)
_LINE: Final = (
    Column("retransmits", Kind.INT, "times that the oldest data was sent again since anything new was acknowledged"),
    Column("probes", Kind.INT, "probes of the peer's closed window since its kernel was heard"),
    Column("backoff", Kind.INT, "how often the wait before the next of either has doubled"),
    Column("unacked_segments", Kind.INT, "sent and not acknowledged, segments"),
    Column("heard_ms", Kind.INT, "since the peer's kernel was heard (an acknowledgement), ms"),
    Column("acked_bytes", Kind.INT, "what the peer's kernel has acknowledged since the connection was opened, bytes"),
    Column("window_bytes", Kind.INT, "what the peer's kernel has room for, as it said last, bytes; 0: it is not read"),
)
"""Columns that the kernel knows of the line; null: not asked, or a proxy is in between, whose line it would be."""

FLOW_EVENTS: Final = Table(
    "flow_events",
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
        Column("reason", Kind.TEXT, "why: reason of a refusal, name of a command, or one line"),
        Column("detail", Kind.TEXT, "more, as JSON text; no job reads it of a connection's events"),
        Column("count", Kind.INT, "how many occurrences the row stands for; null: one"),
    ),
)


def _int(name: str, meaning: str) -> Column:
    return Column(name, Kind.INT, meaning)


def _real(name: str, meaning: str) -> Column:
    return Column(name, Kind.REAL, meaning)


DROP_REASONS: Final = tuple(reason.name.lower() for reason in DropReason)
"""Drop reasons in column names: refused, late, thinned, returned, key_wait, held, requested, unfollowed, closed."""
STATE_NAMES: Final = ("ready", "overloaded", "soft", "hard")
"""States in the names of columns, from best to worst: READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT."""

_WHOLE: Final = (
    *_IDENTITY,
    *_PEER,
    Column("agent", Kind.TEXT, "what the peer calls itself"),
    Column("opened_at", Kind.TIMESTAMP, "when it was opened, UTC", nullable=False),
    Column("duration_s", Kind.REAL, "for how long it was open, by the monotonic clock, seconds", nullable=False),
    Column("reason", Kind.TEXT, "close reason, see `flowctl.reasons.CloseReason`; null: it is open"),
    Column("code", Kind.TEXT, "code of a protocol error, short and ours"),
    Column("limit_name", Kind.TEXT, "limit that ended it"),
    Column(
        "refusal",
        Kind.TEXT,
        "why its last refused request was refused: auth, access (by settings), hook, undecided, name taken, no stream, "
        "plays already, limit, bad request, redirected; null: none was",
    ),
    _real("handshake_ms", "from being opened to the end of the handshake, ms"),
    _real("asked_ms", "from being opened to its first request to play or publish, ms; null: it made none"),
    _real("startup_ms", "from being opened to the first media queued for it here, or to publishing, ms; null: never"),
    # what its Sender did
    *(_real(f"time_{name}_ms", f"time in state {name}, ms") for name in STATE_NAMES),
    *(_int(f"episodes_{name}", f"how often it came into state {name} from a better one") for name in STATE_NAMES[1:]),
    _int("hard_at_once", "how often it went from READY to HARD_LIMIT at once"),
    _int("recoveries", "how often it came back to READY"),
    _real("recover_ms", "time from leaving READY to being back, all episodes that ended, ms"),
    _real("recover_max_ms", "the longest of these, ms"),
    _int("late_episodes", "how often leaving out pictures for being late began"),
    _int("returns", "how often it was brought back to live"),
    _int("input_pauses", "how often its input was paused"),
    _real("input_paused_ms", "for how long, ms"),
    _int("limit_hits", "how often it went over a limit; which ones, `flow_events` tell"),
    _int("edges_missed", "changes of state that nobody saw; times in states are right anyway"),
    _int("events_count", "rows of it in flow_events"),
    *(
        _int(f"{what}_messages_{name}", f"messages {what}, class {name}")
        for what in ("accepted", "sent", "dropped")
        for name in CLASS_NAMES
    ),
    _int("accepted_bytes", "of all messages that were for it, bytes"),
    _int("sent_bytes", "wire bytes taken by the kernel"),
    _int("dropped_bytes", "of all messages that were dropped, bytes"),
    *(_int(f"dropped_by_{name}", f"messages dropped, reason {name}") for name in DROP_REASONS),
    _int("pictures_wanted", "pictures published for it, without those queued when it left or that it had muted"),
    _int("pictures_sent", "of these, how many it was sent"),
    _int("lost_messages", "key and inter frames and audio dropped because it was slow"),
    _real("unrecovered_ms", "since it left READY and did not come back, ms; null: it is READY"),
    _int("unrecovered_bytes", "wire bytes that the kernel took in that time"),
    # what samples saw; null where nobody sampled
    _int("samples_count", "rows of it in flow_samples"),
    _real("sampled_ms", "time that samples are about, ms"),
    *(
        _real(f"delay_{name}_ms", f"delay of the viewer over that time, {name}, 1.6 % off at most, ms; 0: it kept up")
        for name in ("p50", "p95", "p99")
    ),
    _real("delay_max_ms", "worst delay, ms"),
    _real("delay_mean_ms", "mean delay, ms"),
    _real("target_delay_ms", "target delay in force at the end, ms; null: none"),
    _real("late_ms", "time in which its delay was above that target, ms"),
    _int("stall_count", "how often it took nothing for half a second while something waited"),
    _real("stall_ms", "for how long, ms"),
    _real("trouble_ms", "time not READY or without some of the pictures, as samples saw it, ms"),
    _int("line_bytes", "what its line carried while there was always something to send, bytes"),
    _int("line_stream_bytes", "what was published for it in that time, bytes"),
    _real("lag_ms", "time in which somebody was to blame for its state, as samples saw it, ms"),
    _real("lag_server_ms", "of this, where that was the lateness of its thread, ms"),
    _real("lag_burst_ms", "of this, where that was a burst of its publisher, ms"),
    _int("unforced_drops", "messages dropped in READY while nothing stood still"),
    _int("rtt_us", "smoothed round-trip time of the kernel when it was last asked, us"),
    *_LINE,  # at the end
    _int("read_bytes", "what its program last said it had read (RTMP's Acknowledgement), bytes; null: nothing"),
    # of one that follows a set of renditions; null where it never did
    Column("renditions", Kind.TEXT, 'time in each rendition, seconds as JSON text, the smallest first: {"720": 41.2}'),
    _real("smaller_ms", "time in renditions below the largest of the set, ms"),
    Column("why_smaller", Kind.TEXT, "why it was in one of these, of the longest such stay"),
    _int("switches", "how often it went on in another rendition"),
    # of a publisher
    _int("ingest_bytes", "media received, bytes"),
    _int("ingest_pictures", "pictures received"),
    _int("ingest_key_frames", "key frames received"),
    _int("ingest_audio", "audio messages received"),
    _real("key_interval_ms", "mean distance of key frames by their time stamps, ms"),
    _real("key_interval_max_ms", "largest distance of key frames, ms"),
    _int("gap_count", "how often no media came for more than a second"),
    _real("gap_ms", "for how long in all, ms"),
    _real("gap_max_ms", "the longest of these, ms"),
    _real(
        "jitter_ms",
        "interarrival jitter of RFC 3550, ms: reading (input is gathered for 36 ms at most) against "
        "time stamp of pictures, or of sound without any, smoothed, mean over time",
    ),
)

FLOW_CLOSES: Final = Table("flow_closes", _WHOLE)
FLOW_OPENS: Final = Table("flow_opens", _WHOLE)

FLOW_SAMPLES: Final = Table(
    "flow_samples",
    (
        *_IDENTITY,
        *_PEER,
        Column("interval_ms", Kind.REAL, "length of the interval that ends at ts, ms", nullable=False),
        Column("state", Kind.TEXT, "state at its end", nullable=False),
        Column("picture_share", Kind.REAL, "share of the pictures of the last 20 s that were sent, 0 to 1"),
        *_QUEUE,
        Column("stalled_ms", Kind.REAL, "for how long the peer has taken nothing while something waits, ms"),
        Column("drain_bytes_per_s", Kind.REAL, "what the peer takes while there is always something; null: unknown"),
        Column("thread_busy", Kind.REAL, "share of the time in which the connection's thread was busy, 0 to 1"),
        Column("strained", Kind.FLAG, "whether the thread had no room, so that the peer may seem slow and not be"),
        Column("input_paused", Kind.FLAG, "whether input is paused"),
        *_KERNEL,
        *_LINE,
        Column("rendition", Kind.TEXT, "rendition that it follows at its end; null: it follows no set"),
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
    LATE = "late"  # output: the first message since the peer kept up was left out for being late
    RETURN = "return"  # output: brought back to live
    CLOSE = "close"  # output: the end
    END = "end"  # detail: final figures, for the comparison; absent where the recording was cut off


FLIGHT: Final = Table(
    "flight",
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

TABLES: Final = {table.name: table for table in (FLOW_CLOSES, FLOW_OPENS, FLOW_EVENTS, FLOW_SAMPLES, FLIGHT)}


def conn_id_of(start_s: int, number: int) -> int:
    """Return the identity of connection `number` of a process that started in second `start_s` since the epoch."""
    return start_s << CONN_NUMBER_BITS | number % CONN_NUMBERS
