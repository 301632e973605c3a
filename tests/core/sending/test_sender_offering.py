"""Before a peer is judged on what waits for it, that is offered to the kernel: who keeps up loses nothing."""

from __future__ import annotations

import threading
from collections import Counter

import hypothesis.strategies as st
import pytest
from flow_kit import (
    AUDIO,
    CONTROL,
    DATA,
    DISPOSABLE,
    HEAD_BYTES,
    INTER,
    KEY,
    OWN,
    Peer,
    Published,
    Viewer,
    check_accounts,
    frame,
)
from hypothesis import given, settings
from sender_kit import HARD_LIMIT, OVERLOADED, READY, SOFT_LIMIT, TIMELESS, Talker, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import HardPolicy, Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy, Thin
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason, DropReason
from flowctl.testing import ManualGroup

POLICIES = (KeepAll(), LivePolicy(), DropDroppable())
TIGHT = ("300,3", "0,3", "300,0", "100,2,50ms", "0,0,10ms", "0,0")
MEBIBYTE = 1 << 20


def steps():
    """One thing that happens to a viewer: (what, class or time, size)."""
    sizes = st.sampled_from([11, 50, 400, 5000])
    return st.one_of(
        st.tuples(st.just("send"), st.sampled_from([CONTROL, DATA, AUDIO, DISPOSABLE]), sizes),
        st.tuples(st.just("burst"), st.sampled_from([DATA, DISPOSABLE]), sizes),
        st.tuples(st.just("publish"), st.sampled_from([KEY, INTER]), sizes),
        st.tuples(st.just("publish burst"), st.sampled_from([KEY, INTER]), sizes),
        st.tuples(st.sampled_from(["flush", "tick", "limits", "sample"]), st.none(), st.none()),
        st.tuples(st.just("run"), st.sampled_from([0.0, 0.01, 0.04, 1.0, 10.0]), st.none()),
        st.tuples(st.just("foreign send"), st.sampled_from([CONTROL, DATA]), sizes),
    )


class Willing(Viewer):
    """A viewer whose kernel takes whatever it is offered, in pieces of any size."""

    def __init__(self, limits, policy, *, deferred, follows, most, turn):
        turns = SenderSettings(turn_messages=turn, turn_bytes=turn * 40, control_messages=4, control_bytes=6000)
        super().__init__(
            ManualGroup(), Peer(most=most), limits=limits, policy=policy, deferred=deferred, settings=turns
        )
        self.published = Published(self.group)
        self.follows = follows
        if follows:
            self.follow(Fanout(self.published.log, self.group))
        self.offered = Counter()
        self.number = 0
        self.afar = 0  # bytes that another thread has queued since the last flush

    def say(self, item, size):
        result = self.sender.send(frame(OWN, item, self.number, size), item)
        assert (result.outcome, result.state) == (SendOutcome.ACCEPTED, READY), self.sender.why()
        self.number += 1
        self.offered[item] += 1

    def do(self, what, item, size):
        if what in {"send", "burst"}:
            for _ in range(1 if what == "send" else 12):
                self.say(item, size)
        elif what in {"publish", "publish burst"}:
            for _ in range(1 if what == "publish" else 12):
                self.published.publish(item, size)
        elif what == "run":
            self.group.run(item)
        elif what == "limits":
            self.sender.set_limits(self.sender.limits)
        elif what == "foreign send":
            if self.follows:
                self.group.run()  # at most one message of another thread waits for each flush of the owning one
            self.host.foreign = True
            self.say(item, size)
            self.host.foreign = False
        else:
            {"flush": self.sender.flush, "tick": self.sender.tick, "sample": self.sender.sample_delay}[what]()


