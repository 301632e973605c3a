"""The other claims of the pipeline, each measured by running the job: abusers found, latency of `watch`.

What is not measured is a row that says why, never one that is left out in silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROUNDS: Final = 8
"""Bans per trigger that `watch` is timed over."""
PATIENCE_S: Final = 120.0
TRIGGERS: Final = ("1s", "5s")
_ATTACK: Final = {"event": "limit_hit", "axis": "control_messages_per_second", "value": 500.0, "limit": 100.0}

Engine = Callable[..., dict[str, Any]]


def rows(events: Path, folder: Path, count: int, parts: Any, engine: Engine) -> list[dict[str, Any]]:
    """Return one row per claim."""
    found = []
    claims: dict[str, Callable[[], dict[str, Any]]] = {
        "abuse": lambda: abuse(events, folder, engine),
        **{f"watch/{trigger}": (lambda t=trigger: watch(folder, t)) for trigger in TRIGGERS},  # type: ignore[misc]  # a lambda with a default has no inferred type
    }
    for name, measure in claims.items():
        try:
            part = parts.get(f"{count}/{name}", measure)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            part = {"what": name, "figure": f"not measured: {error}"[:200], "how": ""}
        found.append({"kind": "more", **part})
    return found


def abuse(events: Path, folder: Path, engine: Engine) -> dict[str, Any]:
    """Run `abuse` and compare its bans with who was planted."""
    conf = {"spark.local.dir": str(folder / "local")}
    done = engine("abuse", events, folder / "out-abuse", heap="2g", conf=conf)
    found = done["result"]
    return {
        "what": "`abuse`: addresses of abusers found, addresses of honest clients banned",
        "figure": f"{found['found']} of {found['abusive_addresses']}, "
        f"{found['honest_banned']} of {found['honest_addresses']}",
        "how": f"{done['wall_s']:.0f} s, first run in a session",
    }


def watch(folder: Path, trigger: str) -> dict[str, Any]:
    """Time from a file of evidence being complete to the ban standing in ``bans.jsonl``, with a real process."""
    place = Path(tempfile.mkdtemp(prefix="watch-", dir=folder))
    events, out = place / "events", place / "out"
    command = [
        sys.executable,
        "-m",
        "flowctl",
        "analyze",
        "watch",
        str(events),
        "--out",
        str(out),
        "--trigger",
        trigger,
    ]
    with (place / "log").open("wb") as log:
        child = subprocess.Popen([*command, "--master", "local[2]"], stdout=log, stderr=log, start_new_session=True)
        try:
            write_evidence(events, 0)
            wait_for_ban(out, 0, child)  # compiling and the first batch are not what is asked
            took = []
            for number in range(1, ROUNDS + 1):
                time.sleep(number * 0.37 % 1.0)  # so that evidence comes at all places between two triggers
                done = write_evidence(events, number)
                took.append(wait_for_ban(out, number, child) - done)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    shutil.rmtree(place, ignore_errors=True)
    return {
        "what": f"`watch --trigger {trigger}`: from the file of evidence to the ban, median and longest of {ROUNDS}",
        "figure": f"{statistics.median(took):.1f} s, {max(took):.1f} s",
        "how": "a real process, files of one record",
    }


def address_of(number: int) -> str:
    """Return the address of attacker `number`: in a subnet of its own, for eight in one are banned as one."""
    return f"203.0.{number + 1}.113"


def write_evidence(events: Path, number: int) -> float:
    """Write a file as a recorder does, with one proof of abuse; return when it was complete."""
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    from flowctl.records.telemetry.schema import ARROW_TYPES, FLOW_EVENTS, conn_id_of

    now = dt.datetime.now(dt.UTC)
    row = {
        "ts": now, "node": "bench", "seq": time.time_ns() // 1000, "conn_id": conn_id_of(int(time.time()), number + 1),
        "peer_ip": address_of(number), "peer_port": 40000, "role": "publish", **_ATTACK,
    }  # fmt: skip
    kinds = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string(), "bool": pa.bool_()}
    fields = [
        (column.name, kinds.get(ARROW_TYPES[column.kind], pa.timestamp("us", tz="UTC")))
        for column in FLOW_EVENTS.columns
    ]
    table = pa.Table.from_pylist([row], schema=pa.schema(fields))
    hour = events / "flow_events" / f"date={now:%Y-%m-%d}" / f"hour={now:%H}"
    hour.mkdir(parents=True, exist_ok=True)
    beside = hour / f".bench-{number}.tmp"
    pq.write_table(table, beside, compression="zstd")
    beside.rename(hour / f"bench-{number}.parquet")
    return time.monotonic()


def wait_for_ban(out: Path, number: int, child: subprocess.Popen[bytes]) -> float:
    """Return when the ban of attacker `number` stands in the list."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            bans = [json.loads(line) for line in (out / "bans.jsonl").read_text("utf-8").splitlines()]
            if any(ban["cidr"].partition("/")[0] == address_of(number) for ban in bans):
                return time.monotonic()
        if child.poll() is not None:
            raise RuntimeError(f"watch ended with {child.returncode}")
        time.sleep(0.02)
    raise RuntimeError(f"no ban of {address_of(number)} within {PATIENCE_S:g} s")
