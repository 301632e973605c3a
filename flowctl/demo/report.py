"""The demonstration's report, and the verdict: what happened to whom, and whether that is as it should be (pure).

A healthy viewer must have got every frame from its first on, beginning with a key frame. A slow viewer must have been
thinned, and must have been able to decode whatever it got. A viewer that stops reading must have been cut by a hard
limit or as stuck. Of the attacker's two connections, the one that acknowledges without reading must have been cut like
one that stopped, the one that floods by the limit on control messages, mostly before it is a viewer.

Beside the verdict stands what a healthy viewer and the slow ones saw of the stream, second by second: by what they have
read themselves, not by the server's account. The viewer of the set must have seen more of the pictures than the one
that plays a single stream behind an equal line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from flowctl.core.flow.state import SendState
from flowctl.demo.plan import BIT_RATE, SET_LABEL, SET_SHARE, DemoPlan, ViewerKind
from flowctl.demo.runner import FPS, DemoReport
from flowctl.demo.watch import WatchedViewer
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.result import PeerKind, PeerResult, RunResult
from flowctl.reasons import CloseReason
from flowctl.units import format_bit_rate, format_count, format_duration, format_size

_STALL_CUTS: Final = frozenset({CloseReason.HARD_LIMIT.value, CloseReason.STUCK.value})
FLOOD_LIMIT: Final = "control_messages_per_second"
"""Name of the limit that the flooding connection runs into."""

_COLUMNS: Final = 80
_BARS: Final = " ▁▂▃▄▅▆▇█"
_MOST_BARS: Final = 26
"""Most bars of a viewer; a longer demonstration has several seconds to a bar."""
_ATTACK_CUTS: Final = _STALL_CUTS | {CloseReason.LIMIT_HIT.value}


@dataclass(frozen=True, slots=True)
class ViewerOutcome:
    """One viewer: the server's figures, its own, and its faults."""

    watched: WatchedViewer
    peer: PeerResult
    faults: tuple[str, ...]
    stalled_after_s: float | None = None  # when it stopped reading, since it connected. None: it never did.

    @property
    def received(self) -> int:
        return self.peer.video + self.peer.audio

    @property
    def missing(self) -> dict[str, int]:
        """Frames that did not come although later ones did, by track; without what did not happen."""
        return _missing(self.peer)

    @property
    def stalled_before_cut_s(self) -> float | None:
        """How long it had not been reading when it was cut. None: it never stopped reading."""
        return None if self.stalled_after_s is None else self.watched.connected_s - self.stalled_after_s

    def as_dict(self) -> dict[str, Any]:
        peer = self.peer
        return {
            "kind": self.watched.plan.kind.value,
            "profile": peer.profile,
            "server": self.watched.as_dict(),
            "client": {
                "received": self.received,
                "missing": self.missing,
                "broken_restarts": peer.broken_restarts,
                "started_on_key": peer.started_on_key,
                "first_frame_s": peer.first_frame_s,
                "delay_p50_ms": peer.delay_p50_ms,
                "delay_p99_ms": peer.delay_p99_ms,
                "end": peer.end.value,
            },
            "faults": list(self.faults),
        }


