"""Sets with members that differ, stall or are hostile: the others, and their viewers, lose nothing by it."""

from __future__ import annotations

import dataclasses
import threading
from ipaddress import ip_network

import pytest
from live_kit import audio, config, inter, key
from rendition_kit import NAMES, SUFFIXES, SetWorld, avc_header, choose, pictures, sounds

from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.settings.levels import Level, Role
from flowctl.live.settings.renditions import RenditionNames
from flowctl.testing import ManualClock, ManualGroup
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

HEVC_HEADER = b"\x1c\x00\x00\x00\x00" + b"\x01" * 30


def hevc_key(tag):
    nal = b"\x26\x01" + tag  # IDR_W_RADL
    return b"\x1c\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


@pytest.fixture
def world():
    world = SetWorld()
    yield world
    assert world.group.failures == []


def facts(world):
    return world.hub.renditions.find(world.stream("live/show")).renditions()


def sees_all(viewer, world, begin=0):
    """Whether a viewer got each picture once, and its time never went back."""
    times = [timestamp for *_, timestamp in pictures(viewer)]
    return [at for _, at, _ in pictures(viewer)] == list(range(begin, world.at, 40)) and times == sorted(set(times))


def test_renditions_when_of_other_codecs_are_for_viewers_of_those(world):
    """Most renditions are of H.264, so viewers begin there; where all of these have gone, they go on in the other."""
    for suffix in ("_720", "_360"):
        world.member(suffix)
    odd = world.member("_1080", codec_header=HEVC_HEADER)
    world.members.pop("_1080")
    for _ in range(10):
        world.put(odd, 9, world.at, hevc_key(b"_1080 %d" % world.at))
        world.send(1)
    viewer = world.player("live/show")
    assert [(item.name, item.codec) for item in facts(world)] == [("1080", "hvc1"), ("720", "avc1"), ("360", "avc1")]
    for _ in range(10):
        world.put(odd, 9, world.at, hevc_key(b"_1080 %d" % world.at))
        world.send(1)
    assert {message.payload[0] & 15 for message in viewer.media if message.type_id == 9} == {7}
    for suffix in ("_720", "_360"):
        world.members.pop(suffix).command("deleteStream", None, 1.0)
    viewer.forget()
    for _ in range(30):
        world.put(odd, 9, world.at, hevc_key(b"_1080 %d" % world.at))
        world.send(1)
    assert viewer.payloads[0] == HEVC_HEADER
    assert viewer.payloads[-1][0] == 0x1C


def enhanced(number, payload):
    """Return a message of HEVC as Enhanced RTMP has it: 0x90 a header, 0x93 a key frame, 0xA3 another picture."""
    return bytes((number,)) + b"hvc1" + payload


class TwoCodecs(SetWorld):
    """Renditions 1080 and 720 in HEVC, 360 in H.264."""

    def __init__(self):
        super().__init__()
        self.hevc = [self.member(suffix, codec_header=enhanced(0x90, HEVC_HEADER[5:])) for suffix in ("_1080", "_720")]
        self.members.clear()
        self.member("_360")

    def send(self, pictures=1, *, every=25, **options):
        for _ in range(pictures):
            for number, publisher in enumerate(self.hevc):
                nal = (b"\x02\x01" if self.at % (40 * every) else b"\x26\x01") + bytes((number,)) * (300 - 150 * number)
                picture = len(nal).to_bytes(4, "big") + nal
                self.put(publisher, 9, self.at, enhanced(0xA3 if self.at % (40 * every) else 0x93, picture))
                self.put(publisher, 8, self.at, audio(b"_360 %d" % self.at))
            super().send(1, every=every, **options)


def kinds_of(viewer):
    """Return the pictures that a player got, as 360, 720 or 1080, and headers as `header`; each once in a row."""
    found = []
    for message in viewer.media:
        if message.type_id == TYPE_VIDEO:
            header = message.payload[0] == 0x90 or message.payload[:2] == b"\x17\x00"
            small = message.payload[0] & 0x80 == 0
            kind = "header" if header else "360" if small else ("1080", "720")[message.payload[-1]]
            found += [kind] if found[-1:] != [kind] else []
    return found


