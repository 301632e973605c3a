"""Where a stream is cut: by its messages alone, so that everybody cuts at the same places."""

from __future__ import annotations

import pytest
from segment_kit import AUDIO_HEADER, HEADERS, METADATA, VIDEO_HEADER, audio, cut, feed, inter, key, movie

from flowctl.live.cluster.segments.cutter import Cutter, timeline_at
from flowctl.live.cluster.segments.segment import BODY_BYTES, MESSAGES, PART_BYTES, Frame, Position, Segment, Sequel


def read(cuts):
    return [Segment.decode(item.data) for item in cuts]


def test_stream_when_it_has_video_is_cut_before_each_key_frame():
    found = read(cut([*HEADERS, *movie(3)]))
    assert [item.id.position for item in found] == [Position(3, 0, 0), Position(3, 1000, 0), Position(3, 2000, 0)]
    assert [item.id.next for item in found] == [Position(3, 1000, 0), Position(3, 2000, 0), None]
    assert [frame for item in found for frame in item.frames] == movie(3)
    assert {item.headers for item in found} == {tuple((frame.type_id, frame.payload) for frame in HEADERS)}


def test_stream_when_still_published_keeps_what_is_not_complete():
    assert [item.id.position.start_ms for item in cut(movie(3), close=False)] == [0, 1000]


def test_stream_when_seen_from_the_middle_gives_the_same_segments():
    whole, late = cut([*HEADERS, *movie(4)]), cut([*HEADERS, *movie(4)[5:]])
    assert [item.data for item in late[1:]] == [item.data for item in whole[1:]]
    assert [item.id for item in late[1:]] == [item.id for item in whole[1:]]


def test_stream_when_moved_in_time_gives_the_same_bodies():
    moved = [frame._replace(timestamp=frame.timestamp + 123_456) for frame in movie(4)]
    assert [item.id.digest for item in cut(moved)] == [item.id.digest for item in cut(movie(4))]


def test_header_when_it_comes_in_the_middle_is_a_message_and_opens_the_next_segment():
    """Viewers who are there get it at its place, and those who begin later get it first."""
    other = Frame(9, 0, VIDEO_HEADER.payload + b"!")
    found = read(cut([VIDEO_HEADER, key(0), other, inter(40), key(1000)]))
    assert found[0].frames == (key(0), other, inter(40))
    assert found[0].headers == ((9, VIDEO_HEADER.payload),)
    assert found[1].headers == ((9, other.payload),)


def test_sound_when_before_the_first_picture_is_a_segment_of_its_own():
    """What a late origin saw before its first key frame does not change what it cuts from there on."""
    found = read(cut([*HEADERS, audio(960), audio(980), key(1000), inter(1040)]))
    assert [item.frames for item in found] == [(audio(960), audio(980)), (key(1000), inter(1040))]


def test_stream_without_video_is_cut_by_its_own_clock():
    sound = [audio(at) for at in range(0, 9000, 100)]
    whole, late = cut([AUDIO_HEADER, *sound]), cut([AUDIO_HEADER, *sound[7:]])
    assert [item.id.position.start_ms for item in whole] == [0, 2000, 4000, 6000, 8000]
    assert [item.id for item in late[1:]] == [item.id for item in whole[1:]]


def test_group_when_it_is_long_is_cut_into_parts():
    found = cut([key(0), *(inter(at) for at in range(1000, 25_000, 1000)), key(25_000)])
    assert [item.id.position for item in found] == [
        *(Position(3, 0, part) for part in range(5)),
        Position(3, 25_000, 0),
    ]
    assert [item.id.then for item in found] == [*[Sequel.PART] * 4, Sequel.KEY, Sequel.END]


def test_group_when_it_is_large_is_cut_into_parts():
    found = cut([key(0), *(inter(at, bytes(300_000)) for at in range(1, 8)), inter(8, bytes(1_500_000))])
    assert all(item.id.size_bytes <= PART_BYTES for item in found[:-1])
    assert PART_BYTES < found[-1].id.size_bytes <= BODY_BYTES
    assert sum(item.id.count for item in found) == 9


def test_message_when_no_segment_can_hold_it_is_counted():
    cutter = Cutter("live/cam", 3)
    found = [done for frame in (key(0), inter(40, bytes(BODY_BYTES)), inter(80)) for done in feed(cutter, frame)]
    assert sum(len(item.frames) for item in found + cutter.close()) == 2
    assert cutter.refused == 1


def test_key_frames_when_close_together_begin_a_segment_every_half_second():
    found = cut([key(at) for at in range(0, 2000, 40)])
    assert [item.id.position.start_ms for item in found] == [0, 520, 1000, 1520]


def test_clock_when_it_wraps_goes_on():
    start = 0xFFFFFFFF - 1499
    found = read(cut(movie(3, start=start)))
    assert [item.id.position.start_ms for item in found] == [start, start + 1000, start + 2000]
    assert [frame for item in found for frame in item.frames] == movie(3, start=start)


def test_clock_when_it_jumps_back_begins_another_timeline():
    found = cut([key(60_000), inter(60_040), key(100), inter(140)])
    assert [(item.id.position, item.id.then) for item in found] == [
        (Position(3, 60_000, 0), Sequel.END),
        (Position(6, 100, 0), Sequel.END),
    ]


def test_message_when_a_little_behind_stays_in_its_segment():
    found = cut([key(0), inter(400), audio(100), key(1000), audio(980)])
    assert [item.id.count for item in found] == [3, 2]


def test_headers_when_too_many_or_too_large_are_left_to_the_messages():
    large = Frame(18, 0, METADATA.payload + bytes(300_000))
    found = read(cut([large, VIDEO_HEADER, key(0)]))
    assert found[0].headers == ((9, VIDEO_HEADER.payload),)


@pytest.mark.parametrize(
    ("wall_s", "timestamp", "before", "expected"),
    [
        (1000.0, 0, None, 100),
        (1009.9, 9500, None, 100),
        (1000.0, 0, 100, 103),
        (2000.0, 0, 100, 200),
        (1.0, 9000, None, 0),
    ],
)
def test_timeline_when_a_publication_begins_is_when_its_clock_stood_at_zero(wall_s, timestamp, before, expected):
    assert timeline_at(wall_s, timestamp, before) == expected


def test_clock_when_it_begins_a_little_before_zero_is_the_same_clock():
    """Sound may begin before the first picture, at a time that the wire has as the end of its clock."""
    source = [key(0), audio(-20), audio(3), inter(40), key(1000)]
    found = cut(source)
    assert [item.id.position for item in found] == [Position(3, 0, 0), Position(3, 1000, 0)]
    assert [frame for item in found for frame in Segment.decode(item.data).frames] == source


def test_group_when_it_has_many_messages_is_cut_into_parts_that_can_be_read():
    """A node passes on a segment at once, so none has many messages; headers in the middle have room."""
    frames = []
    for number in range(3 * MESSAGES):
        frames += [inter(number // 100, b""), *([VIDEO_HEADER] if number % 500 == 0 else [])]
    made = cut([key(0), *frames])
    assert len(made) == 4
    assert [read.id.count <= MESSAGES for read in (Segment.decode(item.data) for item in made)] == [True] * 4
