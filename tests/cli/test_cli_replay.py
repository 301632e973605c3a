"""``flowctl replay``: what is listed, what is printed, and the exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_kit import run

sys.path.insert(0, str(Path(__file__).parents[1] / "flight"))
from flight_kit import Rows, slow_history

from flowctl.reasons import CloseReason
from flowctl.telemetry.schema import FLIGHT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of records with the flights of connections 7 and 8; that of 8 has a changed edge."""
    viewer = slow_history(seconds=4)
    viewer.sender.close(CloseReason.KICKED)
    path = tmp_path_factory.mktemp("events")
    (path / "flight").mkdir()
    viewer.rows.write(path / "flight" / "a.parquet", uid="a")
    conn_id, cause = FLIGHT.names.index("conn_id"), FLIGHT.names.index("cause")
    other = Rows()
    for row in viewer.rows:
        cells = list(row)
        cells[conn_id] = 8
        cells[cause] = "tick" if cells[cause] == "would_block" else cells[cause]
        other.append(tuple(cells))
    other.write(path / "flight" / "b.parquet", uid="b")
    return path


def test_replay_when_one_flight_is_named_prints_its_transitions(folder):
    """Each edge with cause, axis, value and limit, each drop and step, and that it came again; status 0."""
    status, output, errors = run("replay", str(folder), "--conn", "7")
    assert (status, errors) == (0, "")
    assert "READY -> OVERLOADED: would_block" in output
    assert "limit 3000" in output
    assert "thinned from the queue" in output
    assert "closed: kicked" in output
    assert output.splitlines()[-1].startswith("identical: ")


def test_replay_when_several_are_there_lists_them(folder):
    """A folder with several flights is a list; a file with one is replayed."""
    status, output, _ = run("replay", str(folder))
    assert status == 0
    assert len(output.splitlines()) == 3
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["7", "8"]
    status, output, _ = run("replay", str(folder), "--json")
    assert [json.loads(line)["conn_id"] for line in output.splitlines()] == [7, 8]
    assert run("replay", str(folder / "flight" / "a.parquet"))[0] == 0


def test_replay_when_it_diverges_says_where_and_fails(folder):
    """A flight that does not come again names the row and what is different; status 1."""
    status, output, _ = run("replay", str(folder), "--conn", "8")
    assert status == 1
    assert "diverges at row " in output
    assert "cause is would_block, recorded is tick" in output
    status, output, _ = run("replay", str(folder), "--all")
    assert status == 1
    assert [line.split()[3] for line in output.splitlines()] == ["identical:", "diverges"]


def test_replay_when_json_is_wanted_has_outputs_and_figures(folder):
    """One object with the comparison, every output and the accounts."""
    status, output, _ = run("replay", str(folder), "--conn", "7", "--json", "--limits", "1MiB,900", "--policy", "keep")
    assert status == 0
    found = json.loads(output)
    assert found["identical"] is True
    assert found["transitions"] == sum(item["kind"] == "state" for item in found["outputs"]) > 3
    assert found["figures"]["close_reason"] == "kicked"
    assert found["other_choice"]["closed"] is None
    assert "keep" in found["other_choice"]["choice"]


def test_replay_when_used_wrongly_says_how(folder, tmp_path):
    """No such path, connection or policy, and a damaged file: an error, a hint, no traceback."""
    for arguments, status, words in (
        ([str(tmp_path / "gone")], 2, "is not there"),
        ([str(folder), "--conn", "9"], 2, "holds no such flight"),
        ([str(folder), "--policy", "keep"], 2, "2 flights are meant"),
        ([str(folder), "--conn", "7", "--policy", "odd"], 2, "policy is 'odd'"),
    ):
        found, _, errors = run("replay", *arguments)
        assert found == status
        assert words in errors
        assert "Traceback" not in errors
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    found, _, errors = run("replay", str(tmp_path / "x.parquet"))
    assert found == 1
    assert "is not a whole Parquet file" in errors
    assert "hint:" in errors
