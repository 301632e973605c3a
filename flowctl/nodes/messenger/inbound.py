"""What a messenger is sent: each message handled once, then acknowledged.

Theory of operation. A message that arrives is first told from those that arrived before (`nodes.messenger.arrivals`).
Then, if it is new:

1. the message-specific callback that it names is called, which happens once;
2. the server-loop callback of the listener, or of the connection, is called; one to `ECHO` is sent back;
3. where there is a store, "seen" and the effects of the handlers become durable, together;
4. it is acknowledged: all of a turn of the loop together, to peers that understand that.

A handler that raises is reported, and its message counts as not received: the sender tries again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from flowctl.errors import RemoteProtocolError
from flowctl.nodes.messenger.arrivals import ArrivalVerdict, Arrived
from flowctl.nodes.messenger.delivery import Outgoing
from flowctl.nodes.messenger.message import Handler, Handlers, ReceivedMessage, To
from flowctl.nodes.messenger.outbound import EchoTicket, MessengerOutbound, ignore
from flowctl.nodes.messenger.peer import MessengerPeer
from flowctl.nodes.messenger.storefile import IDS, OLD, SEQUENCES, Done, Effect
from flowctl.nodes.messenger.wire import (
    ACK,
    ECHO,
    FIRST_CALLBACK,
    NOOP,
    Extension,
    Header,
    encode_ack,
    encode_acks,
    parse_message,
)
from flowctl.pollgroup import PollGroup

MAX_HANDLING: Final = 1024
"""Handlers' coroutines that run at a time; a message beyond them is not accepted, and comes again."""
MAX_HANDLING_BYTES: Final = 256 << 20
"""Octets of running handlers' messages. Of both, one peer gets no more than is left to all others: half, if alone."""
MAX_ECHO_BYTES: Final = 256 << 20
"""Octets of unacknowledged echoes, with `_ECHO_COST_BYTES` for each: a peer that asks for echoes and acknowledges none
must not keep the application from sending."""
_ECHO_COST_BYTES: Final = 1024
"""Memory that an echo takes beside its octets: it may have none."""
_MALFORMED_EVERY_S: Final = 1.0
"""Time between two reports of malformed input, which is always counted: a flood must not fill the log."""


