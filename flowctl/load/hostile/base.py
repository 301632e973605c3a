"""What a hostile profile is, what it is handed, and what it says afterwards.

Theory of operation. A profile has one or several *forms*: an attack on a size may announce it, or send it, or begin it
and wait. All forms run at the same time, each in a task of its own with connections of its own, and each ends by the
deadline whatever the server does. What the server did with the first connection of a form is read off that connection:
it was CUT, REFUSED, or CONTAINED (it is still there and gets nothing it should not get). A form that knows more says
so: `Attack.fault` is a thing that no sound server does.

From outside one cannot see memory or processor time; the caller gives the server's process id to the
load tester for that. What can always be seen is whether others suffer: a *witness*, a connection that does nothing
wrong, is kept beside every attack, and a server that ends it without a word has most likely ended altogether. And
whether the server still lets newcomers in is tried at the end.

A worker runs a profile with ``verdict = await profile.attack(context)``; nothing but a bug of ours is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from flowctl.errors import RemoteProtocolError
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError, UnreachableError
from flowctl.load.hostile.secrecy import Secrecy
from flowctl.load.peers.ownfault import TesterFailedError
from flowctl.load.peers.slow import Profile
from flowctl.load.results.result import PeerEnd, PeerKind

WATCH_S: Final = 3.0
"""Time to watch the server after an attack: on a busy machine it may need as long to act."""
_MOST_NOTES: Final = 32


class AttackOutcome(enum.Enum):
    """The reaction of a server to an attacker.

    CUT: it ended the connection. REFUSED: it said no, in words, or by closing before the handshake was done.
    CONTAINED: the attacker is still connected and was served within bounds, or not at all. UNREACHABLE: nobody
    answered, so nothing can be told. BROKEN: the server broke the protocol itself.
    """

    CUT = "cut"
    REFUSED = "refused"
    CONTAINED = "contained"
    UNREACHABLE = "unreachable"
    BROKEN = "broken"


@dataclass(kw_only=True)
class AttackContext:
    """The target of an attack, and its bounds."""

    host: str  # host of the server; resolved and checked by the caller
    port: int
    app: str = "live"
    # name of a stream that is live, for attacks by readers. Publishing attacks use names of their own.
    stream: str = "stream"
    query: str = ""  # what is brought behind the name of a stream: keys, tokens
    tls: tuple[ssl.SSLContext, str] | None = None  # what TLS goes by, and the server's name. None: there is no TLS.
    source: str | None = None  # own address to bind to. None: the system's choice.
    number: int = 0  # number of the peer in the run; makes names of streams unique
    duration_s: float = 10.0
    rng: random.Random = field(default_factory=random.Random)
    forms: tuple[str, ...] | None = None
    # how long a form whose octets are out is watched for what the server does; a sound one acts at once, or never
    watch_s: float = WATCH_S
    probe: bool = True  # whether there is a witness, and a newcomer who tries to get in at the end
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(text)

    def peer(self) -> Peer:
        secrecy = None if self.tls is None else Secrecy(*self.tls)
        return Peer(self.host, self.port, app=self.app, rng=self.rng, query=self.query, secrecy=secrecy)

    def own_name(self, what: str) -> str:
        """Return a stream name that no other peer of the run uses."""
        return f"{self.stream.replace('/', '-')}-hostile-{self.number}-{what}"


@dataclass(slots=True, kw_only=True)
class FormResult:
    """The result of one form."""

    form: str
    outcome: AttackOutcome
    # whether a sound server may do that. None: the attack was too short to tell, or the tester failed.
    met: bool | None
    details: str = ""
    code: str | None = None  # error or final status code of the server
    end: PeerEnd = PeerEnd.RUN_ENDED  # how the form's first connection ended, in the words of the load tester


@dataclass(slots=True, kw_only=True)
class AttackResult:
    """The result of an attack: that of its worst form, and those of all."""

    outcome: AttackOutcome
    # whether the server did what a sound one may do, in all forms, and let a newcomer in. None: too short to tell.
    met: bool | None
    details: str
    end: PeerEnd
    code: str | None = None  # error or final status code of the server
    cut: bool = False
    connect_s: float | None = None  # time for TCP to connect. None: it never did.
    handshake_s: float | None = None  # time of the RTMP handshake. None: it was not done.
    received_bytes: int = 0
    newcomer: bool | None = None  # whether a newcomer got in afterwards. None: not tried.
    witness: bool | None = None
    forms: list[FormResult] = field(default_factory=list)
    notes: str = ""

    @property
    def form_words(self) -> str:
        """How each of several forms ended: a line for those that ended alike; "" where there is one form only."""
        if len(self.forms) < 2:
            return ""
        alike: dict[str, list[str]] = {}
        for item in self.forms:
            code = f" ({item.code})" if item.code else ""
            wrong = ", which is not as it should be" if item.met is False else ""
            alike.setdefault(f"{item.outcome.value}{code}{wrong}", []).append(item.form)
        return "\n".join(f"{', '.join(names)}: {how}" for how, names in alike.items())


PROBE_S: Final = 5.0
"""Time that a newcomer tries to get in after an attack: servers refuse an address that comes too often."""
_PROBE_PAUSE_S: Final = 0.25
_WITNESS_S: Final = 1.0
_WITNESS_LOOK_S: Final = 0.1
_FAILURES: Final = (PeerGoneError, UnreachableError, RemoteProtocolError, TimeoutError, TesterFailedError)
"""Errors that keep a connection from getting in."""


@dataclass(eq=False)
class Witness:
    """A connection beside an attack that does nothing wrong.

    It is made anew every second, so that no server has a reason to end it as idle.
    """

    context: AttackContext
    over_http: bool
    alone: bool | None = None  # whether it was left alone. None: it never got in.
    _task: asyncio.Task[None] | None = None
    _peer: Peer | None = None

    async def enter(self) -> None:
        if not self.context.probe or not await self._connect():
            return
        self.alone = True
        self._task = asyncio.create_task(self._stay())

    async def leave(self) -> None:
        """Look a last time: a server that has died says so a moment later."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_WITNESS_LOOK_S)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._peer is not None:
            self._peer.close()

    async def _connect(self) -> bool:
        peer = self._peer = self.context.peer()
        with contextlib.suppress(RefusedError, *_FAILURES):
            async with asyncio.timeout(_WITNESS_S):
                await _get_in(peer, self.context, over_http=self.over_http)
                return True
        return False

    async def _stay(self) -> None:
        """Stay until the server ends the connection without a reason, or cannot be reached any more."""
        while self._peer is not None:
            with contextlib.suppress(TimeoutError, RemoteProtocolError):
                async with asyncio.timeout(_WITNESS_S):
                    await self._peer.read_to_end()
            if self._peer.ended is not None and not self._peer.last_words:
                self.alone = False
                return
            self._peer.close()
            if not await self._connect():
                return  # turned away, as the attacker may be: that is no disturbance, and the newcomer comes later


