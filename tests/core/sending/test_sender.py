"""The Sender of one peer: modes, EAGAIN, order, budgets, limits and policy, what other threads ask for and send."""

from __future__ import annotations

import errno
import threading
from collections import Counter

import pytest
from cursor_kit import scripts
from flow_kit import (
    AUDIO,
    CLASS_OF,
    CONTROL,
    DATA,
    HEAD_BYTES,
    OWN,
    Peer,
    Published,
    Viewer,
    check_accounts,
    check_edges,
    frame,
)
from sender_kit import HARD_LIMIT, OVERLOADED, SOFT_LIMIT, TIMELESS, Talker, by_messages, play

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, HardPolicy
from flowctl.core.flow.policy import DropDroppable, LivePolicy, Thin
from flowctl.core.flow.state import Axis, Cause
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import FlushResult, Sender
from flowctl.testing import ManualGroup, ManualHost, ScriptedTransport, would_block

SCRIPTS = """
in deferred mode writing is left to the owning thread
    say:AAA=aaa writes=0 run heard=0,1,2 writes=1
in immediate mode a message goes out at once
    now say:XX=aa state=R heard=0,1 run writes=2
in immediate mode what is sent after EAGAIN waits behind the rest
    now room:5 say:X=a state=O queued=1 say:XX=aa run watched=True give heard=0,1,2 watched=False states=OR
OVERLOADED lasts until the last byte is taken
    room:0 say:AAA run give:11 states=O give:11 states=O give:11 states=OR
control messages go first at the boundary of a message
    room:4 say:XX run say:CXC give heard=0,2,4,1,3
the policy refuses a class and keeps the rest
    policy:live room:0 say:X run say:XDA=ada keep:D=a drain classes=XXAD lost:REFUSED=1
a final hard limit ends the connection
    limits:2,4 room:0 say:AAAA=aaac states=SH ended=HARD_LIMIT lost:CLOSED=4
a held hard limit refuses all but control messages and headers until the low mark
    hold limits:4,4,2 room:0 say:AAAA run state=H keep:X=d say:CH=aa give:44 state=O say:X=a drain lost:HELD=1
a held hard limit that is made final ends the connection
    hold limits:2,2 room:0 say:XX set:2,2 ended=HARD_LIMIT
before the hard limit is judged the kernel is asked once more as a handler that sends much keeps its loop from hearing
    limits:4,8 room:0 say:AAAAAAA room say:X=a state=R run heard=0,1,2,3,4,5,6,7 ended=
an answer in flight is finished whatever is thrown away
    room:16 say:X*1000 run say:XX thin drain heard=0
a peer that takes nothing for its time is stuck once
    room:0 run:100 say:X run:14.9 ended= run:0.2 ended=STUCK run:100 ended=STUCK
a peer that takes a byte is not stuck yet
    room:0 say:X run:10 give:1 run:10 give:1 run:10 give:1 ended= stalled=10.0 run:15 ended=STUCK
the time at the soft limit begins anew after a break
    stuck:0 soft:60 limits:4,100 room:0 say:AAAA run:59 give:22 state=O say:XX run:59.9 ended= run:0.2
    ended=SOFT_TOO_LONG
a peer that does not take the rest is given up after the deadline
    room:0 say:X end run:4.9 ended= run:0.2 ended=STUCK
a closing peer whose queue was thrown away gets what its kernel holds and no more
    stuck:0 close:5 room:0 say:X run thin end run ended=FINISHED
a closing peer whose queue is thrown away gets what its kernel holds and no more
    stuck:0 close:0 room:11 say:XX run end run ended= thin ended=FINISHED
times that are off end nothing
    stuck:0 soft:0 close:0 limits:2,100 room:0 say:AAA end run:100000 ended= state=S drain heard=0,1,2 ended=FINISHED
clocks start with the first message behind EAGAIN
    stuck:10 marks:0,0,1s room:0 say:XX run:0.01 thin run:60 ended= say:C run:1.9 ended= run:0.2 ended=HARD_LIMIT
closing with nothing queued finishes
    end end say:X=c run ended=FINISHED
closing in immediate mode with nothing queued finishes
    now end end say:X=c run ended=FINISHED
closing sends what is queued
    room:0 say:AAA end say:X=c run drain heard=0,1,2 ended=FINISHED
closing in immediate mode sends what is queued
    now room:0 say:AAA end say:X=c run drain heard=0,1,2 ended=FINISHED
who waits is told once when the last byte is taken
    room:5 say:XX drained=False wait run give:11 told= drain told=T drained=True say:X drain told=T
who waits for nothing is told at once and a send that writes ends a wait
    limits:3,9 wait told=T say:X wait say:XX told=TT
in immediate mode too
    now limits:3,9 wait told=T say:X wait say:XX told=TT
who waits while all is sent before the end is told so and who asks later
    room:0 say:X run wait end drain wait told=TT
who waits is told when the policy throws all away
    policy:soft limits:3,9 room:0 say:XX run wait say:X drained=True told=T
"""


