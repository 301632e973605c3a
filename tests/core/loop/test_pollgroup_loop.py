"""Poll groups on both loops: calls, rounds of jobs, descriptors, deadlines, and load figures."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading

import pytest
from connection_kit import wait_until
from pollgroup_kit import WAIT_S, FakePollable, on_thread

from flowctl.core.loop.loadmeter import SMOOTHING_S, STRAIN_S, WINDOW_S, LoadMeter
from flowctl.core.loop.watches import GATHER_S, GATHERED_PER_TURN, MOST_PER_TURN, FdWatches, gather_pause_s
from flowctl.deferred import Registration
from flowctl.errors import ClosedError, InternalError, LocalProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.testing import ManualClock

# --- calls and rounds --------------------------------------------------------------------------------------------


def test_call_soon_when_called_from_everywhere_keeps_each_callers_order(group):
    log: list[int] = []
    done = threading.Event()

    def inside() -> None:
        for number in range(100, 110):
            group.call_soon(log.append, number)
        group.call_soon(done.set)

    for number in range(10):
        group.call_soon(log.append, number)
    group.call_soon(inside)
    assert done.wait(WAIT_S)
    assert log == [*range(10), *range(100, 110)]


def test_task_when_it_fails_unheard_is_reported(group, errors):
    on_thread(group, lambda: group.loop.call_soon(lambda: 1 // 0))
    on_thread(group, lambda: None)
    assert [type(error) for _, error in errors] == [ZeroDivisionError]


def test_call_later_when_time_has_passed_calls_and_can_be_cancelled(group):
    done, cancelled = threading.Event(), []

    def arm() -> None:
        group.call_later(0.0, cancelled.append, 1).cancel()
        group.call_later(0.001, done.set)

    on_thread(group, arm)
    assert done.wait(WAIT_S)
    assert cancelled == []
    with pytest.raises(LocalProtocolError):
        group.call_later(0.0, print)


def test_rounds_when_work_is_left_go_on_by_themselves(group):
    registration = Registration()
    left = list(range(10))
    done = threading.Event()
    job = registration.job(lambda: left.pop() is not None if left else done.set())
    registration.bind(group.processor)
    registration.schedule(job)
    assert done.wait(WAIT_S)
    assert left == []


def test_rounds_when_work_is_left_let_input_in_between(group):
    ours, theirs = socket.socketpair()
    heard = threading.Event()
    pollable = FakePollable()
    rounds = []

    def job() -> bool:
        rounds.append(1)
        return not heard.is_set()

    def attach(_) -> None:
        group.watch_input(ours, lambda: (heard.set(), group.unwatch_input(ours)))

    pollable.on_attached = attach
    pollable.registration.schedule(pollable.registration.job(job))
    group.add_pollable(pollable, pollable.registration)
    assert pollable.attached_event.wait(WAIT_S)
    theirs.send(b"x")
    assert heard.wait(WAIT_S)
    on_thread(group, lambda: None)
    assert len(rounds) > 0
    ours.close()
    theirs.close()


def test_schedule_when_loop_sleeps_wakes_it_from_any_thread(group):
    pollable = FakePollable()
    group.add_pollable(pollable, pollable.registration)
    done = threading.Semaphore(0)
    job = pollable.registration.job(done.release)
    for _ in range(50):
        pollable.registration.schedule(job)
        assert done.acquire(timeout=WAIT_S)
    assert group.processor.statistics().run == 50


def test_schedule_when_bound_before_start_runs_at_the_start(make_group):
    group = make_group(start=False)
    registration = Registration()
    registration.bind(group.processor)
    done = threading.Event()
    registration.schedule(registration.job(done.set))
    group.start()
    assert done.wait(WAIT_S)


def test_schedule_when_group_has_stopped_keeps_the_job(make_group, errors):
    """Nobody runs jobs on a stopped group, but scheduling there is no error, and they can move elsewhere."""
    gone, alive = make_group("gone"), make_group("alive")
    registration = Registration()
    registration.bind(gone.processor)
    assert gone.stop(WAIT_S)
    done = threading.Event()
    assert registration.schedule(registration.job(done.set))
    registration.migrate(alive.processor)
    assert done.wait(WAIT_S)
    assert errors == []


# --- descriptors -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["epoll", "loop"])
def watcher(request, make_group, monkeypatch):
    """A group that watches descriptors by an epoll of its own, and one that leaves it to the loop."""
    monkeypatch.setattr("flowctl.core.loop.watches._HAS_EPOLL", request.param == "epoll")
    return make_group()


class Pair:
    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.fd = self.ours.fileno()
        self.heard: list[bytes] = []
        self.event = threading.Event()

    def on_input(self) -> None:
        self.heard.append(self.ours.recv(100))
        self.event.set()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


class HandLoop:
    """A loop that is turned by hand: it says what it was asked to watch and to call."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.readers: dict[int, object] = {}
        self.calls: list[tuple[float, object]] = []

    def add_reader(self, fd, callback, *args) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd) -> None:
        del self.readers[fd]

    def call_later(self, delay_s, callback):
        self.calls.append((self.clock() + delay_s, callback))
        return self

    def cancel(self) -> None:
        self.calls.clear()


