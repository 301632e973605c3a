"""Sets of streams by suffix: who asks for which gets what, members that come and go, and the end."""

from __future__ import annotations

import pytest
from live_kit import AAC_HEADER, AVC_HEADER, audio, config, inter, key
from rendition_kit import ABLE, SUFFIXES, SetWorld, avc_header, choose, pictures, sounds
from structlog.testing import capture_logs

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp import commands


@pytest.fixture
def world():
    world = SetWorld()
    yield world
    assert world.group.failures == []


def renditions_of(peer):
    seen = [suffix for suffix, _, _ in pictures(peer)]
    return [suffix for number, suffix in enumerate(seen) if number == 0 or suffix != seen[number - 1]]


def test_play_when_the_name_is_of_a_set_gets_a_rendition_and_a_member_itself_by_its_own_name(world):
    world.all_members()
    world.send(7)
    viewer, member, odd = world.player("live/show"), world.player("live/show_720"), world.player("live/show?track=7")
    world.send(5)
    assert renditions_of(member) == ["_720"]
    assert [at for _, at, _ in pictures(viewer)] == list(range(200, 480, 40))
    assert [at for _, at, _ in pictures(odd)] == list(range(200, 480, 40))  # a set of streams has no tracks
    assert world.hub.find_stream("live/show").viewers.keys() == {viewer.live, odd.live}
    assert viewer.live.streams() == ["live/show"]
    assert [item.name for item in world.hub.renditions.find(world.stream("live/show")).renditions()] == [
        "1080",
        "720",
        "360",
    ]


def test_player_when_it_waits_gets_the_set_from_its_first_picture_and_is_told_once(world):
    viewer = world.player("live/show")
    assert viewer.live._playing.waits_until is not None
    world.all_members()
    assert viewer.live._playing.waits_until is None
    world.send(6)
    assert [at for _, at, _ in pictures(viewer)] == list(range(0, 240, 40))
    assert viewer.codes.count(commands.PLAY_PUBLISH_NOTIFY) == 1
    assert viewer.connection.place is not None


def test_player_when_it_waits_and_the_largest_is_published_first_begins_in_the_smallest(world):
    """Outputs of one encoder begin within half a second: until then nothing is chosen, and no picture is lost by it."""
    viewer = world.player("live/show")
    world.all_members()
    for count in (1, 2, 3):
        world.send(3, every=1, members=SUFFIXES[:count])
    world.send(20, every=1)
    seen = [(suffix, at) for suffix, at, _ in pictures(viewer)]
    assert seen == [("_360", at) for at in range(seen[0][1], world.at, 40)]
    assert seen[0][1] <= 360  # 0.25 s is the shortest time between two words to all viewers


def test_player_when_the_smallest_is_not_published_begins_in_another_half_a_second_later(world):
    viewer = world.player("live/show")
    world.member("_1080")
    world.send(10, every=50)
    assert pictures(viewer) == []
    assert viewer.connection.place is None
    world.send(5, every=50)
    late = world.player("live/show")
    world.send(5, every=50)
    for player in (viewer, late):
        assert [(suffix, at) for suffix, at, _ in pictures(player)] == [("_1080", at) for at in range(0, world.at, 40)]


def test_set_when_its_last_member_has_gone_ends_and_goes_on_when_one_is_back(world):
    world.all_members()
    viewer = world.player("live/show")
    world.send(5)
    world.members.pop("_1080").leave()
    world.members.pop("_360").leave()
    world.send(7)
    assert commands.PLAY_UNPUBLISH_NOTIFY not in viewer.codes
    world.members.pop("_720").leave()
    world.run(5)
    assert viewer.codes.count(commands.PLAY_UNPUBLISH_NOTIFY) == 1
    assert viewer.live._playing.waiting
    last_ms = max(timestamp for _, _, timestamp in pictures(viewer))
    viewer.forget()
    world.member("_360")
    world.at = 0
    world.send(3)
    assert viewer.codes.count(commands.PLAY_PUBLISH_NOTIFY) == 1
    assert [at for _, at, _ in pictures(viewer)] == [0, 40, 80]
    assert pictures(viewer)[0][2] > last_ms  # its timeline goes on


def test_hub_when_all_have_left_keeps_nothing(world):
    for publisher in world.all_members():
        world.send(2)
        viewer = world.player("live/show")
        world.send(2)
        viewer.leave()
        publisher.leave()
    world.run(5)
    assert world.hub.streams() == {}
    assert world.hub.renditions._by_name == {}
    assert world.hub.renditions._members == {}


