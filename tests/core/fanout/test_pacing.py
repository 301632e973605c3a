"""The parts of a fan-out: pacing, crossings of limits, pieces of a log."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import ssl
import sys
import weakref
from pathlib import Path

import pytest
from flow_kit import Published
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.fanout.calendar import Crossings
from flowctl.core.fanout.cohort import Piece, gather, socket_behind
from flowctl.core.fanout.pacing import ROUND_BOUNDS_MS, ROUND_SHARE, Pacing, RoundMeter
from flowctl.core.flow.limits import OFF_MARK
from flowctl.testing import ManualGroup, ScriptedTransport


def settled(cost_s, *, busy=0.0, ceiling_s=0.04, pacing=None, rounds=2000):
    pacing = pacing or Pacing(ceiling_s)
    now = 0.0
    for _ in range(rounds):
        now += max(pacing.interval_s, 0.01)
        pacing.round_ended(cost_s, busy, now)
    return pacing


@pytest.mark.parametrize(
    ("viewers", "interval_ms"),
    [(1, 0), (9, 0), (20, 5), (40, 10), (60, 15), (80, 20), (150, 30), (1000, 40), (4000, 40)],
)
def test_interval_when_rounds_cost_10_us_a_viewer_grows_with_their_number(viewers, interval_ms):
    assert settled(viewers * 10e-6).interval_s == pytest.approx(interval_ms / 1000)


@pytest.mark.parametrize("cost_us", [1, 50, 200, 300, 800, 1500, 3000, 50_000])
@pytest.mark.parametrize("busy", [0.0, 0.3, 0.5, 0.7])
def test_interval_when_below_the_ceiling_keeps_rounds_within_their_share(cost_us, busy):
    pacing = settled(cost_us / 1e6, busy=busy)
    assert 0 <= pacing.interval_s <= 0.04
    if 0 < pacing.interval_s < 0.04:
        assert cost_us / 1e6 / pacing.interval_s <= ROUND_SHARE * 1.001


def test_interval_when_the_thread_is_busy_is_the_ceiling():
    assert settled(50e-6, busy=0.2).interval_s == 0
    assert settled(50e-6, busy=0.9).interval_s == 0.04


def test_interval_when_cost_rises_is_longer_at_once_and_shorter_only_after_a_while():
    pacing = settled(50e-6)
    for _ in range(20):
        pacing.round_ended(0.01, 0.1, 100.0)
    assert pacing.interval_s == 0.04
    seen, now = [], 100.0
    while now < 120:
        now += 0.04
        pacing.round_ended(50e-6, 0.1, now)
        if not seen or seen[-1][1] != pacing.interval_s:
            seen.append((now, pacing.interval_s))
    assert [interval for _, interval in seen] == pytest.approx([0.04, 0.03, 0.02, 0.015, 0.01, 0.005, 0.0])
    assert all(after[0] - before[0] >= 2 for before, after in itertools.pairwise(seen))


def test_interval_when_cost_swings_about_a_step_does_not():
    pacing = settled(0.95e-3)
    intervals = [pacing.interval_s]
    for number in range(5000):
        pacing.round_ended(1.1e-3 if number // 20 % 2 else 0.9e-3, 0.1, 100 + number * 0.04)
        intervals.append(pacing.interval_s)
    assert sum(before != after for before, after in itertools.pairwise(intervals)) <= 1


def test_interval_when_the_calm_is_broken_waits_for_another_one():
    pacing = Pacing(0.04)
    for _ in range(100):
        pacing.round_ended(1.0, 0.0, 0.0)
    for now, cost_s in ((0.0, 0.0), (1.9, 1.0), (2.0, 0.0), (3.9, 0.0)):
        for _ in range(100):
            pacing.round_ended(cost_s, 0.0, now)
    assert pacing.interval_s == 0.04
    pacing.round_ended(0.0, 0.0, 4.0)
    assert pacing.interval_s == 0.03


def test_interval_when_a_key_frame_costs_ten_times_does_not_move():
    pacing = Pacing(0.04)
    intervals = set()
    for number in range(1000):
        pacing.round_ended(500e-6 if number % 60 == 59 else 50e-6, 0.1, number * 0.03)
        intervals.add(pacing.interval_s)
    assert intervals == {0.0}


def test_interval_when_not_adaptive_or_zero_stays():
    fixed, none = Pacing(0.04, adaptive=False), Pacing(0.0)
    for pacing in (fixed, none):
        settled(1e-6, pacing=pacing)
        settled(0.1, busy=1.0, pacing=pacing)
    assert (fixed.interval_s, none.interval_s) == (0.04, 0.0)


def test_rounds_when_counted_are_in_the_class_of_their_duration():
    meter = RoundMeter()
    for took_ms in (0.2, 1.0, 1.1, 30, 50, 51, 1000):
        meter.count_round(took_ms / 1000)
    meter.count_turn(0.003)
    meter.count_turn(0.001)
    assert dict(zip([*ROUND_BOUNDS_MS, None], meter.by_duration, strict=True)) == {
        1: 2,
        2: 1,
        5: 0,
        10: 0,
        20: 0,
        50: 2,
        100: 1,
        None: 1,
    }
    assert (meter.rounds, meter.longest_round_s) == (7, 1.0)
    assert (meter.turns, meter.longest_turn_s) == (2, 0.003)


class Unordered:
    """An item like a Sender: it can be hashed but not compared."""

    __slots__ = ()


class Mortal:
    """An item whose end can be seen."""


def test_forget_when_it_was_the_last_one_keeps_nobody_alive():
    crossings = Crossings()
    item = Mortal()
    gone = weakref.ref(item)
    for offset in (10, 20):
        crossings.watch(item, offset, offset)
    crossings.forget(item)
    del item
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)
    assert gone() is None


def test_next_places_when_nobody_is_watched_are_never():
    crossings = Crossings()
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)
    crossings.watch("item", 3, OFF_MARK)
    crossings.due(3, 0)
    assert (crossings.next_offset, crossings.next_sequence) == (OFF_MARK, OFF_MARK)


def test_watch_when_places_are_equal_never_compares_items():
    crossings, items = Crossings(), [Unordered() for _ in range(50)]
    for item in items:
        crossings.watch(item, 7, 7)
    assert set(crossings.due(7, 7)) == set(items)


def rising(step):
    return 10**6 + step


def falling(step):
    return 10**6 - step


def never(_step):
    return OFF_MARK


@pytest.mark.parametrize("offset", [rising, falling, never])
@pytest.mark.parametrize("sequence", [rising, falling])
def test_watch_when_repeated_for_ever_keeps_the_heaps_small(offset, sequence):
    crossings = Crossings()
    for step in range(10_000):
        crossings.watch(step % 10, offset(step), sequence(step))
    assert len(crossings) == 10
    assert max(len(crossings._by_offset), len(crossings._by_sequence)) <= 4 * 10 + 16
    assert sorted(crossings.due(0, 2 * 10**6)) == list(range(10))


places = st.one_of(st.integers(0, 60), st.just(OFF_MARK))
calls = st.one_of(
    st.tuples(st.just("watch"), st.integers(0, 5), places, places),
    st.tuples(st.just("forget"), st.integers(0, 5), st.just(0), st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 60), st.integers(0, 60)),
)


@given(st.lists(calls, max_size=120))
@settings(max_examples=200, deadline=None)
def test_crossings_for_any_calls_do_what_a_dictionary_does(history):
    crossings, watched = Crossings(), {}
    for name, item, offset, sequence in history:
        if name == "watch":
            crossings.watch(item, offset, sequence)
            watched[item] = (offset, sequence)
            if min(offset, sequence) >= OFF_MARK:
                del watched[item]
        elif name == "forget":
            crossings.forget(item)
            watched.pop(item, None)
        else:
            expected = {key for key, place in watched.items() if place[0] <= offset or place[1] <= sequence}
            must_ask = offset >= crossings.next_offset or sequence >= crossings.next_sequence
            assert must_ask or not expected, "the places to ask at would have missed one"
            due = crossings.due(offset, sequence)
            assert len(due) == len(set(due))
            assert set(due) == expected
            watched = {key: place for key, place in watched.items() if key not in expected}
        assert len(crossings) == len(watched)
        nearest = [min((place[axis] for place in watched.values()), default=OFF_MARK) for axis in (0, 1)]
        assert crossings.next_offset <= nearest[0]
        assert crossings.next_sequence <= nearest[1]
        if name == "due":  # forgetting may leave a place that is asked at in vain, once
            assert [crossings.next_offset, crossings.next_sequence] == nearest


needs_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous memory files")


@pytest.fixture(name="piece")
def fixture_piece():
    published = Published(ManualGroup())
    start = published.log.tail
    published.script("KIA", 20_000)
    return Piece(start, published.log.tail)


def test_bytes_when_gathered_are_those_between_two_entries():
    published = Published(ManualGroup())
    entries = [published.log.tail]
    for letter in "KIA":
        published.script(letter)
        entries.append(published.log.tail)
    wires = [entry.wire for entry in entries[:-1]]
    assert gather(entries[0], entries[3]) == b"".join(wires)
    assert gather(entries[1], entries[2]) == wires[1]
    assert gather(entries[3], entries[3]) == b""


@needs_files
def test_file_when_asked_for_is_one_and_has_the_bytes(piece):
    descriptor = piece.descriptor()
    assert piece.descriptor() == descriptor >= 0
    assert os.pread(descriptor, 2 * len(piece.data), 0) == piece.data
    assert "flowctl-piece" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


@needs_files
def test_file_when_closed_is_gone_and_not_made_again(piece):
    descriptor = piece.descriptor()
    piece.close()
    piece.close()
    assert piece.descriptor() == -1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@needs_files
def test_file_when_its_piece_is_forgotten_is_closed(piece):
    other = Piece(piece.start, piece.end)
    descriptor = other.descriptor()
    inode = os.fstat(descriptor).st_ino
    del other
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        assert os.fstat(descriptor).st_ino == inode


@needs_files
@pytest.mark.parametrize("where", ["memfd_create", "write"])
def test_file_when_there_is_no_room_for_it_is_none(piece, monkeypatch, where):
    def fail(*_arguments):
        raise OSError(errno.ENOMEM, "scripted")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, where, fail)
    assert piece.descriptor() == -1
    monkeypatch.undo()
    assert piece.descriptor() == -1
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_socket_when_bytes_must_pass_through_something_is_none():
    assert socket_behind(ScriptedTransport().send) is None
    assert socket_behind(len) is None
    assert socket_behind(bytearray().extend) is None
    assert socket_behind(ssl.SSLSocket.send.__get__(object())) is None


def test_piece_when_gathering_fails_ends_without_a_second_error(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def fail(start, end):
        raise MemoryError("no room for the bytes")

    monkeypatch.setattr("flowctl.core.fanout.cohort.gather", fail)
    log = Published(ManualGroup()).log
    with pytest.raises(MemoryError):
        Piece(log.tail, log.tail)
    gc.collect()
    assert unraisable == []
