"""The profiles of load tests: what each kind of peer does, how it is written, and what is to be expected of a server.

A profile is written ``NAME[@PARAMETERS][:SHARE]``, for example ``healthy:90%``, ``slow@200k:8%``, ``stall:40``. A share
is a percentage of all viewers or a number of them. `parse_crowd` makes a crowd of several; what they leave over is
filled with healthy viewers.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.load.peers.paces import RhythmPace, Sawtooth, Trace, parse_trace
from flowctl.load.peers.slow import Manner, Profile
from flowctl.load.results.result import PeerKind
from flowctl.units import parse_bit_rate, parse_duration, parse_size
from flowctl.wire.client.throttle import MAX_RATE, MIN_RATE, Constant, RatePace, receive_buffer

MAX_SECONDS: Final = 86_400.0
_LEAST_S: Final = {"PERIOD": 0.1, "ON": 0.01, "OFF": 0.01, "STAY": 0.1}
"""Least time of a parameter, seconds; 0 for all others. Shorter visits are a flood of connections, not viewers."""
_TRACE_MAX_BYTES: Final = 4 * 1024 * 1024
_SHARE = re.compile(r"(?P<head>.+):(?P<number>\d{1,6}(?:\.\d{1,4})?)(?P<percent>%?)", re.ASCII | re.DOTALL)

HEALTHY: Final = "healthy"


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    """A profile with its parameters, as given by the user."""

    profile: Profile
    text: str  # name with parameters, without a share; the name of the peers in all results
    manner: Manner
    share: float | None = None  # share of all viewers, 0 to 1. None: no percentage was given.
    count: int | None = None  # number of peers. None: no number was given.


def _line(rate: Constant | Sawtooth | Trace, mean: float) -> Manner:
    return Manner(pace=lambda now: RatePace(rate, now), receive_buffer_bytes=receive_buffer(round(mean)))


def _rhythm(on: float, off: float = math.inf, buffer: float = 0.0) -> Manner:
    """Return the manner of a viewer that reads for a while, then not."""
    return Manner(pace=lambda now: RhythmPace(on, off, now), receive_buffer_bytes=round(buffer))


_SLOW_EXPECTATION: Final = "gets less than the stream, and only whole frames; others lose nothing"
_CUT_EXPECTATION: Final = "is cut, or what is queued for it stays bounded; others lose nothing"

SLOW_PROFILES: Final[tuple[Profile, ...]] = (
    Profile(
        name=HEALTHY,
        kind=PeerKind.HEALTHY,
        summary="reads everything at once",
        explanation="A viewer as it should be: reads what comes, acknowledges, answers pings.",
        example="healthy:90%",
        expectation="gets every frame",
    ),
    Profile(
        name="slow",
        summary="reads at a constant rate",
        explanation="Reads at RATE bits per second and no faster, a packet or 5 ms at a time, with a receive buffer of "
        "a few packets, like a viewer behind a thin line.",
        parameters="RATE",
        example="slow@200k:8%",
        expectation=_SLOW_EXPECTATION,
        make=lambda rate: _line(Constant(rate), rate),
    ),
    Profile(
        name="sawtooth",
        summary="reads at a rate that rises and falls",
        explanation="The rate rises from LOW to HIGH within PERIOD, falls back at once, and rises again: a mobile link "
        "that is sometimes good.",
        parameters="LOW-HIGH/PERIOD",
        example="sawtooth@200k-4M/10s:5%",
        expectation=_SLOW_EXPECTATION,
        make=lambda low, high, period: _line(Sawtooth(low, high, period), (low + high) / 2),
    ),
    Profile(
        name="trace",
        summary="reads at rates from a file",
        explanation='FILE has lines "seconds,bit_rate", seconds rising from 0; each rate holds until the next, and the '
        "whole begins again at its end. Recordings of real links can be replayed.",
        parameters="FILE",
        example="trace@link.csv:5%",
        expectation=_SLOW_EXPECTATION,
        make=lambda file: _line(file, file.mean_rate),
    ),
    Profile(
        name="pause",
        summary="reads for a while, then not, again and again",
        explanation="Reads everything for ON, nothing for OFF, and so on: a player whose application is suspended. "
        "BUFFER (default 64KiB) is its receive buffer: that of the kernel takes seconds of the stream, and the server "
        "would not notice a pause.",
        parameters="ON/OFF[/BUFFER]",
        example="pause@3s/2s:5%",
        expectation="is back at live some time after each pause, or cut when the pause is too long",
        make=lambda on, off, buffer=64 * 1024: _rhythm(on, off, buffer),
    ),
    Profile(
        name="stall",
        summary="stops reading for good",
        explanation="Reads like a healthy viewer for AFTER (default 2s) from its first frame, then never again; the "
        "connection stays open. BUFFER is its receive buffer; unless given it is the kernel's affair, and takes "
        "seconds of the stream before the server can notice anything.",
        parameters="[AFTER[/BUFFER]]",
        example="stall@5s:2%",
        expectation=_CUT_EXPECTATION,
        make=lambda after=2.0, buffer=0: _rhythm(after, buffer=buffer),
    ),
    Profile(
        name="never-read",
        summary="asks to play and reads nothing",
        explanation="Connects, asks to play, and does not read a single byte after that.",
        example="never-read:1%",
        expectation=_CUT_EXPECTATION,
        make=lambda: Manner(reads_never=True),
    ),
    Profile(
        name="ack-only",
        summary="acknowledges what it does not read",
        explanation="As never-read, but acknowledges twice a second as if it had read at RATE (default 2.5M): a server "
        "that trusts acknowledgements takes it for healthy.",
        parameters="[RATE]",
        example="ack-only:1%",
        expectation=_CUT_EXPECTATION,
        make=lambda rate=2_500_000: Manner(reads_never=True, ack_rate=rate),
    ),
    Profile(
        name="tiny-window",
        summary="reads at once, but offers a tiny TCP window",
        explanation="Receive buffer and window clamp of SIZE (default 4KiB) with Ethernet segments, so that every "
        "write of the server meets a full window.",
        parameters="[SIZE]",
        example="tiny-window@4KiB:2%",
        expectation="is served as fast as its window allows, without costing more than others",
        make=lambda size=4096: Manner(receive_buffer_bytes=round(size), window_bytes=round(size)),
    ),
    Profile(
        name="half-close",
        summary="closes its sending half and keeps reading",
        explanation="Sends FIN after its first frame and reads on, as some proxies do.",
        example="half-close:2%",
        expectation="is closed in order, or served to the end; never left hanging",
        make=lambda: Manner(half_close=True),
    ),
    Profile(
        name="vanish",
        summary="is gone without a word, AFTER its first frame",
        explanation="Drops every packet that comes in, by a filter on its socket, and sends nothing: no FIN, no reset, "
        "no acknowledgement of TCP, like a phone that left its network. Where the system has no such filter it only "
        "stops reading and answering, and says so in its notes. AFTER is 2s unless given. The filter drops FIN and "
        "reset of the server as well: whether it was cut is not measured, and only the server can tell.",
        parameters="[AFTER]",
        example="vanish@2s:2%",
        expectation="is noticed by a timer and cut; others lose nothing",
        make=lambda after=2.0: Manner(vanish_after_s=after),
    ),
    Profile(
        name="churn",
        kind=PeerKind.HEALTHY,
        summary="joins, stays, leaves, joins again",
        explanation="A healthy viewer that stays for STAY from its first frame, leaves in order, and comes back at "
        "once. Each visit is one row of the results.",
        parameters="STAY",
        example="churn@5s:10%",
        expectation="gets every frame while it is there; memory and descriptors stay flat",
        make=lambda stay: Manner(stay_s=stay),
    ),
    Profile(
        name="burst",
        kind=PeerKind.HEALTHY,
        summary="all join at one moment",
        explanation="Healthy viewers that come without any ramp, all at AFTER from the start of the run: the moment "
        "something begins.",
        parameters="AFTER",
        example="burst@10s:30%",
        expectation="all get in; those who were there lose nothing",
        make=lambda after: Manner(join_at_s=after),
    ),
)  # fmt: skip  # keyword by keyword is how the list is read


@cache
def profiles() -> Mapping[str, Profile]:
    """Return all profiles by name, healthy and slow first, then the hostile ones."""
    from flowctl.load.hostile.attacks import HOSTILE  # noqa: PLC0415 - what attacks is loaded when asked for

    return {profile.name: profile for profile in SLOW_PROFILES} | HOSTILE


def parse_profile(text: str) -> ChosenProfile:
    """Return the profile that `text`, ``NAME[@PARAMETERS][:SHARE]``, asks for."""
    share: float | None = None
    count: int | None = None
    head = text.strip()
    match = _SHARE.fullmatch(head)
    if match is not None:
        head = match["head"]
        number = float(match["number"])
        if match["percent"]:
            share = number / 100
            if number > 100:
                raise ConfigError(
                    f"profile {text!r}: a share is 0% to 100%", hint=f"a number of viewers has no %: {head}:{number:g}"
                )
        else:
            count = int(number)
            if count != number:
                raise ConfigError(f"profile {text!r}: a number of viewers is whole", hint="a share ends with %")
    name, at, parameters = head.partition("@")
    profile = _named(name, text)
    if at and not profile.parameters:
        raise ConfigError(f"profile {text!r}: {profile.name} has no parameters", hint=f"write it {profile.name}")
    if not parameters and (at or (profile.parameters and not profile.parameters.startswith("["))):
        raise ConfigError(
            f"profile {text!r}: {profile.name} needs {profile.parameters}", hint=f"for example {profile.example}"
        )
    manner = profile.make(**_values(profile, parameters, text))
    return ChosenProfile(profile, profile.name + (at and f"@{parameters}"), manner, share, count)


def _named(name: str, text: str) -> Profile:
    own = next((profile for profile in SLOW_PROFILES if profile.name == name), None)
    if own is not None:
        return own
    from flowctl.load.hostile.attacks import NOT_POSSIBLE  # noqa: PLC0415 - see profiles

    named = profiles()
    profile = named.get(name) or named.get(name.upper())
    if profile is None and name:
        profile = next((item for item in named.values() if item.alias == name), None)
    if name.upper() in NOT_POSSIBLE:
        raise ConfigError(
            f"profile {name.upper()} cannot be carried out: {NOT_POSSIBLE[name.upper()]}",
            hint="flowctl load --list-profiles shows those that can",
        )
    if profile is None:
        raise ConfigError(
            f"profile {text!r}: there is no profile {name!r}", hint="flowctl load --list-profiles shows them all"
        )
    return profile


def parse_crowd(texts: Sequence[str], viewers: int) -> dict[str, int]:
    """Return how many viewers of each profile make up a crowd of `viewers`; healthy ones fill it up."""
    choices = [parse_profile(text) for text in texts]
    counts: dict[str, int] = {}
    rest: ChosenProfile | None = None
    shares: dict[str, float] = {}
    for choice in choices:
        if choice.text in counts or (rest is not None and choice.text == rest.text):
            raise ConfigError(f"profile {choice.text!r} is given twice", hint="add up its shares")
        if choice.count is not None:
            counts[choice.text] = choice.count
        elif choice.share is not None:
            shares[choice.text] = choice.share
            counts[choice.text] = 0  # keeps its place
        elif rest is not None:
            raise ConfigError(
                f"profiles {rest.text!r} and {choice.text!r} have no share", hint="only one may take what is left"
            )
        else:
            rest = choice
            counts[choice.text] = 0
    counts.update(_apportion(shares, viewers))
    left = viewers - sum(counts.values())
    if left < 0:
        raise ConfigError(
            f"profiles make {viewers - left} viewers, there are {viewers}", hint="lower the shares or raise --viewers"
        )
    if left:
        filled = HEALTHY if rest is None else rest.text
        counts[filled] = counts.get(filled, 0) + left
    return {name: count for name, count in counts.items() if count}


def _apportion(shares: Mapping[str, float], viewers: int) -> dict[str, int]:
    """Return whole numbers of viewers for shares of them, by the largest remainder.

    Each is within one of its exact number, and all together are their exact sum, rounded: 100 % are all viewers.
    """
    # A share has at most six decimals. Floats would leave a remainder where there is none.
    exact = {name: Fraction(share).limit_denominator(10**6) * viewers for name, share in shares.items()}
    counts = {name: int(number) for name, number in exact.items()}
    more = math.floor(sum(exact.values()) + Fraction(1, 2)) - sum(counts.values())
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[:more]:
        counts[name] += 1
    return counts


# -- parameters


def pattern_of(grammar: str) -> str:
    """Return the regular expression of parameters such as ``RATE[/DURATION]``, with a group for each name."""
    piece = "[^-/]*" if "-" in grammar else ".*" if grammar == "FILE" else "[^/]*"
    optional = grammar.replace("[", "(?:").replace("]", ")?")
    return re.sub(r"[A-Z]+", lambda name: f"(?P<{name[0]}>{piece})", optional)


def _values(profile: Profile, text: str, whole: str) -> dict[str, Any]:
    if not text:
        return {}
    match = re.fullmatch(pattern_of(profile.parameters), text, re.DOTALL)
    if match is None:
        raise ConfigError(
            f"profile {whole!r}: {profile.name} has {profile.parameters}", hint=f"for example {profile.example}"
        )
    parts = {name: part for name, part in match.groupdict().items() if part is not None}
    values = {name.lower(): _value(name, part, whole) for name, part in parts.items()}
    if "low" in values and values["low"] >= values["high"]:
        raise ConfigError(
            f"profile {whole!r}: LOW is {values['low']:.0f} bit/s, it must be below HIGH, {values['high']:.0f} bit/s",
            hint=f"the lower rate comes first, and slow@{parts['LOW']} is one that does not change",
        )
    return values


def _value(name: str, text: str, whole: str) -> Any:
    field = f"profile {whole!r}"
    if name == "FILE":
        return _trace(text, whole)
    if name in {"RATE", "LOW", "HIGH"}:
        rate = parse_bit_rate(text, field)
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ConfigError(
                f"{field}: rate is {rate} bit/s, allowed is {MIN_RATE} to {MAX_RATE}",
                hint="rates are in bits per second, with k, M or G: 200k, 2.5M",
            )
        return rate
    if name in {"SIZE", "BUFFER"}:
        size = parse_size(text, field)
        if not 1024 <= size <= 1024 * 1024:
            raise ConfigError(
                f"{field}: window or buffer is {size} bytes, allowed is 1 KiB to 1 MiB", hint="for example 4KiB"
            )
        return size
    seconds, least = parse_duration(text, field), _LEAST_S.get(name, 0.0)
    if not least <= seconds <= MAX_SECONDS:
        raise ConfigError(
            f"{field}: {seconds:g} s, allowed is {least:g} to {MAX_SECONDS:g} s",
            hint="times are written 500ms, 5s, 2m",
        )
    return seconds


def _trace(text: str, whole: str) -> Trace:
    path = Path(text)
    try:
        with path.open("rb") as file:
            octets = file.read(_TRACE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"profile {whole!r}: cannot read {path}: {error.strerror}",
            hint='trace@FILE names a readable file with lines "seconds,bit_rate"',
        ) from error
    if len(octets) > _TRACE_MAX_BYTES:
        raise ConfigError(
            f"profile {whole!r}: {path} has more than {_TRACE_MAX_BYTES} bytes",
            hint="a trace begins again at its end: a part of the recording will do",
        )
    try:
        return parse_trace(text_of(octets))
    except ValueError as error:
        raise ConfigError(f"profile {whole!r}: {path}: {error}", hint='lines are "seconds,bit_rate"') from error


_TITLES: Final = {
    PeerKind.HEALTHY: "Healthy viewers",
    PeerKind.SLOW: "Slow viewers",
    PeerKind.HOSTILE: "Hostile peers",
}
_WIDTH: Final = 100


def as_dicts() -> list[dict[str, Any]]:
    return [
        {
            "name": profile.name,
            "alias": profile.alias or None,
            "kind": profile.kind.value,
            "usage": profile.usage,
            "example": profile.example or profile.name,
            "summary": profile.summary,
            "explanation": profile.explanation,
            "expectation": profile.expectation,
        }
        for profile in sorted(profiles().values(), key=lambda item: list(_TITLES).index(item.kind))
    ]


def as_lines() -> list[str]:
    lines: list[str] = []
    for kind, group in itertools.groupby(as_dicts(), key=lambda profile: PeerKind(profile["kind"])):
        lines += [_TITLES[kind], ""]
        for profile in group:
            alias = f", or {profile['alias']}" if profile["alias"] else ""
            lines.append(f"  {profile['usage']}{alias}: {profile['summary']}")
            for text in (profile["explanation"], f"a sound server: {profile['expectation']}"):
                lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            lines += [f"      for example --profile {profile['example']}", ""]
    return lines[:-1]
