"""What is counted of connections that end while they are looked at."""

from __future__ import annotations

from types import SimpleNamespace

from flowctl.judging.penalties import Allowance, Penalties, PenaltyLimits
from flowctl.live.bans.penalties import POLL_S, PenaltyWatch
from flowctl.reasons import CloseReason


def test_look_when_a_connection_has_ended_meanwhile_counts_nothing_twice():
    """The list of connections is older than the look at each: one that was counted at its end is counted once."""
    verdicts = []
    connection = SimpleNamespace(
        number=1, peer=("192.0.2.1", 1), ended=None, session=SimpleNamespace(asked_count=(0, 60))
    )
    limits = PenaltyLimits(control=Allowance(100, 3600))
    now = [0.0]
    watch = PenaltyWatch(
        Penalties(limits), lambda: [connection], (), lambda job: job(), verdicts.extend, lambda: now[0]
    )
    connection.ended = (CloseReason.PEER_CLOSED, "")
    watch.closed(connection, CloseReason.PEER_CLOSED, "", None, "")
    for _ in range(3):
        now[0] += POLL_S
        watch.look()
    assert verdicts == []
    connection.session.asked_count = (0, 120)  # another one of the same address, which goes over
    connection.number, connection.ended = 2, None
    now[0] += POLL_S
    watch.look()
    assert len(verdicts) == 1