class Gathering:
    """Pairs whose input may wait, on a loop turned by hand, with reads that cost what they are told to."""

    def __init__(self, count: int = 1) -> None:
        self.clock = ManualClock(100.0)
        self.loop = HandLoop(self.clock)
        self.cost_s = 0.0
        self.read: list[Pair] = []
        self.watches = FdWatches(
            self.loop, self.run, lambda where, error: None, clock=self.clock, processor_share=lambda: 1.0
        )
        self.pairs = [Pair() for _ in range(count)]
        for pair in self.pairs:
            self.watches.watch_input(pair.ours, lambda pair=pair: self.read.append(pair), gather=True)
        *_, self.look = self.loop.readers.values()

    def run(self, callback) -> None:
        callback()
        self.read[-1].on_input()
        self.clock.advance(self.cost_s)

    def strain(self) -> None:
        """Let reading take half of the time for long enough to count."""
        self.cost_s = 0.01
        for _ in range(2000):
            self.pairs[0].theirs.send(b"x")
            self.look()
            self.clock.advance(0.01)
        self.read.clear()
        self.loop.calls.clear()

    def close(self) -> None:
        self.watches.clear()
        for pair in self.pairs:
            pair.close()


@pytest.fixture
def gathering():
    made = Gathering(GATHERED_PER_TURN + 3)
    yield made
    made.close()


def test_gathered_input_when_reading_is_cheap_is_left_to_the_loop(gathering):
    gathering.pairs[0].theirs.send(b"one")
    gathering.look()
    assert gathering.read == [gathering.pairs[0]]
    assert gathering.loop.calls == []
    assert gathering.watches.gather_pause_s == 0.0
    assert len(gathering.loop.readers) == 2


def test_gathered_input_when_reading_takes_much_waits_for_the_pause(gathering):
    """What comes within a pause that began with the look before is read together; an idle look ends the pauses."""
    gathering.strain()
    assert gathering.watches.gather_pause_s == GATHER_S
    gathering.pairs[0].theirs.send(b"one")
    began = gathering.clock()
    gathering.look()
    assert len(gathering.loop.readers) == 1
    assert gathering.loop.calls == [(pytest.approx(began + GATHER_S), gathering.look)]
    for pair in gathering.pairs[:3]:
        pair.theirs.send(b"two")
        pair.theirs.send(b"three")
    gathering.read.clear()
    gathering.look()
    assert gathering.read == gathering.pairs[:3]
    assert gathering.pairs[1].heard == [b"twothree"]
    gathering.look()
    assert len(gathering.loop.readers) == 2


def test_gathered_input_when_there_is_more_than_a_turn_is_read_in_several(gathering):
    gathering.strain()
    for pair in gathering.pairs:
        pair.theirs.send(b"one")
    began = gathering.clock()
    gathering.cost_s = 0.0001
    gathering.look()
    assert len(gathering.read) == GATHERED_PER_TURN
    assert gathering.loop.calls == []
    gathering.look()
    assert len(gathering.read) == len(gathering.pairs)
    assert [when for when, _ in gathering.loop.calls] == [pytest.approx(began + GATHER_S)]


