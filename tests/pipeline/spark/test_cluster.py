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

TABLES = {
    "sessions": ["sessions"],
    "fleet": ["fleet_streams", "fleet_subnets"],
    "abuse": ["abuse_scores"],
    "whatif": ["whatif_choices", "whatif_viewers"],
    "capacity": ["capacity", "capacity_nodes", "capacity_streams", "capacity_places"],
    "flights": ["whatif_choices", "whatif_viewers"],
}
"""By job; the last is what-if over flights: Senders that run again on the workers."""


@pytest.fixture(scope="module", autouse=True)
def java():
    """Skip all of this where PySpark or Java is missing."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed: pip install '.[pipeline]'")
    from flowctl.pipeline.spark.java import find_java

    try:
        find_java()
    except ConfigError as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for everything of this file."""
    return tmp_path_factory.mktemp("cluster")


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
    """Accounts and tables that ``local[2]`` makes, by job."""
    return done["local"]["jobs"]


@pytest.fixture(scope="module")
def remote(done):
    """What the cluster makes of the same records."""
    return done["remote"]["jobs"]


def test_cluster_when_used_has_two_executors(done):
    """The jobs ran on the executors of two workers, and not in the driver."""
    assert done["remote"]["executors"] == 2


@pytest.mark.parametrize("job", TABLES)
def test_tables_when_made_on_a_cluster_are_those_of_local(job, local, remote):
    """Every output table of a job is the same, row by row and to the last digit."""
    for name in TABLES[job]:
        here = rows_of(local[job]["outputs"][name])
        there = rows_of(remote[job]["outputs"][name])
        assert len(here) > 1, f"{name} is empty, which compares nothing"
        assert difference(here, there) == ""


@pytest.mark.parametrize("job", TABLES)
def test_accounts_when_made_on_a_cluster_are_those_of_local(job, local, remote):
    """Rows in and out are the same, none is missing, and none of what `synth` makes is put aside."""
    accounts = remote[job]["accounts"]
    assert accounts == local[job]["accounts"]
    assert all(item["rows_in"] == item["rows_out"] > 0 for item in accounts)


@pytest.mark.parametrize("name", ["bans.jsonl", "limits.toml"])
def test_decisions_when_made_on_a_cluster_are_those_of_local(name, folder, done):
    """The files that the server takes are the same, but for the moment at which they were made."""
    here, there = folder / "local" / name, folder / "remote" / name
    assert without_times(there.read_text("utf-8")) == without_times(here.read_text("utf-8"))


def without_times(text: str) -> str:
    import re

    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)", "TIME", text)


def test_job_when_a_worker_is_killed_ends_with_the_same_table(done, local):
    """A worker killed in the middle, with its executor and what it had finished, costs time and nothing else."""
    killed = done["killed"]["killed"]
    assert killed, "the job was over before there was anything to kill"
    assert killed["finished"] < killed["tasks"]
    assert done["victim"] is not None
    here = rows_of(local["sessions"]["outputs"]["sessions"])
    assert difference(here, rows_of(done["killed"]["jobs"]["sessions"]["outputs"]["sessions"])) == ""


# -- shipping the code


def test_archive_when_shipped_is_what_workers_import(done):
    """Workers without flowctl import it from the archive that came with the job, and compute with it."""
    places = done["shipped"]["places"]
    assert len(places) == 1
    assert "flowctl-code.zip/flowctl/units.py" in places[0]
    assert "1.0 MiB, 1024 messages" in places[0]


def test_archive_when_not_shipped_is_missed(done):
    """Without the archive those workers have no flowctl: the tests above are about what was shipped."""
    assert "No module named 'flowctl'" in done["not shipped"]["error"]
