"""Publishing and playing over RTMP, from connect to the end, without sockets: what clients are told and get."""

from __future__ import annotations

import dataclasses

import pytest
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, config, disposable, inter, key

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import AudioFirst
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.live.config import SecondPublisher
from flowctl.live.settings.levels import Level, Role
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.events import PlayStarted, PublishStarted, StatusReceived, StreamEnded
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.wire import TYPE_AUDIO, Message


def words_of(peer):
    """Return what the peer was told of errors."""
    return [item.description for item in peer.events if isinstance(item, StatusReceived) and item.level == "error"]


@pytest.mark.parametrize("kind", ["live", "record", "append", ""])
def test_publish_when_of_any_type_is_live(world, kind):
    publisher = world.connect().publish(kind=kind)
    assert publisher.has(PublishStarted)
    viewer = world.player()
    publisher.headers()
    publisher.video(0, key(b"k"))
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"k")]


@pytest.mark.parametrize("piece", [1, 7, None])
def test_stream_when_read_in_any_pieces_arrives_whole(piece):
    world = World(piece=piece)
    publisher = world.publisher()
    viewer = world.player()
    frames = [(key(b"k", 300), 0), (audio(b"a"), 10), (inter(b"i", 200), 40), (disposable(b"d"), 80)]
    for body, at in frames:
        publisher.audio(at, body) if body[0] == 0xAF else publisher.video(at, body)
    assert viewer.times[2:] == frames
    assert world.group.failures == []


def test_play_when_stream_is_live_begins_with_metadata_headers_and_key_frame(world):
    publisher = world.publisher()
    for at, body in ((0, key(b"old")), (40, inter(b"1")), (80, key(b"new")), (120, inter(b"2"))):
        publisher.video(at, body)
    publisher.audio(130, audio(b"a"))
    viewer = world.player()
    assert viewer.codes == [commands.PLAY_RESET]
    assert viewer.has(PlayStarted, stream_id=1)
    assert viewer.media[0].payload.startswith(b"\x02\x00\x0aonMetaData")
    assert viewer.times == [
        (AVC_HEADER, 0),
        (AAC_HEADER, 0),
        (key(b"new"), 80),
        (inter(b"2"), 120),
        (audio(b"a"), 130),
    ]


@pytest.mark.parametrize("role", ["publisher", "player"])
def test_input_when_nothing_is_played_or_published_yet_is_acknowledged_at_once(world, monkeypatch, role):
    world.publisher("live/other")
    acknowledged = []
    monkeypatch.setattr("flowctl.live.session.acknowledge", acknowledged.append)
    peer = getattr(world, role)("live/room")
    assert len(acknowledged) >= 4  # what follows the handshake, connect, createStream, and play or publish
    assert set(acknowledged) == {peer.wire}
    if role == "publisher":
        acknowledged.clear()
        peer.headers()
        assert acknowledged == []


def test_play_when_reset_is_not_wanted_sends_no_reset(world):
    world.publisher()
    viewer = world.connect()
    viewer._connect("live/room")
    viewer.command("createStream", None, stream_id=0, transaction_id=9)
    viewer.command("play", None, "room", -2000.0, -1.0, False, stream_id=1)
    assert commands.PLAY_RESET not in viewer.codes
    assert viewer.live._playing is not None


def test_player_when_nobody_publishes_waits_and_then_gets_everything(world):
    viewer = world.player()
    assert viewer.live._playing.waits_until is not None
    publisher = world.publisher()
    publisher.video(0, key(b"k"))
    assert commands.PLAY_PUBLISH_NOTIFY in viewer.codes
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"k")]
    for number in range(24):
        world.run(5)
        publisher.audio(number * 5000, audio(b"a"))
    assert commands.PLAY_FAILED not in viewer.codes


