"""What an attack is handed and what it says afterwards: plain values, no sockets."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Final

from flowctl.load.hostile.peer import Peer
from flowctl.load.results.result import PeerEnd

WATCH_S: Final = 3.0
"""As long as a server on a busy machine may need to act on what it has."""
_MOST_NOTES: Final = 32


class AttackOutcome(enum.Enum):
    """What a server did with an attacker.

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
    """What an attack is aimed at and bounded by."""

    host: str  # of the server; resolved and checked by the caller
    port: int
    app: str = "live"
    # name of a stream that is live, for attacks by readers. Publishing attacks use names of their own.
    stream: str = "stream"
    source: str | None = None  # own address to bind to. None: the system's choice.
    number: int = 0  # of the peer in the run; makes names of streams unique
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
        return Peer(self.host, self.port, app=self.app, rng=self.rng)

    def own_name(self, what: str) -> str:
        """Return a stream name that no other peer of the run uses."""
        return f"{self.stream.replace('/', '-')}-hostile-{self.number}-{what}"


@dataclass(slots=True, kw_only=True)
class FormResult:
    """What came of one form."""

    form: str
    outcome: AttackOutcome
    # whether a sound server may do that. None: the attack was too short to tell, or the tester failed.
    met: bool | None
    details: str = ""
    code: str | None = None  # error or final status code of the server
    end: PeerEnd = PeerEnd.RUN_ENDED  # how the form's first connection ended, in the words of the load tester
    after_s: float | None = None


@dataclass(slots=True, kw_only=True)
class AttackResult:
    """What came of an attack: that of the form that went worst, and all of them."""

    outcome: AttackOutcome
    # whether the server did what a sound one may do, in all forms, and let a newcomer in. None: too short to tell.
    met: bool | None
    details: str
    end: PeerEnd
    code: str | None = None  # error or final status code of the server
    cut: bool = False
    connect_s: float | None = None  # time for TCP to connect. None: it never did.
    handshake_s: float | None = None  # time of the RTMP handshake. None: it was not done.
    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0
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
