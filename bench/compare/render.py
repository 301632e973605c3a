"""The chart and the table of a comparison, from the figures of its measurements."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compare.plan import Item
from compare.rivals import versions
from kit import charts
from kit.tables import table

_MEDIANS: Final = (
    "cpu_us_per_viewer_s",
    "delay_p50_ms",
    "delay_p99_ms",
    "lag_p99_ms",
    "memory_kb_per_viewer",
    "idle_share",
    "server_cpu_share",
    "rounds_per_s",
    "interval_ms",
)
_MOST: Final = ("missing", "lost", "longest_round_s")
"""What must not vanish in a median: the largest of all repetitions counts."""

OURS: Final = "flowctl"
CHART: Final = "compare.svg"
_MARKERS: Final = "oXD^vP"
_TICKS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def rows(found: Mapping[Item, dict[str, Any]], absent: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one row per contender and point, with medians over the repetitions.

    Args:
        found: figures by measurement.
        absent: contenders that could not run, with the reason.

    Returns:
        Dictionaries with all of the same keys. ``flowctl_ratio`` is flowctl's processor time over this one's.
        ``doubts`` are those that at least half of the repetitions raised.
    """
    points: dict[tuple[int, int, float], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for item, figures in found.items():
        points[item.bit_rate, item.viewers, item.nap_s][item.name].append(figures)
    made = []
    for (bit_rate, viewers, nap_s), contenders in sorted(points.items()):
        point = {"viewers": viewers, "bit_rate": bit_rate, "nap_s": nap_s}
        merged = [_merged({"name": name, **point}, figures) for name, figures in contenders.items()]
        ours = next((row for row in merged if row["name"] == OURS), {})
        for row in merged:
            our_cost, cost = ours.get("cpu_us_per_viewer_s"), row["cpu_us_per_viewer_s"]
            row["flowctl_ratio"] = our_cost / cost if our_cost and cost else None
            row["ours_doubts"] = ours.get("doubts", [])
        made += merged
    empty = dict.fromkeys(made[0]) if made else {}
    return made + [{**empty, "name": name, "doubts": [f"left out: {why}"]} for name, why in absent.items()]


def _merged(point: dict[str, Any], repetitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for all repetitions of a measurement."""
    sound = [figures for figures in repetitions if "failed" not in figures]
    row: dict[str, Any] = {**point, "repetitions": len(sound)}
    for keys, merge in ((_MEDIANS, statistics.median), (_MOST, max)):
        for key in keys:
            values = [figures[key] for figures in sound if figures.get(key) is not None]
            row[key] = merge(values) if values else None
    costs = [figures["cpu_us_per_viewer_s"] for figures in sound]
    row["cpu_least"], row["cpu_most"] = (min(costs), max(costs)) if costs else (None, None)
    failures = [f"failed: {figures['failed']}" for figures in repetitions if "failed" in figures]
    return {**row, "doubts": _frequent([figures["doubts"] for figures in sound]) + failures[:1]}


def _frequent(doubts: list[list[str]]) -> list[str]:
    """Return the doubts that at least half of the repetitions raised. Their figures differ, so the words count."""
    firsts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for repetition in doubts:
        for doubt in repetition:
            words = "".join(character for character in doubt if not character.isdigit())
            firsts.setdefault(words, doubt)
            counts[words] += 1
    return [firsts[words] for words, count in counts.items() if count * 2 >= len(doubts)]


def shown(all_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns and words of the table."""
    return [
        {
            "server": row["name"],
            "Mbit/s": row["bit_rate"] / 1e6 if row.get("bit_rate") else None,
            "viewers": f"{row['viewers']:,}{', lazy' if row['nap_s'] else ''}" if row.get("viewers") else None,
            "us per viewer and s": _rounded(row.get("cpu_us_per_viewer_s")),
            "flowctl / it": _ratio(row),
            "delay p50 ms": _rounded(row.get("delay_p50_ms")),
            "delay p99 ms": _rounded(row.get("delay_p99_ms")),
            "reader's lag p99 ms": _rounded(row.get("lag_p99_ms"), 1),
            "memory kB per viewer": _rounded(row.get("memory_kb_per_viewer"), 1),
            "frames missing": row.get("missing"),
            "viewers lost": row.get("lost"),
            "full": "; ".join(row.get("doubts") or []),
        }
        for row in all_rows
    ]


def _rounded(value: float | None, digits: int = 0) -> float | None:
    return None if value is None else round(value, digits) if digits else float(round(value))


def _ratio(row: dict[str, Any]) -> str:
    """Return flowctl's cost over this one's; in brackets where something was full, so that work was left undone."""
    ratio = row.get("flowctl_ratio")
    if ratio is None or row["name"] == OURS:
        return ""
    return f"({ratio:.2f})" if row["doubts"] or row["ours_doubts"] else f"{ratio:.2f}"


def document(all_rows: list[dict[str, Any]], images: Path) -> str:
    """Write the chart and return the part of the document: chart and table."""
    alt = (
        "Processor time per viewer and second against the 99th percentile of delay, "
        "by server and number of viewers; the lower left is better"
    )
    chart(all_rows, images / CHART, alt)
    rivals = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [f"![{alt}](images/{CHART})", "", table(shown(all_rows))]
    return "\n".join([*lines, "", f"Compared with {rivals}." if rivals else ""])


def chart(all_rows: list[dict[str, Any]], path: Path, alt: str) -> None:
    """Draw cost against delay, one panel per bit rate; the bare loop, which has no frames, stands at its interval."""
    plt = charts.plotting()
    measured = [row for row in all_rows if row.get("cpu_us_per_viewer_s") is not None and not row["nap_s"]]
    bit_rates = sorted({row["bit_rate"] for row in measured}) or [0]
    names = list(dict.fromkeys(row["name"] for row in measured))
    crowds = sorted({row["viewers"] for row in measured})
    figure, axes = plt.subplots(1, len(bit_rates), figsize=(4.8 * len(bit_rates), 4.2), squeeze=False)
    for panel, bit_rate in zip(axes[0], bit_rates, strict=True):
        for index, name in enumerate(names):
            points = [row for row in measured if row["name"] == name and row["bit_rate"] == bit_rate]
            look = {"color": charts.COLOURS[index % 6], "marker": _MARKERS[index % 6]}
            _draw(panel, name, sorted(points, key=lambda row: row["viewers"]), crowds, look)
        panel.set_title(f"{bit_rate / 1e6:g} Mbit/s", fontsize=10)
        panel.set_xlabel("delay, 99th percentile (ms)")
        panel.set_xscale("log")
        low, high = _limits(panel.get_xlim())
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.set_xticks([], minor=True)
        panel.set_xlim(low, high)
        panel.set_ylim(bottom=0)
    axes[0][0].set_ylabel("processor time per viewer and second (us)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=max(len(names), 1), bbox_to_anchor=(0.5, 1.06))
    sizes = ", ".join(f"{count:,}" for count in crowds)
    note = f"size: {sizes} viewers; hollow: machine or server was full; bare loop: at its interval"
    figure.text(0.5, -0.04, note, ha="center", fontsize=9)
    charts.save(figure, path, alt)


def _limits(limits: tuple[float, float]) -> tuple[float, float]:
    """Return the ticks next to the limits of an axis, so that two of them stand at its ends."""
    return (
        max((tick for tick in _TICKS if tick <= limits[0]), default=_TICKS[0]),
        min((tick for tick in _TICKS if tick >= limits[1]), default=_TICKS[-1]),
    )


def _draw(panel: Any, name: str, points: list[dict[str, Any]], crowds: list[int], look: dict[str, str]) -> None:
    """Draw one contender into a panel: a point per crowd, and a line through them."""
    places: list[tuple[float, float]] = []
    for row in points:
        delay = row["delay_p99_ms"] if row["delay_p99_ms"] is not None else row["interval_ms"]
        if not delay:
            continue
        place = (delay, row["cpu_us_per_viewer_s"])
        size = 5 + 3 * crowds.index(row["viewers"])
        face = "none" if row["doubts"] else look["color"]
        label = None if places else name
        panel.plot(*place, markersize=size, markerfacecolor=face, linestyle="", label=label, alpha=0.9, **look)
        if name == OURS:
            panel.annotate(
                f"{row['viewers']:,}", place, textcoords="offset points", xytext=(-8, 2), fontsize=8, ha="right"
            )
        places.append(place)
    if len(places) > 1:
        panel.plot(*zip(*places, strict=True), color=look["color"], alpha=0.35, linewidth=1)
