"""The chart and the table of a comparison, from the figures of its measurements."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from compare.plan import Item
from compare.rivals import versions
from flowctl.charts.page import Figure
from flowctl.charts.pictures import COLOURS, Dot, Dots, colour
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


def rows(found: Mapping[Item, dict[str, Any]], absent: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one row per contender and point, with medians over the repetitions."""
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
    """Draw delay over cost, one panel per bit rate; the bare loop, which has no frames, stands at its interval."""
    measured = [row for row in all_rows if row.get("cpu_us_per_viewer_s") is not None and not row["nap_s"]]
    names = list(dict.fromkeys(row["name"] for row in measured))
    legend = [(name, colour(place % COLOURS + 1)) for place, name in enumerate(names)]
    panels = []
    for bit_rate in sorted({row["bit_rate"] for row in measured}):
        rows = [row for row in measured if row["bit_rate"] == bit_rate]
        dots = [dot for name, paint in legend for dot in _dots([row for row in rows if row["name"] == name], paint)]
        dots_of = Dots(
            name=f"cost-{bit_rate}",
            title=f"{bit_rate / 1e6:g} Mbit/s",
            description=alt,
            dots=dots,
            x_label="processor time per viewer and second (us)",
            y_label="delay, 99th percentile (ms)",
        )
        panels.append(Figure(dots_of, legend=legend))
    crowds = ", ".join(f"{count:,}" for count in sorted({row["viewers"] for row in measured}))
    note = f"area: viewers ({crowds}); hollow: machine or server was full; bare loop: at its interval"
    charts.save(panels, path, alt, note=note)


def _dots(points: list[dict[str, Any]], paint: str) -> list[Dot]:
    """Return a dot per crowd of one contender; the largest bears its name."""
    dots = []
    for row in sorted(points, key=lambda row: row["viewers"]):
        delay = row["delay_p99_ms"] if row["delay_p99_ms"] is not None else row["interval_ms"]
        if delay:
            said = f"{row['name']}, {row['viewers']:,} viewers"
            dots.append(Dot(row["cpu_us_per_viewer_s"], delay, row["viewers"], said, paint, hollow=bool(row["doubts"])))
    return [*dots[:-1], replace(dots[-1], label=points[0]["name"])] if dots else []
