"""Settings of the records: where they go, how often, how much of a disk they take, what is hidden in them (pure)."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError

_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of nodes are part of file names: no separators, and no beginning that readers take for a hidden file."""
_LEAST_INTERVAL_S: Final = 0.1
"""Least interval of samples, over twice the flush interval: shorter ones would show the rounds, not the viewers."""
_LEAST_ROTATE_S: Final = 0.5
"""Least time per file: half a second makes 7200 an hour and table; readers are slow with many small files."""
_MOST_S: Final = 3600.0
"""Longest interval: the folder of an hour."""


class Addresses(enum.Enum):
    """How the address of a peer is stored."""

    PLAIN = "plain"  # as it is: scores per address and ban lists need that
    TRUNCATED = "truncated"  # its network, /24 of IPv4 and /48 of IPv6
    HASHED = "hashed"  # a keyed hash of it


class RecordedStreams(enum.Enum):
    """How the name of a stream is stored: HASH, a keyed hash (of RTMP publishers the name *is* the key), or PLAIN."""

    HASH = "hash"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsOptions:
    """What is recorded, and where to; immutable."""

    folder: str = ""  # where the tables' folders are made; empty: nothing is recorded
    # Name of this server in records and file names: letters, digits, ``.``, ``_`` and ``-``, 64 at most; empty: the
    # server that records puts its host name and port
    node: str = ""
    samples: bool = True
    interval_s: float = 1.0  # time between two samples of a connection, in seconds
    # A file is finished after so many seconds: what a crash can lose, and how late readers see a record
    rotate_s: float = 10.0
    # A file is finished when its rows take so much memory; on disk it is a fifth to a twentieth of that
    file_bytes: int = 64 * 1024 * 1024
    # What this node's files may take on the disk; then its oldest go. 0: there is no limit.
    max_bytes: int = 10 * 1024**3
    # Rows of one table that may wait, in the queue and again for a disk that does not take them; what comes beyond that
    # is lost, and counted. A row takes 0.5 to 1 kB.
    queue_rows: int = 100_000
    addresses: Addresses = Addresses.PLAIN
    streams: RecordedStreams = RecordedStreams.HASH
    # For the hashes, 16 bytes or more. None: random ones, with which no hash is the same after a restart.
    key: bytes | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.node and not _NODE.fullmatch(self.node):
            raise ConfigError(
                f"node is {self.node!r}, it must be 1 to 64 letters, digits, '.', '_' or '-', "
                "and begin with a letter or digit"
            )
        for name, least in (("interval_s", _LEAST_INTERVAL_S), ("rotate_s", _LEAST_ROTATE_S)):
            value = getattr(self, name)
            if not least <= value <= _MOST_S:
                raise ConfigError(f"{name} is {value:g} s, allowed is {least:g} s to 1 h")
        for name, smallest in (("file_bytes", 1024), ("max_bytes", 0), ("queue_rows", 100)):
            if getattr(self, name) < smallest:
                raise ConfigError(f"events_{name} is {getattr(self, name)}, it must be {smallest} or more")
        if self.key is not None and len(self.key) < 16:
            raise ConfigError(
                f"the key for hashes has {len(self.key)} bytes, it must have 16 or more",
                hint="head -c 32 /dev/urandom > key; chmod 600 key",
            )
