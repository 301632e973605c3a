"""What `flowctl analyze watch` has written, and how it stays right when it is killed at any moment (no Spark).

Theory of operation. Spark numbers its batches, and after a crash it runs the last one again, with the same files and
the same state. So everything that a batch results in goes into one file named by that number,
``OUT/watch/batch-N.json``, written whole by rename: running the batch again writes the same file once more, and
nothing is counted twice. The ban list and the totals are made of these files, never added to; ``bans.jsonl`` is
replaced by rename too, so a server that watches it finds the old or the new list.

Bans that have expired are left out of the list. Files of batches whose bans have all expired are folded into
``OUT/watch/totals.json``, oldest first, so that the folder does not grow without bound: with batches of 5 s and bans
of a day it holds 17,000 small files at most.

The list is not the watch's alone: what others have put on it (see `flowctl.pipeline.tables.banfile`) is kept until
it expires.
What in the file is not of a batch, or lasts longer than the batches say, is of others; so a restart knows it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.tables.banfile import BANS_FILE, locked, read_local
from flowctl.server.bans import MOST_BANS, Ban, BanAction, BanList, lasts_longer, merge_bans, render
from flowctl.text.files import write_text

FOLDER: Final = "watch"
KEPT_BATCHES: Final = 100
"""Newest batches that are never folded: Spark may run the last one again, and people like to look at some."""
KNOWN_FILES: Final = 20_000
"""Files of folded batches that are still known, so that copies are told: hours of 80 nodes. What an older one holds is
later than the watermark, and no evidence any more."""
_COUNTS: Final = ("files", "rows_in", "rows_out", "rows_quarantined", "batches", "files_unknown_rows", "bans_invalid")


@dataclass(slots=True)
class BatchRecord:
    """What one batch resulted in.

    Args:
        batch: its number.
        bans: networks to keep out.
        files: files read.
        rows_in: rows of these, by their footers.
        rows_out: of these, rows that fit.
        by_reason: rows that did not, by reason.
        bad_files: files that cannot be used: address and reason.
        files_unknown_rows: of these, those without a footer, so that nobody knows their rows.
        bans_invalid: rows at the threshold that no ban could be made of.
        identities: of the files that were used, by which copies of them are known.
        taken_back_until_ms: end of the last window that has evidence of files that must not count (see
            `flowctl.pipeline.watch.input.take_back`), milliseconds since the epoch. None: there is none.
    """

    batch: int
    bans: list[Ban] = field(default_factory=list)
    files: int = 0
    rows_in: int = 0
    rows_out: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    bad_files: list[tuple[str, str]] = field(default_factory=list)
    files_unknown_rows: int = 0
    bans_invalid: int = 0
    identities: list[str] = field(default_factory=list)
    taken_back_until_ms: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            "batch": self.batch,
            "bans": [json.loads(ban.line()) for ban in self.bans],
            "files": self.files,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "by_reason": dict(sorted(self.by_reason.items())),
            "bad_files": [list(item) for item in self.bad_files],
            "files_unknown_rows": self.files_unknown_rows,
            "bans_invalid": self.bans_invalid,
            "identities": self.identities,
            "taken_back_until_ms": self.taken_back_until_ms,
        }

    @classmethod
    def parse(cls, text: str) -> BatchRecord:
        """Return what `as_dict` wrote.

        Raises:
            ValueError: it is none.
        """
        value = json.loads(text)
        bans = BanList.parse("\n".join(json.dumps(item) for item in value["bans"])).bans
        bad = [(str(path), str(reason)) for path, reason in value["bad_files"]]
        return cls(
            value["batch"],
            bans,
            value["files"],
            value["rows_in"],
            value["rows_out"],
            dict(value["by_reason"]),
            bad,
            value.get("files_unknown_rows", 0),
            value.get("bans_invalid", 0),
            [str(item) for item in value.get("identities", [])],
            value.get("taken_back_until_ms"),
        )


class WatchState:
    """The folder of one watch. One thread at a time.

    Args:
        out: folder of results; made if it is missing.
        most_bans: bans of the watch at most; the highest scores are taken.
        allow: networks that are never banned, so that no ban of others that touches one is kept either.
        replace_bans: whether the list that is there now is given up. False: its bans that last are kept.

    Raises:
        ConfigError: it cannot be written, or a file in it is damaged, the ban list among them.
    """

    def __init__(self, out: Path, most_bans: int, allow: Sequence[Network] = (), *, replace_bans: bool = False) -> None:
        self.out: Final = out
        self._allow: Final = tuple(allow)
        self._most_bans: Final = min(most_bans, MOST_BANS)
        self._folder: Final = out / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to --out {out}: {error.strerror}", hint="name a folder of your own"
            ) from error
        self._totals: dict[str, Any] = self._read("totals.json", {"through": -1})
        self._late = _late_of(self._read("late.json", {}))
        self._records: dict[int, BatchRecord] = {}
        for path in sorted(self._folder.glob("batch-*.json")):
            record = self._parse(path)
            if record.batch > self._totals["through"]:
                self._records[record.batch] = record
        self._known: dict[str, int] = dict.fromkeys(self._totals.get("known", []), -1)
        for number in sorted(self._records):
            self._know(self._records[number])
        self._list: Final = out / BANS_FILE
        self._stamp: tuple[int, ...] | None = None  # of the list, when it was read or written last
        self._text: str | None = None
        self._others: list[Ban] = []
        if replace_bans:
            self._stamp = _stamp_of(self._list)  # what is there now is not read; what others write from now on is
        else:
            self._look_at_list()

    def claim(self, query: str | None) -> None:
        """See to it that the batches here are those of this query, whose checkpoint has the identity `query`.

        Args:
            query: identity. None: the checkpoint is new.

        Raises:
            ConfigError: they are of another one, whose numbers would be mixed up with these.
        """
        known = self._read("query.json", {}).get("id")
        if (known is not None and known != query) or (known is None and query is not None and self._records):
            raise ConfigError(
                f"{self._folder} belongs to another checkpoint",
                hint="give the --checkpoint that it was made with, or another --out; or delete both to begin anew",
            )

    def own(self, query: str) -> None:
        """Note that the batches here are those of the checkpoint with the identity `query`."""
        write_text(self._folder / "query.json", json.dumps({"id": query}))

    def enter(self, record: BatchRecord, now_s: float) -> int:
        """Write what a batch resulted in, and the ban list; return how many networks are banned that were not.

        Args:
            record: the batch; one that was entered before is replaced.
            now_s: seconds since the epoch: bans that have expired are left out.
        """
        before = set(_by_key(self.bans(now_s)))
        self._records[record.batch] = record
        self._know(record)
        write_text(self._folder / f"batch-{record.batch:010d}.json", json.dumps(record.as_dict()))
        after = self.bans(now_s)
        self.write_bans(now_s)
        self._fold(now_s)
        return len(set(_by_key(after)) - before)

    def write_bans(self, now_s: float) -> None:
        """Write the ban list as it is at `now_s`, with what others have put on it; the same again is not written.

        Raises:
            ConfigError: somebody has made the list unreadable; it is left as it is.
        """
        with locked(str(self.out)):
            self._look_at_list()
            text = render(merge_bans(self._others, self.bans(now_s), now_s, self._allow))
            if text != self._text or self._stamp is None:
                write_text(self._list, text)
                self._stamp, self._text = _stamp_of(self._list), text

    def _look_at_list(self) -> None:
        """Note what others have put on the list, if it is not as it was left: this is asked each second."""
        stamp = _stamp_of(self._list)
        if stamp == self._stamp:
            return
        own = merge(ban for record in self._records.values() for ban in record.bans)
        there = read_local(self._list)
        self._others = [ban for ban in there if _key(ban) not in own or lasts_longer(ban, own[_key(ban)])]
        self._stamp, self._text = stamp, None

    def others(self, now_s: float) -> int:
        """Return how many bans of others are on the list at `now_s` that are not the watch's too."""
        own = set(_by_key(self.bans(now_s)))
        return len(set(_by_key(merge_bans(self._others, (), now_s, self._allow))) - own)

    def known(self, batch: int) -> set[str]:
        """Return the identities of the files of batches before `batch`: what has one of them is a copy."""
        return {identity for identity, number in self._known.items() if number < batch}

    def _know(self, record: BatchRecord) -> None:
        for identity in record.identities:
            self._known.setdefault(identity, record.batch)

    def taken_back(self, late_ms: int) -> tuple[list[int], list[int]]:
        """Return the batches with evidence that must not count: those that matter still, and those that do no more.

        Args:
            late_ms: the watermark: windows that ended before it take no evidence any more.
        """
        live: list[int] = []
        over: list[int] = []
        for number, record in self._records.items():
            if record.taken_back_until_ms is not None:
                (live if record.taken_back_until_ms > late_ms else over).append(number)
        return sorted(live), sorted(over)

    def forget_taken_back(self, batch: int) -> None:
        """Note that what a batch took back matters no more; the next process finds that out by itself."""
        self._records[batch].taken_back_until_ms = None

    def note_late(self, batch: int, rows: int) -> None:
        """Note how many rows of a batch came too late, as Spark tells after it; twice is as good as once."""
        late = self._late
        if not rows or batch <= late["through"] or late["batches"].get(str(batch)) == rows:
            return
        late["batches"][str(batch)] = rows
        for number in sorted(map(int, late["batches"]))[:-KEPT_BATCHES]:  # Spark tells again of the newest only
            late["sum"] += late["batches"].pop(str(number))
            late["through"] = number
        write_text(self._folder / "late.json", json.dumps(late))

    def bans(self, now_s: float) -> list[Ban]:
        """Return the bans that count at `now_s`, one per network, the highest scores first, `most_bans` at most."""
        merged = merge(ban for record in self._records.values() for ban in record.bans if ban.lasts(now_s))
        return sorted(merged.values(), key=lambda ban: (-ban.score, ban.cidr))[: self._most_bans]

    def totals(self) -> dict[str, Any]:
        """Return the sums over all batches, those of earlier processes included."""
        sums: dict[str, Any] = {name: self._totals.get(name, 0) for name in _COUNTS}
        reasons = dict(self._totals.get("by_reason", {}))
        bad = int(self._totals.get("bad_files", 0))
        files: dict[str, int] = dict(self._totals.get("files_by_reason", {}))
        for record in self._records.values():
            sums["batches"] += 1
            sums["files"] += record.files
            sums["rows_in"] += record.rows_in
            sums["rows_out"] += record.rows_out
            sums["files_unknown_rows"] += record.files_unknown_rows
            sums["bans_invalid"] += record.bans_invalid
            bad += len(record.bad_files)
            for _, reason in record.bad_files:
                files[reason] = files.get(reason, 0) + 1
            for reason, count in record.by_reason.items():
                reasons[reason] = reasons.get(reason, 0) + count
        sums["rows_quarantined"] = sum(reasons.values())
        sums["late"] = self._late["sum"] + sum(self._late["batches"].values())
        return sums | {
            "by_reason": dict(sorted(reasons.items())),
            "bad_files": bad,
            "files_by_reason": dict(sorted(files.items())),
        }

    def _fold(self, now_s: float) -> None:
        """Fold the oldest batches into the totals where nothing of them is needed any more."""
        if not self._records:
            return
        newest = max(self._records)
        done = []
        for number in sorted(self._records):
            if number > newest - KEPT_BATCHES or any(ban.lasts(now_s) for ban in self._records[number].bans):
                break
            done.append(number)
        if len(done) < KEPT_BATCHES:  # not one by one: each fold writes a file
            return
        kept = {number: record for number, record in self._records.items() if number not in done}
        folded, self._records = self._records, {number: folded_record(self._records[number]) for number in done}
        known = [*self._totals.get("known", []), *(item for number in done for item in folded[number].identities)]
        totals = self.totals() | {"through": done[-1], "known": known[-KNOWN_FILES:]}
        for identity in known[:-KNOWN_FILES]:
            self._known.pop(identity, None)
        self._totals, self._records = totals, kept
        write_text(self._folder / "totals.json", json.dumps(totals))
        for number in done:  # a crash in between leaves files that are passed over, being below `through`
            (self._folder / f"batch-{folded[number].batch:010d}.json").unlink(missing_ok=True)

    def _read(self, name: str, default: dict[str, Any]) -> dict[str, Any]:
        path = self._folder / name
        if not path.exists():
            return default
        try:
            value = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete the folder and the checkpoint") from error
        return value if isinstance(value, dict) else default

    def _parse(self, path: Path) -> BatchRecord:
        try:
            return BatchRecord.parse(path.read_text("utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}", hint="delete the folder and the checkpoint") from error


def folded_record(record: BatchRecord) -> BatchRecord:
    """Return a record without what only matters while it is new."""
    return replace(record, bans=[], identities=[], taken_back_until_ms=None)


def merge(bans: Iterable[Ban]) -> Mapping[tuple[str, BanAction], Ban]:
    """Return one per network and action: the one that lasts longest, with the evidence of the highest score."""
    return _by_key(merge_bans((), bans, 0))


def _by_key(bans: Iterable[Ban]) -> dict[tuple[str, BanAction], Ban]:
    return {_key(ban): ban for ban in bans}


def _key(ban: Ban) -> tuple[str, BanAction]:
    """Return what a list has one of."""
    return ban.cidr, ban.action


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return what tells whether a file has changed; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _late_of(value: dict[str, Any]) -> dict[str, Any]:
    """Return the late rows: ``sum`` of all batches up to ``through``, and of each newer one in ``batches``."""
    if "batches" not in value:  # as it was written first: each batch ever, by number
        value = {"batches": {name: rows for name, rows in value.items() if name.isdigit()}}
    return {"sum": 0, "through": -1} | value
