"""What a messenger sends: numbers, credit and tries, until each has its outcome, and each callback its response.

Theory of operation. What is to be sent is under one lock, so that any thread may send: it takes its number and its
credit at once, and waits for the group's thread, which sends in rounds (`pump`). Nothing of the user's, no socket and
no store is touched under the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from secrets import randbits
from typing import Final, TypeVar

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.pending import Outcome, Pending
from flowctl.core.text.printable import short
from flowctl.errors import BusyError, ClosedError
from flowctl.nodes.messenger.delivery import Delivery, DeliverySettings, Outgoing, decode_record, encode_record
from flowctl.nodes.messenger.message import Failure, Handler, Handlers
from flowctl.nodes.messenger.peer import MessengerPeer, MessengerSocket
from flowctl.nodes.messenger.store import MessageStore
from flowctl.nodes.messenger.storefile import ANNOUNCES, Effect, StoredMessage
from flowctl.nodes.messenger.wire import (
    FIRST_CALLBACK,
    MAX_ID,
    Extension,
    Header,
    Life,
    encode_message,
    encode_taken_over,
    parse_acks,
)
from flowctl.pollgroup import PollGroup
from flowctl.wire.zmtp.identity import DUPLICATE_HINT, DuplicateLog

_log: Final = logging.getLogger("flowctl.messenger")

MAX_CALLBACKS: Final = 65_536
"""Message-specific callbacks that may wait for their response at a time."""
CALLBACK_S: Final = 3600.0
"""Time after which a callback without a deadline of its own, and without a response, is given up."""
MAX_PENDING_BYTES: Final = 1 << 30
"""Octets of unacknowledged messages to all peers together."""
_MESSAGES_PER_BATCH: Final = 64
"""Messages that are sent each time the lock is taken."""
_BATCHES_PER_TURN: Final = 16
"""Batches to one peer before the other peers get their turn."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket:
    on_ack: Handler | None
    on_failure: Handler | None
    callback_id: int = 0


@dataclass(slots=True, eq=False)
class EchoTicket:
    """Marks a message that a peer has asked for itself."""

    peer: MessengerPeer
    cost_bytes: int


@dataclass(slots=True, eq=False)
class WaitingCallback:
    """A message-specific callback that waits for its response."""

    peer: MessengerPeer
    message: Outgoing
    callback: Handler
    on_failure: Handler | None


