"""Every attack on HTTP of the load tester against a live server: ended or contained, and a viewer loses nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from itertools import pairwise

import pytest
from http_kit import FREE, HOST, Publisher, Web, wait_for
from loopback_kit import LOOPBACK

from flowctl.live.httpd.exchange import HttpLimits
from flowctl.load.hostile.attacks import HOSTILE
from flowctl.load.hostile.base import AttackContext, AttackOutcome

CUT, REFUSED, CONTAINED = AttackOutcome.CUT, AttackOutcome.REFUSED, AttackOutcome.CONTAINED
SEEN = {
    "H01": {"request": CUT, "player": CUT, "head": REFUSED},
    "H02": {"chunks": CUT, "announced": CUT, "of-get": CUT},
    "H03": {"line": REFUSED, "headers": REFUSED, "body": REFUSED},
    "H04": {"target": CUT, "header": CUT, "count": CUT, "endless": CUT},
    "H05": {"": CONTAINED},
    "H06": {"": CONTAINED},
    "H07": {"": CONTAINED},
    "H08": {"fragments": CONTAINED, "frame": CONTAINED},
}
LIMITS = {
    "H02": ({"body_bytes", "request_time_s"}, 3),  # of the smallest chunks not many are read in time
    "H03": ({"request_time_s"}, 3),
    "H04": ({"header_bytes"}, 4),
}
PROFILES = [profile for profile in HOSTILE.values() if profile.over_http]


class Stream(threading.Thread):
    """Publishes a group of pictures every 40 ms."""

    def __init__(self, server) -> None:
        super().__init__(daemon=True)
        self.publisher = Publisher(server, "live/stream")
        self.publisher.group()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.04):
            self.publisher.group(b"x", 2000)


@pytest.fixture(scope="module")
def arena():
    web = Web(None, limits=HttpLimits(request_time_s=0.8, requests=1_000_000), admission=FREE)
    stream = Stream(web.server)
    stream.start()
    yield web
    stream.over.set()
    stream.join()
    web.stop()


@pytest.mark.realtime
@pytest.mark.parametrize("profile", PROFILES, ids=lambda item: f"{item.name}-{item.alias}")
def test_server_when_attacked_over_http_contains_it_and_nobody_loses_anything(profile, arena):
    wait_for(lambda: not arena.server.connections())
    viewer = arena.client()
    viewer.send(f"GET /live/stream.flv HTTP/1.1\r\n{HOST}\r\n")
    viewer.answer()
    (number,) = [item.number for item in wait_for(arena.viewers)]
    before = dict(arena.server.hub.limits_hit)
    context = AttackContext(host=LOOPBACK, port=arena.address[1], duration_s=2.5, watch_s=1.5, rng=random.Random(1))
    verdict = asyncio.run(profile.attack(context))
    assert {item.form: item.outcome for item in verdict.forms} == SEEN[profile.name], verdict
    assert verdict.met is not False, verdict
    assert (verdict.newcomer, verdict.witness) == (True, True)
    after = arena.server.hub.limits_hit
    gained = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    names, count = LIMITS.get(profile.name, ({"frames_per_second"}, None))
    assert gained.keys() <= names
    assert count is None or sum(gained.values()) == count
    _, tags = viewer.tags(40)
    pictures = [tag.timestamp for tag in tags if tag.type_id == 9][1:]
    assert {later - earlier for earlier, later in pairwise(pictures)} == {40}
    (session,) = [item for item in arena.viewers() if item.number == number]
    assert session.connection.sender.statistics().dropped_messages == 0
    viewer.close()
    wait_for(lambda: not arena.server.connections())
