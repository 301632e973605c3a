"""Files of flights for the tests of jobs: recorded inputs of real Senders, one server and file per viewer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "flight"))
from flight_kit import ROOMS, Rows, linked

from flowctl.telemetry.schema import FLIGHT

AT = {name: FLIGHT.names.index(name) for name in ("node", "conn_id", "role")}


def write_flights(root: Path) -> dict[int, bool]:
    """Write the flights of three viewers of as many servers; return which connections were cut."""
    folder = root / "flight" / "date=2023-11-14" / "hour=22"
    folder.mkdir(parents=True)
    cut = {}
    for number, kind in enumerate(("cut by age", "cut by age", "refused for half a second"), 100):
        rows, part = linked("0,0,1s", "0,0,1s", ROOMS[kind][2]).rows, Rows()
        for row in rows:
            cells = list(row)
            cells[AT["node"]], cells[AT["conn_id"]], cells[AT["role"]] = f"node-{number}", number, "play"
            part.append(tuple(cells))
        part.write(folder / f"n-1-{number}.parquet", uid=f"u{number}", node=f"node-{number}", table="flight", format=1)
        cut[number] = kind.startswith("cut")
    return cut