def test_viewer_when_another_rendition_is_chosen_goes_on_there_at_a_key_frame(world, monkeypatch):
    """Every picture and every sound comes once; the change has the new header of the pictures, and no metadata."""
    world.all_members()
    world.send(75)
    viewer = world.player("live/show")
    world.send(5)
    for suffix in ("_720", "_360", "_1080"):
        choose(monkeypatch, suffix[1:])
        world.send(50)
        assert viewer.connection.place.rendition == suffix[1:]
        assert pictures(viewer)[-1][0] == suffix
    seen = [at for _, at, _ in pictures(viewer)]
    assert seen == list(range(seen[0], world.at, 40))
    heard = [int(at) for _, at, _ in sounds(viewer)]
    assert heard == list(range(heard[0], world.at, 40))
    kinds = [(message.type_id, message.payload[:2]) for message in viewer.media]
    assert [type_id for type_id, _ in kinds].count(18) == 1
    assert kinds.count((8, AAC_HEADER[:2])) == 1
    changes = [number for number, kind in enumerate(kinds) if kind == (9, b"\x17\x00")]
    assert len(changes) == len(renditions_of(viewer)) >= 3
    assert [kinds[number + 1] for number in changes[1:]] == [(9, b"\x17\x01")] * (len(changes) - 1)


def test_sound_when_its_member_goes_is_that_of_the_next_without_a_gap_in_any_rendition(world):
    world.all_members()
    world.send(2)
    viewer = world.player("live/show")
    world.send(8)
    world.members.pop("_1080").leave()
    world.send(10)
    heard = sounds(viewer)
    times = [timestamp for *_, timestamp in heard]
    assert times == list(range(times[0], times[-1] + 1, 40))
    assert times[-1] == world.at - 40
    assert (heard[0][0], heard[-1][0]) == ("_1080", "_720")
    logs = [wire.log for stream in world.stream("live/show").renditions[1:] for wire in stream.wires]
    assert [log.tail.counts[MessageClass.AUDIO] for log in logs] == [19, 19]  # all but what came before their key frame


def test_rendition_when_its_member_has_gone_and_another_has_its_name_is_told_of_as_another_one(world):
    """Who follows one rendition from elsewhere has to ask anew: nothing comes any more where it is."""
    hub, told = world.hub, []
    hub.published += (told.append,)

    def keys():
        facts = hub.renditions.find(world.stream("live/show")).renditions()
        return {item.name: item.key for item in facts if item.joined}

    world.all_members()
    world.send(2)
    first = keys()
    assert list(first) == ["1080", "720", "360"]
    delete(world.members.pop("_360"))
    world.send(8)
    assert list(keys()) == ["1080", "720"]
    told.clear()
    world.member("_360")
    world.send(20)
    assert "live/show" in told
    assert {name for name, key in keys().items() if key != first[name]} == {"360"}
    face = world.stream("live/show")
    assert [face.find_rendition(key).rendition for key in keys().values()] == ["1080", "720", "360"]
    assert face.find_rendition("480:1.000000") is None


def test_metadata_and_header_of_a_rendition_are_its_own(world):
    world.all_members()
    world.send(2)
    face = world.stream("live/show")
    kept = {
        stream.rendition: [wire.wire_format.deserialise(header)[2] for _, _, header in wire.headers.items()]
        for stream in face.renditions
        for wire in stream.wires
    }
    for number, suffix in enumerate(SUFFIXES):
        metadata, video, sound = kept[suffix[1:]]
        assert (video, sound) == (avc_header(number), AAC_HEADER)
        assert b"width" in metadata
    assert len({metadata for metadata, *_ in kept.values()}) == 3


def test_face_when_followed_by_those_who_know_no_renditions_shows_the_largest(world):
    world.member("_360")
    world.send(3)
    world.member("_1080")
    wire = world.stream("live/show").join_link()
    world.send(9)
    shown = []
    cached = wire.log.cached
    while cached is not None and cached.next is not None:
        shown.append(wire.wire_format.deserialise(cached.wire))
        cached = cached.next
    assert {payload[11:].split()[0] for type_id, _, payload in shown if type_id == 9} == {b"_1080"}
    assert avc_header(0) in [wire.wire_format.deserialise(header)[2] for header in wire.headers.values]


