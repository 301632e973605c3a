"""What each kind of evidence weighs, and what a score leads to: defaults with reasons, and the file (pure).

Points are weights of what an address did, each halved with every `half_life_s` that has passed since. The score is
their sum over one plus the hours in which connections of that address behaved (`standing`). So:

- *12, a proof*: no implementation does it by accident (chunks of one octet, AMF nested hundreds deep, a flood of
  control messages). One is enough, for an address that nobody else uses.
- *2 to 6, suspicious*: broken clients do it too. It takes a few.
- *1 and below, cheap*: what happens to anybody now and then. It takes dozens, and nothing else.
- *0*: not the peer's fault, or already dealt with. It is counted and shown, and changes nothing.

Whoever obeys the list must not hit honest people with it, so three rules stand above the sum:

- *Cheap evidence never bans* (`MILD`): it leads to a limit on new connections at most, which an honest client does
  not feel. Everything before the end of the handshake is cheap, because third parties can cause it: a page that has
  its visitors' browsers speak HTTP to the port is enough. So is all that encoders with a wrong key, load balancers,
  monitors and people who zap do for hours.
- *Where anybody behaves, nobody is banned*: an address is shared while a connection of it plays or publishes that was
  not cut, or where others have done so for `shared_hours`. One kind of evidence then counts as one offender's, up to
  the threshold, and a proof leads to a limit. An abuser can buy that by watching; the server's limits still cut it.
- *Evidence ages to now*, and so does standing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.server.guilt import LIMIT_POINTS, MILD_LIMITS

DEFAULT_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **{f"limit_hit.{name}": weight for name, weight in LIMIT_POINTS.items()},
        "limit_hit.*": 1.0,  # a limit that is not in this table
        "handshake_timeout": 0.5,  # dead links do it, browsers that connect ahead, and peers that occupy places
        "not_rtmp": 0.2,  # HTTP, TLS, or anything else instead of a handshake
        "protocol_error": 1.0,  # after the handshake
        "auth_refused": 0.2,  # a wrong key is tried again by every encoder, once in some seconds
        "fruitless_connection": 0.1,  # opened and left without publishing or playing: floods, scanners, health checks
        "short_connection": 0.02,  # played for less than short_s and left: zapping, or a storm of reconnects
        "deaf_close": 1.0,  # cut as slow, and took nothing in all of that trouble: on purpose, or a phone in a tunnel
        "slow_close": 0.0,  # cut as slow, and drained all the time: a slow link is no abuse
        # Refusing is the defence already. A whole office that comes back after a restart is refused hundreds of times,
        # and a banned address that keeps trying would be banned for ever.
        "refused.new_per_address_and_s": 0.0,
        "refused.connections_per_address": 0.0,
        "refused.connections": 0.0,
        "refused.banned": 0.0,
        "refused.limited": 0.0,
        "refused.*": 0.0,
    }
)
"""Points per occurrence. A name that ends with ``.*`` stands for those of its group that are not named."""

MILD: Final = frozenset(
    {
        "handshake_timeout",
        "not_rtmp",
        "auth_refused",
        "fruitless_connection",
        "short_connection",
        *(f"limit_hit.{name}" for name in MILD_LIMITS),
    }
)
"""Kinds for which nobody is banned, however often: third parties can cause them, or honest clients do them for hours.
So is what has no weight of its own name: a limit of another version may be one that honest peers run into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How evidence becomes a score, and a score a ban.

    Args:
        points: kind of evidence -> points per occurrence, 0 to 1000; see `DEFAULT_WEIGHTS`.
        threshold: score from which on an address is banned, above 0.
        half_life_s: time after which evidence counts half, seconds.
        ban_s: length of a ban at the threshold, seconds; it grows in proportion to the score.
        longest_ban_s: longest ban, seconds.
        short_s: a connection that played for less than that is a short one.
        deaf_bytes_per_s: a peer that took less than that while it was in trouble took nothing; 32 kbit/s is less than
            the sound of any stream.
        play_s: what a play whose end is not known counts as good standing, seconds.
        settled_s: a connection that has played for so long and was not cut behaves: what reads nothing is cut before.
        shared_hours: hours of good standing, aged, from which on an address is shared though nobody is there now.
        subnet_share: share of a subnet's addresses that must be abusive for the whole of it to be banned, where nobody
            honest was seen.
        subnet_addresses: how many of them there must be at least.
    """

    points: Mapping[str, float] = field(default_factory=lambda: DEFAULT_WEIGHTS)
    threshold: float = 10.0
    half_life_s: float = 86_400.0
    ban_s: float = 3_600.0
    longest_ban_s: float = 86_400.0
    short_s: float = 5.0
    deaf_bytes_per_s: float = 4_000.0
    play_s: float = 180.0
    settled_s: float = 60.0
    shared_hours: float = 0.25
    subnet_share: float = 0.8
    subnet_addresses: int = 8

    def __post_init__(self) -> None:
        for name, value in self.points.items():
            _number(f"weight of {name}", value, 0, 1000)
        for name, (low, high) in _RANGES.items():
            _number(name, getattr(self, name), low, high)

    def of(self, kind: str) -> float:
        """Return the points of one occurrence of `kind`."""
        if kind in self.points:
            return self.points[kind]
        return self.points.get(f"{kind.partition('.')[0]}.*", 0.0)

    def bans(self, kind: str) -> bool:
        """Return whether evidence of `kind` can lead to a ban; other evidence leads to a limit at most."""
        return kind in self.points and kind not in MILD and not kind.endswith(".*") and self.points[kind] > 0

    def render(self) -> str:
        """Return it as the TOML file that `parse_weights` reads."""
        lines = ["# How evidence becomes a score, and a score a ban: flowctl analyze abuse --weights FILE", ""]
        lines += [f"{item.name} = {getattr(self, item.name):g}" for item in fields(self) if item.name != "points"]
        lines += ["", "[points]  # per occurrence"]
        lines += [f'"{name}" = {value:g}' for name, value in self.points.items()]
        return "\n".join(lines) + "\n"


_RANGES: Final = {
    "threshold": (0.001, 1e6),
    "half_life_s": (1, 1e9),
    "ban_s": (1, 1e8),
    "longest_ban_s": (1, 1e8),
    "short_s": (0, 3600),
    "deaf_bytes_per_s": (0, 1e9),
    "play_s": (0, 86_400),
    "settled_s": (0, 86_400),
    "shared_hours": (0.001, 1e6),
    "subnet_share": (0.5, 1),  # less than most of a subnet is not "the subnet"
    "subnet_addresses": (2, 65_536),
}


def _number(name: str, value: Any, low: float, high: float) -> None:
    # A flag is a whole number to Python; a comparison with NaN is false, so NaN is refused as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, allowed is a number from {low:g} to {high:g}")


def parse_weights(text: str, where: str) -> Weights:
    """Return the weights of a file; what it does not name keeps its default.

    Args:
        text: TOML: settings by name, and a table ``[points]``.
        where: name of the file, for errors.

    Raises:
        ConfigError: it is no TOML, or a key or a value is wrong.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    points = value.pop("points", {})
    if not isinstance(points, dict):
        raise ConfigError(f"{where}: points is {points!r}, it must be a table")
    for name in value:
        if name not in _RANGES:
            raise ConfigError(f"{where}: unknown key {name!r}", hint=f"there are {', '.join(_RANGES)} and [points]")
    groups = {name.partition(".")[0] for name in DEFAULT_WEIGHTS}
    for name in points:
        # Limits come and go with versions, so any name within a group is one; a group must be known.
        if name.partition(".")[0] not in groups or (("." not in name) and name not in DEFAULT_WEIGHTS):
            raise ConfigError(f"{where}: unknown evidence {name!r}", hint=f"there are {', '.join(DEFAULT_WEIGHTS)}")
    try:
        return Weights(points={**DEFAULT_WEIGHTS, **points}, **value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
