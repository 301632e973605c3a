"""The plots of a load run: each answers one question, and says its answer in words and in a table as well (pure).

Colours belong to profiles, not to plots: a profile has the same one everywhere. Beyond six, the smaller profiles share
one line, and so do all hostile ones: what they do to others is the question, not how they fare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.charts.svg import Chart, Point, Series, highest, last, plain, thin
from flowctl.loadtest.results.figures import RunFigures, format_value
from flowctl.loadtest.results.result import PeerKind, PeerResult, RunResult, Sample
from flowctl.loadtest.results.scope import quantile, weighted_quantiles
from flowctl.text.files import foreign

_MOST_LINES: Final = 6
_OTHERS_COLOUR: Final = 7
_HOSTILE_COLOUR: Final = 8
_LEAST_MS: Final = 0.1
"""Delays below are drawn there: a logarithmic axis has no 0."""

_SHARES: Final = (0.5, 0.95, 0.99, 1.0)
"""Of a distribution in a table."""

_CURVE: Final = tuple(place / 200 for place in range(201))
"""Of a distribution in a plot."""


@dataclass(frozen=True, slots=True)
class Line:
    """Profiles that share a line.

    Args:
        label: its name.
        colour: in all plots.
        profiles: which ones.
    """

    label: str
    colour: int
    profiles: frozenset[str]


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart with what it says in words, and its figures as a table.

    Args:
        chart: what is drawn.
        heads: of the columns.
        rows: of the table.
    """

    chart: Chart
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


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


def plots_of(figures: RunFigures) -> list[Plot]:
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
    return [plot for plot in made if not plot.chart.empty]


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


def _playing(result: RunResult, lines: Sequence[Line]) -> Plot:
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
    chart = Chart(
        name="playing",
        title="How many were connected, and how many of each profile got frames?",
        description=f"At most {most} peers were connected at the same time.",
        series=[connected, *playing],
        x_label="seconds of the run",
        y_label="peers",
        y_text=_count,
    )
    return Plot(chart, ("line", "most", "at the end"), rows)


def _shares(values: Sequence[float], *, least: float) -> list[Point]:
    """Return the distribution of sorted values as points (value, percent that are not above it)."""
    if not values:
        return []
    return [(max(quantile(values, share) or 0.0, least), share * 100) for share in _CURVE]


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _ms(value: float | None) -> str:
    return format_value(value, "ms")


def _delays(figures: RunFigures, lines: Sequence[Line]) -> Plot:
    series, rows = [], []
    for line in lines:
        crowds = [sample for profile in sorted(line.profiles) for sample in figures.crowd(profile).delays]
        if not crowds:
            continue
        values = weighted_quantiles(crowds, _CURVE)
        points = [(max(value, _LEAST_MS), share * 100) for value, share in zip(values, _CURVE, strict=True)]
        series.append(Series(line.label, points, line.colour))
        rows.append([line.label, *map(_ms, weighted_quantiles(crowds, _SHARES))])
    chart = Chart(
        name="delays",
        title="How late did frames come?",
        description=". ".join(f"{row[0]}: half within {row[1]}, 99 percent within {row[3]}" for row in rows),
        series=series,
        x_label="delay in ms",
        y_label="frames that came within it",
        x_log=True,
        y_top=100,
        y_text=_percent,
    )
    return Plot(chart, ("profile", "median", "p95", "p99", "largest"), rows)


def _delays_over_time(result: RunResult) -> Plot:
    series = [
        Series("99 % within", _over_time(result.samples, lambda sample: sample.delay_p99_ms, worst=True), 6),
        Series("half within", _over_time(result.samples, lambda sample: sample.delay_p50_ms, worst=True), 1),
    ]
    rows = [
        [item.label, _ms(quantile(ys, 0.5)), _ms(ys[-1])]
        for item in series
        if (ys := sorted(y for _, y in item.points))
    ]
    chart = Chart(
        name="delays-over-time",
        title="Did the delay of healthy viewers change?",
        description=". ".join(f"{row[0]} {row[1]} in the median second, {row[2]} in the worst" for row in rows),
        series=series,
        x_label="seconds of the run",
        y_label="delay in ms",
        x_text=plain,
    )
    return Plot(chart, ("of the frames of a second", "median second", "worst second"), rows)


def _first_frames(figures: RunFigures, lines: Sequence[Line]) -> Plot:
    series, rows = [], []
    for line in lines:
        peers = _peers(figures, line)
        times = sorted(peer.first_frame_s * 1000 for peer in peers if peer.first_frame_s is not None)
        if times:
            series.append(Series(line.label, _shares(times, least=_LEAST_MS), line.colour))
            rows.append([line.label, _count(len(times)), *(_ms(quantile(times, share)) for share in _SHARES)])
    chart = Chart(
        name="first-frames",
        title="How long did a viewer wait for its first frame?",
        description=". ".join(f"{row[0]}: half within {row[2]}, all within {row[5]}" for row in rows),
        series=series,
        x_label="ms from the begin of connecting",
        y_label="viewers",
        x_log=True,
        y_top=100,
        y_text=_percent,
    )
    return Plot(chart, ("profile", "viewers", "median", "p95", "p99", "longest"), rows)


