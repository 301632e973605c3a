"""Synthetic events: the same from the same seed however cut, consistent in themselves, and a fair test of abuse."""

from __future__ import annotations

import pytest
from abuse_kit import hits, write
from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.pipeline.jobs.abuse import AbuseOptions
from flowctl.pipeline.jobs.abuse import run as run_abuse
from flowctl.pipeline.synth import job as synth
from flowctl.pipeline.synth import visits
from flowctl.pipeline.synth.kinds import FIRST_ABUSER, KINDS
from flowctl.pipeline.synth.plan import SynthOptions, plan, steps_by_key
from flowctl.pipeline.tables.io import read_table
from flowctl.telemetry.schema import FLOW_EVENTS, FLOW_SAMPLES

pytestmark = pytest.mark.timeout(900)  # starting Java on a machine that does much else takes minutes
SMALL = SynthOptions(events=12_000, samples_s=300)
END_S = SMALL.start_s + 86_400


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    """Give a small set with samples and truth, and what was said of it."""
    out = str(tmp_path_factory.mktemp("synth"))
    return out, synth.run(spark, "", out, SMALL)


def checksum(frame):
    """Return a number that depends on every value of every row and not on their order."""
    return frame.select(f.sum(f.xxhash64(*frame.columns) % 1_000_003).alias("sum"), f.count("*").alias("n")).first()


def test_synth_when_cut_into_other_tasks_makes_the_same_rows(spark, monkeypatch):
    """Rows depend on the seed alone: with other tasks they are the same, with another seed they are others."""
    options = SynthOptions(events=2_000)
    first = checksum(synth.events(spark, options, plan(options)))
    monkeypatch.setattr(visits, "VISITS_PER_TASK", 37)
    assert checksum(synth.events(spark, options, plan(options))) == first
    other = SynthOptions(events=2_000, seed=2)
    assert checksum(synth.events(spark, other, plan(other))) != first


def test_synth_when_read_as_records_fits_to_the_last_row(spark, made):
    """Nothing of it goes to the quarantine; there are as many rows as asked for, and some for one of each kind."""
    out, result = made
    for table in (FLOW_EVENTS, FLOW_SAMPLES):
        source = read_table(spark, out, table.name)
        assert source.accounts.rows_quarantined == 0
        assert source.accounts.files_quarantined == 0
        assert source.frame.columns == list(table.names)
    assert 0.8 * SMALL.events < result.summary["events"] < 1.5 * SMALL.events


def test_synth_when_states_are_added_up_gives_how_long_each_was_connected(spark, made):
    """The sum of state_ms of a connection is the time from its first record to its last one."""
    frame = spark.read.parquet(f"{made[0]}/flow_events").where("conn_id > 0")
    each = frame.groupBy("node", "conn_id").agg(
        f.sum("state_ms").alias("states"),
        ((f.unix_micros(f.max("ts")) - f.unix_micros(f.min("ts"))) / 1000).alias("whole"),
        f.count_if(f.col("event") == "conn_closed").alias("ends"),
    )
    assert each.where((f.abs(f.col("states") - f.col("whole")) > 0.01) | (f.col("ends") != 1)).count() == 0
    assert each.count() > 1000


def test_synth_when_edges_follow_each_other_begin_where_the_last_one_ended(spark, made):
    """In each connection the state before an edge is the state after the edge before it, READY at first."""
    frame = spark.read.parquet(f"{made[0]}/flow_events").where("state_ms is not null")
    rows = frame.select("node", "conn_id", "ts", "seq", "state_from", "state_to").collect()
    last: dict[tuple[str, int], str] = {}
    for row in sorted(rows, key=lambda item: (item["ts"], item["seq"])):
        assert row["state_from"] == last.get((row["node"], row["conn_id"]), "READY")
        last[row["node"], row["conn_id"]] = row["state_to"]


def test_synth_when_identities_are_counted_are_unique(spark, made):
    """(node, seq) names a record of either table."""
    for table in ("flow_events", "flow_samples"):
        frame = spark.read.parquet(f"{made[0]}/{table}")
        assert frame.select("node", "seq").distinct().count() == frame.count()


