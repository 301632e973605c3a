"""Visits: many requests of one client for one stream are one play, which ends when they end."""

from __future__ import annotations

import dataclasses
from ipaddress import ip_network

import pytest

from flowctl.live.access import visits as module
from flowctl.live.access.request import LiveRequest
from flowctl.live.access.rules import StreamAccess
from flowctl.live.access.visits import IDLE_S, Visits
from flowctl.live.config import LiveConfig
from flowctl.live.gate import AccessGate
from flowctl.wire.rtmp.url import parse_url

REQUEST = LiveRequest(
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
    hears = frozenset({"play"})

    def __init__(self):
        self.news = []

    def began(self, request):
        self.news.append(("began", request.connection))

    def over(self, request, why):
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
    assert not room.visits.goes_on(REQUEST)
    room.visits.begin(REQUEST)
    for _ in range(20):
        room.now += IDLE_S / 2
        room.look()
        again = dataclasses.replace(REQUEST, connection=8, peer=("192.0.2.7", 2))  # another connection
        assert room.visits.goes_on(again)
        room.visits.begin(again)
    assert room.hooks.news == [("began", 7)]
    assert len(room.later) == 1
    room.now += IDLE_S
    assert not room.visits.goes_on(REQUEST)
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
        {"url": dataclasses.replace(REQUEST.url, user="u", password="p")},
    ],
)
def test_request_when_client_proof_or_stream_is_another_belongs_to_no_visit(other):
    room = Room()
    room.visits.begin(REQUEST)
    assert not room.visits.goes_on(dataclasses.replace(REQUEST, **other))
    assert room.visits.goes_on(REQUEST)


def test_visits_when_one_address_has_many_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PER_ADDRESS", 3)
    room = Room()
    many = [dataclasses.replace(REQUEST, user_agent=str(number)) for number in range(5)]
    for request in many:
        room.visits.begin(request)
    assert [room.visits.goes_on(request) for request in many] == [True] * 3 + [False] * 2
    other = dataclasses.replace(REQUEST, peer=("192.0.2.8", 1))
    room.visits.begin(other)
    assert room.visits.goes_on(other)
    room.now += IDLE_S
    room.look()
    room.visits.begin(many[4])
    assert room.visits.goes_on(many[4])


def test_visit_when_nobody_decides_or_hears_is_none():
    room = Room()
    room.gate.hooks = None
    room.visits.begin(REQUEST)
    assert (len(room.visits), room.later) == (0, [])


def test_visits_when_the_server_stops_are_told_of_and_none_begins():
    room = Room()
    room.visits.begin(REQUEST)
    room.visits.stop()
    room.visits.begin(REQUEST)
    assert room.hooks.news == [("began", 7), ("over", 7, "the server stops")]


def test_network_when_it_is_denied_later_is_refused_in_a_visit_too():
    room = Room()
    assert room.gate.refuses_network(REQUEST) is None
    room.config = LiveConfig(access=StreamAccess(deny_play=(ip_network("192.0.2.0/24"),)))
    assert room.gate.refuses_network(REQUEST) is not None
