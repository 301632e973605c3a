"""From result tables to the figures of the report: one pass over each in this process, batch by batch, by pyarrow.

Every figure is a sum over batches, the first rows of a table, or made of a random sample, so memory does not grow with
the tables. Columns that a table does not have are null: another version costs less of the page, not all of it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from flowctl.analyze.records.place import RecordPlace
from flowctl.analyze.report.found import MEASURES, STATES, SURE_OF_DIFFERENCE, CutTable, ReportFindings, Row, json_of
from flowctl.analyze.report.timelines import timelines
from flowctl.analyze.viewers.ingest import HEALTH
from flowctl.charts.words import number
from flowctl.core.text.addresses import NETWORK_BITS, UNIT_BITS, Network, meanings
from flowctl.core.text.printable import foreign
from flowctl.reasons import SLOW_ENDS
from flowctl.records.telemetry.schema import VIEWING

MOST_ROWS: Final = 100
"""Most rows of a table on the page, as a person looks through them. The whole table lies beside as Parquet."""
MOST_MOMENTS: Final = 120
"""Most places along time: each is five pixels of a wide picture."""
MOST_STREAMS: Final = 7
"""Most streams with a colour of their own; all others are one."""
LEAST_STAY_S: Final = 2.0
"""Least stay of a viewer in a distribution over viewers: a shorter one has a sample or two, of its join."""
MOST_SAMPLED: Final = 300_000
"""Most sessions that figures over viewers are made of; of more a random sample is taken, some 150 MB."""
_LARGE_PART: Final = 1 / 300
"""Error of a sum over a sample from which on one address would bring it in alone."""
_PLACES: Final = 1 << 20
"""Places that addresses are counted in, by their hash."""
PICTURES: Final = (-math.inf, 0.5, 0.8, 0.95, 1.0, math.inf)
_PICTURE_WORDS: Final = ["all", "95 % and more", "80 to 95 %", "50 to 80 %", "less than half", "not known"]
"""Classes of viewers by their share of the pictures, and what they are called."""
_POINTS: Final = [point / 200 for point in range(201)]
"""Shares of the viewers for which a curve tells their delay."""
_BATCH_ROWS: Final = 16_384
_BATCHES: Final = 16
_MOST_FIGURE: Final = 1e15
"""Largest figure that is believed: the checks of records have put rows with larger ones aside."""
_STEPS_S: Final = (60, 120, 300, 600, 900, 1800, *(3600 * hours for hours in (1, 2, 4, 6, 12, 24, 48, 168, 720, 8760)))
"""Lengths of a place along time: round ones, so that ticks fall between places."""
_TIES: Final = ("node", "conn_id", "cidr", "address", "choice_id", "key", "app", "stream")


class Top(NamedTuple):
    """Which rows of a table are its first: the largest by `order`, those without a value last."""

    job: str  # that writes the table
    order: Sequence[str]  # columns, the one that counts most first
    most: int = MOST_ROWS
    where: str = ""  # column that must be above 0 for a row to count; "": all do
    by: str = ""  # column of which each value has first rows of its own; "": the whole table has


TOPS: Final[Mapping[str, Top]] = {
    "experience": Top("experience", ("viewers", "plays"), 100, by="by"),  # all: any of them may be in trouble
    "ingest": Top("experience", ("health", "gap_ms", "reconnects", "key_interval_max_ms", "jitter_ms"), 1000),
    "whatif_choices": Top("whatif", ("recommended", "in_force", "on_front"), 200),
    "abuse_scores": Top("abuse", ("banned", "score"), 200, where="points"),
    "capacity_nodes": Top("capacity", ("load_peak",)),
}


class Tables:
    """The results in a folder; of tables with a time those rows that lie in the window."""

    def __init__(self, place: RecordPlace, *, since: datetime | None = None, until: datetime | None = None) -> None:
        self._since, self._until = since, until
        self.place = place

    def batches(self, name: str, columns: Sequence[str] = (), at: str = "") -> Iterator[pd.DataFrame]:
        """Yield a table in pieces: these columns, or all; `at`: the column with the time by which the window cuts."""
        if not self.place.exists(name):
            return
        source = ds.dataset(self.place.storage.path(name), format="parquet", filesystem=self.place.storage.system)
        there = [column for column in columns or source.schema.names if column in source.schema.names]
        wanted = pc.scalar(True)
        if at in there and self._since:
            wanted &= ds.field(at) >= pa.scalar(self._since)
        if at in there and self._until:
            wanted &= ds.field(at) < pa.scalar(self._until)
        batches = source.to_batches(columns=there, filter=wanted, batch_size=_BATCH_ROWS)
        # An hour is a file, and a file at least a batch: small ones are put together.
        while some := list(itertools.islice(batches, _BATCHES)):
            if any(batch.num_rows for batch in some):
                yield pa.Table.from_batches(some).to_pandas().reindex(columns=list(columns or there))

    def sample(self, names: Mapping[str, str], columns: Sequence[str]) -> tuple[pd.DataFrame, float]:
        """Return all rows of tables (name -> column with the time), or a random sample, and which share that is.

        Addresses are drawn, each with all its rows, so that what is said of one is true of those in the sample. Only an
        address of so many rows that chance would lie in it is drawn row by row: it is many people.
        """
        counts = np.zeros(_PLACES, np.int64)
        for name, at in names.items():
            for frame in self.batches(name, ("peer_ip", "conn_id", at), at):
                counts += np.bincount(_hashes(frame) % _PLACES, minlength=_PLACES)
        large = counts > math.sqrt(float(counts.sum()) * MOST_SAMPLED) * _LARGE_PART
        found, drawn, chance = pd.DataFrame(), 1.0, np.random.default_rng(1)
        for frame in (frame for name, at in names.items() for frame in self.batches(name, columns, at)):
            hashes = _hashes(frame)
            draws = np.where(large[hashes % _PLACES], chance.random(len(frame)), hashes / 2.0**64)
            found = pd.concat([found, frame.assign(_draw=draws)[draws < drawn]], ignore_index=True)
            while len(found) > MOST_SAMPLED:
                drawn /= 2
                found = found[found["_draw"] < drawn]
        return found, drawn

    def top(self, name: str, top: Top) -> dict[str, CutTable]:
        """Return the first rows of a table, by the value of `top.by`, under its own name without."""
        kept: dict[str, tuple[pd.DataFrame, int]] = {}
        for frame in self.batches(name):
            used = frame[frame[top.where].astype(float) > 0] if top.where in frame else frame
            for value, rows in used.groupby(top.by) if top.by else [(name, used)]:
                before, total = kept.get(str(value), (rows.head(0), 0))
                kept[str(value)] = first(pd.concat([before, rows]), top.order, top.most), total + len(rows)
        return {value: CutTable(rows_of(rows), total) for value, (rows, total) in kept.items()}


def _hashes(rows: pd.DataFrame) -> Any:
    """Return a number per row, the same for the same address; a connection without one stands for itself."""
    of = rows["peer_ip"].fillna(rows["conn_id"].astype(str)).astype(str)
    return pd.util.hash_array(of.to_numpy(object))


def first(rows: pd.DataFrame, order: Sequence[str], most: int = MOST_ROWS) -> pd.DataFrame:
    """Return the first rows; ties are broken by names, so that the same tables give the same page."""
    keys = [name for name in dict.fromkeys((*order, *_TIES)) if name in rows]
    ascending = [name not in order for name in keys]
    return (rows.sort_values(keys, ascending=ascending, key=_ranked) if keys else rows).head(most)


_BY_HEALTH: Final = (*(word for word in HEALTH if word not in ("came back", "steady")), "came back", "steady")
"""Health of publishers in the order of the table: all publications but the first came back, so that is said last."""


def _ranked(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return what a column is sorted by: the health of publishers by how bad it is, anything else by itself."""
    return column.map({word: -place for place, word in enumerate(_BY_HEALTH)}) if column.name == "health" else column


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return a small frame as plain rows, null and what is no number as None, times as texts."""
    rows: list[Row] = json.loads(frame.to_json(orient="records", date_format="iso", double_precision=15))
    return rows


def gather(
    tables: Tables, events: str, jobs: Mapping[str, Any], accounts: Sequence[Row] = (), window: str = ""
) -> ReportFindings:
    missing: dict[str, str] = {}

    def read(job: str, name: str, take: Callable[[], Any], of: str = "") -> Any:
        if jobs and jobs.get(job, {}).get("state") != "done":
            return None
        try:
            return take()
        except Exception as error:  # noqa: BLE001 - a table may be broken in any way, and must not cost the others
            missing[of or job] = foreign(f"{name}: {type(error).__name__}: {error}", 300)
            return None

    cuts: dict[str, CutTable] = {}
    for name, top in TOPS.items():
        cuts |= read(top.job, name, functools.partial(tables.top, name, top)) or {}
    earlier = read("experience", "experience_before", lambda: list(tables.batches("experience_before"))) or []
    before = {(str(row["by"]), str(row["key"])): row for rows in map(rows_of, earlier) for row in rows}
    if (bans := read("abuse", "bans.jsonl", lambda: tables.place.read_text("bans.jsonl"))) is not None:
        lines = sorted(map(json_of, bans.split("\n")), key=lambda row: -(number(row.get("score")) or 0.0))
        cuts["bans"] = CutTable(list(filter(None, lines)))
    listed = Listed(row.get("cidr") for row in cuts.get("bans", CutTable()).rows)
    if "ingest" in cuts:  # who sends to harm is no publisher that one could call
        rows = [row for row in cuts["ingest"].rows if row.get("peer_ip") not in listed]
        cuts["ingest"] = CutTable(rows, cuts["ingest"].total - len(cuts["ingest"].rows) + len(rows))
    viewers = read("sessions", "sessions", lambda: _viewers(tables, cuts.get("all", CutTable()).rows, listed)) or {}
    named = [str(row["key"]) for row in cuts.get("stream", CutTable()).rows if row["key"]][:MOST_STREAMS]
    fields = viewers | (read("fleet", "fleet_streams", lambda: _over_time(tables, named)) or {})
    worst = fields.get("tables", {}).get("worst", CutTable()).rows
    lines = read("sessions", "records", lambda: timelines(events, worst), "timelines") or []
    books = _books(jobs, accounts, missing)
    cuts |= fields.get("tables", {}) | {name: CutTable(rows, len(rows)) for name, rows in books.items()}
    made_at = datetime.now(UTC)
    told: dict[str, Any] = {
        "timelines": lines,
        "events": events,
        "made_at": made_at,
        "window": window,
        "jobs": jobs,
        "missing": missing,
    }
    return ReportFindings(**told, before=before, **fields | {"tables": cuts})


def _books(jobs: Mapping[str, Any], accounts: Sequence[Row], missing: Mapping[str, str]) -> dict[str, Sequence[Row]]:
    aside = [
        {"reason": reason, "table": item.get("table"), "of": of, "count": count}
        for item in accounts
        for of, name in (("rows", "by_reason"), ("files", "files_by_reason"))
        for reason, count in (item.get(name) or {}).items()
    ]
    done = [{"job": name, **note, "warnings": "; ".join(note.get("warnings") or ())} for name, note in jobs.items()]
    unread = [{"job": name, "why": why} for name, why in missing.items()]
    return {"accounts": accounts, "aside": aside, "jobs": done, "unread": unread}


# ------------------------------------------------------------------------------------------------ viewers

_CURVES: Final = ("delay_p50_ms", "delay_p95_ms", "delay_p99_ms")
_TIMES: Final = ["opened_at", "closed_at", "seen_at"]
_NUMBERS: Final = [
    *("duration_s", "play_s", "trouble_ms", "line_of_stream", "first_frame_ms", "pictures_wanted", "sampled_ms"),
    *("set_s", "switches", "target_delay_ms"),
    *(*(name for name, known in MEASURES.items() if known.kind == "ratio"), *_CURVES),
]
_COLUMNS: Final = (
    *("node", "conn_id", "peer_ip", "role", "app", "stream", "agent", "close_reason", "closed_by", "worst_state"),
    *("blame", "renditions", "why_smaller", *_TIMES, *_NUMBERS),
)


def _viewers(tables: Tables, whole: Sequence[Row], listed: Listed) -> dict[str, Any]:
    """Return what sessions, closed and open, came to: fields of `ReportFindings`; {}: there are none."""
    frame, drawn = tables.sample({"sessions": "closed_at", "sessions_open": ""}, _COLUMNS)
    if frame.empty:
        return {}
    values = frame[_NUMBERS].astype(float)
    frame[_NUMBERS] = values.where(values.abs() <= _MOST_FIGURE)
    times = frame[_TIMES].apply(pd.to_datetime, utc=True, errors="coerce")
    frame["cut_slow"] = frame["close_reason"].isin(SLOW_ENDS)
    frame = frame.fillna({"blame": "none", "node": "-", "close_reason": "still open", "closed_by": "open"})
    viewers = frame[frame["role"].isin(VIEWING)]
    bad = viewers["peer_ip"].isin([address for address in viewers["peer_ip"].unique() if address in listed])
    troubled = viewers[viewers["blame"] != "none"]
    honest = troubled[~bad.reindex(troubled.index)]
    stayed = viewers[viewers["duration_s"] >= LEAST_STAY_S]
    pictures = pd.cut(stayed["picture_share"], PICTURES, right=False, labels=_PICTURE_WORDS[-2::-1]).astype(object)
    tallies = {
        "closes": frame[["close_reason", "closed_by"]].value_counts(),
        "blames": troubled["blame"].value_counts(),
        "pictures": pictures.fillna("not known").rename("of").value_counts().reindex(_PICTURE_WORDS).dropna(),
    }
    told = {name: (tally / drawn).round().reset_index(name="count") for name, tally in tallies.items()}
    cuts = {name: CutTable(rows_of(rows.head(200)), len(rows)) for name, rows in told.items()}
    worst = first(honest, ("cut_slow", "trouble_ms", "delay_p99_ms"))
    worst = worst.assign(network=[_networks_of(str(address))[1] for address in worst["peer_ip"]])
    worst = worst.assign(until=times["closed_at"].fillna(times["seen_at"]))
    cuts["worst"] = CutTable(rows_of(worst), len(honest))
    sets = viewers[~bad & (viewers["set_s"] > 0)]
    cuts["renditions"] = _renditions(sets["renditions"], drawn)
    smaller = sets.assign(smaller_s=sets["set_s"] * sets["smaller_rendition_share"])
    cuts["sets"] = CutTable(rows_of(first(smaller, ("smaller_s", "set_s"))), len(smaller))
    # Whom to call is said by viewers, not by connections: who comes back again and again is one.
    until = times["closed_at"].fillna(times["seen_at"])
    trouble_ms = frame["trouble_ms"].fillna(0.0).clip(0.0, frame["duration_s"].fillna(0.0).clip(0.0, 1e7) * 1000)
    until = until.where(~frame["cut_slow"], until - pd.to_timedelta(trouble_ms, "ms"))
    there = viewers[["node", "blame"]].assign(
        address=viewers["peer_ip"].fillna(viewers["conn_id"].astype(str)), began=times["opened_at"], until=until
    )
    nodes = at_once(there, "node", "blame", "address").groupby(["node", "blame"]).sum()
    cuts["nodes"] = CutTable(rows_of((nodes / drawn).round().reset_index(name="count")), len(nodes))
    there = there[~bad]
    cuts["links"] = _links(at_once(there[there["blame"] == "viewer_link"], "address"), at_once(there, "address"), drawn)
    span_s = (times.max().max() - times["opened_at"].min()).total_seconds()
    totals = {"connections": round(len(frame) / drawn), "span_s": span_s, "drawn_share": drawn}
    totals["people"] = round(float(at_once(there, "address").sum()) / drawn)
    totals["listed"] = round(int(bad.sum()) / drawn)
    totals["target_delay_ms"] = number(stayed["target_delay_ms"].median())
    for row in whole:
        totals |= {"play_s": (number(row.get("play_hours")) or 0.0) * 3600}
        totals |= {name: row.get(name) for name in ("viewers", "plays", "troubled", "sent_bytes")}
    curves = {name: stayed[name].dropna().quantile(_POINTS) for name in _CURVES if stayed[name].any()}
    return {
        "totals": totals,
        "measures": {name: one for row in whole for name in MEASURES if (one := _measure(name, row, viewers, stayed))},
        "curves": {name: [(value, share) for share, value in curve.items()] for name, curve in curves.items()},
        "tables": cuts,
    }


def _renditions(told: pd.Series[Any], drawn: float) -> CutTable:
    """Return, by the name of the rendition, how many viewers had it, and which share of all their time it was."""
    seconds, viewers = Counter[str](), Counter[str]()
    for text in told:
        stays = {name: max(number(stay_s) or 0.0, 0.0) for name, stay_s in json_of(text).items()}
        seconds.update(stays)
        viewers.update(name for name, stay_s in stays.items() if stay_s > 0)
    rows = [
        {
            "rendition": name,
            "viewers": round(viewers[name] / drawn),
            "watched_s": stay_s / drawn,
            "time_share": stay_s / (seconds.total() or 1.0),
        }
        for name, stay_s in seconds.most_common(MOST_ROWS)
    ]
    return CutTable(rows, len(seconds))


def at_once(rows: pd.DataFrame, *keys: str) -> pd.Series[Any]:
    """Return by these columns, the address among them, how many of their connections were open at once."""
    steps = (
        rows[[*keys, at]].rename(columns={at: "at"}).assign(step=step) for at, step in (("until", -1), ("began", 1))
    )
    moves = pd.concat(steps).sort_values([*keys, "at", "step"])
    moves["open"] = moves.groupby([*keys])["step"].cumsum()
    return moves.groupby([*keys])["open"].max().clip(lower=1)


def _links(troubled: pd.Series[Any], viewers: pd.Series[Any], drawn: float) -> CutTable:
    """Return networks by how many viewers they have, and how many had trouble by their own link; given by address."""
    found: dict[str, Counter[str]] = {}
    for address, count in viewers.items():
        unit, network = _networks_of(str(address))
        tally = found.setdefault(network, Counter())
        tally["viewers"] += count
        if part := troubled.get(address):
            tally["troubled"] += part
            tally["unit " + unit] += 1
    rows = [
        {
            "key": network,
            "viewers": round(tally["viewers"] / drawn),
            "troubled": round(tally["troubled"] / drawn),
            "addresses": round(sum(name.startswith("unit ") for name in tally) / drawn),
        }
        for network, tally in found.items()
        if tally["troubled"]
    ]
    return CutTable(rows, len(rows))


class Listed:
    """Addresses and networks of a ban list; ``address in listed`` is true of what one of them holds."""

    def __init__(self, cidrs: Iterable[Any]) -> None:
        self._networks = {network for cidr in cidrs for network in _meant(str(cidr))}
        self._lengths = {(network.version, network.prefixlen) for network in self._networks}

    def __contains__(self, address: object) -> bool:
        return any(
            host.version == version and host.prefixlen >= bits and host.supernet(new_prefix=bits) in self._networks
            for host in _meant(str(address))
            for version, bits in self._lengths
        )


def _meant(text: str) -> list[Network]:
    """Return the networks by which an address is found (`meanings`), or a network as it is; [] for other text."""
    with contextlib.suppress(ValueError):
        return [*map(ipaddress.ip_network, meanings(text))] or [ipaddress.ip_network(text, strict=False)]
    return []


def _networks_of(address: str) -> tuple[str, str]:
    """Return what a ban of an address would name, and its network as in `experience`; other text as it is."""
    if not (meant := _meant(address)):
        return address, address
    host = meant[-1]
    unit, network = (
        host.supernet(new_prefix=min(bits[host.version], host.prefixlen)) for bits in (UNIT_BITS, NETWORK_BITS)
    )
    return str(unit), str(network)


def _measure(name: str, whole: Row, viewers: pd.DataFrame, stayed: pd.DataFrame) -> Row | None:
    """Return a figure over viewers (see `flowctl.analyze.report.found.measured`); None: there is none.

    Bounds of a quantile follow from the ranks that chance gives it; those of a ratio of sums are of the jackknife and
    of Student's t, with as many degrees of freedom as there are viewers of equal weight (Kish, 1965).
    """
    known, value, part = MEASURES[name], number(whole.get(name)), None
    if value is None:
        return None
    low = high = None
    if known.kind == "share":
        n = int(number(whole.get(known.of)) or 0)
        part = min(int(value), n)
        value = part / max(n, 1)
    elif known.kind == "ratio":
        rows = viewers[[name, known.of]].dropna()
        n, weight = len(rows), rows[known.of]
        rest = (weight.sum() - weight).where(lambda left: left > 0)
        freedom = weight.sum() ** 2 / max((weight**2).sum(), 1e-9) - 1
        if freedom > 0:
            error = math.sqrt((weight * (rows[name] - value) / rest).pow(2).sum() * (n - 1) / n)
            low, high = value - _student(freedom) * error, value + _student(freedom) * error
    else:
        values = stayed[known.of].dropna().sort_values(ignore_index=True)
        n = len(values)
        first, last = ranks(n, known.at, number(whole.get("rank_error")) or 0.0)
        low, high = values.get(first - 1), values.get(last - 1)
    return {"n": n, "value": value, "low": low, "high": high, "part": part} if n or part is None else None


def ranks(n: int, at: float, off: float = 0.0) -> tuple[int, int]:
    """Return the ranks, of `n` values from 1, between which a quantile surely lies; 0, n + 1: beyond all values."""
    chance = math.erfc(SURE_OF_DIFFERENCE / math.sqrt(2)) / 2
    ratios = (n - np.arange(n)) / np.arange(1, n + 1) * (at / (1 - at))
    at_most = np.exp(np.cumsum(np.log(np.concatenate([[1.0], ratios]))) + n * math.log1p(-at)).cumsum()
    first, last = int((at_most <= chance).sum()), int((at_most[:n] < 1 - chance).sum()) + 1
    more = math.ceil(off * n)
    return max(first - more, 0), min(last + more, n + 1)


def _student(freedom: float) -> float:
    """Return the errors that `SURE_OF_DIFFERENCE` takes with few degrees of freedom, which is more (Wallace, 1959)."""
    wide = (SURE_OF_DIFFERENCE * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(min(wide, 100.0)))


# ------------------------------------------------------------------------------------------------ over time


def _over_time(tables: Tables, named: Sequence[str]) -> dict[str, Any]:
    """Return `fleet_streams` over time: `moments`, `streams`, `peaks` of `ReportFindings`; {}: there is nothing."""
    states = [f"share_{state}" for state in STATES]
    sums, ends = pd.DataFrame(), list[pd.DataFrame]()
    wanted = ("minute", "app", "stream", "viewers", "first_s", "last_s", *states)
    for frame in tables.batches("fleet_streams", wanted, "minute"):
        values = frame[["viewers", *states]].astype(float)
        values = values.where(values.abs() <= _MOST_FIGURE)
        values[states] = values[states].mul(values["viewers"], axis=0)
        keys = frame["app"].fillna("").str.cat(frame["stream"].fillna(""), "/")
        minutes = pd.to_datetime(frame["minute"], utc=True, errors="coerce").rename("minute")
        part = values.groupby([minutes, keys.where(keys.isin(named), "all others").rename("name")]).sum()
        sums = part if sums.empty else sums.add(part, fill_value=0.0)
        there = frame.reindex(columns=["first_s", "last_s"]).astype(float).fillna({"first_s": 0.0, "last_s": 60.0})
        ends.append(there.groupby(minutes).agg({"first_s": "min", "last_s": "max"}))
    if sums.empty:
        return {}
    # A minute in which records begin or end is told by the part of it in which anybody watched.
    within = pd.concat(ends).groupby(level="minute").agg({"first_s": "min", "last_s": "max"})
    sums["viewers"] *= sums.index.get_level_values("minute").map(
        60 / (within["last_s"] - within["first_s"]).clip(1, 60)
    )
    of_all = sums.groupby(level="minute").sum()
    began, viewers = of_all.index.min(), of_all["viewers"]
    ages_s = pd.Index((of_all.index - began).total_seconds())
    length_s = next((step for step in _STEPS_S if (ages_s.max() + 60) / step <= MOST_MOMENTS), _STEPS_S[-1])
    placed = of_all.groupby(ages_s // length_s * length_s)
    moments = placed[states].sum().rename(columns=dict(zip(states, STATES, strict=True))).head(MOST_MOMENTS)
    moments = moments.div(moments.sum(axis=1).replace(0, math.nan), axis=0)
    minutes = np.minimum(length_s, ages_s.max() + 60 - moments.index) / 60  # also those in which nobody watched
    moments = moments.assign(viewers=placed["viewers"].sum().head(MOST_MOMENTS) / minutes)
    moments = moments.assign(from_s=moments.index + began.timestamp(), length_s=float(length_s))
    each = (
        sums.pivot_table("viewers", "minute", "name", fill_value=0.0)
        .groupby(ages_s // length_s * length_s)
        .sum()
        .head(MOST_MOMENTS)
        .div(minutes, axis=0)
    )
    streams = {name: each[name].round(2).tolist() for name in (*named, "all others") if name in each}
    # A day that was not recorded to its end has not had its peak: taken in, it would make a trend.
    whole_days = (ages_s.max() + 3600) // 86400
    days = viewers.groupby(ages_s // 86400).max().to_dict()
    peaks = {int(day): float(most) for day, most in days.items() if day < whole_days}
    return {"moments": rows_of(moments), "streams": streams, "peaks": peaks}
