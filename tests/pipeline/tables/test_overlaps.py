"""Records that are there twice in files that are no copies: found by the footers, and only then looked at."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from hypothesis import given
from hypothesis import strategies as st
from record_kit import NOON, event, sample, write, write_samples

from flowctl.errors import ConfigError
from flowctl.pipeline.tables import io, overlaps
from flowctl.pipeline.tables.checks import MOST_COUNT, any_of, open_checks
from flowctl.pipeline.tables.footers import facts_of
from flowctl.pipeline.tables.io import read_optional, read_table, write_quarantine
from flowctl.pipeline.tables.preflight import judge
from flowctl.telemetry.schema import FLOW_SAMPLES

NOW_US = int(NOON.timestamp() * 1e6) + 3_600_000_000


def rows_of(count):
    return [event(number, 7, "sample") for number in range(count)]


def judged(root):
    paths = sorted(str(path) for path in root.rglob("*.parquet"))
    return judge(list(facts_of(paths, "flow_events", NOW_US)), "flow_events")


SPANS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "ab"]), st.integers(0, 30), st.integers(0, 6), st.booleans()), max_size=12
)


@given(SPANS)
def test_overlapping_when_ranges_meet_finds_exactly_those(drawn):
    """The sweep finds what comparing every pair finds: ranges and nodes meet, and a recorder wrote one of the two."""
    files = [
        (f"f{number:02}", (nodes[0], nodes[-1], low, low + length, recorded))
        for number, (nodes, low, length, recorded) in enumerate(sorted(drawn, key=lambda item: item[1]))
    ]
    expected = {
        path
        for path, one in files
        for other_path, other in files
        if path != other_path
        and (one[4] or other[4])
        and max(one[2], other[2]) <= min(one[3], other[3])
        and max(one[0], other[0]) <= min(one[1], other[1])
    }
    assert set(overlaps.overlapping(files)) == expected


def test_overlapping_when_a_file_has_no_statistics_takes_it_for_one_that_meets_all():
    """What is not known is looked at: a file without ranges may hold anything."""
    files = [("x", (None, None, None, None, False)), ("y", ("n", "n", 5, 9, True))]
    assert overlaps.overlapping(files) == ["x", "y"]
    assert overlaps.overlapping([files[0], ("z", ("n", "n", 5, 9, False))]) == []


def test_judge_when_a_file_was_split_by_a_tool_that_keeps_metadata_takes_both_parts(tmp_path):
    """Two halves of a file have its uid and are no copies of each other; two of the same half are."""
    rows = rows_of(4)
    write(tmp_path, rows[:2], "a", uid="one")
    write(tmp_path, rows[2:], "b", uid="one")
    write(tmp_path, rows[2:], "c", uid="one")
    found = judged(tmp_path)
    assert (found.good, found.accounts.files_by_reason, found.meeting) == (2, {"copy": 1}, [])


def test_judge_when_a_rewrite_lies_beside_the_original_says_which_files_to_look_at(tmp_path):
    """A file without metadata whose records are within those of a recorder's meets it; a later file meets none."""
    rows = rows_of(6)
    write(tmp_path, rows, "original")
    write(tmp_path, rows[1:3], "rewritten", metadata={})
    write(tmp_path, rows_of(2), "later")
    names = [path.rpartition("/")[2] for path in judged(tmp_path).meeting]
    assert names == ["original.parquet", "rewritten.parquet"]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("table", ["flow_events", "flow_samples"])
def test_read_when_the_original_lies_beside_its_rewrite_refuses_for_every_job(
    spark, tmp_path, monkeypatch, many, table
):
    """All jobs read tables here, so none doubles figures; a record and its files are named. Few files or many."""
    monkeypatch.setattr(io, "DRIVER_FILES", 0 if many else 256)
    put = write if table == "flow_events" else write_samples
    rows = rows_of(5) if table == "flow_events" else [sample(number, 7) for number in range(5)]
    put(tmp_path, rows[:3], "a")
    put(tmp_path, rows[3:], "b")
    assert read_table(spark, str(tmp_path), table, now_us=NOW_US).frame.count() == 5
    put(tmp_path, rows, "joined", metadata={})
    with pytest.raises(ConfigError, match=r"twice.*: 5, the first is \d+ of node n1 in .*joined\.parquet"):
        read_table(spark, str(tmp_path), table, now_us=NOW_US)


