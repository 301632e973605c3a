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
    """What an attack is aimed at and bounded by.

    Args:
        host: of the server; resolved and checked by the caller.
        stream: name of a stream that is live, for attacks by readers. Publishing attacks use names of their own.
        source: own address to bind to. None: the system's choice.
        number: of the peer in the run; makes names of streams unique.
        watch_s: how long a form whose octets are out is watched for what the server does; a sound one acts at once,
            or never.
        probe: whether there is a witness, and a newcomer who tries to get in at the end.
    """

    host: str
    port: int
    app: str = "live"
    stream: str = "stream"
    source: str | None = None
    number: int = 0
    duration_s: float = 10.0
    rng: random.Random = field(default_factory=random.Random)
    forms: tuple[str, ...] | None = None
    watch_s: float = WATCH_S
    probe: bool = True
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep `text` for the report; only the first few."""
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(text)

    def peer(self) -> Peer:
        """Return a connection that is not made yet."""
        return Peer(self.host, self.port, app=self.app, rng=self.rng)

    def own_name(self, what: str) -> str:
        """Return a stream name that no other peer of the run uses."""
        return f"{self.stream.replace('/', '-')}-hostile-{self.number}-{what}"


@dataclass(slots=True, kw_only=True)
class FormResult:
    """What came of one form.

    Args:
        met: whether a sound server may do that. None: the attack was too short to tell, or the tester failed.
        code: error or final status code of the server.
        end: how the form's first connection ended, in the words of the load tester.
    """

    form: str
    outcome: AttackOutcome
    met: bool | None
    details: str = ""
    code: str | None = None
    end: PeerEnd = PeerEnd.RUN_ENDED
    after_s: float | None = None


@dataclass(slots=True, kw_only=True)
class AttackResult:
    """What came of an attack: that of the form that went worst, and all of them.

    Args:
        met: whether the server did what a sound one may do, in all forms, and let a newcomer in. None: too short to
            tell.
        code: error or final status code of the server.
        connect_s: time for TCP to connect. None: it never did.
        handshake_s: time of the RTMP handshake. None: it was not done.
        newcomer: whether a newcomer got in afterwards. None: not tried.
    """

    outcome: AttackOutcome
    met: bool | None
    details: str
    end: PeerEnd
    code: str | None = None
    cut: bool = False
    connect_s: float | None = None
    handshake_s: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0
    newcomer: bool | None = None
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
