"""What the footers of all files together say: which files are used, which are put aside, and how many rows there are.

Pure but for what `footers` reads: the same rules as the large way through Spark (see `io`), for few files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.pipeline.tables.accounts import Accounts
from flowctl.pipeline.tables.footers import Facts, Span
from flowctl.pipeline.tables.overlaps import overlapping

MAX_BAD_FILES: Final = 20_000
"""Files put aside are named one by one in the plan of the read; a folder with more of them is not one of records."""
SMALL_FILE_BYTES: Final = 1 << 20
MANY_FILES: Final = 10_000
"""So many files that are small on average are worth a warning: opening one costs more than what it holds."""
COPY: Final = "copy"
COPY_DETAIL: Final = "the same as another file: "


@dataclass(slots=True)
class Preflight:
    """What became of the files of one table.

    Args:
        accounts: files, and rows of files put aside whole.
        bad: files put aside: path, reason, detail, rows, size; by path.
        unproven: keys of checks that the statistics of at least one file left open.
        good: number of usable files.
        size_bytes: of the usable files.
        meeting: usable files that may hold a record that another one holds as well, see `overlaps`.
    """

    accounts: Accounts
    bad: list[tuple[Any, ...]] = field(default_factory=list)
    unproven: set[str] = field(default_factory=set)
    good: int = 0
    size_bytes: int = 0
    meeting: list[str] = field(default_factory=list)

    def enter(self, problem: str | None, files: int, rows: int, size_bytes: int, unknown: int) -> None:
        """Add files of one kind.

        Args:
            problem: why they are put aside. None: usable.
            files: how many.
            rows: their rows, as far as known.
            size_bytes: their size.
            unknown: how many of them have no footer, so that their rows are unknown.
        """
        accounts = self.accounts
        accounts.rows_in += rows
        if problem is None:
            self.good += files
            self.size_bytes += size_bytes
            return
        accounts.files_quarantined += files
        accounts.files_by_reason[problem] = accounts.files_by_reason.get(problem, 0) + files
        accounts.files_unknown_rows += unknown
        accounts.rows_quarantined += rows
        if rows:
            key = f"file: {problem}"
            accounts.by_reason[key] = accounts.by_reason.get(key, 0) + rows

    def check(self) -> None:
        """Warn of what is slow, refuse what is hopeless.

        Raises:
            ConfigError: more files would have to be put aside than can be named.
        """
        accounts = self.accounts
        if accounts.files_quarantined > MAX_BAD_FILES:
            raise ConfigError(
                f"{accounts.table}: {accounts.files_quarantined} of {accounts.files_in} files cannot be used "
                f"({accounts.files_by_reason}), at most {MAX_BAD_FILES} are put aside",
                hint="is it the right folder? Were files copied into it twice?",
            )
        if self.good > MANY_FILES and self.size_bytes < self.good * SMALL_FILE_BYTES:
            accounts.warnings.append(
                f"{accounts.table}: {self.good} files of {self.size_bytes // self.good} bytes on average; a job spends "
                "its time with opening them: join them, by hour, or let the recorder rotate less often"
            )


def judge(facts: Sequence[Facts], table: str) -> Preflight:
    """Return what became of the files with these facts; of copies the first is kept.

    Args:
        facts: of all files of the table, by path, so that a repeated run keeps the same one of two copies.
        table: name of the table.

    Raises:
        ConfigError: see `Preflight.check`.
    """
    result = Preflight(Accounts(table=table, files_in=len(facts)))
    seen: set[str] = set()
    spans: list[tuple[str, Span]] = []
    for path, found, told, rows, size, identity, unproven, span in facts:
        problem, detail = found, told
        if problem is None and identity is not None:
            if identity in seen:
                problem, detail = COPY, COPY_DETAIL + identity
            seen.add(identity)
        result.enter(problem, 1, rows or 0, size, int(rows is None))
        if problem is None:
            result.unproven.update(unproven)
            spans.extend([] if span is None else [(path, span)])
        else:
            result.bad.append((path, problem, detail, rows, size))
    result.check()
    # In order of `first_seq`, unknown ones first.
    result.meeting = overlapping(sorted(spans, key=lambda item: (item[1][2] is not None, item[1][2] or 0, item[0])))
    return result
