"""The jobs on a real cluster: a master and two workers of Spark on loopback give the very tables that ``local`` gives.

Tables are compared row by row and value by value, floats too: a sum of floats depends on its order, and a cluster adds
up in another one. So jobs add in whole numbers, and this is where it shows if one does not.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from cluster_kit import difference, drive, open_cluster, rows_of
from flight_files import write_flights

from flowctl.errors import ConfigError

pytestmark = [pytest.mark.realtime, pytest.mark.timeout(1800)]

LOCAL = "local[2]"
JOBS = ["sessions", "fleet", "abuse", "whatif", "capacity"]
ALL = [*JOBS, "flights"]
"""And what-if over flights: Senders that run again on the workers."""
SYNTH = {"events": 24_000, "seed": 7, "days": 0.25, "samples_s": 30.0}
"""Small, and still several files and tasks: what is compared is the way of adding up, not speed."""
TABLES = {
    "sessions": ["sessions"],
    "fleet": ["fleet_streams", "fleet_subnets"],
    "abuse": ["abuse_scores"],
    "whatif": ["whatif_choices", "whatif_viewers"],
    "capacity": ["capacity"],
    "flights": ["whatif_choices", "whatif_viewers"],
}


@pytest.fixture(scope="module", autouse=True)
def java():
    """Skip all of this where PySpark or Java is missing."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed: pip install '.[pipeline]'")
    from flowctl.pipeline.java import find_java

    try:
        find_java()
    except ConfigError as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for everything of this file."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def local(folder):
    """Events of `synth`, and the tables that ``local[2]`` makes of them: (events, answer of the driver)."""
    events, flights = str(folder / "events"), str(folder / "flights")
    drive("synth", LOCAL, folder, out=events, **SYNTH)
    write_flights(Path(flights))
    return events, drive("tables", LOCAL, folder, events=events, out=str(folder / "local"), jobs=JOBS, flights=flights)


@pytest.fixture(scope="module")
def cluster(folder):
    """A master and two workers, shared by the tests that leave them whole."""
    with open_cluster(folder / "cluster") as running:
        yield running


@pytest.fixture(scope="module")
def remote(folder, local, cluster):
    """What the cluster makes of the same events."""
    inputs = {"events": local[0], "flights": str(folder / "flights")}
    return drive("tables", cluster.url, folder, **inputs, out=str(folder / "remote"), jobs=JOBS)


def test_cluster_when_used_has_two_executors(remote):
    """The jobs ran on the executors of two workers, and not in the driver."""
    assert remote["executors"] == 2


@pytest.mark.parametrize("job", ALL)
def test_tables_when_made_on_a_cluster_are_those_of_local(job, folder, local, remote):
    """Every output table of a job is the same, row by row and to the last digit."""
    for name in TABLES[job]:
        here = rows_of(local[1]["jobs"][job]["outputs"][name])
        there = rows_of(remote["jobs"][job]["outputs"][name])
        assert len(here) > 1, f"{name} is empty, which compares nothing"
        assert difference(here, there) == ""


@pytest.mark.parametrize("job", ALL)
def test_accounts_when_made_on_a_cluster_are_those_of_local(job, local, remote):
    """Rows in and out are the same, none is missing, and none of what `synth` makes is put aside."""
    accounts = remote["jobs"][job]["accounts"]
    assert accounts == local[1]["jobs"][job]["accounts"]
    assert all(item["rows_in"] == item["rows_out"] > 0 for item in accounts)


@pytest.mark.parametrize("name", ["bans.jsonl", "limits.toml"])
def test_decisions_when_made_on_a_cluster_are_those_of_local(name, folder, local, remote):
    """The files that the server takes are the same, but for the moment at which they were made."""
    here, there = folder / "local" / name, folder / "remote" / name
    assert without_times(there.read_text("utf-8")) == without_times(here.read_text("utf-8"))


def without_times(text: str) -> str:
    import re

    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)", "TIME", text)


def test_job_when_a_worker_is_killed_ends_with_the_same_table(folder, local):
    """A worker killed in the middle, with its executor and what it had finished, costs time and nothing else."""
    with open_cluster(folder / "killed") as cluster:
        victim = cluster.workers[1]
        answer = drive(
            "kill_worker",
            cluster.url,
            folder,
            events=local[0],
            out=str(folder / "after-kill"),
            name="sessions",
            group=victim.process.pid,
        )
        assert answer["killed"], "the job was over before there was anything to kill"
        assert answer["killed"]["finished"] < answer["killed"]["tasks"]
        assert victim.process.poll() is not None
        cluster.master.wait_for("Telling app of lost executor")
    here = rows_of(local[1]["jobs"]["sessions"]["outputs"]["sessions"])
    assert difference(here, rows_of(answer["jobs"]["sessions"]["outputs"]["sessions"])) == ""


# -- shipping the code


@pytest.fixture(scope="module")
def bare_python(folder):
    """A Python of the workers that has all that flowctl needs, and not flowctl."""
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
    """Return an archive of the package as a wheel lays it out, named so that Spark takes it."""
    source = Path(__file__).resolve().parents[2]
    with zipfile.ZipFile(place, "w") as archive:
        for path in sorted((source / "flowctl").rglob("*.py")):
            archive.write(path, path.relative_to(source))
    return str(place)


def test_archive_when_shipped_is_what_workers_import(folder, cluster, bare_python):
    """Workers without flowctl import it from the archive that came with the job, and compute with it."""
    archive = archive_of(folder / "flowctl-code.zip")
    answer = drive("where", cluster.url, folder, archive=archive, python=bare_python)
    assert len(answer["places"]) == 1
    assert "flowctl-code.zip/flowctl/units.py" in answer["places"][0]
    assert "1.0 MiB, 1024 messages" in answer["places"][0]


def test_archive_when_not_shipped_is_missed(folder, cluster, bare_python):
    """Without the archive those workers have no flowctl: the test above is about what was shipped."""
    with pytest.raises(AssertionError, match="No module named 'flowctl'"):
        drive("where", cluster.url, folder, archive="", python=bare_python)