def test_player_when_waiting_too_long_is_cut_with_the_limit():
    world = World(config(wire={"player_wait_s": 30.0}))
    viewer = world.player()
    world.run(29)
    assert viewer.ended is None
    world.run(2)
    assert viewer.reason is CloseReason.LIMIT_HIT
    assert "nobody published live/room within 30 s" in viewer.ended[1]
    assert words_of(viewer) == ["nobody published live/room within 30 s"]
    assert world.hub.limits_hit == {"player_wait_s": 1}
    assert world.hub.streams() == {}


@pytest.mark.parametrize("waits", [False, True])
def test_kick_tells_who_plays_or_publishes_why(waits):
    world = World()
    peers = [world.player()] if waits else [world.publisher(), world.player()]
    for peer in peers:
        peer.connection.close(CloseReason.KICKED, "by an operator: too loud")
    world.run()
    assert [words_of(peer) for peer in peers] == [["kicked by an operator: too loud"]] * len(peers)
    assert {peer.reason for peer in peers} == {CloseReason.KICKED}


def test_player_when_waiting_is_not_allowed_is_refused_and_may_stay():
    world = World(config(players_may_wait=False))
    viewer = world.player()
    assert viewer.codes == [commands.PLAY_NOT_FOUND]
    assert viewer.ended is None


@pytest.mark.parametrize("name", ["room", "a\\b"])
def test_publisher_when_refused_is_closed_soon_for_librtmp_waits_for_that(world, name):
    world.publisher()
    librtmp, retries = world.connect().publish("live/other"), world.connect().publish("live/another")
    for peer in (librtmp, retries):
        peer.command("closeStream", None)
        peer.command("publish", None, name, "live")
        assert peer.codes[-1] == commands.PUBLISH_BAD_NAME
    world.run(1)
    assert librtmp.ended is None
    retries.command("publish", None, "hall", "live")
    world.run(2)
    assert librtmp.ended == (CloseReason.FINISHED, "refused, and asked for nothing else")
    assert retries.ended is None
    assert world.hub.is_published("live/hall")


def test_second_publisher_when_policy_is_replace_takes_over():
    world = World(config(second_publisher=SecondPublisher.REPLACE))
    first = world.publisher()
    viewer = world.player()
    first.video(5000, key(b"first"))
    second = world.publisher()
    second.video(0, key(b"second"))
    assert commands.PUBLISH_BAD_NAME in first.codes
    assert first.reason is CloseReason.KICKED
    assert viewer.payloads[-1] == key(b"second")
    assert viewer.times[-1][1] > 5000
    assert not viewer.has(StreamEnded)


def test_second_publisher_when_policy_is_standby_takes_over_with_its_own_headers():
    world = World(config(second_publisher=SecondPublisher.STANDBY))
    first = world.publisher()
    viewer = world.player()
    first.video(0, key(b"first"))
    second = world.connect().publish()
    other = AVC_HEADER + b"other"
    second.video(0, other)
    second.video(0, key(b"unseen"))
    assert len(world.stream().standby) == 1
    first.vanish()
    second.video(40, inter(b"undecodable"))
    second.video(80, key(b"second"))
    assert viewer.payloads[-2:] == [other, key(b"second")]
    assert key(b"unseen") not in viewer.payloads
    assert not viewer.has(StreamEnded)
    assert world.stream().standby == []


def test_publisher_when_gone_and_back_in_time_continues_the_timeline(world):
    first = world.publisher()
    viewer = world.player()
    started = world.clock()
    first.video(90_000, key(b"1"))
    first.vanish()
    world.run(2)
    back = world.publisher()
    back.video(0, key(b"2"))
    assert not viewer.has(StreamEnded)
    (_, before), (_, after) = viewer.times[2], viewer.times[-1]
    assert (viewer.times[2][0], viewer.times[-1][0]) == (key(b"1"), key(b"2"))
    assert 2000 <= after - before <= (world.clock() - started) * 1000
    world.run(10)
    assert not viewer.has(StreamEnded)


