"""How service nodes are reached and when connections to them end; and subscriptions: rules, with a manual clock."""

from __future__ import annotations

import pytest

from flowctl.errors import BusyError, ConfigError
from flowctl.nodes.rpc import subscription as module
from flowctl.nodes.rpc.peers.peer import CONNECT_KEEP_ALIVE_S, SEND_KEEP_ALIVE_S, Reach
from flowctl.nodes.rpc.peers.reaching import OutgoingConnections
from flowctl.nodes.rpc.subscription import DURATION_S, Subscription

KEY = bytes(32)


class Link:
    def __init__(self, name: str) -> None:
        self.name, self.awaited = name, False

    def is_awaited(self) -> bool:
        return self.awaited


class World:
    """What connections see of the world: who has dialled us, the addresses, and what was looked up and dialled."""

    def __init__(self, address: str = "tcp://there:1") -> None:
        self.incoming: dict[bytes, Link] = {}
        self.address, self.looked_up, self.dialled = address, 0, []
        self.connections = OutgoingConnections(self.incoming.get, self.lookup, self.dial)

    def lookup(self, pubkey: bytes) -> str:
        self.looked_up += 1
        return self.address

    def dial(self, pubkey: bytes, address: str) -> Link | None:
        self.dialled.append(address)
        return Link(address)

    def find(self, now: float = 0.0, **reach: object) -> str | None:
        found = self.connections.find(KEY, Reach(**reach), now)
        return None if found is None else found.name


def test_node_when_there_is_no_connection_is_looked_up_and_dialled_once():
    world = World()
    assert [world.find(), world.find()] == ["tcp://there:1"] * 2
    assert (world.looked_up, world.dialled) == (1, ["tcp://there:1"])


def test_node_when_optional_or_incoming_is_neither_looked_up_nor_dialled():
    """Nothing is opened for what may as well be dropped (OX-71)."""
    world = World()
    assert (world.find(optional=True), world.find(incoming=True), world.looked_up) == (None, None, 0)
    world.find()
    assert (world.find(optional=True), world.find(incoming=True)) == ("tcp://there:1", None)
    world.incoming[KEY] = Link("in")
    assert (world.find(optional=True), world.find(incoming=True)) == ("in", "in")


def test_node_when_it_has_dialled_us_is_reached_so_unless_outgoing_is_asked_for():
    """Outgoing opens a connection of ours beside that which is there (OX-71)."""
    world = World()
    world.incoming[KEY] = Link("in")
    assert (world.find(), world.find(outgoing=True), world.find(outgoing=True)) == (
        "in",
        "tcp://there:1",
        "tcp://there:1",
    )
    assert world.dialled == ["tcp://there:1"]


def test_hint_when_given_is_used_instead_of_the_lookup_and_neither_where_connected():
    """It is looked up by nobody, and once there is a connection the hint has no effect (OX-72)."""
    world = World()
    assert (world.find(hint="tcp://hint:2"), world.find(hint="tcp://other:3")) == ("tcp://hint:2", "tcp://hint:2")
    assert (world.looked_up, world.dialled) == (0, ["tcp://hint:2"])


def test_node_when_nobody_knows_its_address_is_not_reached():
    """Nothing is dialled, and the next try looks again (OX-62)."""
    world = World(address="")
    assert (world.find(), world.find(), world.looked_up, world.dialled) == (None, None, 2, [])


def test_connection_when_idle_ends_after_its_keep_alive_and_not_while_active():
    """What is sent and what comes count; so does an answer that is waited for (OX-73)."""
    world = World()
    world.find(0.0)
    connections = world.connections
    world.find(20.0)
    connections.active(KEY, 35.0)
    assert connections.take_idle(34.9 + SEND_KEEP_ALIVE_S) == []
    link = connections.find(KEY, Reach(), 40.0)
    link.awaited = True
    assert connections.take_idle(1000.0) == []
    link.awaited = False
    assert [item.name for item in connections.take_idle(70.0)] == ["tcp://there:1"]
    assert len(connections) == 0


def test_connection_when_asked_to_be_kept_longer_is_and_shorter_is_not():
    """Five minutes are 300 seconds, and a later message with 30 leaves it at that (OX-73)."""
    world = World()
    world.find(0.0)
    world.find(0.0, keep_alive_s=CONNECT_KEEP_ALIVE_S)
    world.find(10.0, keep_alive_s=1.0)
    assert world.connections.take_idle(309.0) == []
    assert len(world.connections.take_idle(310.0)) == 1


def test_connection_when_it_has_ended_is_dialled_anew():
    world = World()
    world.find()
    connections = world.connections
    connections.forget(KEY, Link("another"))
    assert len(connections) == 1
    assert [item.name for item in connections.take(frozenset([KEY, b"x"]))] == ["tcp://there:1"]
    world.find()
    connections.forget(KEY, connections.find(KEY, Reach(), 0.0))
    assert len(connections) == 0
    world.find()
    assert len(world.dialled) == 3


@pytest.mark.parametrize(
    "wrong", [{"incoming": True, "outgoing": True}, {"keep_alive_s": 0}, {"keep_alive_s": float("nan")}]
)
def test_reach_when_it_contradicts_itself_is_an_error(wrong):
    with pytest.raises(ConfigError):
        Reach(**wrong)


def test_subscription_when_not_prolonged_ends_after_its_time():
    now = [0.0]
    news: Subscription[str, None] = Subscription("news", clock=lambda: now[0])
    assert [news.subscribe(name) for name in ("a", "b", "a")] == [True, True, False]
    now[0] = DURATION_S - 1
    assert not news.subscribe("a")
    now[0] = DURATION_S
    told: list[str] = []
    assert news.publish(lambda conn, _: told.append(conn)) == 1
    assert (told, len(news)) == (["a"], 1)
    now[0] += DURATION_S
    assert news.subscribe("a")  # it was over
    assert (news.unsubscribe("a"), news.unsubscribe("a")) == (True, False)


def test_subscription_when_something_else_is_wanted_is_new_and_tells_that():
    news: Subscription[str, int] = Subscription("news")
    assert [news.subscribe("a", level) for level in (1, 1, 2)] == [True, False, True]
    told: list[tuple[str, int]] = []
    news.publish(lambda *each: told.append(each))
    assert told == [("a", 2)]


def test_subscription_when_the_publisher_changes_it_meanwhile_goes_on():
    news: Subscription[str, None] = Subscription("news")
    for name in "ab":
        news.subscribe(name, None)
    assert news.publish(lambda conn, _: (news.unsubscribe(conn), news.subscribe(conn + "!", None))) == 2
    assert len(news) == 2


def test_subscription_when_full_takes_new_ones_in_place_of_those_that_are_over(monkeypatch):
    monkeypatch.setattr(module, "MOST_SUBSCRIBERS", 2)
    now = [0.0]
    news: Subscription[str, None] = Subscription("news", 10.0, clock=lambda: now[0])
    for name in "ab":
        news.subscribe(name, None)
    with pytest.raises(BusyError, match="news has 2 subscribers"):
        news.subscribe("c", None)
    now[0] = 5.0
    assert not news.subscribe("a", None)
    now[0] = 10.0
    assert news.subscribe("c", None)
    assert (news.remove_expired(), len(news)) == (0, 2)
    with pytest.raises(ConfigError):
        Subscription("news", 0)
