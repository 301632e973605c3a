"""A sender whose store is copied and put back, and one receiver: the file, and what arrives, without a socket."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowctl.nodes.messenger.arrivals import Arrivals, ArrivalVerdict, Arrived
from flowctl.nodes.messenger.storefile import AddMessage, RemoveMessage, StoreFile
from flowctl.nodes.messenger.wire import Extension, encode_earlier, parse_earlier


class Sender:
    """Each message has a body of its own; what is not acknowledged stays in the outbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.body_count = 0
        self.acknowledged: set[bytes] = set()
        self.outbox: dict[int, tuple[int, bytes]] = {}
        self.open()

    def open(self) -> None:
        self.file = StoreFile(self.path, 1 << 20)
        self.file._connection.execute("PRAGMA synchronous = OFF")
        self.next_id = self.file.next_message_id()
        self.next_sequence = self.next_id + 1
        self.outbox = {item.message_id: (item.sequence, item.record) for item in self.file.pending()}

    def send(self, to_others: int) -> None:
        """Send one message, after some to other peers, which take ids and no sequences."""
        self.next_id += to_others
        body = b"%d" % self.body_count
        self.body_count += 1
        self.file.write([AddMessage(self.next_id, b"p", self.next_sequence, body, lambda _: None)])
        self.outbox[self.next_id] = self.next_sequence, body
        self.next_id, self.next_sequence = self.next_id + 1, self.next_sequence + 1

    def arrived(self, which: int, with_extension: bool) -> Arrived:
        message_id = sorted(self.outbox)[which % len(self.outbox)]
        sequence, body = self.outbox[message_id]
        incarnation = self.file.life.incarnation
        floor = min(item[0] for item in self.outbox.values())
        extension = Extension(incarnation, sequence, floor) if with_extension else None
        return Arrived(incarnation, message_id, extension, 0, body)

    def note_acknowledged(self, incarnation: int, message_id: int) -> None:
        if incarnation == self.file.life.incarnation and message_id in self.outbox:
            self.acknowledged.add(self.outbox.pop(message_id)[1])
            self.file.write([RemoveMessage(message_id)])


STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["send", "arrive"]), st.integers(0, 3)),
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("arrive, no answer"), st.integers(0, 3)),
    st.tuples(st.just("arrive, take time"), st.integers(0, 3)),
    st.tuples(st.just("handle"), st.just(0)),
    st.tuples(st.just("start"), st.just(0)),
    st.tuples(st.just("copy"), st.just(0)),
    st.tuples(st.just("put back"), st.just(0)),
)


LIVE_COPY = [
    *[("send", 0), ("copy", 0), ("send", 0), ("arrive", 1)],  # the copy has not got the second
    *[("put back", 0), ("send", 0), ("arrive", 1)],  # this one has its numbers
]
SLOW_HANDLER = [
    *[("send", 0), ("arrive, take time", 0)],
    *[("start", 0), ("arrive", 0), ("handle", 0), ("arrive", 0)],  # it runs still, and once
]


@settings(max_examples=15, deadline=None)
@example(steps=LIVE_COPY, with_extension=True)
@example(steps=LIVE_COPY, with_extension=False)
@example(steps=SLOW_HANDLER, with_extension=True)
@given(steps=st.lists(STEPS, max_size=40), with_extension=st.booleans())
def test_sender_when_its_store_is_copied_and_put_back_never_hears_of_what_was_not_handled(
    tmp_path_factory, steps, with_extension
):
    """And where no copy was put back, nothing is handled twice, however often it starts again."""
    path = tmp_path_factory.mktemp("lives") / "store"
    copy = path.with_name("copy")
    sender, arrivals, handled, running = Sender(path), Arrivals(), Counter(), []
    put_back = False

    def finish(arrived: Arrived, *, answer: bool) -> None:
        handled[arrived.item] += 1
        if arrivals.note_handled(arrived) and answer:
            sender.note_acknowledged(arrivals.incarnation, arrived.message_id)

    for step, number in steps:
        if step == "send":
            sender.send(number)
        elif step.startswith("arrive") and sender.outbox:
            arrived = sender.arrived(number, with_extension)
            said = encode_earlier(sender.file.life.earlier).decode().partition(":")[2]
            verdict = arrivals.arrive(arrived, parse_earlier(said).get(arrivals.incarnation, 0))
            assert verdict in {ArrivalVerdict.HANDLE, ArrivalVerdict.SEEN, ArrivalVerdict.WAIT}
            if verdict is ArrivalVerdict.HANDLE and step.endswith("time"):
                running.append(arrived)
            elif verdict is ArrivalVerdict.HANDLE:
                finish(arrived, answer=step == "arrive")
            elif verdict is ArrivalVerdict.SEEN and step == "arrive":
                sender.note_acknowledged(arrivals.incarnation, arrived.message_id)
        elif step == "handle" and running:
            finish(running.pop(0), answer=True)
        elif step == "copy":
            copy.unlink(missing_ok=True)
            with closing(sqlite3.connect(path)) as now, closing(sqlite3.connect(copy)) as then:
                now.backup(then)
        elif step in {"start", "put back"}:
            sender.file.close()
            if step == "put back" and copy.exists():
                shutil.copy(copy, path)
                put_back = True
            sender.open()
        assert sender.acknowledged <= set(handled)
        assert put_back or max(handled.values(), default=1) == 1
    sender.file.close()
