"""The names that the publishers of one worker have claimed, and what the directory decided about them.

What the hub of a worker asks before a publish begins (`flowctl.live.hub.NameAuthority`). No thread waits: the answer
comes as a message. A claim is given back when it is not wanted any more, answered or not. A publish whose answer does
not come in time is refused, for two that publish under one name in two workers would each have half of the viewers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import BusyError
from flowctl.live.cluster.names.desk import Values
from flowctl.live.cluster.names.directory import NoticeKind
from flowctl.live.hub import Hub, Right
from flowctl.live.namebook import ClaimVerdict, Owner

_RIGHTS: Final = {ClaimVerdict.GRANTED.value: Right.GRANTED, ClaimVerdict.STANDS_BY.value: Right.STANDS_BY}
_TAKEN: Final = "Another publisher has taken the stream."


class NameClaim:
    """A claim of one connection."""

    __slots__ = ("_claims", "answer", "claim", "entered_as", "name", "number", "revoked", "right")

    def __init__(
        self, claims: NameClaims, name: str, number: int, claim: int, answer: Callable[[str | None], None]
    ) -> None:
        self._claims = claims
        self.name = name
        self.number = number
        self.claim = claim
        self.answer = answer
        self.right: Right | None = None  #: the decision. None: not yet.
        self.revoked = False  #: another publisher has the name now
        self.entered_as: Right | None = None  #: the right with which it is entered in the hub. None: it is not.

    def cancel(self) -> None:
        """Give the name back, or want it no more. Any thread."""
        self._claims.give_back(self, grace=False)


class NameClaims:
    """The claims of one worker's publishers. Any thread."""

    def __init__(self, hub: Hub, send: Callable[[Values], None]) -> None:
        self._hub: Final = hub
        self._send: Final = send
        self._ids: Final = itertools.count(1)
        self._lock: Final = OwnedLock()
        self._claims: dict[tuple[str, int], NameClaim] = {}  # by name and connection; guarded by _lock

    # -- what the hub asks

    def claim(self, name: str, number: int, owner: Owner, answer: Callable[[str | None], None]) -> NameClaim:
        claim = NameClaim(self, name, number, next(self._ids), answer)
        with self._lock:
            known = self._claims.setdefault((name, number), claim) is not claim
        if known:
            answer(f"this connection publishes stream {name} already")
            return claim
        asked = {"ask": "claim", "name": name, "claim": claim.claim, "number": number}
        self._send(asked | {"address": owner.address, "user": owner.user, "key": owner.key.hex()})
        return claim

    def right(self, name: str, number: int) -> Right:
        """Return the decision, and note that it is being carried out."""
        with self._lock:
            claim = self._claims.get((name, number))
            if claim is None or claim.right is None or claim.revoked:
                raise BusyError(_TAKEN)
            claim.entered_as = claim.right
            return claim.right

    def entered(self, name: str, number: int) -> None:
        with self._lock:
            claim = self._claims.get((name, number))
        if claim is not None and claim.revoked:
            self._hub.revoke(name, number)
        elif claim is not None and claim.right is not claim.entered_as:
            self._hub.promote(name, number)

    def left(self, name: str, number: int, *, grace: bool) -> None:
        with self._lock:
            claim = self._claims.get((name, number))
        if claim is not None:
            self.give_back(claim, grace=grace)

    def give_back(self, claim: NameClaim, *, grace: bool) -> None:
        with self._lock:
            if self._claims.get((claim.name, claim.number)) is not claim:
                return
            del self._claims[claim.name, claim.number]
        released = {"ask": "release", "name": claim.name, "claim": claim.claim, "number": claim.number, "grace": grace}
        self._send(released)

    # -- what the desk tells

    def handle_notice(self, values: Values) -> None:
        name = values["name"]
        match values["tell"]:
            case "claim":
                self._decided(values)
            case "silent?":
                answer = {"ask": "silent", "name": name, "claim": values["claim"], "worker": values["worker"]}
                self._send(answer | {"silent": self._hub.silent(name)})
            case NoticeKind.TURN.value:
                self._change(name, values["value"], revoked=False)
            case NoticeKind.REVOKED.value:
                self._change(name, values["value"], revoked=True)

    def _decided(self, values: Values) -> None:
        with self._lock:
            matching = (item for item in self._claims.values() if item.claim == values["claim"])
            claim = next(matching, None)
            if claim is None:
                return  # given back meanwhile
            claim.right = _RIGHTS.get(values["verdict"])
            if claim.right is None:
                del self._claims[claim.name, claim.number]
        if values["limit"]:
            self._hub.limit_hit(values["limit"])
        claim.answer(values["why"] or None if claim.right is None else None)

    def _change(self, name: str, number: int, *, revoked: bool) -> None:
        with self._lock:
            claim = self._claims.get((name, number))
            if claim is None:
                return
            if revoked:
                claim.revoked = True
            else:
                claim.right = Right.GRANTED
            entered = claim.entered_as is not None
        if entered and revoked:
            self._hub.revoke(name, number)
        elif entered:
            self._hub.promote(name, number)
