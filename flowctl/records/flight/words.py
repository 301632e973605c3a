"""What the rows of a flight say, for writer and reader (pure); what a row of each kind holds is in docs/flight.md.

No text from outside is kept: no payload, no stream name in a detail, no words of an error. Settings stand field by
field, so that a reader needs nothing else to build the same Sender.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final, NamedTuple

from flowctl.core.flow.counts import Counts
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind, describe_shares
from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import DropPolicy, KeepAll, Thin, Verdict, patience_of, refused_mask
from flowctl.core.flow.state import Load, MessageClass, SendState
from flowctl.core.flow.timing import ENDLESS
from flowctl.core.sending.figures import SenderStatistics
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind

FLIGHT_FORMAT: Final = 1
"""Format in BEGIN, raised when rows change their meaning: a reader of another format says so instead of guessing."""

MICROSECONDS: Final = 1_000_000
MOST_WIRE_BYTES: Final = 32 * 1024 * 1024
"""Largest message: RTMP has 16 MiB and the headers of its chunks."""


class FlightRow(NamedTuple):
    """One row of a flight without the columns that say whose it is: `offset_us` and what follows in the table."""

    offset_us: int  # microseconds since the flight began; never falls
    kind: str
    message_class: str | None = None  # name of the class of a queued message, in lower case
    size_bytes: int | None = None  # of the message; offered to the kernel; or the number that a call was given
    taken_bytes: int | None = None
    queued_bytes: int | None = None  # for an edge: what waits after it. None for others.
    queued_messages: int | None = None
    # for an edge: age of the oldest; for a queued message: for how long it lay in the stream's log
    queued_age_ms: float | None = None
    state_from: str | None = None
    state_to: str | None = None
    cause: str | None = None
    axis: str | None = None
    # of an edge on its axis; of a return: ms of delay removed; of an episode of drops: its ms
    value: float | None = None
    limit: float | None = None
    dropped_messages: int | None = None
    dropped_bytes: int | None = None
    # name of the call; lane of a queued message (``log`` or ``own``); close reason; of an episode of drops: what the
    # peer got all the same
    reason: str | None = None
    detail: str | None = None
    number: int = 0


OUTPUT_KINDS: Final = frozenset(
    kind.value
    for kind in (
        FlightKind.STATE,
        FlightKind.DROPPED,
        FlightKind.LATE,
        FlightKind.RETURN,
        FlightKind.CLOSE,
        FlightKind.DRAINED,
    )
)
"""Kinds of rows that are outputs; a replay has to make the same ones."""
LOG_LANE: Final = "log"
OWN_LANE: Final = "own"
SWITCH_LANE: Final = "switch"
"""Lane of what another log had when the viewer switched to it; unlike in other lanes the row belongs to that call."""


def dump(value: Mapping[str, Any]) -> str:
    """Return `value` as JSON text without spaces; floats keep every bit."""
    return json.dumps(value, separators=(",", ":"))


_MOST_DETAIL_CHARS: Final = 1024 * 1024
"""Longest detail: a Sender writes a few thousand characters; a restart names one size per header."""


def detail_of(text: str | None) -> dict[str, Any]:
    """Return what `dump` wrote; nothing for None."""
    if text is None:
        return {}
    if len(text) > _MOST_DETAIL_CHARS:
        raise ValueError(f"a detail has {len(text)} characters, {_MOST_DETAIL_CHARS} are read at most")
    try:
        values = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError("a detail is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"a detail is a {type(values).__name__}, no JSON object")  # noqa: TRY004 - of the text, not of a caller
    return values


# -- settings, there and back


def limits_as_dict(limits: Limits) -> dict[str, Any]:
    """Return all marks of `limits`; each axis as [soft, hard, low], 0: off."""
    axes = {"size": limits.size, "messages": limits.messages, "age_ms": limits.age_ms}
    return {
        **{name: [axis.soft, axis.hard, axis.low] for name, axis in axes.items()},
        "overhead_bytes": limits.overhead_bytes,
        "hard_policy": limits.hard_policy.value,
        "target_delay_ms": limits.target_delay_ms,
    }


def limits_from(values: Mapping[str, Any]) -> Limits:
    def axis(key: str, name: str) -> AxisLimits:
        soft, hard, low = values[key]
        return AxisLimits(soft=soft, hard=hard, low=low, name=name)

    return Limits(
        size=axis("size", "bytes"),
        messages=axis("messages", "messages"),
        age_ms=axis("age_ms", "age (ms)"),
        overhead_bytes=values["overhead_bytes"],
        hard_policy=HardPolicy(values["hard_policy"]),
        target_delay_ms=values["target_delay_ms"],
    )


def settings_as_dict(settings: SenderSettings) -> dict[str, Any]:
    return dataclasses.asdict(settings) | {"age_from": settings.age_from.value}


def settings_from(values: Mapping[str, Any]) -> SenderSettings:
    return SenderSettings(**{**values, "age_from": AgeSource(values["age_from"])})


@dataclasses.dataclass(frozen=True, slots=True)
class TablePolicy:
    """A drop policy as a table: what it refuses and how it thins, by state.

    Policies are pure functions of state and class (`flowctl.testing.check_drop_policy`), so this is all of one. A
    recorded Sender decides by its table too: were the policy not pure after all, the record would still be true.
    """

    refused: tuple[int, ...]  # classes refused by state, as bits by `MessageClass`
    thinned: tuple[Thin, ...]
    waits: tuple[float, ...] = ENDLESS

    def __post_init__(self) -> None:
        if len(self.refused) != len(SendState) or len(self.thinned) != len(SendState):
            raise ConfigError(f"the table of a policy has {len(SendState)} states")
        if len(self.waits) != len(MessageClass):
            raise ConfigError(f"the table of a policy has {len(MessageClass)} classes")
        if not all(wait > 0 for wait in self.waits):
            raise ConfigError(f"the patience of a policy is {self.waits}, each must be above 0")

    @classmethod
    def of(cls, policy: DropPolicy | None, failed: Callable[[str, BaseException], None]) -> TablePolicy:
        """Return the table of `policy`; None: of the one that keeps everything."""
        asked = policy or KeepAll()
        refused, thinned = [], []
        for state in SendState:
            try:
                mask = refused_mask(asked, state)
            except BaseException as error:  # noqa: BLE001 - the application's code, contained as in the Sender
                failed("decide", error)
                mask = 0
            try:
                mode = asked.thin(state)
            except BaseException as error:  # noqa: BLE001 - as above
                failed("thin", error)
                mode = Thin.NOTHING
            refused.append(mask)
            thinned.append(mode)
        try:
            waits = patience_of(asked)
        except BaseException as error:  # noqa: BLE001 - as above
            failed("patience", error)
            waits = ENDLESS
        return cls(tuple(refused), tuple(thinned), waits)

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        return Verdict.DROP if self.refused[state] >> message_class & 1 else Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        return self.thinned[state]

    def patience(self, message_class: MessageClass) -> float:
        return self.waits[message_class]

    def as_dict(self) -> dict[str, Any]:
        waits = [item if item < inf else None for item in self.waits]
        return {"refused": list(self.refused), "thin": [mode.name for mode in self.thinned], "patience": waits}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TablePolicy:
        return cls(
            tuple(int(mask) for mask in values["refused"]),
            tuple(Thin[name] for name in values["thin"]),
            tuple(inf if item is None else float(item) for item in values["patience"]),
        )


# -- calls


class ReplayedError(Exception):
    """Stands for an error of a transport that was no OSError."""


def error_as_dict(error: Exception) -> dict[str, Any]:
    """Return number or kind of an error; its words may come from anywhere."""
    return {"errno": error.errno or 0} if isinstance(error, OSError) else {"type": type(error).__name__}


def error_from(values: Mapping[str, Any]) -> Exception:
    if "errno" in values:
        number = int(values["errno"])
        return OSError(number, os.strerror(number))
    return ReplayedError(str(values.get("type", "")))


class Call(NamedTuple):
    """Codec between the arguments of a method of a Sender and the detail of a row."""

    write: Callable[..., dict[str, Any]] = dict  # called with the arguments of the method
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda _: ()  # returns arguments that make the same call
    kind: FlightKind = FlightKind.CALL


CALLS: Final[Mapping[str, Call]] = {
    **dict.fromkeys(("flush", "writable", "log_grew", "unfollow", "suspend_following", "close_after_flush"), Call()),
    "take_turn": Call(),  # tells whether the write before left something
    "line_look": Call(),  # beside what it moves it tells, with its answer, what the line carries
    "tick": Call(kind=FlightKind.TICK),
    "set_limits": Call(
        lambda limits: {"limits": limits_as_dict(limits)},
        lambda values: (limits_from(values["limits"]),),
        FlightKind.LIMITS_SET,
    ),
    "set_policy": Call(
        lambda policy: {"policy": policy.as_dict()}, lambda values: (TablePolicy.from_dict(values["policy"]),)
    ),
    "set_settings": Call(
        lambda settings: {"settings": settings_as_dict(settings)}, lambda values: (settings_from(values["settings"]),)
    ),
    "thin": Call(lambda mode=Thin.DROPPABLE: {"mode": mode.name}, lambda values: (Thin[values["mode"]],)),
    "relieve": Call(lambda _: {}, lambda _: ("",)),  # the cause may name others
    "sample_delay": Call(
        lambda kernel_bytes=None: {} if kernel_bytes is None else {"kernel_bytes": kernel_bytes},
        lambda values: (values.get("kernel_bytes"),),
    ),
    "peer_acknowledged": Call(
        lambda total_bytes: {"total_bytes": total_bytes}, lambda values: (values["total_bytes"],)
    ),
    "close": Call(
        lambda reason, details="": {"reason": reason.value},  # noqa: ARG005 - the details may name a stream
        lambda values: (CloseReason(values["reason"]),),
    ),
    "resume_following": Call(lambda _: {}),  # another fan-out of the same log, which the reader knows
    "set_guide": Call(lambda guide, **options: {"on": guide is not None, **options}),
    "broken": Call(error_as_dict, lambda values: (error_from(values),)),
}
"""Methods of a Sender that are noted as they are called, by name."""


# -- what came out


def by_class(counts: Counts) -> dict[str, list[int]]:
    """Return {class: [messages, bytes]} of the classes of which there are any."""
    return {
        name: [counts.messages[item], counts.sizes_bytes[item]]
        for item, name in enumerate(CLASS_NAMES)
        if counts.messages[item]
    }


def by_reason(dropped: Mapping[DropReason, Counts]) -> dict[str, dict[str, list[int]]]:
    """Return {reason: {class: [messages, bytes]}}."""
    return {reason.value: by_class(counts) for reason, counts in dropped.items()}


def output_row(entry: LedgerEntry, load: Load | None, offset_us: int) -> FlightRow | None:
    """Return the row of what a Sender has noted in its ledger. None: it is not of the flow core (pauses of input)."""
    change = entry.change
    if change is not None and load is not None:
        return FlightRow(
            offset_us,
            FlightKind.STATE.value,
            queued_bytes=load.size_bytes,
            queued_messages=load.messages,
            queued_age_ms=load.age_ms,
            state_from=change.old.name,
            state_to=change.new.name,
            cause=change.cause.value,
            axis=None if change.axis is None else change.axis.value,
            value=change.value,
            limit=None if change.limit is None else float(change.limit),
        )
    if entry.kind is LedgerKind.DROPS and entry.dropped is not None:
        return FlightRow(
            offset_us,
            FlightKind.DROPPED.value,
            value=entry.duration_s * 1000,
            dropped_messages=sum(counts.total_messages for counts in entry.dropped.values()),
            dropped_bytes=sum(counts.total_bytes for counts in entry.dropped.values()),
            reason=describe_shares(entry) or None,
            detail=dump(by_reason(entry.dropped)),
        )
    if entry.kind is LedgerKind.LATE:
        return FlightRow(offset_us, FlightKind.LATE.value, reason=entry.why)
    if entry.kind is LedgerKind.RETURN:
        # Its words name what caused it, which may come from outside (a memory budget names addresses).
        return FlightRow(offset_us, FlightKind.RETURN.value, value=entry.delay_removed_ms)
    if entry.kind is LedgerKind.CLOSE and entry.reason is not None:
        return FlightRow(offset_us, FlightKind.CLOSE.value, reason=entry.reason.value)
    return None


def figures_of(statistics: SenderStatistics) -> dict[str, Any]:
    """Return all of a Sender's figures for END, as JSON can hold them: every account, time and count."""
    forecast = statistics.forecast
    return {
        "state": statistics.state.name,
        "since_s": statistics.since,
        "queue": [statistics.load.size_bytes, statistics.load.messages, statistics.load.age_ms],
        "accepted": by_class(statistics.accepted),
        "sent": by_class(statistics.sent),
        "queued": by_class(statistics.queued),
        "dropped": by_reason(statistics.dropped),
        "time_in_states_s": list(statistics.time_in_states_s),
        "transitions": statistics.transitions,
        "recoveries": statistics.recoveries,
        "longest_stall_s": statistics.longest_stall_s,
        "restarts": statistics.restarts,
        "key_waits_expired": statistics.key_waits_expired,
        "bytes_sent": statistics.bytes_sent,
        "close_reason": None if statistics.close_reason is None else statistics.close_reason.value,
        "picture_share": statistics.picture_share,
        "waited_s": statistics.waited_s,
        "delay_ms": statistics.delay_ms,
        "drain_bytes_per_s": statistics.drain_bytes_per_s,
        "forecast": None if forecast is None else [forecast.seconds, forecast.axis.value],
        "returns": statistics.returns,
        "delay_removed_ms": statistics.delay_removed_ms,
    }
