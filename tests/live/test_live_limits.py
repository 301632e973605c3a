"""Limits of the live layer, held input and fairness, authentication, and viewers on their way between threads."""

from __future__ import annotations

import pytest
import structlog
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, config, key

from flowctl.core.flow.limits import Limits
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.settings.levels import Level, Role
from flowctl.live.settings.renditions import RenditionNames
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.events import PublishStarted, StatusReceived, StreamEnded
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, Acknowledgement, UserControl, encode_control
from flowctl.wire.rtmp.session_config import ClientSessionConfig


def test_publishers_when_too_many_of_an_address_are_refused():
    world = World(config(publishers_per_address=2))
    first, _ = world.publisher("live/1"), world.publisher("live/2")
    third = world.connect().publish("live/3")
    assert third.codes == [commands.PUBLISH_BAD_NAME]
    assert world.connect("192.0.2.9").publish("live/4").has(PublishStarted)
    assert world.hub.limits_hit == {"publishers_per_address": 1}
    first.leave()
    assert world.connect().publish("live/5").has(PublishStarted)


@pytest.mark.parametrize("own", [False, True])
def test_limits_when_a_publication_is_over_are_no_longer_those_of_its_application(own):
    values = {"limits.soft": "8MiB,9000,9s", "settings.stuck_s": 99.0}
    level = Level(application="big", role=Role.PUBLISHER, values=values)
    settings = config(levels=(level,), limits=Limits.parse("1MiB,100,2s"))
    world = World(settings, limits=settings.limits, sender=settings.sender)
    peer = world.publisher("big/room")
    sender = peer.connection.sender
    assert (sender.limits, sender.settings.stuck_s) == (Limits.parse("8MiB,9000,9s"), 99.0)
    expected = settings.limits
    if own:
        expected = Limits.parse("3MiB,300,3s")
        sender.set_limits(expected)
    peer.command("deleteStream", None, peer.session.stream_id, stream_id=0)
    assert peer.live.streams() == []
    assert (sender.limits, sender.settings) == (expected, settings.sender)


def test_limits_when_a_play_ends_beside_a_publication_are_those_of_the_publication_again():
    marks = {Role.PUBLISHER: "8MiB,9000,9s", Role.VIEWER: "2MiB,200,2s"}
    levels = tuple(Level(role=role, values={"limits.soft": text}) for role, text in marks.items())
    world = World(config(levels=levels))
    peer = world.publisher("big/room")
    sender = peer.connection.sender
    peer.command("createStream", None, stream_id=0, transaction_id=9)
    peer.reads = False  # our client knows one message stream
    for command, role in ((("play", "other"), Role.VIEWER), (("closeStream",), Role.PUBLISHER)):
        peer.command(command[0], None, *command[1:], stream_id=2)
        assert sender.limits == Limits.parse(marks[role])


def test_streams_when_too_many_are_refused_to_publishers_and_players(monkeypatch):
    monkeypatch.setattr("flowctl.live.hub.MOST_STREAMS", 2)
    world = World()
    world.publisher("live/1")
    waiting = world.player("live/2")
    assert world.connect().publish("live/3").codes == [commands.PUBLISH_BAD_NAME]
    assert world.player("live/4").codes == [commands.PLAY_FAILED]
    waiting.leave()
    assert world.connect().publish("live/3").has(PublishStarted)


def test_headers_when_over_their_bounds_are_counted_by_name_logged_once_and_passed_on():
    """Metadata with a key frame index of hours is no fault: who views gets it, who comes later does not."""
    world = World(config(renditions=RenditionNames(tracks=False)))  # the header is of a track
    publisher = world.publisher()
    viewer = world.player()
    long = b"\x96\x00" + b"avc1" + b"\x01" + b"." * 65536
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            publisher.video(0, long)
    assert viewer.payloads.count(long) == 3
    assert publisher.ended is None
    publisher.video(40, key(b"k"))
    assert world.player().payloads == [AVC_HEADER, AAC_HEADER, key(b"k")]
    assert world.hub.limits_hit == {"header_bytes": 3}
    (line,) = [item for item in logs if item["event"] == "header not kept"]
    assert (line["limit"], line["value"], line["maximum"]) == ("header_bytes", len(long), 65536)


def test_times_when_exceeded_close_with_their_reason():
    world = World(config(media_silence_s=0))
    silent, shaken = world.connect(), world.connect()
    shaken.session.connect("rtmp://example.com/live/x")
    shaken.carry()
    shaken.reads = False
    publisher = world.connect().publish("live/mute")
    world.run(6)
    assert (silent.reason, silent.ended[1]) == (CloseReason.HANDSHAKE_TIMEOUT, silent.ended[1])
    assert silent.ended[1].startswith("handshake_time_s")
    world.run(18)
    assert publisher.reason is CloseReason.IDLE
    assert publisher.ended[1].startswith("first_media_s")
    idle = world.connect()
    idle._connect("live/x")
    world.run(21)
    assert idle.reason is CloseReason.IDLE
    gone = world.publisher("live/gone")
    gone.video(0, key(b"k"))
    gone.reads = False
    world.run(95)
    assert gone.reason is CloseReason.IDLE
    assert gone.ended[1].startswith("ping_silence_s")
    assert world.hub.limits_hit == {"handshake_time_s": 2, "first_media_s": 2, "ping_silence_s": 1}


