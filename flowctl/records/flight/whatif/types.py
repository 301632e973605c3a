"""What a what-if takes and gives: choices, recorded viewers, outcomes, and delay in buckets (pure).

See `flowctl.records.flight.whatif.engine` for what they mean together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.flow.histogram import bounds_of, bucket_of
from flowctl.core.flow.limits import HardPolicy, Limits, target_text
from flowctl.core.flow.policy import (
    POLICIES,
    DropPolicy,
    patience_of,
    refused_mask,
)
from flowctl.core.flow.state import CLASS_COUNT, VIDEO_CLASSES, SendState
from flowctl.core.sending.settings import LIVE_RETURN_AFTER_S, SenderSettings
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason
from flowctl.units import format_bit_rate, format_duration, format_size, parse_bit_rate

TAKEN: Final = -1
"""Event: a write of which the kernel took everything."""
REFUSED: Final = -2
"""Event: a write that met EAGAIN; what was taken before it counts."""
HELD: Final = -3
"""Event: what the kernel holds of all that it took, and the peer's has not acknowledged."""

GRID_S: Final = 1 / (1 << 20)
"""Times are multiples of this, so that sums and differences of times are exact and the order of adding is no matter."""
PLAYER_BUFFER_S: Final = 1.0
"""Buffer that a player is assumed to have, in seconds: the low end of what live players keep (ffplay, hls.js)."""
LEAST_KERNEL_BYTES: Final = 64 * 1024
"""Least assumed size of a kernel's send buffer (Linux: tcp_wmem starts with 16 kB and grows to megabytes)."""
RESTART_BYTES: Final = 64
"""Metadata and codec configuration in front of a key frame after a loss, where their size is not recorded."""
EXTEND_S: Final = 30.0
"""Time added for a viewer that the server closed: twice the time after which one that takes nothing is closed."""
MOST_CHOICES: Final = 4096
"""Most choices in one run: each has a Sender, about 10 kB while it lags."""
MOST_EVENTS: Final = 4_000_000
"""Most events of one viewer: ten hours of a stream of 100 messages a second; longer ones are cut before."""
MOST_RENDITIONS: Final = 8
"""Most renditions of a set that is tried: each has a log, and sets of encoders have five."""


def policy_name(policy: DropPolicy) -> str:
    """Return the key of `POLICIES` of a policy that decides as `policy` does; ``all-or-cut`` where none is there."""
    table = _table(policy)
    return next((name for name, known in POLICIES.items() if _table(known) == table), "all-or-cut")


def _table(policy: DropPolicy) -> tuple[object, ...]:
    return *((refused_mask(policy, state), policy.thin(state)) for state in SendState), patience_of(policy)


Event = tuple[float, int, int]
"""(seconds since the recording began, `MessageClass` of a message or TAKEN, REFUSED or HELD, bytes of it)."""


