"""The copy of a stream at an edge: what it wants, what it holds, and what its viewers are told, without sockets."""

from __future__ import annotations

import dataclasses

import pytest
from segment_kit import HEADERS, cut, key, movie

from flowctl.errors import BusyError
from flowctl.live.cluster.edge.copy import DOUBT_S, ENDED_S, GONE_S, HOLD_S, LIVE_S, SETTLE_S, StreamCopy
from flowctl.live.cluster.edge.publications import MOST_TIMELINES
from flowctl.live.cluster.segments.cutter import PART_MS
from flowctl.live.cluster.segments.segment import BODY_BYTES, Segment, Sequel
from flowctl.live.cluster.segments.window import SegmentPool, WindowLimits
from flowctl.testing import ManualClock


class Viewers:
    """What viewers of a stream get."""

    def __init__(self):
        self.frames, self.told, self.refuses = [], [], False

    def begin(self, now):
        if self.refuses:
            raise BusyError("stream live/cam is being published already")
        self.told.append("begin")

    def take(self, type_id, timestamp, payload, now):
        self.frames.append((type_id, timestamp, payload))

    def end(self, why):
        self.told.append("end")


class Made:
    """A copy with all that it needs."""

    def __init__(self, **settings):
        self.clock, self.viewers = ManualClock(), Viewers()
        self.clock.advance(100.0)
        self.pool = SegmentPool(WindowLimits(), self.clock, wants=lambda name: self.copy.wants(name))  # noqa: PLW0108 - it is made after the pool
        self.waiting = []  # announced, and not fetched yet
        self.copy = StreamCopy("live/cam", self.pool, self.viewers, self.clock, **settings)

    def hear(self, *found, by="origin"):
        """Have segments announced; return whether the last one is wanted."""
        for name in found:
            self.copy.note_announced(by, name)
        return not self.pool.has_object(found[-1].encode())

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.copy.tick(self.clock())

    def fetch(self, *found):
        for item in found:
            assert self.hear(item.id)
            assert self.copy.ready(item.id)
            self.copy.segment(Segment.decode(item.data))

    def follow(self, frames):
        for frame in frames:
            self.copy.take(*frame, self.clock())

    def got(self):
        heads = {(frame.type_id, frame.payload) for frame in HEADERS}
        return [item for item in self.viewers.frames if (item[0], item[2]) not in heads]


SOURCE = [*HEADERS, *movie(6)]


def followed(frames):
    """Return a copy whose followed source has sent some messages."""
    made = Made(follows=True)
    made.copy.begin(made.clock())
    made.follow(frames)
    return made


def test_copy_when_segments_are_announced_begins_with_the_newest():
    """They come oldest first, so it listens for a moment; older ones are not wanted then."""
    made, found = Made(), cut(SOURCE)
    assert all(made.hear(item.id) for item in found[:4])
    assert not made.copy.ready(found[3].id)
    made.pass_time(SETTLE_S + 0.01)
    assert [made.copy.ready(item.id) for item in found[:4]] == [False, False, False, True]
    assert not made.copy.wants(found[2].id)
    made.fetch(*found[3:])
    assert made.got() == [tuple(frame) for frame in movie(6)[24:]]
    assert made.viewers.told == ["begin"]


def test_headers_when_they_do_not_change_go_out_once():
    made, found = Made(), cut(SOURCE)
    made.hear(found[0].id)
    made.pass_time(SETTLE_S + 0.01)
    made.fetch(*found)
    assert len(made.viewers.frames) == len(movie(6)) + len(HEADERS)


def test_segments_when_their_frames_are_followed_are_held_and_not_fetched():
    made, found = followed(SOURCE[:10]), cut(SOURCE)
    assert made.hear(found[0].id)
    assert not made.copy.ready(found[0].id)
    made.follow(SOURCE[10:20])
    assert made.pool.has(found[0].id)
    assert [item.id for item in made.pool.streams.get("live/cam", ())] == [found[0].id]
    assert made.got() == [tuple(frame) for frame in movie(6)[:17]]


