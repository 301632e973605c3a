"""Whether a new connection is let in, and what it may call (pure): by listener, address, key, and how many come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.text.addresses import address_key
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.rpc.access.access import AuthLevel, ServiceNodes
from flowctl.wire.zmtp.mechanism import RefusedError

DENIED: Final = b"400"
"""What a peer is told that is not let in, as ZeroMQ has it (RFC 27): it does not come again."""

NEW_PER_ADDRESS_AND_S: Final = 200.0
"""Connections a second that one address may open in the long run: enough for many users, not for a flood."""
BURST_PER_ADDRESS: Final = 4_096
"""Connections that one address may open at once: all peers of a restarted server come back within a moment."""
MOST_ADDRESSES: Final = 65_536
"""Addresses whose rate is remembered; beyond it, those seen longest ago are forgotten."""

#: Decides on a connection, given its address, its public key (empty: none) and whether that is an active service node:
#: what it may call; None or `AuthLevel.DENIED`: it is not let in. Runs on the node's thread and must not wait.
Allow: TypeAlias = Callable[[str, bytes, bool], AuthLevel | None]


@dataclass(frozen=True, slots=True)
class _ListenerDoor:
    curve: bool
    allow: Allow


def rate_key(address: str) -> str:
    """Return what counts as one address where rates are per address: of ipc the user, who may have many processes."""
    return address.rpartition(":")[0] if address.startswith("localhost:") else address_key(address)


@dataclass(eq=False)
class AddressRates:
    """One `TokenBucket` per address (see `rate_key`); those seen longest ago are forgotten. Not locked."""

    _rate_per_s: float
    _burst: int
    _buckets: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, address: str, now: float) -> bool:
        key = rate_key(address)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._burst, now)
            if len(self._buckets) > MOST_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket.take_tokens(self._rate_per_s, self._burst, now)


@dataclass(eq=False)
class RpcAdmission:
    """Decides on new connections; for the node's thread."""

    _service_nodes: ServiceNodes
    _clock: Callable[[], float]
    too_many_count: int = 0  #: connections put off since their address opened too many
    _doors: dict[int, _ListenerDoor] = field(default_factory=dict)
    _rates: AddressRates = field(default_factory=lambda: AddressRates(NEW_PER_ADDRESS_AND_S, BURST_PER_ADDRESS))

    def open(self, listener: int, *, curve: bool, allow: AuthLevel | Allow) -> None:
        """Let connections of a listener have the level `allow`, or be decided on by it; before it is bound."""
        if not isinstance(allow, AuthLevel) and not callable(allow):
            raise ConfigError(
                f"allow is {short(repr(allow))}, it must be an AuthLevel, or a function that returns one",
                hint="AuthLevel.NONE lets everybody in, to call what asks for no level",
            )
        self._doors[listener] = _ListenerDoor(curve, (lambda *_: allow) if isinstance(allow, AuthLevel) else allow)

    def close(self, listener: int) -> None:
        self._doors.pop(listener, None)

    def decide(self, listener: int, address: str, pubkey: bytes) -> AuthLevel:
        """Return the level of a connection whose peer has proven a key; empty: none.

        Raises:
            RefusedError: it is not let in, or put off since its address opens too many.
        """
        door = self._doors.get(listener)
        if door is None or door.curve != bool(pubkey):
            raise RefusedError(DENIED)
        if not self._rates.take(address, self._clock()):
            self.too_many_count += 1
            raise RefusedError
        level = _checked(door.allow(address, pubkey, pubkey in self._service_nodes))
        if level is None:
            raise RefusedError(DENIED)
        return level

    def decide_inproc(self, listener: int) -> AuthLevel | None:
        """Return the level of a peer of this process, which needs no key. None: it is refused."""
        door = self._doors.get(listener)
        return None if door is None else _checked(door.allow("", b"", False))


def _checked(level: object) -> AuthLevel | None:
    if level is None or level is AuthLevel.DENIED:
        return None
    if not isinstance(level, AuthLevel):  # True is 1 too, which would be BASIC
        raise LocalProtocolError(
            f"allow() returned {type(level).__name__}, it must return an AuthLevel, or None to deny"
        )
    return level
