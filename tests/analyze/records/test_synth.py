"""Synthetic records: the same from the same seed however cut, and every law of conservation holds in every world."""

from __future__ import annotations

import pytest
from pyspark.sql import Window
from pyspark.sql import functions as f
from synth import make, people
from synth.people import SynthOptions, plan
from synth.worlds import BY_NAME, WORLDS, PlantedKind

from flowctl.analyze import run as runner
from flowctl.analyze.viewers.ingest import BACK_S
from flowctl.records.telemetry.schema import TABLES

spark_starts = pytest.mark.timeout(900)  # starting Java on a machine that does much else takes minutes
SMALL = SynthOptions(events=3_000, samples_s=10.0, days=0.125)
CLASSES = ("key", "inter", "audio")


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("synth"))
    made = make.make(spark, out, SMALL)
    return {name: spark.read.parquet(f"{out}/{name}") for name in (*made, make.TRUTH)}, out


def checksum(frame):
    return frame.select(f.sum(f.xxhash64(*frame.columns) % 1_000_003).alias("sum"), f.count("*").alias("n")).first()


@spark_starts
def test_synth_when_cut_into_other_tasks_makes_the_same_rows(spark, monkeypatch):
    options = SynthOptions(events=500, days=0.05, worlds=("slow", "nat"))
    first = checksum(make.tables(spark, options, plan(options))["flow_closes"])
    monkeypatch.setattr(people, "VISITS_PER_TASK", 37)
    assert checksum(make.tables(spark, options, plan(options))["flow_closes"]) == first
    other = SynthOptions(events=500, days=0.05, worlds=("slow", "nat"), seed=2)
    assert checksum(make.tables(spark, other, plan(other))["flow_closes"]) != first


@spark_starts
def test_synth_when_columns_of_a_connection_are_added_up_agree(made):
    for table in ("flow_closes", "flow_opens"):
        frame = made[0][table]
        whole_ms = sum((f.col(f"time_{name}_ms") for name in ("ready", "overloaded", "soft", "hard")), f.lit(0.0))
        dropped = sum((f.col(f"dropped_messages_{name}") for name in CLASSES), f.lit(0))
        reasons = [f.col(name) for name in frame.columns if name.startswith("dropped_by_")]
        laws = {
            name: f.col(f"accepted_messages_{name}")
            == f.col(f"sent_messages_{name}") + f.col(f"dropped_messages_{name}")
            for name in CLASSES
        } | {
            "octets": f.col("accepted_bytes") == f.col("sent_bytes") + f.col("dropped_bytes"),
            "states": f.abs(whole_ms - f.col("duration_s") * 1000) < 0.01,
            "reasons": sum(reasons, f.lit(0)) == dropped,
            "lost": f.col("lost_messages") == dropped,
            "wanted": f.col("pictures_wanted") == f.col("accepted_messages_key") + f.col("accepted_messages_inter"),
            "pictures": f.col("pictures_sent") <= f.col("pictures_wanted"),
            "quantiles": f.coalesce(f.col("delay_p99_ms") <= f.col("delay_max_ms"), f.lit(True)),
            "sampled": f.coalesce(f.col("lag_ms") <= f.col("sampled_ms"), f.lit(True)),
            "unrecovered": f.coalesce(f.col("unrecovered_bytes") <= f.col("sent_bytes"), f.lit(True)),
            "unique": f.col("seq") >= 0,
        }
        broken = frame.agg(*(f.count_if(~law).alias(name) for name, law in laws.items())).first().asDict()
        assert broken == dict.fromkeys(laws, 0)
        assert frame.select("node", "seq").distinct().count() == frame.count()


@spark_starts
def test_synth_when_samples_are_summed_gives_the_close(made):
    tables = made[0]
    sums = (
        tables["flow_samples"]
        .groupBy("node", "conn_id")
        .agg(
            f.sum("interval_ms").alias("ms"),
            f.sum("sent_bytes").alias("octets"),
            f.sum("dropped_messages_inter").alias("dropped"),
            f.sum("accepted_messages_audio").alias("audio"),
            f.max("viewer_delay_ms").alias("worst"),
            f.count("*").alias("n"),
            f.min(f.least("sent_messages_inter", "dropped_messages_inter", "sent_bytes_audio")).alias("least"),
        )
    )
    both = sums.join(tables["flow_closes"], ["node", "conn_id"])
    wrong = both.where(
        (f.abs(f.col("ms") - f.col("duration_s") * 1000) > 0.01)
        | (f.col("octets") != f.col("sent_bytes"))
        | (f.col("dropped") != f.col("dropped_messages_inter"))
        | (f.col("audio") != f.col("accepted_messages_audio"))
        | (f.col("n") != f.col("samples_count"))
        | (f.abs(f.col("worst") - f.col("delay_max_ms")) > 0.01)
        | (f.col("least") < 0)
    )
    assert wrong.count() == 0
    assert both.count() > 500


