"""``whatif``: which limits and drop policies would have been better for the viewers that were recorded.

Theory of operation. Of each hour a bounded sample of viewers is kept, with what can matter of each
(`flowctl.analyze.whatif.stretches`); nothing of the grid is in it. The answer takes the sample of the whole window,
leaves out attackers, draws of those in trouble whom to try (`strata`), and runs the server's own Sender over these for
every choice (`trials`). Counts are estimated from who was tried. How many viewers there were is exact up to
`WhatifOptions.most`; of more it follows from how small the smallest hashes are (Beyer et al., 2007: to 2 % at 2000).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.engine import DUCKDB, running
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart, Parts, arrow_schema
from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.beside import Tried, tally_beside
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid, in_force, levels_of, parse_grid
from flowctl.analyze.whatif.recommend import (
    BALANCED_WORDS,
    Pick,
    costs,
    mark_front,
    recommend,
    without_gain,
)
from flowctl.analyze.whatif.stretches import NO_VIEWER, SERVER, STRETCH_COLUMNS, stretches
from flowctl.analyze.whatif.trials import (
    ALL_CHOICES,
    CALM,
    CUT,
    DELAY,
    HONEST_SHARE,
    PEAK,
    TROUBLED,
    VIEWER,
    Stratum,
    Sums,
    drawn,
    errors,
    tally,
    weighted,
)
from flowctl.core.flow.limits import target_marks
from flowctl.core.flow.limitsfile import LimitsFile, render
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError
from flowctl.records.flight.whatif.types import Choice, bucket_ms, marks_text, quantile_ms
from flowctl.records.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame


MOST_TRIED_S: Final = 400.0
"""Seconds around trouble, and assumed after cuts, that are tried: of a busy stream each costs 50 choices 25 ms."""
FEW_REFUSED: Final = 20
"""Least viewers in trouble for a share: with fewer, one more or less is over five percent."""
REPEATS: Final = 3
"""Trials of what is in force and what is recommended, each with the lines at another moment of the stream."""
RANGED: Final = ("disconnected", "honest_disconnected", "dropped_share")
_ENDS: Final[tuple[tuple[str, Any], ...]] = (("low", min), ("high", max))
STRETCHES: Final = "whatif_stretches"
SET_WORDS: Final = (
    "renditions were tried on viewers in trouble only: of the others nobody knows what their lines carry beyond what "
    "they were sent; other renditions look like the recorded one, larger or smaller"
)
"""What must be known where a grid has renditions."""
MOST_HERE_S: Final = 25_000.0
"""Seconds to be tried, times choices, that are tried without Spark where parts are small, a tenth to half of a
millisecond each: all that the default grid tries. Spark's workers need 7 s of processor time to begin."""

CHOICE_COLUMNS: Final[dict[str, str]] = {
    "choice_id": "int",
    **dict.fromkeys(("choice", "policy", "soft", "hard", "low", "hard_policy", "target_delay"), "string"),
    **dict.fromkeys(("soft_too_long_s", "stuck_s", "return_after_s"), "double"),
    **dict.fromkeys(("in_force", "on_front", "recommended"), "boolean"),
    "viewers": "bigint",
    "disconnected": "bigint",
    "disconnected_share": "double",
    "honest_disconnected": "bigint",
    "honest_disconnected_share": "double",
    "offered_messages": "bigint",
    "dropped_messages": "bigint",
    "dropped_share": "double",
    **{f"dropped_messages_{name}": "bigint" for name in CLASS_NAMES},
    **dict.fromkeys(("key_share", "delay_p50_ms", "delay_p95_ms", "delay_p99_ms", "delay_max_ms"), "double"),
    **dict.fromkeys(("stall_share", "ready_share"), "double"),
    "memory_peak_bytes": "bigint",
    "memory_mean_bytes": "double",
    **dict.fromkeys(("sent_bytes", "edges", "returns"), "bigint"),
    **dict.fromkeys(("assumed_share", "sampled_share", "disconnected_error", "change_error"), "double"),
    **dict.fromkeys([f"{name}_{end}" for name in RANGED[:2] for end, _ in _ENDS], "bigint"),
    **dict.fromkeys([f"{name}_{end}" for name in RANGED[2:] for end, _ in _ENDS], "double"),
}
"""Contract of ``whatif_choices``. Grain: one choice over all viewers. `disconnected_error`: standard error of
`disconnected_share`; `change_error`: that of its difference to the choice in force, for other viewers like these.
`..._low`, `..._high`: of the repeats, for the choice in force and the one that was best; null for others."""