@given(
    script=st.lists(steps(), max_size=25),
    limits=st.sampled_from(TIGHT),
    hard=st.sampled_from(HardPolicy),
    policy=st.sampled_from(POLICIES),
    deferred=st.booleans(),
    follows=st.booleans(),
    most=st.sampled_from([None, 1000]),
    turn=st.sampled_from([2, 7, 512]),
)
@settings(max_examples=300, deadline=None)
def test_peer_when_its_kernel_takes_everything_loses_nothing_and_stays_ready(
    script, limits, hard, policy, deferred, follows, most, turn
):
    viewer = Willing(
        Limits.parse(limits, limits, hard_policy=hard), policy, deferred=deferred, follows=follows, most=most, turn=turn
    )
    for what, item, size in script:
        viewer.do(what, item, size)
        check_accounts(viewer)
    viewer.drain()
    assert viewer.edges.changes == []
    assert viewer.host.closed == []
    assert viewer.sender.statistics().dropped == {}
    assert viewer.numbers(OWN) == sorted(viewer.numbers(OWN), key=viewer.numbers(OWN).index)
    assert len(viewer.numbers(OWN)) == viewer.number
    if follows:
        assert viewer.numbers() == list(range(len(viewer.published.classes)))
    check_accounts(viewer, viewer.offered + Counter(viewer.published.classes if follows else ()))


