"""The demonstration's report, and the verdict: what happened to whom, and whether that is as it should be (pure).

A healthy viewer must have got every frame from its first on, beginning with a key frame. A slow viewer must have been
thinned, and must have been able to decode whatever it got. A viewer that stops reading must have been cut by a hard
limit or as stuck; one that floods must have been cut by the limit on control messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from flowctl.demo.audit import Audit
from flowctl.demo.plan import RECIPE, Kind
from flowctl.demo.watch import Watched
from flowctl.flow import SendState
from flowctl.reasons import CloseReason
from flowctl.units import format_bit_rate, format_duration, format_size

_STALL_CUTS: Final = frozenset({CloseReason.HARD_LIMIT.value, CloseReason.STUCK.value})
_FLOOD_LIMIT: Final = "control_messages_per_second"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One viewer: the server's account, its own, and what is wrong.

    Args:
        watched: the server's account.
        audit: what it received, held against what was published.
        client: what else its client said.
        faults: what should not be so, in words; empty when all is well.
    """

    watched: Watched
    audit: Audit
    client: dict[str, Any]
    faults: tuple[str, ...]

    @property
    def stalled_before_cut_s(self) -> float | None:
        """How long it had not been reading when it was cut. None: it never stopped reading."""
        stalled = self.client.get("stalled_after_s")
        return None if stalled is None else self.watched.connected_s - float(stalled)


@dataclass(frozen=True, slots=True)
class Report:
    """The whole demonstration.

    Args:
        outcomes: one per viewer.
        published: what the publisher said: frames, bytes, max_lag_s, end.
        limits: the server's limits in words.
    """

    outcomes: tuple[Outcome, ...]
    published: dict[str, Any]
    limits: str

    @property
    def faults(self) -> list[str]:
        """Everything that is not as it should be."""
        return [f"{outcome.watched.plan.label}: {fault}" for outcome in self.outcomes for fault in outcome.faults]

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        viewers = {
            outcome.watched.plan.label: {
                "kind": outcome.watched.plan.kind.value,
                "server": outcome.watched.as_dict(),
                "client": {**outcome.client, **outcome.audit.as_dict()},
                "faults": list(outcome.faults),
            }
            for outcome in self.outcomes
        }
        return {
            "passed": self.passed,
            "faults": self.faults,
            "limits": self.limits,
            "published": self.published,
            "viewers": viewers,
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        published = self.published
        healthy = [outcome for outcome in self.outcomes if outcome.watched.plan.kind is Kind.HEALTHY]
        lost = sum(outcome.audit.missing_total for outcome in healthy)
        received = sum(outcome.audit.received for outcome in healthy)
        lines = [
            f"published {published['frames']} frames, {format_size(published['bytes'])}",
            f"limits: {self.limits}",
            "",
            f"{len(healthy)} healthy viewers received {received} frames and lost {lost}",
        ]
        if any(outcome.watched.plan.kind is Kind.SLOW for outcome in self.outcomes):
            bit_rate = format_bit_rate(RECIPE.video_bit_rate + RECIPE.audio_bit_rate)
            lines.append(f"slow viewers read no more than the stated share of the stream's bit rate, {bit_rate}")
        lines += [
            _line(outcome)
            for outcome in self.outcomes
            if outcome.watched.plan.kind is not Kind.HEALTHY or outcome.faults
        ]
        lines.append("")
        if self.passed:
            lines.append("passed: nobody healthy lost anything, and every limit acted")
        else:
            lines.append("FAILED:")
            lines += [f"  {fault}" for fault in self.faults]
        return lines


def judge(watched: Watched, audit: Audit, client: dict[str, Any]) -> Outcome:
    """Return the outcome of one viewer."""
    faults = [f"{count} frames {name}" for name, count in audit.faults.items()]
    if not audit.received:
        faults.append("received nothing")
    elif client.get("started_on_key") is False:
        faults.append("did not begin with a key frame")
    check = {
        Kind.HEALTHY: _check_healthy,
        Kind.SLOW: _check_slow,
        Kind.STALLED: _check_stalled,
        Kind.FLOODING: _check_flooding,
    }[watched.plan.kind]
    return Outcome(watched, audit, client, tuple(faults + check(watched, audit)))


def _check_healthy(watched: Watched, audit: Audit) -> list[str]:
    faults = []
    if audit.missing_total:
        faults.append(f"lost {_counted(audit.missing)}, and it is healthy")
    if watched.dropped_total:
        faults.append(f"the server dropped {_counted(watched.dropped)} for it, and it is healthy")
    if watched.was_cut:
        faults.append(f"was cut, and it is healthy: {watched.why}")
    return faults


def _check_slow(watched: Watched, audit: Audit) -> list[str]:
    del audit
    faults = []
    if watched.reached < SendState.OVERLOADED or not watched.dropped_total:
        faults.append(f"was not thinned: nothing was dropped for it, the worst state was {watched.reached.name}")
    if watched.was_cut:
        faults.append(f"was cut instead of being thinned: {watched.why}")
    return faults


def _check_stalled(watched: Watched, audit: Audit) -> list[str]:
    del audit
    if watched.cut not in _STALL_CUTS:
        return [f"does not read and was not cut by a hard limit or as stuck: {watched.cut or 'still there'}"]
    return []


def _check_flooding(watched: Watched, audit: Audit) -> list[str]:
    del audit
    if watched.cut != CloseReason.LIMIT_HIT.value or _FLOOD_LIMIT not in watched.cut_details:
        return [f"floods and was not cut by {_FLOOD_LIMIT}: {watched.cut or 'still there'}"]
    return []


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _line(outcome: Outcome) -> str:
    """Return one viewer's fate in one line."""
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
        text += f"; largest queue {peak}; all it got could be decoded" if not outcome.audit.faults else ""
    return text
