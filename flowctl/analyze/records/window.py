"""A window of time, as ``--since``, ``--from`` and ``--to`` give it (pure)."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Final

from flowctl.errors import ConfigError

Hour = tuple[str, str]
"""Date and hour of a folder of records, UTC: ``("2026-03-01", "12")``."""

ODD_HOUR: Final[Hour] = ("1970-01-01", "00")
"""Hour to which files are counted that lie in no folder of an hour."""

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_HINT: Final = "write it like 2026-03-01, 2026-03-01T12:30 or 2026-03-01T12:30:00+02:00; without a zone it is UTC"


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, UTC."""

    since: dt.datetime | None = None  # None: all there is
    until: dt.datetime | None = None  # exclusive

    def whole(self) -> Window:
        """Return the window of all hours that it meets: what is kept is kept by hour."""
        first = self.since and begin_of(hour_of(self.since))
        last = self.until and begin_of(hour_of(self.until))
        return Window(first, last if last is None or last == self.until else end_of(hour_of(last)))

    def with_day_before(self) -> Window:
        """Return it with the day before it, in which somebody may have behaved."""
        first, least = self.since, dt.datetime.min.replace(tzinfo=dt.UTC)
        return Window(first and first - min(dt.timedelta(days=1), first - least), self.until)

    def meets(self, hour: Hour) -> bool:
        later = self.since is None or end_of(hour) > self.since
        return later and (self.until is None or begin_of(hour) < self.until)


def begin_of(hour: Hour) -> dt.datetime:
    return dt.datetime.fromisoformat(f"{hour[0]}T{hour[1]}:00:00+00:00")


def end_of(hour: Hour) -> dt.datetime:
    """Return when an hour ends; the last one of all ends a microsecond early."""
    begin = begin_of(hour)
    return begin + min(dt.timedelta(hours=1), dt.datetime.max.replace(tzinfo=dt.UTC) - begin)


def hour_of(moment: dt.datetime) -> Hour:
    """Return the hour in which a moment lies; one without a zone is UTC."""
    utc = _utc(moment)
    return utc.date().isoformat(), f"{utc.hour:02}"  # strftime writes years before 1000 with three digits


def parse_window(
    now: dt.datetime, *, since: str | None = None, begin: str | None = None, end: str | None = None
) -> Window:
    """Return the window that ``--since``, ``--from`` and ``--to`` name, to the letter: see `Window.whole`."""
    if since is not None and begin is not None:
        raise ConfigError("--since and --from both say when the window begins", hint="give one of them")
    first = _moment("--from", begin) if since is None else _utc(now) - _duration(since)
    last = _moment("--to", end)
    if first is not None and last is not None and first >= last:
        raise ConfigError(
            f"the window is empty: it begins at {first.isoformat()} and ends at {last.isoformat()}",
            hint="--to lies after --from or --since, and is not part of the window",
        )
    return Window(first, last)


def _duration(text: str) -> dt.timedelta:
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])\s*", text, re.ASCII)
    if found is None or not (length := dt.timedelta(**{_UNITS[found[2]]: min(float(found[1]), 1e6)})):
        raise ConfigError(f"--since: {text[:60]!r} is no length of time", hint="write it like 90m, 2h, 7d or 4w")
    if length > dt.timedelta(days=36_500):
        raise ConfigError(f"--since: {text[:60]!r} is longer than 100 years", hint="leave --since out for all there is")
    return length


def _moment(option: str, text: str | None) -> dt.datetime | None:
    try:
        return None if text is None else _utc(dt.datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{option}: {str(text)[:60]!r} is no date or time", hint=_HINT) from error


def _utc(moment: dt.datetime) -> dt.datetime:
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)
