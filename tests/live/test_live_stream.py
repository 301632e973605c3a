"""One stream: whose messages count, its timeline across publishers, its headers, and its logs per message stream id."""

from __future__ import annotations

import contextlib
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, inter, key
from structlog.testing import capture_logs

from flowctl.core.flow.state import MessageClass
from flowctl.errors import LimitExceededError
from flowctl.live.config import LiveConfig
from flowctl.live.stream import MOST_WIRES, Stream
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.messages import SetChunkSize, encode_control
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO
from flowctl.wire.streams.wirelog import WireLog


class Member:
    """Anybody."""

    peer = ("192.0.2.1", 1)
    number = 1


def read(wires, chunk_size=65536):
    """Return the messages in the wire octets of a log."""
    reader = ChunkReader(WireLimits())
    control = encode_control(SetChunkSize(chunk_size))
    head = b"\x02\x00\x00\x00" + len(control.payload).to_bytes(3, "big") + b"\x01\x00\x00\x00\x00" + control.payload
    reader.feed(head)
    return reader.feed(b"".join(wires))


def watched(stream, msid=1):
    """Return a function that gives what was appended to the stream's log since."""
    wire = stream.join(msid)
    place = [wire.log.tail]

    def since():
        wires = []
        while place[0].next is not None:
            wires.append(place[0].wire)
            place[0] = place[0].next
        return read(wires)

    return since


@pytest.fixture
def stream():
    return Stream("live/a", LiveConfig(), 0.0)


@pytest.fixture
def publisher(stream):
    publisher = Member()
    stream.take_over(publisher, 0.0)
    return publisher


def test_publish_when_not_the_publisher_is_not_passed_on(stream):
    first, second = Member(), Member()
    stream.take_over(first, 0.0)
    since = watched(stream)
    assert stream.publish(first, TYPE_VIDEO, 0, key(b"1"), 0.0)
    assert not stream.publish(second, TYPE_VIDEO, 0, key(b"2"), 0.0)
    assert [message.payload for message in since()] == [key(b"1")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.floats(0, 100), st.lists(st.integers(0, 2000), max_size=5)),
        min_size=1,
        max_size=5,
    )
)
def test_timeline_when_publishers_follow_each_other_never_runs_backwards(turns):
    """Whatever clocks successive publishers have, the stream's own goes on, by wall-clock time in between."""
    stream = Stream("live/a", LiveConfig(), 0.0)
    since = watched(stream)
    now = 0.0
    for first, pause, steps in turns:
        publisher = Member()
        now += pause
        stream.take_over(publisher, now)
        at = first
        for step in [0, *steps]:
            at = (at + step) % 2**32
            now += step / 1000
            stream.publish(publisher, TYPE_AUDIO, at, audio(b"x"), now)
    times = [message.timestamp for message in since()]
    assert len(times) == sum(len(steps) + 1 for _, _, steps in turns)
    assert all((after - before) % 2**32 < 2**31 for before, after in pairwise(times))


def test_take_over_when_by_another_forgets_the_old_headers(stream):
    """The tracks of the next publisher may be others: nobody is sent the old configuration."""
    first, second = Member(), Member()
    stream.take_over(first, 0.0)
    stream.publish(first, TYPE_VIDEO, 0, AVC_HEADER, 0.0)
    assert stream.media == "video avc1"
    stream.take_over(second, 1.0)
    stream.publish(second, TYPE_AUDIO, 0, AAC_HEADER, 1.0)
    _, prefix, wait = stream.start_place(stream.join(1))
    assert [message.payload for message in read(prefix)] == [AAC_HEADER]
    assert (wait, stream.media) == (False, "audio mp4a")


def test_headers_when_invented_without_end_are_bounded(stream, publisher):
    for track in range(200):
        # Enhanced RTMP v2 multitrack, one track: sequence start of avc1.
        body = bytes([0x96, 0x00]) + b"avc1" + bytes([track]) + AVC_HEADER[5:]
        with contextlib.suppress(LimitExceededError):
            stream.publish(publisher, TYPE_VIDEO, 0, body, 0.0)
    assert stream.messages_in[MessageClass.HEADER] == 200
    _, prefix, _ = stream.start_place(stream.join(1))
    assert len(prefix) == 64


