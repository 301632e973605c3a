"""Who is shown under the name of a set: whoever may publish that name too, by the same proof."""

from __future__ import annotations

import time
from ipaddress import ip_network

import pytest
from live_kit import config, key
from rendition_kit import NAMES, SetWorld, avc_header, pictures
from structlog.testing import capture_logs

from flowctl.live.access.keys import KeyFile, hash_key
from flowctl.live.access.request import Question, Refusal
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.publishing import HubSink
from flowctl.live.renditions import sets
from flowctl.live.settings.levels import Level, Role
from flowctl.live.settings.renditions import RenditionNames, guess_suffix
from flowctl.wire.rtmp.events import PublishStarted

OF_ALL, OF_ONE = "key-of-all-of-them-01", "key-of-one-of-them-01"
SECRET = b"a secret of thirty-two or more bytes, for tests"


@pytest.fixture
def keys():
    found = KeyFile("keys")
    found.read(f"{hash_key(OF_ALL)} publish live/show*\n{hash_key(OF_ONE)} publish live/show_1080\n", "")
    return found


def join(world, suffix, query, address="192.0.2.1"):
    publisher = world.members[suffix] = world.connect(address).publish(f"live/show{suffix}?{query}")
    publisher.video(0, avc_header(0))
    publisher.sound = False
    return publisher


def names_of(world):
    face = world.stream("live/show")
    found = None if face is None else world.hub.renditions.find(face)
    return [] if found is None else [item.name for item in found.renditions()]


def published(peer):
    return any(isinstance(event, PublishStarted) for event in peer.events)


@pytest.mark.parametrize("first", [True, False])
def test_publisher_who_may_publish_its_own_name_alone_is_not_shown_under_that_of_the_set(keys, first):
    access = StreamAccess(publish_auth=(Proof.KEY,), keys=keys)
    world = SetWorld(config(renditions=NAMES, access=access))
    with capture_logs() as logs:
        stranger = join(world, "_1080", f"key={OF_ONE}") if first else None
        join(world, "_720", f"key={OF_ALL}")
        stranger = stranger or join(world, "_1080", f"key={OF_ONE}")
    viewer, of_member = world.player("live/show"), world.player("live/show_1080")
    world.send(20)
    assert published(stranger)
    assert names_of(world) == ["720"]
    assert {suffix for suffix, *_ in pictures(viewer)} == {"_720"}
    assert {suffix for suffix, *_ in pictures(of_member)} == {"_1080"}
    told = [line for line in logs if line["event"] == "published alone"]
    assert [(line["stream"], line["no_rendition_of"]) for line in told] == [("live/show_1080", "live/show")]
    for suffix in ("_1080", "_720"):
        world.members.pop(suffix).command("deleteStream", None, 1.0)
    world.run(5.0)
    join(world, "_1080", f"key={OF_ALL}")
    world.send(10)
    assert names_of(world) == ["1080"]
    assert list(world.hub._faces.values()) == ["live/show"]
    assert world.group.failures == []


@pytest.mark.parametrize(("signed", "shown"), [("live/show", ["720"]), ("live/show_720", [])])
def test_signed_address_of_a_set_is_for_its_renditions_and_one_of_a_rendition_for_that_alone(signed, shown):
    secrets = SecretFile("secrets", (SECRET,))
    world = SetWorld(config(renditions=NAMES, access=StreamAccess(publish_auth=(Proof.TOKEN,), token_secrets=secrets)))
    query = signed_query(SECRET, "publish", signed, int(time.time()) + 60)
    assert published(join(world, "_720", query))
    world.send(10)
    assert names_of(world) == shown
    assert not published(world.connect().publish(f"live/other_720?{query}"))


def test_network_that_may_not_publish_the_set_is_shown_under_no_name_of_it():
    rule = Level(stream="live/show", role=Role.PUBLISHER, values={"access.deny_publish": (ip_network("192.0.2.7"),)})
    world = SetWorld(config(renditions=NAMES, levels=(rule,)))
    assert published(join(world, "_720", "", "192.0.2.7"))
    world.send(10)
    assert names_of(world) == []


class Asked:
    """Stands for a `HookRunner`: answers by the name of the stream, later or never, and is told."""

    decide_s = 5.0

    def __init__(self, refused, *, answers=True):
        self.decides = {"connect": False, "publish": True, "play": False}
        self.told_kinds = {"publish"}
        self.tap = None
        self.refused, self.answers = refused, answers
        self.asked, self.waiting, self.news = [], [], []

    def ask(self, request, answer):
        self.asked.append((request.stream, request.face))
        question = Question(answer)
        if request.face or self.answers:
            self.waiting.append((question, Refusal("not this") if request.stream in self.refused else None))
        return question

    def check_news(self, request):
        pass

    def note_begin(self, request):
        self.news += [("began", request.stream)] if request.kind == "publish" else []

    def note_end(self, request, why):
        self.news.append(("ended", request.stream))


