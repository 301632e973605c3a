"""Who stands beside an attack: the witness, which must not be disturbed, and the newcomer, who must be let in after."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from flowctl.errors import RemoteProtocolError
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError, UnreachableError
from flowctl.load.hostile.types import AttackContext
from flowctl.load.peers.ownfault import TesterFailedError

PROBE_S: Final = 5.0
"""How long a newcomer tries to get in after an attack: servers refuse an address that has just come too often."""
_PROBE_PAUSE_S: Final = 0.25
_WITNESS_S: Final = 1.0
_WITNESS_LOOK_S: Final = 0.1
_FAILURES: Final = (PeerGoneError, UnreachableError, RemoteProtocolError, TimeoutError, TesterFailedError)
"""What keeps a connection from getting in."""


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
        if not self.context.probe or not await self._come():
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

    async def _come(self) -> bool:
        peer = self._peer = self.context.peer()
        with contextlib.suppress(RefusedError, *_FAILURES):
            async with asyncio.timeout(_WITNESS_S):
                await _get_in(peer, self.context, over_http=self.over_http)
                return True
        return False

    async def _stay(self) -> None:
        """Stay until the server ends the connection without a word, or cannot be reached any more."""
        while self._peer is not None:
            with contextlib.suppress(TimeoutError, RemoteProtocolError):
                async with asyncio.timeout(_WITNESS_S):
                    await self._peer.read_to_end()
            if self._peer.ended is not None and not self._peer.last_words:
                self.alone = False
                return
            self._peer.close()
            if not await self._come():
                return  # turned away, as the attacker may be: that is no disturbance, and the newcomer comes later


async def _get_in(peer: Peer, context: AttackContext, *, over_http: bool) -> None:
    """Get as far as having connect accepted, or over HTTP a request answered, whatever the answer."""
    await peer.open(source=context.source)
    if over_http:
        await peer.write(f"GET /flowctl HTTP/1.1\r\nHost: {context.host}\r\n\r\n".encode())
        await peer.read()
        return
    await peer.handshake()
    await peer.connect()


async def newcomer_gets_in(context: AttackContext, *, over_http: bool) -> bool | None:
    """Return whether a new connection gets in as far as anybody does. None: we could not even try."""
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