def multitrack(track, size):
    """Return the sequence start of a track, alone in a message of Enhanced RTMP v2 multitrack."""
    return (bytes([0x96, 0x00]) + b"avc1" + bytes([track])).ljust(size, b".")


@pytest.mark.parametrize("standby", [False, True])
def test_headers_when_large_are_bounded_in_bytes_for_who_counts_and_who_stands_by(stream, standby):
    first, second = Member(), Member()
    stream.take_over(first, 0.0)
    publisher = first
    if standby:
        stream.stand_by(second)
        publisher = second
    since, limits = watched(stream), []
    for track in range(20):
        for size in (65536, 65537):
            try:
                stream.publish(publisher, TYPE_VIDEO, 0, multitrack(track, size), 0.0)
                limits.append(None)
            except LimitExceededError as error:
                limits.append(error.limit)
    assert limits == [None, "header_bytes"] * 20
    assert len(since()) == (0 if standby else 40)
    limits.clear()
    for track in range(20):
        try:
            stream.publish(publisher, TYPE_VIDEO, 0, multitrack(track, 65536), 0.0)
        except LimitExceededError as error:
            limits.append(error.limit)
    assert limits == ["headers_bytes"] * 4
    assert stream.standby_bytes == (16 * 65536 if standby else 0)
    since()
    if standby:
        stream.take_over(second, 1.0)
        assert [message.payload for message in since()] == [multitrack(track, 65536) for track in range(16)]
    stream.publish(publisher, TYPE_VIDEO, 0, key(b"k"), 1.0)
    assert sum(map(len, stream.wires[0].log.gop.restart)) == 16 * (65536 + 12)
    assert stream.standby_bytes == 0


def test_start_place_when_there_is_video_waits_for_its_key_frame(stream, publisher):
    stream.publish(publisher, TYPE_VIDEO, 0, AVC_HEADER, 0.0)
    stream.publish(publisher, TYPE_VIDEO, 0, key(b"1"), 0.0)
    wire = stream.join(1)
    wire.log.drop_cache()
    assert stream.start_place(wire) == (wire.log.tail, (), True)


@pytest.mark.parametrize("first", [0x12, 0x14], ids=["H.263", "VP6"])
@pytest.mark.parametrize("msid", [1, 5])
def test_start_place_when_video_has_no_sequence_header_waits_for_its_key_frame(stream, publisher, first, msid):
    stream.publish(publisher, TYPE_VIDEO, 0, bytes([first]) + b"\x00\x00\x84key", 0.0)
    for wire in stream.wires:
        wire.log.drop_cache()
    wire = stream.join(msid)
    assert stream.start_place(wire) == (wire.log.tail, (), True)


@pytest.mark.parametrize("frames", [[], [key(b"1")]])
def test_start_place_when_a_header_follows_has_it_at_or_behind_the_entry(stream, publisher, frames):
    for body in frames:
        stream.publish(publisher, TYPE_VIDEO, 0, body, 0.0)
    wire = stream.join(1)
    wire.log.drop_cache()
    entry, _, _ = stream.start_place(wire)
    stream.publish(publisher, TYPE_VIDEO, 0, AVC_HEADER, 0.0)
    assert [message.payload for message in read([entry.wire])] == [AVC_HEADER]


