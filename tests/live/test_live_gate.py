"""The gate: settings of each application, stream and role are held to, by RTMP and HTTP alike, before any hook."""

from __future__ import annotations

import dataclasses
import threading
import time
from ipaddress import ip_network

import pytest
import structlog
from hook_kit import HookServer, answer_of, http
from live_kit import World, config

from flowctl.core.server.heap import TRIM_S
from flowctl.live import gate as module
from flowctl.live.access.keys import KeyFile, StoredKey, hash_key
from flowctl.live.access.request import LiveRequest, Refusal, Why
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.config import LiveConfig
from flowctl.live.gate import IDLE_S, AccessGate, Visits
from flowctl.live.hooks import HookRunner, LiveHooks
from flowctl.live.server import LiveServer
from flowctl.live.settings.levels import Level, Role
from flowctl.wire.rtmp.events import PlayStarted, PublishStarted, Rejected
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.url import parse_url

KEY = "a-key-that-nobody-guesses"
_, _SALT, _DIGEST = hash_key(KEY).split(":")
KEYS = KeyFile("keys", (StoredKey(bytes.fromhex(_SALT), bytes.fromhex(_DIGEST)),))
SECRETS = SecretFile("secrets", (b"a secret of sixteen or more bytes",))
HERE = (ip_network("192.0.2.1"),)


def request_of(kind="play", text="rtmp://h/live/room", **more):
    url = parse_url(text) if kind != "connect" else dataclasses.replace(parse_url(text), app="live", stream="")
    return LiveRequest(kind=kind, connection=1, peer=("192.0.2.1", 1), url=url, **more)


def asked(gate, *args, **more):
    return gate.ask(request_of(*args, **more), lambda *_: None)


def test_hooks_of_an_application_hear_of_who_connects_to_another_one():
    server, actions = HookServer(), []
    server.answer = lambda body: http("1" if body["action"] == "on_connect" else "0")
    values = {"access.on_connect": (server.url(),), "access.on_play": (server.url(),)}
    gate = AccessGate(lambda: LiveConfig(levels=(Level(application="vip", values=values),)))

    def ask(connected):
        refusal = answer_of(gate.ask, request_of("play", "rtmp://h/vip/room", connected=connected))
        actions[:] = server.actions()
        server.bodies.clear()
        return refusal

    try:
        assert ask("live").why is Why.FORBIDDEN
        assert actions == ["on_connect"]
        server.answer = lambda _: http("0")
        assert ask("live") is None
        assert actions == ["on_connect", "on_play"]
        assert ask("vip") is None
        assert actions == ["on_play"]
    finally:
        gate.stop(1.0)
        server.close()


def test_levels_of_application_and_role_have_access_of_their_own():
    levels = (
        Level(application="vip", values={"access.play_auth": (Proof.KEY,), "access.keys": KEYS}),
        Level(application="vip", role=Role.PUBLISHER, values={"access.deny_publish": HERE}),
        Level(application="closed", values={"access.deny_play": HERE}),
    )
    gate = AccessGate(lambda: LiveConfig(levels=levels))
    assert asked(gate, "play") is None
    assert asked(gate, "play", "rtmp://h/vip/room").why is Why.UNAUTHORIZED
    assert asked(gate, "play", f"rtmp://h/vip/room?key={KEY}") is None
    assert asked(gate, "publish", f"rtmp://h/vip/room?key={KEY}").why is Why.FORBIDDEN
    assert asked(gate, "publish") is None
    assert asked(gate, "connect") is None
    assert asked(gate, "play", "rtmp://h/closed/room", connected="live").why is Why.FORBIDDEN


def test_settings_that_change_hold_for_the_next_who_asks():
    now = [LiveConfig()]
    gate = AccessGate(lambda: now[0])
    assert asked(gate) is None
    now[0] = LiveConfig(access=StreamAccess(deny_play=HERE))
    assert isinstance(asked(gate), Refusal)