@dataclass(eq=False)
class MessengerInbound:
    """Messages of all peers of a messenger; the group's thread only."""

    _messenger: object
    _group: Callable[[], PollGroup]
    _handlers: Handlers
    _outbound: MessengerOutbound
    _submit: Callable[[To, Outgoing], int]
    _ack_on_receipt: bool
    _max_message_bytes: int
    received_count: int = 0
    repeated_count: int = 0
    refused_count: int = 0
    malformed_count: int = 0
    _peers_to_acknowledge: list[MessengerPeer] = field(default_factory=list)
    _handling_bytes: int = 0
    _malformed_at: float = -_MALFORMED_EVERY_S

    def received(self, peer: MessengerPeer, frame: bytes, rest: list[bytes]) -> None:
        peer.unheard_since, peer.silences = None, 0
        try:
            header = parse_message(frame)
            if header.destination_callback == ACK:
                self._outbound.take_ack(peer, header)
            else:
                self._take_message(peer, header, rest)
        except RemoteProtocolError as error:
            self.note_malformed(error)

    def note_malformed(self, error: Exception) -> None:
        """Count what no peer should send; report it, but not each of a flood."""
        self.malformed_count += 1
        now = self._group().now()
        if now - self._malformed_at >= _MALFORMED_EVERY_S:
            self._malformed_at = now
            self._group().report(f"input of a messenger ({self.malformed_count} malformed so far)", error)

    def _take_message(self, peer: MessengerPeer, header: Header, rest: list[bytes]) -> None:
        size_bytes = len(header.body) + sum(map(len, rest))
        if size_bytes > self._max_message_bytes + 100:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes, the most are {self._max_message_bytes}")
        extension = Extension.decode(rest[0]) if rest else None
        if extension is not None and extension.incarnation != peer.announced:
            if peer.announcement() != extension.incarnation:
                extension = None  # payload that looks like it: the sender announced something else
            elif not self._outbound.meet(peer, extension.incarnation):
                self.refused_count += 1
                return
            else:
                self._outbound.note_announcement(peer, extension.incarnation)
        if extension is None:
            learned = self._outbound.learn_by_handshake(peer)
            if learned is None:
                self.refused_count += 1
                return
            incarnation = learned
        else:
            incarnation, rest = extension.incarnation, rest[1:]
        effects: list[Effect] | None = None if self._outbound.store is None or self._ack_on_receipt else []
        message = ReceivedMessage(
            header.message_id,
            header.source_callback,
            header.destination_callback,
            peer.route,
            header.body,
            tuple(rest),
            peer.to,
            effects,
        )
        arrived = Arrived(incarnation, header.message_id, extension, size_bytes, message)
        self._judge(peer, arrived)
        self._outbound.retry_peer(peer)

    def _judge(self, peer: MessengerPeer, arrived: Arrived) -> None:
        arrivals = peer.arrivals
        before = arrivals.incarnation, arrivals.floor
        taken_over = 0
        if arrived.incarnation != before[0]:
            taken_over = peer.earlier().get(before[0] or 0, 0)
        verdict = arrivals.arrive(arrived, taken_over)
        if self._outbound.store is not None and (arrivals.incarnation, arrivals.floor) != before:
            self._keep_floor(peer, before[0], taken_over)
        if verdict is ArrivalVerdict.HANDLE:
            self._handle(peer, arrived)
        elif verdict is ArrivalVerdict.SEEN:
            self.repeated_count += 1
            self._acknowledge(peer, arrived)
        elif verdict is not ArrivalVerdict.WAIT:
            self.refused_count += 1
        self._handle_released(peer)

    def _keep_floor(self, peer: MessengerPeer, incarnation: int | None, taken_over: int) -> None:
        """Have the store forget an earlier life of a peer, and close the gaps that will never be filled."""
        store, arrivals = self._outbound.store, peer.arrivals
        if store is None or not arrivals.incarnation:
            return
        if incarnation and incarnation != arrivals.incarnation and taken_over:
            store.take_over(peer.key, incarnation, arrivals.incarnation, taken_over)
        elif incarnation not in {None, arrivals.incarnation}:
            store.forget(SEQUENCES + peer.key, arrivals.incarnation)
            store.forget(IDS + peer.key, arrivals.incarnation)
            store.forget(OLD + peer.key, arrivals.incarnation)
        if arrivals.floor > 1 and arrivals.gap_closed():
            store.mark_run(SEQUENCES + peer.key, arrivals.incarnation, 0, arrivals.floor - 1, ignore)

    def _handle_released(self, peer: MessengerPeer) -> None:
        """Handle what waited for a message that was handled; what this releases in turn follows in the same loop."""
        if peer.releasing:
            return
        peer.releasing = True
        try:
            while released := peer.arrivals.take_released():
                for arrived in released:
                    self._handle(peer, arrived)
        finally:
            peer.releasing = False

    # --- handling ------------------------------------------------------------------------------------------------

    def _handle(self, peer: MessengerPeer, arrived: Arrived) -> None:
        number = arrived.item.destination_callback_id
        echo_bytes = self._outbound.echo_bytes + arrived.size_bytes
        echoes_too_much = number == ECHO and (peer.delivery.full(arrived.size_bytes) or echo_bytes > MAX_ECHO_BYTES)
        if echoes_too_much or self._handles_too_much(peer):
            self.refused_count += 1
            peer.arrivals.note_failed(arrived)
            return
        steps: deque[tuple[Handler, bool]] = deque()
        if number >= FIRST_CALLBACK:
            callback = self._outbound.take_callback(peer, number, arrived.extension)
            if callback is not None:
                steps.append((callback, False))
        if peer.endpoint.callback is not None:
            steps.append((peer.endpoint.callback, True))
        if number == ECHO:
            steps.append((partial(self._echo, peer), True))  # at last: if a handler fails, all of this comes again
        if self._ack_on_receipt:
            self._take_receipt(peer, arrived)
        self._run(peer, arrived, steps)

    def _handles_too_much(self, peer: MessengerPeer) -> bool:
        """Return whether too much is being handled, for all or for this peer."""
        return (
            peer.handling_count >= MAX_HANDLING - len(self._handlers.tasks)
            or peer.handling_bytes >= MAX_HANDLING_BYTES - self._handling_bytes
        )

    def _wait_for(
        self, peer: MessengerPeer, size_bytes: int, work: Coroutine[Any, Any, None], waits_for: Awaitable[object]
    ) -> None:
        """Run the rest of a message's handlers as a task, and count it while it runs."""
        peer.handling_count += 1
        peer.handling_bytes += size_bytes
        self._handling_bytes += size_bytes

        def ended(_: asyncio.Task[None]) -> None:
            peer.handling_count -= 1
            peer.handling_bytes -= size_bytes
            self._handling_bytes -= size_bytes

        self._handlers.spawn(work, waits_for).add_done_callback(ended)

    def _echo(self, peer: MessengerPeer, _: object, message: ReceivedMessage) -> None:
        answer = Outgoing(0, 0, message.source_callback_id, message.message, message.payload)
        if answer.destination_callback == ACK:
            answer.destination_callback = NOOP
        answer.ticket = EchoTicket(peer, answer.size_bytes + _ECHO_COST_BYTES)
        self._submit(message.sender, answer)
        self._outbound.echo_bytes += answer.size_bytes + _ECHO_COST_BYTES
        peer.echo_count += 1

    def _run(self, peer: MessengerPeer, arrived: Arrived, steps: deque[tuple[Handler, bool]]) -> None:
        """Call the handlers of a message one after the other; one that awaits goes on as a task."""
        while steps:
            handler, decides = steps.popleft()
            try:
                result = handler(self._messenger, arrived.item)
            except BaseException as error:  # noqa: BLE001  (a handler's fault is its message's)
                if self._handler_failed(peer, arrived, error, decides=decides):
                    return
                continue
            if inspect.isawaitable(result):
                work = self._go_on(peer, arrived, steps, result, decides=decides)
                self._wait_for(peer, arrived.size_bytes, work, result)
                return
        self.received_count += 1
        self._applied(peer, arrived)

    async def _go_on(
        self,
        peer: MessengerPeer,
        arrived: Arrived,
        steps: deque[tuple[Handler, bool]],
        result: Awaitable[object],
        *,
        decides: bool,
    ) -> None:
        try:
            await result
        except BaseException as error:  # noqa: BLE001  (the same)
            if self._handler_failed(peer, arrived, error, decides=decides):
                return
        self._run(peer, arrived, steps)

    def _handler_failed(self, peer: MessengerPeer, arrived: Arrived, error: BaseException, *, decides: bool) -> bool:
        """Report what a handler raised; True: the message counts as not received, unless that was acknowledged."""
        self._handlers.error_count += 1
        if not (isinstance(error, asyncio.CancelledError) and not self._outbound.is_running()):
            self._group().report("a handler of a messenger", error)
        if decides and self._ack_on_receipt:
            self._seen(peer, arrived)
        elif decides:
            peer.arrivals.note_failed(arrived)
        return decides

    # --- acknowledging -------------------------------------------------------------------------------------------

    def _applied(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """The handlers of a message have run: make that durable, then acknowledge it, unless both was done before."""
        if self._outbound.store is None or self._ack_on_receipt:
            self._seen(peer, arrived)
            return
        effects = arrived.item.effects

        def effect(connection: Any) -> None:
            for item in effects:
                item(connection)

        def marked(error: Exception | None) -> None:
            if error is None:
                self._seen(peer, arrived)
            else:
                self._handler_failed(peer, arrived, error, decides=True)

        if not self._mark(peer, arrived, marked, effect if effects else None):
            peer.arrivals.note_failed(arrived)

    def _take_receipt(self, peer: MessengerPeer, arrived: Arrived) -> None:
        """Acknowledge a message before its handlers run; it counts as handled, for those in order behind it, after."""

        def marked(error: Exception | None) -> None:
            if error is None:
                self._acknowledge(peer, arrived)
            else:
                self._group().report("the store of a messenger", error)

        if self._outbound.store is None:
            self._acknowledge(peer, arrived)
        else:
            self._mark(peer, arrived, marked)

    def _mark(self, peer: MessengerPeer, arrived: Arrived, marked: Done, effect: Effect | None = None) -> bool:
        """Have the store note a message; False: its number cannot be stored, so it is not ours."""
        store = self._outbound.store
        if store is None or arrived.number >> 63 or not self._outbound.is_running():
            return False
        prefix = IDS if arrived.extension is None else SEQUENCES
        store.mark(prefix + peer.key, arrived.incarnation, arrived.number, marked, effect)
        return True

    def _seen(self, peer: MessengerPeer, arrived: Arrived) -> None:
        old_below = peer.arrivals.old_below
        if peer.arrivals.note_handled(arrived):
            if not self._ack_on_receipt:
                self._acknowledge(peer, arrived)
            if self._outbound.store is not None and peer.arrivals.old_below > old_below:
                for prefix in (IDS, OLD):  # one row in place of many, and what it stands for
                    self._outbound.store.mark_run(
                        prefix + peer.key, arrived.incarnation, 0, peer.arrivals.old_below - 1, ignore
                    )
        self._handle_released(peer)

    def _acknowledge(self, peer: MessengerPeer, arrived: Arrived) -> None:
        if not peer.acks:
            if not self._peers_to_acknowledge:
                self._group().call_soon(self.flush_acks)
            self._peers_to_acknowledge.append(peer)
        peer.acks.append((arrived.incarnation, arrived.message_id))

    def flush_acks(self) -> None:
        """Send the acknowledgements of a turn; what does not get through is asked for again by its sender."""
        peers, self._peers_to_acknowledge = self._peers_to_acknowledge, []
        for peer in peers:
            acks, peer.acks = peer.acks, []
            incarnation = peer.arrivals.incarnation
            # If its sender has begun a new life meanwhile, there the same id is of another message.
            ids = [number for life, number in acks if life == incarnation]
            frames = encode_acks(incarnation, ids) if incarnation else [encode_ack(number) for number in ids]
            for frame in frames:
                peer.send([frame])
