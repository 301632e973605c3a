"""Accounts of what a reader made of a table: every row that was there is used, or put aside with a reason.

``rows in = rows out + rows quarantined`` always: rows in are those that the footers of the files tell. Files that
cannot be read at all are counted as files: how many rows they held is not known, and nothing claims to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flowctl.units import format_count


@dataclass(slots=True, kw_only=True)
class Accounts:
    """Counts of the rows of one table, by what became of them."""

    table: str
    files_in: int = 0
    files_quarantined: int = 0  # of these, put aside whole
    files_by_reason: dict[str, int] = field(default_factory=dict)  # the same
    files_unknown_rows: int = 0  # of these, without a footer, so that their number of rows is not known
    rows_in: int = 0  # by the footers; also of files that are put aside, where they have one
    rows_out: int = 0  # that go into the job
    rows_quarantined: int = 0  # put aside, alone or with their whole file
    by_reason: dict[str, int] = field(default_factory=dict)  # the same; those of whole files as ``file: ...``

    def enter(self, problem: str | None, rows: int | None, bad_rows: Mapping[str, int]) -> None:
        """Add a file that is put aside for a `problem`, or used but for its `bad_rows`; `rows` None: not known."""
        self.files_in += 1
        self.rows_in += rows or 0
        if problem is not None:
            self.files_quarantined += 1
            self.files_by_reason[problem] = self.files_by_reason.get(problem, 0) + 1
            self.files_unknown_rows += rows is None
            bad_rows = {f"file: {problem}": rows or 0}
        bad = sum(bad_rows.values())
        self.rows_quarantined += bad
        self.rows_out += (rows or 0) - bad
        self.by_reason = dict(Counter(self.by_reason) + Counter(bad_rows))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        sums = f"rows in {self.rows_in} = out {self.rows_out} + quarantined {self.rows_quarantined}"
        parts = [f"{self.table}: {format_count(self.files_in, 'file')}, {sums}"]
        for what, counts in (("rows", self.by_reason), ("files", self.files_by_reason)):
            if counts:
                parts.append(f"{what} put aside: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        if self.files_unknown_rows:
            unread = format_count(self.files_unknown_rows, "file")
            parts.append(f"unreadable: {unread}, whose rows are unknown and not counted here")
        return "; ".join(parts)