def test_publisher_when_it_falls_silent_is_cut_and_says_nothing_by_metadata_or_pings():
    for silence_s in (10.0, 0.0):
        world = World(config(media_silence_s=silence_s))
        publisher, viewer = world.publisher(), world.player()
        publisher.video(0, key(b"k"))
        for _ in range(9):
            world.run(1)
            publisher.send(publisher.session.send_tag(18, 0, encode("onMetaData", {"width": 640.0})))
        assert publisher.ended is None
        publisher.audio(9000, audio(b"a"))
        world.run(9)
        assert publisher.ended is None
        world.run(2)
        if not silence_s:
            assert publisher.ended is None
            continue
        assert publisher.reason is CloseReason.IDLE
        assert publisher.ended[1].startswith("media_silence_s is 10")
        assert world.hub.limits_hit == {"media_silence_s": 1}
        assert "media_silence_s" in repr(publisher.events)
        assert commands.PLAY_UNPUBLISH_NOTIFY not in viewer.codes
        world.run(3)  # return_grace_s: it may have lost its connection
        assert commands.PLAY_UNPUBLISH_NOTIFY in viewer.codes
        assert world.group.failures == []


@pytest.mark.parametrize("silent_at_s", [0, 1, 6, 11, 17, 25])
def test_publisher_is_cut_after_the_same_silence_whenever_it_begins(world, silent_at_s):
    publisher = world.publisher()
    for number in range(silent_at_s):
        publisher.video(number * 1000, key(b"k"))
        world.run(1)
    publisher.video(silent_at_s * 1000, key(b"k"))
    world.run(9)
    assert publisher.ended is None
    world.run(2)
    assert publisher.ended[1].startswith("media_silence_s is 10")


def test_publisher_when_it_sends_nothing_but_begins_another_publication_now_and_then_is_cut(world):
    publisher = world.connect().publish("live/1")
    publisher.command("createStream", None, stream_id=0, transaction_id=9)
    for number in range(20):
        publisher.command("publish", None, f"other{number}", "live", stream_id=2)
        world.run(1)
        publisher.command("closeStream", None, stream_id=2)
    world.run(1)
    assert publisher.reason is CloseReason.IDLE
    assert publisher.ended[1].startswith("first_media_s")


def test_publisher_when_its_input_is_held_is_not_silent(world):
    publisher = world.publisher()
    publisher.connection.receiver.pause("test", "held")
    world.run(25)
    assert publisher.ended is None
    publisher.connection.receiver.resume("test")
    publisher.video(0, key(b"k"))
    world.run(12)
    assert publisher.ended[1].startswith("media_silence_s")


def test_input_when_viewer_is_at_its_soft_limit_is_held_but_for_control():
    world = World(limits=Limits.parse("3000,0", "0,0"))
    publisher = world.publisher()
    viewer = world.player()
    # A message in flight is always finished, so one that is larger than the low mark keeps the viewer at the limit.
    viewer.reads = False
    viewer.wire.room = len(viewer.wire.down) + 100
    for number in range(20):
        publisher.video(number * 40, key(b"%d" % number, 2500))
    assert viewer.state.name == "SOFT_LIMIT"
    viewer.message(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=7)))
    viewer.send(viewer.session.send_message(encode_control(Acknowledgement(4711))))
    viewer.command("seek", None, 1.0)
    assert viewer.live._rtmp.last_acknowledged_bytes == 4711
    assert viewer.live._rtmp.held_bytes > 0
    world.run(5)
    assert viewer.live._rtmp.held_bytes > 0
    assert set(viewer.connection.receiver.statistics().pauses) == {"soft limit"}
    viewer.reads = True
    viewer.wire.room = None
    world.run(1)
    assert viewer.state.name == "READY"
    assert commands.SEEK_FAILED in viewer.codes
    assert viewer.live._rtmp.held_bytes == 0
    kinds = [entry.kind.name for entry in viewer.connection.sender.ledger()]
    assert kinds.count("PAUSE") == kinds.count("RESUME") == viewer.connection.receiver.statistics().pauses["soft limit"]
    assert world.group.failures == []


def test_viewer_when_closing_at_its_soft_limit_is_heard():
    world = World(limits=Limits.parse("3000,0", "0,0"))
    publisher = world.publisher()
    viewer = world.player()
    viewer.wire.room = 0
    for number in range(20):
        publisher.video(number * 40, key(b"%d" % number, 400))
    viewer.command("deleteStream", None, 1.0, stream_id=0)
    assert world.stream().viewers == {}


