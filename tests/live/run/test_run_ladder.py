"""Ladders: what the setting says, a publication that is the largest of its set, its steps, and when one is needed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, config, inter, key
from run_kit import Desk

from flowctl.core.flow.renditions import Choice, RenditionRule
from flowctl.errors import ConfigError
from flowctl.live.access.keys import KeyFile, StoredKey
from flowctl.live.access.passes import PASS_PARAMETER
from flowctl.live.access.rules import Proof
from flowctl.live.cluster.media.watch import order_of
from flowctl.live.renditions.renditionset import RenditionSet
from flowctl.live.settings.ladder import Ladder, LadderStep, parse_ladder
from flowctl.live.settings.levels import Level
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl.live.settings.runs import RunWhen
from flowctl.wire.rtmp.events import Rejected

STEPS = "720:1100k,360:400k"


@pytest.fixture(autouse=True)
def ffmpeg(tmp_path, monkeypatch):
    """There is a program of that name; nothing here starts it."""
    (tmp_path / "ffmpeg").write_text("#!/bin/sh\n")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


# -- the setting


def test_ladder_when_written_says_steps_and_streams():
    assert parse_ladder(STEPS, "x") == Ladder((LadderStep(720, 1_100_000), LadderStep(360, 400_000)))
    assert parse_ladder("live/*=360:400k", "x") == Ladder((LadderStep(360, 400_000),), "live/*")
    assert parse_ladder("off", "x") == Ladder()
    for text in (STEPS, "live/*=360:400k", "off"):
        assert str(parse_ladder(text, "x")) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no step"),
        ("720", "is no step"),
        ("720:fast", "is not a number with a unit"),
        ("721:1100k", "has a step of 721 lines"),
        ("4320:9M", "has a step of 4320 lines"),
        ("360:10k", "has a step of 10000 bit/s"),
        ("360:400k,720:1100k", "each step must be smaller"),
        ("720:400k,360:400k", "each step must be smaller"),
        ("720:1100k,720:400k", "each step must be smaller"),
        (",".join(f"{1000 - 100 * n}:{1000 - 100 * n}k" for n in range(8)), "has 8 steps, 7 are allowed"),
        ("bob=720:1100k", "it must be a pattern of app/stream"),
    ],
)
def test_ladder_when_wrong_is_refused_with_what_is_allowed(text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        config(ladder=parse_ladder(text, "ladder"))
    assert caught.value.hint


def test_ladder_when_there_is_no_ffmpeg_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="'ffmpeg', there is no such program"):
        config(ladder=parse_ladder("128:333k", "ladder"))


def test_steps_when_they_are_commands_hold_the_rate_and_the_key_frames_of_the_publisher():
    large, small = parse_ladder(f"live/*={STEPS}", "x").rules()
    assert large.names("live/bob") == ("live/bob_720p",)
    assert (small.on, small.when, small.step) == ("live/*", RunWhen.NEEDED, "360p")
    words = small.command
    assert words[0] == "ffmpeg"
    assert words[words.index("-force_key_frames") + 1] == "source"
    assert words[words.index("-maxrate") + 1] == "400k"
    assert "scale=-2:'min(360,ih)'" in words


@pytest.mark.parametrize(
    ("line", "own", "step"),
    [
        (None, 400_000, "360p"),
        (10_000, 400_000, "360p"),
        (191_874, 400_000, "360p"),
        (191_875, 400_000, "720p"),
        (300_000, 400_000, "720p"),
        (300_000, 160_000, "360p"),  # 720p would take as much as the stream itself
        (300_000, 70_000, None),
        (None, 0, None),
    ],
)
def test_step_when_a_line_carries_so_much_is_the_largest_that_helps(line, own, step):
    found = parse_ladder(STEPS, "x").fitting(line, own)
    assert (None if found is None else found.name) == step


# -- a publication and its steps, as a set


class LadderWorld(World):
    """A server with a ladder, and a publisher of `live/bob` whose pictures come out of order, as those of encoders."""

    def __init__(self, ahead_ms=80):
        super().__init__(config(ladder=parse_ladder("360:400k", "x")))
        self.ahead_ms = ahead_ms
        self.source = self.publisher("live/bob")
        self.step, self.at = None, 0

    def begin_step(self):
        token = self.hub.gate.passes.give("live/bob", ["live/bob_360p"])
        self.step = self.publisher(f"live/bob_360p?{PASS_PARAMETER}={token}")
        return self.step

    def send(self, count=1, *, step=True):
        for _ in range(count):
            make = key if self.at % 200 == 0 else inter
            own = make(f"source {self.at}".encode().ljust(300))
            self.source.send(self.source.session.send_tag(9, self.at, with_ahead(own, self.ahead_ms)), run=False)
            self.source.send(self.source.session.send_tag(8, self.at, audio(f"a {self.at}".encode())), run=False)
            if self.step is not None and step:
                small = make(f"360p {self.at}".encode().ljust(60))
                at = self.at + self.ahead_ms  # an encoder without pictures out of order tells when each is shown
                self.step.send(self.step.session.send_tag(9, at, small), run=False)
            self.at += 40
            self.run(0.04)

    def names(self):
        return [item.name for item in self.hub.renditions.find(self.stream("live/bob")).renditions()]


def with_ahead(payload, ahead_ms):
    return payload[:2] + ahead_ms.to_bytes(3) + payload[5:]


def pictures(peer):
    """Return (rendition, ms that the picture says, timestamp) of each picture that a player got."""
    found = []
    for message in peer.media:
        if message.type_id == 9 and message.payload[1] == 1:
            name, at = message.payload[11:].decode().split()
            found.append((name, int(at), message.timestamp))
    return found


def choose(monkeypatch, name):
    choice = Choice(name, "asked for")
    monkeypatch.setattr(
        RenditionRule, "decide", lambda self, now, rates, present, **_: choice if present != name else None
    )


def test_publication_when_there_is_a_ladder_is_a_set_of_itself_and_its_viewers_get_all_of_it():
    world = LadderWorld()
    waiting = world.player("live/bob")
    world.send(30)
    viewer = world.player("live/bob")
    world.send(10)
    assert world.names() == ["source"]
    assert viewer.connection.renditions.name == "source"
    assert [at for name, at, _ in pictures(waiting)] == list(range(0, 1600, 40))
    seen = [at for _, at, _ in pictures(viewer)]
    assert seen == list(range(seen[0], 1600, 40))
    assert seen[0] % 200 == 0
    assert world.group.failures == []


def test_step_when_it_is_published_joins_the_set_and_a_viewer_changes_over_at_the_same_picture(monkeypatch):
    """Times go on as they were: the step's too say when a picture is decoded, and each is shown when it was."""
    world = LadderWorld()
    world.send(15)
    world.begin_step()
    world.player("live/bob")
    world.send(100)  # until the publication's rate is known
    assert world.names() == ["source", "360p"]
    viewer = world.player("live/bob")
    world.send(3)
    assert {name for name, _, _ in pictures(viewer)} == {"source"}  # the largest first, though there is a smaller one
    choose(monkeypatch, "360p")
    world.send(15)
    choose(monkeypatch, "source")
    world.send(15)
    seen = pictures(viewer)
    assert [at for _, at, _ in seen] == list(range(seen[0][1], world.at, 40))
    assert all(timestamp == at for _, at, timestamp in seen)
    names = [name for name, _, _ in seen]
    assert names[0] == names[-1] == "source"
    assert "360p" in names
    shown = {
        timestamp + int.from_bytes(message.payload[2:5])
        for message in viewer.media
        if message.type_id == 9 and message.payload[1] == 1
        for timestamp in [message.timestamp]
    }
    assert shown == {at + world.ahead_ms for _, at, _ in seen}
    assert world.group.failures == []