def test_gathered_input_when_it_never_ends_has_its_pause(gathering):
    gathering.strain()
    for pair in gathering.pairs:
        pair.theirs.send(b"one")
    gathering.cost_s = 0.0001
    gathering.look()
    for pair in gathering.pairs:
        pair.theirs.send(b"two")
    gathering.look()
    assert len(gathering.read) == 2 * GATHERED_PER_TURN
    assert len(gathering.loop.calls) == 1


def test_gather_pause_when_reading_takes_more_is_longer_up_to_its_limit():
    pauses = [gather_pause_s(share / 1000) for share in range(100)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[20], pauses[-1]) == (0.0, 0.0, GATHER_S)
    assert min(pause for pause in pauses if pause) >= 0.001


def test_watch_input_when_it_may_wait_is_heard_all_the_same(watcher, pair):
    written = threading.Event()
    on_thread(watcher, lambda: watcher.watch_input(pair.ours, pair.on_input, gather=True))
    for number, gather in enumerate((False, True, True)):
        pair.theirs.send(b"word")
        assert pair.event.wait(WAIT_S)
        pair.event.clear()
        assert pair.heard == [b"word"] * (number + 1)
        on_thread(watcher, lambda gather=gather: watcher.watch_input(pair.ours, pair.on_input, gather=gather))
    on_thread(watcher, watcher.watch_output, pair.ours, written.set)
    assert written.wait(WAIT_S)
    assert on_thread(watcher, watcher.unwatch_output, pair.ours)
    pair.theirs.close()
    assert pair.event.wait(WAIT_S)
    assert pair.heard[-1] == b""
    assert on_thread(watcher, watcher.unwatch_input, pair.ours)
    assert watcher.statistics().watched == 0
    assert on_thread(watcher, watcher.gather_pause_s) == 0.0


def test_watch_input_when_readable_calls_until_unwatched(watcher, pair):
    on_thread(watcher, watcher.watch_input, pair.ours, pair.on_input)
    assert watcher.statistics().watched == 1
    pair.theirs.send(b"one")
    assert pair.event.wait(WAIT_S)
    assert [on_thread(watcher, watcher.unwatch_input, pair.ours) for _ in range(2)] == [True, False]
    pair.theirs.send(b"two")
    assert pair.ours.recv(100) == b"two"
    assert pair.heard == [b"one"]
    assert watcher.statistics().watched == 0


def test_watch_that_rests_when_there_is_room_tells_nobody_and_can_be_taken_up_again(watcher, pair):
    told, again = [], threading.Event()

    def watch() -> None:
        watcher.watch_output(pair.ours, lambda: told.append(1))
        watcher.rest_output(pair.ours)

    on_thread(watcher, watch)
    wait_until(lambda: watcher.statistics().watched == 0)  # the kernel told of room, and tells no more
    on_thread(watcher, watcher.watch_output, pair.ours, lambda: (again.set(), watcher.rest_output(pair.ours)))
    assert again.wait(WAIT_S)
    again.clear()
    on_thread(watcher, watcher.watch_output, pair.ours, lambda: (again.set(), watcher.rest_output(pair.ours)))
    assert again.wait(WAIT_S)
    on_thread(watcher, watcher.unwatch_output, pair.ours)
    assert watcher.statistics().watched == 0
    assert not told


def test_watch_output_when_writable_calls_until_unwatched(watcher, pair):
    done = threading.Event()

    def on_output() -> None:
        assert watcher.unwatch_output(pair.ours)
        assert not watcher.unwatch_output(pair.ours)
        done.set()

    def watch() -> None:
        watcher.watch_input(pair.ours, pair.on_input)
        watcher.watch_output(pair.ours, on_output)

    on_thread(watcher, watch)
    assert done.wait(WAIT_S)
    pair.theirs.send(b"still")
    assert pair.event.wait(WAIT_S)
    on_thread(watcher, watcher.unwatch_input, pair.ours)


def test_watch_input_when_watched_already_replaces_the_callback(watcher, pair):
    old = []
    on_thread(watcher, watcher.watch_input, pair.ours, lambda: old.append(1))
    on_thread(watcher, watcher.watch_input, pair.ours, pair.on_input)
    pair.theirs.send(b"x")
    assert pair.event.wait(WAIT_S)
    assert old == []
    on_thread(watcher, watcher.unwatch_input, pair.ours)