def test_publisher_when_gone_twice_has_the_whole_grace_time_each_time(world):
    viewer = world.player()
    world.publisher().vanish()
    world.run(2.5)
    world.publisher().vanish()
    world.run(1.5)
    assert not viewer.has(StreamEnded)
    world.run(2)
    assert viewer.has(StreamEnded)


@pytest.mark.parametrize("how", ["vanish", "leave", "close_stream"])
def test_publisher_when_gone_for_good_is_told_to_viewers_who_then_wait(world, how):
    publisher = world.publisher()
    viewer = world.player()
    publisher.video(0, key(b"1"))
    if how == "close_stream":
        publisher.session.close_stream()
        world.run()
        assert viewer.has(StreamEnded)
    else:
        getattr(publisher, how)()
        assert not viewer.has(StreamEnded)
        world.run(4)
    assert viewer.has(StreamEnded)
    assert viewer.live._playing.waits_until is not None
    again = world.publisher()
    again.video(0, key(b"2"))
    assert commands.PLAY_PUBLISH_NOTIFY in viewer.codes
    assert viewer.payloads[-1] == key(b"2")


def test_receive_audio_and_video_when_off_spare_the_player_that_track(world):
    publisher = world.publisher()
    publisher.video(0, key(b"0"))
    viewer = world.player()
    viewer.command("receiveVideo", None, False)
    viewer.forget()
    for at, body in ((40, inter(b"1")), (80, key(b"2"))):
        publisher.video(at, body)
    publisher.audio(90, audio(b"a"))
    assert viewer.payloads == [audio(b"a")]
    viewer.command("receiveVideo", None, True)
    publisher.video(120, inter(b"3"))
    publisher.video(160, key(b"4"))
    assert viewer.payloads[1:] == [AVC_HEADER, AAC_HEADER, key(b"4")]
    viewer.command("receiveAudio", None, False)
    viewer.forget()
    publisher.audio(200, audio(b"b"))
    publisher.video(240, inter(b"5"))
    assert viewer.payloads == [inter(b"5")]


@pytest.mark.parametrize("name", ["receiveVideo", "receiveAudio"])
def test_play_when_the_one_before_was_muted_has_both_tracks(world, name):
    publisher = world.publisher()
    publisher.video(0, key(b"0"))
    viewer = world.player()
    viewer.command(name, None, False)
    viewer.command("closeStream", None)
    viewer.forget()
    viewer.command("play", None, "room")
    publisher.audio(20, audio(b"a"))
    publisher.video(40, inter(b"1"))
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"0"), audio(b"a"), inter(b"1")]


def test_pause_when_asked_stops_delivery_and_goes_on_at_the_live_edge(world):
    publisher = world.publisher()
    publisher.video(0, key(b"0"))
    viewer = world.player()
    viewer.command("pause", None, True, 0.0)
    viewer.forget()
    publisher.video(40, inter(b"1"))
    publisher.video(80, key(b"2"))
    assert viewer.payloads == []
    viewer.command("pause", None, False, 0.0)
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"2")]


def test_seek_when_live_is_refused_politely(world):
    publisher = world.publisher()
    viewer = world.player()
    viewer.reads = False  # our client gives up on any error; others go on
    viewer.command("seek", None, 1000.0)
    publisher.video(0, key(b"k"))
    viewer.reads = True
    world.run()
    assert commands.SEEK_FAILED in viewer.codes
    assert viewer.payloads[-1] == key(b"k")


@pytest.mark.parametrize("name", ["closeStream", "deleteStream"])
def test_stream_when_closed_by_its_player_may_be_played_again(world, name):
    publisher = world.publisher()
    viewer = world.player()
    viewer.command(name, None, 1.0)
    viewer.forget()
    publisher.video(0, key(b"1"))
    assert viewer.payloads == []
    assert world.stream().viewers == {}
    viewer.command("play", None, "room", stream_id=1)
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"1")]


