"""Sets of tracks: one multitrack publication, its plain players, those that take all tracks, and single tracks."""

from __future__ import annotations

import pytest
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, config, inter, key
from rendition_kit import ABLE

from flowctl.live.renditions.feeds import metadata_of_track
from flowctl.live.settings.renditions import RenditionNames
from flowctl.wire.rtmp.amf.amf0 import decode, encode
from flowctl.wire.rtmp.media.tracks import wrap_track

VIDEO, SOUND, DATA = 9, 8, 18
SPS_640x360 = bytes.fromhex("6764001eacd940a02ff9610000030001000003003c8f162d96")


def header_of(track):
    return AVC_HEADER[:-5] + bytes((track,)) + AVC_HEADER[-4:]


class TrackWorld(World):
    """A server with a publication of several tracks."""

    def __init__(self, settings=None) -> None:
        super().__init__(settings)
        self.at, self.tracks = 0, range(3)
        self.sender = self.connect().publish("live/show")

    def headers_of(self, tracks):
        self.sender.send(self.sender.session.send_tag(DATA, 0, encode("onMetaData", {"width": 1920.0})))
        for track in tracks:
            self.video(0, track, header_of(track))
        self.sender.audio(0, AAC_HEADER)

    def video(self, at, track, payload):
        self.sender.video(at, wrap_track(VIDEO, track, payload))

    def pictures(self, count, *, every=5):
        for _ in range(count):
            for track in self.tracks:
                tag = f"{track} {self.at}".encode()
                self.video(self.at, track, key(tag) if self.at % (40 * every) == 0 else inter(tag))
            self.sender.audio(self.at, audio(b"%d" % self.at))
            self.at += 40
            self.run(0.04)

    def able(self, name="live/show"):
        """Return a player that says that it reads several tracks, as none of today does."""
        return self.player(name, settings=ABLE)


@pytest.fixture
def world():
    world = TrackWorld()
    yield world
    assert world.group.failures == []


def seen(peer):
    """Return the tracks, and the times that pictures say; all of them must be plain messages of H.264."""
    videos = [message.payload for message in peer.media if message.type_id == VIDEO]
    assert all(payload[0] in {0x17, 0x27} for payload in videos)
    tags = [payload[11:].decode().split() for payload in videos if payload[1] == 1]
    return {track for track, _ in tags}, [int(at) for _, at in tags]


def test_publication_when_it_has_tracks_is_a_set_for_plain_players(world):
    world.headers_of(world.tracks)
    world.pictures(7)
    able, plain = world.able(), world.player("live/show")
    chosen, also = world.player("live/show?track=1"), world.able("live/show?track=2")
    world.pictures(5)
    assert seen(also) == ({"2"}, list(range(200, 480, 40)))
    tracks, times = seen(plain)
    assert (len(tracks), times) == (1, list(range(200, 480, 40)))
    assert seen(chosen) == ({"1"}, list(range(200, 480, 40)))
    assert header_of(1) in chosen.payloads
    assert wrap_track(VIDEO, 2, header_of(2)) in able.payloads
    assert sum(payload[0] & 0x8F == 0x86 for payload in able.payloads) == 2 + 2 * 7
    assert [payload for payload in plain.payloads if payload[:2] == b"\xaf\x01"] == [
        audio(b"%d" % at) for at in range(200, 480, 40)
    ]


def test_player_when_it_waits_gets_a_rendition_and_one_that_takes_tracks_all(world):
    plain, able, none = (
        world.player("live/show"),
        world.able(),
        world.player("live/show?track=9"),
    )
    world.headers_of(world.tracks)
    world.pictures(5)
    assert seen(plain)[1] == [0, 40, 80, 120, 160]
    assert sum(payload[0] & 0x8F == 0x86 for payload in able.payloads) == 12
    assert seen(none) == (set(), [])
    world.tracks = [0, 9]
    world.video(0, 9, header_of(9))
    world.pictures(6)
    assert seen(none)[0] == {"9"}


def test_player_when_headers_and_pictures_come_at_once_gets_each_once(world):
    """As from another worker, which sends its GOP cache; the players have waited for it."""
    plain, able = world.player("live/show"), world.able()
    session = world.sender.session
    burst = [(VIDEO, wrap_track(VIDEO, track, header_of(track))) for track in world.tracks]
    for at in range(0, 400, 40):
        burst += [
            (VIDEO, wrap_track(VIDEO, track, (inter if at % 200 else key)(b"%d %d" % (track, at))))
            for track in world.tracks
        ]
        for type_id, payload in burst:
            world.sender.send(session.send_tag(type_id, at, payload), run=False)
        burst = []
    world.run()
    world.at = 400
    world.pictures(5)
    _, times = seen(plain)
    assert times == list(range(200, 600, 40))  # from the last key frame that was there
    multitrack = [payload for payload in able.payloads if payload[0] & 0x8F == 0x86]
    assert len(multitrack) == 2 + 2 * 10


