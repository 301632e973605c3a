"""What a record says about its address: evidence against it, and good standing. Kept per hour as part `evidence`.

Each record is judged alone. Connections that play, publish or do harm are kept one by one, so that `scores` can follow
them from hour to hour. An address is one of `addresses.with_unit`: of IPv6 it is the /64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.abuse.weights import BEFORE_PLAYING, Weights
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import JobPart
from flowctl.analyze.records import addresses
from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.records.telemetry.schema import VIEWING, EventName, RecordedRole

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flowctl.analyze.job import Records

_HIT, _REFUSED, _STARTED = (
    name.value for name in (EventName.LIMIT_HIT, EventName.CONN_REFUSED, EventName.SERVER_STARTED)
)
_OPEN: Final = "open"
"""Event name given to rows of `flow_opens`; rows of `flow_closes` have none."""
_IDENTITY: Final = ("date", "hour", "ts", "node", "conn_id", "peer_ip", "role")
_OF_EVENTS: Final = ("event", "reason", "axis", "count")
_OF_CLOSES: Final = (
    "reason",
    "code",
    "limit_name",
    "handshake_ms",
    "duration_s",
    "startup_ms",
    "unrecovered_ms",
    "unrecovered_bytes",
    "sent_bytes",
    "acked_bytes",
    "read_bytes",
    "window_bytes",
    "retransmits",
    "probes",
)
_BEFORE_HANDSHAKE: Final = ("not-rtmp", "tls-on-plain-port", "rtmpe", "real-ip-prefix")
"""Codes of protocol errors in the handshake."""
_WEIGHTS_USED: Final = ("short_s", "deaf_bytes_per_s", "settled_s")
"""Fields of `Weights` that the part is made with."""
_WAIT_LIMIT: Final = "player_wait_s"
"""Limit that ends connections that wait for too long."""
_LEFT: Final = (CloseReason.PEER_CLOSED.value, CloseReason.PEER_RESET.value)
_BAD_ENDS: Final = ("deaf_close", "never_read", "deaf_http", "cut_at_once", "protocol_error", "short_connection")
"""Ends of connections that do not count as good standing."""
_DEAF_FROM_MS: Final = 5_000.0
"""Least time of trouble of a deaf viewer: after a picture of some MB viewers are cut before they can have read it."""
_SEGMENT_BYTES: Final = 1460
"""Room below which a peer's window is closed: its program does not read what its kernel has."""
_LEAST_UNANSWERED: Final = 2
"""Least retransmissions or probes without an answer on a lost line: one may be under way, or was not answered because
kernels answer only two a second."""
_HELD_BYTES: Final = 16 * 1024 * 1024
"""Most that a kernel holds for a program that reads nothing (Linux: up to 6 MiB, or what its owner sets): a viewer that
was sent less, for less than a minute (`Weights.settled_s`), need not have read at all."""
_UNREAD_BYTES: Final = 256 * 1024
"""Most that a kernel holds for a program that reads nothing, unless an owner set more (Linux: 64 KiB, 208 KiB where the
program asks for it)."""
_SAYS_BYTES: Final = 4 * 1024 * 1024
"""Received by then, a program of RTMP has said that it reads: it does for each 2.5 MB, most for half or a tenth."""
_MOST_NAME_CHARS: Final = 80
"""Longest name of a limit or a reason: a kind in a ban has at most 100 printable characters."""
_MOST_AMOUNT: Final = 1_000_000
"""Most refusals that one record may sum up."""

COLUMNS: Final = {
    "minute": "timestamp",
    "address": "string",  # null: a row of a server, whose process began at `last_seen`
    "kind": "string",  # of evidence; null: not evidence
    "node": "string",  # with conn_id: of a connection that plays, publishes or does harm; null: of many others
    "conn_id": "bigint",  # 0: of many
    "amount": "bigint",  # occurrences
    "opened": "bigint",  # connections that have ended
    "good_ms": "bigint",  # for how long one that ended well was served, or published
    "begun": "timestamp",  # when one that was seen open began to play or publish
    "waits": "bigint",  # 1: it waits for a stream, or did until we ended that
    "first_seen": "timestamp",
    "last_seen": "timestamp",
}
"""Grain: one row per address, minute and kind of evidence, and one per address and hour without evidence."""