def test_unwatch_when_called_from_the_others_callback_stops_it_in_the_same_poll(watcher):
    pairs = [Pair(), Pair()]
    called = []

    def on_input(number: int) -> None:
        called.append(number)
        for pair in pairs:
            watcher.unwatch_input(pair.ours)

    def watch() -> None:
        for number, pair in enumerate(pairs):
            pair.theirs.send(b"x")
            watcher.watch_input(pair.ours, lambda number=number: on_input(number))

    on_thread(watcher, watch)
    for _ in range(5):
        on_thread(watcher, lambda: None)
    assert len(called) == 1
    for pair in pairs:
        pair.close()


def test_watch_when_the_socket_is_closed_raises_closed(watcher, pair):
    fd = pair.fd
    pair.close()
    for source in (pair.ours, fd, -1):
        for watch in (watcher.watch_input, watcher.watch_output):
            with pytest.raises(ClosedError):
                on_thread(watcher, watch, source, print)
        assert on_thread(watcher, watcher.unwatch_input, source) is False
        assert on_thread(watcher, watcher.unwatch_output, source) is False
    assert watcher.statistics().watched == 0


def test_watch_when_a_number_was_closed_while_watched_hears_the_new_socket(watcher, errors):
    """A socket closed without unwatching must not make the loop deaf to the next socket with its number."""
    for watch_old in (watcher.watch_input, watcher.watch_output):
        old = Pair()
        on_thread(watcher, watch_old, old.fd, lambda: None)
        on_thread(watcher, lambda: None)
        new = Pair()
        os.dup2(new.ours.fileno(), old.fd)  # closes the old socket and gives its number to the new one
        heard = threading.Event()
        on_thread(watcher, watcher.watch_input, old.fd, lambda new=new, heard=heard: (new.ours.recv(1), heard.set()))
        new.theirs.send(b"x")
        assert heard.wait(WAIT_S)
        assert on_thread(watcher, watcher.unwatch_input, old.fd) is True
        old.close()
        new.close()
    assert [type(error) for _, error in errors] == [InternalError, InternalError]


def test_unwatch_when_the_socket_is_closed_already_is_no_error(watcher, pair, errors):
    def watch_and_close() -> None:
        watcher.watch_input(pair.ours, pair.on_input)
        watcher.watch_output(pair.ours, lambda: None)
        pair.ours.close()

    on_thread(watcher, watch_and_close)
    on_thread(watcher, lambda: None)
    for unwatch in (watcher.unwatch_input, watcher.unwatch_output):
        assert [on_thread(watcher, unwatch, pair.ours) for _ in range(2)] == [True, False]
    assert watcher.statistics().watched == 0
    assert pair.ours.fileno() == -1
    assert errors == []


def test_watch_when_called_on_another_thread_is_refused(watcher, pair):
    for call in (watcher.watch_input, watcher.watch_output):
        with pytest.raises(LocalProtocolError):
            call(pair.fd, print)
    for call in (watcher.unwatch_input, watcher.unwatch_output):
        with pytest.raises(LocalProtocolError):
            call(pair.fd)


def test_watch_when_many_are_ready_serves_all_of_them(watcher):
    pairs = [Pair() for _ in range(2 * MOST_PER_TURN + 10)]
    for pair in pairs[::2]:
        pair.theirs.send(b"x")
    on_thread(watcher, lambda: [watcher.watch_input(pair.ours, pair.on_input) for pair in pairs])
    for pair in pairs[::2]:
        assert pair.event.wait(WAIT_S)
    assert {bytes(b"".join(pair.heard)) for pair in pairs[1::2]} == {b""}
    on_thread(watcher, lambda: [watcher.unwatch_input(pair.ours) for pair in pairs])
    for pair in pairs:
        pair.close()