def test_client_when_it_takes_tracks_gets_what_the_face_shows(world):
    """Recorders, edges and relays of ours do: they want one content, not what a line carries."""
    world.all_members()
    world.send(25)
    able, odd = world.player("live/show", settings=ABLE), world.player("live/show?track=1", settings=ABLE)
    world.send(5)
    assert {suffix for viewer in (able, odd) for suffix, *_ in pictures(viewer)} == {"_1080"}
    assert able.connection.renditions is None


def test_publisher_when_its_name_is_that_of_a_set_has_it(world):
    """Whoever publishes under the name itself has it, before the set or after it; then the set is back."""
    world.all_members()
    viewer = world.player("live/show")
    world.send(5)
    own = world.publisher("live/show")
    assert own.codes == []
    viewer.forget()
    own.video(0, key(b"own"))
    own.video(40, inter(b"own"))
    world.send(3)
    assert viewer.payloads[-2:] == [key(b"own"), inter(b"own")]
    assert commands.PLAY_UNPUBLISH_NOTIFY not in viewer.codes
    assert world.hub.renditions.find(world.stream("live/show")) is None
    own.leave()
    world.run(4)
    viewer.forget()
    world.send(6)
    assert pictures(viewer)[-1][1] == world.at - 40


def test_set_when_the_name_is_taken_before_begins_when_it_is_free(world):
    own = world.publisher("live/show")
    own.video(0, key(b"own"))
    with capture_logs() as lines:
        world.all_members()
    assert [line["why"] for line in lines if line["event"] == "no member of a set of renditions"] == [
        "stream live/show is published by itself"
    ]
    viewer = world.player("live/show")
    world.send(3)
    assert viewer.payloads == [AVC_HEADER, AAC_HEADER, key(b"own")]
    own.leave()
    world.run(4)
    viewer.forget()
    world.send(6)
    assert [at for _, at, _ in pictures(viewer)][-1] == world.at - 40


@pytest.mark.parametrize("grace", [True, False])
def test_member_when_its_publisher_is_back_goes_on_in_the_set(world, grace):
    world.all_members()
    viewer = world.player("live/show")
    world.send(100)  # until the rates of renditions are known
    if grace:
        world.members["_720"].vanish()
    else:
        delete(world.members["_720"])
    facts = world.hub.renditions.find(world.stream("live/show")).renditions
    assert [item.joined for item in facts()] == ([True, False, True] if grace else [True, True])
    del world.members["_720"]
    world.send(21)
    world.member("_720")
    world.send(20)
    assert [(item.name, item.joined) for item in facts()] == [("1080", True), ("720", True), ("360", True)]
    seen = [at for _, at, _ in pictures(viewer)]
    assert seen == sorted(set(seen))
    assert len(seen) >= 141 - 5  # the rest of a group of the rendition that it was in is missing
    assert sounds(viewer)[-1][2] == pictures(viewer)[-1][2] == world.at - 40
    assert [at for _, at, _ in sounds(viewer)] == [str(at) for at in range(40, world.at, 40)]


@pytest.mark.parametrize("grace", [True, False])
def test_viewer_when_the_publisher_of_its_rendition_goes_sees_the_next_picture_of_another(world, monkeypatch, grace):
    """Of the group that is cached there, what came before goes out with times just behind the last one."""
    world.all_members()
    world.send(100, every=50)
    viewer = world.player("live/show")
    choose(monkeypatch, "720")
    world.send(80, every=50)
    assert pictures(viewer)[-1][0] == "_720"
    gone_ms = world.at - 40
    monkeypatch.undo()
    member = world.members.pop("_720")
    member.vanish() if grace else delete(member)
    world.send(20, every=50)
    seen = [(suffix, at) for suffix, at, _ in pictures(viewer)]
    times = [timestamp for *_, timestamp in pictures(viewer)]
    last = seen.index(("_720", gone_ms))
    other = seen[last + 1][0]
    assert seen[last + 1 :] == [(other, at) for at in range(6000, world.at, 40)]
    assert times == sorted(set(times))
    assert times[last + 1 : last + 4] == [times[last] + 1, times[last] + 2, times[last] + 3]
    assert times[-1] == world.at - 40
    heard = [int(at) for _, at, _ in sounds(viewer)]
    assert heard == list(range(heard[0], world.at, 40))