@pytest.mark.parametrize(
    ("text", "good"),
    [("http://ann:pw@h/live/room", True), ("http://ann:no@h/live/room", False), ("http://bob:pw@h/live/room", False),
     ("http://h/live/room", False), ("http://ann:@h/live/room", False), ("http://:@h/live/room", False)],
)  # fmt: skip
def test_password_is_asked_for_over_http_where_rtmp_asks_for_one(text, good):
    gate = AccessGate(lambda: LiveConfig(rtmp=ServerSessionConfig(credentials={"ann": "pw"})))
    found = asked(gate, "play", text, protocol="http")
    assert (found is None) is good
    assert good or found.why is Why.UNAUTHORIZED
    assert asked(gate, "play", "rtmp://h/live/room", user="ann") is None


def rejected(peer):
    return [(event.code, event.description) for event in peer.events if isinstance(event, Rejected)]


@pytest.mark.parametrize(
    ("access", "ask", "name", "expected"),
    [
        ({"deny_publish": HERE}, "publish", "live/room", ("NetStream.Publish.BadName", "from your address")),
        ({"deny_play": HERE}, "play", "live/room", ("NetStream.Play.Failed", "from your address")),
        ({"publish_auth": (Proof.KEY,), "keys": KEYS}, "publish", "live/room?key=guessed",
         ("NetStream.Publish.Unauthorized", "The stream key is wrong.")),
        ({"play_auth": (Proof.TOKEN,), "token_secrets": SECRETS}, "play", "live/room",
         ("NetStream.Play.Failed", "A signed token is needed.")),
    ],
)  # fmt: skip
def test_client_of_rtmp_is_refused_in_its_words(access, ask, name, expected):
    world = World(config(access=StreamAccess(**access)))
    peer = getattr(world.connect(), ask)(name)
    world.run()
    ((code, description),) = rejected(peer)
    assert code == expected[0]
    assert expected[1] in description
    assert world.hub.streams() == {}
    assert world.group.failures == []


def test_client_of_rtmp_with_what_is_asked_for_is_let_in():
    access = StreamAccess(publish_auth=(Proof.KEY,), keys=KEYS, play_auth=(Proof.TOKEN,), token_secrets=SECRETS)
    world = World(config(access=access))
    assert world.connect().publish(f"live/room?key={KEY}").has(PublishStarted)
    query = signed_query(SECRETS.secrets[0], "play", "live/room", int(time.time()) + 60)
    assert world.connect().play(f"live/room?{query}").has(PlayStarted)


def test_publisher_when_it_is_back_with_a_new_token_gets_its_name():
    """Its name is kept for it while its connection is broken, though no two tokens are the same."""
    access = StreamAccess(publish_auth=(Proof.TOKEN,), token_secrets=SECRETS)
    world = World(config(access=access, return_grace_s=3.0))
    viewer = world.connect().play()
    for number, address in enumerate(("192.0.2.1", "192.0.2.1", "198.51.100.1")):
        query = signed_query(SECRETS.secrets[0], "publish", "live/room", int(time.time()) + 60 + number)
        publisher = world.connect(address).publish(f"live/room?{query}")
        assert publisher.has(PublishStarted), (number, publisher.codes)
        publisher.headers()
        publisher.vanish()
        world.run()
    assert not viewer.ended