def test_watch_when_the_other_end_has_gone_calls_whoever_watches(watcher, pair):
    read, wrote = threading.Event(), threading.Event()

    def watch() -> None:
        watcher.watch_input(pair.ours, lambda: (read.set(), watcher.unwatch_input(pair.ours)))
        pair.theirs.close()

    on_thread(watcher, watch)
    assert read.wait(WAIT_S)
    on_thread(watcher, watcher.watch_output, pair.ours, lambda: (wrote.set(), watcher.unwatch_output(pair.ours)))
    assert wrote.wait(WAIT_S)
    assert watcher.statistics().watched == 0


@pytest.fixture
def streams():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname(), WAIT_S)
        ours, _ = listener.accept()
    ours.setblocking(False)
    with ours, peer:
        yield ours, peer


def test_watch_end_when_the_peer_half_closes_and_resets_tells_each_once(group, streams):
    """Neither input nor being told already wakes it again; the thread sleeps in between."""
    ours, peer = streams
    told = []
    on_thread(group, lambda: group.watch_end(ours, told.append))
    peer.sendall(b"not read")
    on_thread(group, lambda: None)
    assert told == []
    peer.shutdown(socket.SHUT_WR)
    wait_until(lambda: told == [False])
    turns = group.statistics().turns
    for _ in range(5):
        on_thread(group, lambda: None)
    assert group.statistics().turns <= turns + 5
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    wait_until(lambda: told == [False, True])
    for _ in range(5):
        on_thread(group, lambda: None)
    assert told == [False, True]
    assert group.statistics().watched == 0
    assert on_thread(group, lambda: group.unwatch_input(ours)) is False


def test_watch_end_when_input_is_watched_instead_gives_way(group, streams):
    ours, peer = streams
    told, writable, read = [], threading.Event(), []
    on_thread(group, lambda: group.watch_end(ours, told.append))

    def on_output() -> None:
        group.unwatch_output(ours)
        writable.set()

    on_thread(group, lambda: group.watch_output(ours, on_output))
    assert writable.wait(WAIT_S)
    peer.shutdown(socket.SHUT_WR)
    wait_until(lambda: told == [False])

    def on_input() -> None:
        read.append(ours.recv(10))
        group.unwatch_input(ours)

    on_thread(group, lambda: group.watch_input(ours, on_input))
    wait_until(lambda: read == [b""])
    on_thread(group, lambda: group.watch_end(ours, told.append))
    wait_until(lambda: told == [False, False])
    assert on_thread(group, lambda: group.unwatch_input(ours)) is True
    assert group.statistics().watched == 0


def test_watch_when_a_socket_was_closed_while_watched_hears_the_next_with_its_number(watcher, errors):
    old = Pair()
    on_thread(watcher, watcher.watch_output, old.ours, lambda: watcher.unwatch_output(old.ours))
    on_thread(watcher, lambda: None)
    on_thread(watcher, watcher.watch_input, old.ours, lambda: None)
    number = old.fd
    new = Pair()
    os.dup2(new.ours.fileno(), number)
    old.ours.detach()  # as if it had been closed: its number is the new one's
    ours = socket.socket(fileno=number)
    heard = threading.Event()
    on_thread(watcher, watcher.watch_input, ours, lambda: (ours.recv(1), heard.set()))
    new.theirs.send(b"x")
    assert heard.wait(WAIT_S)
    assert on_thread(watcher, watcher.unwatch_input, ours) is True
    assert [type(error) for _, error in errors] == [InternalError]
    ours.close()
    old.theirs.close()
    new.close()


# --- deadlines and figures ---------------------------------------------------------------------------------------


class Alarm:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.times: list[float] = []

    def deadline_due(self, now: float) -> None:
        self.times.append(now)
        self.event.set()


def test_deadlines_when_due_are_called_on_the_thread_not_early(group):
    alarms = [Alarm() for _ in range(5)]
    wanted: list[float] = []

    def set_all() -> None:
        now = group.clock()
        for number, alarm in enumerate(alarms):
            wanted.append(now + 0.004 * (5 - number))
            group.deadlines.set(alarm, wanted[-1])

    on_thread(group, set_all)
    for alarm in alarms:
        assert alarm.event.wait(WAIT_S)
    assert [len(alarm.times) for alarm in alarms] == [1] * 5
    assert all(alarm.times[0] >= when for alarm, when in zip(alarms, wanted, strict=True))
    # One turn to set them, and one or two of the timer for each: it does not spin until the time has come.
    assert group.statistics().turns <= 20
    assert group.statistics().deadlines == 0