def test_message_streams_when_several_publish_each_on_its_own(world):
    publisher = world.publisher("live/one")
    publisher.command("createStream", None, stream_id=0, transaction_id=9)
    publisher.command("publish", None, "two", "live", stream_id=2)
    assert {stream.name for stream in world.hub.streams()} == {"live/one", "live/two"}
    viewer = world.player("live/two")
    publisher.message(Message(4, 0, TYPE_AUDIO, 2, AAC_HEADER))
    publisher.message(Message(4, 20, TYPE_AUDIO, 2, audio(b"2")))
    assert viewer.payloads == [AAC_HEADER, audio(b"2")]
    publisher.command("deleteStream", None, 1.0, stream_id=0)
    assert {stream.name for stream in world.hub.streams()} == {"live/two"}
    publisher.message(Message(4, 40, TYPE_AUDIO, 2, audio(b"3")))
    assert viewer.payloads[-1] == audio(b"3")
    publisher.leave()
    viewer.leave()
    world.run(4)
    assert world.hub.streams() == {}


def test_play_when_on_too_many_message_stream_ids_is_refused(world):
    """Players choose the ids, and each id costs a log: beyond four unusual ones they are refused, until one goes."""
    world.publisher()
    viewers = []
    for number in range(2, 10):
        viewer = world.connect()
        viewer._connect("live/room")
        viewer.command("play", None, "room", stream_id=number)
        viewers.append(viewer)
    assert commands.PLAY_FAILED in viewers[-1].codes
    assert [commands.PLAY_FAILED in viewer.codes for viewer in viewers[:-1]] == [False] * 7
    assert world.hub.limits_hit == {"player_stream_ids": 1}
    viewers[3].leave()
    viewers[-1].command("play", None, "room", stream_id=9)
    assert len(world.stream().viewers) == 7


def test_play_of_another_name_on_the_same_message_stream_changes_over(world):
    first, second = world.publisher("live/one"), world.publisher("live/two")
    first.video(0, key(b"1"))
    second.video(0, key(b"2"))
    viewer = world.player("live/one")
    viewer.forget()
    viewer.command("play", None, "two", transaction_id=9)
    first.video(40, inter(b"1"))
    second.video(40, inter(b"2"))
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"2"), inter(b"2")]
    assert [len(world.stream(name).viewers) for name in ("live/one", "live/two")] == [0, 1]
    viewer.command("play", None, "two", transaction_id=10)  # and once more the same
    assert (viewer.payloads[-1], viewer.ended, world.group.failures) == (inter(b"2"), None, [])


def test_play_when_playing_already_is_refused(world):
    world.publisher()
    viewer = world.player()
    viewer.command("createStream", None, stream_id=0, transaction_id=9)
    viewer.reads = False
    viewer.command("play", None, "other", stream_id=2)
    assert len(world.stream().viewers) == 1
    viewer.reads = True
    world.run()
    assert commands.PLAY_FAILED in viewer.codes


def test_frames_when_before_the_first_key_frame_are_held_back_for_a_while(monkeypatch):
    """No player could decode them; after `LONGEST_KEY_INTERVAL_S` they pass: encoders may refresh without them."""
    monkeypatch.setattr("flowctl.live.stream.LONGEST_KEY_INTERVAL_S", 5.0)
    world = World()
    publisher = world.publisher()
    viewer = world.player()
    publisher.video(0, inter(b"1"))
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER]
    assert world.stream().before_key_count == 1
    world.run(5)
    publisher.video(5000, inter(b"2"))
    assert viewer.payloads[-1] == inter(b"2")


def test_input_when_publishing_may_wait_and_is_prompt_again_afterwards(world):
    peer = world.connect()
    assert world.group.gathered == {peer.wire: False}
    peer.publish()
    assert world.group.gathered == {peer.wire: True}
    peer.headers()
    peer.command("deleteStream", None, float(peer.session.stream_id))
    assert world.group.gathered == {peer.wire: False}