@pytest.mark.parametrize("script", scripts(SCRIPTS))
def test_sender_in_a_script_does_what_it_must(script):
    play(script)


# -- modes and writing


@pytest.mark.parametrize("deferred", [True, False])
def test_eagain_at_every_byte_resumes_exactly(deferred):
    wires = [frame(OWN, DATA, number, size) for number, size in enumerate((11, 20, 13))]
    expected = b"".join(wires)
    for cut in range(1, len(expected)):
        transport = ScriptedTransport([cut, would_block, would_block])
        host = ManualHost()
        host.sender = sender = Sender(host, transport, deferred=deferred)
        for wire in wires:
            sender.send(wire)
        host.group.run()
        while host.poll_writable() is FlushResult.BLOCKED:
            pass
        host.group.run()
        assert bytes(transport.received) == expected
        assert sender.statistics().bytes_sent == len(expected)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        pytest.param(SenderSettings(turn_messages=3), 3, id="messages"),
        pytest.param(SenderSettings(turn_bytes=100), 2, id="bytes"),  # the one that uses up the budget is the last
    ],
)
def test_flush_when_budget_of_turn_is_used_asks_for_another(settings, first):
    viewer = Talker(settings=settings)
    viewer.say("X" * 10, 60)
    assert viewer.sender.flush() is FlushResult.MORE
    assert viewer.heard() == list(range(first))
    viewer.group.run()
    assert viewer.heard() == list(range(10))
    assert viewer.states() == []


def test_flush_when_message_is_in_flight_hands_over_no_more_parts_than_a_call_takes():
    """The message in flight is one of the 1024 parts of a system call (the peer checks their number)."""
    viewer = Talker(Peer(room=5), settings=SenderSettings(turn_messages=1024))
    viewer.say("X" * 2000)
    viewer.group.run()
    viewer.drain()
    assert viewer.heard() == list(range(2000))


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ECONNRESET, CloseReason.PEER_RESET), (errno.EBADF, CloseReason.INTERNAL)]
)
@pytest.mark.parametrize("deferred", [True, False])
def test_write_when_connection_is_gone_ends_the_sender_once(number, reason, deferred):
    viewer = Talker(deferred=deferred)
    viewer.peer.failure = OSError(number, "scripted")
    viewer.say("X")
    viewer.group.run()
    assert [item for item, _ in viewer.host.closed] == [reason]
    assert viewer.sender.flush() is FlushResult.CLOSED
    assert viewer.sender.statistics().dropped[DropReason.CLOSED].of(DATA) == 1
    check_accounts(viewer)


def test_send_when_empty_is_refused():
    viewer = Talker()
    with pytest.raises(LocalProtocolError, match="empty"):
        viewer.sender.send(b"")
    assert viewer.sender.statistics().accepted.total_messages == 0


# -- limits and policy


def test_set_limits_when_load_is_above_acts_at_once():
    viewer = Talker(Peer(room=0))
    viewer.say("X" * 3)
    viewer.sender.set_limits(by_messages(3, 9))
    assert viewer.states() == [OVERLOADED, SOFT_LIMIT], "what waits is offered first, and refused"
    change = viewer.edges.changes[-1]
    assert (change.cause, change.axis, change.value, change.limit) == (Cause.LIMITS_SET, Axis.MESSAGES, 3.0, 3)
    assert [entry.kind for entry in viewer.sender.ledger()] == [LedgerKind.LIMITS, LedgerKind.STATE, LedgerKind.STATE]
    viewer.sender.set_limits(NO_LIMITS)
    assert viewer.sender.state is OVERLOADED


@pytest.mark.parametrize(
    "settings", [SenderSettings(control_messages=3), SenderSettings(control_bytes=3 * HEAD_BYTES)], ids=str
)
def test_control_lane_when_over_its_limit_closes(settings):
    viewer = Talker(Peer(room=0), settings=settings)
    outcomes = [result.outcome for result in viewer.say("CCCC")]
    assert outcomes == [SendOutcome.ACCEPTED] * 3 + [SendOutcome.CLOSED]
    ((reason, details),) = viewer.host.closed
    assert reason is CloseReason.LIMIT_HIT
    assert "control lane" in details


@pytest.mark.parametrize("foreign", [False, True])
def test_requests_when_following_from_another_thread_are_done_by_the_owner_in_order(foreign):
    viewer = Talker(Peer(room=0), limits=by_messages(100), settings=TIMELESS)
    published = Published(viewer.group)
    fanout = Fanout(published.log, viewer.group, flush_interval_s=0)
    viewer.follow(fanout)
    published.script("KIIAD")
    viewer.group.run()
    on = threading.get_ident()
    threads = set()
    viewer.edges.hook = lambda *_: threads.add(threading.get_ident())
    viewer.host.foreign = foreign

    def ask():
        viewer.sender.set_limits(by_messages(5, 50))  # reached: SOFT_LIMIT
        viewer.sender.set_policy(DropDroppable())
        viewer.sender.thin(Thin.DROPPABLE)
        viewer.sender.close(CloseReason.KICKED, "asked for")

    if not foreign:
        ask()
    else:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        assert viewer.states() == [OVERLOADED]
        assert viewer.sender.closed is True
        assert viewer.host.closed == []
        viewer.group.run()
    assert viewer.states() == [OVERLOADED, SOFT_LIMIT, OVERLOADED]
    assert threads == {on}
    assert viewer.host.closed == [(CloseReason.KICKED, "asked for")]
    assert viewer.sender.statistics().dropped[DropReason.REQUESTED].total_messages == 5
    check_accounts(viewer)
    check_edges(viewer)