@pytest.mark.parametrize(
    ("refused", "answers", "shown"),
    [((), True, ["720"]), (("live/show",), True, []), ((), False, [])],
    ids=["allowed", "refused", "no answer"],
)
def test_hook_is_asked_about_the_rendition_then_about_the_set(refused, answers, shown):
    world = SetWorld()
    world.hub.gate.hooks = hooks = Asked(refused, answers=answers)
    publisher = world.members["_720"] = world.connect().publish("live/show_720")
    publisher.sound = False
    for _ in range(2):
        assert not published(publisher)
        for question, refusal in hooks.waiting:
            question.tell(refusal)
        hooks.waiting.clear()
        world.run()
    world.run(0 if answers else hooks.decide_s)
    assert hooks.asked == [("live/show_720", "live/show"), ("live/show", "")]
    assert published(publisher)
    publisher.video(0, avc_header(0))
    world.send(10)
    assert names_of(world) == shown
    world.members.pop("_720").command("deleteStream", None, 1.0)
    assert hooks.news == [("began", "live/show_720"), ("ended", "live/show_720")]


@pytest.mark.parametrize(
    ("endings", "setting"),
    [
        (("_720", "_480", "_1080"), "_1080,_720,_480"),
        (("-360p", "-720p60"), "-720p60,-360p"),
        ((".low", ".high", ".mid"), ".high,.mid,.low"),
        (("_101", "_102"), None),
        (("_720", ""), None),
        (("_720", "-720"), None),
    ],
)
def test_names_that_look_like_a_set_are_told_with_the_setting_that_makes_them_one(endings, setting):
    world = SetWorld(config())
    with capture_logs() as logs:
        for ending in (*endings, *endings):
            world.publisher(f"live/show{ending}").command("deleteStream", None, 1.0)
        assert not [line for line in logs if "renditions" in line["event"]]
        for ending in endings:
            world.publisher(f"live/show{ending}")
        for ending in endings:
            world.publisher(f"live/other{ending}").command("deleteStream", None, 1.0)
    assert world.group.failures == []
    told = [line for line in logs if line["event"] == "streams look like renditions of one"]
    if setting is None:
        assert told == []
    else:
        first = f'renditions = "{setting}"' if len(endings) == 2 else 'renditions = "'
        assert [line["stream"] for line in told] == ["live/show"]
        assert told[0]["hint"].startswith(first)
        assert told[0]["log_level"] == "info"


def test_names_that_look_like_a_set_are_told_only_where_that_is_not_set():
    for names in (RenditionNames(tracks=False), NAMES):
        world = SetWorld(config(renditions=names))
        with capture_logs() as logs:
            for ending in ("_480", "_240"):
                world.publisher(f"live/show{ending}")
        assert not [line for line in logs if "look like" in line["event"]]


def test_stream_that_was_published_before_its_name_was_one_of_a_set_is_no_member():
    """It was not asked about that set, and the setting is for what is published after it."""
    world = SetWorld(config())
    join(world, "_720", "")
    world.send(5)
    world.hub.configure(config(renditions=NAMES))
    world.hub.renditions.look(world.stream("live/show_720"))
    join(world, "_360", "")
    world.send(5)
    assert names_of(world) == ["360"]


def test_names_that_look_like_a_set_are_looked_for_among_those_alike(monkeypatch):
    """Who publishes is no work for all the others that are published."""
    looked_at = []
    world = SetWorld(config())
    for number in range(3):
        world.publisher(f"live/room{number}_480")
    monkeypatch.setattr(sets, "guess_suffix", lambda name: looked_at.append(name) or guess_suffix(name))
    world.publisher("live/show_480")
    assert looked_at == ["live/show_480", "live/show_480"]


@pytest.mark.parametrize("alone", [True, False])
def test_copy_of_what_an_origin_shows_is_no_member_of_a_set_and_a_pulled_stream_is(alone):
    """The origin may publish it alone, and has been asked; an edge has not."""
    world = SetWorld(config(renditions=NAMES))
    sink = HubSink(world.hub, "live/bob_720", "origin", alone=alone)
    sink.begin(world.group.clock())
    for payload in (avc_header(1), key(b"_720 0")):
        sink.take(9, 0, payload, world.group.clock())
    world.run(3)
    assert (world.stream("live/bob") is None) == alone