@pytest.mark.parametrize("deferred", [True, False])
def test_crowd_when_each_says_a_line_at_once_hears_every_line(deferred):
    policy = DropDroppable(refuse_from=SOFT_LIMIT, thin_from=HARD_LIMIT)
    group = ManualGroup()
    peers = [Viewer(group, limits=Limits.parse("64KiB,100,1s"), policy=policy, deferred=deferred) for _ in range(150)]
    for number in range(150):
        line = frame(OWN, DATA, number, 40)
        assert {viewer.sender.send(line).outcome for viewer in peers} == {SendOutcome.ACCEPTED}
    group.run()
    for viewer in peers:
        assert viewer.numbers(OWN) == list(range(150))
        assert viewer.edges.changes == []


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(("count", "size"), [(1, 5 * MEBIBYTE), (40, MEBIBYTE // 2)])
def test_answer_when_larger_than_the_hard_limit_reaches_a_peer_that_takes_it(count, size, deferred):
    viewer = Talker(limits=Limits.parse("2MiB,2048,4s"), deferred=deferred)
    for _ in range(count):
        assert viewer.say("X", size) == [(SendOutcome.ACCEPTED, READY)]
        assert viewer.sender.load().size_bytes < 2 * MEBIBYTE + 4096 + size
    viewer.group.run()
    assert len(viewer.heard()) == count
    assert viewer.states() == []


def test_answer_when_the_kernel_takes_it_in_parts_is_not_judged_by_its_size():
    viewer = Talker(Peer(room=100_000), limits=Limits.parse("2MiB,2048,4s"), settings=TIMELESS)
    viewer.say("X", 9 * MEBIBYTE)
    viewer.group.run()
    assert viewer.states() == [OVERLOADED]
    for _ in range(6):
        viewer.give(MEBIBYTE)
        viewer.group.run(0.1)
    assert viewer.states() == [OVERLOADED]
    viewer.say("XX", MEBIBYTE)
    assert viewer.states() == [OVERLOADED, SOFT_LIMIT]
    viewer.group.run(9)
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.HARD_LIMIT], "its age counts like any other's"


def test_reader_when_it_takes_nothing_reaches_its_marks_and_bounds_memory():
    viewer = Talker(Peer(room=0), limits=Limits.parse("10000,0", "20000,0", overhead_bytes=0))
    most = 0
    for _ in range(100):
        viewer.say("X", 1000)
        most = max(most, viewer.sender.load().size_bytes)
    assert most < 20_000
    assert viewer.states() == [SOFT_LIMIT, HARD_LIMIT]
    assert viewer.peer.eagains == 2, "once at the soft mark, once more before the close that cannot be taken back"


def test_tick_when_our_thread_was_late_offers_before_it_ends_a_viewer():
    """After a hang of our own thread the age of the queue is beyond the hard limit; a kernel with room takes it all."""
    viewer = Viewer(ManualGroup(), Peer(), limits=Limits.parse("0,0,1s", "0,0,2s"), settings=TIMELESS)
    published = Published(viewer.group)
    viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
    published.script("K")
    viewer.group.run(0.1)
    viewer.give(0)
    published.script("I")
    viewer.group.run(0.1)
    viewer.peer.room = None
    viewer.group.clock.advance(30.0)
    viewer.sender.tick()
    assert viewer.host.closed == []
    assert viewer.numbers() == [0, 1]


def test_send_when_refused_class_could_go_out_is_offered_first():
    """The state that makes a policy refuse is from before the kernel had room: what waits is offered, then asked."""
    viewer = Talker(Peer(room=0), policy=DropDroppable(), limits=by_messages(50))
    viewer.say("X" * 3)
    viewer.group.run()
    assert [result.outcome for result in viewer.say("X")] == [SendOutcome.DROPPED]
    viewer.peer.room = None
    viewer.sender._judgement.meet_kernel_anew()  # as between `writable` and the turn in which the rest is written
    assert viewer.say("X") == [(SendOutcome.ACCEPTED, READY)]


@pytest.mark.parametrize("deferred", [True, False])
def test_threads_when_they_send_more_than_the_limit_lose_nothing_of_a_peer_that_reads(deferred):
    viewer = Talker(limits=by_messages(3, 6), policy=DropDroppable(), deferred=deferred)
    viewer.host.in_thread = lambda: False
    wires = [[frame(OWN, DATA, 1000 * thread + number) for number in range(150)] for thread in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: [viewer.sender.send(wire) for wire in mine]) for mine in wires]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    viewer.drain()
    assert sorted(viewer.heard()) == sorted(1000 * thread + number for thread in range(4) for number in range(150))
    assert viewer.states() == []


# -- another thread, to a viewer of a log


def follower(limits, peer=None, **settings):
    """Return a viewer of a log that has caught up, to whom another thread sends."""
    viewer = Talker(peer, limits=limits, **settings)
    published = Published(viewer.group)
    viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
    published.script("K")
    viewer.group.run(1.0)
    viewer.host.foreign = True
    return viewer


def test_other_thread_when_it_sends_to_a_viewer_of_a_log_is_bounded_by_the_hard_limit():
    viewer = follower(Limits.parse("100KiB,0", "200KiB,0"))
    outcomes = Counter(result.outcome for _ in range(30) for result in viewer.say("X", MEBIBYTE // 16))
    assert viewer.sender.load().size_bytes < (200 << 10) + MEBIBYTE // 16 + 200
    assert set(outcomes) == {SendOutcome.ACCEPTED, SendOutcome.DROPPED}
    assert viewer.states() == []
    viewer.group.run()
    assert len(viewer.heard()) == outcomes[SendOutcome.ACCEPTED]
    assert viewer.sender.statistics().dropped[DropReason.HELD].of(DATA) == outcomes[SendOutcome.DROPPED]
    assert viewer.say("X")[0].outcome is SendOutcome.ACCEPTED
    viewer.drain()
    check_accounts(viewer)


@pytest.mark.parametrize(
    ("letter", "options", "reason"),
    [
        pytest.param("X", {"droppable": False}, CloseReason.HARD_LIMIT, id="not droppable"),
        pytest.param("H", {}, CloseReason.HARD_LIMIT, id="headers"),
        pytest.param("C", {}, CloseReason.LIMIT_HIT, id="control"),
    ],
)
def test_other_thread_when_it_sends_what_may_not_be_dropped_without_end_ends_the_connection(letter, options, reason):
    viewer = follower(by_messages(5, 10), settings=SenderSettings(control_messages=10))
    outcomes = Counter(result.outcome for result in viewer.say(letter * 100, **options))
    assert outcomes[SendOutcome.ACCEPTED] in {10, 11}
    assert viewer.sender.load().messages <= 11
    assert viewer.host.closed == []
    viewer.group.run()
    assert [ended for ended, _ in viewer.host.closed] == [reason]
    check_accounts(viewer)


# -- whose bytes they are


@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))], ids=["bytearray", "memoryview"])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("message_class", [DATA, CONTROL])
def test_send_when_the_buffer_is_the_callers_sends_what_was_in_it(kind, deferred, message_class):
    viewer = Talker(Peer(room=3), deferred=deferred)
    wires = [frame(OWN, message_class, number, 50) for number in range(3)]
    for wire in wires:
        buffer = kind(wire)
        viewer.sender.send(buffer, message_class)
        buffer[:] = bytes(len(buffer))
    viewer.drain()
    assert bytes(viewer.peer.received) == b"".join(wires)


def test_log_and_prefix_when_the_buffer_is_the_callers_keep_what_was_in_it():
    viewer = Talker()
    log = StreamLog()
    buffers = [bytearray(text) for text in (b"key", b"head", b"first")]
    log.append(buffers[0], KEY, 0.0, restart=(memoryview(buffers[1]),))
    viewer.sender.follow(Fanout(log, viewer.group), start=log.cached, prefix=(buffers[2], *log.gop.restart))
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    viewer.drain()
    assert bytes(viewer.peer.received) == b"firstheadkey"


