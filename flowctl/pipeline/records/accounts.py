"""Accounts of what a reader made of a table: every row that was there is used, or put aside with a reason.

``rows in = rows out + rows quarantined`` always: rows in are those that the footers of the files tell. Files that
cannot be read at all are counted as files: how many rows they held is not known, and nothing claims to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Accounts:
    """What became of the rows of one table.

    Args:
        table: name of the table.
        files_in: files found.
        files_quarantined: of these, put aside whole; `files_by_reason` says why.
        files_by_reason: files put aside, by reason.
        files_unknown_rows: files put aside whose number of rows is not known, because they have no footer.
        rows_in: rows of the files found, by their footers; also of those put aside, where they have a footer.
        rows_out: rows that went into the job.
        rows_quarantined: rows put aside, alone or with their whole file; `by_reason` says why.
        by_reason: rows put aside, by reason; those of whole files as ``file: ...``.
    """

    table: str
    files_in: int = 0
    files_quarantined: int = 0
    files_by_reason: dict[str, int] = field(default_factory=dict)
    files_unknown_rows: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_quarantined: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)

    def enter(self, problem: str | None, rows: int | None, bad_rows: Mapping[str, int]) -> None:
        """Add a file.

        Args:
            problem: why it is put aside whole. None: it is used.
            rows: its rows. None: not known.
            bad_rows: rows of a file that is used that are put aside, by reason.
        """
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
        """Return the figures as JSON takes them."""
        return asdict(self)

    def line(self) -> str:
        """Return the figures as one line for people."""
        sums = f"rows in {self.rows_in} = out {self.rows_out} + quarantined {self.rows_quarantined}"
        parts = [f"{self.table}: {self.files_in} files, {sums}"]
        for what, counts in (("rows", self.by_reason), ("files", self.files_by_reason)):
            if counts:
                parts.append(f"{what} put aside: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        if self.files_unknown_rows:
            parts.append(f"{self.files_unknown_rows} files cannot be read: their rows are unknown and not counted here")
        return "; ".join(parts)
