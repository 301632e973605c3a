"""What is counted of connections, of crowds behind one address, and of those that end while they are looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowctl.errors import LimitExceededError
from flowctl.live.access.request import LiveRequest
from flowctl.live.bans.penalties import POLL_S, PenaltyWatch
from flowctl.live.judging.penalties import MILD_PENALTY_S, Allowance, Offence, Penalties, PenaltyLimits, sentence
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.url import RtmpUrl

ONE = "192.0.2.1"
TOO_FAST = LimitExceededError("new_per_address_and_s", 21, 20)


class World:
    """A watch with a manual clock, and the connections of one address."""

    def __init__(self, limits=None):
        self.now, self.verdicts, self.open, self._count = 0.0, [], [], 0
        penalties = Penalties(PenaltyLimits() if limits is None else limits)
        self.watch = PenaltyWatch(
            penalties, lambda: self.open, (), lambda job: job(), self.verdicts.extend, lambda: self.now
        )

    def connect(self, *, address=ONE, http=False, harmless=True):
        self._count += 1
        session = SimpleNamespace(asked_count=None if http else (0, 0), harmless=harmless, behaves=lambda: True)
        made = SimpleNamespace(number=self._count, peer=(address, 1), ended=None, session=session)
        self.open.append(made)
        return made

    def asks(self, connection, commands=0, control=0):
        before = connection.session.asked_count
        connection.session.asked_count = before[0] + commands, before[1] + control

    def leave(self, connection):
        self.open.remove(connection)
        connection.ended = (CloseReason.PEER_CLOSED, "")
        self.watch.closed(connection, CloseReason.PEER_CLOSED, "", None)

    def deny(self, connection, token, *, guess=True):
        url = RtmpUrl(scheme="rtmp", host="h", vhost="h", port=1935, raw_query=f"token={token}").with_stream("live/a")
        request = LiveRequest(kind="play", connection=connection.number, peer=connection.peer, url=url)
        self.watch.denied(connection, request, self.now, guess=guess)

    def run(self, seconds, each=lambda: None):
        """Let time pass, in the steps of the watch."""
        until = self.now + seconds
        while self.now < until:
            each()
            self.now += POLL_S
            self.watch.look()


def test_look_when_a_connection_has_ended_meanwhile_counts_nothing_twice():
    world = World(PenaltyLimits(control=Allowance(100, 3600)))
    connection = world.connect()
    world.asks(connection, control=90)
    world.leave(connection)
    world.open.append(connection)
    world.run(3 * POLL_S)
    assert world.verdicts == []
    another = world.connect()
    world.asks(another, control=120)  # another one of the same address, which goes over
    world.run(POLL_S)
    assert len(world.verdicts) == 1


def test_crowd_when_thousands_join_and_play_behind_one_address_is_not_punished():
    world = World()

    def join():
        for _ in range(40):
            viewer = world.connect()
            world.watch.refused(viewer.peer, TOO_FAST)  # it tries a second time
            world.asks(viewer, commands=3, control=3)
            world.watch.play_started(viewer, "live/a", world.now)
        for viewer in world.open:
            world.asks(viewer, commands=int(world.now) % 10 == 0, control=6)

    world.run(120, join)
    for viewer in list(world.open):
        world.leave(viewer)
    assert world.verdicts == []


def test_connections_when_each_floods_a_little_sum_up():
    world = World()
    for _ in range(16):
        world.connect()
    world.run(20, lambda: [world.asks(item, commands=90) for item in world.open])
    (verdict, *_) = world.verdicts
    assert (verdict.cidr, verdict.offence) == (f"{ONE}/32", Offence.COMMANDS)


def test_guilty_when_an_address_is_shared_are_those_who_do_the_most_of_it_now():
    world = World()
    flooder, helper, before, neighbour = (world.connect() for _ in range(4))
    world.run(20, lambda: world.asks(before, commands=500))
    world.run(3600, lambda: world.asks(before, control=80))  # long after that, it does other things
    world.asks(neighbour, commands=400)
    world.run(20, lambda: [world.asks(item, commands=count) for item, count in ((flooder, 500), (helper, 300))])
    (verdict,) = {item.offence: item for item in world.verdicts}.values()
    assert verdict.offence is Offence.COMMANDS
    assert world.watch.behaving_and_guilty(verdict) == (2, [flooder, helper])


@pytest.mark.parametrize("http", [False, True])
@pytest.mark.parametrize("guess", [False, True])
def test_players_when_their_tokens_have_expired_are_not_punished(http, guess):
    world = World()

    def retry():
        for number in range(60):
            player = world.connect(http=http)
            world.deny(player, number, guess=guess)
            world.leave(player)

    world.run(1200, retry)
    assert world.verdicts == []


@pytest.mark.parametrize(("http", "offence"), [(False, Offence.REFUSED), (True, Offence.CONNECTIONS)])
def test_guesser_when_it_tries_something_else_each_time_is_found(http, offence):
    """Over HTTP it takes more, since a page may cause some, and is a mild offence."""
    world = World()

    def guess():
        for number in range(100):
            player = world.connect(http=http)
            world.deny(player, f"{world.now}-{number}")
            world.leave(player)

    world.run(600, guess)
    assert {verdict.offence for verdict in world.verdicts} == {offence}
    assert len(world.verdicts) >= 4


def test_refused_when_too_many_come_are_judged_as_who_was_let_in():
    world = World()
    crowd, flood = world.connect(), world.connect(address="198.51.100.1", harmless=False)
    world.watch.play_started(crowd, "live/a", 0.0)
    for _ in range(3000):
        world.watch.refused(crowd.peer, TOO_FAST)
        world.watch.refused(flood.peer, TOO_FAST)  # it is not known yet what it is
    assert world.verdicts == []
    world.leave(flood)
    for _ in range(3000):
        world.watch.refused(flood.peer, TOO_FAST)
    (verdict,) = world.verdicts
    assert (verdict.cidr, verdict.evidence["refused"]) == ("198.51.100.1/32", 2000)
    assert sentence(verdict, 0)[:2] == (False, MILD_PENALTY_S)


def test_limits_when_broken_over_http_count_for_nothing():
    """Whatever it is, a page can have a browser do it."""
    world = World(PenaltyLimits(limits=Allowance(1, 600)))
    player = world.connect(http=True)
    for limit in ("target_bytes", "pending_output_bytes", "some_other_limit"):
        world.watch.limit_hit(player, limit, 9, 1, 0.0)
    assert world.verdicts == []
    world.watch.limit_hit(world.connect(), "amf_depth", 33, 32, 0.0)
    assert len(world.verdicts) == 1