@pytest.mark.parametrize("data", ["text", 5, [1, 2], None])
def test_message_when_it_is_no_bytes_is_refused(data):
    with pytest.raises(LocalProtocolError, match="must be bytes"):
        Talker().sender.send(data)
    with pytest.raises(LocalProtocolError, match="must be bytes"):
        StreamLog().append(data, DATA, 0.0)


# -- telling who waits for room


@pytest.mark.parametrize("limits", [Limits.parse("0,0,500ms"), Limits.parse("0,3")], ids=["age", "messages"])
def test_soft_mark_when_our_thread_was_held_is_judged_on_what_the_kernel_leaves(limits):
    """After EAGAIN too: the peer may have read meanwhile, and the loop not have come to tell of it."""
    viewer = Talker(Peer(room=HEAD_BYTES - 1), limits=limits, policy=DropDroppable(SOFT_LIMIT, SOFT_LIMIT))
    viewer.say("XX")
    viewer.group.run()
    assert viewer.sender.state is OVERLOADED
    viewer.peer.room = None
    viewer.group.clock.advance(0.7)
    viewer.sender.tick()
    viewer.say("X")
    viewer.group.run()
    assert viewer.heard() == [0, 1, 2]
    assert viewer.states() == [OVERLOADED, READY]
    assert viewer.sender.statistics().dropped == {}


@pytest.mark.parametrize("deferred", [True, False])
def test_waiter_when_it_sends_the_next_part_and_waits_again_goes_on_to_the_end(deferred):
    viewer = Talker(deferred=deferred)
    left = [3000]

    def send_part(taken):
        assert taken
        if left[0]:
            left[0] -= 1
            viewer.say("X")
            viewer.sender.when_drained(send_part)

    send_part(taken=True)
    viewer.group.run()
    assert left == [0]
    assert viewer.sender.statistics().sent.total_messages == 3000


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        pytest.param(lambda sender: sender.close(CloseReason.KICKED), False, id="close"),
        pytest.param(lambda sender: sender.broken(ConnectionResetError()), False, id="reset"),
        pytest.param(lambda sender: sender.thin(Thin.DROPPABLE), True, id="all dropped"),
    ],
)
def test_waiter_when_the_queue_goes_another_way_is_told(end, answer):
    viewer = Talker(Peer(room=0))
    told = []
    viewer.say("X")
    viewer.group.run()
    viewer.sender.when_drained(told.append)
    end(viewer.sender)
    assert told == [answer]
    viewer.sender.when_drained(told.append)
    assert told == [answer, answer], "who asks later is told the same"


def test_waiter_when_it_is_taken_back_is_not_told():
    viewer = Talker(Peer(room=0))
    told = []
    viewer.say("X")
    for _ in range(3):
        viewer.sender.when_drained(told.append)
        viewer.sender.when_drained(print)
        viewer.sender.forget_drained(print)
    assert len(viewer.sender._waiters) == 3
    viewer.drain()
    assert told == [True] * 3


def test_waiter_when_a_log_is_followed_waits_for_its_own_messages_only():
    viewer = Talker(Peer(room=0))
    published = Published(viewer.group)
    viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
    published.script("K")
    viewer.group.run(0.1)
    assert viewer.sender.drained
    viewer.say("X")
    told = []
    viewer.sender.when_drained(told.append)
    published.script("I" * 5)
    viewer.drain()
    assert told == [True]


def test_waiter_when_a_message_of_the_log_is_always_in_flight_waits_for_its_own_only():
    viewer = Talker(Peer(room=HEAD_BYTES // 2))
    published = Published(viewer.group)
    viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
    published.script("K")
    viewer.group.run(0.1)
    viewer.say("X")
    assert not viewer.sender.drained
    told = []
    viewer.sender.when_drained(told.append)
    published.script("I" * 5)
    viewer.give(HEAD_BYTES)
    viewer.group.run(0.1)
    assert told == [], "half of it is in flight"
    viewer.give(HEAD_BYTES)
    viewer.group.run(0.1)
    assert told == [True]
    assert viewer.sender.drained
    assert not viewer.sender._outbox.empty(with_log=False), "the log's message"
