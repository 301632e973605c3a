"""A splice: each message once and in order, whatever comes from where."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from segment_kit import HEADERS, cut, feed, movie

from flowctl.live.cluster.segments.cutter import Cutter
from flowctl.live.cluster.segments.segment import Frame, Position, Segment
from flowctl.live.cluster.segments.splice import Gap, PublicationStart, Splice, SplicedHeaders


def splice() -> Splice:
    return Splice(wait_s=2.0, most_bytes=1_000_000)


def segments(frames, **named) -> list[Segment]:
    return [Segment.decode(item.data) for item in cut(frames, **named)]


def waiting(target: Splice) -> int:
    """Octets of messages that wait; the part that the cursor is in is known as long as it may go on."""
    return target.held_bytes - 64


def frames_of(out) -> list[Frame]:
    return [item for item in out if isinstance(item, Frame)]


def live(target: Splice, cutter: Cutter, frame: Frame) -> None:
    for done in feed(cutter, frame):
        target.end_part(done.position, len(done.frames), done.next)
    if cutter.position is not None:
        target.add(cutter.position, len(cutter.frames) - 1, cutter.frames[-1], cutter.headers)


def test_segments_when_they_come_in_order_go_out_at_once():
    target, found = splice(), segments([*HEADERS, *movie(2)])
    target.add_segment(found[0])
    out = target.take_ready(0.0)
    assert out[:2] == [PublicationStart(3), SplicedHeaders(found[0].headers)]
    assert frames_of(out) == list(found[0].frames)
    target.add_segment(found[1])
    assert target.take_ready(0.0) == [SplicedHeaders(found[1].headers), *found[1].frames]
    assert (target.ended, waiting(target), target.gap_count) == (True, 0, 0)


def test_segment_when_missing_is_waited_for():
    target, (first, second, third) = splice(), segments(movie(3))
    target.add_segment(first)
    target.take_ready(0.0)
    target.add_segment(third)
    assert target.take_ready(1.0) == []
    assert target.next_deadline() == 3.0
    target.add_segment(second)
    assert frames_of(target.take_ready(2.9)) == [*second.frames, *third.frames]
    assert target.next_deadline() is None


def test_segment_when_missing_for_too_long_is_told():
    target, (first, second, third) = splice(), segments(movie(3))
    for item in (first, third):
        target.add_segment(item)
    target.take_ready(1.0)
    out = target.take_ready(3.0)
    assert out[0] == Gap(Position(3, 1000, 0), 0, Position(3, 2000, 0))
    assert frames_of(out) == list(third.frames)
    target.add_segment(second)
    assert target.take_ready(4.0) == []
    assert target.repeated_count == len(second.frames)


def test_segments_when_they_take_too_much_while_one_is_missing_are_not_waited_for():
    target, found = Splice(wait_s=1e9, most_bytes=300), segments(movie(9))
    target.add_segment(found[0])
    target.take_ready(0.0)
    for item in found[2:]:
        target.add_segment(item)
    out = target.take_ready(0.0)
    assert [item for item in out if isinstance(item, Gap)] == [Gap(Position(3, 1000, 0), 0, Position(3, 2000, 0))]
    assert waiting(target) == 0


def test_followed_messages_when_the_source_dies_are_completed_from_the_segment():
    target, cutter, frames = splice(), Cutter("live/cam", 3), movie(3)
    for frame in frames[:11]:
        live(target, cutter, frame)
    out = frames_of(target.take_ready(0.0))
    assert out == frames[:11]
    for item in segments(frames):
        target.add_segment(item)
    assert frames_of(target.take_ready(0.0)) == frames[11:]
    assert target.differing_count == 0


def test_followed_messages_when_another_source_begins_with_its_cache_are_not_repeated():
    target, frames = splice(), movie(3)
    for source in (frames[:13], frames[8:]):
        cutter = Cutter("live/cam", 3)
        for frame in source:
            live(target, cutter, frame)
    assert frames_of(target.take_ready(0.0)) == frames
    assert target.repeated_count == 5


def test_publication_when_it_ends_is_followed_by_the_next_without_a_gap():
    target, before, after = splice(), segments(movie(1)), segments(movie(1), timeline=7)
    for item in (*before, *after):
        target.add_segment(item)
    out = target.take_ready(0.0)
    assert [item for item in out if isinstance(item, PublicationStart)] == [PublicationStart(3), PublicationStart(7)]
    assert frames_of(out) == [*movie(1), *movie(1)]
    assert target.gap_count == 0


def test_publication_when_its_second_segment_comes_first_begins_where_it_was_told():
    target, before, (first, second) = splice(), segments(movie(1)), segments(movie(2), timeline=7)
    target.add_segment(before[0])
    target.take_ready(0.0)
    target.go_on_at(first.id.position)
    target.add_segment(second)
    assert target.take_ready(0.0) == []
    target.add_segment(first)
    assert frames_of(target.take_ready(1.0)) == movie(2)
    assert target.gap_count == 0


def test_publication_when_its_last_segment_is_lost_gives_way_to_the_next():
    target, before, after = splice(), segments(movie(2)), segments(movie(1), timeline=7)
    target.add_segment(before[0])
    target.add_segment(after[0])
    target.take_ready(0.0)
    out = target.take_ready(2.0)
    assert out[:2] == [Gap(Position(3, 1000, 0), 0, Position(7, 0, 0)), PublicationStart(7)]


def test_part_when_it_differs_from_what_went_out_goes_on_by_time():
    target, cutter, frames = splice(), Cutter("live/cam", 3), movie(1)
    for frame in [*frames[:3], *frames[4:5]]:  # one of them was left out on the way
        live(target, cutter, frame)
    assert len(frames_of(target.take_ready(0.0))) == 4
    target.add_segment(segments(frames)[0])
    assert frames_of(target.take_ready(0.0)) == frames[5:]
    assert target.differing_count == 1


def test_names_when_learnt_later_move_what_went_out():
    frames, moved = movie(3), [frame._replace(timestamp=frame.timestamp + 50_000) for frame in movie(3)]
    target, cutter = splice(), Cutter("live/cam", 0)
    for frame in moved[:11]:
        live(target, cutter, frame)
    assert frames_of(target.take_ready(0.0)) == moved[:11]
    target.rename(0, 3, -50_000)
    for item in segments(frames):
        target.add_segment(item)
    assert frames_of(target.take_ready(0.0)) == frames[11:]
    assert (target.differing_count, target.gap_count, waiting(target)) == (0, 0, 0)


def test_end_when_another_source_has_more_is_taken_back():
    """An encoder that loses one of two origins has not ended: what the other one has goes on behind that."""
    target, frames = splice(), movie(3)
    for item in segments(frames[:11]):
        target.add_segment(item)
    out = frames_of(target.take_ready(0.0))
    assert (out, target.ended) == (frames[:11], True)
    for item in segments(frames):
        target.add_segment(item)
    assert frames_of(target.take_ready(0.0)) == frames[11:]
    for item in segments(frames[:19]):
        target.add_segment(item)  # and an end that comes late ends nothing
    assert target.take_ready(0.0) == []
    assert (target.ended, target.gap_count, target.differing_count) == (True, 0, 0)


STEPS = st.lists(st.tuples(st.sampled_from(["segment", "live", "take"]), st.integers(0, 5)), max_size=40)


@settings(deadline=None)
@given(STEPS)
def test_stream_when_everything_comes_in_any_mix_is_whole(steps):
    """Model: the published messages. Each goes out once and in order, and at the end all of them have."""
    frames, target, out = movie(6), splice(), []
    found = segments(frames)
    sources = [(Cutter("live/cam", 3), iter(frames)), (Cutter("live/cam", 3), iter(frames[16:]))]
    target.add_segment(found[0])
    for what, number in steps:
        if what == "segment":
            target.add_segment(found[number])
        elif what == "live":
            cutter, source = sources[number % 2]
            for _, frame in zip(range(number), source, strict=False):
                live(target, cutter, frame)
        else:
            out += frames_of(target.take_ready(0.0))
            assert out == frames[: len(out)]
    for item in reversed(found):
        target.add_segment(item)
    out += frames_of(target.take_ready(0.0))
    assert out == frames
    assert (target.gap_count, waiting(target), target.differing_count) == (0, 0, 0)


@settings(deadline=None)
@given(st.permutations(range(6)), st.sets(st.integers(1, 5), max_size=4))
def test_stream_when_segments_never_come_is_told_which(order, lost):
    frames, target = movie(6), splice()
    found, out, now = segments(frames), [], 0.0
    target.add_segment(found[0])
    out += target.take_ready(now)
    for number in order:
        if number not in lost:
            target.add_segment(found[number])
    while target.next_deadline() is not None or now == 0.0:
        now += 10.0
        out += target.take_ready(now)
    assert frames_of(out) == [frame for number in range(6) if number not in lost for frame in found[number].frames]
    runs = [number for number in lost if number + 1 not in lost and number < 5]
    assert target.gap_count == len(runs)