@pytest.mark.parametrize(
    ("rtmp", "http", "access", "said"),
    [
        ("127.0.0.1", None, {}, None),
        ("0.0.0.0", None, {}, "publish and play"),
        ("0.0.0.0", None, {"publish_auth": (Proof.KEY,), "keys": KEYS}, "play"),
        ("0.0.0.0", None, {"allow_publish": HERE, "allow_play": HERE}, None),
        ("0.0.0.0", None, {"allow_publish": HERE, "play_auth": (Proof.KEY,)}, "nobody will be let in"),
        ("0.0.0.0", "0.0.0.0", {"on_connect": ("http://127.0.0.1:1/",)}, "play over HTTP"),
        ("0.0.0.0", "127.0.0.1", {"on_connect": ("http://127.0.0.1:1/",)}, None),
        ("0.0.0.0", "0.0.0.0", {"on_connect": ("http://127.0.0.1:1/",), "play_auth": (Proof.KEY,), "keys": KEYS}, None),
        ("127.0.0.1", "0.0.0.0", {}, "play over HTTP"),
        ("0.0.0.0", "0.0.0.0", {}, "publish and play"),
    ],
)
def test_server_that_others_can_reach_says_what_is_open_to_everybody(rtmp, http, access, said):
    """Nobody is asked about a connection of HTTP, so that what guards connections of RTMP guards no play over HTTP."""
    server = LiveServer(LiveConfig(host=rtmp, access=StreamAccess(**access)))
    try:
        if http is not None:
            server.listen(http, 0, name="https")
        with structlog.testing.capture_logs() as lines:
            server._tell_what_is_open()
    finally:
        server.close_listeners()
    assert [line.get("may", line["event"]) for line in lines] == ([] if said is None else [said])


def test_server_when_time_has_passed_gives_back_what_its_heap_has_free(monkeypatch):
    """Also where it has nothing else to look at: a crowd that has gone leaves hundreds of MiB there."""
    trims = []
    monkeypatch.setattr("flowctl.live.server.trim_heap", lambda: trims.append(now[0]))
    now = [0.0]
    server = LiveServer(LiveConfig())
    try:
        server.clock = lambda: now[0]
        for second in range(int(3 * TRIM_S)):
            now[0] = float(second)
            server._look_beside()
    finally:
        server.close_listeners()
    assert trims == [0.0, TRIM_S, 2 * TRIM_S]


class Ours(LiveHooks):
    """Lets in whose name begins with a letter that is allowed."""

    def may_publish(self, request):
        return "Not by us." if request.stream.startswith("live/no") else None


@pytest.fixture
def hook():
    server = HookServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("name", "answer", "said", "actions"),
    [
        ("live/yes", "0", None, ["on_publish"]),
        ("live/yes", "1", "The server's hook does not allow this.", ["on_publish"]),
        ("live/no", "0", "Not by us.", []),
    ],
)
def test_hooks_of_the_application_and_of_http_must_both_allow(hook, name, answer, said, actions):
    hook.answer = lambda _: http(answer)
    failures, found, done = [], [], threading.Event()
    config = LiveConfig(access=StreamAccess(on_publish=(hook.url(),)))
    gate = AccessGate(lambda: config)
    gate.hooks = HookRunner(Ours(), lambda *failure: failures.append(failure))
    gate.hooks.start()
    question = gate.ask(
        request_of("publish", f"rtmp://h/{name}"), lambda asked, refusal: (found.append((asked, refusal)), done.set())
    )
    assert done.wait(20)
    assert [(asked is question, refusal and refusal.text) for asked, refusal in found] == [(True, said)]
    assert hook.actions() == actions
    assert gate.decide_s == LiveHooks.decide_s + StreamAccess().hook_timeout_s + 1.0
    gate.stop(1.0)
    gate.hooks.stop(1.0)
    assert failures == []


def test_hooks_of_http_are_those_of_the_application_and_heard_kinds_of_all(hook):
    levels = (Level(application="vip", values={"access.on_end": (hook.url("/vip"),)}),)
    both = LiveConfig(levels=levels), LiveConfig()
    gate, plain = AccessGate(lambda: both[0]), AccessGate(lambda: both[1])
    assert [gate.tells_of(kind) for kind in ("connect", "publish", "play")] == [True, True, True]
    assert not any(plain.tells_of(kind) for kind in ("connect", "publish", "play"))
    gate.note_end(request_of("play"), "deleteStream")
    assert gate._web is None
    gate.note_end(request_of("play", "rtmp://h/vip/room"), "deleteStream")
    gate.stop(20.0)
    assert (hook.actions(), hook.paths) == (["on_stop"], ["/vip"])
    assert plain.decide_s == 0.0


# -- visits: many requests of one client for one stream are one play, which ends when they end


