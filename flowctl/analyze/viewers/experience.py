"""``experience``: what viewers felt, in the words of CTA-2066, by stream, application, network, agent, node and role.

Of each hour, sums and sketches are kept per value of each dimension (part `felt`): sums are of whole numbers, and
sketches of KLL merge. The answer adds sessions that are still open, keeps of each dimension the values with the most
viewers (`MOST_VALUES_PER_DIMENSION`), and puts all others into one row. Attempts are all that asked to play, plays
those that were given media. A distribution has each viewer once, without those that stayed less than `LEAST_STAY_S`;
ratios are sum over sum. An open session has the time until it was last heard of, with the ratios of its last row; its
counts end with that row. Up to `SKETCH_K` viewers a percentile is exact; beyond, its rank is `RANK_ERROR` off at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart, typed
from flowctl.analyze.models import query, run_text
from flowctl.analyze.records.addresses import with_unit
from flowctl.analyze.viewers import ingest
from flowctl.analyze.viewers.sessions import lasting, seen_sessions, still_open
from flowctl.records.telemetry.schema import STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Parts

LEAST_STAY_S: Final = 2.0
"""Least stay of a viewer: before, it has had little but the group of pictures that everybody is given at once."""
MOST_KEPT: Final = 1 << 62
MOST_VALUES_PER_DIMENSION: Final = 100
"""Most values of a dimension that have a row of their own."""
FEW: Final = 20
"""Viewers below which figures are few: their 95th percentile is the worst of them."""
DIMENSIONS: Final = ("all", "stream", "application", "network", "agent", "node", "role")
"""Dimensions by which figures are summed up."""
SKETCH_K: Final = 1000
RANK_ERROR: Final = 2.296 / SKETCH_K**0.9723
"""Rank error of a KLL sketch with that k: 0.28 %."""
_SKETCHES: Final = ("first_frames", "delays")
_COUNTS: Final = (
    *("viewers", "attempts", "plays", "start_failures", "exits_before_start", "troubled", "cut_slow", "play_ms"),
    *("stall_count", "stall_ms", "stall_play_ms", "late_ms", "target_ms", "pictures_wanted", "pictures_sent"),
    *("switches", "set_ms", "smaller_ms"),
    *("sent_bytes", "rated_bytes", "rated_ms", "framed_pictures", "framed_ms", "accepted_messages"),
    *("dropped_messages", *(f"{name}_ms" for name in STATE_NAMES)),
)
PART_COLUMNS: Final[dict[str, str]] = {
    "by": "string", "key": "string", **dict.fromkeys(_COUNTS, "bigint"), **dict.fromkeys(_SKETCHES, "binary"),
}  # fmt: skip
FIGURES: Final[dict[str, str]] = {
    **dict.fromkeys(("viewers", "attempts", "plays", "start_failures", "exits_before_start"), "bigint"),
    **dict.fromkeys(("stall_count", "troubled", "cut_slow", "switches"), "bigint"),
    **dict.fromkeys(("accepted_messages", "dropped_messages", "sent_bytes"), "bigint"),
    "few": "boolean",
    **dict.fromkeys(("rank_error", "first_frame_p50_ms", "first_frame_p95_ms"), "double"),
    **dict.fromkeys(("delay_p50_ms", "delay_p95_ms", "delay_p99_ms", "picture_share", "late_share"), "double"),
    **dict.fromkeys(("stall_ratio", "bit_rate", "frames_per_s", "play_hours", "drop_ratio"), "double"),
    "smaller_rendition_share": "double",
    **{f"share_{name}": "double" for name in STATE_NAMES},
}
COLUMNS: Final[dict[str, str]] = {
    "by": "string", "key": "string", "keys": "bigint", **FIGURES, "peak_viewers": "bigint", "peak_at": "timestamp",
}  # fmt: skip
"""Contract of ``experience``. Grain: one value of one dimension; key "": not known, null: all that have no row."""


def felt(sessions: DataFrame) -> DataFrame:
    """Sum up what viewers had (`PART_COLUMNS`), by the values of each dimension, and `date` and `hour` of sessions."""
    return query("viewers/felt", {"sessions": with_unit(sessions)}, least_stay_s=LEAST_STAY_S, sketch_k=SKETCH_K)


def by_value(parts: Parts, by: Sequence[str] = DIMENSIONS, most_values: int = MOST_KEPT) -> DataFrame:
    """Return `FIGURES` of the values of some dimensions, those of open sessions among them; see ``experience.sql``."""
    columns = ", ".join(f"`{name}`" for name in PART_COLUMNS)
    both = f"SELECT {columns} FROM closed WHERE `by` IN (:by) UNION ALL SELECT {columns} FROM still WHERE `by` IN (:by)"
    dated = run_text("SELECT *, '' AS date, '' AS hour FROM still", {"still": lasting(parts)})
    inputs = {"closed": parts.table("felt"), "still": felt(dated)}
    marks = {"few": FEW, "sketch_k": SKETCH_K, "rank_error": RANK_ERROR, "most_values": most_values}
    return query("viewers/experience", {"felt": run_text(both, inputs, by=by)}, **marks)


def experience(parts: Parts) -> DataFrame:
    peaks = query(
        "viewers/peaks",
        {"sessions": parts.table("sessions"), "still": still_open(parts)},
        since_s=0 if parts.since is None else int(parts.since.timestamp()),
    )
    text = "SELECT * FROM top LEFT JOIN peaks USING (`by`, key)"
    return run_text(text, {"top": by_value(parts, most_values=MOST_VALUES_PER_DIMENSION), "peaks": peaks})


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    rows = typed(experience(parts), COLUMNS).toArrow()  # some hundred
    parts.write("experience", rows, COLUMNS)
    if earlier := parts.day_before():
        parts.write("experience_before", typed(experience(earlier), COLUMNS).toArrow(), COLUMNS)
    parts.write("ingest", ingest.ingest(parts), ingest.COLUMNS)
    counted = run_text(
        "SELECT health, count(*) AS count FROM ingest GROUP BY health", {"ingest": parts.result("ingest")}
    )
    counts = {row["health"]: row["count"] for row in counted.collect()}
    whole = [row for row in rows.select(["by", "peak_viewers", *FIGURES]).to_pylist() if row.pop("by") == "all"]
    totals = whole[0].items() if whole else ()
    summary = {name: round(value, 4) if isinstance(value, float) else value for name, value in totals}
    publishers = {word: counts[word] for word in sorted(ingest.HEALTH) if word in counts}
    return JobAnswer(summary={**summary, "publishers": publishers})


JOB: Final = AnalysisJob(
    name="experience",
    parts=(
        JobPart(
            name="felt",
            columns=PART_COLUMNS,
            reads=("flow_closes",),
            make=lambda records, _: felt(seen_sessions(records)),
        ),
    ),
    uses=("sessions", "open_sessions"),
    results=("experience", "experience_before", "ingest"),
    answer=answer,
)