@pytest.mark.parametrize(
    "change", [{"count": 9}, {"size_bytes": 7}, {"next_ms": 7_000_000}, {"then": Sequel.END, "next_ms": 0}]
)
def test_id_when_only_its_hash_is_true_of_what_was_followed_is_not_offered_under_it(change):
    """Whoever fetched it would find a lie, and take this node for the liar."""
    made, found = followed(SOURCE[:30]), cut(SOURCE)
    lie = dataclasses.replace(found[1].id, **change)
    assert made.hear(lie)
    assert made.pool.streams == {}
    assert not made.hear(found[1].id)
    assert [item.data for item in made.pool.streams.get("live/cam", ())] == [found[1].data]


def test_segments_when_the_followed_source_is_silent_are_fetched():
    made, found = followed(SOURCE[:14]), cut(SOURCE)
    assert made.hear(found[1].id)
    assert not made.copy.ready(found[1].id)
    made.pass_time(LIVE_S + 0.01)
    made.fetch(*found[1:])
    assert made.got() == [tuple(frame) for frame in movie(6)]
    assert made.copy.statistics().gaps == 0


def test_segments_when_the_followed_source_is_lost_are_fetched_at_once():
    """A connection that broke is no silence to wait for."""
    made, found = followed(SOURCE[:14]), cut(SOURCE)
    made.copy.lose_source()
    made.fetch(found[1])
    assert made.got() == [tuple(frame) for frame in movie(2)]


def test_segments_when_they_are_of_another_encoder_are_held_for_a_while_only():
    """What is followed never becomes them, so they do not stay unacknowledged for ever."""
    made, others = followed(SOURCE[:14]), cut(movie(9, step_ms=125))
    assert made.hear(others[5].id)
    made.clock.advance(HOLD_S + 0.1)
    made.follow(SOURCE[14:15])
    assert not made.hear(others[5].id)


@pytest.mark.parametrize("shift_ms", [0, 37, -12])
def test_source_when_another_one_is_followed_goes_on_where_it_stands(shift_ms):
    """Its server may have moved the stream on its timeline; its first picture shows by how much."""
    made = followed([frame._replace(timestamp=frame.timestamp + 50_000) for frame in SOURCE[:14]])
    made.copy.lose_source()
    made.copy.begin(made.clock())
    made.follow([frame._replace(timestamp=frame.timestamp + 50_000 + shift_ms) for frame in [*HEADERS, *movie(6)[8:]]])
    assert made.got() == [(frame.type_id, frame.timestamp + 50_000, frame.payload) for frame in movie(6)]


def later(frames, ms):
    return [frame._replace(timestamp=frame.timestamp + ms) for frame in frames]


def test_source_when_its_pictures_repeat_stands_where_it_is():
    """A file that is published in a loop makes the same segments again and again."""
    made, loop = Made(follows=True), [frame for turn in range(5) for frame in later(movie(2), turn * 2000)]
    found = cut([*HEADERS, *loop])
    assert all(made.hear(item.id) for item in found[:4])
    made.copy.begin(made.clock())
    made.follow(HEADERS)
    for number, at in enumerate(range(4000, 10_000, 1000), 3):
        made.follow([frame for frame in loop if at <= frame.timestamp < at + 1000])
        made.hear(found[number].id)  # a moment later than its last message
        made.pass_time(1.0)
    assert made.got() == [tuple(frame) for frame in loop if frame.timestamp >= 4000]
    assert made.copy.statistics().adopted == 5


@pytest.mark.parametrize("same", [True, False])
def test_publication_when_it_goes_on_as_another_one_makes_no_jump(same):
    """An encoder that was lost is back: its server goes on with the stream, and says nothing to those who follow."""
    made, again = Made(follows=True), movie(3) if same else [f._replace(payload=f.payload + b"!") for f in movie(3)]
    first, second = cut([*HEADERS, *movie(3)]), cut([*HEADERS, *again], timeline=5)
    made.copy.begin(made.clock())
    made.follow([*HEADERS, *movie(3)])
    for item in first:
        made.hear(item.id)
    made.follow([*HEADERS, *later(again[:8], 6400)])
    made.follow(later(again[8:10], 6400))
    made.hear(second[0].id)
    made.follow(later(again[10:], 6400))
    assert made.got() == [tuple(frame) for frame in [*movie(3), *later(again, 6400)]]
    assert made.copy.statistics().adopted == 3


