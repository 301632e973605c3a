"""Which connections are recorded: by share, by address, on demand, and never more than are allowed at once."""

from __future__ import annotations

import pytest
from flight_kit import Rows

from flowctl.connection import Connection, Session
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason
from flowctl.records.flight.flights import Flights
from flowctl.records.flight.options import FlightOptions, parse_networks
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import Identity
from flowctl.testing import ManualGroup, ManualHost, ScriptedTransport
from flowctl.testing.driving import MemoryWire


class Peer(ManualHost):
    """A host with what a connection has besides."""

    def __init__(self, number, address="127.0.0.1"):
        super().__init__()
        self.number = number
        self.peer = (address, 1000)


def make(rows=None, **options):
    return Flights(
        FlightOptions(**options),
        Rows() if rows is None else rows,
        lambda number, peer, now: Identity(conn_id=number, began_at_us=int(now), peer_ip=peer[0]),
    )


def recorded(flights, number, address="127.0.0.1"):
    sender = flights.make_sender(Peer(number, address), ScriptedTransport())
    return sender if isinstance(sender, RecordedSender) else None


def watching(flights, number):
    """Return a recorded Sender that follows a stream; None: there was no place."""
    sender = recorded(flights, number)
    if sender is not None:
        sender.follow(Fanout(StreamLog("s"), ManualGroup()))
    return sender


def test_recorded_sender_when_of_a_connection_is_recorded_as_its():
    identities = []

    def identify(number, peer, now):
        identities.append((number, peer))
        return Identity(conn_id=number, began_at_us=int(now))

    flights = Flights(FlightOptions(share=1.0), Rows(), identify)
    wires = [MemoryWire(("192.0.2.7", port)) for port in (1000, 1001)]
    ends = [Connection(wire, Session(), make_sender=flights.make_sender) for wire in wires]
    assert identities == [(end.number, wire.peer) for end, wire in zip(ends, wires, strict=True)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_share_when_given_is_that_of_the_connections(share):
    flights = make(share=share)
    chosen = [number for number in range(1, 20_001) if flights.wanted(number, "127.0.0.1")]
    assert abs(len(chosen) - 20_000 * share) <= 10
    if share:
        assert abs(sum(number <= 10_000 for number in chosen) - 10_000 * share) <= 10


def test_addresses_when_given_are_all_recorded():
    flights = make(share=0.0, addresses=parse_networks("127.0.0.9, 10.0.0.0/8,2001:db8::/32"))
    for address in ("127.0.0.9", "10.200.1.1", "2001:db8::5", "::ffff:10.1.1.1"):
        assert flights.wanted(1, address), address
    for address in ("127.0.0.8", "11.0.0.1", "2001:db9::5", "", "fe80::1%eth0"):
        assert not flights.wanted(1, address), address


def test_connections_when_asked_for_are_the_next_ones():
    flights = make(share=0.0)
    assert recorded(flights, 1) is None
    flights.record_next(2)
    assert [recorded(flights, number) is not None for number in (2, 3, 4)] == [True, True, False]
    with pytest.raises(ConfigError):
        flights.record_next(-1)


def test_flights_when_too_many_are_open_are_passed_over():
    flights = make(share=1.0, most_at_once=2)
    senders = [watching(flights, number) for number in range(3)]
    assert [sender is not None for sender in senders] == [True, True, False]
    senders[0].close(CloseReason.KICKED)
    fourth = recorded(flights, 4)
    assert fourth is not None


def test_flights_when_all_are_of_peers_that_follow_nothing_make_room_for_newcomers():
    """Connections that say nothing cost their owner nothing, however often they come again."""
    flights = make(most_at_once=3)
    playing, first, second = watching(flights, 0), recorded(flights, 1), recorded(flights, 2)
    second.tape.began_us += 1  # it came later
    assert recorded(flights, 3) is not None
    assert [sender.recording for sender in (playing, first, second)] == [True, False, True]
    assert not first.closed
    for number in range(4, 100):  # none of them takes the place of one that watches
        assert recorded(flights, number) is not None
    assert playing.recording


def test_flights_when_the_recorder_is_full_are_cut():
    rows = Rows(room=1)
    flights = make(rows, share=1.0)
    sender = recorded(flights, 1)
    sender.flush()
    sender.flush()
    assert len(rows) == 1
    assert not sender.recording


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 1.5}, "share of recorded connections is 1.5"),
        ({"most_at_once": 0}, "flights_at_once is 0"),
        (
            {"addresses": tuple(parse_networks(",".join(f"10.0.{item}.0/24" for item in range(200)))) * 2},
            "400 networks",
        ),
    ],
)
def test_options_when_out_of_range_name_field_and_limit(options, words):
    with pytest.raises(ConfigError, match=words):
        FlightOptions(**options)


def test_networks_when_one_is_none_is_refused():
    with pytest.raises(ConfigError, match="'somewhere' is no address"):
        parse_networks("10.0.0.1,somewhere")
