"""How several processes that are one server carry out an operation, and what their answers come to (pure).

The table of operations says which of them are asked, and which function of this module joins the answers. Numbers are
added, lists are joined in the order that each already has, and of what is the same everywhere one counts. A process
that fails or does not answer is named in a warning, and the others' answers count all the same.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from flowctl.core.flow.state import SendState
from flowctl.core.text.fieldtypes import Json
from flowctl.errors import BusyError, FlowctlError, LocalProtocolError

Asked: TypeAlias = Mapping[str, Any]
Rank: TypeAlias = Callable[[Asked], tuple[Any, ...]]
Results: TypeAlias = Sequence[tuple[int, Json]]
"""Answers with the numbers of their processes, sorted by number."""
MOST_PAGE: Final = 1000
"""Longest page of a list: half a megabyte of bans with their reasons."""
MOST_ROWS: Final = 500
"""Longest page of connections: each has a kilobyte with its axes, drops and reasons."""
MOST_PLACES: Final = 80
"""Most processes that have a place in a cursor of events; more than there are workers."""
KICKED_SHOWN: Final = 100
"""Connections whose numbers the answer to a kick holds; there may be thousands, and it counts them all."""


def worst_first(row: Asked) -> tuple[Any, ...]:
    return -SendState[row["state"]], row["pictures"], -row["delay_ms"], row["connection"]


def _most(name: str) -> Rank:
    return lambda row: (-row[name], row["connection"])


CONNECTION_SORTS: Final[Mapping[str, Rank]] = {
    "worst": worst_first,
    "delay": _most("delay_ms"),
    "pictures": lambda row: (row["pictures"], row["connection"]),
    "queued": _most("queued_bytes"),
    "dropped": _most("dropped"),
    "sent": _most("sent_bytes"),
    "open": _most("open_s"),
    "number": lambda row: (row["connection"],),
}
"""Orders of connections by name."""
STREAM_SORTS: Final[Mapping[str, Rank]] = {
    "viewers": lambda row: (-row["viewers"], row["stream"]),
    "slow": lambda row: (-row["slow"], -row["viewers"], row["stream"]),
    "in": lambda row: (-row["in_bytes"], row["stream"]),
    "name": lambda row: (row["stream"],),
}
"""Orders of streams by name."""


class Processes(enum.Enum):
    """Which processes of a server carry an operation out."""

    ALL = "all"  # side by side
    ONE = "one"  # any of them: each would answer the same
    HERE = "here"  # none of them, but the process that stands for them


Merge: TypeAlias = Callable[[Asked, Results], Json]


def merge_same(asked: Asked, results: Results) -> Json:
    """Return the first answer: the others are the same."""
    del asked
    return results[0][1]


class WorkerAnswer(NamedTuple):
    """The answer of one process."""

    worker: int
    result: Json | None = None  # None: it failed or did not answer
    error: FlowctlError | None = None
    missing: str = ""


def combine(merge: Merge, asked: Asked, answers: Sequence[WorkerAnswer]) -> Json:
    """Return the joined answer; of an operation on one connection, that of the process that has it."""
    answers = sorted(answers, key=lambda item: item.worker)
    results = [(item.worker, item.result) for item in answers if item.result is not None]
    errors = [(item.worker, item.error) for item in answers if item.error is not None]
    if not results:
        # "There is no such" is what all say but the one that has it: what else is said counts more.
        for _, error in sorted(errors, key=lambda item: isinstance(item[1], LocalProtocolError)):
            raise error
        why = "; ".join(f"worker {item.worker} {item.missing}" for item in answers)
        raise BusyError(f"no worker answers: {why or 'none is there yet'}", hint="try again")
    joined = dict(results[0][1] if asked.get("connection") is not None else merge(asked, results))
    faults = [f"worker {number}: {error}" for number, error in errors if not isinstance(error, LocalProtocolError)]
    faults += [f"worker {item.worker} {item.missing}" for item in answers if item.missing]
    warnings = [joined["warning"]] if joined.get("warning") else []
    if warnings or faults:
        joined["warning"] = "; ".join([*warnings, *faults])
    return joined


# -- the operations


def merge_stats(asked: Asked, results: Results) -> Json:
    streams = merge_streams({**asked, "sort": "viewers", "reverse": False}, results)
    count = sum(result["found"]["viewers"] for _, result in results)
    rows = [row | {"worker": number} for number, result in results for row in result["viewers"]]
    viewers = _page({**asked, "reverse": False}, "viewers", rows, worst_first, count)
    return {"server": _server(results), **viewers, **streams, "found": streams["found"] | viewers["found"]}


def merge_streams(asked: Asked, results: Results) -> Json:
    """Join streams by name: each is published in one process and may be followed by others."""
    by_name: dict[str, Json] = {}
    for number, result in results:
        for row in result["streams"]:
            merged_row = by_name.get(row["stream"])
            if merged_row is None:
                by_name[row["stream"]] = row | {"worker": number if _publishes(row) else None}
                continue
            if _publishes(row) and merged_row["worker"] is None:
                merged_row |= {
                    name: row[name] for name in ("publisher", "connection", "media", "codecs", "unwritten")
                } | {"worker": number}
            for name in ("viewers", "slow", "standby", "sent_bytes"):
                merged_row[name] += row[name]
            for name in ("in_bytes", "in_messages", "in_frames"):
                merged_row[name] = max(merged_row[name], row[name])
            known = {item["rendition"]: item for item in merged_row["renditions"]}
            for item in row["renditions"]:
                if item["rendition"] in known:
                    known[item["rendition"]]["viewers"] += item["viewers"]
                else:
                    merged_row["renditions"].append(item)
            merged_row["states"] = add_counts((merged_row["states"], row["states"]))
    return _page(asked, "streams", list(by_name.values()), STREAM_SORTS[asked["sort"]], len(by_name))


def merge_connections(asked: Asked, results: Results) -> Json:
    """Join connections, and sort them again: each process has those that come first of its own."""
    rows = [row | {"worker": number} for number, result in results for row in result["connections"]]
    count = sum(result["found"]["connections"] for _, result in results)
    return _page(asked, "connections", rows, CONNECTION_SORTS[asked["sort"]], count)


def _page(asked: Asked, name: str, rows: list[Json], rank: Rank, count: int) -> Json:
    first = asked["offset"]
    rows.sort(key=rank, reverse=asked["reverse"])
    counts = {name: count, "offset": first, "limit": asked["limit"]}
    return {name: rows[first : first + asked["limit"]], "found": counts}


def _publishes(row: Json) -> bool:
    """Return whether a stream has a real publisher, and is not followed from another process."""
    return row["publisher"] is not None and not row["publisher"].startswith("follows ")


_OF_ALL: Final = frozenset({"connections", "accepted", "refused", "closed", "busy", "bans", "drains_for_s"})
"""Figures of a server that several processes have together; the states of its files, ``..._file``, as well."""
_OF_EACH: Final = ("pid", "up_s", "busy", "connections", "accepted")
_LARGEST: Final = frozenset({"busy", "worst_delay_s", "bans", "drains_for_s"})
_LEAST: Final = frozenset({"least_pictures", "agrees"})


def merge_figures(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of several processes that are one server.

    Numbers are added; of how busy they are, of delays and of shares the worst counts, and of a file's state one that is
    not valid.
    """
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
                continue
            so_far = total[name]
            if isinstance(value, Mapping):
                total[name] = merge_figures([so_far, value])
            elif isinstance(value, str):
                total[name] = value if so_far == "valid" else so_far
            elif name in _LARGEST | _LEAST:
                total[name] = max(so_far, value) if name in _LARGEST else min(so_far, value)
            else:
                total[name] = so_far + value
    return total


