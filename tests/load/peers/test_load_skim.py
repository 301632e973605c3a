"""The skimmer beside the full parser: same octets, same counts, however they are cut."""

from __future__ import annotations

import itertools
import random

import pytest
from chance_kit import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from rtmp_chunk_peer import ChunkPeer, basic, header0, interleave, random_messages

from flowctl.core.flow.histogram import DelayHistogram
from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.load.peers.skim import HEAD_BYTES, FrameBook, Skimmer
from flowctl.load.peers.viewer import write_row
from flowctl.load.results.result import PeerKind, PeerResult
from flowctl.wire.client.measure import (
    AUDIO,
    FASTEST,
    ORIGIN,
    OTHER,
    STAMP,
    VIDEO,
    MediaFrame,
    StreamClock,
    ViewerMeasure,
)
from flowctl.wire.media.stamp import has_slot, read_stamp, stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control
from flowctl.wire.rtmp.wire import Message

LIMITS = WireLimits()
BASE_US = 1_700_000_000_000_000


def messages(seconds=4.0, *, stamped=True, start=0, lose=lambda index: False):
    source = SyntheticSource(video_bit_rate=900_000, key_interval_s=1.0, start_timestamp=start)
    numbers = {TAG_VIDEO: itertools.count(), TAG_AUDIO: itertools.count()}
    made = []
    for index, tag in enumerate(source.tags(seconds)):
        payload = tag.payload
        if has_slot(payload):
            number = next(numbers[tag.type_id])
            payload = stamp(payload, number, BASE_US + number * 1000)
            if not stamped:
                payload = payload.replace(b"flowctl.stamp", b"nothing.there")
            if lose(index):
                continue
        csid = {TAG_VIDEO: 6, TAG_AUDIO: 4}.get(tag.type_id, 5)
        made.append(Message(csid, tag.timestamp, tag.type_id, 1, payload))
        if index % 50 == 20:
            made.append(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=index)))
    return made


def on_wire(made, chunk_size):
    """Serialise as a server would that writes delta headers."""
    writer = ChunkWriter()
    octets = writer.set_chunk_size(chunk_size)
    return octets + b"".join(writer.write(message) for message in made)


def interleaved(made, chunk_size):
    """Serialise so that chunks of audio stand between the chunks of a video message (Adobe RTMP 1.0 section 5.3.1)."""
    video = [item for item in made if item.type_id == TAG_VIDEO]
    audio = iter([item for item in made if item.type_id == TAG_AUDIO])
    octets = [ChunkWriter().set_chunk_size(chunk_size)]
    for message in video:
        sound = next(audio, None)
        whole = on_wire([message], chunk_size)[16:]
        header = 12
        cut = header + chunk_size
        octets.append(whole[:cut])
        if len(whole) > cut and sound is not None:
            octets.append(on_wire([sound], chunk_size)[16:])
        octets.append(whole[cut:])
    return b"".join(octets)


def parsed(octets):
    """Return what a full parser counts: (kind, key, timestamp, number) per media message, and the other types."""
    media, other = [], []
    for message in ChunkReader(LIMITS).feed(octets):
        if message.type_id not in (8, 9, 15, 18):
            other.append(message)
            continue
        info = inspect(message.type_id, message.payload)
        found = read_stamp(message.payload)
        frame = info.kind != "data" and info.message_class not in (MessageClass.HEADER, MessageClass.DATA)
        kind = {"video": VIDEO, "audio": AUDIO}.get(info.kind, OTHER) if frame else OTHER
        key = info.message_class is MessageClass.KEY
        media.append((kind, key, message.timestamp, found[0] if found else None))
    return media, other


def skimmed(pieces):
    skimmer = Skimmer(FrameBook(), LIMITS)
    media, other = [], []
    for piece in pieces:
        media += [(frame.kind, frame.key, timestamp, frame.number) for timestamp, frame in skimmer.skim(piece)]
        other += skimmer.control
        skimmer.control.clear()
        assert skimmer.unfinished_bytes <= 4 * HEAD_BYTES + 16
    return media, other