@pytest.mark.parametrize("known", [1, 2, 3])
def test_publication_when_it_begins_with_a_segment_is_followed_from_there(known):
    """The source was silent, so the beginning was fetched before its frames came, at times of the one before."""
    made, again = Made(follows=True), [f._replace(payload=f.payload + b"!") for f in movie(4)]
    first, second = cut([*HEADERS, *movie(3)]), cut([*HEADERS, *again], timeline=5)
    made.copy.begin(made.clock())
    made.follow([*HEADERS, *movie(3)])
    for item in first:
        made.hear(item.id)
    made.pass_time(LIVE_S + 0.1)
    made.fetch(first[2], *second[:known])
    made.follow([*HEADERS, *later(again, 6400)])
    for item in second[known:-1]:
        made.hear(item.id)
    assert made.got() == [tuple(frame) for frame in [*movie(3), *again]]
    assert made.viewers.told == ["begin", "begin"]


@pytest.mark.parametrize(("change", "flawed"), [("octet", True), ("header", False), ("end", False)])
def test_source_when_its_frames_are_not_what_was_announced_is_flawed(change, flawed):
    made, found = Made(follows=True), cut(SOURCE)
    made.copy.begin(made.clock())
    frames = list(SOURCE)
    if change == "octet":
        frames[5] = frames[5]._replace(payload=frames[5].payload[:-1] + b"?")
    if change == "header":
        frames[0] = frames[0]._replace(payload=frames[0].payload + b"\x00")
    if change == "end":
        made.follow(frames[:8])
        made.copy.end("")
    else:
        made.follow(frames[:14])
    assert made.hear(found[0].id)
    assert made.copy.ready(found[0].id) == (change == "end")
    made.clock.advance(DOUBT_S + 0.1)
    assert made.copy.ready(found[0].id)
    made.copy.segment(Segment.decode(found[0].data))
    assert made.copy.flawed is flawed
    made.copy.begin(made.clock())
    assert not made.copy.flawed


def test_source_when_it_falls_silent_and_others_go_on_is_overtaken():
    """Also where what it does not bring is fetched: that comes later than frames would."""
    made, found = followed(SOURCE[:14]), cut(SOURCE)
    assert not made.copy.overtaken(made.clock())
    for item in found[:3]:
        made.pass_time(1.0)
        if made.hear(item.id):
            made.fetch(item)
    assert made.copy.overtaken(made.clock())
    made.copy.lose_source()
    assert not made.copy.overtaken(made.clock())


def test_publication_when_it_ends_is_told_after_a_while():
    """Another origin may have more of it, or its publisher may be back."""
    made, found = Made(), cut(movie(1))
    made.hear(found[0].id)
    made.pass_time(SETTLE_S + 0.01)
    made.fetch(found[0])
    made.pass_time(ENDED_S - 0.1)
    assert made.viewers.told == ["begin"]
    made.pass_time(0.2)
    assert made.viewers.told == ["begin", "end"]


def test_stream_when_nothing_comes_any_more_ends():
    made, found = Made(), cut(SOURCE)
    made.hear(found[0].id)
    made.pass_time(SETTLE_S + 0.01)
    made.fetch(found[0])
    made.pass_time(GONE_S + 0.1)
    assert made.viewers.told == ["begin", "end"]
    made.fetch(found[1])
    assert made.viewers.told == ["begin", "end", "begin"]


def test_name_when_a_publisher_of_the_edge_has_it_is_left_to_that_one():
    made, found = Made(), cut(SOURCE)
    made.viewers.refuses = True
    made.hear(found[0].id)
    made.pass_time(SETTLE_S + 0.01)
    made.fetch(found[0])
    assert made.viewers.frames == []
    made.viewers.refuses = False
    made.clock.advance(2.0)
    made.fetch(found[1])
    assert made.got() == [tuple(frame) for frame in found_frames(found[1])]