def with_evidence(rows: DataFrame, weights: Weights) -> DataFrame:
    """Add `address`, `kind` (of evidence; null: none) and `amount`; works on a stream and on a table alike."""
    amount = f.least(f.greatest(f.coalesce("count", f.lit(1)), f.lit(1)), f.lit(_MOST_AMOUNT))
    found = addresses.with_unit(rows, "peer_ip").withColumn("kind", _kind(weights))
    return found.withColumn("amount", f.when(f.col("kind").isNotNull(), amount).otherwise(0))


def _make(records: Records, options: Any) -> DataFrame:
    closes, opens, events = map(records.table, EVIDENCE.reads)
    event, kind, started = f.col("event"), f.col("kind"), f.col("event").eqNullSafe(_STARTED)
    served = f.col("startup_ms").isNotNull()
    waits = f.col("role").isin(*VIEWING) & ~served
    there = opens.where(served | waits).select(*_IDENTITY, "duration_s", "startup_ms", f.lit(_OPEN).alias("event"))
    told = events.select(*_IDENTITY, *_OF_EVENTS).where(event.isin(_HIT, _REFUSED, _STARTED))
    rows = closes.select(*_IDENTITY, *_OF_CLOSES)
    for more in (there, told):
        rows = rows.unionByName(more, allowMissingColumns=True)
    is_open, closed = event.eqNullSafe(_OPEN), event.isNull()
    good = closed & served & ~f.coalesce(kind.isin(*_BAD_ENDS), f.lit(False))
    serious = f.coalesce(~kind.isin(*BEFORE_PLAYING) & ~kind.startswith("refused."), f.lit(False))
    ours = (f.col("reason") == CloseReason.SHUTDOWN.value) | f.col("limit_name").eqNullSafe(_WAIT_LIMIT)
    waits = f.coalesce(waits & (is_open | (closed & ours)), f.lit(False))
    single = started | is_open | good | serious | waits
    served_ms = f.greatest(f.col("duration_s") * 1000 - f.col("startup_ms"), f.lit(0.0))
    minute, begun_us = f.date_trunc("minute", "ts"), f.unix_micros("ts") - (served_ms * 1000).cast("bigint")
    found = with_evidence(rows.where(started | (f.col("peer_ip") != "")), options.weights).select(
        *("date", "hour", "ts", "address", "kind", "amount"),
        f.when(single, f.col("node")).alias("node"),
        f.when(single, f.col("conn_id")).otherwise(0).alias("conn_id"),
        f.when(kind.isNotNull(), minute).alias("within"),
        closed.cast("bigint").alias("opened"),
        f.when(good, served_ms).otherwise(0).cast("bigint").alias("good_ms"),
        f.when(is_open & served, f.timestamp_micros(begun_us)).alias("begun"),
        waits.cast("bigint").alias("waits"),
    )
    return found.groupBy("date", "hour", "address", "kind", "node", "conn_id", "within").agg(
        f.max(minute).alias("minute"),
        *(f.sum(name).alias(name) for name in ("amount", "opened", "good_ms")),
        f.max("waits").alias("waits"),
        f.min("begun").alias("begun"),
        f.min("ts").alias("first_seen"),
        f.max("ts").alias("last_seen"),
    )


EVIDENCE: Final = JobPart(
    name="evidence",
    columns=COLUMNS,
    make=_make,
    reads=("flow_closes", "flow_opens", "flow_events"),
    depends=lambda options: " ".join(f"{getattr(options.weights, name):g}" for name in _WEIGHTS_USED),
    version=6,
    looks_back_h=24,
)