def test_deadlines_when_touched_on_another_thread_are_refused(group):
    with pytest.raises(LocalProtocolError):
        group.deadlines.set(Alarm(), 1.0)


def test_deadlines_when_the_clock_is_turned_by_hand_follow_it(factory):
    now = [100.0]

    async def main() -> None:
        group = PollGroup.on_running_loop("here", clock=lambda: now[0])
        alarm = Alarm()
        alarm.called = asyncio.Event()
        alarm.event.set = alarm.called.set
        group.deadlines.set(alarm, 100.001)
        timer = asyncio.get_running_loop().create_future()
        group.loop.call_later(0.01, timer.set_result, None)
        await timer
        assert alarm.times == []
        now[0] = 101.0
        await alarm.called.wait()
        assert alarm.times == [101.0]
        group.stop()

    loop = factory()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), WAIT_S))
    finally:
        loop.close()


def test_statistics_when_handlers_ran_count_them(group):
    before = group.statistics()

    def work() -> None:
        group.bytes_in += 10
        group.bytes_out += 20

    on_thread(group, work)
    on_thread(group, lambda: None)  # a turn is counted when it has ended
    after = group.statistics()
    assert (after.name, after.bytes_in, after.bytes_out, after.errors) == ("g", 10, 20, 0)
    assert after.turns > before.turns
    assert 0.0 <= after.busy_fraction <= 1.0
    assert after.longest_turn_s > 0.0
    with pytest.raises(AttributeError):
        after.turns = 1


def test_statistics_when_handlers_are_nested_count_the_outer_one(group):
    """A handler that removes a pollable, whose detached runs inside it, is one turn."""
    pollable = FakePollable()
    group.add_pollable(pollable, pollable.registration)
    on_thread(group, lambda: None)
    outcome = []

    def work() -> None:
        before = group.statistics().turns
        group.remove_pollable(pollable)
        outcome.append(group.statistics().turns - before)

    on_thread(group, work)
    assert pollable.what() == ["attached", "detached"]
    assert outcome == [0]


def test_load_meter_when_the_thread_waits_shows_the_share_it_computed():
    """Processor time over handler time is asked for once a window, not at each turn, and smoothed."""
    asked: list[float] = []

    def processor_time() -> float:
        asked.append(0.0)
        return len(asked) * WINDOW_S / 4

    meter, now = LoadMeter(0.0, processor_time), 0.0
    assert meter.processor_share == 1.0
    for _ in range(3000):
        meter.count_turn(now, now + 0.005)
        now += 0.01
    assert len(asked) <= now / WINDOW_S + 1
    assert meter.processor_share == pytest.approx(0.5, abs=0.02)


def test_load_meter_when_half_busy_approaches_one_half():
    meter = LoadMeter(0.0)
    now = 0.0
    while now < 6 * SMOOTHING_S:
        meter.count_turn(now, now + 0.01)
        now += 0.02
    assert meter.busy_fraction(now) == pytest.approx(0.5, abs=0.01)
    assert meter.busy_fraction(now + SMOOTHING_S) == pytest.approx(0.5 / 2.718, abs=0.02)
    assert meter.busy_fraction(now) == pytest.approx(0.5, abs=0.01)


def test_load_meter_when_a_window_had_no_room_is_strained_for_a_while():
    meter = LoadMeter(0.0)
    meter.count_turn(0.0, WINDOW_S / 2)
    meter.count_turn(WINDOW_S, WINDOW_S)
    assert not meter.strained(WINDOW_S)
    meter.count_turn(WINDOW_S, 2 * WINDOW_S)
    assert meter.strained(2 * WINDOW_S + STRAIN_S - 0.01)
    assert not meter.strained(2 * WINDOW_S + STRAIN_S)


def test_load_meter_when_turns_are_counted_keeps_the_longest():
    meter = LoadMeter(5.0)
    assert meter.busy_fraction(5.0) == 0.0
    for took in (0.01, 0.3, 0.02):
        meter.count_turn(5.0, 5.0 + took)
    assert meter.turns == 3
    assert meter.longest_turn_s == pytest.approx(0.3)