def test_read_when_two_servers_share_a_name_and_no_record_reads_both(spark, tmp_path):
    """Ranges that meet are only a reason to look: where each record is there once, nothing is refused."""
    rows = rows_of(6)
    write(tmp_path, rows[::2], "a")
    write(tmp_path, rows[1::2], "b")
    assert len(judged(tmp_path).meeting) == 2
    assert read_table(spark, str(tmp_path), "flow_events", now_us=NOW_US).frame.count() == 6


def test_read_when_figures_are_no_numbers_puts_their_rows_aside(spark, tmp_path):
    """NaN, infinity and counts beyond an exabyte are put aside with their reason; jobs cast without failing."""
    bad = [
        sample(1, 7, viewer_delay_ms=float("nan")),
        sample(2, 7, interval_ms=float("inf")),
        sample(3, 7, sent_bytes=MOST_COUNT),
        sample(4, 7, dropped_bytes_key=-1),
        sample(5, 7, queued_bytes=MOST_COUNT - 1),
    ]
    write_samples(tmp_path, [sample(0, 7), *bad])
    source = read_table(spark, str(tmp_path), "flow_samples", now_us=NOW_US)
    assert source.accounts.by_reason == {
        "viewer_delay_ms: no number": 1,
        "interval_ms: no number": 1,
        "sent_bytes: too large": 1,
        "dropped_bytes_key: negative": 1,
    }
    assert source.frame.selectExpr("sum(CAST(round(viewer_delay_ms * 1e3) AS BIGINT))").collect()[0][0] is None


def test_checks_when_all_counts_are_open_are_one_term():
    """The filter of a table of fifty counts has one comparison for all of them, so that it is compiled."""
    checks = open_checks("flow_samples", {f"{name}: {what}" for name in FLOW_SAMPLES.names for what in _WORDS})
    assert any_of(checks, NOW_US).count(" OR ") < 20
    assert "sent_bytes_audio" in any_of(checks, NOW_US)


_WORDS = ("negative", "too large")


def test_optional_when_nothing_in_the_folder_can_be_used_is_absent_with_a_warning(spark, tmp_path):
    """No folder is none; an empty one, or one of bad files, counts as absent, and its files are accounted for."""
    root = str(tmp_path)
    assert read_optional(spark, root, "flow_samples") is None
    path = write_samples(tmp_path, [sample(0, 7)])
    path.write_bytes(b"PAR1")
    bad = read_optional(spark, root, "flow_samples")
    assert (bad.absent, bad.frame.count(), bad.accounts.files_quarantined) == (True, 0, 1)
    bad.accounts.check()
    assert "flow_samples is left out: none of its 1 files" in bad.accounts.warnings[0]
    path.unlink()
    empty = read_optional(spark, root, "flow_samples")
    assert (empty.absent, empty.accounts.warnings) == (True, ["flow_samples is left out: it has no file"])


def test_jobs_when_the_samples_cannot_be_used_go_on_with_the_events(spark, tmp_path):
    """Sessions and fleet do without samples of which none can be used, and put the bad file into quarantine."""
    from flowctl.pipeline.jobs import fleet, sessions

    peer = {"peer_ip": "192.0.2.1", "role": "play", "app": "live", "stream": "s"}
    events, out = tmp_path / "events", str(tmp_path / "out")
    write(events, [event(0, 1, "play_started", **peer), event(9, 1, "conn_closed", reason="peer closed", **peer)])
    write_samples(events, [sample(0, 1)]).write_bytes(b"")
    for job in (sessions, fleet):
        result = job.run(spark, str(events), out)
        result.check()
        assert any("left out" in line for item in result.accounts for line in item.warnings)
        assert "quarantine/flow_samples_files" in result.outputs
    assert result.summary["source"] == "sessions"


def test_quarantine_when_nothing_is_put_aside_now_keeps_nothing_of_an_earlier_run(spark, tmp_path):
    """What lies in OUT/quarantine is of the last run of a job; a folder in the making keeps what other jobs left."""
    events, out = tmp_path / "events", tmp_path / "out"
    write(events, rows_of(2), "a")
    bad = write(events, rows_of(2), "b")
    bad.write_bytes(b"")
    for place in (out, out / "_new-host-1-x"):
        assert write_quarantine(spark, read_table(spark, str(events), "flow_events", now_us=NOW_US), str(place))
    bad.unlink()
    clean = read_table(spark, str(events), "flow_events", now_us=NOW_US)
    for place, left in ((out, False), (out / "_new-host-1-x", True)):
        assert write_quarantine(spark, clean, str(place)) == {}
        assert (place / "quarantine/flow_events_files").exists() is left