async def _get_in(peer: Peer, context: AttackContext, *, over_http: bool) -> None:
    """Connect until connect is accepted, or over HTTP until a request is answered in any way."""
    await peer.open(source=context.source)
    if over_http:
        await peer.write(f"GET /flowctl HTTP/1.1\r\nHost: {context.host}\r\n\r\n".encode())
        await peer.read()
        return
    await peer.handshake()
    await peer.connect()


async def newcomer_gets_in(context: AttackContext, *, over_http: bool) -> bool | None:
    """Return whether a new connection is accepted as usual. None: we could not even try."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PROBE_S
    while True:
        peer = context.peer()
        try:
            async with asyncio.timeout_at(end):
                await _get_in(peer, context, over_http=over_http)
                return True
        except RefusedError:
            return True  # it has listened and answered: it may not like the application
        except _FAILURES as error:
            if loop.time() + _PROBE_PAUSE_S >= end:
                return None if isinstance(error, TesterFailedError) else False
            await asyncio.sleep(_PROBE_PAUSE_S)
        finally:
            peer.close()


ANY: Final = frozenset({AttackOutcome.CUT, AttackOutcome.REFUSED, AttackOutcome.CONTAINED})
"""Every way a sound server may react, where only the bounds on memory and processor time matter."""
ENDED: Final = frozenset({AttackOutcome.CUT, AttackOutcome.REFUSED})
"""The attacker may not stay."""
STAYS: Final = frozenset({AttackOutcome.CONTAINED})
"""The peer is odd, not hostile: a sound server keeps it."""
UNHARMED: Final = frozenset({AttackOutcome.CONTAINED, AttackOutcome.REFUSED})
"""The server may say no, and may not end the connection over it."""


@dataclass(eq=False)
class Attack:
    """One form in action: its connections and what it noticed."""

    context: AttackContext
    deadline: float
    # connections, in the order in which they were made; the first one is judged
    peers: list[Peer] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    details: str = ""  # what happened, for the report, where the form can say more than its connection
    undecided: bool = False  # the deadline came before a sound server would have acted

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    async def open(self, *, receive_buffer_bytes: int = 0) -> Peer:
        peer = self.context.peer()
        self.peers.append(peer)
        await peer.open(source=self.context.source, receive_buffer_bytes=receive_buffer_bytes)
        return peer

    async def shaken(self, **options: int) -> Peer:
        peer = await self.open(**options)
        await peer.handshake()
        return peer

    async def connected(self, **options: int) -> Peer:
        peer = await self.shaken(**options)
        await peer.connect()
        return peer

    async def publishing(self, name: str, **options: int) -> Peer:
        peer = await self.connected(**options)
        await peer.publish(name)
        return peer

    async def playing(self, name: str | None = None, **options: int) -> Peer:
        """Play `name` (None: the live stream), up to the request; does not wait for an answer."""
        peer = await self.connected(**options)
        await peer.play(self.context.stream if name is None else name)
        return peer

    def fault(self, text: str) -> None:
        """Note something that no sound server does; the expectation is not met then."""
        self.faults.append(text)

    async def watch(self, peer: Peer, seconds: float | None = None) -> bool:
        """Read what the server sends until it ends the connection; return whether it did."""
        seconds = self.context.watch_s if seconds is None else seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self.left_s)):
                await peer.read_to_end()
        return peer.ended is not None

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


Run = Callable[[Attack], Awaitable[None]]
Octets = bytes | Callable[[Attack, Peer], bytes]


@dataclass(frozen=True, slots=True)
class Script:
    """The steps of most forms: get to a state, send octets, and then others again and again."""

    come: Callable[[Attack], Awaitable[Peer]]
    octets: Octets = b""
    again: Octets = b""
    every_s: float = 0.0
    most_bytes: float = math.inf
    half_close: bool = False

    async def __call__(self, attack: Attack) -> None:
        peer = await self.come(attack)
        first, again = (item if isinstance(item, bytes) else item(attack, peer) for item in (self.octets, self.again))
        await peer.write(first)
        if self.half_close:
            peer.sock.shutdown(socket.SHUT_WR)
        while again and peer.sent_bytes < self.most_bytes:
            await peer.write(again)
            if self.every_s:
                await asyncio.sleep(self.every_s)
                peer.check_open()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackForm:
    """One way to carry out an attack."""

    name: str
    # does it; may end early or be cancelled at the deadline. Where it returns, its first connection is watched for a
    # few seconds, unless it has ended.
    run: Run
    allowed: frozenset[AttackOutcome] = ANY
    # a sound server with common settings acts within this time; an attack that is shorter and sees nothing cannot tell.
    # 0: at once.
    needs_s: float = 0.0
    reads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileProfile(Profile):
    """One attack, ready to be run; ``B01`` to ``B34``, ``W01`` to ``W08``, ``H01`` to ``H08``."""

    forms: tuple[AttackForm, ...]

    async def attack(self, context: AttackContext) -> AttackResult:
        """Attack, watch what the server does, see whether it lets a newcomer in, and judge.

        Ends by ``context.duration_s`` and `PROBE_S`. Connections are closed, also when cancelled.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        chosen = [form for form in self.forms if context.forms is None or form.name in context.forms]
        attacks = [Attack(context, began + context.duration_s) for _ in chosen]
        witness = Witness(context, over_http=self.over_http)
        try:
            await witness.enter()
            results = await asyncio.gather(
                *(_run(form, attack, began) for form, attack in zip(chosen, attacks, strict=True))
            )
            await witness.leave()
        finally:
            witness.close()
            for attack in attacks:
                attack.close()
        newcomer = await newcomer_gets_in(context, over_http=self.over_http) if context.probe else None
        verdict = _result(results, [peer for attack in attacks for peer in attack.peers], context, newcomer=newcomer)
        verdict.witness = witness.alone
        if witness.alone is False:
            verdict.met = False
            verdict.details = f"a connection beside it was ended without a word: did the server die? {verdict.details}"
        return verdict


