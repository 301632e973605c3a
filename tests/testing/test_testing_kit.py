"""The test kit: the clock, the scripted and the throttled peer, the group and the host without thread and loop."""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason
from flowctl.sender import FlushResult, Sender
from flowctl.testing import ManualClock, ManualGroup, ManualHost, ScriptedTransport, ThrottledPeer, would_block


def make_sender(transport, **options):
    host = ManualHost()
    host.sender = Sender(host, transport, **options)
    return host, host.sender


def test_clock_when_advanced_moves_by_that_and_never_by_itself_or_back():
    clock = ManualClock(5.0)
    assert clock() == clock() == 5.0
    assert clock.advance(0.25) == clock() == 5.25
    assert clock.advance(0.0) == 5.25
    with pytest.raises(LocalProtocolError, match=r"-0\.1 s"):
        clock.advance(-0.1)
    assert clock() == 5.25


def test_scripted_transport_when_called_takes_a_step_per_write():
    broken = OSError(errno.EPIPE, "broken")
    transport = ScriptedTransport([3, would_block, 99, 0, broken])
    assert transport.send(b"abcdef") == 3
    with pytest.raises(BlockingIOError) as caught:
        transport.send(b"def")
    assert caught.value.errno == errno.EAGAIN
    assert transport.sendmsg([b"d", memoryview(b"ef")]) == 3
    with pytest.raises(BlockingIOError):
        transport.send(b"x")
    with pytest.raises(OSError, match="broken") as raised:
        transport.send(b"x")
    assert raised.value is broken
    assert transport.send(b"the rest") == 8
    assert transport.received == b"abcdefthe rest"
    assert transport.writes == 6


