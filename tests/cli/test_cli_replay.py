"""``flowctl replay``: what is listed, what is printed, and the exit status."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
from cli_kit import run
from flight_kit import Rows, slow_history

from flowctl.core.flow.policy import AudioFirst, LivePolicy
from flowctl.reasons import CloseReason
from flowctl.records.flight.words import TablePolicy
from flowctl.records.telemetry.schema import FLIGHT
from tests.records.flight.flight_set_kit import LINES, SetScene

CONN_AT = FLIGHT.names.index("conn_id")
DETAIL_AT = FLIGHT.names.index("detail")


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
    status, output, errors = run("replay", str(folder), "--conn", "7")
    assert (status, errors) == (0, "")
    assert "READY -> OVERLOADED: blocked" in output
    assert "limit 2.9 KiB" in output
    assert "pictures would be late" in output
    (dropped,) = [line for line in output.splitlines() if "dropped " in line]
    assert re.search(r"; \d+% of the pictures, up to \d\.\d s behind", dropped)
    assert "closed: kicked" in output
    assert output.splitlines()[-1].startswith("identical: ")


def test_replay_when_several_are_there_lists_them(folder):
    status, output, _ = run("replay", str(folder))
    assert status == 0
    assert len(output.splitlines()) == 3
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["7", "8"]
    status, output, _ = run("replay", str(folder), "--json")
    assert [json.loads(line)["conn_id"] for line in output.splitlines()] == [7, 8]
    assert run("replay", str(folder / "flight" / "a.parquet"))[0] == 0


def test_replay_when_it_diverges_says_where_and_fails(folder):
    status, output, _ = run("replay", str(folder), "--conn", "8")
    assert status == 1
    assert "diverges at row " in output
    assert "cause is would_block, recorded is tick" in output
    status, output, _ = run("replay", str(folder), "--all")
    assert status == 1
    assert [line.split()[3] for line in output.splitlines()] == ["identical:", "diverges"]


def test_replay_when_all_are_wanted_passes_over_damaged_ones(folder, tmp_path):
    shutil.copytree(folder / "flight", tmp_path / "flight")
    whole = (tmp_path / "flight" / "a.parquet").read_bytes()
    (tmp_path / "flight" / "half.parquet").write_bytes(whole[: len(whole) // 2])
    short = Rows()  # begins in the middle; it comes first in the list, which is sorted by the beginning
    short.extend((*row[:CONN_AT], 6, *row[CONN_AT + 1 :]) for row in slow_history(seconds=2).rows[5:])
    short.write(tmp_path / "flight" / "c.parquet", uid="c")
    status, output, errors = run("replay", str(tmp_path), "--all")
    assert status == 1
    assert [line.split()[0] for line in output.splitlines()] == ["6", "7", "8"]
    assert "not replayed: flight of connection 6: row 0 is missing" in output.splitlines()[0]
    assert " identical: " in output.splitlines()[1]
    assert errors.count("\n") == 1
    assert "half.parquet is not a whole Parquet file" in errors
    status, output, _ = run("replay", str(tmp_path), "--all", "--json")
    faults = [json.loads(line).get("error") for line in output.splitlines()]
    assert faults[0].startswith("flight of connection 6: row 0 is missing")
    assert faults[1:] == [None, None]
    status, output, errors = run("replay", str(tmp_path))
    assert (status, output) == (1, "")
    assert "half.parquet" in errors


def test_replay_when_the_middle_of_a_file_is_damaged_goes_on_with_the_others(folder, tmp_path):
    shutil.copytree(folder / "flight", tmp_path / "flight")
    path = tmp_path / "flight" / "b.parquet"
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    status, output, errors = run("replay", str(tmp_path), "--all")
    assert status == 1
    assert [line.split()[0] for line in output.splitlines()] == ["7"]
    assert "b.parquet cannot be read" in errors


def test_replay_when_json_is_wanted_has_outputs_and_figures(folder):
    status, output, _ = run("replay", str(folder), "--conn", "7", "--json", "--limits", "1MiB,900", "--policy", "keep")
    assert status == 0
    found = json.loads(output)
    assert found["identical"] is True
    assert found["transitions"] == sum(item["kind"] == "state" for item in found["outputs"]) >= 3
    assert found["figures"]["close_reason"] == "kicked"
    assert found["other_choice"]["closed"] is None
    assert "keep" in found["other_choice"]["choice"]


def test_replay_when_all_are_shown_other_limits_passes_over_who_followed_nothing(folder, tmp_path):
    viewer = slow_history(seconds=2)
    (tmp_path / "flight").mkdir()
    viewer.rows.write(tmp_path / "flight" / "a.parquet", uid="a")
    silent = Rows()
    begin = viewer.rows[0]
    silent.append((*begin[:CONN_AT], 6, *begin[CONN_AT + 1 :]))
    silent.write(tmp_path / "flight" / "b.parquet", uid="b")
    status, output, errors = run("replay", str(tmp_path), "--all", "--json", "--limits", "1MiB,900")
    found = {item["conn_id"]: item["other_choice"] for item in map(json.loads, output.splitlines())}
    assert errors == ""
    assert found[6] == {"choice": None, "why": "it followed no stream"}
    assert "900" in found[7]["choice"]
    assert status == 0
    status, output, _ = run("replay", str(tmp_path), "--all", "--limits", "1MiB,900")
    assert "  choice: none\n  why: it followed no stream" in output
    status, _, errors = run("replay", str(tmp_path), "--conn", "6", "--limits", "1MiB,900")
    assert (status, "followed no stream" in errors) == (2, True)


def test_replay_when_other_limits_are_tried_keeps_the_policy_in_force(tmp_path):
    rows = slow_history(seconds=2).rows
    begin = list(rows[0])
    table = TablePolicy.of(AudioFirst(), pytest.fail).as_dict()
    begin[DETAIL_AT] = json.dumps({**json.loads(begin[DETAIL_AT]), "policy": table})
    other = Rows()
    other.extend([tuple(begin), *rows[1:]])
    (tmp_path / "flight").mkdir()
    other.write(tmp_path / "flight" / "a.parquet", uid="a")
    _, output, _ = run("replay", str(tmp_path), "--limits", "1MiB,900")
    assert ", audio-first, " in next(line for line in output.splitlines() if line.startswith("  choice: "))
    _, output, _ = run("replay", str(tmp_path), "--limits", "1MiB,900", "--policy", "keep")
    assert ", keep, " in next(line for line in output.splitlines() if line.startswith("  choice: "))


def test_replay_when_another_target_delay_is_tried_keeps_what_its_level_said(tmp_path):
    viewer = slow_history(seconds=2)
    sender, usual = viewer.sender, viewer.sender.limits
    sender.set_limits(replace(usual, target_delay_ms=500))
    sender.set_policy(AudioFirst())
    sender.unfollow()
    sender.set_limits(usual)
    sender.set_policy(LivePolicy())
    (tmp_path / "flight").mkdir()
    viewer.rows.write(tmp_path / "flight" / "a.parquet", uid="a")
    for option, value, words in (
        ("--limits", "1MiB,900", ", audio-first, target delay 500 ms, "),
        ("--target-delay", "4s", ", audio-first, target delay 4.0 s, "),
        ("--target-delay", "off", ", audio-first, no target delay, "),
        ("--policy", "all-or-cut", ", all-or-cut, target delay 500 ms, "),
    ):
        status, output, errors = run("replay", str(tmp_path), option, value)
        assert (status, errors) == (0, "")
        assert words in next(line for line in output.splitlines() if line.startswith("  choice: "))
    status, _, errors = run("replay", str(tmp_path), "--target-delay", "fast")
    assert (status, "hint: write it like 1500ms" in errors) == (2, True)


def test_replay_when_used_wrongly_says_how(folder, tmp_path):
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


def test_replay_when_the_viewer_switched_tells_it_and_tries_other_renditions(tmp_path):
    scene = SetScene(LINES["50%"])
    scene.sender.end_flight()
    (tmp_path / "flight").mkdir()
    scene.viewer.rows.write(tmp_path / "flight" / "a.parquet", uid="a")
    status, output, _ = run("replay", str(tmp_path))
    assert status == 0
    (told,) = [line for line in output.splitlines() if "rendition" in line]
    assert re.search(r"\d s  rendition 500000 to 1200000: the line has carried 1\.2\d Mbit/s", told)
    status, output, _ = run("replay", str(tmp_path), "--renditions", "500k,1.2M,2.5M", "--json")
    found = json.loads(output)["other_choice"]
    assert (found["switches"], found["pictures_share"]) == (1, 1.0)
    assert list(found["rendition_s"]) == ["500 kbit/s", "1.20 Mbit/s", "2.50 Mbit/s"]
    assert sum(found["rendition_s"].values()) == pytest.approx(60, abs=1)
    status, output, _ = run("replay", str(tmp_path), "--renditions", "2.5M")
    (share,) = re.findall(r"  pictures_share: ([0-9.]+)", output)
    assert 0.2 < float(share) < 0.6
    assert "not_known: what other renditions looked like" in output
    status, output, _ = run("replay", str(tmp_path), "--limits", "1MiB,900")
    assert "not_known: which renditions would have been chosen" in output