def hostile(names: str, summary: str, explanation: str, *forms: AttackForm) -> HostileProfile:
    """Return a profile; `names` are its id and its readable name, and an id with an H attacks HTTP."""
    name, alias = names.split()
    allowed = frozenset[AttackOutcome]().union(*(form.allowed for form in forms))
    return HostileProfile(
        name=name,
        alias=alias,
        kind=PeerKind.HOSTILE,
        summary=summary,
        explanation=explanation,
        example=f"{name}:1",
        expectation=" or ".join(item.value for item in AttackOutcome if item in allowed),
        over_http=name.startswith("H"),
        forms=forms,
    )


async def _run(form: AttackForm, attack: Attack, began: float) -> FormResult:
    """Carry out one form, judge it, and close its connections, so that nothing later is counted for it.

    A form that is slow to learn of its end must not keep the others' connections, or they run into limits in time.
    """
    problem: Exception | None = None
    try:
        async with asyncio.timeout_at(attack.deadline):
            await form.run(attack)
            if attack.peers and form.reads and attack.peers[0].ended is None:
                await attack.watch(attack.peers[0])
    except (PeerGoneError, RefusedError, UnreachableError, RemoteProtocolError, TesterFailedError) as error:
        problem = error
    except TimeoutError:
        pass
    verdict = _judge(form, attack, problem, began)
    attack.close()
    return verdict