def test_viewer_when_no_member_has_shown_a_picture_yet_waits_and_is_sent_nothing_twice(world):
    """A set that had pictures a moment ago is none of sound alone, whose viewers follow its face from its cache on."""
    for suffix in ("_1080", "_720"):
        world.member(suffix)
    world.send(110, every=25)
    viewer = world.player("live/show")
    world.send(20, every=25)
    delete(world.members.pop("_1080"))
    world.send(2, every=25)
    world.member("_1080")
    world.send(2, every=25)
    delete(world.members.pop("_720"))
    world.send(60, every=25)
    times = [timestamp for *_, timestamp in pictures(viewer)]
    assert times == sorted(set(times))
    assert pictures(viewer)[-1][:2] == ("_1080", world.at - 40)


def test_pause_when_in_a_set_leaves_it_and_comes_back(world):
    world.all_members()
    viewer = world.player("live/show")
    world.send(3)
    viewer.command("pause", None, True, 0.0)
    viewer.forget()
    world.send(3)
    assert (viewer.media, viewer.connection.place) == ([], None)
    viewer.command("pause", None, False, 0.0)
    world.send(1)
    assert [at for _, at, _ in pictures(viewer)] == [200, 240]
    viewer.command("receiveVideo", None, False)
    viewer.forget()
    world.send(2)
    assert (pictures(viewer), len(sounds(viewer))) == ([], 2)


def delete(publisher):
    publisher.command("deleteStream", None, 1.0)


ACTS = {
    "leave": lambda viewer, _: viewer.leave(),
    "vanish": lambda viewer, _: viewer.vanish(),
    "pause": lambda viewer, _: viewer.command("pause", None, True, 0.0),
    "mute": lambda viewer, _: viewer.command("receiveVideo", None, False),
    "member goes": lambda _, world: delete(world.members.pop("_720")),
    "set ends": lambda _, world: [delete(world.members.pop(suffix)) for suffix in SUFFIXES],
}


@pytest.mark.parametrize("act", ACTS)
def test_viewer_when_a_change_is_pending_may_do_anything(world, monkeypatch, act):
    world.all_members()
    world.send(75, every=25)
    viewer = world.player("live/show")
    world.send(5, every=25)
    choose(monkeypatch, "720")
    world.send(10, every=25)
    assert (viewer.connection.sender.guided, viewer.connection.place.rendition) == (True, "360")
    viewer.forget()
    ACTS[act](viewer, world)
    at = world.at
    world.send(30, every=25)
    match act:
        case "leave" | "vanish":
            assert list(world.stream("live/show").viewers) == []
        case "mute":
            assert (pictures(viewer), sounds(viewer)[-1][2]) == ([], world.at - 40)
        case "member goes":
            assert (viewer.connection.place.rendition, pictures(viewer)[-1][1]) == ("360", world.at - 40)
        case "set ends":
            assert viewer.codes.count(commands.PLAY_UNPUBLISH_NOTIFY) == 1
        case "pause":
            assert viewer.media == []
            viewer.command("pause", None, False, 0.0)
            world.send(30, every=25)
            seen = [picture_at for _, picture_at, _ in pictures(viewer)]
            assert (viewer.connection.place.rendition, seen) == ("720", list(range(seen[0], world.at, 40)))
            assert seen[0] > at - 1000


def test_set_when_members_have_sound_alone_is_played_from_the_face(world):
    for suffix in SUFFIXES:
        publisher = world.members[suffix] = world.connect().publish("live/show" + suffix)
        publisher.audio(0, AAC_HEADER)
    viewer = world.player("live/show")
    for number in range(120):
        for suffix, publisher in world.members.items():
            publisher.audio(number * 40, audio(suffix.encode()))
        world.run(0.04)
    assert viewer.payloads[0] == AAC_HEADER
    assert set(viewer.payloads[1:]) == {audio(b"_1080")}


def test_names_when_the_setting_is_off_or_another_are_of_no_set():
    world = SetWorld(config())
    world.all_members()
    assert world.stream("live/show") is None


def test_renditions_when_there_is_no_key_frame_or_too_many_members(world):
    """A member without a key frame is in no viewer's way, and of a set there are eight at most."""
    world.all_members()
    viewer = world.player("live/show")
    for number in range(20):
        world.members["_720"].video(number * 40, inter(b"_720 0"))
    world.send(5, members=("_1080", "_360"))
    facts = world.hub.renditions.find(world.stream("live/show")).renditions()
    assert [item.joined for item in facts] == [True, False, True]
    assert [at for _, at, _ in pictures(viewer)] == [0, 40, 80, 120, 160]