def test_set_when_there_is_one_again_after_its_end_is_for_those_who_waited(world):
    plain, able = world.player("live/show"), world.able()
    for _ in range(3):
        plain.forget()
        able.forget()
        world.headers_of(world.tracks)
        world.pictures(5)
        assert seen(plain)[1] == list(range(world.at - 200, world.at, 40))
        assert sum(payload[0] & 0x8F == 0x86 for payload in able.payloads) == 12
        world.sender.leave()
        world.run(5)
        assert plain.live._playing.waiting
        world.sender = world.connect().publish("live/show")
    times = [message.timestamp for message in plain.media if message.type_id == VIDEO]
    assert times == sorted(times)


def test_set_when_the_publisher_goes_ends_and_another_publication_is_what_it_is(world):
    world.headers_of(world.tracks)
    world.pictures(3)
    plain = world.player("live/show")
    world.sender.leave()
    world.run(5)
    assert plain.live._playing.waiting
    plain.forget()
    world.sender = world.connect().publish("live/show")
    world.at, world.tracks = 0, [0]
    world.headers_of([0])
    world.pictures(3)
    assert seen(plain) == ({"0"}, [0, 40, 80])
    assert world.hub.renditions.find(world.stream("live/show")) is None


def test_set_when_its_publisher_is_back_in_time_goes_on_with_the_tracks_that_it_has(world):
    world.headers_of(world.tracks)
    world.pictures(5)
    chosen = world.player("live/show?track=0")
    world.sender.vanish()
    world.sender = world.connect().publish("live/show")
    world.tracks = [0]
    world.headers_of([0])
    world.pictures(5)
    assert seen(chosen) == ({"0"}, list(range(0, 400, 40)))
    times = [message.timestamp for message in chosen.media if message.type_id == VIDEO and message.payload[1] == 1]
    assert times == sorted(times)


def test_tracks_when_invented_without_end_are_eight_and_those_that_are_silent_give_way(world):
    world.headers_of(range(64))
    for track in range(64):
        world.video(0, track, key(b"%d 0" % track))
    face = world.stream("live/show")
    assert [stream.rendition for stream in face.renditions] == [f"track{track}" for track in range(8)]
    for second in range(11):
        world.sender.audio(second * 1000, audio(b"a"))
        world.run(1)
    world.video(11_000, 63, key(b"63 11000"))
    names = [item.name for item in world.hub.renditions.find(face).renditions()]
    assert (len(names), names[-1]) == (8, "track63")


def test_caches_of_all_renditions_together_are_no_larger_than_that_of_a_stream():
    settings = config()
    most = settings.cache.size_bytes
    world = TrackWorld(settings)
    world.tracks = range(8)
    world.headers_of(world.tracks)
    for track in world.tracks:
        world.video(0, track, key(b"%d 0" % track))
    for number in range(1, 60):
        for track in world.tracks:
            world.video(number * 40, track, inter(b"%d" % track, 60_000))
    logs = [wire.log for stream in world.stream("live/show").renditions for wire in stream.wires]
    held = sum(log.tail.offset - log.cached.offset for log in logs if log.cached is not None)
    assert most / 4 < held < most * 17 / 16
    assert sum(log.tail.offset for log in logs) > most * 1.5


def test_setting_when_off_leaves_a_publication_as_it_is():
    world = TrackWorld(config(renditions=RenditionNames(tracks=False)))
    plain = world.player("live/show")
    world.headers_of(world.tracks)
    assert wrap_track(VIDEO, 1, header_of(1)) in plain.payloads


def test_metadata_of_a_track_says_its_own_size():
    values = {
        "width": 1920.0,
        "height": 1080.0,
        "videodatarate": 2500.0,
        "audiodatarate": 128.0,
        "videoTrackIdInfoMap": {"1": {"width": 1280.0, "height": 720.0, "videodatarate": 1200.0, "other": 1.0}},
    }
    told = [
        decode(metadata_of_track(encode("onMetaData", values), track, size))
        for track, size in ((0, None), (1, None), (1, (1282, 722)), (2, None))
    ]
    assert [name for name, _ in told] == ["onMetaData"] * 4
    assert told[0][1] == {key: value for key, value in values.items() if key != "videoTrackIdInfoMap"}
    assert told[1][1] == {"audiodatarate": 128.0, "width": 1280.0, "height": 720.0, "videodatarate": 1200.0}
    assert (told[2][1]["width"], told[2][1]["height"]) == (1282.0, 722.0)
    assert told[3][1] == {"audiodatarate": 128.0}
    for broken in (b"", b"\x02\x00\x0aonMetaData\x03", encode("onMetaData"), encode("onMetaData", 1.0)):
        assert metadata_of_track(broken, 1, (2, 2)) == broken


def test_player_that_asks_for_a_track_that_is_not_there_waits_no_longer_than_for_a_publisher():
    world = TrackWorld(config(wire={"player_wait_s": 5.0}))
    world.headers_of(world.tracks)
    world.pictures(7)
    odd, late = world.player("live/show?track=9"), world.player("live/show?track=3")
    world.tracks = [*world.tracks, 3]
    world.headers_of([3])
    world.pictures(60)
    assert seen(late)[0] == {"3"}
    world.pictures(120)
    assert "nobody published track 9 of live/show within 5 s" in odd.ended[1]
    assert world.hub.limits_hit == {"player_wait_s": 1}
    assert late.ended is None