def _server(results: Results) -> Json:
    parts = [result["server"] for _, result in results]
    shared = [{name: part[name] for name in part if name in _OF_ALL or name.endswith("_file")} for part in parts]
    server: Json = parts[0] | merge_figures(shared)
    if len({part["limits"] for part in parts}) > 1:
        server["limits_of_workers"] = [part["limits"] for part in parts]
    server["workers"] = [
        {"worker": number, "state": "serving"} | {name: result["server"][name] for name in _OF_EACH}
        for number, result in results
    ]
    return server


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for item in counts:
        total.update(item)
    return dict(total)


def merge_kick(asked: Asked, results: Results) -> Json:
    del asked
    numbers = [number for _, result in results for number in result["connections"]]
    return {"kicked": sum(result["kicked"] for _, result in results), "connections": numbers[:KICKED_SHOWN]}


def merge_limits(asked: Asked, results: Results) -> Json:
    del asked
    joined = results[0][1] | {"connections": sum(result["connections"] for _, result in results)}
    if "limits_of" in joined:
        joined["limits_of"] = add_counts(result["limits_of"] for _, result in results)
    return joined


def merge_drain(asked: Asked, results: Results) -> Json:
    del asked
    joined = dict(results[0][1])
    joined["again"] = all(result["again"] for _, result in results)
    joined["ends_within_s"] = max(result["ends_within_s"] for _, result in results)
    joined["connections"] = sum(result["connections"] for _, result in results)
    return joined


_WORST: Final = ("invalid", "absent", "valid")


def merge_reload(asked: Asked, results: Results) -> Json:
    del asked
    files: Json = {}
    for _, result in results:
        for name, item in result.items():
            if name == "faults":
                continue
            joined = files.setdefault(name, dict(item))
            if _WORST.index(item["state"]) < _WORST.index(joined["state"]):
                joined["state"] = item["state"]
            joined["changed"] = joined["changed"] or item["changed"]
            for key in ("fault", "hint", "now", "waits_for_restart"):
                if key in item:
                    joined.setdefault(key, item[key])
    faults = dict.fromkeys(fault for _, result in results for fault in result.get("faults", ()))
    return files | ({"faults": list(faults)} if faults else {})


def merge_events(asked: Asked, results: Results) -> Json:
    """Join events by their times; processes that have not answered keep their places in the cursor."""
    rows = [row | {"worker": number} for number, result in results for row in result["events"]]
    now = dict(result["cursor"].split(":") for _, result in results)
    before = dict(part.split(":") for part in asked["since"].split(",") if part.count(":") == 1)
    places = list((before | now).items())[-MOST_PLACES:]
    return {
        "events": sorted(rows, key=lambda row: row["at"]),
        "cursor": ",".join(f"{run}:{number}" for run, number in places),
        "lost": sum(result["lost"] for _, result in results),
    }


def merge_metrics(asked: Asked, results: Results) -> Json:
    """Keep each process apart: a sum would go down when one of them begins anew."""
    del asked
    return {"parts": [part | {"worker": number} for number, result in results for part in result["parts"]]}