@pytest.mark.parametrize("before", [True, False])
def test_player_that_takes_several_codecs_is_led_through_all_of_them(monkeypatch, before):
    world = TwoCodecs()
    world.send(80 if before else 1)
    viewer = world.player("live/show")
    world.send(20)
    assert viewer.connection.place.rendition == "360"
    for name in ("720", "360", "1080"):
        choose(monkeypatch, name)
        world.send(75)
        assert viewer.connection.place.rendition == name
    assert kinds_of(viewer) == ["header", "360", "header", "720", "header", "360", "header", "1080"]
    shown = [item for item in viewer.media if item.type_id == TYPE_VIDEO and item.payload[1:2] != b"\0"]
    times = [item.timestamp for item in shown if item.payload[0] != 0x90]  # headers keep the time at which they came
    assert times == list(range(times[0], world.at, 40))
    assert [int(at) for _, at, _ in sounds(viewer)] == list(range(int(sounds(viewer)[0][1]), world.at, 40))
    assert world.group.failures == []


@pytest.mark.parametrize("said", [(), ("hvc1", "av01")])
def test_player_that_does_not_say_so_stays_in_one_codec(monkeypatch, said):
    """FFmpeg reads HEVC and H.264, and shows nothing more behind a change from one to the other."""
    monkeypatch.setattr("flowctl.wire.rtmp.client.session._VIDEO_FOURCCS", said)
    world = TwoCodecs()
    world.send(80)
    viewer = world.player("live/show")
    world.send(20)
    assert viewer.connection.place.rendition == "720"
    choose(monkeypatch, "360")
    world.send(75)
    assert kinds_of(viewer) == ["header", "720"]
    for publisher in world.hevc:
        publisher.command("deleteStream", None, 1.0)
    world.hevc.clear()
    world.send(75)
    assert kinds_of(viewer) == ["header", "720", "header", "360"]
    assert world.group.failures == []


@pytest.mark.parametrize("fault", ["keys", "codecs", "jumps", "stalls", "headers"])
def test_member_when_hostile_or_stalled_costs_viewers_of_others_nothing(world, fault):
    for suffix in ("_1080", "_720"):
        world.member(suffix)
    bad = world.member("_360")
    world.send(5)
    viewers = [world.player("live/show") for _ in range(3)]
    world.send(5)
    del world.members["_360"]
    for number in range(60):
        at = world.at
        if fault == "keys":
            for step in range(5):
                world.put(bad, 9, at + step, key(b"_360 %d" % at))
        elif fault == "codecs":
            world.put(bad, 9, at, hevc_key(b"_360 %d" % at) if number % 2 else key(b"_360 %d" % at))
        elif fault == "jumps":
            world.put(bad, 9, (at + number * 7_919_000) & 0xFFFFFFFF, key(b"_360 %d" % at))
            world.put(bad, 8, (at + number * 999_000) & 0xFFFFFFFF, audio(b"_360 %d" % at))
        elif fault == "headers":
            world.put(bad, 9, at, avc_header(number)[:9] + b"." * 60_000)
        world.send(1)
    world.send(40)  # who was in it has left it by then
    for viewer in viewers:
        viewer.forget()
    world.send(20)
    for viewer in viewers:
        assert {suffix for suffix, *_ in pictures(viewer)} <= {"_1080", "_720"}
        assert sees_all(viewer, world, world.at - 800)
        assert [at for _, at, _ in sounds(viewer)] == [str(at) for at in range(world.at - 800, world.at, 40)]


def test_member_when_its_clock_is_another_one_is_shifted_to_that_of_the_set(world):
    world.member("_1080")
    world.member("_720")
    world.send(50, every=25, members=("_1080",))
    shift = {"_720": 3_600_000}
    viewer = world.player("live/show")
    world.send(100, every=25, shift=shift)
    assert "shifted by -3600.0" in facts(world)[1].clock
    world.members.pop("_1080").command("deleteStream", None, 1.0)
    world.send(50, every=25, shift=shift)
    times = [timestamp for *_, timestamp in pictures(viewer)]
    assert times == sorted(set(times))
    assert times[-1] == pytest.approx(world.at, abs=120)
    assert pictures(viewer)[-1][0] == "_720"
    assert sounds(viewer)[-1][0] == "_720"


