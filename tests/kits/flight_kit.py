"""What the tests of the flight recorder share: viewers that are recorded, and their rows by way of a Parquet file."""

from __future__ import annotations

import io
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
from flow_kit import CONTROL, OWN, Peer, Published, Viewer, frame

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.sending.settings import SenderSettings
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.replay import compare, replay
from flowctl.records.flight.tape import Identity, Tape
from flowctl.records.telemetry.schema import ARROW_TYPES, FLIGHT, FlightKind
from flowctl.testing import ManualGroup

NODE = "node-1"


def arrow_schema() -> pa.Schema:
    """Return the schema of the table as its files have it."""
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in FLIGHT.columns])


def arrow_type(column) -> pa.DataType:
    text = ARROW_TYPES[column.kind]
    return pa.timestamp("us", tz="UTC") if text.startswith("timestamp") else pa.type_for_alias(text)


class Rows(list):
    def __init__(self, room: int | None = None) -> None:
        super().__init__()
        self.room = room

    def __call__(self, row: tuple) -> bool:
        if self.room is not None and len(self) >= self.room:
            return False
        assert len(row) == len(FLIGHT.columns) - 2
        self.append((row[0], NODE, len(self), *row[1:]))
        return True

    def table(self) -> pa.Table:
        columns = list(zip(*self, strict=True))
        schema = arrow_schema()
        return pa.table([pa.array(cells, type_) for cells, type_ in zip(columns, schema.types, strict=True)], schema)

    def write(self, path, **metadata) -> None:
        named = {f"flowctl.{name}": str(value) for name, value in metadata.items()}
        pq.write_table(self.table().replace_schema_metadata(named), path)

    def stored(self) -> list[dict]:
        file = io.BytesIO()
        pq.write_table(self.table(), file, compression="zstd")
        return pq.read_table(file).to_pylist()


class RecordedViewer(Viewer):
    conn_id = 7
    most_rows = 2_000_000
    room = None

    def make_sender(self, host, transport, **settings):
        self.rows = Rows(self.room)
        tape = Tape(
            self.rows, Identity(conn_id=self.conn_id, began_at_us=1_700_000_000_000_000), most_rows=self.most_rows
        )
        return RecordedSender(host, transport, tape=tape, **settings)


def recorded_scene(kind, rows: Rows, *given, **settings):
    """Return a scene of that kind (`slow_kit`) whose viewer is recorded."""
    tape = Tape(rows, Identity(conn_id=7, began_at_us=1_700_000_000_000_000))

    def make_sender(_, host, transport, **options):
        return RecordedSender(host, transport, tape=tape, **options)

    return kind(*given, make_sender=make_sender, **settings)


LIMITS = Limits.parse("3000,40,1s", "12000,200,9s", target_delay_ms=400)
STEERED = SenderSettings(
    sample_s=0.1,
    return_after_s=0.5,
    stuck_s=0,
    soft_too_long_s=0,
)


def slow_history(viewer_class=RecordedViewer, *, seconds=12, settings=STEERED, limits=None, leads=0) -> RecordedViewer:
    """Return a viewer that was slow in several ways, with edges, drops and returns behind it."""
    group = ManualGroup()
    published = Published(group, leads=leads)
    fanout = Fanout(published.log, group)
    viewer = viewer_class(group, policy=LivePolicy(), limits=limits or LIMITS, settings=settings)
    viewer.peer.room = 0
    published.script("KIDAIA", 60)
    viewer.follow(fanout)
    for number in range(seconds * 4):
        published.script("KIDAIDA" if number % 4 == 0 else "IDAIDA", 90)
        group.run(0.25)
        viewer.give((0, 300, 700, 0, 0, 1500)[number // 6 % 6])
    viewer.drain()
    group.run(3.0)
    published.script("KIA", 50)
    group.run(0.2)
    return viewer


def check_flight(rows: Rows):
    """Replay what was recorded, by way of Parquet; return flight, result and comparison, which must be identical."""
    flight = read_flights(rows.stored())
    result = replay(flight)
    comparison = compare(flight, result)
    assert comparison.identical, str(comparison)
    return flight, result, comparison


def outputs(result, kind: FlightKind) -> list:
    return [row for row in result.outputs if row.kind == kind.value]


def changed(flight, number, **values):
    rows = list(flight.rows)
    rows[number] = rows[number]._replace(**values)
    return replace(flight, rows=tuple(rows))


# -- viewers behind links

UNSTEERED = SenderSettings(stuck_s=0, soft_too_long_s=0, return_after_s=0, turn_bytes=4096)
SECOND_OF_MEDIA = "KIADIAIAIA"
ROOMS = {
    "cut by age": ("0,0,1s", "0,0,1s", [None] * 4 + [0] * 30),
    "cut by bytes": ("4000,0", "4000,0", [None] * 4 + [0] * 30),
    "cut while joining": ("0,0,1s", "0,0,1s", [200] + [0] * 30),
    "thinned and back": ("4000,0,1s", "60000,0,20s", ([None] * 3 + [0] * 6 + [700, 900]) * 3),
    "refused for half a second": ("0,0,1s", "0,0,1s", [None] * 4 + [0] * 2 + [None] * 6),
    "always a little": ("6000,0,2s", "60000,0,20s", [350] * 40),
}


class World:
    """A recorded viewer of a stream, and its link.

    Attributes:
        viewer: `RecordedViewer`; nothing was sent to it yet.
        began_s: when its flight began, on the clock of `group`.
    """

    def __init__(self, soft, hard, *, room=None, turn_bytes=4096, target_ms=0) -> None:
        self.group = ManualGroup()
        self.published = Published(self.group)
        self.fanout = Fanout(self.published.log, self.group)
        self.began_s = self.group.now()
        settings = replace(UNSTEERED, turn_bytes=turn_bytes)
        limits = Limits.parse(soft, hard, target_delay_ms=target_ms)
        self.viewer = RecordedViewer(self.group, Peer(room), policy=LivePolicy(), limits=limits, settings=settings)
        self._number = 0

    def reply(self, size) -> None:
        self.viewer.sender.send(frame(OWN, CONTROL, 0, size), CONTROL)
        self.group.run(0.1)

    def join(self, *, size, between=False) -> None:
        """Publish a group of six messages of `size` bytes, and follow; `between`: publish once more after a turn."""
        self.published.script("KIADIA", size)
        self.group.run(0.6)
        self.viewer.follow(self.fanout)
        if between:
            peer, sendmsg = self.viewer.peer, self.viewer.peer.sendmsg

            def publishing(buffers, /):
                peer.sendmsg = sendmsg
                self.published.script("I", 150)  # as another thread does in the middle of a write
                return sendmsg(buffers)

            peer.sendmsg = publishing

    def go_on(self, quarters, room=None) -> None:
        """Let so many quarter seconds pass, with media in each; give the link room after each, unless it is None."""
        for _ in range(quarters):
            self.group.run(0.02)
            self.published.script(SECOND_OF_MEDIA[self._number % 4 * 2 :][:3], 150)
            self.group.run(0.23)
            self._number += 1
            if room is not None:
                self.viewer.give(room)


def linked(soft, hard, rooms):
    """Return a viewer that was answered before it joined, and whose link then had this room every quarter second."""
    world = World(soft, hard)
    world.reply(300)
    world.viewer.peer.room = rooms[0]
    world.join(size=900)
    for room in rooms:
        world.go_on(1)
        world.viewer.give(room)
    return world.viewer
