"""What `flowctl analyze watch` has written, and how it stays right when it is killed at any moment (no Spark).

Theory of operation. Spark numbers its batches, and after a crash it runs the last one again, with the same files and
the same state. So everything that a batch results in goes into one file named by that number,
``OUT/watch/batch-N.json``, written whole by rename: running the batch again writes the same file once more, and
nothing is counted twice. The ban list and the totals are made of these files, never added to; ``bans.jsonl`` is
replaced by rename too, so a server that watches it finds the old or the new list.

Bans that have expired are left out of the list. Files of batches whose bans have all expired are folded into
``OUT/watch/totals.json``, oldest first, so that the folder does not grow without bound: with batches of 5 s and bans
of a day it holds 17,000 small files at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flowctl.bans import MOST_BANS, Ban, parse_utc, render
from flowctl.errors import ConfigError
from flowctl.loadtest.files import write_text

FOLDER: Final = "watch"
KEPT_BATCHES: Final = 100
"""Newest batches that are never folded: Spark may run the last one again, and people like to look at some."""
_COUNTS: Final = ("files", "rows_in", "rows_out", "rows_quarantined", "late", "batches")


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
    """

    batch: int
    bans: list[Ban] = field(default_factory=list)
    files: int = 0
    rows_in: int = 0
    rows_out: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    bad_files: list[tuple[str, str]] = field(default_factory=list)

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
        }

    @classmethod
    def parse(cls, text: str) -> BatchRecord:
        """Return what `as_dict` wrote.

        Raises:
            ValueError: it is none.
        """
        value = json.loads(text)
        bans = [
            Ban(cidr=item["cidr"], score=item["score"], evidence=item["evidence"], expires_s=parse_utc(item["expires"]))
            for item in value["bans"]
        ]
        bad = [(str(path), str(reason)) for path, reason in value["bad_files"]]
        return cls(
            value["batch"], bans, value["files"], value["rows_in"], value["rows_out"], dict(value["by_reason"]), bad
        )


class WatchState:
    """The folder of one watch. One thread at a time.

    Args:
        out: folder of results; made if it is missing.
        most_bans: longest ban list; the highest scores are on it.

    Raises:
        ConfigError: it cannot be written, or a file in it is damaged.
    """

    def __init__(self, out: Path, most_bans: int) -> None:
        self.out: Final = out
        self._most_bans: Final = min(most_bans, MOST_BANS)
        self._folder: Final = out / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to --out {out}: {error.strerror}", hint="name a folder of your own"
            ) from error
        self._totals: dict[str, Any] = self._read("totals.json", {"through": -1})
        self._late: dict[str, int] = self._read("late.json", {})
        self._records: dict[int, BatchRecord] = {}
        for path in sorted(self._folder.glob("batch-*.json")):
            record = self._parse(path)
            if record.batch > self._totals["through"]:
                self._records[record.batch] = record

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
        before = {ban.cidr for ban in self.bans(now_s)}
        self._records[record.batch] = record
        write_text(self._folder / f"batch-{record.batch:010d}.json", json.dumps(record.as_dict()))
        after = self.bans(now_s)
        self.write_bans(now_s)
        self._fold(now_s)
        return len({ban.cidr for ban in after} - before)

    def write_bans(self, now_s: float) -> None:
        """Write the ban list as it is at `now_s`; the same text again is not written again."""
        text, path = render(self.bans(now_s)), self.out / "bans.jsonl"
        if not path.exists() or path.read_text("utf-8") != text:
            write_text(path, text)

    def note_late(self, batch: int, rows: int) -> None:
        """Note how many rows of a batch came too late, as Spark tells after it; twice is as good as once."""
        if rows and self._late.get(str(batch)) != rows:
            self._late[str(batch)] = rows
            write_text(self._folder / "late.json", json.dumps(self._late))

    def bans(self, now_s: float) -> list[Ban]:
        """Return the bans that count at `now_s`, one per network, the highest scores first, `most_bans` at most."""
        merged = merge(ban for record in self._records.values() for ban in record.bans if ban.lasts(now_s))
        return sorted(merged.values(), key=lambda ban: (-ban.score, ban.cidr))[: self._most_bans]

    def totals(self) -> dict[str, Any]:
        """Return the sums over all batches, those of earlier processes included."""
        sums: dict[str, Any] = {name: self._totals.get(name, 0) for name in _COUNTS}
        reasons = dict(self._totals.get("by_reason", {}))
        bad = int(self._totals.get("bad_files", 0))
        for record in self._records.values():
            sums["batches"] += 1
            sums["files"] += record.files
            sums["rows_in"] += record.rows_in
            sums["rows_out"] += record.rows_out
            bad += len(record.bad_files)
            for reason, count in record.by_reason.items():
                reasons[reason] = reasons.get(reason, 0) + count
        sums["rows_quarantined"] = sum(reasons.values())
        sums["late"] = sum(self._late.values())
        return sums | {"by_reason": dict(sorted(reasons.items())), "bad_files": bad}

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
        totals = self.totals() | {"through": done[-1]}
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
    return BatchRecord(
        record.batch, [], record.files, record.rows_in, record.rows_out, record.by_reason, record.bad_files
    )


def merge(bans: Iterable[Ban]) -> Mapping[str, Ban]:
    """Return one ban per network: the one that lasts longest, with the evidence of the highest score."""
    merged: dict[str, Ban] = {}
    for ban in bans:
        old = merged.get(ban.cidr)
        if old is None:
            merged[ban.cidr] = ban
            continue
        worst = max(old, ban, key=lambda item: item.score)
        last = max((item.expires_s or 0) for item in (old, ban))
        merged[ban.cidr] = Ban(cidr=ban.cidr, score=worst.score, evidence=worst.evidence, expires_s=last)
    return merged
