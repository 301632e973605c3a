"""Which connections of a server are recorded, and the making of their Senders.

A connection is recorded from its first call or not at all: what happened before could not be replayed. So the choice is
made when it is accepted, by chance (`share`), by its address, or because somebody asked for the next ones while the
server runs (`record_next`). The memory and time that recorded connections cost are bounded by `most_at_once`.
"""

from __future__ import annotations

import ipaddress
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.outbox import Transport
from flowctl.core.sending.contract import SenderHost
from flowctl.errors import ConfigError
from flowctl.records.flight.options import FlightOptions
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import FlightSink, Identity, Tape
from flowctl.sender import Sender

_MOST_NEXT: Final = 100_000
"""Connections that may be asked for ahead: more is what a share is for."""
_HASH: Final = 0x9E3779B97F4A7C15
_HASH_MASK: Final = 0xFFFFFFFFFFFFFFFF
"""Multiplying by 2^64 / golden ratio spreads consecutive numbers evenly (Knuth, TAOCP 3, 6.4): a share of 1 % takes
about each hundredth connection, the same ones in each run, and not the first of each hundred."""


class NumberedHost(SenderHost, Protocol):
    """A host that knows of which connection it is."""

    @property
    def number(self) -> int: ...
    @property
    def peer(self) -> tuple[str, int]: ...


class Flights:
    """The recorded connections of one server. Any thread."""

    def __init__(
        self,
        options: FlightOptions,
        sink: FlightSink,
        identity: Callable[[int, tuple[str, int], float], Identity],
    ) -> None:
        self.options: Final = options
        self._sink = sink
        self._identity = identity
        self._lock = OwnedLock()
        self._next = 0  # connections asked for; guarded by _lock
        self._open: weakref.WeakSet[RecordedSender] = weakref.WeakSet()  # guarded by _lock

    def record_next(self, count: int) -> None:
        """Record the next `count` connections, whatever the options say, up to `most_at_once` at a time."""
        if not 0 <= count <= _MOST_NEXT:
            raise ConfigError(f"{count} connections were asked for, it must be 0 to {_MOST_NEXT}")
        with self._lock:
            self._next = count

    def wanted(self, number: int, address: str) -> bool:
        """Return whether the connection is to be recorded by the options."""
        options = self.options
        if options.share and (number * _HASH & _HASH_MASK) < options.share * (_HASH_MASK + 1):
            return True
        if not options.addresses:
            return False
        try:
            peer = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = peer.ipv4_mapped if isinstance(peer, ipaddress.IPv6Address) else None
        return any((mapped or peer) in network for network in options.addresses)

    def make_sender(self, host: NumberedHost, transport: Transport, **settings: Any) -> Sender:
        number, peer = host.number, host.peer
        if not self._take_place(number, peer[0]):
            return Sender(host, transport, **settings)
        tape = Tape(self._sink, self._identity(number, peer, host.now()))
        sender = RecordedSender(host, transport, tape=tape, **settings)
        with self._lock:
            self._open.add(sender)
        return sender

    def _take_place(self, number: int, address: str) -> bool:
        """Return whether the connection is to be recorded, and there is room.

        Of those that follow no stream the oldest makes some: connections that say nothing, or come again and again,
        would have all places at no cost. Who joins has as many newcomers' time to follow one as there are places.
        """
        wanted = self.wanted(number, address)
        with self._lock:
            asked_for = self._next > 0
            if not (wanted or asked_for):
                return False
            self._open.difference_update([sender for sender in self._open if not sender.recording])
            full, idle = len(self._open) >= self.options.most_at_once, None
            if full:
                idles = [sender for sender in self._open if sender.following is None]
                idle = min(idles, key=lambda sender: sender.tape.began_us, default=None)
            if idle is not None:
                self._open.discard(idle)
                full = False
            if not full:
                self._next -= asked_for
        if idle is not None:
            idle.end_flight()
        return not full
