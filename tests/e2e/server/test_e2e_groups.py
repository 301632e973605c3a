"""Viewers on different threads of the server, and connections that move between the threads in mid-stream."""

from __future__ import annotations

import itertools

from e2e_kit import connection_to, wait_for_end, wait_for_viewers, wait_until

from flowctl.wire.media.synthetic import SyntheticSource

SOURCE = SyntheticSource(video_bit_rate=4_000_000, fps=60.0, key_interval_s=0.5)
VIEWERS = 4


def move(connection, groups):
    """Send a connection to the other one of two groups; return whether it went (it may still be on its way)."""
    source = connection.group
    return source is not None and source.migrate(connection.core, groups[1 - groups.index(source)])


def test_no_octet_is_lost_when_connections_move_in_mid_stream(live, clients):
    server = live(group_count=2)
    players = [clients.play(server) for _ in range(VIEWERS)]
    wait_for_viewers(server, VIEWERS)
    publishing = clients.publish(server, SOURCE, pace=1.0, duration_s=4.0)
    wait_until(lambda: publishing.messages, "the first frame")
    ends = [connection_to(server, client) for client in (publishing, *players)]
    moves = dict.fromkeys(ends, 0)
    for index, end in itertools.cycle(enumerate(ends)):
        if publishing.end is not None:
            break
        seen = len(publishing.messages)
        moves[end] += move(end, server.groups.groups)
        if index % 2:  # now and then two move at once, in opposite directions
            wait_until(lambda seen=seen: len(publishing.messages) > seen or publishing.end is not None, "more frames")
    wait_for_end(publishing, *players)
    assert min(moves.values()) >= 10
    for player in players:
        assert publishing.messages == player.messages
