"""FFmpeg publishes; FFmpeg, PyAV and a player of ours play: what comes out is what went in, octet by octet."""

from __future__ import annotations

import pytest
from e2e_kit import (
    CLOCK,
    address_of,
    frames_of,
    keys_in,
    read_flv,
    wait_for_end,
    wait_for_keys,
    wait_for_viewers,
    wait_until,
)
from e2e_programs import watch, write_flv

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.media.media import inspect

CASES = {
    "h264_aac": ("plain", ()),
    "b_frames": ("b_frames", ()),
    "hevc": ("hevc", ()),
    "audio_only": ("plain", ("-vn",)),
    "video_only": ("plain", ("-an",)),
}


@pytest.mark.parametrize("case", CASES)
def test_players_get_what_ffmpeg_published_when_they_waited_for_it(
    case, background, live, clients, programs, sample, tmp_path
):
    name, options = CASES[case]
    source = sample(name)
    server = live()
    recorded = programs.play(server, tmp_path / "recorded.flv")
    watched = background.submit(watch, address_of(server))
    ours = clients.play(server)
    wait_for_viewers(server, 3)
    published = programs.publish(server, source, *options, rate=4.0)
    assert (published.wait(), published.log) == (0, "")
    assert recorded.wait() == 0
    wait_for_end(ours)

    missing = {"-vn": "video", "-an": "audio"}.get(options[0] if options else "")
    sent, received, copied = watch(source), watched.result(20), watch(tmp_path / "recorded.flv")
    for kind in ("video", "audio"):
        expected = [] if kind == missing else sent.of(kind)
        assert expected == received.of(kind)
        assert expected == copied.of(kind)
    if missing != "video":
        assert sent.pictures == received.pictures == copied.pictures
    if missing != "audio":
        assert sent.sounds == received.sounds == copied.sounds
    assert programs.decode(tmp_path / "recorded.flv") == (0, "")
    if case == "b_frames":
        assert {packet.pts - packet.dts for packet in received.of("video")} > {0}

    tags = read_flv(source)
    for track, kind in ((TAG_VIDEO, "video"), (TAG_AUDIO, "audio")):
        expected = [] if kind == missing else frames_of(tags, track)
        assert expected == frames_of(ours.messages, track)
    if case == "hevc":
        assert {inspect(*item[::2]).codec for item in ours.messages if item[0] == TAG_VIDEO} == {"hvc1"}
    assert ours.player.ended_by_server


def test_late_viewers_decode_from_their_first_packet(background, live, clients, programs, sample, tmp_path):
    source = sample("plain")
    server = live()
    published = programs.publish(server, source, rate=2.0)
    wait_for_keys(server, 3)
    watched = background.submit(watch, address_of(server))
    ours = clients.play(server)
    recorded = programs.play(server, tmp_path / "late.flv")
    assert published.wait() == 0
    wait_for_end(ours)
    assert recorded.wait() == 0

    sent, received, late = watch(source), watched.result(20), watch(tmp_path / "late.flv")
    for seen in (received, late):
        for kind in ("video", "audio"):
            count = len(seen.of(kind))
            assert 0 < count < len(sent.of(kind))
            assert sent.of(kind)[-count:] == seen.of(kind)
        first_key = seen.of("video")[0]
        assert first_key.key
        assert seen.of("audio")[0].dts >= first_key.dts
        assert {time: sent.pictures[time] for time in seen.pictures} == seen.pictures
        assert len(seen.of("video")) == len(seen.pictures)
        assert len(seen.of("audio")) == seen.sounds
    assert programs.decode(tmp_path / "late.flv") == (0, "")

    key = keys_in(ours.classes)[0]
    assert set(ours.classes[:key]) == {MessageClass.HEADER}
    assert {item[0] for item in ours.messages[:key]} == {TAG_VIDEO, TAG_AUDIO}
    tags = read_flv(source)
    assert set(ours.messages[:key]) <= set(tags)  # headers as they were published, times included
    start = tags.index(ours.messages[key])
    after = [item for item in ours.messages[key:] if item[0] in (TAG_VIDEO, TAG_AUDIO)]
    assert after == tags[start:]


def test_viewer_gets_a_picture_at_once_when_no_key_frame_is_near(live, clients):
    """The GOP cache serves a late viewer although the next key frame is far away, or never comes."""
    server = live()
    publishing = clients.publish(server, SyntheticSource(key_interval_s=60.0, video_bit_rate=300_000), pace=1.0)
    wait_until(lambda: len(publishing.messages) > 40, "some frames published")
    late = clients.play(server)
    wait_until(lambda: len(late.messages) > 40, "the late viewer has frames")
    assert keys_in(late.classes) == [2]
    assert late.messages[2:] == publishing.messages[2 : len(late.messages)]


def signed(timestamp):
    """Return a timestamp as FFmpeg reads it: it takes the upper half of the 32-bit clock as negative."""
    return timestamp - CLOCK if timestamp >= CLOCK // 2 else timestamp


@pytest.mark.parametrize("start", [(1 << 24) - 700, (1 << 32) - 700], ids=["extended", "wrap"])
def test_pyav_reads_right_timestamps_when_they_grow_long_or_wrap(start, background, live, clients):
    source = SyntheticSource(start_timestamp=start, video_bit_rate=1_000_000, key_interval_s=0.5)
    server = live()
    watched = background.submit(watch, address_of(server))
    wait_for_viewers(server, 1)
    publishing = clients.publish(server, source, pace=2.0, duration_s=2.0)
    received = watched.result(20)
    for kind, track in (("video", TAG_VIDEO), ("audio", TAG_AUDIO)):
        expected = [signed(timestamp) for timestamp, _ in frames_of(publishing.messages, track)]
        assert expected == [packet.dts for packet in received.of(kind)]
    assert len(received.of("video")) == len(received.pictures)
    assert len(received.of("audio")) == received.sounds


def test_our_player_reads_right_timestamps_when_ffmpeg_publishes_past_2_24(live, clients, programs, sample):
    source = sample("plain")
    server = live()
    ours = clients.play(server, PlayProfile())
    wait_for_viewers(server, 1)
    offset_ms = (1 << 24) - 2000
    published = programs.publish(server, source, "-output_ts_offset", offset_ms / 1000, rate=4.0)
    assert (published.wait(), published.log) == (0, "")
    wait_for_end(ours)
    tags = read_flv(source)
    for track in (TAG_VIDEO, TAG_AUDIO):
        expected = [(timestamp + offset_ms, payload) for timestamp, payload in frames_of(tags, track)]
        assert expected == frames_of(ours.messages, track)


def test_pictures_differ_when_a_frame_is_missing(sample, tmp_path):
    tags = read_flv(sample("plain"))
    classes = [inspect(type_id, payload).message_class for type_id, _, payload in tags]
    lost = keys_in(classes)[0] + classes[keys_in(classes)[0] :].index(MessageClass.INTER)
    whole = watch(sample("plain")).pictures
    broken = watch(write_flv(tmp_path / "broken.flv", tags[:lost] + tags[lost + 1 :])).pictures
    assert len(whole) - 1 == len(broken)
    wrong = [time for time, picture in broken.items() if picture != whole[time]]
    assert wrong
    assert max(wrong) < tags[keys_in(classes)[1]][1]
