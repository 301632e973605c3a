"""What all streams that are written hold together: the largest gives way, and what is held twice counts once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from live_kit import AVC_HEADER, key
from remux_kit import Bench, source, tags_of

from flowctl.core.server import heap
from flowctl.live.remux import mediaprocess
from flowctl.live.remux.intake import MESSAGE_BYTES, Intake, MessagesLost, MessageTaken, PublicationBegan, QueueCut
from flowctl.live.remux.shares import StreamMemory
from flowctl.live.remux.writer import RecorderState


class Held:
    """A stream that holds what a test says, until it is cut."""

    def __init__(self, name, held_bytes=0):
        self.name, self.held_bytes = name, held_bytes
        self.accepts = True

    def cut(self, why):
        self.why = why
        self.accepts, self.held_bytes = False, 0

    def go_on(self):
        self.accepts = True


def memory_of(*held, limit_bytes=1000):
    made = StreamMemory(limit_bytes)
    made.holders = held
    return made


def test_memory_when_all_hold_too_much_has_the_largest_give_way_until_enough_is_free():
    streams = [Held("small", 150), Held("most", 400), Held("large", 300), Held("medium", 200)]
    held = memory_of(*streams)
    held.look()
    assert [item.name for item in streams if not item.accepts] == ["most"]
    assert "1.0 KiB are held of all streams" in streams[1].why
    assert "400 B of this one" in streams[1].why
    held.look()  # 650 are left, it may go on
    assert all(item.accepts for item in streams)


def test_memory_when_a_stream_that_was_cut_has_not_let_go_yet_cuts_no_other_one_for_it():
    streams = [Held("stuck", 900), Held("other", 300)]
    streams[0].cut = lambda why: setattr(streams[0], "accepts", False)
    held = memory_of(*streams)
    for _ in range(3):
        held.look()
    assert [item.accepts for item in streams] == [False, True]
    streams[1].held_bytes = 850  # and this one alone holds more than may stay
    held.look()
    assert [item.accepts for item in streams] == [False, False]


@pytest.mark.parametrize("piece_bytes", [1, 31, 300, 5000])
def test_memory_when_streams_grow_is_never_exceeded_by_more_than_a_step_and_a_message(piece_bytes):
    streams = [Held(str(number)) for number in range(7)]
    held = memory_of(*streams, limit_bytes=32_000)
    most = 0
    for turn in range(40_000 // piece_bytes * 3):
        stream = streams[turn * turn % 7]
        if stream.accepts:
            stream.held_bytes += piece_bytes
        held.note(piece_bytes)
        most = max(most, sum(item.held_bytes for item in streams))
    assert most > 16_000
    assert most <= 32_000 + 1000 + piece_bytes


def test_memory_when_much_was_let_go_is_given_back_once(monkeypatch):
    calls = []
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=calls.append))
    stream = Held("live/a", 100 << 20)
    held = memory_of(stream, limit_bytes=1 << 30)
    held.look()
    held.give_back()
    assert calls == []
    stream.held_bytes = 0
    for _ in range(3):
        held.give_back()
    assert calls == [0]
    held.due = True  # its last files were made meanwhile
    for _ in range(3):
        held.give_back()
    assert calls == [0, 0]


def test_intake_when_cut_lets_go_of_messages_and_keeps_words_and_the_last_headers():
    intake = Intake()
    intake.begin(0.0)
    old, new = AVC_HEADER + b"old", AVC_HEADER + b"new"
    intake.take(9, 0, old, 0.0)
    intake.take(9, 0, key(), 0.0)
    intake.begin(0.0)
    intake.take(9, 0, new, 0.0)
    intake.take(9, 0, key(), 0.0)
    intake.cut("too much")
    assert intake.size_bytes == 0
    intake.take(9, 1, key(), 0.0)  # refused, though a key frame with room
    assert intake.get(0) == [PublicationBegan(), PublicationBegan(), QueueCut("too much")]
    intake.go_on()
    intake.take(9, 2, key(), 0.0)
    lost, *rest = intake.get(0)
    assert lost == MessagesLost(3, 3 * len(key()), "too much")
    assert rest == [MessageTaken(9, 0, new), MessageTaken(9, 2, key())]
    assert intake.size_bytes == 0


def test_intake_when_another_publication_begins_while_it_is_cut_has_the_headers_of_that_one():
    intake = Intake()
    intake.begin(0.0)
    intake.take(9, 0, AVC_HEADER + b"old", 0.0)
    intake.cut("too much")
    intake.begin(0.0)
    intake.take(9, 0, AVC_HEADER + b"new", 0.0)
    intake.go_on()
    intake.take(9, 1, key(), 0.0)
    items = intake.get(0)
    began = len(items) - 1 - items[::-1].index(PublicationBegan())
    assert items[began + 1 :] == [MessageTaken(9, 0, AVC_HEADER + b"new"), MessageTaken(9, 1, key())]


def test_intake_when_much_waits_hands_it_over_in_parts():
    intake = Intake()
    for at in range(5):
        intake.take(9, at, bytes(600_000), 0.0)
    parts = [[item.timestamp for item in intake.get(0)] for _ in range(3)]
    assert parts == [[0, 1], [2, 3], [4]]
    assert intake.size_bytes == 0


def test_recording_when_it_is_cut_ends_its_file_and_goes_on_in_a_new_one(tmp_path):
    """What is in the file stays whole; the owner is told why nothing is written."""
    bench = Bench(tmp_path)
    tags = list(source(20))
    half = len(tags) // 2
    bench.begin()
    bench.feed(tags[:half])
    bench.recorder.work([QueueCut("too much is held")])
    assert bench.recorder.held_bytes == (0, 0)
    figures = bench.figures
    assert (figures.state, figures.why, figures.files) == (RecorderState.NO_ROOM, "too much is held", 1)
    bench.feed(tags[half : half + 100])
    assert bench.figures.state is RecorderState.NO_ROOM
    bench.clock.advance(11)
    bench.feed(tags[half + 100 :])
    assert bench.figures.state is RecorderState.RECORDING
    bench.end()
    assert [bool(tags_of(tmp_path / name)) for name in bench.files] == [True, True]


def test_stream_when_recorded_and_hls_is_brought_once_and_held_once(tmp_path, monkeypatch):
    made = []

    class Follower:
        def __init__(self, source, sink, *_, **__):
            self.sink, self.stopped = sink, False
            made.append(self)

        def start(self):
            self.started = True

        def stop(self, why):
            self.stopped = True

    class Writer:
        def __init__(self, open_bytes, made_bytes):
            self.intake, self.held_bytes = Intake(), (open_bytes, made_bytes)

        def start(self):
            pass

    monkeypatch.setattr(mediaprocess, "StreamFollower", Follower)
    writers = [Writer(5000, 0), Writer(3000, 700)]
    for name, writer in zip(("_recorder", "_hls_writer"), writers, strict=True):
        monkeypatch.setattr(mediaprocess, name, lambda *_, writer=writer: writer)
    held = StreamMemory(1 << 30)
    wanted = mediaprocess._Wanted("/nowhere", mediaprocess._Spec(), "")
    follow = mediaprocess._Follow("live/a", wanted, held, None)
    streams = [mediaprocess.WrittenStream(("live/a", kind), wanted, None, follow) for kind in ("record", "hls")]
    follow.start()
    [follower] = made
    payload = bytes(2000)
    follower.sink.take(9, 0, payload, 0.0)
    for writer in writers:
        [item] = writer.intake.get(0)
        assert item.payload is payload
    follower.sink.take(9, 0, payload, 0.0)
    assert follow.held_bytes == 5000 + 2000 + MESSAGE_BYTES + 700
    assert held.holders == (follow,)
    streams[0].leave()
    follower.sink.take(9, 0, payload, 0.0)
    assert [writer.intake.size_bytes for writer in writers] == [2000 + MESSAGE_BYTES, 2 * (2000 + MESSAGE_BYTES)]
    assert not follower.stopped
    streams[1].leave()
    assert follower.stopped
    assert held.holders == ()