def test_rights_when_the_set_is_asked_for_are_those_of_its_name():
    """Who may play the members need not be allowed to play the set, nor the other way round."""
    rules = tuple(
        Level(stream=name, role=Role.VIEWER, values={"access.deny_play": (ip_network(network),)})
        for name, network in (("live/show", "192.0.2.7"), ("live/show_720", "192.0.2.8"))
    )
    world = SetWorld(config(renditions=NAMES, levels=rules))
    world.all_members()
    world.send(6)
    of_set = world.player("live/show", address="192.0.2.8")
    of_member = world.player("live/show_720", address="192.0.2.7")
    assert of_set.connection.place is not None
    assert of_member.connection.place is not None
    for name, address in (("live/show", "192.0.2.7"), ("live/show_720", "192.0.2.8")):
        assert commands.PLAY_FAILED in world.player(name, address=address).codes


def test_settings_when_the_name_of_the_set_has_its_own_are_for_its_viewers():
    level = Level(stream="live/show", values={"limits.soft": "64KiB,100,1s", "policy": "audio-first"})
    world = SetWorld(config(renditions=NAMES, levels=(level,)))
    world.all_members()
    viewer, member = world.player("live/show"), world.player("live/show_360")
    assert viewer.connection.sender.limits.size.soft == 65536
    assert member.connection.sender.limits == world.limits


def test_setting_when_changed_is_for_publications_that_begin_later(world):
    world.all_members()
    viewer = world.player("live/show")
    world.send(5)
    world.hub.configure(dataclasses.replace(world.config, renditions=RenditionNames()))
    world.send(5)
    assert sees_all(viewer, world)
    for suffix in SUFFIXES:
        world.members.pop(suffix).command("deleteStream", None, 1.0)
    world.run(5)
    assert viewer.live._playing.waiting
    world.all_members()
    assert world.stream("live/show").publisher is None


def test_member_when_replaced_by_its_owner_goes_on_with_its_own_headers(world):
    world.all_members()
    viewer = world.player("live/show")
    world.send(10)
    world.run(1.5)  # it has fallen silent, as one whose connection broke unnoticed
    again = {suffix: world.member(suffix) for suffix in SUFFIXES}
    assert all(publisher.codes == [] for publisher in again.values())
    world.send(10)
    times = [timestamp for *_, timestamp in pictures(viewer)]
    assert [at for _, at, _ in pictures(viewer)] == list(range(0, world.at, 40))
    assert times == sorted(set(times))
    assert commands.PLAY_UNPUBLISH_NOTIFY not in viewer.codes


class Wire:
    """A publisher that is no connection, for threads of its own."""

    def __init__(self, number) -> None:
        self.peer, self.number, self.replaced = ("192.0.2.1", 1), number, False

    def on_thread(self, callback, *args) -> None:
        callback(*args)

    def publish_replaced(self, stream) -> None:
        self.replaced = True


def test_members_when_published_on_many_threads_deadlock_with_nothing():
    """Members come, send and go, while somebody publishes under the name of the set: all threads come to an end."""
    clock = ManualClock()
    hub = Hub(LiveConfig(renditions=NAMES, publishers_per_address=0), clock, ManualGroup(clock).call_later)
    errors = []

    def publish(number):
        try:
            for turn in range(40):
                publisher = Wire(number * 100 + turn)
                stream = hub.publish("live/show" + SUFFIXES[number], publisher)
                stream.publish(publisher, TYPE_VIDEO, 0, avc_header(number), 0.0)
                for at in range(0, 400, 40):
                    stream.publish(publisher, TYPE_VIDEO, at, key(b"k") if at % 200 == 0 else inter(b"i"), at / 1000)
                    stream.publish(publisher, TYPE_AUDIO, at, audio(b"a"), at / 1000)
                hub.unpublish(stream, publisher, grace=False)
        except Exception as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)

    def take_name():
        for turn in range(40):
            publisher = Wire(turn)
            stream = hub.publish("live/show", publisher)
            stream.publish(publisher, TYPE_VIDEO, 0, key(b"own"), 0.0)
            hub.unpublish(stream, publisher, grace=False)

    threads = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(3)]
    threads.append(threading.Thread(target=take_name, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert hub.streams() == {}
    assert hub.renditions._by_name == {}
