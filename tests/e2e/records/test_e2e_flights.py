"""Flights over real sockets: every recorded connection of a live server replays to the last bit.

Slow, stalled and healthy players, a publisher, and connections that move between two threads: whatever happened, the
real Sender does it again from the record.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from e2e_kit import connection_to, wait_for_end, wait_for_viewers, wait_until

from flowctl.core.flow.limits import Limits
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.records.flight.options import FlightOptions, parse_networks
from flowctl.records.flight.replay import compare, read_flight, replay
from flowctl.records.telemetry.flightfiles import flight_files, list_flights
from flowctl.records.telemetry.options import EventsOptions, RecordedStreams
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource

SOURCE = SyntheticSource(video_bit_rate=2_000_000, key_interval_s=1.0)
SMALL = SocketOptions(notsent_lowat_bytes=16 * 1024, send_buffer_bytes=16 * 1024)
LIMITS = Limits.parse("120KiB,90,1500ms", "8MiB,9000,60s")
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0)
SLOW = PlayProfile(rate=500_000, resume_after_s=4.0)
STALLS = PlayProfile(stall_after_s=1.0, resume_after_s=4.0)
PLAIN = {"streams": RecordedStreams.PLAIN, "rotate_s": 1.0}


def check_all(folder):
    """Replay every flight in `folder`; return (flight, comparison) by role."""
    found = {}
    for summary in list_flights(flight_files(folder)):
        flight = read_flight(folder, summary.conn_id, summary.node)
        comparison = compare(flight, replay(flight))
        assert comparison.identical, f"{flight}: {comparison}"
        found.setdefault(flight.role, []).append((flight, comparison))
    return found


def test_flights_when_viewers_are_slow_on_two_threads_replay_identically(live, clients, tmp_path):
    server = live(
        group_count=2,
        limits=LIMITS,
        settings=TIMELESS,
        socket_options=SMALL,
        events=EventsOptions(folder=str(tmp_path), **PLAIN),
        flights=FlightOptions(share=1.0),
    )
    slow = [clients.play(server, profile) for profile in (SLOW, SLOW, STALLS, STALLS)]
    healthy = [clients.play(server) for _ in range(3)]
    wait_for_viewers(server, 7)
    publishing = clients.publish(server, SOURCE, pace=1.0, duration_s=6.0)
    wait_until(lambda: publishing.messages, "the first frame")
    ends = [connection_to(server, client) for client in (slow[0], slow[2], healthy[0])]
    moves = 0
    first, second = server.groups.groups
    while publishing.end is None:
        seen = len(publishing.messages)
        for end in ends:
            group = end.group
            moves += group is not None and group.migrate(end.core, second if group is first else first)
        wait_until(lambda seen=seen: len(publishing.messages) > seen + 20 or publishing.end is not None, "more frames")
    wait_for_end(publishing, *slow, *healthy)
    for player in healthy:
        assert player.messages == publishing.messages
    assert server.stop()
    found = check_all(tmp_path)
    assert len(found["play"]) == 7
    assert len(found["publish"]) == 1
    assert all(flight.complete for flight, _ in found["play"])
    assert moves > 10
    assert sum(any(row.reason == "resume_following" for row in flight.rows) for flight, _ in found["play"]) == 3
    troubled = [comparison for _, comparison in found["play"] if comparison.transitions]
    assert len(troubled) >= 4
    assert sum(comparison.dropped_messages for comparison in troubled) > 0
    assert {flight.stream for flight, _ in found["play"]} == {"stream"}


def test_flights_when_asked_for_by_address_or_ahead_are_of_those_alone(live, clients, tmp_path):
    server = live(
        events=EventsOptions(folder=str(tmp_path), **PLAIN),
        flights=FlightOptions(share=0.0, addresses=parse_networks("127.0.0.77")),
    )
    first = clients.play(server)
    wait_for_viewers(server, 1)
    server.flights.record_next(1)
    second = clients.play(server)
    wait_for_viewers(server, 2)
    publishing = clients.publish(server, SOURCE, pace=4.0, duration_s=2.0)
    wait_for_end(publishing, first, second)
    assert first.messages == second.messages == publishing.messages
    assert server.stop()
    found = check_all(tmp_path)
    assert [len(flights) for flights in found.values()] == [1]
    assert found["play"][0][0].figures["bytes_sent"] > 0


def test_flights_when_the_server_is_killed_replay_up_to_what_was_written(clients, tmp_path):
    command = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())", "serve", "live"]
    command += ["--port", "0", "--json", "--events", str(tmp_path), "--flights", "100%", "--set", "events_rotate=500ms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            port = json.loads(process.stdout.readline())["port"]
            server = type("Elsewhere", (), {"address": ("127.0.0.1", port)})
            player = clients.play(server)
            publishing = clients.publish(server, SOURCE, pace=1.0, duration_s=20.0)
            wait_until(lambda: len(player.messages) > 40, "media")
            written = tmp_path / "flight"
            wait_until(lambda: len(list(written.rglob("[!.]*.parquet"))) >= 2, "two files of flights")
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    wait_for_end(publishing, player)
    found = check_all(tmp_path)
    flights = [flight for pairs in found.values() for flight, _ in pairs]
    assert flights
    assert any(not flight.complete and len(flight.rows) > 50 for flight in flights)
