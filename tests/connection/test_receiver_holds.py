"""Holding input: who may, what control still gets through, from which thread, and what is counted."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from receiver_kit import EOF, Kit

from flowctl.errors import LocalProtocolError
from flowctl.receiver import MAX_HOLDERS, MAX_REASONS, InputResult, InputVerdict


@pytest.fixture
def kit() -> Kit:
    return Kit()


def test_pause_when_held_stops_reading_on_the_owning_thread_only(kit):
    """Pause itself calls nobody back: the descriptor is unwatched in a job of the owning thread."""
    assert kit.receiver.pause("sender", "soft limit") is True
    assert kit.receiver.paused
    assert kit.watched == [True]
    kit.rounds()
    assert kit.watched == [True, False]
    assert kit.receiver.resume("sender")
    assert kit.watched == [True, False]
    kit.rounds()
    assert kit.watched == [True, False, True]
    assert not kit.receiver.paused


def test_pause_when_the_descriptor_is_ready_already_reads_nothing(kit):
    """Between a pause and its job the descriptor may still be reported: nothing is read then."""
    kit.receiver.pause("sender", "soft limit")
    kit.feed.append(b"abc")
    kit.receiver.input_ready()
    assert kit.reads == []
    assert kit.watched == [True, False]


def test_pause_when_called_inside_the_handler_stops_before_the_next_read():
    kit = Kit(capacity_bytes=4)
    kit.handler.on_offer = lambda data: kit.receiver.pause("policy", "busy")
    kit.handler.answers = [InputResult(InputVerdict.DONE, 1)]
    kit.ready(b"abcd", b"efgh")
    kit.rounds()
    assert kit.handler.offers == [b"abcd"]
    assert kit.reads == [4]
    assert kit.receiver.statistics().kept_bytes == 3
    kit.handler.on_offer = lambda data: None
    kit.receiver.resume("policy")
    kit.settle()
    assert kit.handler.offers == [b"abcd", b"bcd", b"efgh"]


def test_resume_when_the_buffer_is_full_offers_before_it_reads():
    """With a full buffer there is no room to read; the descriptor may be ready before the job, and must not read."""
    kit = Kit(capacity_bytes=4)
    kit.handler.on_offer = lambda data: kit.receiver.pause("policy", "busy")
    kit.handler.answers = [InputResult(InputVerdict.BLOCK, 0)]
    kit.ready(b"abcd", b"efgh")
    kit.rounds()
    kit.handler.on_offer = lambda data: None
    kit.receiver.resume("policy")
    kit.receiver.input_ready()
    kit.settle()
    assert kit.handler.offers == [b"abcd", b"abcd", b"efgh"]
    assert kit.handler.ends == []


def test_resume_when_nothing_is_kept_offers_an_empty_view(kit):
    kit.receiver.pause("sender", "soft limit")
    kit.rounds()
    kit.receiver.resume("sender")
    kit.rounds()
    assert kit.handler.offers == [b""]
    assert kit.handler.control == [False]


def test_holders_when_several_hold_until_the_last_lets_go(kit):
    assert [kit.receiver.pause(owner, "x") for owner in ("a", "b", "a")] == [True, True, False]
    assert [bool(kit.receiver.resume(owner)) for owner in ("a", "a", "c")] == [True, False, False]
    kit.settle()
    assert not kit.receiver.reading
    assert kit.receiver.resume("b")
    kit.settle()
    assert kit.receiver.reading


def test_pause_when_resumed_before_the_job_ran_changes_nothing_outside(kit):
    kit.receiver.pause("a", "x")
    kit.receiver.resume("a")
    kit.rounds()
    assert kit.watched == [True]


def test_control_when_granted_is_read_up_to_the_grant_per_interval(kit):
    kit.receiver.pause("sender", "soft limit", control_bytes=10)
    kit.feed.append(b"x" * 25)
    kit.settle()
    assert kit.handler.offers[-1] == b"x" * 10
    assert set(kit.handler.control) == {True}
    assert not kit.receiver.reading
    assert min(entry.when for entry in kit.host.deadlines._entries.values()) == 101.0
    kit.advance(0.5)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 10
    kit.advance(0.5)
    assert kit.receiver.reading
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 20
    kit.receiver.resume("sender")
    kit.settle()
    statistics = kit.receiver.statistics()
    assert (statistics.bytes_in, statistics.control_bytes_in) == (25, 20)
    assert kit.handler.control[-1] is False


def test_control_when_granted_differently_is_the_smallest_grant(kit):
    kit.receiver.pause("a", "x", control_bytes=10)
    kit.receiver.pause("b", "y", control_bytes=4)
    kit.feed.append(b"x" * 30)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 4
    kit.receiver.pause("c", "z")
    kit.advance(1.0)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 4
    assert not kit.receiver.reading
    kit.receiver.resume("c")
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 8


def test_control_when_the_grant_is_lowered_counts_at_once(kit):
    kit.receiver.pause("a", "x", control_bytes=10)
    kit.ready(b"abc")
    kit.receiver.pause("a", "x", control_bytes=4)
    kit.feed.append(b"x" * 30)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 3 + 4


def test_control_when_holds_flap_is_not_granted_anew(kit):
    kit.receiver.pause("a", "x", control_bytes=10)
    kit.feed.append(b"x" * 10)
    kit.settle()
    for _ in range(5):
        kit.receiver.resume("a")
        kit.receiver.pause("a", "x", control_bytes=10)
        kit.feed.append(b"y" * 10)
        kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 10
    kit.advance(1.0)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 20


def test_control_when_a_part_was_kept_before_is_offered_as_control(kit):
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 1), InputResult(InputVerdict.NEED_MORE, 0)]
    kit.ready(b"abc")
    kit.receiver.pause("a", "x", control_bytes=10)
    kit.rounds()
    kit.ready(b"d")
    assert kit.handler.offers == [b"abc", b"bc", b"bcd"]
    assert kit.handler.control == [False, True, True]


def test_control_when_moved_between_groups_goes_on_after_the_interval(kit):
    kit.receiver.pause("a", "x", control_bytes=2)
    kit.feed.append(b"abcd")
    kit.settle()
    old = kit.host
    kit.receiver.detached()
    assert old.deadlines.count == 0
    kit.host = type(old)()
    kit.receiver.attached(kit.host)
    assert min(entry.when for entry in kit.host.deadlines._entries.values()) == 101.0
    kit.advance(1.0)
    kit.settle()
    assert kit.receiver.statistics().control_bytes_in == 4


def test_deadline_when_closed_is_removed(kit):
    kit.receiver.pause("a", "x", control_bytes=2)
    kit.feed.append(b"abcd")
    kit.settle()
    assert kit.host.deadlines.count == 1
    kit.receiver.close()
    assert kit.host.deadlines.count == 0


def test_pause_when_arguments_are_wrong_is_refused(kit):
    with pytest.raises(LocalProtocolError):
        kit.receiver.pause("a", "x", control_bytes=-1)
    for number in range(MAX_HOLDERS):
        kit.receiver.pause(number, "x")
    with pytest.raises(LocalProtocolError):
        kit.receiver.pause("one more", "x")
    assert kit.receiver.pause(0, "y") is False


def test_statistics_when_held_tell_reasons_and_times(kit):
    kit.receiver.pause("a", "soft limit")
    kit.now += 2.0
    kit.receiver.pause("b", "busy")
    kit.now += 1.0
    statistics = kit.receiver.statistics()
    assert statistics.held_by == {"soft limit": 1, "busy": 1}
    assert (statistics.paused_s, statistics.longest_pause_s) == (3.0, 3.0)
    kit.receiver.resume("a")
    kit.receiver.resume("b")
    kit.now += 10.0
    kit.receiver.pause("a", "soft limit")
    kit.now += 1.0
    statistics = kit.receiver.statistics()
    assert statistics.pauses == {"soft limit": 2, "busy": 1}
    assert (statistics.paused_s, statistics.longest_pause_s) == (4.0, 3.0)
    for number in range(50):
        kit.receiver.pause("a", f"reason {number}")
    counted = kit.receiver.statistics().pauses
    assert len(counted) <= MAX_REASONS + 1
    assert sum(counted.values()) == 53
    with pytest.raises(AttributeError):
        statistics.paused_s = 0.0


def test_statistics_when_the_stream_has_ended_stop_the_pause(kit):
    kit.receiver.pause("a", "x")
    kit.now += 2.0
    kit.receiver.close()
    kit.now += 5.0
    statistics = kit.receiver.statistics()
    assert (statistics.paused_s, statistics.longest_pause_s, statistics.held_by) == (2.0, 2.0, {})


def test_pause_when_called_from_many_threads_ends_level(kit):
    stop = threading.Event()

    def flap(owner: int) -> None:
        for _ in range(300):
            kit.receiver.pause(owner, "x", control_bytes=owner)
            kit.receiver.trigger_input()
            kit.receiver.resume(owner)

    def own_thread() -> None:
        while not stop.is_set():
            kit.processor.run_round()
        kit.rounds()

    owner_thread = threading.Thread(target=own_thread)
    threads = [threading.Thread(target=flap, args=(owner,)) for owner in range(3)]
    for thread in (owner_thread, *threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    stop.set()
    owner_thread.join(30)
    assert not kit.receiver.paused
    assert kit.receiver.reading
    # Every change was told exactly once: the descriptor was watched and unwatched in turn.
    assert kit.watched == [number % 2 == 0 for number in range(len(kit.watched))]
    statistics = kit.receiver.statistics()
    assert statistics.held_by == {}
    assert statistics.pauses == {"x": 900}
    assert kit.errors == []


class ReceiverMachine(RuleBasedStateMachine):
    """Random holds, triggers, input, answers and time, checked against what may be read at each moment."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch("flowctl.receiver.TURN_BUDGET_BYTES", 100)
        self.patch.start()
        self.kit = Kit(capacity_bytes=64)
        self.holders: dict[str, int] = {}
        self.sent = bytearray()
        self.taken = bytearray()
        self.ended = False
        self.kit.handler.on_offer = self.offered
        self.fraction = 1.0
        self.windows: list[tuple[float, int]] = []
        inner = self.kit.receiver._read_into

        def checked(room: memoryview) -> int:
            assert 0 not in self.holders.values(), "read while a holder grants nothing"
            count = inner(room)
            if self.holders:
                self.windows.append((self.kit.now, count))
            return count

        object.__setattr__(self.kit.receiver, "_read_into", checked)
        self.verdict = InputVerdict.DONE

    def offered(self, data: memoryview) -> None:
        assert 0 not in self.holders.values(), "offered while a holder grants nothing"
        assert self.kit.handler.control[-1] == bool(self.holders)
        count = min(len(data), round(len(data) * self.fraction))
        if self.verdict is InputVerdict.DONE and data and not count:
            count = 1
        if self.verdict is InputVerdict.NEED_MORE and len(data) - count >= 64:
            count = len(data)
        self.taken += data[:count]
        self.kit.handler.answers = [InputResult(self.verdict, count)]

    @rule(data=st.binary(min_size=1, max_size=90))
    def send(self, data):
        if not self.ended:
            self.sent += data
            self.kit.ready(data)

    @rule()
    def end(self):
        if not self.ended:
            self.ended = True
            self.kit.ready(EOF)

    @rule(
        verdict=st.sampled_from([InputVerdict.DONE, InputVerdict.NEED_MORE, InputVerdict.BLOCK]),
        fraction=st.floats(0, 1),
    )
    def answer_from_now_on(self, verdict, fraction):
        self.verdict, self.fraction = verdict, fraction

    @rule(owner=st.sampled_from("abc"), control_bytes=st.sampled_from([0, 0, 5, 20]))
    def pause(self, owner, control_bytes):
        if not self.kit.handler.ends:
            self.holders[owner] = control_bytes
        self.kit.receiver.pause(owner, "test", control_bytes=control_bytes)

    @rule(owner=st.sampled_from("abc"))
    def resume(self, owner):
        held = self.holders.pop(owner, None) is not None
        assert bool(self.kit.receiver.resume(owner)) == (held and not self.kit.handler.ends)

    @rule()
    def trigger(self):
        self.kit.receiver.trigger_input()

    @rule(seconds=st.sampled_from([0.3, 1.0]))
    def time_passes(self, seconds):
        self.kit.advance(seconds)

    @rule()
    def turn(self):
        self.kit.settle()

    @rule()
    def move(self):
        self.kit.receiver.detached()
        self.kit.host = type(self.kit.host)()
        self.kit.receiver.attached(self.kit.host)

    @invariant()
    def bytes_are_conserved_in_order(self):
        kept = self.kit.receiver.statistics().kept_bytes
        read = self.kit.receiver.statistics().bytes_in
        assert self.taken == self.sent[: len(self.taken)]
        if not self.kit.handler.ends:
            assert len(self.taken) + kept == read
        assert kept <= 64
        assert len(self.kit.handler.ends) <= 1

    @invariant()
    def control_stays_within_the_grant(self):
        # In any half-open second there are at most two grants begun, each of at most 20 bytes.
        recent = sum(count for when, count in self.windows if when > self.kit.now - 1.0)
        assert recent <= 40

    def teardown(self):
        """In the end, with nobody holding and a willing handler, everything arrives and then the end, once."""
        self.patch.stop()
        self.verdict, self.fraction = InputVerdict.DONE, 1.0
        self.ended_before = bool(self.kit.handler.ends)
        for owner in list(self.holders):
            self.resume(owner)
        # Offered once more before the end comes: what NEED_MORE has left over at the end is dropped, as it should be.
        self.kit.receiver.trigger_input()
        self.kit.settle()
        self.end()
        self.kit.settle()
        assert self.kit.handler.ends == ["eof"]
        assert self.kit.receiver.statistics().bytes_in == len(self.sent)
        if not self.ended_before:  # else the handler may have asked for more than ever came
            assert self.taken == self.sent
        assert self.kit.errors == []


ReceiverMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestReceiverMachine = ReceiverMachine.TestCase
