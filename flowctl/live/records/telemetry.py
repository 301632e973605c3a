"""Records of a live server: its settings on the command line, and the recorder, events and sampler that make them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from flowctl.connection import Connection
from flowctl.errors import ConfigError, LimitExceededError
from flowctl.flight.words import limits_as_dict
from flowctl.live.config import Audience
from flowctl.live.hub import Hub
from flowctl.live.records.sampler import Sampler
from flowctl.live.records.sessions import SessionRecords
from flowctl.sending.settings import SenderSettings
from flowctl.server.admission import BANNED
from flowctl.server.program import ServeOptions
from flowctl.telemetry.events import Events
from flowctl.telemetry.options import Addresses, EventsOptions, Streams
from flowctl.telemetry.privacy import Privacy, read_key
from flowctl.telemetry.recorder import Recorder
from flowctl.units import parse_duration, parse_size

_log: Final = structlog.get_logger("flowctl.live")

EVENTS_PREFIX: Final = "events_"
EVENTS_SETTINGS: Final = {
    "events_node": "records: name of this server, in records and file names (host name and port)",
    "events_samples": "records: yes (default) or no: whether each connection is sampled, in `flow_samples`",
    "events_interval": "records: time between two samples of a connection (1s)",
    "events_rotate": "records: a file is finished after so long; a crash loses no more than that (10s)",
    "events_max": "records: what this server's files may take on the disk, then the oldest go (10GiB); 0: no limit",
    "events_queue": "records: rows that may wait for the disk before they are lost and counted (100000)",
    "events_addresses": "records: addresses of peers: plain (default), truncated (/24, /48) or hashed",
    "events_streams": "records: names of streams: hash (default), because they may be keys, or plain",
    "events_key_file": "records: file with the key of the hashes; without it they differ after each restart",
}
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")
_MOST_DIGITS: Final = 9


def events_options(options: ServeOptions, port: int) -> EventsOptions | None:
    """Return the settings of the records. None: there are to be none.

    Args:
        options: those of the command line; the settings are in `extra`.
        port: that the server listens on, for the node's usual name.

    Raises:
        ConfigError: a setting has a wrong value, or is there without a folder.
    """
    given = {name: text for name, text in options.extra.items() if name.startswith(EVENTS_PREFIX)}
    if options.events is None:
        if given:
            raise ConfigError(f"{min(given)} is set, but nothing is recorded", hint="give --events FOLDER as well")
        return None
    values: dict[str, Any] = {"node": given.get("events_node") or usual_node(port)}
    if "events_samples" in given:
        values["samples"] = _one_of(given, "events_samples", ["yes", "no"]) == "yes"
    for name, field in (("events_interval", "interval_s"), ("events_rotate", "rotate_s")):
        if name in given:
            values[field] = parse_duration(given[name], name)
    if "events_max" in given:
        values["max_bytes"] = parse_size(given["events_max"], "events_max")
    if "events_queue" in given:
        text = given["events_queue"]
        if not text.isdecimal() or len(text) > _MOST_DIGITS:
            raise ConfigError(f"events_queue is {text!r}, it must be a whole number of rows, 100 or more")
        values["queue_rows"] = int(text)
    if "events_addresses" in given:
        values["addresses"] = Addresses(_one_of(given, "events_addresses", [item.value for item in Addresses]))
    if "events_streams" in given:
        values["streams"] = Streams(_one_of(given, "events_streams", [item.value for item in Streams]))
    if "events_key_file" in given:
        values["key"] = read_key(Path(given["events_key_file"]))
    return EventsOptions(folder=str(options.events), **values)


def usual_node(port: int) -> str:
    """Return the name of a server that was given none: host and port, so that two on a machine are two."""
    name = _UNFIT.sub("-", socket.gethostname()).strip("-._")[:48] or "node"
    return f"{name}-{port}"


def _one_of(given: Mapping[str, str], name: str, choices: list[str]) -> str:
    if given[name] not in choices:
        raise ConfigError(f"{name} is {given[name]!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return given[name]


class Recording:
    """Everything that a live server records with.

    Args:
        options: of the records.
        hub: the streams.
        connections: returns the open connections.
        clock: monotonic seconds, that of the connections.

    Attributes:
        recorder: queues and files; whoever records more (flights) has a lane of it.
        events: what is said of connections and the server.
        sampler: samples the connections.
        sessions: observes the live sessions.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self,
        options: EventsOptions,
        hub: Hub,
        connections: Callable[[], list[Connection]],
        clock: Callable[[], float],
    ) -> None:
        self.recorder: Final = Recorder(options, clock)
        self.events: Final = Events(self.recorder, Privacy(options.addresses, options.streams, options.key))
        self.sampler: Final = Sampler(hub, connections, self.events, clock)
        self.sessions: Final = SessionRecords(self.events, self.sampler)
        self._clock = clock
        self._began = False
        if options.key is None and (options.streams is Streams.HASH or options.addresses is Addresses.HASHED):
            _log.info("hashes of names in the records will be others after a restart", set="events_key_file")

    def start(self, options: ServeOptions, settings: SenderSettings, audiences: tuple[Audience, ...] = ()) -> None:
        """Begin to record.

        Args:
            options: of the server, for the first record.
            settings: of its Senders.
            audiences: those of its viewers that have a target delay or policy of their own.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        self.recorder.start()
        self._began = True
        told = tuple(replace(item, streams=self._pattern(item.streams)) for item in audiences)
        self.events.server_started(self._clock(), _described(options, settings, self.recorder.options, told))
        self.sampler.start()

    def refused(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        """Record a connection that was refused. The listener's thread."""
        value, maximum = (0.0, 0.0) if error.limit == BANNED else (error.value, error.maximum)
        self.events.conn_refused(self._clock(), peer, error.limit, value, maximum)

    def _pattern(self, streams: str) -> str:
        """Return what is stored of a pattern of streams: one that says more than the application may hold a key."""
        whole = streams == "*" or streams.partition("/")[2] == "*"
        return streams if whole else "/".join(filter(None, self.events.privacy.stream(streams)))

    def stop(self, connections: int, deadline_s: float) -> None:
        """Record the end, and write everything; after the connections have ended.

        Args:
            connections: how many were accepted.
            deadline_s: how long to wait for the disk.
        """
        if not self._began:
            return
        self._began = False
        self.sampler.stop()
        self.events.tell_refused()
        self.events.server_stopped(self._clock(), connections)
        written = self.recorder.stop(deadline_s)
        found = self.recorder.statistics()
        # Written, or never: the process ends now, and takes along what a slow disk has not taken.
        left = 0 if written else found.unwritten_rows
        if left:
            _log.warning("records not written at the stop", rows=left, why=found.last_error or "the disk was too slow")
        books = found.books.values()
        _log.info(
            "records written",
            rows=sum(item.written_rows for item in books),
            files=sum(item.files for item in books),
            written_bytes=sum(item.written_bytes for item in books),
            lost=found.lost_rows + left,
            recorder_cpu_s=round(found.cpu_s, 3),
            sampler_cpu_s=round(self.sampler.cpu_s, 3),
        )


def _described(
    options: ServeOptions, settings: SenderSettings, events: EventsOptions, audiences: tuple[Audience, ...]
) -> dict[str, Any]:
    """Return what the first record of a process says of its settings."""
    version = "unknown"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("flowctl")
    return {
        "version": version,
        "limits": str(options.limits),
        "marks": limits_as_dict(options.limits),
        "policy": options.policy,
        "audiences": "; ".join(map(str, audiences)),
        "stuck_s": settings.stuck_s,
        "soft_too_long_s": settings.soft_too_long_s,
        "return_after_s": settings.return_after_s,
        "age_from": settings.age_from.value,
        "flush_interval_s": options.flush_interval_s,
        "groups": options.group_count,
        "memory_budget_bytes": options.memory_budget_bytes,
        "samples": events.samples,
        "interval_s": events.interval_s,
        "addresses": events.addresses.value,
        "streams": events.streams.value,
        "hashes_join": events.key is not None,
    }