def _kind(weights: Weights) -> Column:
    event = f.col("event")

    def named(column: str) -> Column:
        words = f.regexp_replace(f.coalesce(column, f.lit("unknown")), r"[^\w.-]", "_")
        return f.substring(words, 1, _MOST_NAME_CHARS)

    ends = f.coalesce(*(f.when(is_one, kind) for kind, is_one in _ends(weights).items()))
    return (
        f.when(event == _HIT, f.concat(f.lit("limit_hit."), named("axis")))
        .when(event == _REFUSED, f.concat(f.lit("refused."), named("reason")))
        .when(event.isNull(), ends)
    )


def _ends(weights: Weights) -> dict[str, Column]:
    """Return how connections end: kind of evidence -> condition; the first kind whose condition is true counts.

    Does a viewer that was cut as slow read? The kernel's buffers are full by then, so one octet more shows that it
    does. If the record does not tell, only a *stuck* one does not read: there, nothing was taken for seconds. If it was
    cut within moments, nothing is known. Was its line lost? While there is a line, the peer's kernel closes the window
    of a program that does not read, and answers probes. If the record does not tell (there is a proxy in between), the
    line of a viewer that had read for longer was lost. Had the program read before? It says so itself, as RTMP has it,
    and cannot have read more than its kernel got; or its kernel got more than it holds, and too little to be told of.
    Did a protocol error come after the handshake? If the record does not tell, it did not.
    """
    reason, code, role = f.col("reason"), f.col("code"), f.col("role")
    broken, slow, left = reason == CloseReason.PROTOCOL_ERROR.value, reason.isin(*SLOW_ENDS), reason.isin(*_LEFT)
    of_handshake = f.coalesce(code.isin(*_BEFORE_HANDSHAKE) | code.startswith("handshake"), f.lit(True))
    unknown = f.coalesce(role == RecordedRole.UNKNOWN.value, f.lit(True))
    trouble_ms, taken = f.col("unrecovered_ms"), f.col("unrecovered_bytes")
    short_ms, settled_ms = f.lit(weights.short_s * 1000), f.lit(weights.settled_s * 1000)
    before_ms = f.col("duration_s") * 1000 - f.coalesce("startup_ms", f.lit(0.0)) - trouble_ms
    reads = taken >= f.greatest(trouble_ms, f.lit(1000.0)) / 1000 * weights.deaf_bytes_per_s
    told = trouble_ms.isNotNull() & taken.isNotNull()
    closed = f.col("window_bytes") < _SEGMENT_BYTES
    stalls = closed & (f.col("retransmits") + f.col("probes") < _LEAST_UNANSWERED)  # null: not told
    acked, says = f.col("acked_bytes"), f.col("read_bytes")
    has_read = f.when(says.isNull(), acked.between(_UNREAD_BYTES, _SAYS_BYTES)).otherwise(says <= acked)
    return {
        "handshake_timeout": reason == CloseReason.HANDSHAKE_TIMEOUT.value,
        "not_rtmp": broken & of_handshake & unknown & f.col("handshake_ms").isNull(),
        "protocol_error": broken,
        "auth_refused": reason == CloseReason.AUTH_REFUSED.value,
        "slow_close": slow & f.when(told, reads).otherwise(reason != CloseReason.STUCK.value),
        "lost_line": slow & f.coalesce(~stalls, before_ms >= f.greatest(trouble_ms, short_ms)),
        "cut_at_once": slow & (trouble_ms < _DEAF_FROM_MS),
        "paused": slow
        & stalls
        & (f.coalesce(has_read, f.lit(False)) | (f.col("sent_bytes") > _HELD_BYTES) | (before_ms >= settled_ms)),
        "deaf_http": slow & (role == RecordedRole.HTTP_FLV.value),
        "never_read": slow & (before_ms < short_ms),
        "deaf_close": slow,
        "fruitless_connection": left & unknown,
        "short_connection": left & (f.col("duration_s") < weights.short_s),
    }