def found_frames(item):
    return Segment.decode(item.data).frames


def pump(made, found, *, every_s=1.0, by=None):
    """Announce segments one after the other as they come to be, and fetch those that are wanted."""
    for item in found:
        if made.hear(item.id, by=item.id.position.timeline if by is None else by):  # each origin has its timeline
            made.waiting.append(item)
        made.pass_time(every_s)
        ready = [held for held in made.waiting if made.copy.ready(held.id)]
        made.waiting = [held for held in made.waiting if held not in ready]
        for held in ready:
            if made.pool.put(held.id, held.data):
                made.copy.segment(Segment.decode(held.data))


@pytest.mark.parametrize("apart", [1, 360, -8640])
@pytest.mark.parametrize("dies", ["first", "second"])
def test_origins_when_their_clocks_put_a_publication_on_two_timelines_are_one(dies, apart):
    made = Made()
    source = movie(20)
    first, second = cut(source, timeline=9000), cut(source, timeline=9000 + apart)
    both = [item for pair in zip(first, second, strict=True) for item in pair]
    pump(made, both[:20], every_s=0.5)
    made.copy.forget_peer(9000 if dies == "first" else 9000 + apart)
    pump(made, second[10:] if dies == "first" else first[10:])
    assert made.got() == [tuple(frame) for frame in source if frame.timestamp >= made.got()[0][1]]
    assert made.viewers.told == ["begin"]
    assert (made.copy.statistics().gaps, made.copy.statistics().repeated) == (0, 0)


@pytest.mark.parametrize("timeline", [3, 30])
def test_encoder_when_it_uses_a_name_that_another_one_has_waits_until_that_is_gone(timeline):
    made = Made()
    live, other = cut(movie(60), timeline=9), cut(movie(60, step_ms=125), timeline=timeline)
    pump(made, live[:5])
    pump(made, [item for pair in zip(live[5:40], other[5:40], strict=True) for item in pair], every_s=0.5)
    assert made.got() == [tuple(frame) for frame in movie(40)]
    assert made.copy.statistics().waiting_bytes == 0
    assert len([held for held in made.waiting if made.copy.wants(held.id)]) <= HOLD_S + 1
    made.copy.forget_peer(9)
    pump(made, other[40:42], every_s=0.1)
    got = made.got()[len(movie(40)) :]
    whole = [tuple(frame) for frame in movie(42, step_ms=125)]
    assert got == whole[-len(got) :]
    assert len(movie(2, step_ms=125)) < len(got) <= len(movie(5, step_ms=125))
    assert made.viewers.told == ["begin", "begin"]


def test_encoder_when_it_restarts_its_clock_goes_on_with_the_next_publication_at_once():
    """Its origin says that it has another one now; another origin, which still has the one before, is not hoarded."""
    made = Made()
    first, again = cut(movie(20), timeline=9, close=False), cut(movie(20, step_ms=125), timeline=12)
    for one, other in zip(cut(movie(5), timeline=9), first, strict=False):  # to one of its origins it ends
        pump(made, [one], by="a", every_s=0.0)
        pump(made, [other], by="b")
    for old, new in zip(first[5:9], again, strict=False):  # of one link only
        pump(made, [new], by="a", every_s=0.0)
        pump(made, [old], by="b")
    assert made.got() == [tuple(frame) for frame in movie(9)]
    made.copy.forget_peer("b")
    pump(made, again[4:5], by="a", every_s=0.1)
    assert made.got()[-1] == tuple(movie(5, step_ms=125)[-1])
    assert made.viewers.told == ["begin", "begin"]