# -- the sample


@dataclass(slots=True)
class Sample:
    """The viewers of the window."""

    heads: pd.DataFrame
    # what servers said of their limits up to the end of the window: time, `SERVER`, detail
    starts: Sequence[tuple[Any, str, str | None]]
    recorded: int
    share: float
    attackers: int
    tried: pd.DataFrame  # those that are tried, as of `flowctl.analyze.whatif.trials.drawn`
    strata: dict[int, Stratum]
    viewers: Sequence[Tried] | None = None  # the rows of those that are tried, once they were needed here


_SUMS: Final = {"stratum": "int", "choice": "int", "measure": "string", "value": "bigint"}
_ORDER: Final = ("stratum", "node", "conn_id", "at")
_TOLD: Final = ("at", "source", "settings")
_HEAD: Final = (*VIEWER, "address", "at", "source", "reason", "settings", "ended_us", "close_reason")


def sample_of(parts: Parts, options: WhatifOptions) -> Sample:
    """Return the sample of the window, of one source: flights where there are any, if nothing else was asked for."""
    from pyarrow import dataset

    if parts.small:
        rows = parts.arrow(STRETCHES, _HEAD).to_pandas()
        rows = rows[rows["source"] == _source(rows["source"].unique())]
        keys = rows[VIEWER].drop_duplicates().sort_values(VIEWER)
        keys = keys.head(options.most) if options.most else keys
        heads = rows.merge(keys, on=VIEWER)
    else:
        table = parts.table(STRETCHES).select(*_HEAD)
        source = _source([row["source"] for row in table.select("source").distinct().collect()])
        light = table.where(f.col("source") == source)
        found = light.select(*VIEWER).distinct().orderBy(*VIEWER)
        keys = (found.limit(options.most) if options.most else found).toArrow().to_pandas()
        heads = light.join(_keys(parts, keys), ["node", "conn_id"], "left_semi").toArrow().to_pandas()
    recorded = _recorded(keys, options.most)
    honest = _without_attackers(parts, heads)
    count, left = (len(some[["node", "conn_id"]].drop_duplicates()) for some in (heads, honest))
    chosen = drawn(honest[honest["reason"].isna()], options.extend_s, MOST_TRIED_S if options.most else math.inf)
    servers = parts.arrow(STRETCHES, _TOLD, dataset.field("source") == SERVER, before=True).to_pylist()
    told = [tuple(row[name] for name in _TOLD) for row in servers]
    return Sample(honest, told, recorded, min(count / recorded, 1.0) if recorded else 1.0, count - left, *chosen)


def _without_attackers(parts: Parts, heads: pd.DataFrame) -> pd.DataFrame:
    """Return the viewers of whom the rules of ``abuse`` do not say that they attack."""
    from flowctl.analyze.abuse.scores import attackers

    if heads.empty:
        return heads
    newest_us = int(parts.newest.timestamp() * 1e6) if parts.newest is not None else 0
    direct, banned = attackers(parts, set(heads["address"].dropna()), newest_us)
    pairs = zip(heads["node"], heads["conn_id"], heads["address"], strict=True)
    return heads[[(node, number) not in direct and who not in banned for node, number, who in pairs]]


def _source(found: Sequence[str]) -> str:
    return "flight" if "flight" in found else "samples"


