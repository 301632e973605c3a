"""The plots of a load run: each answers one question, and says its answer in words and in a table as well (pure).

Colours belong to profiles, not to plots: a profile has the same one everywhere. Beyond six, the smaller profiles share
one line, and so do all hostile ones: what they do to others is the question, not how they fare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.charts.page import Figure
from flowctl.charts.pictures import Lines, Point, Series, highest, last, thin
from flowctl.core.text.printable import foreign
from flowctl.load.results.figures import RunFigures, format_value
from flowctl.load.results.result import PeerKind, PeerResult, RunResult, Sample
from flowctl.load.results.scope import quantile, weighted_quantiles

_MOST_LINES: Final = 6
_OTHERS_COLOUR: Final = 7
_HOSTILE_COLOUR: Final = 8
_LEAST_MS: Final = 0.1
"""Delays below are drawn there: a logarithmic axis has no 0."""

_SHARES: Final = (0.5, 0.95, 0.99, 1.0)
"""Of a distribution in a table."""

_CURVE: Final = tuple(place / 200 for place in range(201))
"""Of a distribution in a plot."""


_TIME: Final = "seconds of the run"


@dataclass(frozen=True, slots=True)
class Line:
    """Profiles that share a line."""

    label: str
    colour: int
    profiles: frozenset[str]


def lines_of(figures: RunFigures) -> list[Line]:
    """Return which profiles have which line: the healthy ones first, then by the number of peers."""
    asked = figures.result.profiles
    kinds = figures.kinds
    viewers = [name for name, kind in kinds.items() if kind in (PeerKind.HEALTHY, PeerKind.SLOW)]
    viewers.sort(key=lambda name: (kinds[name] is not PeerKind.HEALTHY, -asked.get(name, 0), name))
    hostile = frozenset(name for name, kind in kinds.items() if kind is PeerKind.HOSTILE)
    own = viewers if len(viewers) <= _MOST_LINES else viewers[: _MOST_LINES - 1]
    found = [Line(foreign(name, 40), place, frozenset({name})) for place, name in enumerate(own, 1)]
    others = frozenset(viewers[len(own) :])
    if others:
        found.append(Line(f"{len(others)} other profiles", _OTHERS_COLOUR, others))
    if hostile:
        found.append(Line("hostile", _HOSTILE_COLOUR, hostile))
    return found


def plots_of(figures: RunFigures) -> list[Figure]:
    """Return the plots of a run, without those that would be empty."""
    lines = lines_of(figures)
    made = [
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
    return [plot for plot in made if not plot.picture.empty]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _over_time(samples: Sequence[Sample], value: Callable[[Sample], float | None], *, worst: bool) -> list[Point]:
    points = [(sample.at_s, found) for sample in samples if (found := value(sample)) is not None]
    return thin(points, highest if worst else last)


def _summed(samples: Sequence[Sample], name: str, profiles: frozenset[str]) -> list[Point]:
    """Return the sum of a count over profiles, sample by sample."""

    def value(sample: Sample) -> float:
        counts: dict[str, int] = getattr(sample, name)
        return sum(counts.get(profile, 0) for profile in profiles)

    return _over_time(samples, value, worst=False)


def _playing(result: RunResult, lines: Sequence[Line]) -> Figure:
    everybody = frozenset[str]().union(*(line.profiles for line in lines))
    connected = Series("all connected", _summed(result.samples, "connected", everybody), 0, steps=True)
    playing = [
        Series(line.label, _summed(result.samples, "playing", line.profiles), line.colour, steps=True) for line in lines
    ]
    # Hostile peers seldom get frames: a line along the bottom would only be in the way.
    playing = [series for series in playing if any(y for _, y in series.points)]
    rows = [
        [series.label, _count(max((y for _, y in series.points), default=0)), _count(series.points[-1][1])]
        for series in (connected, *playing)
        if series.points
    ]
    most = rows[0][1] if rows else "0"
    chart = Lines(
        name="playing",
        title="How many were connected, and how many of each profile got frames?",
        description=f"At most {most} peers were connected at the same time.",
        series=[connected, *playing],
        x_label=_TIME,
        y_label="peers",
        y_text=_count,
    )
    return Figure(chart, ("line", "most", "at the end"), rows)


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _ms(value: float | None) -> str:
    return format_value(value, "ms")


_Sampled = Sequence[tuple[Sequence[float], float]]
"""Samples of values, with what each value weighs."""


def _spread(
    name: str, title: str, labels: tuple[str, str], found: Sequence[tuple[Line, _Sampled]], *, counted: bool = False
) -> Figure:
    """Return how times are spread for each line: what percentage is not above which."""
    series, rows = [], []
    for line, samples in found:
        curve = zip(weighted_quantiles(samples, _CURVE), _CURVE, strict=True)
        series.append(Series(line.label, [(max(value, _LEAST_MS), share * 100) for value, share in curve], line.colour))
        count = [_count(sum(len(values) for values, _ in samples))] if counted else []
        rows.append([line.label, *count, *map(_ms, weighted_quantiles(samples, _SHARES))])
    lines = Lines(
        name=name,
        title=title,
        description=". ".join(f"{row[0]}: half within {row[-4]}, 99 percent within {row[-2]}" for row in rows),
        series=series,
        x_label=labels[0],
        y_label=labels[1],
        x_log=True,
        y_top=100,
        y_text=_percent,
    )
    return Figure(lines, ("profile", *(("viewers",) if counted else ()), "median", "p95", "p99", "longest"), rows)


def _delays(figures: RunFigures, lines: Sequence[Line]) -> Figure:
    crowds = [[sample for name in sorted(line.profiles) for sample in figures.crowd(name).delays] for line in lines]
    found = [(line, samples) for line, samples in zip(lines, crowds, strict=True) if samples]
    return _spread("delays", "How late did frames come?", ("delay in ms", "frames that came within it"), found)


def _first_frames(figures: RunFigures, lines: Sequence[Line]) -> Figure:
    found = []
    for line in lines:
        times = [peer.first_frame_s * 1000 for peer in _peers(figures, line) if peer.first_frame_s is not None]
        if times:
            found.append((line, [(times, 1.0)]))
    title = "How long did a viewer wait for its first frame?"
    return _spread("first-frames", title, ("ms from the begin of connecting", "viewers"), found, counted=True)


def _delays_over_time(result: RunResult) -> Figure:
    series = [
        Series("99 % within", _over_time(result.samples, lambda sample: sample.delay_p99_ms, worst=True), 6),
        Series("half within", _over_time(result.samples, lambda sample: sample.delay_p50_ms, worst=True), 1),
    ]
    rows = [
        [item.label, _ms(quantile(ys, 0.5)), _ms(ys[-1])]
        for item in series
        if (ys := sorted(y for _, y in item.points))
    ]
    chart = Lines(
        name="delays-over-time",
        title="Did the delay of healthy viewers change?",
        description=". ".join(f"{row[0]} {row[1]} in the median second, {row[2]} in the worst" for row in rows),
        series=series,
        x_label=_TIME,
        y_label="delay in ms",
    )
    return Figure(chart, ("of the frames of a second", "median second", "worst second"), rows)


def _peers(figures: RunFigures, line: Line) -> list[PeerResult]:
    return [peer for profile in sorted(line.profiles) for peer in figures.crowd(profile).peers]


def _cuts(figures: RunFigures, lines: Sequence[Line]) -> Figure:
    series, rows = [], []
    for line in lines:
        times = sorted(peer.ended_s for peer in _peers(figures, line) if peer.cut and peer.ended_s is not None)
        if times:
            points = [(0.0, 0.0), *((at, float(count)) for count, at in enumerate(times, 1))]
            points = [*thin(points, last), (max(figures.result.duration_s, times[-1]), float(len(times)))]
            series.append(Series(line.label, points, line.colour, steps=True))
            rows.append([line.label, _count(len(times)), *(f"{quantile(times, share):.1f} s" for share in (0, 0.5, 1))])
    chart = Lines(
        name="cuts",
        title="When did the server cut peers?",
        description=". ".join(f"{row[0]}: {row[1]} cut, the first at {row[2]}, the last at {row[4]}" for row in rows),
        series=series,
        x_label=_TIME,
        y_label="peers cut so far",
        y_text=_count,
    )
    return Figure(chart, ("profile", "cut", "first", "median", "last"), rows)


_WINDOW: Final = 5
"""Seconds of a share: of a group of pictures that is cut, the loss is known when the next one begins."""


def _pictures(figures: RunFigures, lines: Sequence[Line]) -> Figure:
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
            seen_before, missing_before = counts[place - _WINDOW] if place >= _WINDOW else (0, 0)
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
    chart = Lines(
        name="pictures",
        title="What share of the pictures did viewers see?",
        description=". ".join(f"{row[0]}: {row[1]} of the pictures, {row[3]} in the worst {_WINDOW} s" for row in rows),
        series=series,
        x_label=_TIME,
        y_label=f"of the pictures of {_WINDOW} s",
        y_top=100,
        y_text=_percent,
    )
    return Figure(chart, ("profile", "of all", f"median {_WINDOW} s", f"worst {_WINDOW} s"), rows)


def _missing(result: RunResult, lines: Sequence[Line]) -> Figure:
    series = []
    for line in lines:
        points = _summed(result.samples, "missing", line.profiles)
        if any(count for _, count in points):
            series.append(Series(line.label, points, line.colour, steps=True))
    rows = [[item.label, _count(item.points[-1][1])] for item in series]
    chart = Lines(
        name="missing",
        title="When did viewers lose frames?",
        description=". ".join(f"{row[0]}: {row[1]} frames missing" for row in rows),
        series=series,
        x_label=_TIME,
        y_label="missing so far",
        y_text=_count,
    )
    return Figure(chart, ("profile", "frames missing"), rows)


def _processor(result: RunResult) -> Figure:
    # Quiet, since it is the server that is asked about: but a tester at its limit explains every delay.
    load = Series("load tester", _over_time(result.samples, lambda sample: sample.load_cpu_percent, worst=True), 0)
    server = Series("server", _over_time(result.samples, lambda sample: sample.server_cpu_percent, worst=True), 1)
    rows = [
        [item.label, _percent(quantile(ys, 0.5) or 0), _percent(ys[-1])]
        for item in (server, load)
        if (ys := sorted(y for _, y in item.points))
    ]
    chart = Lines(
        name="processor",
        title="How busy were server and load tester?",
        description=". ".join(f"{row[0]}: {row[1]} of a core in the median second, {row[2]} at most" for row in rows),
        series=[load, server],
        x_label=_TIME,
        y_label="of one core",
        y_text=_percent,
    )
    return Figure(chart, ("process", "median second", "busiest second"), rows)


def _memory(result: RunResult) -> Figure:
    def size(sample: Sample) -> float | None:
        return None if sample.server_rss_bytes is None else sample.server_rss_bytes / 1e6

    points = _over_time(result.samples, size, worst=True)
    base = result.server_base_rss_bytes
    before = [] if base is None or not points else [(points[0][0], base / 1e6), (points[-1][0], base / 1e6)]
    rows = [[name, f"{value:,.1f} MB"] for name, value in _memory_figures(points, base)]
    chart = Lines(
        name="memory",
        title="How much memory did the server take?",
        description=". ".join(": ".join(row) for row in rows),
        series=[Series("before the run", before, 0), Series("server", points, 1)] if points else [],
        x_label=_TIME,
        y_label="resident memory in MB",
    )
    return Figure(chart, ("resident memory", "MB"), rows)


def _memory_figures(points: Sequence[Point], base: int | None) -> list[tuple[str, float]]:
    if not points:
        return []
    found = [] if base is None else [("before the run", base / 1e6)]
    return [*found, ("most", max(y for _, y in points)), ("at the end", points[-1][1])]