class MessengerOutbound:
    """Messages to all peers of a messenger; the group's thread only, unless a method says otherwise."""

    def __init__(
        self,
        lock: OwnedLock,
        group: Callable[[], PollGroup],
        handlers: Handlers,
        *,
        settings: DeliverySettings,
        rng: Random,
        dead_letter: Handler | None,
        send_state_changed: Handler | None,
    ) -> None:
        self._group: Final = group
        self._handlers: Final = handlers
        self._settings: Final = settings
        self._rng: Final = rng
        self._dead_letter: Final = dead_letter
        self._send_state_changed: Final = send_state_changed
        self.store: MessageStore | None = None  #: None: messages do not outlive the process
        self.life = Life(randbits(62) + 1)  #: this one, also by its store
        self._lock: Final = lock
        self._room: Final = threading.Condition(self._lock)  # type: ignore[arg-type]  # it is an RLock
        self._room_waits: list[Future[None]] = []  # guarded by _lock
        self._delivering: set[Future[int]] = set()  # guarded by _lock
        self._running = False  # guarded by _lock
        self._next_id = 0  # guarded by _lock
        self._next_callback = FIRST_CALLBACK  # guarded by _lock
        self._callbacks: Pending[int, WaitingCallback] = Pending()  # guarded by _lock
        self._pending_bytes = 0  # guarded by _lock
        self._to_send: list[MessengerPeer] = []  # guarded by _lock
        self._to_keep: deque[tuple[MessengerPeer, Outgoing, Effect | None]] = deque()  # guarded by _lock
        self._pump_queued = False  # guarded by _lock
        self._callbacks_timer_at: float | None = None
        self.echo_bytes = 0  #: octets of echoes that are unacknowledged, with what each costs beside its own
        self.sent_count = self.acknowledged_count = self.given_up_count = self.late_count = 0
        self.duplicates: Final = DuplicateLog()

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let messages be sent; those of an earlier life are handed over by `restore_locked`."""
        with self._lock:
            if self.store is not None:
                self.life = self.store.life
                self._next_id = self.store.next_message_id()
                # Callbacks do not outlive the process: responses to those of an earlier life must not meet ours.
                self._next_callback = (randbits(31) << 32) + FIRST_CALLBACK
            self._running = True

    def stop(self) -> None:
        """Accept no message any more, and write those that were accepted into the store."""
        with self._lock:
            self._running = False
            self._room.notify_all()
            to_keep, self._to_keep = self._to_keep, deque()
        for peer, message, effect in to_keep:  # sent a moment ago: that was a promise
            self.persist(peer, message, effect)

    def end_waiting(self) -> None:
        """Tell waiting callers that nothing more comes; call it after all peers have been withdrawn."""
        self._group().deadlines.remove(self)
        with self._lock:
            waiting = self._callbacks.take_all()
        for _, item in waiting:
            failure = Failure(item.message.message_id, item.peer.to, Outcome.SHUTDOWN, item.message.settled)
            self._tell_failure(item.on_failure, failure)
        self._tell_room()
        with self._lock:
            kept, self._delivering = self._delivering, set()
        for future in kept:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the messenger was stopped; its store has the message still"))

    def new_delivery_locked(self, now: float) -> Delivery:
        """Return the delivery to a peer that was not known."""
        self._lock.assert_owned()
        # More than any number that a message to this peer has had, also if it was known before and forgotten.
        return Delivery(self._settings, self._rng, now, self._next_id + 1, durable=self.store is not None)

    def restore_locked(self, peer: MessengerPeer, stored: Sequence[StoredMessage], now: float) -> None:
        """Go on with the messages that an earlier life had for a peer."""
        self._lock.assert_owned()
        for entry in stored:
            message, after, deadline_at = decode_record(entry.message_id, entry.record)
            if deadline_at is not None:
                message.deadline = now + max(0.0, deadline_at - time.time())
            peer.delivery.restore(message, entry.sequence, after, now)
            self._pending_bytes += message.size_bytes

    def close_callbacks(self, endpoint: MessengerSocket) -> None:
        """Give up the callbacks of a connection that was closed: those whose message is acknowledged."""
        with self._lock:  # the others have just had their outcome
            waiting = self._callbacks.take_where(lambda _, item: item.peer.endpoint is endpoint)
        for _, item in waiting:
            self._report_unanswered(item, Outcome.WITHDRAWN)

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(
        self,
        peer: MessengerPeer,
        message: Outgoing,
        callback: Handler | None = None,
        deadline: float | None = None,
        wait_s: float | None = None,
        effect: Effect | None = None,
    ) -> int:
        group = self._group()
        with self._lock:
            if wait_s is not None:
                self._room.wait_for(lambda: not self._is_full_locked(peer, message), wait_s)
            self.check_running_locked()
            now = group.now()
            if self._pending_bytes + message.size_bytes > MAX_PENDING_BYTES:
                raise BusyError(f"{self._pending_bytes} bytes are unacknowledged, the most are {MAX_PENDING_BYTES}")
            if callback is not None and len(self._callbacks) >= MAX_CALLBACKS:
                raise BusyError(f"{MAX_CALLBACKS} callbacks wait for their response")
            message.message_id = self._next_id
            message.target = peer.announced
            if deadline is not None:
                message.deadline = now + deadline
            peer.delivery.submit(message, now)
            self._next_id = (self._next_id + 1) & MAX_ID
            self._pending_bytes += message.size_bytes
            if callback is not None:
                self._register_locked(peer, message, callback, now + (CALLBACK_S if deadline is None else deadline))
            if self.store is not None:
                self._to_keep.append((peer, message, effect))
            wake = self.queue_locked(peer)
        if wake:
            group.call_soon(self.pump)
        return message.message_id

    def wait_for_room(self) -> Future[None]:
        """Return a future that is done once there may be room for a message."""
        room: Future[None] = Future()
        with self._lock:
            self._room_waits.append(room)
        return room

    def forget_room(self, room: Future[None]) -> None:
        with self._lock:
            if room in self._room_waits:
                self._room_waits.remove(room)

    def note_delivering(self, done: Future[int], *, begins: bool) -> None:
        """Note that a caller waits for an acknowledgement, or that it waits no more."""
        with self._lock:
            (self._delivering.add if begins else self._delivering.discard)(done)

    @property
    def incarnation(self) -> int:
        return self.life.incarnation

    @property
    def callback_count(self) -> int:
        with self._lock:
            return len(self._callbacks)

    def is_running(self) -> bool:
        with self._lock:
            return self._running

    def check_running(self) -> None:
        with self._lock:
            self.check_running_locked()

    def check_running_locked(self) -> None:
        self._lock.assert_owned()
        if not self._running:
            self._group()
            raise ClosedError("the messenger was stopped")

    def _is_full_locked(self, peer: MessengerPeer, message: Outgoing) -> bool:
        self._lock.assert_owned()
        return self._running and peer.delivery.full(message.size_bytes)

    def _register_locked(self, peer: MessengerPeer, message: Outgoing, callback: Handler, due: float) -> None:
        """Enter a message-specific callback under the next free id."""
        self._lock.assert_owned()
        number = self._next_callback
        while number in self._callbacks:
            number = FIRST_CALLBACK if number == MAX_ID else number + 1
        self._next_callback = FIRST_CALLBACK if number == MAX_ID else number + 1
        message.source_callback = number
        ticket = message.ticket
        on_failure = None
        if isinstance(ticket, Ticket):
            ticket.callback_id, on_failure = number, ticket.on_failure
        self._callbacks.add(number, WaitingCallback(peer, message, callback, on_failure), due)

    def queue_locked(self, peer: MessengerPeer) -> bool:
        """Have something sent to `peer` soon; True: the pump is to be called."""
        self._lock.assert_owned()
        if not peer.queued:
            peer.queued = True
            self._to_send.append(peer)
        queued, self._pump_queued = self._pump_queued, True
        return not queued

    def wake(self, peer: MessengerPeer) -> None:
        """Have something sent to `peer` soon."""
        with self._lock:
            wake = self.queue_locked(peer)
        if wake:
            self._group().call_soon(self.pump)

    # --- sending -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        with self._lock:
            self._pump_queued = False
            if not self._running:
                return
            peers, self._to_send = self._to_send, []
            for peer in peers:
                peer.queued = False
            to_keep, self._to_keep = self._to_keep, deque()
            callbacks_due = self._callbacks.next_deadline()
        for peer, message, effect in to_keep:
            self.persist(peer, message, effect)
        for peer in peers:
            self._send_to(peer)
        if callbacks_due is not None and (self._callbacks_timer_at is None or callbacks_due < self._callbacks_timer_at):
            self._callbacks_timer_at = callbacks_due
            self._group().deadlines.set(self, callbacks_due)

    def persist(self, peer: MessengerPeer, message: Outgoing, effect: Effect | None, *, again: bool = False) -> None:
        """Put a message into the outbox, and let it go once it is there; `again`: it is, and may go in any case."""
        store = self.store
        if store is None:
            return
        deadline_at = None
        if message.deadline is not None:
            deadline_at = time.time() + message.deadline - self._group().now()

        def kept(error: Exception | None) -> None:
            if error is not None and not again:
                self._group().report("the outbox of a messenger", error)
                self._give_up(peer, message, Outcome.REJECTED)
                return
            with self._lock:
                peer.delivery.release(message)
            self.wake(peer)

        record = encode_record(message, deadline_at)
        store.add(message.message_id, peer.key, message.sequence, record, kept, effect)

    def _send_to(self, peer: MessengerPeer) -> None:
        now = self._group().now()
        delivery, reachable = peer.delivery, True
        for _ in range(_BATCHES_PER_TURN):
            with self._lock:
                batch = delivery.take_ready(now, _MESSAGES_PER_BATCH)
                floor, decided = delivery.floor, delivery.take_decided()
            for message in decided:
                self.persist(peer, message, None, again=True)
            if not batch:
                break
            count = self._hand_over(peer, batch, floor) if reachable else 0
            self.sent_count += count
            if count and peer.unheard_since is None:
                peer.unheard_since = now
            full = count < len(batch) and reachable and peer.link is not None
            with self._lock:
                delivery.note_taken(batch[:count], now)
                if full:
                    delivery.put_back(batch[count:], now)
                elif count < len(batch):
                    reachable = False
                    delivery.note_refused(batch[count:], now)
            if full:
                self._await_room(peer)
                break
        else:
            self.wake(peer)
        self._look_after(peer)

    def _hand_over(self, peer: MessengerPeer, batch: Sequence[Outgoing], floor: int) -> int:
        """Send messages until one is refused; return how many were taken."""
        send, incarnation = peer.send, self.incarnation
        for index, message in enumerate(batch):
            frame = encode_message(
                message.message_id, message.source_callback, message.destination_callback, message.body
            )
            if not message.plain:
                extension = Extension(incarnation, message.sequence, floor, message.after, message.target)
                frames = [frame, extension.encode(), *message.payload]
            else:
                frames = [frame, *message.payload]
            if not send(frames):  # no connection, or too much waits for it
                return index
        return len(batch)

    def _await_room(self, peer: MessengerPeer) -> None:
        """Go on sending once all that waits in its connection is on its way, or the next connection is there."""
        link = peer.link
        if link is None or peer.awaited is link:
            return
        peer.awaited = link

        def go_on() -> None:
            if peer.awaited is link:
                peer.awaited = None
            self.wake(peer)

        link.when_drained(lambda _: self._group().call_soon(go_on))

    def _look_after(self, peer: MessengerPeer) -> None:
        """Set the time of the next attempt, and announce what became of the state."""
        with self._lock:
            due = peer.delivery.next_deadline()
            edges = peer.delivery.take_edges()
        if due is not None and (peer.timer_at is None or due < peer.timer_at):
            peer.timer_at = due
            self._group().deadlines.set(peer, due)
        handler = self._send_state_changed
        for edge in edges if handler is not None else ():
            self._handlers.call("send_state_changed", handler or ignore, peer.to, edge)

    def peer_due(self, peer: MessengerPeer, now: float) -> None:
        """Try again what is due, and give up what has no more time or attempts; called by the peer's timer."""
        link = peer.link
        with self._lock:
            given_up = peer.delivery.take_due(now, held=link is not None and not link.drained)
        if peer.is_too_silent(now):
            peer.endpoint.hang_up()
        for message, outcome in given_up:
            self._report_given_up(peer, message, outcome)
        self._send_to(peer)

    def deadline_due(self, now: float) -> None:
        """Give up callbacks that waited too long for their response; called by the messenger's timer."""
        self._callbacks_timer_at = None
        with self._lock:
            due = self._callbacks.take_due(now)
            next_due = self._callbacks.next_deadline()
        for _, item in due:
            with self._lock:
                withdrawn = item.peer.delivery.withdraw(item.message, now)
            if withdrawn:
                self._report_given_up(item.peer, item.message, Outcome.TIMEOUT)
            else:
                self._report_unanswered(item, Outcome.TIMEOUT)
        if next_due is not None:
            self._callbacks_timer_at = next_due
            self._group().deadlines.set(self, next_due)

    # --- outcomes ------------------------------------------------------------------------------------------------

    def take_ack(self, peer: MessengerPeer, header: Header) -> None:
        now = self._group().now()
        if self.learn_by_handshake(peer) is None:
            return
        if header.body == encode_taken_over(self.incarnation)[6:]:
            self._taken_over(peer)
            return
        ranges = parse_acks(header, self.incarnation)
        with self._lock:
            messages = peer.delivery.note_acknowledged_ranges(ranges, now)
        self._settled(peer, messages)

    def _settled(self, peer: MessengerPeer, messages: list[Outgoing]) -> None:
        self.acknowledged_count += len(messages)
        self._free_room(messages)
        for message in messages:
            ticket = message.ticket
            if isinstance(ticket, Ticket) and ticket.on_ack is not None:
                self._handlers.call("an acknowledgement handler", ticket.on_ack, message.message_id)
        if peer.delivery.ready:
            self.wake(peer)
        if peer.delivery.edges:
            self._look_after(peer)
        self.retry_peer(peer)

    def take_callback(self, peer: MessengerPeer, number: int, extension: Extension | None) -> Handler | None:
        """Return the callback of a response, once. None: it is unknown, or of another peer."""
        with self._lock:
            item = self._callbacks.get(number)
            foreign = item is not None and item.peer.to != peer.to
            if item is None or foreign or (extension and extension.target not in {0, self.incarnation}):
                self.late_count += 1
                return None
            self._callbacks.take(number)
            messages = []
            if not item.message.settled:  # the response says what an acknowledgement would
                number = item.message.message_id
                messages = peer.delivery.note_acknowledged(number, number, self._group().now())
        self._settled(peer, messages)
        self._tell_room()
        return item.callback

    def _report_unanswered(self, item: WaitingCallback, outcome: Outcome) -> None:
        """Report a message that was acknowledged, and whose callback gets no response any more."""
        self.given_up_count += 1
        self._tell_failure(item.on_failure, Failure(item.message.message_id, item.peer.to, outcome, True))
        self._tell_room()

    def _give_up(self, peer: MessengerPeer, message: Outgoing, outcome: Outcome) -> None:
        with self._lock:
            withdrawn = peer.delivery.withdraw(message, self._group().now())
        if withdrawn:
            self._report_given_up(peer, message, outcome)

    def withdraw_all(self, peer: MessengerPeer, outcome: Outcome) -> None:
        with self._lock:
            messages = list(peer.delivery)
        if outcome is Outcome.SHUTDOWN and self.store is not None:
            return  # the store has them
        for message in messages:
            self._give_up(peer, message, outcome)

    def _report_given_up(self, peer: MessengerPeer, message: Outgoing, outcome: Outcome) -> None:
        """Report a message that has left the delivery without an acknowledgement."""
        self.given_up_count += 1
        self._free_room([message])
        failure = Failure(message.message_id, peer.to, outcome, False, message.body, message.payload)
        ticket = message.ticket
        if isinstance(ticket, Ticket):
            if ticket.callback_id:
                with self._lock:
                    if ticket.callback_id in self._callbacks:
                        self._callbacks.take(ticket.callback_id)
            self._tell_failure(ticket.on_failure, failure)
        if outcome is not Outcome.SHUTDOWN:
            self._tell_failure(self._dead_letter, failure)

    def _tell_failure(self, handler: Handler | None, failure: Failure) -> None:
        if handler is not None:
            self._handlers.call("a failure handler", handler, failure)

    def _free_room(self, messages: Sequence[Outgoing]) -> None:
        """Free the room of messages that have their outcome."""
        size_bytes, store = 0, self.store
        for message in messages:
            size_bytes += message.size_bytes
            if store is not None:
                store.remove(message.message_id)
            if isinstance(message.ticket, EchoTicket):
                self.echo_bytes -= message.ticket.cost_bytes
                message.ticket.peer.echo_count -= 1
        with self._lock:
            self._pending_bytes -= size_bytes
        self._tell_room()

    def _tell_room(self) -> None:
        with self._lock:
            self._room.notify_all()
            rooms, self._room_waits = self._room_waits, []
        for room in rooms:
            settle(room, None)

    # --- what peers show -----------------------------------------------------------------------------------------

    def retry_peer(self, peer: MessengerPeer) -> None:
        """Send again what was refused, for the peer shows life."""
        with self._lock:
            ready = peer.delivery.retry_refused() and self.queue_locked(peer)
        if ready:
            self._group().call_soon(self.pump)

    def learn_by_handshake(self, peer: MessengerPeer, *, connects: bool = False) -> int | None:
        """Look at what the peer announced when it connected; return its incarnation, 0: it announced none.

        None: it is not heard any more. `connects`: it is known that this is the first message of its connection.
        """
        incarnation = peer.announcement()
        if (connects or incarnation != peer.announced) and not self.meet(peer, incarnation):
            return None
        if incarnation != peer.announced or peer.delivery.announced is None:
            self.note_announcement(peer, incarnation)
        return incarnation

    def meet(self, peer: MessengerPeer, incarnation: int) -> bool:
        """Note who has the peer's identity; False: another one has, and the sender of the present message is told."""
        endpoint, line = peer.endpoint, peer.link
        if peer.holder.came(incarnation, line):
            return True
        if peer.holder.note_return(line):
            peer.holder.bring_back()
            come = f"come as {short(peer.route)} to" if endpoint.is_router else "answer in turn at"
            if told := self.duplicates.note(peer.holder, self._group().now()):
                _log.warning("two messengers %s %s: %s; hint: %s", come, endpoint.address, told, DUPLICATE_HINT)
            if endpoint.is_router:
                peer.send([encode_taken_over(incarnation)])
        if not endpoint.is_router:  # we are at one end of a line of which two take turns at the other
            peer.holder.accept(incarnation, line)
        return not endpoint.is_router

    def _taken_over(self, peer: MessengerPeer) -> None:
        """Stay away from a listener at which another one has this messenger's identity now."""
        endpoint = peer.endpoint
        if not (endpoint.is_router or endpoint.taken_over):
            endpoint.stay_away()
            self.duplicates.count += 1
            _log.error(
                "another messenger has connected to %s as %s, this one stays away; hint: %s",
                *(endpoint.address, short(endpoint.identity), DUPLICATE_HINT),
            )

    def note_announcement(self, peer: MessengerPeer, incarnation: int) -> None:
        """Note that a peer announced the extension, or that it does not any more (0).

        With a store nothing goes with the extension before that is on the disk: the next life would send it without,
        and to its peer it would be another message.
        """
        known, peer.announced = peer.announced, incarnation
        if not incarnation or self.store is None or peer.delivery.announced:
            with self._lock:
                peer.delivery.announced = bool(incarnation)
        elif known != incarnation:

            def learned(error: Exception | None) -> None:
                if error is not None:
                    peer.announced = 0  # so that the next word says it again
                elif peer.announced == incarnation:
                    with self._lock:
                        peer.delivery.announced = True
                    self.wake(peer)

            self.store.mark(ANNOUNCES + peer.key, 0, 0, learned)


def settle(future: Future[T], value: T) -> None:
    """Give a future its value, unless its owner has cancelled it."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def ignore(_: Exception | None) -> None:
    """Ignore the outcome of a call whose failure changes nothing."""
