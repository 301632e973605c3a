"""Whose fault was it? Shares of a viewer's trouble that the viewer's link, our own thread, the stream and limits had.

What counts is the cause when READY was left, not what there was most of afterwards, so shares are of the samples in
whose interval READY was left and not come back to (`left_*`): ``server_loop``, where the thread had no room;
``publisher_burst``, of the rest, what exceeds the mean where the stream was at `BURST` times its mean rate or more;
``policy``, of what is left, the share of drops that nothing forced, or all of it where one message took the viewer from
READY to HARD_LIMIT; ``viewer_link``, the rest. Without samples the first two are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.analyze.records.expressions import added, share, zero
from flowctl.reasons import SLOW_ENDS

if TYPE_CHECKING:
    from pyspark.sql import Column

TROUBLE_MS: Final = 1_000.0
"""So long a player plays from what it has; a picture that stands for less is a flicker."""
TROUBLE_SHARE: Final = 0.01
"""Of the session; a second of each hour and a half, in flickers, is no trouble."""
BLAMES: Final = ("viewer_link", "server_loop", "publisher_burst", "policy")
"""In this order where shares are equal."""
BURST: Final = 1.5
"""Times the mean rate from which a stream counts as bursting; key frames alone move a second's rate less than that."""
UNFORCED_KINDS: Final = ("dropped_by_closed", "dropped_by_unfollowed", "dropped_by_requested")
"""Drops that no slowness has caused and no policy has made: the peer or the application did not want them any more."""


def troubled(trouble_ms: Column) -> Column:
    """Return whether a connection was in trouble; never null. Over a close, and how long that tells of trouble."""
    long = f.greatest(f.lit(TROUBLE_MS), TROUBLE_SHARE * 1e3 * f.col("duration_s"))
    limits = added(("episodes_soft", "episodes_hard"))
    return (
        (limits > 0)
        | (f.greatest(trouble_ms, zero("stall_ms")) > long)
        | ((limits + zero("episodes_overloaded") > 0) & (zero("lost_messages") > 0))
        | f.coalesce(f.col("reason").isin(*SLOW_ENDS), f.lit(False))
    )


def causes(trouble_ms: Column, dropped_messages: Column) -> dict[str, Column]:
    """Return what shares are made of, over a close: whether it was in trouble, and what spoke for each cause."""
    # Of the time in which anything was published for it: from its start, as far as that is known.
    mean = f.try_divide("accepted_bytes", f.col("duration_s") * 1e3 - zero("startup_ms"))
    rate = f.try_divide("left_bytes", "left_ms")
    unforced = share(zero("unforced_drops"), f.greatest(f.lit(0), dropped_messages - added(UNFORCED_KINDS)))
    return {
        "b_any": f.when(troubled(trouble_ms), 1.0).otherwise(0.0),
        "b_server": f.coalesce(share(f.col("left_server_ms"), f.col("left_ms")), f.lit(0.0)),
        "b_excess": f.when((mean > 0) & (rate >= BURST * mean), 1 - mean / rate).otherwise(0.0),
        "b_unforced": f.when(zero("hard_at_once") > 0, 1.0).otherwise(f.coalesce(unforced, f.lit(0.0))),
    }


def shares() -> dict[str, Column]:
    there, server, excess, unforced = map(f.col, ("b_any", "b_server", "b_excess", "b_unforced"))
    rest = there * (1 - server) * (1 - excess)
    parts = (rest * (1 - unforced), there * server, there * (1 - server) * excess, rest * unforced)
    largest = f.greatest(*parts)
    named = f.coalesce(*(f.when(part == largest, f.lit(name)) for name, part in zip(BLAMES, parts, strict=True)))
    found = {f"blame_share_{name}": part for name, part in zip(BLAMES, parts, strict=True)}
    return found | {"blame": f.when(there == 0, f.lit("none")).otherwise(named)}
