"""What players are told when a stream ends and begins again, however that falls between their own steps."""

from __future__ import annotations

import pytest
from live_kit import AAC_HEADER, AVC_HEADER, key

from flowctl.live.session import LiveSession
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.wire import TYPE_VIDEO


def octets(peer, name, *values):
    """Return a command on the peer's message stream, to be sent together with others."""
    return peer.session.send_message(commands.command(name, 0, *values, stream_id=peer.session.stream_id))


def ends(peer):
    """Return how often the peer was told that the stream has ended."""
    return peer.codes.count(commands.PLAY_UNPUBLISH_NOTIFY)


class Script:
    """Runs lines like ``publish view pause => end`` on a world: steps, and what the viewer was told of the stream."""

    def __init__(self, world):
        self.world, self.publisher, self.viewer = world, None, None

    def run(self, script):
        for line in filter(None, map(str.strip, script.splitlines())):
            steps, _, expected = line.partition("=>")
            for step in steps.split():
                getattr(self, step)()
            names = {commands.PLAY_UNPUBLISH_NOTIFY: "end", commands.PLAY_PUBLISH_NOTIFY: "begin"}
            told = [names[code] for code in self.viewer.codes if code in names]
            assert told == expected.split(), line
            assert (self.viewer.live._playing.waits_until is not None) is self.world.stream().ended
            self.viewer.forget()

    def publish(self):
        self.publisher = self.world.publisher()

    def view(self):
        self.viewer = self.world.player()

    def end(self):
        self.publisher.session.close_stream()
        self.world.run()

    def again(self):
        """End and publish in one piece of input; our client does not know that it published again."""
        self.publisher.reads = False
        self.publisher.send(
            octets(self.publisher, "closeStream", None) + octets(self.publisher, "publish", None, "room", "live")
        )

    def stop(self):
        self.publisher.send(octets(self.publisher, "closeStream", None))
        self.world.run(1)

    def pause(self):
        self.viewer.command("pause", None, True, 0.0)

    def resume(self):
        self.viewer.command("pause", None, False, 0.0)

    def block(self):
        self.viewer.wire.room = len(self.viewer.wire.down)

    def free(self):
        self.viewer.wire.room = None
        self.world.run(1.0)

    def frames(self):
        for index in range(5):
            self.publisher.video(index * 40, key(b"%d" % index, 300))

    def gets(self):
        """Publish a key frame, which the viewer gets behind the headers."""
        self.publisher.video(1000, key(b"new"))
        assert self.viewer.payloads[-3:] == [AVC_HEADER, AAC_HEADER, key(b"new")]


SCRIPTS = {
    "published again at once": """
        publish view again => end begin
        stop => end""",
    "paused while it ends": """
        publish view pause end => end
        resume publish gets => begin""",
    "far behind": """
        publish view block frames end publish =>
        free => end begin""",
    "pauses with the end queued": """
        publish view block frames end pause free => end""",
    "pauses with end and beginning queued": """
        publish view block frames end publish pause free =>
        resume =>""",
    "pauses with the beginning queued": """
        view block publish pause free => begin""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_player_when_the_stream_ends_and_begins_is_told_what_it_has_not_heard(world, name):
    Script(world).run(SCRIPTS[name])


def test_viewers_when_a_publisher_comes_and_goes_many_times_a_second_are_told_once_a_second(world):
    """Each word to all viewers is work that one publisher causes for all; in between the stream goes on."""
    publisher = world.publisher()
    viewer = world.player()
    viewer.forget()
    publisher.reads = False
    for number in range(40):
        publisher.send(octets(publisher, "closeStream", None) + octets(publisher, "publish", None, "room", "live"))
        publisher.video(number, key(b"%d" % number))
    assert viewer.payloads[-1] == key(b"39")
    told = viewer.codes.count(commands.PLAY_UNPUBLISH_NOTIFY)
    assert 1 <= told <= 1 + world.clock()
    assert viewer.codes.count(commands.PLAY_PUBLISH_NOTIFY) == told
    publisher.send(octets(publisher, "closeStream", None))
    world.run(1)
    assert viewer.codes[-1] == commands.PLAY_UNPUBLISH_NOTIFY


def test_player_when_resumed_before_it_heard_of_the_end_is_told_once(world, monkeypatch):
    publisher = world.publisher()
    viewer = world.player()
    viewer.command("pause", None, True, 0.0)
    told = []
    monkeypatch.setattr(LiveSession, "on_thread", lambda _, callback, *args: told.append((callback, args)))
    publisher.session.close_stream()
    world.run()
    viewer.command("pause", None, False, 0.0)
    assert ends(viewer) == 1
    for callback, args in told:
        viewer.live._answer(callback, args)
    world.run()
    assert (len(told), ends(viewer)) == (1, 1)
    assert viewer.live._playing.waits_until is not None


@pytest.mark.parametrize("resumes", [False, True])
def test_player_when_a_header_comes_while_it_joins_gets_it(world, monkeypatch, resumes):
    publisher = world.connect().publish()
    viewer = world.player() if resumes else world.connect()
    if resumes:
        viewer.command("pause", None, True, 0.0)
    stream = publisher.live._publishing[1].stream
    found = type(stream).start_place

    def overtaken(self, wire):
        place = found(self, wire)
        monkeypatch.undo()
        stream.publish(publisher.live, TYPE_VIDEO, 0, AVC_HEADER, world.clock())
        return place

    monkeypatch.setattr(type(stream), "start_place", overtaken)
    if resumes:
        viewer.command("pause", None, False, 0.0)
    else:
        viewer.play()
    publisher.video(0, key(b"1"))
    assert viewer.payloads == [AVC_HEADER, key(b"1")]


def test_player_when_the_stream_ends_while_it_joins_is_told(world, monkeypatch):
    publisher = world.publisher()
    viewer = world.connect()
    stream = publisher.live._publishing[1].stream
    found = type(stream).start_place

    def overtaken(self, wire):
        place = found(self, wire)
        monkeypatch.undo()
        world.hub.unpublish(stream, publisher.live, grace=False)
        return place

    monkeypatch.setattr(type(stream), "start_place", overtaken)
    viewer.play()
    assert ends(viewer) == 1
    assert viewer.live._playing.waits_until is not None


@pytest.mark.parametrize("name", ["play", "publish"])
def test_request_when_withdrawn_in_the_same_breath_is_forgotten(world, name):
    """A client that asks and leaves at once harms nobody: nothing is answered, nothing stays behind."""
    peer = world.player()
    asked = octets(peer, "closeStream", None) + octets(peer, name, None, "other", "live")
    gone = commands.command("deleteStream", 0, None, float(peer.session.stream_id), stream_id=0)
    peer.send(asked + peer.session.send_message(gone))
    assert peer.connection.ended is None
    assert {stream.name for stream in world.hub.streams()} <= {"live/room"}


def test_player_when_resumed_before_it_heard_of_the_beginning_is_told_once(world, monkeypatch):
    viewer = world.player()
    viewer.command("pause", None, True, 0.0)
    viewer.forget()
    told = []
    monkeypatch.setattr(LiveSession, "on_thread", lambda _, callback, *args: told.append((callback, args)))
    world.publisher()
    viewer.command("pause", None, False, 0.0)
    for callback, args in told:
        viewer.live._answer(callback, args)
    world.run()
    assert viewer.codes.count(commands.PLAY_PUBLISH_NOTIFY) == 1
