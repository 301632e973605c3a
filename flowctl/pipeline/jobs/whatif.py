"""``whatif``: which limits and drop policies would have been better for the viewers that were recorded.

Theory of operation. The rows of one connection go to one call on a worker (`whatif_viewers`), which runs the server's
own Sender over them for every choice of the grid, and gives a row per choice. These rows are the table
``whatif_viewers``; summed up by choice they are ``whatif_choices``, with the Pareto front and the one recommendation
that the objective asks for (`recommend`), which is also written as OUT/limits.toml for ``flowctl serve live --limits``.

What shuffles: the rows of the connections, once, by (node, conn_id), after a select of the columns that are needed and
a cut by time, which bounds what a worker holds of one connection. What comes to the driver: sums by choice, and by
choice and bucket of delay, some thousand rows at most. Sums are whole numbers, so the order of adding is no matter.

Running fifty Senders over half an hour of a viewer takes seconds, so of many viewers a simple random sample is taken
(`WhatifOptions.most`): which ones follows from a hash of node and connection, the same on any cluster. Shares are then
those of the sample; counts are of it as well, and ``sampled_share`` says how much of all it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.flight.whatif.engine import EXTEND_S, PLAYER_BUFFER_S, Choice, bucket_ms, marks_text, quantile_ms
from flowctl.flow.limits import target_marks
from flowctl.flow.limitsfile import LimitsFile, render
from flowctl.pipeline.jobs.abuse import AbuseOptions, address_scores
from flowctl.pipeline.jobs.abuse import sums as abuse_sums
from flowctl.pipeline.jobs.evidence import evidence, harmful, standing, starts_of
from flowctl.pipeline.tables.accounts import Accounts, JobResult
from flowctl.pipeline.tables.io import has_table, read_optional, read_table, write_quarantine, write_table
from flowctl.pipeline.tables.place import Place
from flowctl.pipeline.whatif.grid import DEFAULT_IN_FORCE, audiences_of, default_grid, in_force, parse_grid
from flowctl.pipeline.whatif.recommend import BALANCED_WORDS, Pick, costs, mark_front, parse_objective, recommend
from flowctl.pipeline.whatif.sample import bounded
from flowctl.pipeline.whatif.viewers import ALL_CHOICES, DAMAGED, HONEST_SHARE, NO_VIEWER, VIEWERS_DDL, evaluated
from flowctl.printable import foreign
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CUT_S: Final = 1800.0
"""Of a connection, so much is used from its beginning: half an hour of flight is some 600,000 rows in one worker."""
MOST_VIEWERS: Final = 2_000
"""Sampled by default: a share of 1 % is then known to half a percent (two standard deviations), in minutes."""
MOST_MOST: Final = 10_000_000
FEW_REFUSED: Final = 20
"""From fewer viewers no share is known: one of them more or less is five percent of those it is about."""

_MOST_STARTS: Final = 10_000
"""Different settings of servers that are looked at for audiences."""

CHOICES_DDL: Final = (
    "choice_id int, choice string, policy string, soft string, hard string, low string, hard_policy string, "
    "target_delay string, soft_too_long_s double, stuck_s double, return_after_s double, in_force boolean, "
    "on_front boolean, recommended boolean, viewers bigint, disconnected bigint, disconnected_share double, "
    "honest_disconnected bigint, honest_disconnected_share double, offered_messages bigint, dropped_messages bigint, "
    "dropped_share double, "
    + ", ".join(f"dropped_messages_{name} bigint" for name in CLASS_NAMES)
    + ", key_share double, delay_p50_ms double, delay_p95_ms double, delay_p99_ms double, delay_max_ms double, "
    "stall_share double, ready_share double, memory_peak_bytes bigint, memory_mean_bytes double, "
    "sent_bytes bigint, edges bigint, returns bigint, assumed_share double, sampled_share double"
)
"""Columns of ``whatif_choices``. Grain: one choice over all viewers."""

_FLIGHT_COLUMNS: Final = (
    *("ts", "node", "seq", "conn_id", "peer_ip", "role", "app", "stream", "number"),
    *("offset_us", "kind", "message_class", "size_bytes", "taken_bytes", "reason", "detail"),
    "queued_age_ms",
)
_SAMPLE_COLUMNS: Final = (
    "node",
    "seq",
    "conn_id",
    "peer_ip",
    "role",
    "interval_ms",
    "state",
    "queued_bytes",
    "sent_bytes",
    *(f"accepted_{unit}_{name}" for unit in ("messages", "bytes") for name in CLASS_NAMES),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatifOptions:
    """What to try and what to ask for.

    Args:
        grid: text of a grid file, see `whatif_grid`. None: about fifty choices around the one in force.
        grid_name: name of that file, for errors.
        objective: see `flowctl.pipeline.whatif.recommend`.
        source: ``flights``, ``samples``, or ``auto``: flights where there are any.
        cut_s: how much of a connection is used, in seconds from its beginning.
        extend_s: how much is added for a viewer that the server closed for being slow, in seconds. 0: nothing.
        player_buffer_s: what a player has buffered, in seconds.
        most: how many viewers are evaluated at most; of more, a random sample. 0: all of them.

    Raises:
        ConfigError: a value is out of range, or the objective is not understood.
    """

    grid: str | None = None
    grid_name: str = "grid"
    objective: str = "balanced"
    source: str = "auto"
    cut_s: float = CUT_S
    extend_s: float = EXTEND_S
    player_buffer_s: float = PLAYER_BUFFER_S
    most: int = MOST_VIEWERS

    def __post_init__(self) -> None:
        parse_objective(self.objective)
        if self.source not in {"auto", "flights", "samples"}:
            raise ConfigError(f"source is {self.source!r}, it must be auto, flights or samples")
        if not 1 <= self.cut_s <= 86_400:
            raise ConfigError(f"cut_s is {self.cut_s}, it must be 1 to 86400 s")
        if not 0 <= self.extend_s <= 600:
            raise ConfigError(f"extend_s is {self.extend_s}, it must be 0 to 600 s")
        if not 0 < self.player_buffer_s <= 60:
            raise ConfigError(f"player_buffer_s is {self.player_buffer_s}, it must be above 0 and at most 60 s")
        if not 0 <= self.most <= MOST_MOST:
            raise ConfigError(f"most is {self.most}, it must be 0 (all) to {MOST_MOST} viewers")


# -- frames


def flight_rows(flight: DataFrame, cut_s: float) -> DataFrame:
    """Return what is needed of table ``flight``: rows within `cut_s`, details only where they are read."""
    restarts = (f.col("kind") == "queued") & (f.col("message_class") == "key")  # with the sizes of their headers
    needed = f.col("kind").isin("begin", "call", "limits_set", "end") | restarts
    return flight.where(f.col("offset_us") <= int(cut_s * 1_000_000)).select(
        *(name for name in _FLIGHT_COLUMNS if name != "detail"), f.when(needed, f.col("detail")).alias("detail")
    )


def sample_rows(samples: DataFrame, cut_s: float) -> DataFrame:
    """Return what is needed of table ``flow_samples``: viewers, within `cut_s` of their first sample."""
    from pyspark.sql import Window

    seconds = f.col("ts").cast("double")
    began = f.min(seconds).over(Window.partitionBy("node", "conn_id"))
    rows = samples.where(f.col("role").isin(*VIEWING)).withColumn("_age", seconds - began)
    return rows.where(f.col("_age") <= cut_s).select(*_SAMPLE_COLUMNS)


def viewers(rows: DataFrame, choices: Sequence[Choice], source: str, options: WhatifOptions) -> DataFrame:
    """Return ``whatif_viewers``: a row per connection and choice (`VIEWERS_DDL`).

    Args:
        rows: of `flight_rows` or `sample_rows`.
        choices: in order of `choice_id`.
        source: ``flight`` or ``samples``.
        options: see `WhatifOptions`.
    """
    run_one = partial(
        evaluated, choices=list(choices), source=source, extend_s=options.extend_s, buffer_s=options.player_buffer_s
    )

    def of_connection(table: Any) -> Any:
        return run_one(table)

    return rows.groupBy("node", "conn_id").applyInArrow(of_connection, VIEWERS_DDL)


def attackers_of(events: DataFrame) -> DataFrame:
    """Return the connections of whom the rules of `flowctl.pipeline.jobs.abuse` call attackers: node, conn_id.

    These are connections with evidence that bans and is more than being slow, and all of addresses that would be banned
    at the end of the data, wherever they are: what limits do to them is no reason for other limits.
    """
    options = AbuseOptions(private=True)
    ends = starts_of(events).collect()  # a row per server
    last_us = max((row["last_us"] for row in ends), default=0)
    starts = events.sparkSession.createDataFrame(
        [(row["node"], row["started_us"]) for row in ends], "node string, started_us bigint"
    )
    found = evidence(events, options.weights)
    behaving = standing(found, starts, options.weights, last_us, last_us)
    scores = address_scores(abuse_sums(found, options.weights, last_us), behaving, options)
    banned = f.broadcast(scores.where("banned").select("address"))
    slow = f.coalesce(f.col("kind") == "deaf_close", f.lit(False))
    direct = found.where(harmful(options.weights) & ~slow).select("node", "conn_id")
    return direct.unionByName(found.join(banned, "address", "left_semi").select("node", "conn_id")).distinct()


def sums(table: DataFrame) -> DataFrame:
    """Return sums of ``whatif_viewers`` by `choice_id`; whole numbers."""
    counted = [*(f"dropped_messages_{name}" for name in CLASS_NAMES), *_SUMMED]
    closed = f.col("closed").isNotNull()
    return (
        table.where(~f.col("choice_id").isin(DAMAGED, NO_VIEWER))
        .groupBy("choice_id")
        .agg(
            f.count("*").alias("viewers"),
            f.sum(f.col("honest").cast("bigint")).alias("honest"),
            f.sum(closed.cast("bigint")).alias("disconnected"),
            f.sum((closed & f.col("honest")).cast("bigint")).alias("honest_disconnected"),
            f.max("memory_peak_bytes").alias("memory_peak_bytes"),
            *(f.sum(name).alias(name) for name in counted),
        )
    )


def delays(table: DataFrame) -> DataFrame:
    """Return microseconds of delay by `choice_id` and bucket."""
    return (
        table.where(~f.col("choice_id").isin(DAMAGED, NO_VIEWER))
        .select("choice_id", f.explode("delay_us").alias("bucket", "us"))
        .groupBy("choice_id", "bucket")
        .agg(f.sum("us").alias("us"))
    )


_SUMMED: Final = (
    "watched_us",
    "assumed_us",
    "offered_messages",
    "key_offered",
    "key_sent",
    "sent_bytes",
    "edges",
    "ready_us",
    "stall_us",
    "memory_mean_bytes",
    "returns",
    "inputs",
    "shown",
)


def _columns(ddl: str) -> list[str]:
    return [part.split()[0] for part in ddl.split(", ")]


# -- choices, in the driver: as many rows as the grid has


def choice_rows(
    choices: Sequence[Choice], by_choice: Mapping[int, Mapping[str, int]], delay: Iterable[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """Return the rows of ``whatif_choices``, without a recommendation.

    Args:
        choices: in order of `choice_id`; the first is in force.
        by_choice: sums by `choice_id`; those of `ALL_CHOICES` count for each.
        delay: (choice_id, bucket, microseconds).
    """
    histograms: dict[int, dict[int, float]] = {}
    for choice_id, bucket, us in delay:
        histograms.setdefault(choice_id, {})[bucket] = us / 1e6
    rows = []
    for number, choice in enumerate(choices):
        parts = [by_choice[key] for key in (number, ALL_CHOICES) if key in by_choice]
        total = {name: sum(part[name] or 0 for part in parts) for name in parts[0]} if parts else {}
        total["memory_peak_bytes"] = max((part["memory_peak_bytes"] or 0 for part in parts), default=0)
        histogram: dict[int, float] = {}
        for key in (number, ALL_CHOICES):
            for bucket, seconds in histograms.get(key, {}).items():
                histogram[bucket] = histogram.get(bucket, 0.0) + seconds
        rows.append({**_settings(number, choice), **_shares(total), **_quantiles(histogram)})
    for row, on_front in zip(rows, mark_front(rows), strict=True):
        row["on_front"] = on_front
    return rows


def _settings(number: int, choice: Choice) -> dict[str, Any]:
    limits = choice.limits
    return {
        "choice_id": number,
        "choice": str(choice),
        "policy": choice.policy,
        **{name: marks_text(limits, level) for level, name in enumerate(("low", "soft", "hard"))},
        "hard_policy": limits.hard_policy.value,
        "target_delay": target_marks(limits),
        "soft_too_long_s": float(choice.soft_too_long_s),
        "stuck_s": float(choice.stuck_s),
        "return_after_s": float(choice.return_after_s),
        "in_force": number == 0,
        "recommended": False,
    }


def _shares(total: Mapping[str, int]) -> dict[str, Any]:
    def share(part: str, whole: str) -> float:
        return total.get(part, 0) / total[whole] if total.get(whole) else 0.0

    by_class = {f"dropped_messages_{name}": total.get(f"dropped_messages_{name}", 0) for name in CLASS_NAMES}
    dropped = sum(by_class.values())
    copied = ("viewers", "disconnected", "honest_disconnected", "offered_messages", "sent_bytes", "edges", "returns")
    return {
        **{name: total.get(name, 0) for name in copied},
        **by_class,
        "dropped_messages": dropped,
        "disconnected_share": share("disconnected", "viewers"),
        "honest_disconnected_share": share("honest_disconnected", "honest"),
        "dropped_share": dropped / total["offered_messages"] if total.get("offered_messages") else 0.0,
        "key_share": share("key_sent", "key_offered") if total.get("key_offered") else 1.0,
        "stall_share": share("stall_us", "watched_us"),
        "assumed_share": (
            total["assumed_us"] / (total["assumed_us"] + total["watched_us"]) if total.get("assumed_us") else 0.0
        ),
        "ready_share": share("ready_us", "watched_us"),
        "memory_peak_bytes": total["memory_peak_bytes"],
        "memory_mean_bytes": share("memory_mean_bytes", "viewers"),
    }


def _quantiles(histogram: Mapping[int, float]) -> dict[str, float]:
    pairs = sorted(histogram.items())
    found = {f"delay_p{percent}_ms": quantile_ms(pairs, percent / 100) for percent in (50, 95, 99)}
    return {**found, "delay_max_ms": bucket_ms(pairs[-1][0]) if pairs else 0.0}


def audience_words(audiences: str) -> str:
    """Return what must be known where servers had audiences with a target delay or policy of their own."""
    return (
        f"audiences had a target delay or policy of their own ({foreign(audiences, 200)}); their viewers were judged "
        "with those of each choice, like all others, and keep their own under any limits file"
    )


def limits_text(
    choice: Choice, pick: Pick, present: Mapping[str, Any], objective: str, who: str, audiences: str = ""
) -> str:
    """Return the limits file of the recommended choice, with the reason and what it costs as comments.

    Args:
        choice: that is recommended.
        pick: its row, and why.
        present: row of the choice in force.
        objective: that was asked for.
        who: whom the figures are of, in words.
        audiences: those of the servers that were recorded. "": there were none.
    """
    file = LimitsFile(
        limits=choice.limits,
        objective=objective,
        stuck_s=choice.stuck_s,
        soft_too_long_s=choice.soft_too_long_s,
        return_after_s=choice.return_after_s,
    )
    head = [
        f"Recommended by flowctl analyze whatif from {who}.",
        f"Objective: {objective}{BALANCED_WORDS if objective.strip() == 'balanced' else ''}",
        f"Why: {pick.why}.",
        *([f"Mind: {audience_words(audiences)}."] if audiences else []),
        "Against the limits in force (in force -> recommended):",
        *(f"  {line}" for line in costs(pick.row, present)),
    ]
    return "".join(f"# {line}\n" for line in head) + render(file)


# -- the job


def run(spark: SparkSession, events: str, out: str, options: WhatifOptions | None = None) -> JobResult:
    """Evaluate the grid over all recorded viewers; write ``whatif_viewers``, ``whatif_choices`` and ``limits.toml``.

    Args:
        spark: session.
        events: folder that the server wrote with ``--events``.
        out: folder of the results.
        options: None: all defaults.

    Returns:
        Accounts of the tables that were read; outputs; summary: viewers (recorded, and the share that was evaluated),
        choices, evaluations, the recommendation.

    Raises:
        ConfigError: there is neither a flight nor a sample, or the grid or the objective is wrong.
    """
    options = options or WhatifOptions()
    source_table = _source(spark, events, options.source)
    flights = source_table == "flight"
    source = read_table(spark, events, source_table)
    happened = read_optional(spark, events, "flow_events")
    judging = None if happened is None or happened.absent else happened.frame
    present = _in_force(source.frame if flights else None, judging)
    choices = default_grid(present or DEFAULT_IN_FORCE)
    if options.grid is not None:
        choices = parse_grid(options.grid, options.grid_name, present or DEFAULT_IN_FORCE)
    rows = flight_rows(source.frame, options.cut_s) if flights else sample_rows(source.frame, options.cut_s)
    attacking = 0
    if judging is not None:
        attackers = attackers_of(judging).persist()
        attacking = rows.join(attackers, ["node", "conn_id"], "left_semi").select("node", "conn_id").distinct().count()
        rows = rows.join(attackers, ["node", "conn_id"], "left_anti")
    rows, recorded, others = bounded(rows, options.most)
    found = viewers(rows, choices, "flight" if flights else "samples", options)
    viewers_path = write_table(found.select(*_columns(VIEWERS_DDL)), f"{out}/whatif_viewers")
    table = spark.read.parquet(viewers_path)
    share = min(1.0, options.most / recorded) if options.most and recorded else 1.0
    audiences = _audiences(judging)
    result = _answer(spark, out, table, choices, options, share, audiences)
    if audiences:
        source.accounts.warnings.append(f"whatif: {audience_words(audiences)}")
    result.summary |= {"viewers_recorded": recorded, "sampled_share": share, "connections_not_viewers": others}
    result.summary["connections_of_attackers"] = attacking
    result.outputs["whatif_viewers"] = viewers_path
    for item in (source, happened):
        if item is not None:
            result.accounts.append(item.accounts)
            result.outputs.update(write_quarantine(spark, item, out))
    result.summary["source"] = source_table
    result.summary["in_force"] = "of the records" if present else "not in the records; the defaults are taken"
    _note_damaged(table, source.accounts, result)
    few = result.summary["viewers_refused"]
    if few < FEW_REFUSED:
        source.accounts.warnings.append(
            f"whatif: only {few} of {result.summary['viewers']} viewers were ever refused anything, and what is "
            "recommended rests on them: record more (a larger share with --flights, or for longer) to rely on it"
        )
    if share < 1:
        source.accounts.warnings.append(
            f"whatif: a simple random sample of {options.most} of {recorded} viewers; shares are of the sample "
            "(--most N takes more, --most 0 all)"
        )
    return result


def _source(spark: SparkSession, events: str, wanted: str) -> str:
    tables = {"flights": ("flight",), "samples": ("flow_samples",), "auto": ("flight", "flow_samples")}[wanted]
    for name in tables:
        if has_table(spark, events, name):
            return name
    raise ConfigError(
        f"{events} has no {' and no '.join(tables)}: there are no viewers to try other limits on",
        hint="record with flowctl serve live --events DIR --flights 5%",
    )


def _audiences(happened: DataFrame | None) -> str:
    """Return the audiences of all servers whose start was recorded."""
    if happened is None:
        return ""
    started = happened.where(f.col("event") == "server_started").select("detail").distinct().limit(_MOST_STARTS)
    return "; ".join(sorted({found for row in started.collect() if (found := audiences_of(row["detail"]))}))


def _in_force(flights: DataFrame | None, happened: DataFrame | None) -> Choice | None:
    """Return the choice in force that the records tell: of the newest flight, else of the newest start of a server."""
    for frame, column, word in ((flights, "kind", "begin"), (happened, "event", "server_started")):
        if frame is None:
            continue
        newest = frame.where(f.col(column) == word).orderBy(f.desc("ts"), f.desc("seq")).select("detail").limit(1)
        for row in newest.collect():
            if (choice := in_force(row["detail"])) is not None:
                return choice
    return None


def _answer(
    spark: SparkSession,
    out: str,
    table: DataFrame,
    choices: Sequence[Choice],
    options: WhatifOptions,
    share: float,
    audiences: str,
) -> JobResult:
    """Sum up, recommend, and write ``whatif_choices`` and ``limits.toml``."""
    by_choice = {row["choice_id"]: row.asDict() for row in sums(table).collect()}
    delay = [(row["choice_id"], row["bucket"], row["us"]) for row in delays(table).collect()]
    rows = [{**row, "sampled_share": share} for row in choice_rows(choices, by_choice, delay)]
    count = rows[0]["viewers"]
    summary: dict[str, Any] = {
        "viewers": count,
        "viewers_refused": by_choice.get(0, {}).get("viewers", 0),
        "choices": len(choices),
        "evaluations": sum(part["inputs"] or 0 for part in by_choice.values()),
        "senders_called": sum(part["shown"] or 0 for part in by_choice.values()),
        "objective": options.objective,
        "honest_share": HONEST_SHARE,
        "audiences": audiences,
    }
    outputs = {}
    if count:
        # A limits file cannot say another policy than the one in force, which row 0 has.
        pick = recommend([row for row in rows if row["policy"] == rows[0]["policy"]], options.objective)
        chosen = rows[pick.row["choice_id"]]
        chosen["recommended"] = True
        who = f"{count} recorded viewers" + (f", a random sample of {share:.2%} of them" if share < 1 else "")
        text = limits_text(choices[chosen["choice_id"]], pick, rows[0], options.objective, who, audiences)
        place = Place(spark, out)
        place.write_text("limits.toml", text)
        outputs["limits.toml"] = place.path("limits.toml")
        summary |= {"recommended": chosen["choice"], "why": pick.why, "bounds_kept": pick.kept}
    names = _columns(CHOICES_DDL)
    frame = spark.createDataFrame([tuple(row[name] for name in names) for row in rows], CHOICES_DDL)
    outputs["whatif_choices"] = write_table(frame, f"{out}/whatif_choices", partitions=1)
    return JobResult(name="whatif", outputs=outputs, summary=summary)


def _note_damaged(table: DataFrame, accounts: Accounts, result: JobResult) -> None:
    """Say which connections could not be evaluated; their rows stay in ``whatif_viewers`` with the reason."""
    damaged = table.where(f.col("choice_id") == DAMAGED)
    count = damaged.count()
    result.summary["connections_not_viewers"] += table.where(f.col("choice_id") == NO_VIEWER).count()
    result.summary["connections_not_evaluated"] = count
    if count:
        first = damaged.orderBy("node", "conn_id").select("conn_id", "reason").limit(1).collect()[0]
        accounts.warnings.append(f"{count} connections could not be evaluated, the first: {first[0]}: {first[1]}")