_SETTINGS: Final = SenderSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Limits and a policy to try."""

    limits: Limits  # soft, hard and low marks, target delay, and whether the hard limit closes or is held
    policy: str = "all-or-cut"
    # close after so long at or above SOFT_LIMIT, in seconds. 0: never.
    soft_too_long_s: float = _SETTINGS.soft_too_long_s
    stuck_s: float = _SETTINGS.stuck_s  # close when the kernel has taken nothing for so long, in seconds. 0: never.
    # go to the newest key frame after a stall of so long, in seconds. 0: never.
    return_after_s: float = LIVE_RETURN_AFTER_S
    # bits per second of the renditions of a set to choose from, smallest first, with sound; of the only one there is.
    # (): as it was recorded, with its switches.
    renditions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rates = self.renditions
        if len(rates) > MOST_RENDITIONS or any(rate <= before for before, rate in itertools.pairwise((0, *rates))):
            raise ConfigError(
                f"the renditions are of {', '.join(map(format_bit_rate, rates))}, there must be at most "
                f"{MOST_RENDITIONS}, smallest first"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}, it must be one of {', '.join(POLICIES)}")
        for name in ("soft_too_long_s", "stuck_s", "return_after_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (off) or more seconds")

    def __str__(self) -> str:
        parts = [f"{marks_text(self.limits, 1)} / {marks_text(self.limits, 2)}", self.policy]
        if self.limits.hard_policy is HardPolicy.HOLD:
            parts.append("hold")
        parts.append(target_text(self.limits))
        if self.renditions:
            parts.append(f"renditions of {' and '.join(map(format_bit_rate, self.renditions))}")
        for word, value in (("soft", self.soft_too_long_s), ("stuck", self.stuck_s), ("return", self.return_after_s)):
            parts.append(f"{word} {value:g}s")
        return ", ".join(parts)


def marks_text(limits: Limits, level: int) -> str:
    """Return one level of marks as `Limits.parse` reads it: ``bytes, messages, age``; 0 for a mark that is off."""
    size, messages, age = (
        (axis.low or 0, axis.soft, axis.hard or 0)[level] for axis in (limits.size, limits.messages, limits.age_ms)
    )
    return f"{format_size(size) if size else 0}, {messages}, {format_duration(age / 1000) if age else 0}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedViewer:
    """Events of one viewer, as recorded."""

    events: Sequence[Event]  # messages and writes in order; times do not fall and are rounded to `GRID_S` by `on_grid`
    # how many of the first messages were the GOP cache that joining gave; they do not count against limits
    given: int = 0
    ended_at: float = 0.0
    # why the connection ended, in the words of `CloseReason`. None: it did not, or it is not known.
    close_reason: str | None = None
    # metadata and codec configuration in front of a key frame after a loss, 0 or more
    restart_bytes: int = RESTART_BYTES
    # time from which on the events are extrapolated. None: all of them were recorded.
    assumed_from: float | None = None
    # when messages of another rendition begin, each time that it switched, in seconds, in order
    switched: Sequence[float] = ()

    def __post_init__(self) -> None:
        if len(self.events) > MOST_EVENTS:
            raise ConfigError(
                f"a recorded viewer has {len(self.events)} events, at most {MOST_EVENTS} can be evaluated at once",
                hint="cut the flight",
            )
        if self.restart_bytes < 0:
            raise ConfigError(f"restart_bytes of a recorded viewer is {self.restart_bytes}, it must be 0 or more")
        for before, after in itertools.pairwise(self.events):
            if after[0] < before[0]:
                raise ConfigError(f"the time of a recorded viewer falls from {before[0]:.6f} to {after[0]:.6f} s")

    @property
    def refused(self) -> bool:
        """Whether the kernel ever refused it anything; if not, no choice differs from another."""
        return any(event[1] == REFUSED for event in self.events)


def parse_renditions(text: str) -> tuple[int, ...]:
    """Return the rates of a set in bits per second, smallest first, of a text like ``500k,1.2M,2.5M``."""
    return tuple(sorted(parse_bit_rate(part.strip(), "renditions") for part in text.split(",")))


def on_grid(seconds: float) -> float:
    return round(seconds / GRID_S) * GRID_S


class ChoiceOutcome(NamedTuple):
    """Result of one choice for one viewer."""

    closed: CloseReason | None  # why it closed the viewer. None: it did not.
    watched_s: float  # until then, or until the recording ended, in seconds
    # what was published for the viewer while it was there, by class; without what was still queued when the recording
    # ended, if the choice went on then
    offered_messages: tuple[int, ...]
    sent_messages: tuple[int, ...]  # what the kernel took completely, by class
    dropped_messages: tuple[int, ...]  # what was dropped, by class; without what was queued when the viewer was closed
    # messages by the name of the reason, what was queued at the close included
    dropped_by_reason: tuple[tuple[str, int], ...]
    sent_bytes: int  # wire bytes that the kernel took
    edges: int
    time_in_states_s: tuple[float, float, float, float]  # seconds in READY, OVERLOADED, SOFT_LIMIT and HARD_LIMIT
    stall_s: float  # seconds with a delay above the player's buffer
    memory_peak_bytes: int  # most that counted against the limits while the kernel refused
    memory_byte_s: float  # the same as an integral over time; over `watched_s` it is the mean
    # seconds by delay, as (number of a bucket, seconds), in order; see `bucket_ms`
    delay: tuple[tuple[int, float], ...]
    returns: int  # times the viewer was brought back to live
    rendition_s: tuple[float, ...] = ()  # seconds in each rendition of the choice
    switches: int = 0  # between them
    joined_s: float = 0.0  # until the kernel had taken the first key frame, in seconds; 0 where it was never refused

    @property
    def pictures_share(self) -> float:
        """Share of the pictures that were sent whole, 0 to 1."""
        offered = sum(self.offered_messages[item] for item in VIDEO_CLASSES)
        return sum(self.sent_messages[item] for item in VIDEO_CLASSES) / offered if offered else 1.0

    def delay_ms(self, share: float) -> float:
        """Return the delay that was not exceeded for `share` (0 to 1) of the time, in ms, to 12.5 % upwards."""
        return quantile_ms(self.delay, share)


@dataclass(slots=True)
class Work:
    """What evaluating cost, counted: what a Sender that is shown everything would have met."""

    # (core input x choice): one per published message and choice that was still open, and one per write that reached a
    # choice (sent, would_block or drained). Ticks do not count.
    inputs: int = 0
    shown: int = 0  # of these, the ones at which a Sender was really called; the others were done for many at once


# -- delay in buckets

_BITS: Final = 4
"""Precision of delay buckets, in bits: eight per doubling, so that the upper end is 12.5 % away at most."""


def delay_bucket(ms: float) -> int:
    return bucket_of(int(ms), _BITS)


def bucket_ms(bucket: int) -> float:
    """Return the upper end of a bucket in ms; all of its delays are below."""
    return float(bounds_of(bucket, _BITS)[1])


def quantile_ms(delay: Iterable[tuple[int, float]], share: float) -> float:
    """Return the upper end of the bucket below which `share` of the time lies, in ms; 0 where there is no time."""
    pairs = sorted(delay)
    left = share * sum(seconds for _, seconds in pairs)
    for bucket, seconds in pairs:
        left -= seconds
        if left <= 1e-9:
            return bucket_ms(bucket)
    return bucket_ms(pairs[-1][0]) if pairs else 0.0


NO_MESSAGES: Final = (0,) * CLASS_COUNT
