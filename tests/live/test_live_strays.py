"""Connections of probes and scanners: the first of a kind is told of, the others are counted."""

from __future__ import annotations

import pytest
from live_kit import World
from structlog.testing import capture_logs

from flowctl.core.text.addresses import network_of
from flowctl.live import strays
from flowctl.live.strays import QUIET_S, TOLD_EACH_S, Strays


class Stage:
    """Strays on a clock that is turned by hand."""

    def __init__(self) -> None:
        self.now, self.calls, self.heard = 0.0, [], []
        self.strays = Strays(lambda: self.now, lambda delay, call: self.calls.append((self.now + delay, call)))
        self.strays.tell = lambda kind, count: self.heard.append((kind.network, kind.why, count))

    def comes(self, host="192.0.2.1", why="silent"):
        return self.strays.is_first(host, "rtmp", why)

    def run(self, seconds, each_s=0.0):
        """Let time pass; with `each_s` one comes so often."""
        end, next_s = self.now + seconds, self.now + (each_s or 2 * seconds)
        while (then := min([end, next_s, *(when for when, _ in self.calls)])) < end:
            self.now = then
            if then == next_s:
                assert not self.comes()
                next_s += each_s
                continue
            due = min(self.calls, key=lambda call: call[0])
            self.calls.remove(due)
            due[1]()
        self.now = end


def test_strays_when_many_come_are_told_once_and_counted_when_it_is_over():
    stage = Stage()
    assert [stage.comes() for _ in range(100)] == [True] + [False] * 99
    assert stage.heard == []
    stage.run(QUIET_S + 120)
    assert stage.heard == [("192.0.2.0/24", "silent", 99)]
    assert stage.calls == []
    assert stage.comes()


def test_strays_when_they_never_end_are_counted_each_hour():
    """A balancer, every five seconds, for a day."""
    stage = Stage()
    assert stage.comes()
    stage.run(24 * TOLD_EACH_S, each_s=5.0)
    assert 23 <= len(stage.heard) <= 24
    stage.run(2 * QUIET_S)
    assert 24 <= len(stage.heard) <= 25
    assert sum(count for *_, count in stage.heard) == 24 * TOLD_EACH_S / 5.0 - 1


def test_strays_when_network_or_kind_differ_are_told_apart():
    stage = Stage()
    assert stage.comes("192.0.2.1")
    assert not stage.comes("192.0.2.200")
    assert stage.comes("198.51.100.1")
    assert stage.comes("2001:db8:1:2::1")
    assert not stage.comes("2001:db8:1:3::9")
    assert stage.comes(why="nothing asked")
    assert stage.comes("/run/a.sock")
    assert not stage.comes("/run/a.sock")


def test_strays_when_too_many_networks_send_some_forget_those_silent_longest(monkeypatch):
    monkeypatch.setattr(strays, "_MOST_EPISODES", 2)
    stage = Stage()
    for host in ("192.0.2.1", "192.0.2.1", "198.51.100.1", "203.0.113.1"):
        stage.comes(host)
    assert stage.heard == [("192.0.2.0/24", "silent", 1)]
    assert len(stage.strays._episodes) == 2


def test_strays_when_the_server_stops_are_told():
    stage = Stage()
    stage.comes()
    stage.strays.stop()
    assert stage.heard == []
    for _ in range(3):
        stage.comes()
    stage.strays.stop()
    assert stage.heard == [("192.0.2.0/24", "silent", 2)]
    stage.run(QUIET_S)
    assert len(stage.heard) == 1


@pytest.mark.parametrize(
    ("octets", "lines"),
    [
        (b"", 1),
        (b"GET / HTTP/1.1\r\n\r\n", 1),  # the handshake begins with another octet
        (b"\x03" + bytes(100), 1),
    ],
)
def test_connections_when_they_ask_for_nothing_have_one_line_together(octets, lines):
    world = World()
    with capture_logs() as logs:
        for _ in range(20):
            peer = world.connect()
            if octets:
                peer.send(octets)
            peer.vanish()
            world.run()
    assert len([line for line in logs if line["event"] == "connection closed"]) == lines


def test_players_when_they_come_and_go_have_a_line_each():
    world = World()
    with capture_logs() as logs:
        for _ in range(3):
            world.player().vanish()
            world.run()
    assert len([line for line in logs if line["event"] == "connection closed"]) == 3


def test_network_of_what_is_none_is_itself():
    assert network_of("/run/a.sock") == "/run/a.sock"
    assert network_of("::ffff:192.0.2.7") == "192.0.2.0/24"
