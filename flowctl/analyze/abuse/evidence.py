"""What a record says about its address: evidence against it, and good standing. Kept per hour as part `evidence`.

Each record is judged alone. Connections that play, publish or do harm are kept one by one, so that `scores` can follow
them from hour to hour. An address is one of `addresses.with_unit`: of IPv6 it is the /64.
The models are ``records.sql``, ``kinds.sql`` and ``evidence.sql``, in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.abuse.weights import BEFORE_PLAYING, Weights
from flowctl.analyze.job import JobPart
from flowctl.analyze.models import query
from flowctl.analyze.records import addresses

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Records

_WEIGHTS_USED: Final = ("short_s", "deaf_bytes_per_s", "settled_s")
"""Fields of `Weights` that the part is made with."""

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
    marks = {name: getattr(weights, name) for name in _WEIGHTS_USED}
    return query("abuse/kinds", {"rows": addresses.with_unit(rows)}, **marks)


def _make(records: Records, options: Any) -> DataFrame:
    rows = query("abuse/records", {name: records.table(name) for name in EVIDENCE.reads})
    told = {"told": with_evidence(rows, options.weights)}
    return query("abuse/evidence", told, before_playing=BEFORE_PLAYING)


EVIDENCE: Final = JobPart(
    name="evidence",
    columns=COLUMNS,
    make=_make,
    reads=("flow_closes", "flow_opens", "flow_events"),
    depends=lambda options: " ".join(f"{getattr(options.weights, name):g}" for name in _WEIGHTS_USED),
    version=7,
    looks_back_h=24,
)