def _judge(form: AttackForm, attack: Attack, problem: Exception | None, began: float) -> FormResult:
    peer = attack.peers[0] if attack.peers else None
    outcome, end = AttackOutcome.CONTAINED, PeerEnd.RUN_ENDED
    details = attack.details
    if isinstance(problem, TesterFailedError):
        outcome, end = AttackOutcome.UNREACHABLE, PeerEnd.TESTER_FAILED
    elif peer is None or (isinstance(problem, UnreachableError) and not peer.opened):
        outcome, end = AttackOutcome.UNREACHABLE, PeerEnd.NOT_CONNECTED
    elif isinstance(problem, RemoteProtocolError):
        outcome, end = AttackOutcome.BROKEN, PeerEnd.ERROR
    elif peer.refusal is not None or (peer.ended is not None and peer.handshake_s is None and not peer.spoke):
        outcome, end = AttackOutcome.REFUSED, PeerEnd.REFUSED
    elif peer.ended is not None:
        outcome = AttackOutcome.CUT
        end = PeerEnd.SERVER_RESET if peer.ended == "reset" else PeerEnd.SERVER_CLOSED
    met: bool | None = outcome in form.allowed and not attack.faults
    seen_s = asyncio.get_running_loop().time() - began
    if (
        not attack.faults
        and outcome is AttackOutcome.CONTAINED
        and (attack.undecided or (not met and seen_s < form.needs_s))
    ):
        met = None
    if form.allowed == STAYS and isinstance(problem, UnreachableError) and outcome is AttackOutcome.CONTAINED:
        met = False  # it is still there, and does not answer any more
    if end is PeerEnd.TESTER_FAILED and not attack.faults:
        met = None
    last_words = peer.last_words if peer is not None else ""
    details = "; ".join(item for item in (*attack.faults, details, str(problem or ""), last_words) if item)
    return FormResult(
        form=form.name,
        outcome=outcome,
        met=met,
        details=details,
        code=peer.code if peer is not None else None,
        end=end,
    )


_WORST: Final = (
    AttackOutcome.BROKEN,
    AttackOutcome.UNREACHABLE,
    AttackOutcome.CONTAINED,
    AttackOutcome.REFUSED,
    AttackOutcome.CUT,
)
"""Outcomes from worst to best: among forms that are equally as expected, the worst outcome speaks for the attack."""


def _result(
    results: list[FormResult], peers: list[Peer], context: AttackContext, *, newcomer: bool | None
) -> AttackResult:
    """Put the forms together: the worst one speaks for all."""
    if not results:
        names = ", ".join(context.forms or ())
        return AttackResult(
            outcome=AttackOutcome.UNREACHABLE,
            met=None,
            details=f"no form of the name {names}",
            end=PeerEnd.NOT_CONNECTED,
        )
    rank = {False: 0, None: 1, True: 2}
    worst = min(results, key=lambda item: (rank[item.met], _WORST.index(item.outcome)))
    met, details = worst.met, worst.details
    if worst.form:
        details = f"{worst.form}: {details}" if details else worst.form
    if newcomer is False:
        met, details = False, f"no newcomer was let in within {PROBE_S:g} s afterwards; {details}"
    connected = [peer for peer in peers if peer.opened]
    return AttackResult(
        outcome=worst.outcome,
        met=met,
        details=details,
        end=worst.end,
        code=worst.code,
        cut=worst.outcome is AttackOutcome.CUT,
        connect_s=connected[0].connect_s if connected else None,
        handshake_s=next((peer.handshake_s for peer in connected if peer.handshake_s is not None), None),
        received_bytes=sum(peer.received_bytes for peer in peers),
        newcomer=newcomer,
        forms=results,
        notes="; ".join(context.notes),
    )
