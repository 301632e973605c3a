"""The report on a fleet: how full its nodes were, which streams are worth an edge, where viewers are (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowctl.charts.page import Figure
from flowctl.charts.pictures import MOST_BARS, Bar, Bars
from flowctl.pipeline.report.answers import left_out
from flowctl.pipeline.report.data import Cut, ReportData, Row, number
from flowctl.pipeline.report.decisions import Shown
from flowctl.pipeline.report.pictures import count, ms, percent, seconds, words
from flowctl.units import format_bit_rate

_FULL = 0.8
"""From this load on a bar warns: less than the usual headroom is free."""


def answer(data: ReportData) -> str:
    """Return the answer for the fleet, as the job tells it; "" if it does not."""
    fleet = data.job("capacity").summary.get("fleet")
    said = fleet.get("answer") if isinstance(fleet, Mapping) else None
    return "" if said is None else words(said, 1500)


def _rows(cut: Cut | None) -> list[Row]:
    return [] if cut is None else list(cut.rows)


def _rate(value: Any) -> str:
    found = number(value)
    return "-" if found is None else format_bit_rate(found)


def _mean(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:,.1f}"


def node_bars(data: ReportData) -> Figure | None:
    """Return how full each node was at its peak; None: there are no figures."""
    bars = [_node_bar(row) for row in _rows(data.capacity_nodes) if number(row.get("load_peak")) is not None]
    if not bars:
        return None
    # The bars are as long as nodes are full, not as long as the fullest is.
    bars = [Bar("full", 1.0, "100 %", "var(--quiet)"), *bars[: MOST_BARS - 1]]
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="node-loads", title="How full was each node?", description=said, bars=bars)
    return Figure(shape, note="Viewers at the node's own peak, of those that it carries.")


def _node_bar(row: Row) -> Bar:
    load = number(row.get("load_peak")) or 0.0
    more = "at least " if row.get("carries_at_least") else ""
    text = f"{percent(load)}: {_mean(row.get('viewers_peak'))} of {more}{count(row.get('carries_viewers'))}"
    return Bar(words(row.get("node"), 48), load, text, "var(--s2)" if load > _FULL else "var(--s1)")


def stream_bars(data: ReportData) -> Figure | None:
    """Return the viewers of each stream and node beside what a follower costs; None: there are no figures."""
    rows = [row for row in _rows(data.capacity_streams) if number(row.get("viewers_mean"))][: MOST_BARS - 1]
    if not rows:
        return None
    bars = [
        Bar(
            f"{words(row.get('stream'), 32)} at {words(row.get('node'), 24)}",
            number(row.get("viewers_mean")) or 0.0,
            f"{_mean(row.get('viewers_mean'))} viewers",
            "var(--s3)" if row.get("worth_following") else "var(--quiet)",
        )
        for row in rows
    ]
    cost = number(rows[0].get("follower_viewers")) or 0.0
    bars.append(Bar("what a follower costs", cost, f"{_mean(cost)} viewers", "var(--s2)"))
    said = ". ".join(f"{bar.label}: {bar.text}" for bar in bars)
    shape = Bars(name="stream-loads", title="Which streams are worth having at an edge?", description=said, bars=bars)
    legend = [("worth following", "var(--s3)"), ("cheaper at the origin", "var(--quiet)")]
    return Figure(
        shape, legend=legend, note=f"Viewers on average while watched; a follower costs as much as {_mean(cost)}."
    )


def nodes(data: ReportData) -> Shown | None:
    """Return the nodes as a table; None: there are none."""
    if data.capacity_nodes is None:
        return None
    heads = (
        "node", "carries", "by", "at its peak", "load", "on average", "recorded viewers", "recorded for", "streams",
        "a viewer takes", "all at most", "thread busy", "not READY",
    )  # fmt: skip
    rows = [
        [
            words(row.get("node"), 48),
            f"{'at least ' if row.get('carries_at_least') else ''}{count(row.get('carries_viewers'))}",
            words(row.get("carries_from"), 24),
            _mean(row.get("viewers_peak")),
            percent(row.get("load_peak")),
            _mean(row.get("viewers_mean")),
            count(row.get("viewers_recorded")),
            seconds(row.get("recorded_s")),
            count(row.get("streams")),
            _rate(row.get("bit_rate")),
            _rate(row.get("peak_bit_rate")),
            percent(row.get("busy_peak")),
            percent(row.get("trouble_share")),
        ]
        for row in data.capacity_nodes.rows
    ]
    return Shown(heads, rows, left_out(data.capacity_nodes, "nodes"))


def streams(data: ReportData) -> Shown | None:
    """Return the streams by node as a table; None: there are none."""
    if data.capacity_streams is None:
        return None
    heads = ("stream", "node", "on average", "at its peak", "watched for", "a viewer takes", "worth it", "saves")
    rows = [
        [
            words("/".join(str(row[name]) for name in ("app", "stream") if row.get(name)), 60),
            words(row.get("node"), 48),
            _mean(row.get("viewers_mean")),
            _mean(row.get("viewers_peak")),
            seconds(row.get("watched_s")),
            _rate(row.get("bit_rate")),
            "yes" if row.get("worth_following") else "no",
            _rate(row.get("saved_bit_rate")),
        ]
        for row in data.capacity_streams.rows
    ]
    more = "Saves: what the origin sends less when this node follows the stream once for all its viewers."
    return Shown(heads, rows, f"{left_out(data.capacity_streams, 'streams and nodes')} {more}".strip())


def places(data: ReportData) -> Shown | None:
    """Return where viewers are as a table; None: that is not known."""
    if data.capacity_places is None:
        return None
    heads = (
        "place", "known by", "most from", "addresses", "at its peak", "of all time watched", "not READY", "round trip",
        "of the wanted crowd", "edges it fills",
    )  # fmt: skip
    rows = [
        [
            words(row.get("place"), 60),
            words(row.get("place_from"), 12),
            words(row.get("node"), 32),
            count(row.get("addresses")),
            _mean(row.get("viewers_peak")),
            percent(row.get("viewers_share")),
            percent(row.get("trouble_share")),
            ms(row.get("rtt_ms")),
            count(row.get("viewers_wanted")),
            _mean(row.get("edges_filled")),
        ]
        for row in data.capacity_places.rows
    ]
    more = "Round trips are known of viewers in trouble only. Records know networks, not where these are: --regions."
    return Shown(heads, rows, f"{left_out(data.capacity_places, 'places')} {more}".strip())