def _keys(parts: Parts, keys: pd.DataFrame) -> DataFrame:
    """Return who is in the sample, and in which stratum, as a frame of Spark that is sent to all workers."""
    strata = keys.get("stratum", [CALM] * len(keys))
    rows = [
        (node, int(number), int(part)) for node, number, part in zip(keys["node"], keys["conn_id"], strata, strict=True)
    ]
    return f.broadcast(parts.spark.createDataFrame(rows, "node string, conn_id bigint, stratum int"))


def _recorded(keys: pd.DataFrame, most: int) -> int:
    """Return how many viewers there were, by the largest of the smallest hashes where not all were kept."""
    if not most or len(keys) < most or most < 2:
        return len(keys)
    share = (int(keys["picked"].iloc[-1]) + 2**63) / 2**64
    return max(round((most - 1) / share), most) if share else most


def tried(
    parts: Parts, sample: Sample, choices: Sequence[Choice], options: WhatifOptions, repeat: int = 0
) -> dict[int, Sums]:
    """Return what each choice does for those of the sample who are tried, by stratum, in a repeat of the trial."""
    who, extend_s = sample.tried, options.extend_s
    if who.empty:
        return {}
    source = sample.heads["source"].iloc[0]

    if running() == DUCKDB or (parts.small and who["cost_s"].sum() * len(choices) <= MOST_HERE_S):
        if sample.viewers is None:
            sample.viewers = _viewers(parts, who, source)
        return tally_beside(sample.viewers, choices, extend_s, repeat)
    table = parts.table(STRETCHES).where(f.col("reason").isNull() & (f.col("source") == source))
    table = table.join(_keys(parts, who), ["node", "conn_id"])
    # More tasks than cores: one viewer in trouble all the time costs as much as a hundred others.
    tasks = 8 * parts.spark.sparkContext.defaultParallelism
    table = table.repartition(tasks, "node", "conn_id").sortWithinPartitions(*_ORDER)

    def of_part(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        told = (row for batch in batches for row in batch.to_pylist())
        for stratum, group in itertools.groupby(told, key=lambda row: row["stratum"]):
            found = tally((viewer for _, viewer in _by_viewer(group)), choices, extend_s, repeat)
            rows = [dict(zip(_SUMS, (stratum, *key, value), strict=True)) for key, value in found.items()]
            yield pa.RecordBatch.from_pylist(rows, arrow_schema(_SUMS))

    *keys, _ = _SUMS
    made = table.mapInArrow(of_part, ", ".join(f"{name} {kind}" for name, kind in _SUMS.items())).groupBy(*keys)
    value = f.when(f.col("measure") == PEAK, f.max("value")).otherwise(f.sum("value"))
    sums: dict[int, Sums] = {}
    for stratum, choice, measure, total in made.agg(value).collect():
        sums.setdefault(stratum, {})[choice, measure] = total
    return sums


def _viewers(parts: Parts, who: pd.DataFrame, source: str) -> list[Tried]:
    from pyarrow.dataset import field

    wanted = field("picked").isin(who["picked"].tolist()) & (field("source") == source) & field("reason").is_null()
    rows = sorted(parts.arrow(STRETCHES, where=wanted).to_pylist(), key=lambda row: [row[name] for name in _ORDER[1:]])
    known = who.set_index(["node", "conn_id"])[["stratum", "cost_s"]].to_dict("index")
    return [Tried(**known[key], rows=found) for key, found in _by_viewer(rows)]


def _by_viewer(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int], list[Mapping[str, Any]]]]:
    for key, group in itertools.groupby(rows, key=lambda row: (row["node"], row["conn_id"])):
        yield key, list(group)


# -- choices


