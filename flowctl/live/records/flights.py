"""Flights of a live server: what ties the flight recorder to the records."""

from __future__ import annotations

from collections.abc import Callable

from flowctl.records.flight.flights import Flights
from flowctl.records.flight.options import FlightOptions
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import Identity
from flowctl.records.telemetry.events import Events
from flowctl.records.telemetry.schema import FLIGHT
from flowctl.sender import Sender


def make_flights(options: FlightOptions, events: Events) -> Flights:
    def identity(number: int, peer: tuple[str, int], now: float) -> Identity:
        return Identity(
            conn_id=events.conn_id(number),
            began_at_us=events.wall.us(now),
            peer_ip=events.privacy.address(peer[0]),
            peer_port=peer[1],
        )

    put: Callable[[tuple[object, ...]], bool] = events.recorder.lane(FLIGHT).put
    return Flights(options, put, identity)


def name_flight(sender: Sender, who: tuple[str | None, int | None, str | None, str | None, str | None]) -> None:
    if isinstance(sender, RecordedSender):
        sender.describe(who[2], who[3], who[4])
