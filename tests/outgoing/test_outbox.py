"""What is on its way to one peer: the order in which it goes out, what a partial write leaves, and all accounts."""

from __future__ import annotations

import pytest
from flow_kit import AUDIO, CLASS_OF, CONTROL, DATA, KEY, LOG, OWN, Peer, frame, parse

from flowctl.core.flow.counts import total
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import Thin
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.reasons import DropReason

SIZE = 20


class Desk:
    """An outbox that follows a log, and a peer that takes what the test gives it room for."""

    def __init__(self):
        self.log = StreamLog()
        self.outbox = Outbox()
        self.outbox.follow(LogCursor(self.log, now=0.0))
        self.outbox.cursor.joining_to = None
        self.peer = Peer(room=0)

    def publish(self, text):
        for number, letter in enumerate(text):
            self.log.append(frame(LOG, CLASS_OF[letter], number, SIZE), CLASS_OF[letter], 0.0)

    def say(self, text):
        for number, letter in enumerate(text):
            item = CLASS_OF[letter]
            self.outbox.backlog.offer(frame(OWN, item, number, SIZE), item, 0.0, mask=0, droppable=None)

    def write(self, room):
        """Let the peer take so many bytes; return the classes of all it has received whole."""
        self.peer.room = room
        self.outbox.write(self.peer, 1000, 1 << 20, with_log=True)
        return "".join("CHKIDAX"[item] for _, item, _, _ in parse(self.peer.received)[0])

    def check(self):
        """Check that each message is received, dropped or queued, by class and in the load too."""
        accepted, dropped, queued = self.outbox.accounts()
        lost, frames = total(dropped.values()), parse(self.peer.received)[0]
        for item in MessageClass:
            received = sum(kind is item for _, kind, _, _ in frames)
            assert accepted.of(item) == received + lost.of(item) + queued.of(item)
        rows = self.outbox.figures()
        assert [*rows] == [accepted.figures, lost.figures, queued.figures]
        assert self.outbox.load(0.0, 0).messages == queued.total_messages


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.check()


def test_write_when_all_kinds_wait_goes_in_order(desk):
    desk.publish("KA")
    desk.say("XCA")
    assert desk.write(None) == "CXAKA"
    assert desk.outbox.empty(with_log=True)


@pytest.mark.parametrize("taken", [1, SIZE - 1, SIZE + 1, 2 * SIZE + 7])
def test_message_in_flight_when_more_comes_is_finished_first(desk, taken):
    desk.publish("KA")
    desk.say("X")
    begun = desk.write(taken)
    desk.check()
    desk.outbox.thin(Thin.DROPPABLE, Limits(), 0.0, DropReason.REQUESTED)
    desk.check()
    desk.say("C")
    assert desk.write(None) == begun + "XKA"[len(begun)] + "C"


def test_own_taken_when_the_message_in_flight_is_of_the_log_does_not_wait_for_it(desk):
    desk.say("X")
    desk.publish("K")
    desk.write(1)
    assert not desk.outbox.own_taken
    desk.write(SIZE)
    assert desk.outbox.own_taken
    assert desk.outbox.own == (SIZE - 1, 1)  # the rest of the key frame


def test_log_when_it_is_left_keeps_its_place_in_the_accounts(desk):
    desk.publish("KAA")
    desk.write(SIZE)
    desk.outbox.unfollow(DropReason.UNFOLLOWED)
    desk.check()
    desk.outbox.follow(LogCursor(desk.log, now=0.0))
    desk.publish("A")
    accepted, dropped, queued = desk.outbox.accounts()
    assert (accepted.of(KEY), accepted.of(AUDIO)) == (1, 3)
    assert {reason: counts.by_name() for reason, counts in dropped.items()} == {DropReason.UNFOLLOWED: {"audio": 2}}
    assert queued.by_name() == {"audio": 1}


def test_everything_when_the_connection_ends_is_counted_the_message_in_flight_too(desk):
    desk.publish("A")
    desk.say("XC")
    desk.write(SIZE + 1)
    desk.outbox.drop_everything(DropReason.CLOSED)
    closed = desk.outbox.accounts()[1][DropReason.CLOSED]
    assert (closed.of(DATA), closed.of(AUDIO), closed.of(CONTROL)) == (1, 1, 0)
    assert desk.outbox.idle