def test_followed_encoder_when_it_has_the_clock_of_one_that_lives_elsewhere_is_left_for_that_one():
    """What stood at its times has gone out, of the other: nothing of it is put there, nor is the other held up."""
    made, live = Made(follows=True), cut(movie(12), timeline=9, close=False)
    made.copy.begin(made.clock())
    pump(made, live[:8], by="a")
    assert len(made.got()) == 8 * 8
    other = [frame._replace(payload=frame.payload + b"other") for frame in [*HEADERS, *movie(12, step_ms=125)]]
    theirs = cut(other, timeline=40, close=False)
    for number in range(3):
        made.follow(other[3 + 16 * number : 3 + 16 * (number + 1)])
        made.hear(theirs[number].id, by="b")
        pump(made, live[8 + number : 9 + number], by="a")
    made.pass_time(0.1)
    made.follow(other[51:53])
    assert made.got() == [tuple(frame) for frame in movie(11)]
    assert made.copy.overtaken(made.clock())
    assert made.copy.statistics().waiting_bytes < 100
    made.copy.forget_peer("a")
    made.follow(other[53:60])
    assert made.viewers.told == ["begin", "begin"]
    assert made.viewers.frames[-1] == tuple(other[59])


@pytest.mark.parametrize("first", [False, True])
def test_followed_encoder_when_it_restarts_its_clock_goes_on_at_once(first):
    before, again = movie(6, start=3_600_000), movie(4, step_ms=125)
    made, live = Made(follows=True), cut([*HEADERS, *before], timeline=9)
    theirs = cut([*HEADERS, *again], timeline=12, close=False)
    made.copy.begin(made.clock())
    made.follow([*HEADERS, *before])
    made.hear(*[item.id for item in live[:5]])
    made.follow(again[:16])
    if first:
        made.hear(live[5].id, theirs[0].id)
    made.follow(again[16:40])
    if not first:
        made.hear(live[5].id, theirs[0].id)
    made.follow(again[40:])
    assert [frame[2] for frame in made.got()] == [frame.payload for frame in [*before, *again]]
    assert made.copy.statistics().gaps == 0
    assert made.viewers.told == ["begin", "begin"]


def test_clock_when_it_leaps_at_another_origin_costs_the_stream_nothing():
    made, live = Made(), cut(movie(8), timeline=9, close=False)
    pump(made, live[:3])
    for number in range(200):
        made.hear(cut(movie(1), timeline=1000 + 3 * number, stream="live/cam")[0].id, by="leaps")
    pump(made, live[3:])
    assert made.got() == [tuple(frame) for frame in movie(7)]
    publications = made.copy._publications
    assert len(publications._numbers) <= MOST_TIMELINES
    assert all(len(announcer.numbers) <= MOST_TIMELINES for announcer in publications.announcers.values())


def test_publication_when_its_origin_died_gives_way_to_the_next_at_once():
    """Nobody who is connected has more of it, so what is missing is not waited for."""
    made = Made()
    pump(made, cut(movie(5), timeline=9, close=False))
    made.copy.forget_peer(9)
    pump(made, cut(movie(30), timeline=3, close=False)[:1], every_s=0.1)
    assert made.viewers.told == ["begin", "begin"]
    assert made.got()[-1] == tuple(movie(1)[-1])


def test_copy_when_it_waits_for_a_beginning_that_nobody_has_takes_another():
    """An origin that announces a time to come, and has nothing, holds the stream up for a while only."""
    made = Made()
    assert made.hear(cut(movie(1, start=3_600_000), timeline=3)[0].id)  # never fetched: its origin lies
    pump(made, cut(movie(30), timeline=3, close=False))
    assert made.viewers.told == ["begin"]
    assert made.got()[-1] == tuple(movie(29)[-1])


def test_segments_when_groups_are_long_come_in_time():
    """Viewers of a stream with few key frames are not told that it has ended between two of its parts."""
    made = Made()
    pump(made, cut(movie(60, gop_ms=60_000), close=False), every_s=PART_MS / 1000 + 2.0)
    assert made.viewers.told == ["begin"]


def test_picture_when_too_large_for_a_segment_is_no_place_to_know_a_source_by():
    made, found = Made(follows=True), cut(SOURCE)
    made.hear(found[0].id)
    made.pass_time(LIVE_S + SETTLE_S)
    made.fetch(found[0])
    made.copy.begin(made.clock())
    made.follow([*HEADERS, key(9000, b"x" * BODY_BYTES)])
    assert made.hear(found[1].id)