# -- threads


class RefusingPeer(Peer):
    """Takes 50 bytes a call and meets EAGAIN at every third."""

    def send(self, data, /):
        if self.writes % 3 == 2:
            self.writes += 1
            raise BlockingIOError(errno.EAGAIN, "scripted")
        self.most = 50
        return super().send(data)


class LooseHost(ManualHost):
    """A host whose owner flushes all the time: it need not be asked."""

    def request_flush(self):
        """Nothing to do."""


@pytest.mark.parametrize("deferred", [True, False])
def test_send_when_several_threads_call_keeps_the_order_of_each(deferred):
    count, threads = 150, 4
    viewer = Viewer(ManualGroup(), RefusingPeer())
    host = LooseHost(viewer.group)
    host.sender = viewer.sender = sender = Sender(host, viewer.peer, frontend=viewer.edges, deferred=deferred)
    start = threading.Barrier(threads)

    def talk(first):
        start.wait()
        for number in range(first, first + count):
            assert sender.send(frame(OWN, AUDIO, number, 30), AUDIO).outcome is SendOutcome.ACCEPTED

    workers = [threading.Thread(target=talk, args=(index * count,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or sender.load().messages:
        sender.flush()
        host.poll_writable()
    numbers = viewer.numbers(OWN)
    for index in range(threads):
        mine = range(index * count, (index + 1) * count)
        assert [number for number in numbers if number in mine] == list(mine)
    assert len(numbers) == count * threads
    assert not host.failures
    check_accounts(viewer, Counter({AUDIO: count * threads}))
    check_edges(viewer)


@pytest.mark.parametrize("settings", [SenderSettings(control_messages=20), SenderSettings(control_bytes=3000)], ids=str)
def test_hold_when_headers_come_without_end_closes(settings):
    viewer = Talker(Peer(room=0), limits=by_messages(4, 4, 2, HardPolicy.HOLD), settings=settings)
    viewer.say("HXXX")
    viewer.group.run()
    assert viewer.sender.state is HARD_LIMIT
    most = 0
    for _ in range(100):
        viewer.say("H", 200)
        most = max(most, viewer.sender.load().messages)
    assert most <= 24
    ((reason, details),) = viewer.host.closed
    assert reason is CloseReason.LIMIT_HIT
    assert "headers" in details
    check_accounts(viewer, viewer.offered)


def test_hold_when_headers_are_taken_meanwhile_stays():
    settings = SenderSettings(control_messages=5, stuck_s=0, soft_too_long_s=0)
    viewer = Talker(Peer(room=0), limits=by_messages(4, 20, 1, HardPolicy.HOLD), settings=settings)
    viewer.say("H" * 20)
    viewer.group.run()
    for _ in range(30):
        viewer.say("H")
        viewer.give(HEAD_BYTES)
        viewer.group.run(0.1)
    assert viewer.host.closed == []
    viewer.drain()
    assert len(viewer.heard()) == 50


def test_hold_when_a_log_has_headers_without_end_closes():
    viewer = Talker(
        Peer(room=0), limits=by_messages(4, 4, 2, HardPolicy.HOLD), settings=SenderSettings(control_messages=9)
    )
    published = Published(viewer.group)
    viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
    published.script("KIIIIIII")
    viewer.group.run(3.0)
    assert viewer.sender.state is HARD_LIMIT
    for _ in range(20):
        published.script("H" * 100)
        viewer.group.run(0.1)
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.LIMIT_HIT]


def test_message_of_a_log_when_it_may_not_be_dropped_reaches_a_slow_viewer():
    viewer = Talker(Peer(room=0), policy=LivePolicy(), limits=by_messages(6, 500), settings=TIMELESS)
    log = StreamLog()
    viewer.sender.follow(Fanout(log, viewer.group, flush_interval_s=0))
    for number, letter in enumerate("KIIAX" + "IIIIIXXX" * 3):
        item = CLASS_OF[letter]
        log.append(frame(OWN, item, number), item, viewer.group.now())
        viewer.group.run(1.0)
    for number in (100, 101):
        log.append(frame(OWN, CONTROL, number), DATA, viewer.group.now(), droppable=False)
        log.append(frame(OWN, DATA, number), DATA, viewer.group.now())
        viewer.group.run(1.0)
    viewer.drain()
    assert [number for number in viewer.heard() if number >= 100][:2] == [100, 101]
    assert viewer.sender.statistics().dropped_messages > 10
    check_accounts(viewer)