def test_step_when_it_ends_sends_its_viewers_back_and_may_begin_again(monkeypatch):
    world = LadderWorld()
    world.begin_step()
    world.player("live/bob")
    world.send(100)
    choose(monkeypatch, "360p")
    viewer = world.player("live/bob")  # who comes is looked at, as who lags is
    world.send(10)
    assert viewer.connection.renditions.name == "360p"
    choose(monkeypatch, "source")  # as the rule does where a rendition is gone
    world.step.leave()
    world.step = None
    world.send(100)  # longer than its publisher may stay away
    assert world.names() == ["source"]
    assert viewer.connection.renditions.name == "source"
    world.begin_step()
    world.send(20)
    assert world.names() == ["source", "360p"]
    choose(monkeypatch, "360p")
    late = world.player("live/bob")
    world.send(10)
    assert late.connection.renditions.name == "360p"
    seen = [at for _, at, _ in pictures(late)]
    assert seen == list(range(seen[0], world.at, 40))
    assert world.group.failures == []


def test_publication_when_it_ends_takes_its_set_with_it_and_a_step_is_none_of_the_next(monkeypatch):
    world = LadderWorld()
    step = world.begin_step()
    viewer = world.player("live/bob")
    world.send(10)
    world.source.leave()
    world.run(5)
    assert world.hub.renditions.find(world.stream("live/bob")) is None
    world.source, world.step = world.publisher("live/bob"), None
    world.send(10)
    assert world.names() == ["source"]
    step.leave()
    world.begin_step()
    world.send(15)
    assert world.names() == ["source", "360p"]
    assert viewer.connection.renditions.name == "source"
    assert world.group.failures == []


def test_viewer_when_it_asks_for_a_track_gets_the_publication_which_has_one():
    world = LadderWorld()
    world.send(10)
    viewer = world.player("live/bob?track=0")
    world.send(10)
    assert len(pictures(viewer)) >= 10


