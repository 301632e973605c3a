"""A live server without sockets that keeps records, for the tests of what is recorded."""

from __future__ import annotations

from live_kit import World, audio, config, inter, key
from telemetry_kit import queued, recorder

from flowctl.live.records.recording import SessionRecords
from flowctl.live.records.sampler import Sampler
from flowctl.records.telemetry.events import Events
from flowctl.records.telemetry.privacy import Privacy
from flowctl.records.telemetry.schema import CLASS_NAMES, FLOW_CLOSES, FLOW_EVENTS, FLOW_OPENS, FLOW_SAMPLES

__all__ = ["RecordedWorld", "audio", "config", "inter", "key", "totals"]

SUMS = tuple(
    f"{what}_{unit}_{name}"
    for what in ("accepted", "sent", "dropped")
    for unit in ("messages", "bytes")
    for name in CLASS_NAMES
)


class RecordedWorld(World):
    """A `World` whose sessions are recorded; nothing is written, the lanes are read."""

    def __init__(self, folder, settings=None, *, record=None, **more) -> None:
        super().__init__(settings, **more)
        self.recorder = recorder(folder, self.clock, **(record or {}))
        options = self.recorder.options
        self.events = Events(self.recorder, Privacy(options.addresses, options.streams, options.key))
        self.sampler = Sampler(self.hub.fanouts, self.open, self.events, self.clock)
        self.hub.observers = (SessionRecords(self.events, self.sampler),)
        self.seen = []
        self.closed = []
        self.sampled = []

    def open(self):
        return [peer.connection for peer in self.peers if peer.connection not in self.gone]

    def told(self, event=None) -> list[dict]:
        self.seen += queued(self.recorder, FLOW_EVENTS)
        return [item for item in self.seen if event is None or item["event"] == event]

    def closes(self) -> list[dict]:
        self.sample()
        self.closed += queued(self.recorder, FLOW_CLOSES)
        return self.closed

    def close_of(self, peer) -> dict:
        conn_id = self.events.conn_id(peer.connection.number)
        (found,) = [item for item in self.closes() if item["conn_id"] == conn_id]
        return found

    def opens(self) -> list[dict]:
        """Return what is told of open connections since the last call; takes a turn of the sampler."""
        self.sampler.tell()
        return queued(self.recorder, FLOW_OPENS)

    def sample(self) -> list[dict]:
        self.sampler.round()
        _, blocks = self.recorder.lane(FLOW_SAMPLES).drain()
        names = [name for name in FLOW_SAMPLES.names if name not in {"node", "seq"}]
        rows = []
        for block in blocks:
            columns = [column.to_pylist() for column in block.arrays()]
            rows += [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        self.sampled += rows
        return rows

    def sums(self, conn_id) -> dict[str, int]:
        rows = [row for row in self.sampled if row["conn_id"] == conn_id]
        return {name: sum(row[name] for row in rows) for name in (*SUMS, "sent_bytes", "interval_ms")}


def totals(connection) -> dict[str, int]:
    """Return what the statistics of a connection say, under the names of the samples' columns."""
    statistics = connection.sender.statistics()
    found = {"sent_bytes": statistics.bytes_sent}
    for index, name in enumerate(CLASS_NAMES):
        for what, counts in (("accepted", [statistics.accepted]), ("sent", [statistics.sent])):
            found[f"{what}_messages_{name}"] = sum(item.messages[index] for item in counts)
            found[f"{what}_bytes_{name}"] = sum(item.sizes_bytes[index] for item in counts)
        dropped = statistics.dropped.values()
        found[f"dropped_messages_{name}"] = sum(item.messages[index] for item in dropped)
        found[f"dropped_bytes_{name}"] = sum(item.sizes_bytes[index] for item in dropped)
    return found
