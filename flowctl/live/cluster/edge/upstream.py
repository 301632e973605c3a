"""One origin of an edge: connects to it, again when the connection is lost, and not soon when it has lied."""

from __future__ import annotations

import asyncio
import enum
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import structlog

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.core.text.addresses import join_host_port
from flowctl.core.text.keyfiles import with_files
from flowctl.errors import ConfigError, FlowctlError, RemoteProtocolError
from flowctl.live.cluster.edge.gate import PeerMeter, SchedulerGate
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.errors import NoReplyError
from flowctl.nodes.diffusion.inbox import PeerStream
from flowctl.nodes.diffusion.objects import PeerId
from flowctl.nodes.diffusion.wire.codec import MAX_ID_BYTES
from flowctl.wire.rtmp.url import DEFAULT_PORTS, RtmpUrl, parse_query, url_of

_log: Final = structlog.get_logger("flowctl.cluster")
RECONNECT_BACKOFF: Final = Backoff(first_s=0.2, factor=2.0, most_s=5.0)
"""Pause between tries to reach an origin that is not there: short, for viewers wait for it."""
BAN_BACKOFF: Final = Backoff(first_s=60.0, factor=2.0, most_s=3600.0, jitter=0.2)
"""Pause before an origin that has broken a rule or lied is used again: it would soon do so again."""
STALL_BACKOFF: Final = Backoff(first_s=1.0, factor=2.0, most_s=60.0)
"""Pause before an origin that did not answer within its 10 s is used again: it, or the way to it, stood still, which is
no fault as a lie is, but each time costs viewers some seconds."""
HUNG_UP_BACKOFF: Final = Backoff(first_s=0.2, factor=2.0, most_s=15.0)
"""Pause before an origin that hangs up at once is tried again: most often the port or the key is wrong."""
CONNECT_S: Final = 5.0
_NO_ORIGIN_S: Final = 2.0
"""A peer that ends the connection sooner, without an answer, may be no origin: a server of RTMP hangs up at once."""
RTMP_PORT: Final = 1935
SEGMENT_PORT: Final = 1936
"""Port where an origin offers segments unless it says otherwise: beside that of RTMP."""


@dataclass(frozen=True, slots=True)
class OriginAddress:
    """The address of an origin, or of an edge that serves others as one."""

    host: str
    port: int = SEGMENT_PORT
    rtmp_port: int = RTMP_PORT
    tls: bool = False
    #: what is brought for both, as players do: ``key=...``, or ``key=@FILE``. Empty: nothing.
    proof: str = field(default="", repr=False)
    name: str = ""  #: name in DNS that it was found by, which its certificate is for. Empty: the host.

    @classmethod
    def parse(cls, text: str) -> OriginAddress:
        text, _, proof = text.partition("?")
        tls = text.startswith(_RTMPS)
        place, slash, rtmp = text.removeprefix(_RTMPS).removeprefix("rtmp://").partition("/")
        host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
        if not colon:
            host, port = place, str(SEGMENT_PORT)
        ports = [port, rtmp if slash else str(DEFAULT_PORTS["rtmps"] if tls else RTMP_PORT)]
        bare = ":" in host and not (host.startswith("[") and host.endswith("]"))  # which colon is that of the port?
        good = all(item.isascii() and item.isdigit() and 0 < int(item) < 65_536 for item in ports)
        if bare or not good or "@" in place or not _can_be_looked_up(host):
            _, at, behind = place.rpartition("@")
            shown = f"...@{behind}" if at else text  # what stands before may be a password
            raise ConfigError(
                f"{shown!r:.100} is no origin",
                hint="write host, host:port or host:port/rtmp-port, for example 10.0.0.5:1936/1935 or [fe80::1]:1936; "
                "rtmps:// before it for TLS, behind it ?key= and the key, or @ and the name of its file",
            )
        try:
            parse_query(proof)
        except RemoteProtocolError as error:
            raise ConfigError(f"what {text!r:.100} is given behind the ? is no proof: {error}") from error
        made = cls(host.removeprefix("[").removesuffix("]"), int(ports[0]), int(ports[1]), tls, proof)
        made.read_proof()  # what is wrong with a file is told at the start
        return made

    def read_proof(self) -> str:
        """Return what is brought, with what its files hold at this moment."""
        proof = with_files(f"?{self.proof}")[1:]
        if len(proof.encode()) > MAX_ID_BYTES:
            raise ConfigError(f"the proof for {self} has more than {MAX_ID_BYTES} bytes")
        return proof

    def url(self, stream: str) -> RtmpUrl:
        url, proof = url_of(stream, self.name or self.host, self.rtmp_port), self.read_proof()
        scheme = "rtmps" if self.tls else url.scheme
        return replace(url, scheme=scheme, raw_query=proof, query=parse_query(proof))

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)