def test_flood_when_of_tiny_messages_gives_way_to_others_between_turns(monkeypatch):
    monkeypatch.setattr("flowctl.live.session.MESSAGES_PER_TURN", 64)
    world = World(config(wire={"messages_per_second": 0}))
    publisher = world.publisher()
    viewer = world.player()
    session = publisher.session
    flood = b"".join(session.send_tag(8, number, audio(b"%012d" % number)) for number in range(3000))
    publisher.send(flood, run=False)
    most, turns = 0, 0
    while publisher.wire.up or publisher.connection.receiver.statistics().kept_bytes:
        before = world.hub.find_stream("live/room").messages_in[5]
        world.group.turn()
        most = max(most, world.hub.find_stream("live/room").messages_in[5] - before)
        turns += 1
    world.run()
    # A turn of the hand-made group is a read and a round of jobs, and one piece of 4096 octets may overshoot.
    assert most <= 2 * (64 + 4096 // 14)
    assert turns >= 3000 // most
    assert viewer.payloads[2:] == [audio(b"%012d" % number) for number in range(3000)]


def test_peer_when_breaking_the_protocol_is_told_why_and_closed(world):
    peer = world.publisher()
    peer.send(b"\x02\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00\x00\x7f\xff\xff\xff")
    assert peer.reason is CloseReason.LIMIT_HIT
    assert "chunk_size_max_bytes" in peer.ended[1]
    assert any(isinstance(event, StatusReceived) and "chunk_size" in event.description for event in peer.events)
    assert [connection.number for connection in world.gone] == [peer.connection.number]
    assert not peer.wire.reset


def test_authentication_when_configured_lets_in_who_knows_the_password():
    """A wrong or missing password ends with AUTH_REFUSED or a challenge; the right one connects."""
    world = World(config(rtmp={"credentials": {"ann": "correct horse"}}))
    peer = world.connect(settings=ClientSessionConfig())
    peer.session.publish()
    peer.session.connect("rtmp://ann:wrong@example.com/live/room")
    world.run()
    parameters = peer.events[-1].retry_parameters
    for _ in range(3):
        peer = world.connect()
        peer.session.publish()
        peer.session.connect("rtmp://ann:wrong@example.com/live/room", parameters=parameters or "")
        world.run()
        rejected = [event for event in peer.events if getattr(event, "what", "") == "connect"]
        parameters = rejected[-1].retry_parameters if rejected else None
        if parameters is None:
            break
        assert peer.live.harmless  # to be challenged is no offence
    assert (peer.reason, peer.live.harmless) == (CloseReason.AUTH_REFUSED, False)
    assert world.hub.streams() == {}


def test_reconnect_when_the_server_asks_reaches_clients_that_understand(world):
    publisher = world.publisher()
    publisher.live.on_thread(publisher.live.ask_to_reconnect)
    world.run()
    assert any(type(event).__name__ == "ReconnectRequested" for event in publisher.events)


def test_moving_when_a_stream_ends_between_two_groups_is_not_missed(world):
    """What the hub tells a viewer on its way between two threads is waiting for it there."""
    publisher = world.publisher()
    viewer = world.player()
    connection = viewer.connection
    connection.core.detached(world.group)
    connection.core.host.registration.unbind()
    publisher.session.close_stream()
    world.run()
    world.group.add_pollable(connection.core, connection.core.host.registration)
    world.run()
    assert viewer.has(StreamEnded)
    assert viewer.live._playing.waits_until is not None


def test_viewer_when_a_ping_waits_behind_a_key_frame_has_its_time_once_that_is_through():
    world = World(sender=SenderSettings(stuck_s=0.0, soft_too_long_s=0.0))
    publisher, viewer = world.publisher(), world.player()
    world.run(1)
    viewer.reads = False
    viewer.wire.room = len(viewer.wire.down)
    publisher.video(0, key(b"k", 200_000))
    ends = []
    for second in range(200):
        publisher.audio(second * 1000, audio(b"a"))
        viewer.wire.room += 2000
        world.run(1)
        ends += [second] if viewer.ended and not ends else []
    assert 125 < ends[0] < 170
    assert "ping_silence_s" in viewer.ended[1]


def test_connection_when_a_silent_viewer_does_not_read_is_reset():
    """A player that died is reset: an orderly end would wait in the kernel behind what it never reads."""
    world = World(sender=SenderSettings(stuck_s=0.0, soft_too_long_s=0.0))
    publisher, dead, quiet = world.publisher(), world.player(), world.player("live/other")
    world.run(1)
    dead.wire.room = 0
    for number in range(100):
        publisher.video(number * 1000, AVC_HEADER + b"." * 400)
        world.run(1)
    assert dead.ended[0] is CloseReason.IDLE
    assert "ping_silence_s" in dead.ended[1]
    assert dead.wire.reset
    assert not quiet.wire.reset