def test_headers_when_a_publisher_returns_do_not_fix_its_clock(stream):
    """Encoders send headers and metadata at 0 whatever their clock says; the first frame shows it."""
    first, second = Member(), Member()
    since = watched(stream)
    stream.take_over(first, 0.0)
    stream.publish(first, TYPE_VIDEO, 1000, key(b"1"), 0.0)
    stream.take_over(second, 2.0)
    stream.publish(second, TYPE_DATA_AMF0, 0, encode("onMetaData", {"width": 640.0}), 2.0)
    stream.publish(second, TYPE_DATA_AMF0, 0, encode("onTextData", {}), 2.0)
    stream.publish(second, TYPE_VIDEO, 0, AVC_HEADER, 2.0)
    stream.publish(second, TYPE_AUDIO, 0, AAC_HEADER, 2.5)
    stream.publish(second, TYPE_VIDEO, 500_000, key(b"2"), 2.5)
    stream.publish(second, TYPE_AUDIO, 500_040, audio(b"a"), 2.5)
    stream.publish(second, TYPE_AUDIO, 500_060, AAC_HEADER, 2.5)
    assert [message.timestamp for message in since()] == [1000, 3000, 3000, 3000, 3500, 3500, 3540, 3560]


def test_timestamps_when_there_was_one_publisher_only_are_untouched(stream):
    publisher = Member()
    since = watched(stream)
    stream.take_over(publisher, 0.0)
    stream.publish(publisher, TYPE_VIDEO, 0, AVC_HEADER, 5.0)
    stream.publish(publisher, TYPE_VIDEO, 500_000, key(b"1"), 5.0)
    assert [message.timestamp for message in since()] == [0, 500_000]


def play_out(stream, publisher, messages, began=0.0):
    """Publish (clock, type) of messages that come 20 ms apart, pictures and sound by turns; return what viewers get."""
    since = watched(stream)
    for number, (at, type_id) in enumerate(messages):
        payload = audio(b"a") if type_id == TYPE_AUDIO else key(b"k") if number % 10 == 0 else inter(b"i")
        stream.publish(publisher, type_id, at % 2**32, payload, began + number * 0.02)
    return [(message.timestamp, message.type_id) for message in since()]


def by_turns(start, count):
    return [(start + number * 20, TYPE_AUDIO if number % 2 else TYPE_VIDEO) for number in range(count)]


@pytest.mark.parametrize("start", [0, 2**32 - 3000, 86_400_000])
@pytest.mark.parametrize("other", [0, 3_600_000, 2**31 + 7, 2**32 - 100_000])
def test_timeline_when_a_clock_begins_anew_in_a_publication_goes_on_as_after_it(stream, publisher, start, other):
    """An encoder that is restarted behind a relay, say: players go by differences, and wait where times go back."""
    messages = by_turns(start, 200) + by_turns(start + other, 200) + by_turns(start + 20_000_000, 200)
    for number, (at, type_id) in enumerate(play_out(stream, publisher, messages)):
        assert type_id == messages[number][1]
        assert (start + number * 20 - at) % 2**32 <= 3  # the time that goes by is cut to whole milliseconds


@pytest.mark.parametrize("late_ms", [300, 900, 2500, 60_000])
def test_timestamps_when_sound_is_behind_pictures_all_along_are_untouched(stream, publisher, late_ms):
    """Whatever the distance is, it is no jump: each track's own clock goes on."""
    messages = [(at - late_ms if type_id == TYPE_AUDIO else at, type_id) for at, type_id in by_turns(100_000, 200)]
    assert play_out(stream, publisher, messages) == messages


def test_timestamps_when_one_track_pauses_or_headers_have_none_are_untouched(stream, publisher):
    messages = [item for item in by_turns(50_000, 2000) if item[1] == TYPE_AUDIO or not 60_000 < item[0] < 85_000]
    since = watched(stream)
    for number, (at, type_id) in enumerate(messages):
        if number % 100 == 50:
            stream.publish(publisher, TYPE_VIDEO, 0, AVC_HEADER, at / 1000)
        stream.publish(publisher, type_id, at, audio(b"a") if type_id == TYPE_AUDIO else key(b"k"), at / 1000)
    frames = [(item.timestamp, item.type_id) for item in since() if item.payload != AVC_HEADER]
    assert frames == messages