def test_synth_when_samples_are_summed_conserves_messages(spark, made):
    """In every sample and class, what was accepted is what was sent and what was dropped."""
    frame = spark.read.parquet(f"{made[0]}/flow_samples")
    wrong = [
        f.col(f"accepted_{unit}_{name}") != f.col(f"sent_{unit}_{name}") + f.col(f"dropped_{unit}_{name}")
        for unit in ("messages", "bytes")
        for name in ("key", "inter", "audio")
    ]
    assert frame.where(f.exists(f.array(*wrong), lambda item: item)).count() == 0
    assert frame.where("dropped_messages_inter > 0").count() > 0


def test_synth_when_everybody_is_looked_for_plants_each_kind(spark, made):
    """Each kind that is not ordinary is among the planted, abusers as such, and some of them share an address."""
    rows = spark.read.parquet(f"{made[0]}/{synth.TRUTH_FOLDER}").collect()
    kinds = {(row["kind"], row["abuser"]) for row in rows}
    wanted = {(kind.name, number >= FIRST_ABUSER) for number, kind in enumerate(KINDS) if number > 1}
    assert wanted - kinds <= {("phones_behind_one_address", False)}  # an abuser is behind each of their addresses
    assert {row["honest"] for row in rows if row["abuser"]} == {True, False}


def test_abuse_when_run_on_synthetic_events_finds_every_abuser_and_nobody_else(spark, made, tmp_path):
    """Who abuses alone is banned or limited, and nobody honest is banned, also not behind an abuser's address."""
    options = AbuseOptions(truth=f"{made[0]}/{synth.TRUTH_FOLDER}", now_s=END_S)
    truth = run_abuse(spark, made[0], str(tmp_path), options).summary["truth"]
    assert truth["alone_banned"] + truth["alone_limited"] == truth["alone"] > 0
    assert truth["honest_banned"] == 0
    assert truth["honest_beside_abusers"] > 0
    assert truth["honest_addresses"] > 100


def test_synth_when_the_folder_has_records_of_a_server_refuses_whatever_was_asked(spark, tmp_path):
    """Recorded tables are never deleted: not beside nothing, not in a folder that synth has used before."""
    path = write(tmp_path / "events", hits("192.0.2.1", "amf_depth", 1))
    for marked in (False, True):
        if marked:
            (tmp_path / "events" / synth.TRUTH_FOLDER).mkdir(parents=True)
        for replace in (False, True):
            with pytest.raises(ConfigError, match="flow_events that synth did not make"):
                synth.run(spark, "", str(tmp_path / "events"), SynthOptions(events=1_000, replace=replace))
    assert path.exists()


def test_synth_when_run_again_replaces_its_own_only_if_asked(spark, tmp_path):
    """What it made stays without --replace, also where no truth was written; with it all of it is new.

    With --abusers 0 there is no abuser.
    """
    first = SynthOptions(events=1_000, truth=False, samples_s=60)
    synth.run(spark, "", str(tmp_path), first)
    with pytest.raises(ConfigError, match="earlier run") as caught:
        synth.run(spark, "", str(tmp_path), first)
    assert "--replace" in caught.value.hint
    made = synth.run(spark, "", str(tmp_path), SynthOptions(events=2_000, replace=True, abusers=0.0)).summary
    assert read_table(spark, str(tmp_path), "flow_events").accounts.rows_in == made["events"]
    assert made["planted_abusers"] == 0
    assert not (tmp_path / "flow_samples").exists()


def test_script_when_a_visit_is_counted_fits_its_numbers():
    """Events and connections of a visit fit the bits that identities have for them."""
    counts: dict[int, int] = {}
    for key, _, step in steps_by_key():
        counts[key] = counts.get(key, 0) + 1
        assert step.connection < 1 << synth.CONNECTION_BITS
    assert max(counts.values()) < 1 << synth.SEQUENCE_BITS


@pytest.mark.parametrize(
    "given",
    [{"events": 0}, {"days": 0}, {"slow": 1.5}, {"slow": 0.6, "abusers": 0.5}, {"viewers": 10**9}, {"nodes": 0}],
)
def test_options_when_out_of_range_are_refused(given):
    """Each value out of its range is an error that names the option."""
    with pytest.raises(ConfigError, match="--"):
        SynthOptions(**given)
