"""The plots of a load run: each answers one question, and says its answer in words and in a table as well (pure).

Colours belong to profiles, not to plots: a profile has the same one everywhere. Beyond six, the smaller profiles share
one line, and so do all hostile ones: what they do to others is the question, not how they fare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowctl.charts.page import Figure
from flowctl.charts.pictures import Lines, Point, Series, highest, last, thin
from flowctl.core.text.printable import foreign
from flowctl.load.results.figures import RunFigures, format_value, quantile, weighted_quantiles
from flowctl.load.results.result import PeerKind, PeerResult, RunResult, RunSample

_MOST_LINES: Final = 6
_OTHERS_COLOUR: Final = 7
_HOSTILE_COLOUR: Final = 8
_LEAST_MS: Final = 0.1
"""Value at which smaller delays are drawn: a logarithmic axis has no 0."""

_TABLE_SHARES: Final = (0.5, 0.95, 0.99, 1.0)
"""Shares of a distribution in a table."""

_CURVE_SHARES: Final = tuple(place / 200 for place in range(201))
"""Shares of a distribution in a plot."""


_TIME: Final = "seconds of the run"


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """Profiles that share a line."""

    label: str
    colour: int
    profiles: frozenset[str]


def lines_of(figures: RunFigures) -> list[ProfileLine]:
    """Return which profiles have which line: the healthy ones first, then by the number of peers."""
    counts = figures.result.profiles
    kinds = figures.kinds
    viewers = [name for name, kind in kinds.items() if kind in (PeerKind.HEALTHY, PeerKind.SLOW)]
    viewers.sort(key=lambda name: (kinds[name] is not PeerKind.HEALTHY, -counts.get(name, 0), name))
    hostile = frozenset(name for name, kind in kinds.items() if kind is PeerKind.HOSTILE)
    own = viewers if len(viewers) <= _MOST_LINES else viewers[: _MOST_LINES - 1]
    lines = [ProfileLine(foreign(name, 40), place, frozenset({name})) for place, name in enumerate(own, 1)]
    others = frozenset(viewers[len(own) :])
    if others:
        lines.append(ProfileLine(f"{len(others)} other profiles", _OTHERS_COLOUR, others))
    if hostile:
        lines.append(ProfileLine("hostile", _HOSTILE_COLOUR, hostile))
    return lines


def plots_of(figures: RunFigures) -> list[Figure]:
    lines = lines_of(figures)
    plots = [
        _playing(figures.result, lines),
        _delays(figures, lines),
        _delays_over_time(figures.result),
        _first_frames(figures, lines),
        _cuts(figures, lines),
        _pictures(figures, lines),
        _missing(figures.result, lines),
        _processor(figures.result),
        _memory(figures.result),
    ]
    return [plot for plot in plots if not plot.picture.empty]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _over_time(samples: Sequence[RunSample], value: Callable[[RunSample], float | None], *, worst: bool) -> list[Point]:
    points = [(sample.at_s, y) for sample in samples if (y := value(sample)) is not None]
    return thin(points, highest if worst else last)


def _summed(samples: Sequence[RunSample], name: str, profiles: frozenset[str]) -> list[Point]:
    def value(sample: RunSample) -> float:
        counts: dict[str, int] = getattr(sample, name)
        return sum(counts.get(profile, 0) for profile in profiles)

    return _over_time(samples, value, worst=False)


def _figure(
    name: str,
    title: str,
    text: str,
    series: Sequence[Series],
    y_label: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    x_label: str = _TIME,
    **axes: Any,
) -> Figure:
    """Return lines with their table; `text` says a row in words, its cells by their places."""
    chart = Lines(
        name=name,
        title=title,
        description=". ".join(text.format(*row) for row in rows),
        series=series,
        x_label=x_label,
        y_label=y_label,
        **axes,
    )
    return Figure(chart, heads, rows)


def _playing(result: RunResult, lines: Sequence[ProfileLine]) -> Figure:
    everybody = frozenset[str]().union(*(line.profiles for line in lines))
    connected = Series("all connected", _summed(result.samples, "connected", everybody), 0, steps=True)
    playing = [
        Series(line.label, _summed(result.samples, "playing", line.profiles), line.colour, steps=True) for line in lines
    ]
    # Hostile peers seldom get frames: a line along the bottom would only be in the way.
    shown = [connected, *(series for series in playing if any(y for _, y in series.points))]
    rows = [
        [series.label, _count(max(y for _, y in series.points)), _count(series.points[-1][1])]
        for series in shown
        if series.points
    ]
    title = "How many were connected, and how many of each profile got frames?"
    heads = ("line", "most", "at the end")
    return _figure("playing", title, "{0}: {1} at most", shown, "peers", heads, rows, y_text=_count)


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _ms(value: float | None) -> str:
    return format_value(value, "ms")


_Sampled = Sequence[tuple[Sequence[float], float]]
"""Samples of values, with the weight of each value."""


def _spread(
    name: str,
    title: str,
    labels: tuple[str, str],
    sampled: Sequence[tuple[ProfileLine, _Sampled]],
    *,
    counted: bool = False,
) -> Figure:
    """Return how times are spread for each line: what percentage is not above which."""
    series, rows = [], []
    for line, samples in sampled:
        curve = zip(weighted_quantiles(samples, _CURVE_SHARES), _CURVE_SHARES, strict=True)
        series.append(Series(line.label, [(max(value, _LEAST_MS), share * 100) for value, share in curve], line.colour))
        count = [_count(sum(len(values) for values, _ in samples))] if counted else []
        rows.append([line.label, *count, *map(_ms, weighted_quantiles(samples, _TABLE_SHARES))])
    heads = ("profile", *(("viewers",) if counted else ()), "median", "p95", "p99", "longest")
    text = "{0}: half within {2}, 99 percent within {4}" if counted else "{0}: half within {1}, 99 percent within {3}"
    axes = {"x_log": True, "y_top": 100, "y_text": _percent}
    return _figure(name, title, text, series, labels[1], heads, rows, x_label=labels[0], **axes)


def _delays(figures: RunFigures, lines: Sequence[ProfileLine]) -> Figure:
    crowds = [[sample for name in sorted(line.profiles) for sample in figures.crowd(name).delays] for line in lines]
    sampled = [(line, samples) for line, samples in zip(lines, crowds, strict=True) if samples]
    return _spread("delays", "How late did frames come?", ("delay in ms", "frames that came within it"), sampled)


def _first_frames(figures: RunFigures, lines: Sequence[ProfileLine]) -> Figure:
    sampled = []
    for line in lines:
        times = [peer.first_frame_s * 1000 for peer in _peers(figures, line) if peer.first_frame_s is not None]
        if times:
            sampled.append((line, [(times, 1.0)]))
    title = "How long did a viewer wait for its first frame?"
    return _spread("first-frames", title, ("ms from the begin of connecting", "viewers"), sampled, counted=True)


def _seconds(series: Sequence[Series], write: Callable[[float | None], str]) -> list[list[str]]:
    """Return a row for each line: its value in the median second, and in the worst."""
    return [
        [item.label, write(quantile(ys, 0.5)), write(ys[-1])]
        for item in series
        if (ys := sorted(y for _, y in item.points))
    ]


def _delays_over_time(result: RunResult) -> Figure:
    series = [
        Series("99 % within", _over_time(result.samples, lambda sample: sample.delay_p99_ms, worst=True), 6),
        Series("half within", _over_time(result.samples, lambda sample: sample.delay_p50_ms, worst=True), 1),
    ]
    heads = ("of the frames of a second", "median second", "worst second")
    text = "{0} {1} in the median second, {2} in the worst"
    title = "Did the delay of healthy viewers change?"
    return _figure("delays-over-time", title, text, series, "delay in ms", heads, _seconds(series, _ms))


def _peers(figures: RunFigures, line: ProfileLine) -> list[PeerResult]:
    return [peer for profile in sorted(line.profiles) for peer in figures.crowd(profile).peers]


def _cuts(figures: RunFigures, lines: Sequence[ProfileLine]) -> Figure:
    series, rows = [], []
    for line in lines:
        times = sorted(peer.ended_s for peer in _peers(figures, line) if peer.cut and peer.ended_s is not None)
        if times:
            points = [(0.0, 0.0), *((at, float(count)) for count, at in enumerate(times, 1))]
            points = [*thin(points, last), (max(figures.result.duration_s, times[-1]), float(len(times)))]
            series.append(Series(line.label, points, line.colour, steps=True))
            rows.append([line.label, _count(len(times)), *(f"{quantile(times, share):.1f} s" for share in (0, 0.5, 1))])
    text = "{0}: {1} cut, the first at {2}, the last at {4}"
    heads = ("profile", "cut", "first", "median", "last")
    title = "When did the server cut peers?"
    return _figure("cuts", title, text, series, "peers cut so far", heads, rows, y_text=_count)


_WINDOW_S: Final = 5
"""Seconds over which a share is taken: how much of a cut group of pictures is lost is known when the next begins."""


def _pictures(figures: RunFigures, lines: Sequence[ProfileLine]) -> Figure:
    samples = figures.result.samples
    series, rows = [], []
    for line in lines:
        counts = [
            tuple(
                sum(getattr(sample, name).get(profile, 0) for profile in line.profiles)
                for name in ("pictures", "missing_pictures")
            )
            for sample in samples
        ]
        points = []
        for place, (seen, missing) in enumerate(counts):
            seen_before, missing_before = counts[place - _WINDOW_S] if place >= _WINDOW_S else (0, 0)
            passed = seen - seen_before + missing - missing_before
            if passed > 0:
                points.append((samples[place].at_s, (seen - seen_before) / passed * 100))
        if points:
            series.append(Series(line.label, thin(points, last), line.colour))
            whole = sum(counts[-1])
            ordered = sorted(share for _, share in points)
            shares = (counts[-1][0] / whole * 100, quantile(ordered, 0.5) or 0.0, ordered[0])
            # As in the table of profiles: a star where peers stopped reading, for what they measured before.
            star = "*" if any(peer.stopped_reading_s is not None for peer in _peers(figures, line)) else ""
            rows.append([line.label, *(f"{_percent(share)}{star}" for share in shares)])
    title, text = (
        "What share of the pictures did viewers see?",
        f"{{0}}: {{1}} of the pictures, {{3}} in the worst {_WINDOW_S} s",
    )
    heads = ("profile", "of all", f"median {_WINDOW_S} s", f"worst {_WINDOW_S} s")
    label = f"of the pictures of {_WINDOW_S} s"
    return _figure("pictures", title, text, series, label, heads, rows, y_top=100, y_text=_percent)


def _missing(result: RunResult, lines: Sequence[ProfileLine]) -> Figure:
    totals = [(line, _summed(result.samples, "missing", line.profiles)) for line in lines]
    series = [
        Series(line.label, points, line.colour, steps=True)
        for line, points in totals
        if any(count for _, count in points)
    ]
    rows = [[item.label, _count(item.points[-1][1])] for item in series]
    title, text = "When did viewers lose frames?", "{0}: {1} frames missing"
    return _figure("missing", title, text, series, "missing so far", ("profile", "frames missing"), rows, y_text=_count)


def _processor(result: RunResult) -> Figure:
    # Quiet, since it is the server that is asked about: but a tester at its limit explains every delay.
    load = Series("load tester", _over_time(result.samples, lambda sample: sample.load_cpu_percent, worst=True), 0)
    server = Series("server", _over_time(result.samples, lambda sample: sample.server_cpu_percent, worst=True), 1)
    rows = _seconds([server, load], lambda value: _percent(value or 0))
    title, text = "How busy were server and load tester?", "{0}: {1} of a core in the median second, {2} at most"
    heads = ("process", "median second", "busiest second")
    return _figure("processor", title, text, [load, server], "of one core", heads, rows, y_text=_percent)


def _memory(result: RunResult) -> Figure:
    def size(sample: RunSample) -> float | None:
        return None if sample.server_rss_bytes is None else sample.server_rss_bytes / 1e6

    points = _over_time(result.samples, size, worst=True)
    series, sizes = [], []
    if points:
        base = result.server_base_rss_bytes
        if base is not None:
            series.append(Series("before the run", [(at, base / 1e6) for at in (points[0][0], points[-1][0])], 0))
            sizes.append(("before the run", base / 1e6))
        series.append(Series("server", points, 1))
        sizes += [("most", max(y for _, y in points)), ("at the end", points[-1][1])]
    rows = [[name, f"{value:,.1f} MB"] for name, value in sizes]
    title, label = "How much memory did the server take?", "resident memory in MB"
    return _figure("memory", title, "{0}: {1}", series, label, ("resident memory", "MB"), rows)