@pytest.mark.parametrize("later", [0, 12, 200])
def test_timeline_when_one_track_begins_anew_before_the_other_goes_on(stream, publisher, later):
    """What is left of the old clock then is no leap by all of it; nor where one track alone begins anew."""
    anew = [
        (at - 72_000_000 if kind == TYPE_AUDIO or n >= later else at, kind)
        for n, (at, kind) in enumerate(by_turns(72_004_000, 200))
    ]
    for number, (at, _) in enumerate(play_out(stream, publisher, by_turns(72_000_000, 200) + anew)):
        assert abs(72_000_000 + number * 20 - at) <= 3


@pytest.mark.parametrize("kinds", [(TYPE_VIDEO, TYPE_AUDIO), (TYPE_VIDEO,), (TYPE_AUDIO,)])
@pytest.mark.parametrize("early_ms", [(1500,), (9000,), (10**7,), (4000, 1500)])
def test_timeline_when_single_frames_are_much_too_early_is_that_of_the_others(stream, publisher, kinds, early_ms):
    """They do not drive it on, each time by as much."""
    messages = [
        (10**8 + n * 20 - (early_ms[n // 40 % len(early_ms)] if n % 40 == 21 else 0), kinds[n % len(kinds)])
        for n in range(400)
    ]
    times = [at for at, _ in play_out(stream, publisher, messages)]
    assert all(abs(10**8 + n * 20 - at) <= 20 for n, at in enumerate(times))


def test_timestamps_when_a_publisher_pauses_and_its_clock_goes_on_are_untouched(stream, publisher):
    since = watched(stream)
    messages = [*by_turns(50_000, 200), *by_turns(114_000, 200)]
    for number, (at, type_id) in enumerate(messages):
        late_s = 0.013 if number >= 200 else 0.0
        payload = audio(b"a") if type_id == TYPE_AUDIO else key(b"k")
        stream.publish(publisher, type_id, at, payload, at / 1000 + late_s)
    assert [(item.timestamp, item.type_id) for item in since()] == messages


def test_timeline_when_headers_have_no_time_and_the_clock_is_high_goes_on(stream, publisher):
    """A timestamp of 0 is ahead of one beyond half of the clock, and is no place where the timeline has come to."""
    since = watched(stream)
    for number in range(200):
        if number in {0, 99}:
            stream.publish(publisher, TYPE_VIDEO, 0, AVC_HEADER, number * 0.02)
        at = number * 20 + (3_000_000_000 if number < 100 else 0)
        stream.publish(publisher, TYPE_VIDEO, at, key(b"k"), number * 0.02)
    times = [item.timestamp for item in since() if item.payload != AVC_HEADER]
    assert all(abs(3_000_000_000 + number * 20 - at) <= 3 for number, at in enumerate(times))


def test_timestamps_when_frames_of_a_track_are_a_little_out_of_order_are_untouched(stream, publisher):
    messages = [(at - (number % 7) * 120, TYPE_VIDEO) for number, (at, _) in enumerate(by_turns(50_000, 200))]
    assert play_out(stream, publisher, messages) == messages


def test_clock_that_leaps_with_each_message_is_followed_by_when_they_come_and_told_now_and_then(stream, publisher):
    messages = [(number**3 * 10**6 + number * 7, TYPE_VIDEO) for number in range(500)]
    with capture_logs() as logs:
        times = [at for at, _ in play_out(stream, publisher, messages)]
    assert all(0 < after - before <= 27 for before, after in pairwise(times))
    assert len([line for line in logs if "jumped" in line["event"]]) == 1


def test_media_when_the_publisher_changes_meanwhile_is_read_safely(stream):
    class Vanishing(dict):
        def __contains__(self, name):
            found = super().__contains__(name)
            self.clear()
            return found

    stream.codecs = Vanishing(video="avc1")
    assert stream.media == "video avc1"


def test_join_when_on_another_id_has_the_same_messages_readdressed(stream, publisher):
    bodies = [AVC_HEADER, key(b"k", 200_000), inter(b"1"), inter(b"2")]
    for number, body in enumerate(bodies):
        stream.publish(publisher, TYPE_VIDEO, 2**24 + number, body, 0.0)
    wire = stream.join(77)
    entry, prefix, _ = stream.start_place(wire)
    wires = [*prefix]
    while entry.next is not None:
        wires.append(entry.wire)
        entry = entry.next
    messages = read(wires)
    assert [message.payload for message in messages] == bodies
    assert {message.msid for message in messages} == {77}
    assert [message.timestamp for message in messages] == [2**24, 2**24 + 1, 2**24 + 2, 2**24 + 3]


def test_join_when_of_too_many_ids_is_refused_and_leaving_makes_room(stream):
    """Each id costs a log; the usual one stays, the others go with their last viewer."""
    wires = [stream.join(msid) for msid in range(1, MOST_WIRES + 1)]
    stream.join(5)
    with pytest.raises(LimitExceededError, match="player_stream_ids is 5, the limit is 4"):
        stream.join(99)
    stream.leave(wires[4])
    with pytest.raises(LimitExceededError):
        stream.join(99)
    stream.leave(wires[4])
    assert stream.join(99).wire_format.name == "99"
    stream.leave(wires[0])
    assert "1" in [wire.wire_format.name for wire in stream.wires]


def test_join_when_others_made_up_all_the_ids_there_may_be_still_has_the_lowest(stream):
    for msid in (100, 101, 102, 103):
        stream.join(msid)
    with pytest.raises(LimitExceededError):
        stream.join(104)
    assert [stream.join(msid).wire_format.name for msid in (1, 2, 3, 4)] == ["1", "2", "3", "4"]
    assert len(stream.wires) == MOST_WIRES


def test_end_when_told_empties_the_cache_and_says_so_in_every_log(stream, publisher):
    logs = [watched(stream, msid) for msid in (1, 3)]
    stream.publish(publisher, TYPE_VIDEO, 0, key(b"1"), 0.0)
    stream.take_over(None, 1.0)
    stream.end(1.0)
    for since, msid in zip(logs, (1, 3), strict=True):
        messages = since()
        assert messages[0].payload == key(b"1")
        assert b"NetStream.Play.UnpublishNotify" in messages[-1].payload
        assert messages[-1].msid == msid
    assert [wire.log.cached for wire in stream.wires] == [None, None]


def test_join_when_there_is_never_a_key_frame_gets_the_headers_after_the_wait(monkeypatch):
    monkeypatch.setattr("flowctl.live.stream.LONGEST_KEY_INTERVAL_S", 1.0)
    world = World()
    publisher = world.publisher()
    publisher.video(0, AVC_HEADER)
    for number in range(60):
        publisher.video(number * 40, inter(b"%d" % number))
        world.run(0.04)
    viewer = world.player()
    for number in range(60, 400):
        publisher.video(number * 40, inter(b"%d" % number))
        world.run(0.04)
    bodies = [message.payload for message in viewer.media if message.type_id == 9]
    assert bodies[0] == AVC_HEADER
    assert len(bodies) > 20


# -- several tracks (Enhanced RTMP v2)


def of_track(track, payload):
    """Return a classic H.264 body as one of track `track`: without multitrack for 0, as OBS sends it."""
    frame_type, packet_type = payload[0] >> 4, payload[1]
    if not track:
        return payload
    rest = payload[2:] if packet_type else payload[5:]  # a header has no composition time there
    return bytes([0x80 | frame_type << 4 | 6, packet_type]) + b"avc1" + bytes([track]) + rest


def publish_tracks(stream, publisher, tracks, seconds, start=0.0):
    """Publish headers, then each second the key frames and another frame of all tracks, the lowest first."""
    for track in tracks:
        stream.publish(publisher, TYPE_VIDEO, 0, of_track(track, AVC_HEADER), start)
    for second in range(seconds):
        for make in (key, inter):
            for track in tracks:
                now = start + second
                stream.publish(publisher, TYPE_VIDEO, int(now * 1000), of_track(track, make(b"%d" % second)), now)


def viewed(stream):
    """Return what a viewer gets who starts now: (payloads before the log's, payloads of the log)."""
    entry, prefix, _ = stream.start_place(stream.join(1))
    wires = []
    while entry.next is not None:
        wires.append(entry.wire)
        entry = entry.next
    return [message.payload for message in read(prefix)], [message.payload for message in read(wires)]


def test_late_viewer_of_several_tracks_starts_at_track_0_with_all_headers(stream, publisher):
    tracks = (0, 1, 2)
    publish_tracks(stream, publisher, tracks, 3)
    before, after = viewed(stream)
    assert before == [of_track(track, AVC_HEADER) for track in tracks]
    expected = [of_track(track, make(b"2")) for make in (key, inter) for track in tracks]
    assert after == expected
    assert stream.messages_in[MessageClass.KEY] == 3
    # A viewer that fell behind starts again at the same places.
    wire = stream.join(1)
    assert wire.log.gop.key_sequence == wire.log.tail.sequence - len(expected)


@pytest.mark.parametrize("tracks", [(1, 2), (2, 1), (1, 0)])
def test_tracks_in_any_order_start_at_the_lowest(stream, publisher, tracks):
    publish_tracks(stream, publisher, tracks, 3)
    before, after = viewed(stream)
    others = tracks[: tracks.index(min(tracks))]
    assert sorted(before[: len(tracks)]) == sorted(of_track(track, AVC_HEADER) for track in tracks)
    assert before[len(tracks) :] == [of_track(track, key(b"2")) for track in others]
    assert after[0] == of_track(min(tracks), key(b"2"))


@pytest.mark.parametrize("tracks", list(permutations((0, 1, 2))))
def test_tracks_in_any_order_can_be_decoded_by_who_goes_on_at_a_key_frame(stream, tracks):
    stream.take_over(Member(), 0.0)
    log = stream.join(1).log
    entry = log.tail
    publish_tracks(stream, stream.publisher, tracks, 4)
    starts = []
    while entry.next is not None:
        if entry.gop.key_sequence == entry.sequence and entry.enqueued_at >= 1:  # the first group shows who is lowest
            starts.append(entry)
        entry = entry.next
    assert len(starts) == 3
    for start in starts:
        wires, entry = list(start.gop.restart), start
        while entry.next is not None:
            wires.append(entry.wire)
            entry = entry.next
        pictures = [inspect(TYPE_VIDEO, message.payload) for message in read(wires)]
        firsts = {}
        for picture in pictures:
            if picture.message_class is not MessageClass.HEADER:
                firsts.setdefault(picture.tracks[0], picture.message_class)
        assert firsts == dict.fromkeys(tracks, MessageClass.KEY)
    assert log.headers == stream.join(1).headers.values  # no old pictures for who goes on in the middle of a group


def test_key_frame_of_another_track_when_pictures_of_the_lowest_follow_is_not_given_again(stream, publisher):
    """Tracks with key frames at different times: an old picture would only take the line from newer ones."""
    publish_tracks(stream, publisher, (0, 1), 1)
    for at, track, body in ((1000, 1, key(b"a")), (1500, 0, inter(b"b")), (2000, 0, key(b"c"))):
        stream.publish(publisher, TYPE_VIDEO, at, of_track(track, body), at / 1000)
    assert viewed(stream)[0] == [of_track(track, AVC_HEADER) for track in (0, 1)]


@pytest.mark.parametrize(("count", "size"), [(65, 10), (17, 65536)])
def test_pictures_of_another_track_when_they_come_without_end_are_not_kept(stream, publisher, count, size):
    publish_tracks(stream, publisher, (0, 1), 1)
    for number in range(count):
        body = of_track(1, (inter if number else key)(b"%d" % number)).ljust(size, b".")
        stream.publish(publisher, TYPE_VIDEO, 1000 + number, body, 1.0)
    stream.publish(publisher, TYPE_VIDEO, 2000, key(b"c"), 2.0)
    assert viewed(stream)[0] == [of_track(track, AVC_HEADER) for track in (0, 1)]


def test_track_that_ends_gives_way_to_the_next(stream, publisher):
    publish_tracks(stream, publisher, (0, 1), 2)
    publish_tracks(stream, publisher, (1,), 15, start=2.0)
    assert viewed(stream)[1][0] == of_track(1, key(b"14"))
    publish_tracks(stream, publisher, (0, 1), 2, start=20.0)
    assert viewed(stream)[1][0] == key(b"1")


def test_second_publisher_may_have_other_tracks(stream):
    first, second = Member(), Member()
    stream.take_over(first, 0.0)
    publish_tracks(stream, first, (0, 1), 2)
    stream.take_over(second, 2.0)
    publish_tracks(stream, second, (3, 4), 2, start=2.0)
    before, after = viewed(stream)
    assert before == [of_track(3, AVC_HEADER), of_track(4, AVC_HEADER)]
    assert after[0] == of_track(3, key(b"1"))


def test_join_when_a_player_comes_and_goes_on_another_id_rewrites_the_gop_cache_once(stream, publisher, monkeypatch):
    seeded = []
    seed = WireLog.seed
    monkeypatch.setattr(WireLog, "seed", lambda wire, other: seeded.append(wire.wire_format.msid) or seed(wire, other))
    for number in range(2):
        stream.publish(publisher, TYPE_VIDEO, 0, key(b"%d" % number), 0.0)
        stream.publish(publisher, TYPE_VIDEO, 40, inter(b"i"), 0.0)
        for _ in range(50):
            for msid in (2, 7):
                stream.leave(stream.join(msid))
    assert seeded == [2, 7] * 2
    entry, _, _ = stream.start_place(stream.join(7))
    assert [message.payload for message in read([entry.wire, entry.next.wire])] == [key(b"1"), inter(b"i")]
    stream.publish(publisher, TYPE_VIDEO, 80, key(b"k"), 0.0)
    assert [wire.wire_format.name for wire in stream.wires] == ["1", "7"]
    stream.drop_caches()
    assert [wire.log.cached for wire in stream.wires] == [None, None]


def hevc(frame_type, nal_unit_type, composition_ms, *, track=None):
    body = composition_ms.to_bytes(3, "big") + (3).to_bytes(4, "big") + bytes([nal_unit_type << 1, 1, 0])
    if track is None:
        return bytes([0x80 | frame_type << 4 | 1]) + b"hvc1" + body
    return bytes([0x80 | frame_type << 4 | 6, 0x01]) + b"hvc1" + bytes([track]) + body


def leading_of(stream, frames, first=0):
    """Publish (time, body) and return which of the pictures may refer to ones before their key frame."""
    entry = stream.join(1).log.tail
    for at, body in frames:
        stream.publish(stream.publisher, TYPE_VIDEO, (first + at) & 0xFFFFFFFF, body, at / 1000)
    found = []
    while entry.next is not None:
        found.append(entry.leading)
        entry = entry.next
    return found


CRA, IDR, TRAIL_R, RASL_N, RASL_R = 21, 19, 1, 8, 9


@pytest.mark.parametrize("first", [0, 0xFFFFFFFF - 60])
def test_pictures_when_shown_before_the_key_frame_of_an_open_group_are_leading(stream, first):
    stream.take_over(Member(), 0.0)
    frames = [
        (0, hevc(1, IDR, 66)),
        (33, hevc(2, TRAIL_R, 0)),
        (66, hevc(1, CRA, 99)),
        (99, hevc(2, RASL_R, 33)),
        (132, hevc(2, RASL_N, 0)),
        (165, hevc(2, TRAIL_R, 66)),
        (198, hevc(2, TRAIL_R, 0)),
    ]
    assert leading_of(stream, frames, first) == [False, False, True, True, True, False, False]


def test_pictures_when_behind_an_idr_picture_or_of_another_track_are_not_leading(stream):
    """Whatever their times are: a publisher that gives key frames alone a composition time loses nothing by it."""
    stream.take_over(Member(), 0.0)
    frames = [
        (0, hevc(1, CRA, 99)),
        (10, hevc(2, TRAIL_R, 0, track=1)),
        (20, hevc(1, IDR, 99)),
        (33, hevc(2, TRAIL_R, 0)),
    ]
    assert leading_of(stream, frames) == [True, False, False, False]
