"""``flowctl replay``: runs a recorded connection again and shows what happened to it, and whether it happens again."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from flowctl.cli.common import print_json
from flowctl.core.flow.policy import POLICIES
from flowctl.core.text.output import say
from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.units import format_bit_rate, format_count, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowctl.errors import DamagedFlightError
    from flowctl.records.flight.reading import Flight
    from flowctl.records.flight.replay import ReplayComparison, ReplayResult
    from flowctl.records.flight.words import FlightRow
    from flowctl.records.telemetry.flightfiles import FlightSummary

_PROGRESS_FLIGHTS: Final = 8
"""Flights from which on a replay shows progress: each takes about as long as its rows take to read."""


def replay(
    flight: Annotated[Path, typer.Argument(metavar="FLIGHT", help="File of flights, or the folder of --events.")],
    *,
    conn: Annotated[int | None, typer.Option(help="Which connection, by its conn_id.")] = None,
    node: Annotated[str | None, typer.Option(help="Of which server, where several have recorded.")] = None,
    replay_all: Annotated[bool, typer.Option("--all", help="Replay every flight, a line for each.")] = False,
    limits: Annotated[
        str | None,
        typer.Option(metavar="B,N[,T][/B,N[,T]]", help="Say what these soft (and hard) limits would have done."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="|".join(POLICIES), help="Say what this drop policy would have done.")
    ] = None,
    target_delay: Annotated[
        str | None, typer.Option(metavar="auto|off|T", help="Say what this target delay would have done.")
    ] = None,
    renditions: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,RATE...",
            help="Say what a set with renditions of these rates would have done; of one rate: no set.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object per flight.")] = False,
) -> None:
    """Run a recorded connection again, and say what happened.

    Every transition is printed with its cause. Several flights are listed; name one with --conn, or --all. Exit status:
    0 the replay brought what was recorded, 1 it diverges or is damaged (with --all the others are replayed all the
    same), 2 wrong use. With --limits, --policy, --target-delay or --renditions the same stream and link are shown to
    another choice, what is not named being as it was in force: the answer comes from the Sender itself, on a link that
    is known only from what it took.
    """
    from flowctl.records.telemetry.flightfiles import Damaged, flight_files, flights_rows, list_flights

    damaged: Damaged | None = {} if replay_all else None
    files = flight_files(flight, damaged)
    there = [
        item
        for item in list_flights(files, damaged)
        if (conn is None or item.conn_id == conn) and (node is None or item.node == node)
    ]
    if not there and not damaged:
        raise ConfigError(f"{flight} holds no such flight", hint=f"flowctl replay {flight} lists what there is")
    choice = _OtherChoice(limits, policy, target_delay, renditions)
    changed = choice != _OtherChoice()
    if len(there) > 1 and not replay_all:
        if changed or conn is not None:
            raise ConfigError(f"{len(there)} flights are meant", hint="name one with --conn and --node, or --all")
        _list(there, as_json=as_json)
        return
    failed = 0
    for summary, rows in _progress(flights_rows(files, there, damaged), len(there)):
        try:
            failed += _replay_one(summary, rows, brief=replay_all, choice=choice if changed else None, as_json=as_json)
        except DamagedFlightError as error:
            if not replay_all:
                raise
            failed += 1
            _show_damaged(summary, error, as_json=as_json)
    for fault in (damaged or {}).values():
        failed += 1
        say(str(fault), to_stderr=True)
    if failed:
        raise typer.Exit(1)


def _show_damaged(summary: FlightSummary, error: DamagedFlightError, *, as_json: bool) -> None:
    """Say, in the place of its result, why one flight of many was not replayed."""
    if as_json:
        print_json({"node": summary.node, "conn_id": summary.conn_id, "error": str(error)})
    else:
        say(f"{summary.conn_id}  {summary.peer_ip or '-'}  {summary.role or '-'}  not replayed: {error}")


def _progress(
    flights: Iterator[tuple[FlightSummary, list[tuple[Any, ...]]]], count: int
) -> Iterator[tuple[FlightSummary, list[tuple[Any, ...]]]]:
    """Pass on the flights with a progress bar on a terminal; elsewhere write a line now and then."""
    if count < _PROGRESS_FLIGHTS:
        yield from flights
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        yield from track(flights, "replaying", total=count, console=console, transient=True)
    else:
        for number, item in enumerate(flights, 1):
            yield item
            if not number % 100:
                say(f"{number} of {count} flights replayed", to_stderr=True)


def _replay_one(
    summary: FlightSummary,
    rows: list[tuple[Any, ...]],
    *,
    brief: bool,
    choice: _OtherChoice | None,
    as_json: bool,
) -> bool:
    from flowctl.records.flight.reading import read_flights
    from flowctl.records.flight.replay import compare
    from flowctl.records.flight.replay import replay as run_again

    flight = read_flights(rows)
    other = None if choice is None else _other_choice(flight, choice, of_many=brief)
    result = run_again(flight)
    comparison = compare(flight, result)
    if as_json:
        print_json(_as_json(flight, result, comparison, other))
    elif brief:
        say(f"{flight.conn_id}  {summary.peer_ip or '-'}  {summary.role or '-'}  {comparison}")
    else:
        _show(flight, summary, comparison)
    if other is not None and not as_json:
        for name, value in other.items():
            say(f"  {name}: {_plain(value)}")
    return not comparison.identical


# -- another choice


class _OtherChoice(NamedTuple):
    """Another choice than the recorded one, as on the command line; None: as it was in force."""

    limits: str | None = None
    policy: str | None = None
    target_delay: str | None = None
    renditions: str | None = None


def _other_choice(flight: Flight, named: _OtherChoice, *, of_many: bool) -> dict[str, Any]:
    """Return what other limits, another policy or target delay would have done with the same stream and link."""
    from flowctl.core.flow.limits import Limits, parse_target_delay
    from flowctl.records.flight.whatif.engine import evaluate, not_known, recorded_viewer
    from flowctl.records.flight.whatif.types import Choice, parse_renditions, policy_name
    from flowctl.records.flight.whatif.viewing import in_force, stream_and_link

    soft, slash, hard = (named.limits or "").partition("/")
    limits, policy = in_force(flight)
    target_ms = limits.target_delay_ms
    if named.target_delay is not None:
        target_ms = parse_target_delay(named.target_delay, "--target-delay")
    other = None if named.limits is None else Limits.parse(soft, hard if slash else None, target_delay_ms=target_ms)
    chosen = other or replace(limits, target_delay_ms=target_ms)
    conditions = stream_and_link(flight)
    if not any(item >= 0 for _, item, _ in conditions.events):
        if of_many:
            return {"choice": None, "why": "it followed no stream"}
        raise ConfigError(f"{flight} followed no stream", hint="other choices are for viewers")
    settings = flight.settings
    choice = Choice(
        limits=chosen,
        policy=named.policy or policy_name(policy),
        soft_too_long_s=settings.soft_too_long_s,
        stuck_s=settings.stuck_s,
        return_after_s=settings.return_after_s,
        renditions=parse_renditions(named.renditions) if named.renditions else (),
    )
    viewer = recorded_viewer(**conditions._asdict())
    (outcome,) = evaluate(viewer, [choice])
    return {
        "choice": str(choice),
        "closed": None if outcome.closed is None else outcome.closed.value,
        "watched_s": round(outcome.watched_s, 3),
        "assumed_from_s": viewer.assumed_from,
        "edges": outcome.edges,
        "dropped_messages": sum(outcome.dropped_messages),
        "dropped_by_reason": dict(outcome.dropped_by_reason),
        "pictures_share": round(outcome.pictures_share, 3),
        "rendition_s": {
            format_bit_rate(rate): round(seconds, 1)
            for rate, seconds in zip(choice.renditions, outcome.rendition_s, strict=True)
        },
        "switches": outcome.switches if choice.renditions else len(viewer.switched),
        "returns": outcome.returns,
        "delay_p95_ms": round(outcome.delay_ms(0.95), 1),
        "memory_peak_bytes": outcome.memory_peak_bytes,
        "not_known": not_known(viewer, choice),
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return "none" if value is None else str(value)


# -- what is shown


def _list(there: list[FlightSummary], *, as_json: bool) -> None:
    from flowctl.records.telemetry.flightfiles import as_json as as_values

    if as_json:
        for item in there:
            print_json(as_values(item))
        return
    say(f"{'conn_id':>22}  {'began':<24} {'lasted':>8} {'rows':>8} {'edges':>6} {'dropped':>8}  peer, role, end")
    for item in there:
        end = item.close_reason or item.end or "cut off"
        say(
            f"{item.conn_id:>22}  {item.began_at[:23]:<24} {item.duration_s:>7.1f}s {item.rows:>8} "
            f"{item.transitions:>6} {item.dropped_messages:>8}  {item.peer_ip or '-'}, {item.role or '-'}, {end}"
        )


def _show(flight: Flight, summary: FlightSummary, comparison: ReplayComparison) -> None:
    where = f"{summary.peer_ip or 'unknown peer'}, {summary.role or 'unknown role'} {summary.stream}".strip()
    say(f"{flight}: {where}, began {summary.began_at or 'unknown'}, {flight.duration_s:.1f} s")
    say(f"limits: {flight.limits}")
    for row in flight.rows:
        line = _line(row)
        if line:
            say(f"{row.offset_us / 1e6:>13.6f} s  {line}")
    say(str(comparison))


def _line(row: FlightRow) -> str:
    """Return what came out of the core, or a switch between renditions, in one line. "": there is nothing to show."""
    from flowctl.core.flow.ledger import describe_edge
    from flowctl.core.flow.limits import Axis
    from flowctl.core.flow.state import Cause
    from flowctl.records.telemetry.schema import FlightKind

    match row.kind:
        case FlightKind.STATE.value:
            axis = None if row.axis is None else Axis(row.axis)
            why = describe_edge(Cause(row.cause), axis, row.value, row.limit)
            count, oldest_s = format_count(row.queued_messages or 0, "message"), (row.queued_age_ms or 0) / 1000
            queue = f"queued {format_size(row.queued_bytes or 0)} in {count}, oldest {format_duration(oldest_s)}"
            return f"{row.state_from} -> {row.state_to}: {why}; {queue}"
        case FlightKind.DROPPED.value:
            shares = f"; {row.reason}" if row.reason else ""
            what = f"{format_count(row.dropped_messages or 0, 'message')}, {format_size(row.dropped_bytes or 0)}"
            return f"dropped {what}: {_reasons(row)}{shares}"
        case FlightKind.LATE.value:
            return row.reason or ""
        case FlightKind.RETURN.value:
            return f"returned to live: {row.value or 0:.0f} ms of delay removed"
        case FlightKind.CLOSE.value:
            return f"closed: {row.reason}"
        case FlightKind.CALL.value if row.reason == "switched":
            return str(_detail(row).get("why"))
        case _:
            return ""


def _detail(row: FlightRow) -> dict[str, Any]:
    from flowctl.records.flight.words import detail_of

    try:
        return detail_of(row.detail)
    except ValueError as error:
        raise DamagedFlightError(f"row {row.number} cannot be read: {error!r}") from error


def _reasons(row: FlightRow) -> str:
    parts = []
    try:
        for reason, classes in _detail(row).items():
            what = ", ".join(f"{count} {name}" for name, (count, _) in classes.items())
            parts.append(f"{reason} {what}")
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFlightError(f"row {row.number} cannot be read: {error!r}") from error
    return "; ".join(parts)


def _as_json(
    flight: Flight, result: ReplayResult, comparison: ReplayComparison, other: dict[str, Any] | None
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "node": flight.node,
        "conn_id": flight.conn_id,
        "duration_s": flight.duration_s,
        "rows": len(flight.rows),
        **dataclasses.asdict(comparison),
        "outputs": [
            {name: value for name, value in row._asdict().items() if value is not None and name != "number"}
            for row in result.outputs
        ],
        "figures": result.figures,
    }
    return values if other is None else values | {"other_choice": other}


def add_to(app: typer.Typer) -> None:
    app.command("replay")(replay)
