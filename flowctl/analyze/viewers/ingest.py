"""``ingest``: how well publishers brought their streams: gaps, distance of key frames, jitter, rates, comings back.

One row per connection that began to publish, those that are still open among them; one that was refused (a wrong key, a
name that is taken) never did. `health` says in a word what is worst: the first of `HEALTH` that holds, null where
records do not tell what came in. A publisher has come back if a connection that published the same stream on the same
node had ended less than `BACK_S` before it was opened. Two never publish a stream of a node at once: where one began
before the other had ended, a clock was set, and nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flowctl.analyze.models import query
from flowctl.analyze.viewers.sessions import OPEN_COLUMNS, still_open

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Parts

BACK_S: Final = 60.0
"""Longest absence after which a publisher came back: encoders try again within seconds; later it is a new broadcast."""
GAP_SHARE: Final = 0.01
"""Least share of the time without media that viewers see: a player's buffer of some seconds is used up."""
GAP_MAX_MS: Final = 5_000.0
"""Length of a gap that no player's buffer bridges."""
KEY_MAX_MS: Final = 10_000.0
"""Longest healthy distance of key frames, for which viewers wait: encoders are told 2 s, and 10 s is a default."""
JITTER_MS: Final = 100.0
"""Jitter from which pictures come in bursts, three at 30 a second: queues of viewers grow with each."""

TAKEN_OVER_S: Final = 1.0
"""Most time between the first media of a publisher that takes over and the close of the other, which come in turn."""

_KEPT: Final = (
    *("node", "conn_id", "app", "stream", "peer_ip", "agent", "opened_at", "duration_s", "close_reason", "bit_rate"),
    *("frames_per_s", "ingest_bytes", "ingest_pictures", "ingest_key_frames", "ingest_audio", "key_interval_ms"),
    *("key_interval_max_ms", "gap_count", "gap_ms", "gap_max_ms", "jitter_ms", "seen_at"),
)
COLUMNS: Final[dict[str, str]] = {
    **{name: OPEN_COLUMNS[name] for name in _KEPT},
    "gap_share": "double",
    "away_s": "double",
    "reconnects": "bigint",
    "health": "string",
}
"""Contract of ``ingest``. Grain: one publishing connection."""
HEALTH: Final = ("no media", "gaps", "came back", "key frames far apart", "jitter", "steady")
"""Health of a publication, from worst to best."""


def ingest(parts: Parts) -> DataFrame:
    marks = {"back_s": BACK_S, "taken_over_s": TAKEN_OVER_S, "gap_share": GAP_SHARE, "gap_max_ms": GAP_MAX_MS}
    marks |= {"key_max_ms": KEY_MAX_MS, "jitter_ms": JITTER_MS}
    return query("viewers/ingest", {"sessions": parts.table("sessions"), "still": still_open(parts)}, **marks)