def _peers(figures: RunFigures, line: Line) -> list[PeerResult]:
    return [peer for profile in sorted(line.profiles) for peer in figures.crowd(profile).peers]


def _cuts(figures: RunFigures, lines: Sequence[Line]) -> Plot:
    series, rows = [], []
    for line in lines:
        times = sorted(peer.ended_s for peer in _peers(figures, line) if peer.cut and peer.ended_s is not None)
        if times:
            points = [(0.0, 0.0), *((at, float(count)) for count, at in enumerate(times, 1))]
            points = [*thin(points, last), (max(figures.result.duration_s, times[-1]), float(len(times)))]
            series.append(Series(line.label, points, line.colour, steps=True))
            rows.append([line.label, _count(len(times)), *(f"{quantile(times, share):.1f} s" for share in (0, 0.5, 1))])
    chart = Chart(
        name="cuts",
        title="When did the server cut peers?",
        description=". ".join(f"{row[0]}: {row[1]} cut, the first at {row[2]}, the last at {row[4]}" for row in rows),
        series=series,
        x_label="seconds of the run",
        y_label="peers cut so far",
        y_text=_count,
    )
    return Plot(chart, ("profile", "cut", "first", "median", "last"), rows)


_WINDOW: Final = 5
"""Seconds of a share: of a group of pictures that is cut, the loss is known when the next one begins."""


def _pictures(figures: RunFigures, lines: Sequence[Line]) -> Plot:
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
    chart = Chart(
        name="pictures",
        title="What share of the pictures did viewers see?",
        description=". ".join(f"{row[0]}: {row[1]} of the pictures, {row[3]} in the worst {_WINDOW} s" for row in rows),
        series=series,
        x_label="seconds of the run",
        y_label=f"of the pictures of {_WINDOW} s",
        y_top=100,
        y_text=_percent,
    )
    return Plot(chart, ("profile", "of all", f"median {_WINDOW} s", f"worst {_WINDOW} s"), rows)


def _missing(result: RunResult, lines: Sequence[Line]) -> Plot:
    series = []
    for line in lines:
        points = _summed(result.samples, "missing", line.profiles)
        if any(count for _, count in points):
            series.append(Series(line.label, points, line.colour, steps=True))
    rows = [[item.label, _count(item.points[-1][1])] for item in series]
    chart = Chart(
        name="missing",
        title="When did viewers lose frames?",
        description=". ".join(f"{row[0]}: {row[1]} frames missing" for row in rows),
        series=series,
        x_label="seconds of the run",
        y_label="missing so far",
        y_text=_count,
    )
    return Plot(chart, ("profile", "frames missing"), rows)


def _processor(result: RunResult) -> Plot:
    # Quiet, since it is the server that is asked about: but a tester at its limit explains every delay.
    load = Series("load tester", _over_time(result.samples, lambda sample: sample.load_cpu_percent, worst=True), 0)
    server = Series("server", _over_time(result.samples, lambda sample: sample.server_cpu_percent, worst=True), 1)
    rows = [
        [item.label, _percent(quantile(ys, 0.5) or 0), _percent(ys[-1])]
        for item in (server, load)
        if (ys := sorted(y for _, y in item.points))
    ]
    chart = Chart(
        name="processor",
        title="How busy were server and load tester?",
        description=". ".join(f"{row[0]}: {row[1]} of a core in the median second, {row[2]} at most" for row in rows),
        series=[load, server],
        x_label="seconds of the run",
        y_label="of one core",
        y_text=_percent,
    )
    return Plot(chart, ("process", "median second", "busiest second"), rows)


def _memory(result: RunResult) -> Plot:
    def size(sample: Sample) -> float | None:
        return None if sample.server_rss_bytes is None else sample.server_rss_bytes / 1e6

    points = _over_time(result.samples, size, worst=True)
    base = result.server_base_rss_bytes
    before = [] if base is None or not points else [(points[0][0], base / 1e6), (points[-1][0], base / 1e6)]
    rows = [[name, f"{value:,.1f} MB"] for name, value in _memory_figures(points, base)]
    chart = Chart(
        name="memory",
        title="How much memory did the server take?",
        description=". ".join(": ".join(row) for row in rows),
        series=[Series("before the run", before, 0), Series("server", points, 1)] if points else [],
        x_label="seconds of the run",
        y_label="resident memory in MB",
    )
    return Plot(chart, ("resident memory", "MB"), rows)


def _memory_figures(points: Sequence[Point], base: int | None) -> list[tuple[str, float]]:
    if not points:
        return []
    found = [] if base is None else [("before the run", base / 1e6)]
    return [*found, ("most", max(y for _, y in points)), ("at the end", points[-1][1])]
