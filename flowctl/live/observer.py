"""Observers of live sessions: records are one, and a server may have several."""

from __future__ import annotations

from collections.abc import Mapping

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry
from flowctl.live.access.request import LiveRequest, RequestKind
from flowctl.reasons import CloseReason


class Observer:
    """Told what happens to the live sessions of a server; it decides nothing, and here it does nothing.

    Each method is called on the connection's thread. `closed` is the last call for a connection, and may be the only
    one: a connection may end before its thread has seen it.
    """

    #: whether it hears of the end of each stray connection (`flowctl.live.strays`), and not of the first of many alone
    hears_of_strays = True

    def opened(self, connection: Connection) -> None:
        """Note a new connection."""

    def greeted(self, connection: Connection, now: float, *, style: str) -> None:
        """The handshake of its protocol is over."""

    def connected(self, connection: Connection, now: float, *, agent: str, app_named: bool) -> None:
        """It asks to be let into an application; `app_named`: it has said into which."""

    def asked(self, connection: Connection, kind: RequestKind, stream: str, now: float) -> None:
        """It asks to publish or to play `stream`; before that is answered."""

    def command(self, connection: Connection, name: str, detail: Mapping[str, str], now: float) -> None:
        """It has said something else that is recorded; before that is answered."""

    def login_failed(self, connection: Connection, now: float) -> None:
        """It has given a wrong password."""

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        """It publishes `stream`, or stands by for it."""

    def set_published(self, connection: Connection, stream: str) -> None:
        """What it publishes is the first rendition of a set, which is published as `stream`. Any thread."""

    def play_started(self, connection: Connection, stream: str, now: float) -> None:
        """It is given media of `stream` from now on; again after each wait for a publisher."""

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        """The connection exceeded `limit`; None: the figure, or the limit itself, is not known."""

    def denied(self, connection: Connection, request: LiveRequest, now: float, *, guess: bool) -> None:
        """The request of the connection was denied."""

    def ledger_entry(self, connection: Connection, entry: LedgerEntry) -> None:
        """Note what its Sender did."""

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        """Note the end, and the limit that brought it about, if one did."""
