"""Accounts of rows: what came in, what went out, what was put aside and why, and the check that nothing is missing.

Nothing is lost silently: every job reads whole files, counts the rows that these files hold (a Parquet file says so in
its footer), and must find each of them again, either among the rows it used or among those it put aside. Files that
cannot be read at all are counted as files: how many rows they held is not known, and nothing claims to know.
Pure: no Spark here, so that tests and the command line load it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowctl.errors import InternalError


@dataclass(slots=True, kw_only=True)
class Accounts:
    """What became of the rows of one table.

    Args:
        table: name of the table.
        files_in: files found.
        files_quarantined: of these, put aside whole; `files_by_reason` says why.
        rows_in: rows of the files found, by their footers; also of those put aside, where they have a footer.
        rows_out: rows that went into the job.
        rows_quarantined: rows put aside, alone or with their whole file; `by_reason` says why.
        by_reason: rows put aside, by reason.
        files_by_reason: files put aside, by reason.
        files_unknown_rows: files put aside whose number of rows is not known, because they have no footer.
        warnings: lines for the person who started the job.
        settled: whether the rows were counted; until then `rows_out` and `by_reason` are those of whole files only.
    """

    table: str
    files_in: int = 0
    files_quarantined: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_quarantined: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    files_by_reason: dict[str, int] = field(default_factory=dict)
    files_unknown_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    settled: bool = False

    def settle(self, rows_out: int, bad_rows_by_reason: Mapping[str, int]) -> None:
        """Enter what the rows of the readable files became.

        Args:
            rows_out: rows that were used.
            bad_rows_by_reason: rows that were put aside one by one.
        """
        self.rows_out = rows_out
        for reason, count in bad_rows_by_reason.items():
            if count:
                self.by_reason[reason] = self.by_reason.get(reason, 0) + count
                self.rows_quarantined += count
        self.settled = True

    def check(self) -> None:
        """See to it that every row is accounted for.

        Raises:
            InternalError: a row is missing or counted twice; the message has the figures.
        """
        if self.rows_in != self.rows_out + self.rows_quarantined or self.rows_quarantined != sum(
            self.by_reason.values()
        ):
            raise InternalError(
                f"{self.table}: {self.rows_in} rows in, but {self.rows_out} out and {self.rows_quarantined} quarantined"
                f" ({self.by_reason})",
                hint="were files changed while they were read? Otherwise this is a bug of flowctl",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON takes them."""
        return {
            "table": self.table,
            "files_in": self.files_in,
            "files_quarantined": self.files_quarantined,
            "files_by_reason": dict(sorted(self.files_by_reason.items())),
            "files_unknown_rows": self.files_unknown_rows,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "rows_quarantined": self.rows_quarantined,
            "by_reason": dict(sorted(self.by_reason.items())),
        }

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


@dataclass(slots=True, kw_only=True)
class JobResult:
    """What a job did.

    Args:
        name: of the job, as on the command line.
        accounts: one of each table it read.
        outputs: what it wrote: name of the table or file, and its path.
        summary: its answer in a few figures, as JSON takes them.
    """

    name: str
    accounts: list[Accounts] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """See to it that every row of every table is accounted for.

        Raises:
            InternalError: one is not.
        """
        for item in self.accounts:
            item.check()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            "job": self.name,
            "accounts": [item.as_dict() for item in self.accounts],
            "outputs": dict(self.outputs),
            "summary": dict(self.summary),
            "warnings": [line for item in self.accounts for line in item.warnings],
        }
