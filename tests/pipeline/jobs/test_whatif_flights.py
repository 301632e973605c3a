"""The job whatif over flights: files of real Senders' inputs, through Spark, to what each choice would have done."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from flight_files import write_flights

pytestmark = pytest.mark.timeout(600)


def test_job_when_flights_were_recorded_finds_what_was_done(spark, tmp_path):
    """Over flights in files, on Spark: the choice in force cuts the viewers that were cut, another one does not."""
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    recorded = write_flights(tmp_path / "events")
    grid = 'soft = ["0,0,20s"]\nhard = ["0,0,60s"]\ntarget_delay = "off"\n'
    result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), WhatifOptions(grid=grid, extend_s=0))
    result.check()
    rows = spark.read.parquet(str(tmp_path / "out/whatif_choices")).collect()
    by_force = {row["in_force"]: row for row in rows}
    cut = sum(closed for closed, _, _ in recorded.values())
    assert (by_force[True]["viewers"], by_force[True]["disconnected"]) == (len(recorded), cut)
    assert 0 < cut < len(recorded)
    assert by_force[False]["disconnected"] == 0
    viewers = spark.read.parquet(str(tmp_path / "out/whatif_viewers")).collect()
    assert {row["source"] for row in viewers} == {"flight"}
    in_force = by_force[True]["choice_id"]
    again = {
        row["conn_id"]: (row["closed"] is not None, row["edges"], row["stall_us"])
        for row in viewers
        if row["choice_id"] == in_force
    }
    assert again == recorded