def test_timer_when_only_media_comes_is_left_until_it_strikes(world, monkeypatch):
    """A publisher's media costs no look at its deadlines: they are found when the timer strikes, and set anew."""
    publisher = world.publisher()
    publisher.video(0, key())
    asked = []
    next_deadline = ServerSession.next_deadline
    monkeypatch.setattr(ServerSession, "next_deadline", lambda self, now: asked.append(now) or next_deadline(self, now))
    for number in range(20):
        publisher.video(number * 50, inter())
    assert asked == []
    for number in range(messages := int(world.config.rtmp.limits.ping_after_s) + 5):
        world.run(1.0)
        publisher.video(1000 + number * 1000, inter())
    assert 0 < len(asked) < messages
    assert publisher.ended is None


def test_settings_when_they_change_hold_for_who_publishes_and_who_waits():
    limits = {"first_media_s": 0.0, "player_wait_s": 0.0}
    world = World(config(media_silence_s=0.0, return_grace_s=0.0, wire=limits))
    publisher, waiting = world.publisher(), world.player("live/nobody")
    world.run(100.0)
    assert (publisher.ended, waiting.ended) == (None, None)
    usual = world.hub.config
    wire = dataclasses.replace(usual.rtmp.limits, player_wait_s=7.0, first_media_s=5.0)
    world.hub.config = dataclasses.replace(
        usual, media_silence_s=5.0, rtmp=dataclasses.replace(usual.rtmp, limits=wire)
    )
    for peer in (publisher, waiting):
        peer.connection.session.put_settings(changed=True)
    world.run(6.0)
    assert waiting.ended is None
    assert publisher.ended is not None
    world.run(2.0)
    assert waiting.ended is not None


def test_play_when_the_stream_has_a_level_of_its_own_has_its_target_delay_and_policy_meanwhile():
    talk = {"limits.target_delay_ms": 800, "policy": "audio-first"}
    levels = (
        Level(application="talk", role=Role.VIEWER, values=talk),
        Level(stream="cams/*", role=Role.VIEWER, values={"limits.target_delay_ms": 0}),
    )
    world = World(config(levels=levels))
    world.publisher("talk/room")
    viewer, other = world.player("talk/room"), world.player("live/room")
    sender, usual = viewer.connection.sender, other.connection.sender.limits
    assert sender.limits.target_delay_ms == 800
    assert isinstance(sender._policy, AudioFirst)
    assert world.player("cams/door").connection.sender.limits.target_delay_ms == 0
    world.hub.config = dataclasses.replace(world.hub.config, limits=Limits.parse("3MiB,100"))
    viewer.connection.session.put_settings(world.hub.config.limits)  # as a server does whose limits file has changed
    assert (sender.limits.size.soft, sender.limits.target_delay_ms) == (3 * 1024 * 1024, 800)
    before = len(sender.ledger())
    viewer.connection.session.put_settings(world.hub.config.limits)
    assert len(sender.ledger()) == before  # what is in force is not put in force again
    world.hub.config = dataclasses.replace(world.hub.config, limits=usual)
    viewer.connection.session.put_settings(usual)
    viewer.command("deleteStream", None, 1.0, stream_id=0)
    world.run(0.1)
    assert sender.limits == usual
    assert not isinstance(sender._policy, AudioFirst)


def test_cache_when_over_its_bounds_is_emptied_until_the_next_key_frame():
    world = World(config(cache=CacheLimits(messages=10)))
    publisher = world.publisher()
    publisher.video(0, key(b"old"))
    for number in range(30):
        publisher.video(40 + number * 40, inter(b"%d" % number, 30))
    assert world.player().payloads == []
    publisher.video(2040, key(b"new"))
    assert world.player().payloads == [AVC_HEADER, AAC_HEADER, key(b"new")]