@dataclass(frozen=True, slots=True)
class SeenPictures:
    """What a viewer saw, or viewers of one kind, on average; as they measured it."""

    label: str
    pictures_per_s: tuple[float, ...]  # pictures that came in each second of the run, of one viewer
    picture_share: float | None = None  # share of the pictures that came. None: not measured, as all that follows.
    line_share: float | None = None
    delay_p50_ms: float | None = None  # median delay of the frames, sound included
    delay_p95_ms: float | None = None
    longest_freeze_s: float | None = None  # longest time without a new picture
    renditions: dict[str, float] = field(default_factory=dict)  # share of the time in each size of the pictures

    @property
    def bars(self) -> str:
        """The pictures of each second as bars; the highest stands for all of them."""
        counts = self.pictures_per_s
        per_bar = max(-(-len(counts) // _MOST_BARS), 1)
        groups = (counts[first : first + per_bar] for first in range(0, len(counts), per_bar))
        shares = (sum(group) / len(group) / FPS for group in groups)
        # The least bar for the least picture: only where none was seen is there none.
        return "".join(_BARS[max(round(share * (len(_BARS) - 1)), share > 0)] for share in shares)

    def as_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "label"}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


@dataclass(frozen=True, slots=True)
class ShowReport(DemoReport):
    """Results of the demonstration."""

    outcomes: tuple[ViewerOutcome, ...]
    published: dict[str, Any]  # what the publisher sent: frames, bytes
    limits: str
    floods_cut: int = 1  # connections that the server cut by the limit on control messages
    general: tuple[str, ...] = ()
    seen: tuple[SeenPictures, ...] = ()  # what viewers saw, side by side: a healthy one first

    @property
    def faults(self) -> list[str]:
        single = [f"{outcome.watched.plan.label}: {fault}" for outcome in self.outcomes for fault in outcome.faults]
        return [*single, *self.general]

    def as_dict(self) -> dict[str, Any]:
        viewers = {outcome.watched.plan.label: outcome.as_dict() for outcome in self.outcomes}
        return {
            **self.verdict(),
            "limits": self.limits,
            "published": self.published,
            "floods_cut": self.floods_cut,
            "seen": {item.label: item.as_dict() for item in self.seen},
            "viewers": viewers,
        }

    def lines(self) -> list[str]:
        published = self.published
        healthy = [outcome for outcome in self.outcomes if outcome.watched.plan.kind is ViewerKind.HEALTHY]
        lost = sum(sum(outcome.missing.values()) for outcome in healthy)
        received = sum(outcome.received for outcome in healthy)
        lines = [
            f"published {published['frames']} frames, {format_size(published['bytes'])}",
            f"limits: {self.limits}",
            "",
            f"{format_count(len(healthy), 'healthy viewer')} received {received} frames and lost {lost}",
        ]
        if any(outcome.watched.plan.kind is ViewerKind.SLOW for outcome in self.outcomes):
            rate = format_bit_rate(BIT_RATE)
            lines.append(f"slow viewers read no more than the stated share of the stream's bit rate, {rate}")
        lines += [
            _line(outcome)
            for outcome in self.outcomes
            if outcome.watched.plan.kind is not ViewerKind.HEALTHY or outcome.faults
        ]
        lines.append(f"  flooding    {self.floods_cut} connection cut by {FLOOD_LIMIT}, before it got a frame")
        lines += ["", *_side_by_side(self.seen), ""] if self.seen else [""]
        if self.passed:
            lines.append("passed: nobody healthy lost anything, and every limit acted")
        else:
            lines.append("FAILED:")
            lines += [f"  {fault}" for fault in self.faults]
        names = {outcome.watched.plan.label: outcome.peer.profile for outcome in self.outcomes}
        on_page = ", ".join(f"{label} is {name}" for label, name in names.items() if not label.startswith("healthy"))
        if on_page:
            lines.append(f"on the page with plots: {on_page}")
        return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """Return a line in the width of a terminal; what goes on is indented under the words of the line."""
    indent = " " * (14 if line.startswith("  ") else 4)
    if len(line) <= _COLUMNS:
        return [line]
    return textwrap.wrap(line, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _side_by_side(seen: Sequence[SeenPictures]) -> list[str]:
    """Return what viewers saw as lines of at most 80 columns."""
    lines = [
        "what they saw, as they measured it; a full bar is all pictures of its time",
        f"{'':<12} {'':<{_MOST_BARS}} pictures  of line  delay p50/p95  freeze",
    ]
    for item in seen:
        delays = [None if delay is None else delay / 1000 for delay in (item.delay_p50_ms, item.delay_p95_ms)]
        between = "-" if None in delays else f"{delays[0]:.1f} / {delays[1]:.1f} s"
        freeze = "-" if item.longest_freeze_s is None else f"{item.longest_freeze_s:.1f} s"
        shares = ["-" if share is None else f"{share:.0%}" for share in (item.picture_share, item.line_share)]
        lines.append(
            f"  {item.label:<10} {item.bars:<{_MOST_BARS}} {shares[0]:>8}  {shares[1]:>7}  {between:>13}  {freeze:>6}"
        )
        if item.label == SET_LABEL and item.renditions:
            sizes = ", ".join(f"{size} for {share:.0%}" for size, share in item.renditions.items())
            lines.append(f"  {'':<10} the pictures were {sizes} of the time")
    return lines


def make_report(plan: DemoPlan, viewers: list[WatchedViewer], floods_cut: int, result: RunResult) -> ShowReport:
    rows = {peer.number: peer for peer in result.peers if peer.kind is not PeerKind.PUBLISHER}
    publishers = [peer for peer in result.peers if peer.kind is PeerKind.PUBLISHER]
    outcomes = []
    for watched in viewers:
        planned = watched.plan
        absent = PeerResult(number=planned.number, profile=planned.profile, kind=PeerKind.SLOW, url=result.url)
        outcomes.append(judge(watched, rows.get(planned.number, absent), plan.stall_after_s))
    published = {
        "frames": sum(peer.video + peer.audio for peer in publishers),
        "bytes": sum(peer.wire_bytes for peer in publishers),
    }
    seen = what_was_seen(plan, result)
    general = [] if floods_cut else [f"flooding: it was not cut by {FLOOD_LIMIT}"]
    general += check_set(seen)
    return ShowReport(tuple(outcomes), published, str(plan.limits), floods_cut, tuple(general), seen)


def check_set(seen: Sequence[SeenPictures]) -> tuple[str, ...]:
    """Return what is wrong with what the viewer of the set saw."""
    shares = {item.label: item.picture_share or 0.0 for item in seen}
    beside = f"slow {SET_SHARE:.0%}"
    if not shares[SET_LABEL]:
        return (f"{SET_LABEL}: received nothing",)
    if shares[SET_LABEL] <= shares.get(beside, 0.0):
        return (f"{SET_LABEL}: saw {shares[SET_LABEL]:.0%} of the pictures, {beside} {shares[beside]:.0%}",)
    return ()


def what_was_seen(plan: DemoPlan, result: RunResult) -> tuple[SeenPictures, ...]:
    """Return what healthy and slow viewers saw of the stream, by what they measured."""
    figures = RunFigures(result)
    seen = []
    for label, profile in plan.compared.items():
        per_s: list[float] = []
        before = 0
        for sample in result.samples:
            pictures, playing = sample.pictures.get(profile, 0), sample.playing.get(profile, 0)
            if playing:  # those who join are given what the server has kept at once
                per_s.append(min(max(pictures - before, 0) / playing, FPS))
            before = pictures
        seen.append(
            SeenPictures(
                label,
                tuple(round(count, 1) for count in per_s),
                figures.value("picture_share", profile),
                figures.value("line_share", profile),
                figures.value("p50_ms", profile),
                figures.value("p95_ms", profile),
                figures.value("longest_freeze_s", profile),
                figures.crowd(profile).renditions,
            )
        )
    return tuple(seen)


def judge(watched: WatchedViewer, peer: PeerResult, stall_after_s: float) -> ViewerOutcome:
    """Return the outcome of one viewer, or of one connection of an attacker."""
    kind = watched.plan.kind
    faults = [] if kind is ViewerKind.HOSTILE else _check_media(peer)
    if kind is ViewerKind.HEALTHY:
        faults += _check_healthy(watched, peer)
    elif kind is ViewerKind.SLOW:
        if watched.reached < SendState.OVERLOADED or not watched.dropped_total:
            worst = f"the worst state was {watched.reached.name}"
            faults.append(f"was not thinned: nothing was dropped for it, {worst}")
        if watched.was_cut:
            faults.append(f"was cut instead of being thinned: {watched.why}")
    elif kind is ViewerKind.STALLED and watched.cut not in _STALL_CUTS:
        faults.append(f"does not read and was not cut by a hard limit or as stuck: {watched.cut or 'still there'}")
    elif kind is ViewerKind.HOSTILE:
        if peer.expectation_met is False:
            faults.append("the server did what no sound one does: " + "; ".join([*peer.forms.splitlines(), peer.notes]))
        if watched.cut not in _ATTACK_CUTS:
            faults.append(f"attacks and was not cut by a limit: {watched.cut or 'still there'}")
    stalled = kind is ViewerKind.STALLED and peer.first_frame_s is not None
    return ViewerOutcome(
        watched,
        peer,
        tuple(faults),
        stalled_after_s=(peer.first_frame_s or 0.0) + stall_after_s if stalled else None,
    )


def _missing(peer: PeerResult) -> dict[str, int]:
    counts = {"video": peer.missing_video, "audio": peer.missing_audio}
    return {name: count for name, count in counts.items() if count}


def _check_media(peer: PeerResult) -> list[str]:
    """Return faults that no viewer may have, slow or not."""
    if not peer.video + peer.audio:
        return ["received nothing"]
    faults = []
    if peer.started_on_key is False:
        faults.append("did not begin with a key frame")
    if peer.broken_restarts:
        faults.append(f"{peer.broken_restarts} times got pictures that build on missing ones")
    return faults


def _check_healthy(watched: WatchedViewer, peer: PeerResult) -> list[str]:
    faults = []
    if peer.missing_video or peer.missing_audio:
        faults.append(f"lost {_counted(_missing(peer))}, and it is healthy")
    if watched.dropped_total:
        faults.append(f"the server dropped {_counted(watched.dropped)} for it, and it is healthy")
    if watched.was_cut:
        faults.append(f"was cut, and it is healthy: {watched.why}")
    return faults


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _line(outcome: ViewerOutcome) -> str:
    watched = outcome.watched
    lost = f"lost {_counted(watched.dropped)}"
    if watched.reasons:
        lost += f" ({_counted(watched.reasons)})"
    text = f"  {watched.plan.label:<11} reached {watched.reached.name}; {lost}"
    if watched.was_cut:
        since = outcome.stalled_before_cut_s
        when = f"after {format_duration(watched.connected_s)}"
        if since is not None:
            when = f"{format_duration(since)} after it stopped reading"
        text += f"; cut {when} by {watched.cut} ({watched.cut_details})"
    else:
        peak = f"{format_size(watched.peak_bytes)}, {format_duration(watched.peak_age_ms / 1000)}"
        text += f"; largest queue {peak}; all it got could be decoded" if not outcome.faults else ""
    return text