@pytest.mark.parametrize("name", ["live/bob", "live/bob_360p"])
def test_step_when_its_stream_is_not_for_everybody_is_not_either(name):
    """Its name fits no level of settings that names the stream, and it is the stream nevertheless."""
    keys = KeyFile("keys", (StoredKey(b"salt", b"digest"),))
    level = Level(stream="live/bob", values={"access.play_auth": (Proof.KEY,), "access.keys": keys})
    world = World(config(ladder=parse_ladder("360:400k", "x"), levels=(level,)))
    stranger = world.connect().play(name)
    world.run()
    assert stranger.has(Rejected)
    other = world.connect().play("live/ann_360p")
    world.run()
    assert not other.has(Rejected)


def test_step_when_its_stream_is_written_is_not_written_too():
    """Else who plays the step has it recorded."""
    media = MediaOptions(record=StreamPatterns(("live/*",)), hls=StreamPatterns(("live/*",)))
    of_all = config(ladder=parse_ladder("360:400k", "x"), media=media)
    assert order_of(of_all, "live/bob", "192.0.2.1").writes
    assert not order_of(of_all, "live/bob_360p", "192.0.2.1").writes
    assert order_of(config(media=media), "live/bob_360p").writes


def test_stream_when_no_ladder_is_for_it_is_no_set():
    world = World(config(ladder=parse_ladder("live/*=360:400k", "x")))
    world.publisher("other/bob")
    assert world.hub.renditions.find(world.stream("other/bob")) is None
    assert world.hub.find_stream("other/bob").feed is None


def test_headers_when_a_viewer_changes_over_are_those_of_the_step(monkeypatch):
    world = LadderWorld()
    world.begin_step()
    world.send(10)
    viewer = world.player("live/bob")
    choose(monkeypatch, "360p")
    world.send(15)
    sent = [message.payload for message in viewer.media if message.type_id in {8, 9}]
    assert sent.count(AVC_HEADER) >= 1
    assert AAC_HEADER in sent


# -- when a step runs


class LadderDesk(Desk):
    """A server without connections whose lines carry what a test says; `seen`: by stream."""

    def __init__(self, monkeypatch, steps=STEPS, **options):
        super().__init__(ladder=parse_ladder(steps, "x"), **options)
        self.seen = {}
        monkeypatch.setattr(RenditionSet, "carried", lambda set_, now: self.seen.get(set_.name, []))
        monkeypatch.setattr(RenditionSet, "rate_of", lambda set_, name: 400_000.0)

    def running(self):
        return [item.values["publish_1"].partition("?")[0].rpartition("/")[2] for item in self.look()]


def test_step_when_no_line_needs_it_does_not_run(monkeypatch):
    desk = LadderDesk(monkeypatch)
    desk.publish("live/bob")
    assert not desk.look(60)
    assert [row["why"] for row in desk.rows()] == ["a viewer who needs it"] * 2


def test_step_when_a_line_needs_it_runs_until_a_minute_after_the_last_viewer(monkeypatch):
    desk = LadderDesk(monkeypatch)
    desk.publish("live/bob")
    desk.seen["live/bob"] = [200_000.0]
    desk.look(1)
    assert desk.running() == ["bob_720p"]
    desk.seen["live/bob"] = [50_000.0, None]
    desk.look(1)
    assert sorted(desk.running()) == ["bob_360p", "bob_720p"]
    desk.seen.clear()
    books = [SimpleNamespace(name="360p")]
    monkeypatch.setattr(desk.hub, "renditions_viewed", lambda _: {item.name for item in books})
    desk.look(70)
    assert desk.running() == ["bob_360p"]
    books.clear()
    assert desk.look(50)
    assert not desk.look(15)


def test_step_when_it_is_played_by_its_name_is_not_begun_for_that_and_is_kept(monkeypatch):
    """Else whoever plays names would have the encoders, and who needs one none."""
    desk = LadderDesk(monkeypatch, "360:400k")
    monkeypatch.setattr(desk.hub, "is_viewed", lambda name: name == "live/bob_360p")
    desk.publish("live/bob")
    assert not desk.look(5)
    desk.seen["live/bob"] = [60_000.0]
    desk.look(1)
    desk.seen.clear()
    desk.look(70)
    assert desk.running() == ["bob_360p"]


def test_step_when_the_cores_are_taken_waits_with_a_word(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    desk = LadderDesk(monkeypatch, "360:400k")
    for name in ("live/bob", "live/ann"):
        desk.publish(name)
        desk.seen[name] = [60_000.0]
    desk.look(5)
    assert desk.running() == ["bob_360p"]
    assert "no address has more" in desk.rows("live/ann")[0]["why"]


def test_step_when_pictures_are_of_another_codec_does_not_run_and_says_so(monkeypatch):
    desk = LadderDesk(monkeypatch, "360:400k")
    desk.publish("live/bob", codecs=False)
    desk.hub.find_stream("live/bob").codecs.update(video="hvc1", audio="mp4a")
    desk.seen["live/bob"] = [60_000.0]
    assert not desk.look(5)
    assert "these are hvc1" in desk.rows()[0]["why"]
