"""Flights of a live server: the settings of the command line, and what ties the flight recorder to the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.flight.flights import FlightOptions, Flights, parse_networks
from flowctl.flight.recorded import RecordedSender
from flowctl.flight.tape import Identity
from flowctl.sender import Sender
from flowctl.server.program import ServeOptions
from flowctl.telemetry.events import Events
from flowctl.telemetry.schema import FLIGHT
from flowctl.units import parse_duration

FLIGHTS_PREFIX: Final = "flights_"
FLIGHTS_SETTINGS: Final = {
    "flights_addresses": "flights: addresses and networks whose connections are all recorded (127.0.0.9,10.0.0.0/8)",
    "flights_at_once": "flights: connections recorded at a time (50)",
    "flights_rows": "flights: rows of one flight, then it ends (2000000)",
    "flights_time": "flights: length of one flight, then it ends (1h)",
}
_MOST_DIGITS: Final = 9


def flight_options(options: ServeOptions) -> FlightOptions:
    """Return which connections are recorded.

    Args:
        options: those of the command line; the settings are in `extra`.

    Raises:
        ConfigError: a setting has a wrong value, or flights are asked for and nothing is recorded.
    """
    given = {name: text for name, text in options.extra.items() if name.startswith(FLIGHTS_PREFIX)}
    if options.events is None and (given or options.flights):
        what = "--flights" if options.flights else min(given)
        raise ConfigError(f"{what} is set, but nothing is recorded", hint="give --events FOLDER as well")
    values: dict[str, Any] = {"share": options.flights}
    if "flights_addresses" in given:
        values["addresses"] = parse_networks(given["flights_addresses"])
    for name, field in (("flights_at_once", "most_at_once"), ("flights_rows", "most_rows")):
        if name in given:
            values[field] = _whole(given, name)
    if "flights_time" in given:
        values["most_s"] = parse_duration(given["flights_time"], "flights_time")
    return FlightOptions(**values)


def _whole(given: Mapping[str, str], name: str) -> int:
    text = given[name]
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{name} is {text!r}, it must be a whole number")
    return int(text)


def make_flights(options: FlightOptions, events: Events) -> Flights:
    """Return the flight recorder of a server, which writes beside `events`.

    Args:
        options: which connections are recorded.
        events: of the server: names, addresses and times are as there.
    """

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
    """Let the flight of a connection, if it is recorded, say whose stream it is about.

    Args:
        sender: of the connection.
        who: address, port, role, application and stream, as records show them.
    """
    if isinstance(sender, RecordedSender):
        sender.describe(who[2], who[3], who[4])