def cut(octets, sizes):
    pieces, at, turns = [], 0, itertools.cycle(sizes)
    while at < len(octets):
        size = next(turns)
        pieces.append(octets[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("chunk_size", [128, 4096, 65536])
@pytest.mark.parametrize("stamped", [True, False])
def test_skim_when_fed_whole_sees_what_the_parser_sees(chunk_size, stamped):
    octets = on_wire(messages(stamped=stamped), chunk_size)
    assert parsed(octets) == skimmed([octets])


@pytest.mark.parametrize("chunk_size", [128, 4096, 65536])
def test_skim_when_fed_an_octet_at_a_time_sees_the_same(chunk_size):
    octets = on_wire(messages(1.2), chunk_size)
    assert parsed(octets) == skimmed(cut(octets, [1]))


@pytest.mark.parametrize("chunk_size", [128, 4096, 65536])
@pytest.mark.parametrize("seed", seeds(4))
def test_skim_when_cut_at_random_sees_the_same(chunk_size, seed):
    rng = random.Random(seed)
    octets = on_wire(messages(3.0), chunk_size)
    assert parsed(octets) == skimmed(
        cut(octets, [rng.choice([3, 17, 60, 64, 70, 500, 4097, 30_000]) for _ in range(99)])
    )


@pytest.mark.parametrize("sizes", [[1 << 20], [1], [97]])
def test_skim_when_audio_cuts_into_video_sees_the_same(sizes):
    octets = interleaved(messages(1.5), 1024)
    media, _ = parsed(octets)
    assert {VIDEO, AUDIO} <= {item[0] for item in media}
    assert parsed(octets) == skimmed(cut(octets, sizes))


def test_skim_when_timestamps_are_extended_sees_the_same():
    octets = on_wire(messages(1.5, start=0xFFFFFF - 700), 4096)
    media, other = skimmed(cut(octets, [700]))
    assert parsed(octets) == (media, other)
    assert max(item[2] for item in media) > 0xFFFFFF


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    csids=st.lists(st.sampled_from([3, 4, 6, 63, 64, 320]), min_size=1, max_size=4, unique=True),
    chunk_sizes=st.lists(st.sampled_from([128, 200, 1000, 4096]), max_size=4),
    longest=st.sampled_from([1, 20, 200, 5000, 1 << 20]),
)
def test_skim_when_headers_are_of_any_type_sees_the_same(seed, csids, chunk_sizes, longest):
    rng = random.Random(seed)
    # Of commands, which are kept whole, only short ones: what is held is looked at.
    made = [item for item in random_messages(rng, 40, csids) if item.type_id != 20 or len(item.payload) < 16]
    made.append(Message(2, 0, 3, 0, b"ackn"))  # the one before must not end like an extended timestamp
    octets, _ = interleave(ChunkPeer(rng), made, chunk_sizes)
    assert parsed(octets) == skimmed(cut(octets, [longest, 7]))


def test_skim_when_a_piece_ends_with_a_chunk_takes_the_next_header_as_part_of_the_message():
    chunk = b"v" * 128
    octets = header0(6, 10, 256, 9) + chunk + (basic(3, 6) + chunk) * 7
    first_and_a_half = 12 + 256 + 1 + 129
    assert [item[2] for item in parsed(octets)[0]] == [10, 20, 30, 40]
    assert parsed(octets) == skimmed(cut(octets, [first_and_a_half, 1 << 20]))


def test_skim_when_type_3_opens_a_message_after_an_extended_timestamp_sees_the_same():
    start, body = 1 << 24, b"v" * 100
    octets = header0(6, start, 100, 9) + body + (basic(3, 6) + start.to_bytes(4, "big") + body) * 3
    assert [item[2] for item in parsed(octets)[0]] == [start, 2 * start, 3 * start, 4 * start]
    assert parsed(octets) == skimmed(cut(octets, [12 + 4 + 100, 1 << 20]))


def test_skim_when_a_table_is_full_forgets_and_goes_on():
    book = FrameBook()
    skimmer = Skimmer(book, LIMITS)
    seen = skimmer.skim(on_wire(messages(4.0), 4096))
    assert 0 < len(book.known) <= len(seen)
    book.known.update({(0, str(index).encode()): seen[0][1] for index in range(8192)})
    more = Skimmer(book, LIMITS).skim(on_wire(messages(4.0, stamped=False), 4096))
    assert len(more) == len(seen)
    assert len(book.known) < 8192


# -- what is counted


def taken(items, clock=None, *, asked_us=0, now_us=BASE_US):
    measure = ViewerMeasure(clock or StreamClock())
    measure.asked_us = asked_us
    measure.count_media(items, now_us)
    return measure


def frames_of(made):
    return Skimmer(FrameBook(), LIMITS).skim(on_wire(made, 65536))


@pytest.mark.parametrize("stamped", [True, False])
def test_measure_when_frames_are_missing_counts_them(stamped):
    rng = random.Random(5)
    lost = {index for index in range(40, 300) if rng.random() < 0.1}
    whole = messages(5.0, stamped=True)
    measure = taken(frames_of(messages(5.0, stamped=stamped, lose=lost.__contains__)))
    kinds = [
        message.type_id
        for message in whole
        if message.type_id in (TAG_VIDEO, TAG_AUDIO) and read_stamp(message.payload)
    ]
    got = [measure.video, measure.audio]
    expected = [kinds.count(kind) - count for kind, count in zip((TAG_VIDEO, TAG_AUDIO), got, strict=True)]
    assert expected == [measure.missing_video, measure.missing_audio]
    assert min(expected) > 0
    assert measure.exact is stamped
    assert 0 < measure.gaps <= sum(expected)


def video(number, *, key=False, sent_us=BASE_US, timestamp=None):
    return (number * 33 if timestamp is None else timestamp, MediaFrame(VIDEO, key, number, sent_us, data=False))


def test_measure_when_a_gap_ends_without_a_key_frame_is_broken():
    clean = taken([video(0, key=True), video(1), video(5, key=True), video(6)])
    broken = taken([video(0, key=True), video(1), video(4), video(5), video(9)])
    assert [clean.broken_restarts, broken.broken_restarts] == [0, 2]
    assert [clean.missing_video, broken.missing_video] == [3, 5]


def test_measure_when_only_disposable_frames_are_missing_is_not_broken():
    clock = StreamClock(key_interval=60, disposable_every=2)
    measure = taken([video(0, key=True), video(1), video(3), video(5)], clock)  # 2 and 4 are missing
    assert [measure.missing_video, measure.broken_restarts] == [2, 0]
    other = taken([video(0, key=True), video(2)], clock)  # 1 is missing, and others refer to it
    assert [other.missing_video, other.broken_restarts] == [1, 1]


def test_measure_when_the_publisher_begins_anew_counts_no_gap():
    measure = taken([video(50, key=True), video(0, key=True), video(2_000_000, key=True)])
    assert measure.missing == 0


def test_measure_when_frames_are_older_than_the_wish_has_no_delay_of_them():
    items = [video(0, key=True, sent_us=BASE_US - 900_000), video(1, sent_us=BASE_US + 10_000)]
    measure = taken(items, asked_us=BASE_US, now_us=BASE_US + 30_000)
    assert (measure.video, measure.delays.count, measure.delays.max_us) == (2, 1, 20_000)


def test_measure_when_sound_is_all_there_is_measures_it():
    """Delay is of pictures where there are some, otherwise of sound."""
    sound = [(0, MediaFrame(AUDIO, False, 0, BASE_US, False))]
    assert taken(sound, now_us=BASE_US + 5).delays.count == 1
    assert taken([video(0, key=True), *sound], now_us=BASE_US + 5).delays.count == 1


def test_measure_when_the_size_of_the_pictures_changes_tells_the_time_in_each():
    sizes = [(1280, 720), (854, 480), (854, 480), (1280, 720)]
    measure = ViewerMeasure(StreamClock())
    for second, (width, height) in enumerate(sizes):
        _, header, _ = SyntheticSource(width=width, height=height).headers()
        measure.count_media(frames_of([Message(6, 0, TAG_VIDEO, 1, header.payload)]), BASE_US + second * 1_000_000)
    measure.note_rendition(measure.rendition, BASE_US + 3_500_000)
    row = PeerResult(number=0, profile="healthy", kind=PeerKind.HEALTHY, url="rtmp://h/a/s")
    write_row(row, measure)
    assert (row.renditions_s, row.switches) == ({"1280x720": 1.5, "854x480": 2.0}, 2)


def test_clock_when_the_publisher_is_ours_counts_from_its_origin():
    clock = StreamClock()
    clock.origin_us = BASE_US
    assert clock.delay_us(1000, BASE_US, BASE_US + 1_040_000) == 40_000
    assert clock.delay_us(1000, BASE_US + 2_000_000, BASE_US + 2_040_000) is None
    assert clock.source == ORIGIN


def test_clock_when_the_server_has_its_own_timestamps_does_not_trust_the_origin():
    """Delays of more than two minutes are no delays: the fastest viewer is taken instead."""
    clock = StreamClock()
    clock.origin_us = BASE_US
    assert clock.delay_us(50_000_000, 0, BASE_US) == 0
    assert clock.source == FASTEST


def test_clock_when_nothing_else_is_known_takes_the_fastest_viewer():
    clock = StreamClock()
    arrivals = [(0, 500), (33, 30_000), (66, 70_000), (100, 95_000)]
    assert [clock.delay_us(ms, 0, BASE_US + us) for ms, us in arrivals] == [0, 0, 7_000, 0]


def test_clock_when_that_of_the_publisher_stopped_or_is_slow_is_followed():
    """Delays are against what came soonest in the last minute, not ever: else all would be late for good."""
    clock = StreamClock()
    arrivals = [*range(0, 40_000, 100), *range(44_000, 130_000, 100)]
    assert [clock.delay_us(place * 100, 0, BASE_US + at * 1000) for place, at in enumerate(arrivals)][-1] == 0
    slow = [clock.delay_us(ms, 0, BASE_US + ms * 1010) for ms in range(0, 300_000, 100)]
    assert max(slow) <= 600_000


def test_measure_when_the_wire_is_stamped_says_so_and_fills_the_row():
    clock = StreamClock()
    measure = taken([video(index, key=not index) for index in range(100)], clock, now_us=BASE_US + 25_000)
    row = PeerResult(number=0, profile="healthy", kind=PeerKind.HEALTHY, url="rtmp://h/a/s")
    write_row(row, measure)
    assert (clock.source, row.video, row.keys, row.started_on_key, row.delays) == (STAMP, 100, 1, True, 100)
    assert row.delay_p50_ms == pytest.approx(25, rel=0.02)
    assert row.delay_max_ms == 25.0


def test_measure_when_no_picture_comes_for_a_while_counts_a_freeze():
    measure, row = ViewerMeasure(StreamClock()), PeerResult(number=0, profile="", kind=PeerKind.SLOW, url="")
    write_row(row, measure)
    assert row.longest_freeze_s is None
    measure.count_media([video(index, key=not index) for index in range(10)], BASE_US)
    for index, at_ms in enumerate((199, 800, 833), 10):
        measure.count_media([video(index)], BASE_US + at_ms * 1000)
        measure.count_media([(0, MediaFrame(AUDIO, False, index, BASE_US, data=False))], BASE_US + at_ms * 1000 + 100)
    write_row(row, measure)
    assert (row.freezes, row.longest_freeze_s) == (1, pytest.approx(0.601))
    measure.note_wait(BASE_US + 2_000_000)
    write_row(row, measure)
    assert (row.freezes, row.longest_freeze_s) == (2, pytest.approx(1.167))


def sound(timestamp):
    return (timestamp, MediaFrame(AUDIO, False, None, BASE_US, data=False))


@pytest.mark.parametrize(("sound_ms", "missed"), [(2960, 0), (3900, 0), (8000, 152)])
def test_measure_when_only_sound_comes_after_a_picture_misses_those_of_its_time(sound_ms, missed):
    measure = taken([video(index, key=not index) for index in range(91)])
    row = PeerResult(number=0, profile="", kind=PeerKind.SLOW, url="")
    assert measure.missed_at_end == 0
    measure.count_media([sound(at) for at in range(2970, sound_ms, 20)], BASE_US)
    write_row(row, measure)
    assert (row.missed_at_end, row.missing_video) == (missed, 0)
    measure.count_media([video(sound_ms // 33, key=True)], BASE_US)
    write_row(row, measure)
    assert (row.missed_at_end, row.missing_video) == (0, max(sound_ms // 33 - 91, 0))


def test_measure_when_another_publisher_has_other_times_misses_nothing():
    measure = taken([video(0, key=True), video(1), sound(2_000_000_000)])
    assert measure.missed_at_end == 0


def test_measure_when_others_watch_shares_the_delays_of_the_second():
    recent = DelayHistogram()
    for _ in range(3):
        ViewerMeasure(StreamClock(), recent).count_media([video(0, key=True)], BASE_US + 1000)
    assert (recent.count, recent.max_us) == (3, 1000)
