"""Whose fault was it? Shares of a viewer's trouble that the viewer's link, our own thread, the stream and limits had.

A viewer is in trouble if at least one of these is so (`troubled_sql`); everybody flickers to OVERLOADED for some
milliseconds, above all while a group of pictures is taken at the beginning, and that is none:

- it reached SOFT_LIMIT or HARD_LIMIT;
- it was not READY, without some of the pictures (in records of format 1: below the step FULL) or stalled for more than
  a second and more than 1 % of its time;
- it left READY, and video frames that others need, or audio, were dropped (not those still queued when it left);
- the server disconnected it for being slow.

What counts is the cause when READY was left, not what there was most of afterwards: a viewer that a busy thread has
thrown behind takes long to catch up over a link that is just fast enough, and a thread may be busy with other things
while a viewer recovers. So shares are those of the samples in whose interval READY was left and not come back to:

- ``server_loop``: the share of them in which the thread had no room (`strained`) or was busy for 90 % of the time. Then
  every viewer of the thread seems slow.
- ``publisher_burst``: of the rest, what exceeds the mean: where the stream was at 1.5 times this viewer's mean rate or
  more in them, 1 - mean / rate.
- ``policy``: of what is left after that, the share of drops that nothing forced: made in READY, with nothing stalled;
  and all of it where one message took the viewer from READY to HARD_LIMIT, because then limits are too small for it.
- ``viewer_link``: the rest. A peer that takes less than it is sent needs no further proof.

`blame` is the largest share; ``none``, and all shares 0, for those who were not in trouble. Without samples the first
two cannot be seen, and their shares are 0.
"""

from __future__ import annotations

from typing import Final

from flowctl.reasons import RECORDED_DROPS, SLOW_ENDS, DropReason

TROUBLE_MS: Final = 1_000.0
"""So long a player plays from what it has; a picture that stands for less is a flicker."""
TROUBLE_SHARE: Final = 0.01
"""Of the session; a second of each hour and a half, in flickers, is no trouble."""
NEEDED: Final = ("key", "inter", "audio")
"""Classes whose loss is seen or heard; a disposable frame is made to be dropped."""
NO_LOSS: Final = (DropReason.CLOSED.value, DropReason.UNFOLLOWED.value, DropReason.REQUESTED.value)
"""Drops that no slowness has caused: the peer or the application did not want these messages any more."""

BLAMES: Final = ("viewer_link", "server_loop", "publisher_burst", "policy")
"""In this order where shares are equal."""
BURST: Final = 1.5
"""Times the mean rate from which a stream counts as bursting; key frames alone move a second's rate less than that."""


def shares_sql() -> list[dict[str, str]]:
    """Return the columns to add, in steps that build on each other: name -> expression in Spark's SQL.

    Needs the columns of `session_parts` and `trouble_ms` and `dropped_messages`.
    """
    mean, rate = "s_accepted_bytes / s_ms", "l_accepted_bytes / l_ms"
    troubled = troubled_sql()
    return [
        {
            "b_server": "CASE WHEN l_ms > 0 THEN coalesce(l_ours_ms, 0D) / l_ms ELSE 0D END",
            "b_excess": (
                f"CASE WHEN l_ms > 0 AND s_accepted_bytes > 0 AND {rate} >= {BURST}D * {mean} "
                f"THEN 1D - ({mean}) / ({rate}) ELSE 0D END"
            ),
            "b_unforced": (
                "CASE WHEN hard_at_once > 0 THEN 1D "
                "WHEN s_dropped_messages > 0 THEN coalesce(s_unforced_drops, 0L) / s_dropped_messages ELSE 0D END"
            ),
            "b_any": f"CASE WHEN {troubled} THEN 1D ELSE 0D END",
        },
        {
            "blame_share_server_loop": "b_any * b_server",
            "blame_share_publisher_burst": "b_any * (1D - b_server) * b_excess",
            "blame_share_policy": "b_any * (1D - b_server) * (1D - b_excess) * b_unforced",
            "blame_share_viewer_link": "b_any * (1D - b_server) * (1D - b_excess) * (1D - b_unforced)",
        },
        {"blame": blame_sql()},
    ]


def lost_sql() -> str:
    """Return how many needed messages were dropped because the viewer was slow, in Spark's SQL.

    Of a connection whose close is not there, those of its samples, which do not tell reasons.
    """
    told = " + ".join(
        f"coalesce(told.dropped.`{reason}`.`{name}`, 0L)"
        for reason in RECORDED_DROPS
        if reason not in NO_LOSS
        for name in NEEDED
    )
    sampled = " + ".join(f"coalesce(s_dropped_{name}, 0L)" for name in NEEDED)
    return f"CASE WHEN nothing_dropped THEN 0L WHEN told.dropped IS NOT NULL THEN {told} ELSE {sampled} END"


def troubled_sql() -> str:
    """Return whether a connection was in trouble, in Spark's SQL; never null."""
    ends = ", ".join(f"'{reason}'" for reason in SLOW_ENDS)
    long = f"greatest({TROUBLE_MS}D, {TROUBLE_SHARE}D * duration_s * 1e3D)"
    return (
        f"(coalesce(worst, 0) >= 2 OR greatest(trouble_ms, coalesce(stall_ms, 0D)) > {long} "
        f"OR (coalesce(worst, 0) >= 1 AND lost_messages > 0) OR coalesce(close_reason IN ({ends}), false))"
    )


def blame_sql() -> str:
    """Return the name of the largest share, in Spark's SQL."""
    largest = "greatest(" + ", ".join(f"blame_share_{name}" for name in BLAMES) + ")"
    cases = " ".join(f"WHEN blame_share_{name} = {largest} THEN '{name}'" for name in BLAMES)
    return f"CASE WHEN b_any = 0D THEN 'none' {cases} END"