def choice_rows(choices: Sequence[Choice], sums: Sums, sampled_share: float) -> list[dict[str, Any]]:
    totals: dict[int, dict[str, int]] = {}
    for (key, measure), value in sums.items():
        totals.setdefault(key, {})[measure] = value
    rows = []
    for number, choice in enumerate(choices):
        own, common = Counter(totals.get(number)), Counter(totals.get(ALL_CHOICES))
        total = own + common
        total[PEAK] = max(own[PEAK], common[PEAK])
        delay = {int(name[len(DELAY) :]): us / 1e6 for name, us in total.items() if name.startswith(DELAY)}
        rows.append(
            {**_settings(number, choice), **_shares(total), **_quantiles(delay), "sampled_share": sampled_share}
        )
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


def _shares(total: Counter[str]) -> dict[str, Any]:
    def share(part: str, whole: str, none: float = 0.0) -> float:
        return total[part] / total[whole] if total[whole] else none

    by_class = [f"dropped_messages_{name}" for name in CLASS_NAMES]
    total["dropped_messages"] = sum(total[name] for name in by_class)
    copied = ("viewers", "disconnected", "honest_disconnected", "offered_messages", "sent_bytes", "edges", "returns")
    return {
        **{name: total[name] for name in (*copied, PEAK, *by_class, "dropped_messages")},
        "disconnected_share": share("disconnected", "viewers"),
        "honest_disconnected_share": share("honest_disconnected", "honest"),
        "dropped_share": share("dropped_messages", "offered_messages"),
        "key_share": share("key_sent", "key_offered", none=1.0),
        "stall_share": share("stall_us", "watched_us"),
        "assumed_share": share("assumed_us", "watched_us"),
        "ready_share": share("ready_us", "watched_us"),
        "memory_mean_bytes": share("memory_mean_bytes", "viewers"),
    }


def _quantiles(delay: Mapping[int, float]) -> dict[str, float]:
    pairs = sorted(delay.items())
    found = {f"delay_p{percent}_ms": quantile_ms(pairs, percent / 100) for percent in (50, 95, 99)}
    return {**found, "delay_max_ms": bucket_ms(pairs[-1][0]) if pairs else 0.0}


# -- the answer


def answer(parts: Parts, options: WhatifOptions) -> JobAnswer:
    """Try the grid on the sample; write ``whatif_choices`` and ``limits.toml``.

    With no viewer in the sample there is nothing to write, and an earlier ``limits.toml`` stays: a server may read it.
    """
    sample = sample_of(parts, options)
    present, levels = _in_force(sample), _viewer_levels(sample.starts)
    choices = default_grid(present or DEFAULT_IN_FORCE)
    if options.grid is not None:
        choices = parse_grid(options.grid, options.grid_name, present or DEFAULT_IN_FORCE)
    with_sets = any(choice.renditions for choice in choices)
    if with_sets and "samples" in set(sample.heads["source"]):
        raise ConfigError(
            f"{options.grid_name}: renditions are tried on flights: samples do not say how fast a line was",
            hint="record some: flowctl serve live --flights 1%",
        )
    by_stratum = tried(parts, sample, choices, options)
    share = sample.share
    rows = choice_rows(choices, weighted(by_stratum, sample.strata), share)
    for row in rows:
        off = errors(row["choice_id"], by_stratum, sample.strata, sample.recorded)
        row["disconnected_error"], row["change_error"] = off
    summary, warnings = _said(sample, by_stratum, rows, share, options)
    summary |= {"levels": levels}
    summary["in_force"] = "of the records" if present else "not in the records; the defaults are taken"
    if levels:
        warnings.insert(0, f"whatif: {level_words(levels)}")
    if with_sets:
        warnings.append(f"whatif: {SET_WORDS}")
    if not rows[0]["viewers"]:
        summary["why"] = "there is no viewer to try other limits on"
        if options.source == "flights" and sample.heads.empty:
            summary["why"] = "there is no flight of a viewer: flowctl serve live --flights 5% records some"
        if earlier := parts.place.read_text("limits.toml"):
            parts.write_text("limits.toml", earlier)
            summary["why"] += "; limits.toml is that of an earlier run"
        return JobAnswer(summary=summary, warnings=[*warnings, f"whatif: {summary['why']}"])
    # A limits file cannot say another policy than the one in force, which row 0 has, nor renditions.
    pick = recommend(
        [
            row
            for row, choice in zip(rows, choices, strict=True)
            if choice.policy == choices[0].policy and not choice.renditions
        ],
        options.objective,
    )
    told = sorted({0, pick.row["choice_id"]})
    for number, spans in zip(
        told, _repeated(parts, sample, [choices[number] for number in told], options), strict=True
    ):
        rows[number].update(
            {f"{name}_{end}": get((rows[number][name], *span)) for name, span in spans.items() for end, get in _ENDS}
        )
    # The middle of the repeats: in the worst, a viewer that was cut in a stall is taken for dead under all limits.
    middle = (pick.row["honest_disconnected_low"] + pick.row["honest_disconnected_high"]) // 2
    pick = without_gain(pick, rows[0], middle) or pick
    chosen = rows[pick.row["choice_id"]]
    chosen["recommended"] = True
    pick = pick._replace(why=f"{pick.why}{_levels(chosen)}{_rests_on(summary, options)}")
    who = f"{rows[0]['viewers']} recorded viewers" + (f", a random sample of {share:.2%} of them" if share < 1 else "")
    text = limits_text(choices[chosen["choice_id"]], pick, rows[0], options.objective, who, levels)
    parts.write_text("limits.toml", text)
    summary |= {"recommended": chosen["choice"], "why": pick.why, "bounds_kept": pick.kept}
    import pandas as pd

    parts.write("whatif_choices", pd.DataFrame(rows, columns=list(CHOICE_COLUMNS)), CHOICE_COLUMNS)
    return JobAnswer(summary=summary, warnings=warnings)


