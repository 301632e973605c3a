"""The jobs on a real cluster: a master and two workers of Spark on loopback give the very tables that ``local`` gives.

So does DuckDB, without Java.

Tables are compared row by row and value by value, floats too: a sum of floats depends on its order, and a cluster adds
up in another one. So jobs add in whole numbers, and this is where it shows if one does not. Only quantiles of Spark's
sketches depend on chance, where a row is of more values than its sketch holds (its ``rank_error`` is not 0). They are
compared with the values themselves, in either place, and have to be within twice that error: it holds for 99 % of
quantiles, and here are dozens.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pandas as pd
from cluster_kit import QUANTILES, difference, drive, open_cluster, rows_of, without_sketches
from flight_files import write_flights

from flowctl.analyze.run import JOBS
from flowctl.errors import ConfigError

pytestmark = [pytest.mark.realtime, pytest.mark.timeout(1800)]

TABLES = [
    *("sessions", "experience", "ingest", "fleet_streams", "fleet_subnets", "abuse_scores"),
    "capacity_nodes",
]
"""Result tables of all jobs, none of which is empty here."""
CHANGING = {"data_ends_s_ago", "took_s", "bytes", *QUANTILES}
"""Figures of a summary that tell of the moment at which it was made; and of sketches, with the length of their page."""


@pytest.fixture(scope="module", autouse=True)
def java():
    """Skip all of this where PySpark or Java is missing."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed: pip install '.[pipeline]'")
    from flowctl.analyze.spark.java import find_java

    try:
        find_java()
    except ConfigError as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def bare_python(folder):
    home = folder / "bare"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "flowctl" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    python = home / "bin" / "python"
    tried = subprocess.run([python, "-c", "import flowctl"], cwd=folder, capture_output=True, text=True, check=False)
    assert "No module named 'flowctl'" in tried.stderr
    return str(python)


def archive_of(place: Path) -> str:
    source = Path(__file__).resolve().parents[3]
    with zipfile.ZipFile(place, "w") as archive:
        for path in sorted((source / "flowctl").rglob("*.py")):
            archive.write(path, path.relative_to(source))
    return str(place)


@pytest.fixture(scope="module")
def done(folder, bare_python):
    """What a driver says that has run everything on a cluster, and for comparison in ``local[2]``.

    Its workers have flowctl only from the archive that is shipped to them. In the end one of them is killed.
    """
    write_flights(folder / "flights")
    with open_cluster(folder / "cluster") as cluster:
        victim = cluster.workers[1]
        answer = drive(
            cluster.url,
            folder,
            flights=str(folder / "flights"),
            archive=archive_of(folder / "flowctl-code.zip"),
            python=bare_python,
            group=victim.process.pid,
        )
        answer["victim"] = victim.process.poll()
        cluster.master.wait_for("Telling app of lost executor")
    return answer


@pytest.fixture(scope="module")
def local(done):
    return done["local"]["jobs"]


@pytest.fixture(scope="module", params=["remote", "duckdb"])
def other(request, done):
    """What is compared with what ``local`` gives."""
    return done[request.param]["jobs"]


def test_cluster_when_used_has_two_executors(done):
    assert done["remote"]["executors"] == 2


@pytest.mark.parametrize("name", TABLES)
def test_tables_when_made_elsewhere_are_those_of_local(name, local, other):
    here, there = (without_sketches(rows_of(side["all"]["outputs"][name])) for side in (local, other))
    assert len(here) > 1, f"{name} is empty, which compares nothing"
    assert difference(here, there) == ""


@pytest.mark.parametrize("place", ["local", "remote", "duckdb"])
@pytest.mark.parametrize("name", ["experience", "fleet_subnets"])
def test_quantiles_when_of_many_viewers_are_within_their_error(name, place, done, folder):
    shown = dict(iter(pd.read_parquet(folder / "shown").groupby(["by", "key"])))
    rows = pd.read_parquet(done[place]["jobs"]["all"]["outputs"][name])
    many = rows[rows["rank_error"] > 0].to_dict("records")
    assert many
    for row in many:
        values = shown[row.get("by", "network"), row.get("key", row.get("subnet"))]
        for column, (value, share) in QUANTILES.items():
            ordered = np.sort(values[value].dropna())
            low, high = (np.searchsorted(ordered, row[column], side) / len(ordered) for side in ("left", "right"))
            assert low - 2 * row["rank_error"] <= share <= high + 2 * row["rank_error"], (column, row)


def test_flights_when_tried_elsewhere_give_the_table_of_local(local, other):
    here = rows_of(local["flights"]["outputs"]["whatif_choices"])
    assert len(here) > 1
    assert difference(here, rows_of(other["flights"]["outputs"]["whatif_choices"])) == ""


def test_accounts_when_made_elsewhere_are_those_of_local(local, other):
    accounts = other["all"]["accounts"]
    assert accounts == local["all"]["accounts"]
    assert {item["table"] for item in accounts} >= {"flow_closes", "flow_opens", "flow_events", "flow_samples"}
    assert all(item["rows_in"] == item["rows_out"] > 0 for item in accounts)


def test_summaries_when_made_elsewhere_are_those_of_local(local, other):
    assert set(other["all"]["notes"]) == set(JOBS)
    for name, note in other["all"]["notes"].items():
        assert told(note) == told(local["all"]["notes"][name])
    report, sessions = (other["all"]["notes"][name]["summary"] for name in ("report", "sessions"))
    assert report["figures"]["totals"]["connections"] == sessions["sessions"] > 1000
    assert Path(other["all"]["outputs"]["report.html"]).stat().st_size > 10_000


def told(note):
    """Return a summary without what may differ; its floats to nine digits, for the report adds up as rows come."""
    summary = {key: value for key, value in note["summary"].items() if key not in CHANGING}
    if "figures" in summary:  # quantiles in them are of sketches too, which the table's test holds to their error
        measures = {key: value for key, value in summary["figures"]["measures"].items() if key not in CHANGING}
        summary["figures"] = summary["figures"] | {"measures": measures}
    return json.loads(json.dumps(summary), parse_float=lambda text: f"{float(text):.9g}")


@pytest.mark.parametrize("name", ["bans.jsonl", "flights/limits.toml", "watch/bans.jsonl"])
def test_decisions_when_made_on_a_cluster_are_those_of_local(name, folder, done):
    here, there = folder / "local" / name, folder / "remote" / name
    assert without_times(there.read_text("utf-8")) == without_times(here.read_text("utf-8")) != ""


def without_times(text: str) -> str:
    import re

    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)", "TIME", text)


def test_job_when_a_worker_is_killed_ends_with_the_same_table(done, local):
    killed = done["killed"]["killed"]
    assert killed, "the job was over before there was anything to kill"
    assert killed["finished"] < killed["tasks"]
    assert done["victim"] is not None
    here = rows_of(local["all"]["outputs"]["sessions"])
    assert difference(here, rows_of(done["killed"]["jobs"]["sessions"]["outputs"]["sessions"])) == ""


# -- shipping the code


def test_archive_when_shipped_is_what_workers_import(done):
    places = done["shipped"]["places"]
    assert len(places) == 1
    assert "flowctl-code.zip/flowctl/units.py" in places[0]
    assert "1.0 MiB, 1024 messages" in places[0]


def test_archive_when_not_shipped_is_missed(done):
    assert "No module named 'flowctl'" in done["not shipped"]["error"]
