"""Accounts of what a reader made of a table: every row that was there is used, or put aside with a reason.

``rows in = rows out + rows quarantined`` always: rows in are those that the footers of the files tell. Files that
cannot be read at all are counted as files: how many rows they held is not known, and nothing claims to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flowctl.errors import InternalError


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
        for reason, count in bad_rows.items():
            if count:
                self.by_reason[reason] = self.by_reason.get(reason, 0) + count

    def check(self) -> None:
        """See to it that every row is accounted for.

        Raises:
            InternalError: a row is missing or counted twice; the message has the figures.
        """
        aside = sum(self.by_reason.values())
        if self.rows_out < 0 or self.rows_quarantined != aside or self.rows_in != self.rows_out + aside:
            raise InternalError(
                f"{self.table}: {self.rows_in} rows in, but {self.rows_out} out and {self.rows_quarantined} quarantined"
                f" ({self.by_reason})",
                hint="were files changed while they were read? Otherwise this is a bug of flowctl",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON takes them."""
        return asdict(self)

    def line(self) -> str:
        """Return the figures as one line for people."""
        sums = f"rows in {self.rows_in} = out {self.rows_out} + quarantined {self.rows_quarantined}"
        parts = [f"{self.table}: {self.files_in} files, {sums}"]
        if self.by_reason:
            parts.append("rows put aside: " + ", ".join(f"{key} {n}" for key, n in sorted(self.by_reason.items())))
        if self.files_by_reason:
            parts.append("files put aside: " + ", ".join(f"{k} {n}" for k, n in sorted(self.files_by_reason.items())))
        if self.files_unknown_rows:
            parts.append(
                f"{self.files_unknown_rows} files cannot be read: their rows are unknown and not in these counts"
            )
        return "; ".join(parts)