def _repeated(
    parts: Parts, sample: Sample, choices: Sequence[Choice], options: WhatifOptions
) -> list[dict[str, list[Any]]]:
    """Return what `RANGED` is in each repeat of the trial, by choice: real runs of the same limits differ like that."""
    found: list[dict[str, list[Any]]] = [{name: [] for name in RANGED} for _ in choices]
    for repeat in range(1, REPEATS):
        sums = weighted(tried(parts, sample, choices, options, repeat), sample.strata)
        for spans, row in zip(found, choice_rows(choices, sums, sample.share), strict=True):
            for name, values in spans.items():
                values.append(row[name])
    return found


def _levels(row: Mapping[str, Any]) -> str:
    """Return the levels of the recommended choice, as far as repeats of the trial agree on them."""
    low, high, viewers = row["disconnected_low"], row["disconnected_high"], row["viewers"]
    cut = f"{low}" if low == high else f"{low} to {high}"
    dropped = " to ".join(dict.fromkeys(f"{row[f'dropped_share_{end}']:.1%}" for end, _ in _ENDS))
    return f"; tried {REPEATS} times, they cut {cut} of {viewers} viewers and leave out {dropped} of the messages"


def _rests_on(summary: Mapping[str, Any], options: WhatifOptions) -> str:
    """Return what a promise must say with it: on how few it rests, and what of it was not seen."""
    said, refused, cut = "", summary["viewers_refused"], summary["viewers_cut"]
    if refused < FEW_REFUSED:
        said += f"; this rests on {refused} viewer{'s' * (refused != 1)} in trouble"
    if cut:
        said += f"; {cut} of {summary['viewers']} viewers were cut while recorded, and what they would have had then "
        after = f"is assumed: {options.extend_s:g} s more on a line as theirs was last"
        said += after if options.extend_s else "is not known, nor part of any delay here"
    return said


