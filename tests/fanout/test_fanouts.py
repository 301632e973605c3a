"""Places of connections among the viewers of logs."""

from __future__ import annotations

import pytest
from connection_kit import Noting, ask, failures, groups, link, wait_until

from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.errors import LocalProtocolError

__all__ = ["failures", "groups", "link"]  # fixtures


def test_follow_when_refused_leaves_the_first_place_as_it_was(link, groups):
    session = Noting()
    connection, peer = link(session)
    wait_until(lambda: session.calls)
    first, second = Fanouts(StreamLog("one"), flush_interval_s=0), Fanouts(StreamLog("two"), flush_interval_s=0)
    place = ask(connection, lambda: FollowPlace(connection, first))

    def refused() -> None:
        with pytest.raises(LocalProtocolError):
            FollowPlace(connection, second)

    ask(connection, refused)
    assert connection.place is place
    assert second.active == []
    assert groups[0].migrate(connection, groups[1])
    wait_until(lambda: connection.group is groups[1])
    ask(connection, lambda: first.log.append(b"still here", MessageClass.KEY, connection.now()))
    assert peer.recv(100) == b"still here"
    ask(connection, place.end)
    assert connection.place is None
    assert connection.sender.following is None
    wait_until(lambda: first.active == [])


def test_end_when_another_place_has_followed_is_harmless(link):
    session = Noting()
    connection, _ = link(session)
    wait_until(lambda: session.calls)
    logs = [Fanouts(StreamLog(name), flush_interval_s=0) for name in ("one", "two")]
    first = ask(connection, lambda: FollowPlace(connection, logs[0]))
    ask(connection, first.end)
    second = ask(connection, lambda: FollowPlace(connection, logs[1]))
    ask(connection, first.end)
    assert connection.place is second
    assert connection.sender.following is logs[1].log