@spark_starts
def test_synth_when_folders_are_read_has_each_row_in_that_of_its_hour(made):
    for table in ("flow_closes", "flow_opens", "flow_events", "flow_samples"):
        frame = made[0][table]
        own = (f.to_date("ts") == f.col("date")) & (f.hour("ts") == f.col("hour").cast("int"))
        assert frame.where(~own).count() == 0
        assert frame.drop("date", "hour").columns == list(TABLES[table].names)


@spark_starts
def test_synth_when_events_are_counted_gives_what_the_close_says(made):
    tables = made[0]
    counted = tables["flow_events"].where("conn_id > 0").groupBy("node", "conn_id").count()
    both = tables["flow_closes"].join(counted, ["node", "conn_id"], "left")
    assert both.where(f.coalesce("count", f.lit(0)) != f.col("events_count")).count() == 0
    edges = (
        tables["flow_events"]
        .where("event = 'state_changed'")
        .select("node", "conn_id", "seq", "state_from", "state_to")
    )
    last: dict[tuple[str, int], str] = {}
    for row in edges.orderBy("seq").toLocalIterator():
        assert row["state_from"] == last.get((row["node"], row["conn_id"]), "READY")
        last[row["node"], row["conn_id"]] = row["state_to"]
    assert last


@spark_starts
def test_synth_when_truth_is_read_names_each_kind_that_was_planted(made):
    rows = made[0][make.TRUTH].collect()
    kinds = {kind.name for world in WORLDS for kind in world.kinds if kind.abuser}
    assert kinds == {row["kind"] for row in rows if row["abuser"]}
    assert {row["honest"] for row in rows if row["abuser"]} == {True, False}


@spark_starts
def test_abuse_when_worlds_are_planted_finds_every_abuser_and_bans_nobody_honest(spark, made, tmp_path):
    end_s = SMALL.start_s + SMALL.days * 86_400
    options = {"abuse": {"now_s": end_s}}
    result = runner.run(spark, made[1], str(tmp_path), ["abuse"], options)
    assert not result.failed
    truth = make.found(spark, result.outputs["abuse_scores"], made[1])
    assert truth["alone_found"] == truth["alone"] > 3
    assert truth["honest_banned"] == 0
    assert any("beside others" in kind for kind in truth["by_kind"])
    assert truth["honest_addresses"] > 100


@pytest.mark.parametrize("events", [1_000, 1_000_000, 1_000_000_000])
def test_plan_when_asked_for_a_size_has_about_so_many_rows(events):
    cast = plan(SynthOptions(events=events))
    assert [crowd.world.name for crowd in cast.crowds] == [world.name for world in WORLDS]
    assert all(crowd.clients >= len(crowd.world.kinds) + crowd.world.placed for crowd in cast.crowds)
    if events > 100_000:
        rows = sum(crowd.clients * people._rows_per_visit(crowd.world) for crowd in cast.crowds) * cast.waves
        assert 0.8 * events < rows < 1.2 * events


@pytest.mark.parametrize("kind", [kind for world in WORLDS for kind in world.kinds])
def test_script_when_a_connection_is_counted_fits_its_numbers(kind: PlantedKind):
    assert len(kind.script) < 64
    assert kind.connections < 1 << people.CONNECTION_BITS


@pytest.mark.parametrize(
    "given", [{"events": 0}, {"days": 0}, {"worlds": ("moon",)}, {"worlds": ()}, {"nodes": 0}, {"samples_s": 0.1}]
)
def test_options_when_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=r"allowed|only"):
        SynthOptions(**given)


def test_worlds_when_named_are_found():
    assert len(BY_NAME) == len(WORLDS)


@spark_starts
@pytest.mark.parametrize("days", [0.02, 0.05])
def test_synth_when_waves_are_short_has_no_publisher_that_comes_back(spark, days):
    options = SynthOptions(events=300, days=days, worlds=("ordinary",), nodes=1)
    closes = make.tables(spark, options, plan(options))["flow_closes"].filter(f.col("role") == "publish")
    before = f.lag("ts").over(Window.partitionBy("node", "stream").orderBy("opened_at"))
    away = closes.select((f.unix_micros("opened_at") - f.unix_micros(before)).alias("us")).filter("us is not null")
    assert away.filter(f.col("us") < BACK_S * 1e6).count() == 0 < away.count()