def _said(
    sample: Sample, sums: Mapping[int, Sums], rows: Sequence[Mapping[str, Any]], share: float, options: WhatifOptions
) -> tuple[dict[str, Any], list[str]]:
    heads, viewers = sample.heads, rows[0]["viewers"]
    refused = sum(part.get((0, "troubled"), 0) for part in sums.values())
    cut, other = (sample.strata.get(number, Stratum(0, 0)) for number in (CUT, TROUBLED))
    troubled, chosen = cut.size + other.size, cut.tried + other.tried
    told = heads[heads["reason"].notna()].sort_values(["node", "conn_id"])
    damaged = told[~told["reason"].isin(NO_VIEWER)]
    summary: dict[str, Any] = {
        "viewers": viewers,
        "viewers_refused": refused,
        "viewers_troubled": troubled,
        "viewers_cut": cut.size,
        "choices": len(rows),
        "objective": options.objective,
        "honest_share": HONEST_SHARE,
        "viewers_recorded": sample.recorded,
        "sampled_share": share,
        "connections_not_viewers": len(told) - len(damaged),
        "connections_of_attackers": sample.attackers,
        "connections_not_evaluated": len(damaged),
        "source": next(iter(heads["source"]), None),
    }
    warnings = []
    if viewers and refused < FEW_REFUSED:
        more = (
            "try more (--most 0 tries all)" if chosen < troubled else "record more (a larger --flights, or for longer)"
        )
        warnings.append(
            f"whatif: only {refused} of {viewers} viewers were ever in trouble, and what is "
            f"recommended rests on them: {more} to rely on it"
        )
    if viewers and (share < 1 or chosen < troubled):
        off = 200 * max((row["disconnected_error"] for row in rows), default=0.0)
        drawn_of = (
            f"{len(told) + viewers} of about {sample.recorded} viewers, a random sample, and " if share < 1 else ""
        )
        warnings.append(
            f"whatif: of {drawn_of}{troubled} in trouble {chosen} were tried, for all of these; shares of viewers cut "
            f"are off by up to {off:.1f} points (--most 0 tries all, for so much longer)"
        )
    if len(damaged):
        first = damaged.iloc[0]
        warnings.append(
            f"{len(damaged)} connections could not be evaluated, the first: {first['conn_id']}: {first['reason']}"
        )
    return summary, warnings


def _in_force(sample: Sample) -> Choice | None:
    """Return the choice in force that the records tell: of the newest flight, start of a server or change of limits."""
    flights = sample.heads.dropna(subset=["settings"]).sort_values("at").drop_duplicates(["node", "conn_id"])
    told = [*flights[list(_TOLD)].itertuples(index=False, name=None), *sample.starts]
    told.sort(key=lambda row: row[0], reverse=True)
    return next((found for _, source, detail in told if (found := in_force(detail)) or source == SERVER), None)


def _viewer_levels(starts: Sequence[tuple[Any, str, str | None]]) -> str:
    return "; ".join(sorted({found for *_, detail in starts if (found := levels_of(detail))}))


def level_words(levels: str) -> str:
    """Return what must be known where servers had levels with a target delay or policy of their own."""
    return (
        f"levels had a target delay or policy of their own ({foreign(levels, 200)}); their viewers were judged "
        "with those of each choice, like all others, and keep their own under any limits file"
    )


def limits_text(
    choice: Choice, pick: Pick, present: Mapping[str, Any], objective: str, who: str, levels: str = ""
) -> str:
    """Return the limits file of the recommended choice, with the reason and what it costs as comments."""
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
        *([f"Mind: {level_words(levels)}."] if levels else []),
        "Against the limits in force (in force -> recommended):",
        *(f"  {line}" for line in costs(pick.row, present)),
    ]
    return "".join(f"# {line}\n" for line in head) + render(file)


JOB: Final = AnalysisJob(
    name="whatif",
    parts=(
        JobPart(
            name=STRETCHES,
            columns=STRETCH_COLUMNS,
            make=stretches,
            reads=("flight", "flow_samples", "flow_closes", "flow_opens", "flow_events"),
            depends=lambda options: f"{options.source} {options.cut_s:g} {options.most}",
        ),
    ),
    uses=("evidence",),
    results=("whatif_choices", "limits.toml"),
    answer=answer,
    options=WhatifOptions,
)
