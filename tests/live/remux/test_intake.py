"""The queue in front of the disk: it never waits, and tells exactly what it left out."""

from __future__ import annotations

import threading

from live_kit import audio, inter, key
from remux_kit import source

from flowctl.live.remux.intake import Intake, MessagesLost, MessageTaken, PublicationBegan, PublicationEnded

TEN = b"x" * 800  # with what is counted beside it, ten of them are 10,000 bytes


def test_intake_when_there_is_room_gives_what_came_in_order():
    intake = Intake()
    intake.begin(0.0)
    intake.take(9, 1, key(), 0.0)
    intake.end("over")
    assert intake.get(0) == [PublicationBegan(), MessageTaken(9, 1, key()), PublicationEnded("over")]
    assert intake.get(0) == []
    intake.close()
    assert intake.get(0) is None


def test_intake_when_full_leaves_out_until_a_key_frame_fits():
    intake = Intake(limit_bytes=10_000)
    for time_ms in range(12):
        intake.take(9, time_ms, TEN, 0.0)
    intake.take(9, 12, key(), 0.0)  # no room yet
    items = intake.get(0)
    assert [item.timestamp for item in items] == list(range(10))
    intake.take(9, 13, inter(), 0.0)
    intake.take(8, 14, audio(), 0.0)
    intake.take(9, 15, key(), 0.0)
    lost_bytes = 1600 + len(key()) + len(inter()) + len(audio())
    assert intake.get(0) == [MessagesLost(5, lost_bytes), MessageTaken(9, 15, key())]


def test_intake_when_it_ends_full_tells_what_was_left_out():
    intake = Intake(limit_bytes=1000)
    intake.take(9, 0, TEN, 0.0)
    intake.take(9, 1, TEN, 0.0)
    intake.close()
    assert intake.get(0) == [MessageTaken(9, 0, TEN), MessagesLost(1, 800)]
    assert intake.get(0) is None


def test_intake_when_nothing_is_read_is_bounded():
    intake = Intake(limit_bytes=100_000)
    for time_ms in range(10_000):
        intake.take(9, time_ms, TEN, 0.0)
    items = intake.get(0)
    assert len(items) == 100


def test_intake_when_somebody_waits_wakes_him():
    intake = Intake()
    got = []
    thread = threading.Thread(target=lambda: got.append(intake.get(20.0)))
    thread.start()
    intake.take(8, 0, audio(), 0.0)
    thread.join(20.0)
    assert got == [[MessageTaken(8, 0, audio())]]


def test_intake_when_full_of_nothing_but_sound_goes_on_with_sound():
    """A stream without video has no key frame to wait for: it goes on when half of the queue is free."""
    intake = Intake(limit_bytes=10_000)
    intake.begin(0.0)
    for time_ms in range(100):
        intake.take(8, time_ms, audio(), 0.0)
    intake.get(0)
    intake.take(8, 200, audio(), 0.0)
    assert [type(item) for item in intake.get(0)] == [MessagesLost, MessageTaken]


def test_intake_when_full_keeps_the_last_headers():
    first = next(tag for tag in source(1) if tag.type_id == 9).payload
    other = next(tag for tag in source(1, width=1280, height=720) if tag.type_id == 9).payload
    assert first != other
    intake = Intake(limit_bytes=10_000)
    for time_ms in range(12):
        intake.take(9, time_ms, TEN, 0.0)
    intake.take(9, 12, first, 0.0)
    intake.take(9, 13, other, 0.0)
    intake.get(0)
    intake.take(9, 14, key(), 0.0)
    assert intake.get(0) == [MessagesLost(2, 1600), MessageTaken(9, 13, other), MessageTaken(9, 14, key())]


def test_intake_when_a_server_says_the_end_by_a_code_says_it_in_words():
    intake = Intake()
    for why in ("stream_eof", "NetStream.Play.UnpublishNotify", "server closed"):
        intake.end(why)
    assert [item.why for item in intake.get(0)] == ["the stream ended", "the stream ended", "server closed"]