def _can_be_looked_up(host: str) -> bool:
    """Return whether a host name can be looked up: one with an empty or too long label, or with a plus, never can."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and "+" not in host


class UpstreamState(enum.Enum):
    CONNECTING = "connecting"
    FETCHING = "fetching"
    RESTING = "resting"  #: until the next try
    BANNED = "banned"  #: it has lied, or broken a rule
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamStatistics:
    """One origin at one moment; the rest is as of `PeerMeter`."""

    origin: str
    state: str
    why: str
    channels: int
    connections: int
    faults: int  #: times that it lied or broke a rule
    requests: int
    in_flight: int
    requested_bytes: int
    timeouts: int
    latency_ms: float | None


_HUNG_UP: Final = "it hung up at once"
_HUNG_UP_HINT: Final = (
    "give the port of its --origin, not that of RTMP, with rtmps:// where that speaks TLS; or its log says that "
    "the key is none, or that it lets in no more of this address (--per-address there)"
)
_CUT: Final = frozenset({errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE})
_RTMPS: Final = "rtmps://"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it takes too long"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


class Upstream:
    """Keeps one origin connected, and fetches from it while it behaves."""

    def __init__(
        self,
        address: OriginAddress,
        connect: Callable[[OriginAddress], Awaitable[PeerStream]],
        diffusion: ObjectDiffusion,
        gate: SchedulerGate,
        clock: Callable[[], float],
        rng: Random,
        gone: Callable[[PeerId], object],
    ) -> None:
        self._gone = gone
        self.address: Final = address
        self.named = True  #: whether it is still one of the origins. If not, it is used for as long as it serves.
        self.task: asyncio.Task[None] | None = None  #: that fetches from it
        self.state = UpstreamState.CONNECTING
        self.meter: Final = PeerMeter()
        self._connect = connect
        self._diffusion = diffusion
        self._gate = gate
        self._clock = clock
        self._rng = rng
        self._redial = Redial(RECONNECT_BACKOFF, rng)
        self._why = "not tried yet"
        self._told = ""  # what the log said last of why it is not fetched from; empty: that it is
        self._stalls = self._connections = self._faults = 0

    @property
    def peer(self) -> str:
        return f"{self.address}#{self._connections}"

    async def run(self) -> None:
        while True:
            wait_s = await self._fetch_once()
            if self.named or self.state is UpstreamState.BANNED:  # a liar that is named again soon is still banned
                await asyncio.sleep(wait_s)
            if not self.named:
                break
        self.state = UpstreamState.ENDED
        _log.info("origin left", origin=str(self.address), why="DNS does not name it any more")

    def cut(self) -> None:
        """End at once, for others are waiting for the place."""
        self.state = UpstreamState.ENDED
        if self.task is not None:
            self.task.cancel()

    async def _fetch_once(self) -> float:
        self._redial.begin()
        self.state, began_at = UpstreamState.CONNECTING, self._clock()
        try:
            proof = self.address.read_proof()
            async with asyncio.timeout(CONNECT_S):
                stream = await self._connect(self.address)
        except (FlowctlError, OSError) as error:
            cut = getattr(error, "errno", None) in _CUT
            hint = _HUNG_UP_HINT if cut else getattr(error, "hint", None)
            self._note_failure(f"cannot connect: {_reason(error)}", **({"hint": hint} if hint else {}))
            return self._redial.delay_s()
        self._connections += 1
        peer, asked = self.peer, self.meter.requests
        self.state, self._why = UpstreamState.FETCHING, ""
        # One that has just hung up at once will do so again: it is told when it has not.
        doubtful = self._told.startswith(_HUNG_UP)
        telling = asyncio.get_running_loop().call_later(_NO_ORIGIN_S if doubtful else 0.0, self._tell_connected)
        self._gate.connect(peer, self.meter)
        try:
            await self._diffusion.fetch_from(stream, peer, proof.encode())
            why = "it has ended"
        except RemoteProtocolError as error:
            return self._note_fault(error)
        except NoReplyError as error:
            self._note_failure(str(error))
            self._stalls = 1 if self._clock() - began_at > STALL_BACKOFF.most_s else self._stalls + 1
            return STALL_BACKOFF.delay_s(self._stalls, self._rng)
        except (FlowctlError, OSError) as error:
            why = str(error)
        finally:
            telling.cancel()
            self._gate.disconnect(peer)
            self._gone(peer)
        lasted_s = self._clock() - began_at
        if lasted_s < _NO_ORIGIN_S and self.meter.requests == asked:
            self._note_failure(f"{_HUNG_UP} ({why})", hint=_HUNG_UP_HINT)
            return HUNG_UP_BACKOFF.delay_s(self._redial.tries, self._rng)
        self._note_failure(why)
        return self._redial.delay_s(lasted_s)

    def _tell_connected(self) -> None:
        self._told = ""
        _log.info("origin connected", origin=str(self.address))

    def _note_failure(self, why: str, **hint: str) -> None:
        self.state, self._why = UpstreamState.RESTING, why
        if why != self._told and self.named:
            self._told = why
            _log.warning("origin not reached", origin=str(self.address), why=why, **hint)

    def _note_fault(self, error: RemoteProtocolError) -> float:
        self._faults += 1
        wait_s = BAN_BACKOFF.delay_s(self._faults, self._rng)
        self.state, self._why = UpstreamState.BANNED, str(error)
        self._told = self._why
        _log.error(
            "origin banned",
            origin=str(self.address),
            why=str(error),
            code=error.code,
            for_s=round(wait_s),
            hint="its segments come from the others; see whether it is an origin, and what is wrong with it",
        )
        return wait_s

    def statistics(self) -> UpstreamStatistics:
        meter = self.meter
        return UpstreamStatistics(
            origin=str(self.address),
            state=self.state.value,
            why=self._why,
            channels=self._gate.channels(self.peer),
            connections=self._connections,
            faults=self._faults,
            requests=meter.requests,
            in_flight=meter.in_flight,
            requested_bytes=meter.requested_bytes,
            timeouts=meter.timeouts,
            latency_ms=None if meter.latency_s is None else round(meter.latency_s * 1000, 1),
        )
