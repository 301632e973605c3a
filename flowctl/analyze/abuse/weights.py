"""What each kind of evidence weighs, and what a score leads to: defaults with reasons, and the file (pure).

*12* is a proof: no implementation does it by accident. *1 to 6* is suspicious, broken clients do it too; *below 1*
happens to anybody now and then; *0* is counted and shown, and changes nothing. The score is the sum of points, each
halved with every `half_life_s`, over one plus the hours in which connections of that address behaved (`standing`).

Servers obey the list, so it must not hit honest people. What others can cause, or broken clients repeat for hours,
never bans (`MILD`): it limits new connections, which an honest client does not feel. Where anybody behaves nobody is
banned: one kind of evidence counts as one offender's there, and a proof leads to a limit. An abuser can buy that by
watching; the server's limits still cut it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from flowctl.core.server.guilt import LIMIT_POINTS, MILD_LIMITS
from flowctl.core.text.tomltext import TomlText
from flowctl.errors import ConfigError

DEFAULT_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **{f"limit_hit.{name}": weight for name, weight in LIMIT_POINTS.items()},
        "limit_hit.*": 1.0,  # a limit that is not in this table
        "handshake_timeout": 0.5,  # dead links do it, browsers that connect ahead, and peers that occupy places
        "not_rtmp": 0.2,  # HTTP, TLS, or anything else instead of a handshake
        "protocol_error": 1.0,  # after the handshake: a broken encoder does it with each of its attempts
        "auth_refused": 0.2,  # a wrong key is tried again by every encoder, once in some seconds
        "fruitless_connection": 0.1,  # opened and left without publishing or playing: floods, scanners, health checks
        "short_connection": 0.02,  # played for less than short_s and left: zapping, or a storm of reconnects
        "deaf_close": 1.0,  # cut as slow, and took nothing in all of that trouble, nor showed before that it reads
        "never_read": 1.0,  # the same from the start: it was served, and took nothing
        "deaf_http": 0.2,  # either of them over HTTP: a page can have its visitors' browsers ask and not read
        "maybe_paused": 0.2,  # either of them, of a small stream: its kernel got too little to know whether it read
        "lost_line": 0.0,  # cut as slow, its kernel silent (not told: it had read for longer): a tunnel, no reception
        "paused": 0.0,  # cut as slow, its kernel there, and it had read, for a second or more: a pause
        "cut_at_once": 0.0,  # cut as slow within moments: a publisher's burst fills what waits, at any rate of reading
        "slow_close": 0.0,  # cut as slow, and drained all the time: a slow link is no abuse
        # Refusing is the defence already. A whole office that comes back after a restart is refused hundreds of times,
        # and a banned address that keeps trying would be banned for ever.
        "refused.*": 0.0,
    }
)
"""Points per occurrence. A name that ends with ``.*`` stands for those of its group that are not named."""

BEFORE_PLAYING: Final = ("handshake_timeout", "not_rtmp", "auth_refused", "fruitless_connection", "short_connection")
"""Ends of connections that never played or published, or left at once."""
MILD: Final = frozenset(
    {*BEFORE_PLAYING, "protocol_error", "deaf_http", "maybe_paused", *(f"limit_hit.{name}" for name in MILD_LIMITS)}
)
"""Kinds that never ban, however often: third parties can cause them, or honest clients do them for hours. Kinds without
a weight of their own never ban either: a limit of another version may be one that honest peers run into."""


def _within(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How evidence becomes a score, and a score a ban; each number with its default, the least and the most."""

    points: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))  # per occurrence, 0 to 1000
    threshold: float = _within(10.0, 0.001, 1e6)  # score from which on an address is banned
    half_life_s: float = _within(86_400.0, 1, 1e9)  # time after which evidence counts half
    ban_s: float = _within(3_600.0, 1, 1e8)  # length of a ban at the threshold; it grows in proportion to the score
    longest_ban_s: float = _within(86_400.0, 1, 1e8)
    short_s: float = _within(5.0, 0, 3600)  # a connection that played for less is a short one
    deaf_bytes_per_s: float = _within(1_000.0, 0, 1e9)  # taking less is not reading: throttled phones get twice that
    play_s: float = _within(180.0, 0, 86_400)  # least good standing of a play whose end is not known
    settled_s: float = _within(60.0, 0, 86_400)  # a play of this length behaves: a deaf one is cut before
    shared_hours: float = _within(0.25, 0.001, 1e6)  # aged standing from which an address is shared by others
    subnet_share: float = _within(0.8, 0.5, 1)  # share of abusive addresses for which a subnet is banned whole
    subnet_addresses: int = _within(8, 2, 65_536)  # least number of them

    def __post_init__(self) -> None:
        for name, value in self.points.items():
            _number(f"weight of {name}", value, 0, 1000)
        for item in fields(self):
            if item.metadata:
                _number(item.name, getattr(self, item.name), item.metadata["low"], item.metadata["high"])

    def of(self, kind: str) -> float:
        if kind in self.points:
            return self.points[kind]
        return self.points.get(f"{kind.partition('.')[0]}.*", 0.0)

    def bans(self, kind: str) -> bool:
        """Return whether evidence of `kind` can lead to a ban; other evidence leads to a limit at most."""
        return kind in self.points and kind not in MILD and not kind.endswith(".*") and self.points[kind] > 0

    def render(self) -> str:
        lines = ["# How evidence becomes a score, and a score a ban: flowctl analyze abuse --weights FILE", ""]
        lines += [f"{item.name} = {getattr(self, item.name):g}" for item in fields(self) if item.name != "points"]
        lines += ["", "[points]  # per occurrence"]
        lines += [f'"{name}" = {value:g}' for name, value in self.points.items()]
        return "\n".join(lines) + "\n"


def _number(name: str, value: Any, low: float, high: float) -> None:
    # A flag is a whole number to Python; a comparison with NaN is false, so NaN is refused as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, allowed is a number from {low:g} to {high:g}")


def parse_weights(text: str, where: str) -> Weights:
    value = TomlText(text, where).table
    points = value.pop("points", {})
    if not isinstance(points, dict):
        raise ConfigError(f"{where}: points is {points!r}, it must be a table")
    known = [item.name for item in fields(Weights) if item.metadata]
    groups = {name.partition(".")[0] for name in DEFAULT_WEIGHTS if "." in name}
    # Limits come and go with versions, so any name within a group is one; a group must be known.
    odd = [name for name in points if name not in DEFAULT_WEIGHTS and name.partition(".")[0] not in groups]
    for what, names, there in (("key", set(value) - set(known), known), ("evidence", odd, DEFAULT_WEIGHTS)):
        for name in names:
            raise ConfigError(f"{where}: unknown {what} {name!r}", hint=f"there are {', '.join(there)}")
    try:
        return Weights(points={**DEFAULT_WEIGHTS, **points}, **value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
