"""Files of flights for the tests of jobs: recorded inputs of real Senders, one server and file per viewer."""

from __future__ import annotations

from pathlib import Path

from flight_kit import ROOMS, Rows, linked

from flowctl.analyze.whatif.grid import in_force
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.whatif.engine import evaluate, recorded_viewer
from flowctl.records.flight.whatif.types import RecordedViewer
from flowctl.records.flight.whatif.viewing import stream_and_link
from flowctl.records.telemetry.schema import FLIGHT, FORMAT

LIMITS = ("6000,0,2s", "9000,0,3s")
AT = {name: FLIGHT.names.index(name) for name in ("node", "conn_id", "role", "peer_ip")}


def flight_viewer(rows, extend_s: float) -> RecordedViewer:
    """Return the viewer of a flight as a whole, extended where the server closed it for being slow."""
    found = stream_and_link(read_flights(rows))
    return recorded_viewer(extend_s=extend_s, **found._asdict())


def write_flights(root: Path) -> dict[int, tuple[bool, int, int]]:
    folder = root / "flight" / "date=2023-11-14" / "hour=22"
    folder.mkdir(parents=True)
    found = {}
    kinds = ("cut by age", "cut while joining", "refused for half a second", "thinned and back", "always a little")
    for number, kind in enumerate(kinds, 100):
        viewer = linked(*LIMITS, ROOMS[kind][2])
        rows, part = viewer.rows, Rows()
        for row in rows:
            cells = list(row)
            cells[AT["node"]], cells[AT["conn_id"]], cells[AT["role"]] = f"node-{number}", number, "play"
            cells[AT["peer_ip"]] = f"198.51.100.{number - 90}"
            part.append(tuple(cells))
        part.write(
            folder / f"n-1-{number}.parquet", uid=f"u{number}", node=f"node-{number}", table="flight", format=FORMAT
        )
        figures, all_rows = viewer.sender.statistics(), rows.stored()
        (outcome,) = evaluate(flight_viewer(all_rows, 0.0), [in_force(all_rows[0]["detail"])])
        found[number] = (figures.close_reason is not None, figures.transitions, round(outcome.stall_s * 1e6))
    return found