@given(st.lists(st.one_of(st.integers(0, 5), st.just(would_block)), max_size=30), st.binary(min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_scripted_transport_for_any_script_receives_what_was_written(script, data):
    transport, rest, calls = ScriptedTransport(script), data, 0
    while rest:
        calls += 1
        try:
            rest = rest[transport.send(rest) :]
        except BlockingIOError:
            continue
    assert transport.received == data
    assert transport.writes == calls <= len(script) + 1


def test_throttled_peer_when_its_buffer_is_full_meets_eagain_until_the_link_has_carried_some():
    clock = ManualClock()
    peer = ThrottledPeer(clock, 80.0, buffer_bytes=10)
    assert peer.send(b"0123456789ab") == 10
    assert peer.received == b""
    with pytest.raises(BlockingIOError):
        peer.sendmsg([b"ab"])
    clock.advance(0.0625)  # exact in binary: five bytes
    assert peer.run() is True
    assert peer.received == b"01234"
    assert peer.sendmsg([b"a", b"b", b"cdefgh"]) == 5
    clock.advance(1.0)
    assert peer.run() is True
    assert peer.received == b"0123456789abcde"


def test_throttled_peer_when_it_idles_saves_up_no_speed():
    clock = ManualClock()
    peer = ThrottledPeer(clock, 100.0, buffer_bytes=1000)
    clock.advance(60.0)
    peer.send(b"x" * 1000)
    clock.advance(1.0)
    peer.run()
    assert len(peer.received) == 100


@given(st.floats(10.0, 2000.0), st.lists(st.floats(0.0, 0.2), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_throttled_peer_for_any_steps_carries_its_rate_in_order(rate, steps):
    clock = ManualClock(0.0)
    peer = ThrottledPeer(clock, rate, buffer_bytes=10_000)
    data = bytes(number % 251 for number in range(10_000))
    assert peer.send(data) == len(data)
    for step in steps:
        clock.advance(step)
        peer.run()
    carried = len(peer.received)
    assert abs(carried - min(clock() * rate, 10_000)) <= 1.0
    assert peer.received == data[:carried]


def test_group_when_run_calls_in_order_of_time_then_of_asking():
    group, log = ManualGroup(), []
    start = group.now()

    def note(name):
        log.append((name, round(group.now() - start, 6)))

    group.call_later(0.3, note, "third")
    group.call_later(0.1, note, "first")
    group.call_later(0.1, note, "second")
    group.call_soon(note, "soon")
    group.call_later(5.0, note, "late")
    group.run(1.0)
    assert log == [("soon", 0.0), ("first", 0.1), ("second", 0.1), ("third", 0.3)]
    assert group.now() == pytest.approx(start + 1.0)
    group.run(4.0)
    assert log[-1] == ("late", 5.0)
    assert group.in_thread() is True


def test_group_when_a_call_asks_for_more_makes_those_that_are_due():
    group, count = ManualGroup(), itertools.count()

    def again():
        next(count)
        group.call_later(0.1, again)

    group.call_soon(again)
    group.run(0.95)
    assert next(count) == 10


def test_group_when_calls_never_end_says_so():
    group = ManualGroup()

    def for_ever():
        group.call_soon(for_ever)

    group.call_soon(for_ever)
    with pytest.raises(AssertionError, match="without an end"):
        group.run()


def test_host_when_flush_is_requested_often_flushes_once_a_run():
    transport = ScriptedTransport()
    host, sender = make_sender(transport, deferred=True)
    for number in range(5):
        assert sender.send(b"%d" % number).outcome is SendOutcome.ACCEPTED
    assert transport.writes == 0
    host.group.run()
    assert (transport.writes, transport.received) == (1, b"01234")
    host.group.run()
    assert transport.writes == 1
    sender.send(b"5")
    host.group.run()
    assert transport.received == b"012345"


def test_host_when_kernel_blocks_takes_note_and_goes_on_when_polled():
    transport = ScriptedTransport([2, would_block])
    host, sender = make_sender(transport, deferred=True)
    assert host.poll_writable() is None
    sender.send(b"abcdef")
    assert sender.flush() is FlushResult.BLOCKED
    assert host.wants_writable is True
    assert transport.received == b"ab"
    assert host.poll_writable() is FlushResult.DRAINED
    assert host.wants_writable is False
    assert transport.received == b"abcdef"
    assert host.poll_writable() is None


def test_host_when_a_deadline_comes_ticks_the_sender():
    host, sender = make_sender(
        ScriptedTransport([would_block] * 50), deferred=False, settings=SenderSettings(stuck_s=3.0)
    )
    sender.send(b"x")
    host.group.run(2.9)
    assert host.closed == []
    host.group.run(0.2)
    assert [reason for reason, _ in host.closed] == [CloseReason.STUCK]
    host.group.run(60.0)
    assert len(host.closed) == 1


def test_host_when_a_nearer_deadline_is_set_ticks_at_that():
    class Ticks:
        def __init__(self, group):
            self.group, self.at = group, []

        def tick(self):
            self.at.append(self.group.now())

    host = ManualHost(ManualGroup(ManualClock(0.0)))
    host.sender = Ticks(host.group)
    host.set_deadline(5.0)
    host.set_deadline(2.0)
    host.set_deadline(9.0)
    host.group.run(20.0)
    assert host.sender.at == [2.0]
    host.set_deadline(21.0)
    host.group.run(20.0)
    assert host.sender.at == [2.0, 21.0]


def test_host_when_its_sender_has_not_been_set_ignores_what_is_due():
    host = ManualHost()
    host.request_flush()
    host.set_deadline(host.now() + 1.0)
    host.group.run(2.0)
    assert host.poll_writable() is None
    assert host.group.now() == pytest.approx(1002.0)


def test_host_when_foreign_pretends_to_be_another_thread_but_flushes_on_its_own():
    seen = []

    class Watching(ScriptedTransport):
        def _take(self, data):
            seen.append(host.in_thread())
            return super()._take(data)

    host, sender = make_sender(Watching(), deferred=True)
    host.foreign = True
    assert host.in_thread() is False
    sender.send(b"x")
    host.group.run()
    assert seen == [True]
    assert host.foreign is True


def test_host_when_foreign_is_still_ticked_and_told_of_room_on_its_own_thread():
    """A tick that were taken for another thread's would act on no sample, and ask for itself again without end."""
    group = ManualGroup()
    host, fanout = ManualHost(group), Fanout(StreamLog(), group)
    sender = host.sender = Sender(
        host, ScriptedTransport([would_block] * 99), settings=SenderSettings(return_delay_s=9)
    )
    sender.send(b"message")
    sender.follow(fanout)
    group.run(0.1)
    assert host.wants_writable
    host.foreign = True
    group.run(3.0)
    assert host.poll_writable() is FlushResult.MORE
    assert not host.in_thread()


def test_host_when_a_handler_fails_keeps_the_exception():
    class Failing:
        def send_state_changed(self, state, change):
            raise ValueError(state.name)

    transport = ScriptedTransport([would_block])
    host, sender = make_sender(transport, deferred=True, frontend=Failing(), limits=Limits.parse("0,2"))
    sender.send(b"one")
    sender.send(b"two")
    found = [(where, str(error)) for where, error in host.failures]
    assert found == [("send_state_changed", "SOFT_LIMIT")]
    sender.writable()
    assert (str(host.failures[-1][1]), bytes(transport.received)) == ("READY", b"onetwo")
    assert host.ledger_notes >= 2


def test_kit_when_put_together_plays_a_slow_peer_through():
    group = ManualGroup(ManualClock(0.0))
    peer = ThrottledPeer(group.clock, 1000.0, buffer_bytes=100)
    host = ManualHost(group)
    host.sender = Sender(host, peer, deferred=True)
    data = [bytes([number]) * 50 for number in range(40)]
    for message in data:
        host.sender.send(message)
    while len(peer.received) < 2000:
        assert group.now() < 3.0, "it should have taken two seconds"
        group.run(0.01)
        if peer.run():
            host.poll_writable()
    assert peer.received == b"".join(data)
    assert group.now() == pytest.approx(2.0, abs=0.1)
    assert host.sender.statistics().sent.total_messages == 40