VISIT = LiveRequest(
    kind="play",
    connection=7,
    peer=("192.0.2.7", 1),
    url=parse_url("http://media.example/live/room?token=abc"),
    protocol="http",
    user_agent="a phone",
)


class Hearing:
    """Stands for the hooks of an application: decides about plays, and hears of them."""

    decides = dict.fromkeys(("connect", "publish", "play"), True)
    told_kinds = frozenset({"play"})

    def __init__(self):
        self.news = []

    def note_begin(self, request):
        self.news.append(("began", request.connection))

    def note_end(self, request, why):
        self.news.append(("over", request.connection, why))


class Room:
    """Visits on a manual clock."""

    def __init__(self, access=None):
        self.now, self.later = 0.0, []
        self.gate = AccessGate(lambda: self.config)
        self.config = LiveConfig(access=access or StreamAccess())
        self.gate.hooks = self.hooks = Hearing()
        self.visits = Visits(self.gate, lambda: self.now, lambda delay_s, call: self.later.append(call))

    def look(self):
        calls, self.later = self.later, []
        for call in calls:
            call()


def test_visit_when_it_has_begun_goes_on_for_as_long_as_it_asks():
    room = Room()
    assert not room.visits.prolong(VISIT)
    room.visits.begin(VISIT)
    for _ in range(20):
        room.now += IDLE_S / 2
        room.look()
        again = dataclasses.replace(VISIT, connection=8, peer=("192.0.2.7", 2))  # another connection
        assert room.visits.prolong(again)
        room.visits.begin(again)
    assert room.hooks.news == [("began", 7)]
    assert len(room.later) == 1
    room.now += IDLE_S
    assert not room.visits.prolong(VISIT)
    room.look()
    assert room.hooks.news == [("began", 7), ("over", 7, "it asked for nothing for 60 s")]
    assert (len(room.visits), room.later) == (0, [])


@pytest.mark.parametrize(
    "other",
    [
        {"peer": ("192.0.2.8", 1)},
        {"user_agent": "another"},
        {"bearer": "x"},
        {"url": parse_url("http://media.example/live/room?token=abd")},
        {"url": parse_url("http://media.example/live/other?token=abc")},
        {"url": dataclasses.replace(VISIT.url, user="u", password="p")},
    ],
)
def test_request_when_client_proof_or_stream_is_another_belongs_to_no_visit(other):
    room = Room()
    room.visits.begin(VISIT)
    assert not room.visits.prolong(dataclasses.replace(VISIT, **other))
    assert room.visits.prolong(VISIT)


def test_visits_when_one_address_has_many_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MOST_VISITS_OF_ADDRESS", 3)
    room = Room()
    many = [dataclasses.replace(VISIT, user_agent=str(number)) for number in range(5)]
    for request in many:
        room.visits.begin(request)
    assert [room.visits.prolong(request) for request in many] == [True] * 3 + [False] * 2
    other = dataclasses.replace(VISIT, peer=("192.0.2.8", 1))
    room.visits.begin(other)
    assert room.visits.prolong(other)
    room.now += IDLE_S
    room.look()
    room.visits.begin(many[4])
    assert room.visits.prolong(many[4])


def test_visit_when_nobody_decides_or_hears_is_none():
    room = Room()
    room.gate.hooks = None
    room.visits.begin(VISIT)
    assert (len(room.visits), room.later) == (0, [])


def test_visits_when_the_server_stops_are_told_of_and_none_begins():
    room = Room()
    room.visits.begin(VISIT)
    room.visits.stop()
    room.visits.begin(VISIT)
    assert room.hooks.news == [("began", 7), ("over", 7, "the server stops")]


def test_network_when_it_is_denied_later_is_refused_in_a_visit_too():
    room = Room()
    assert room.gate.refuses_network(VISIT) is None
    room.config = LiveConfig(access=StreamAccess(deny_play=(ip_network("192.0.2.0/24"),)))
    assert room.gate.refuses_network(VISIT) is not None
