"""A Receiver on a manual clock with scripted reads, for the tests of the receiver."""

from __future__ import annotations

from flowctl.core.loop.deadlines import Deadlines
from flowctl.deferred import DeferredProcessor, Registration
from flowctl.receiver import DONE, Receiver

EOF = b""


class Host:
    def __init__(self, scratch_bytes: int = 4096) -> None:
        self.scratch = memoryview(bytearray(scratch_bytes))
        self.deadlines = Deadlines(lambda when: None)
        self.bytes_in = 0


class Handler:
    def __init__(self) -> None:
        self.answers: list = []  # InputResult, exception, or a function of the data that returns one
        self.offers: list[bytes] = []
        self.control: list[bool] = []
        self.ends: list[object] = []
        self.on_offer = lambda data: None
        self.on_end = lambda: None
        self.depth = 0

    def process_input(self, data: memoryview, *, control_only: bool):
        assert self.depth == 0, "process_input was re-entered"
        self.depth += 1
        try:
            self.offers.append(bytes(data))
            self.control.append(control_only)
            self.on_offer(data)
            answer = self.answers.pop(0) if self.answers else DONE
            if callable(answer):
                answer = answer(data)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.depth -= 1

    def process_eof(self) -> None:
        self.ends.append("eof")
        self.on_end()

    def process_error(self, error: Exception) -> None:
        self.ends.append(error)
        self.on_end()


class Kit:
    """A Receiver with everything around it; `feed` is the socket's receive queue."""

    def __init__(self, *, scratch_bytes: int = 4096, attach: bool = True, **options) -> None:
        self.now = 100.0
        self.feed: list = []  # bytes, EOF, or an exception; empty: BlockingIOError
        self.reads: list[int] = []  # room offered by each read
        self.watched: list[bool] = []
        self.errors: list[tuple[str, Exception]] = []
        self.handler = Handler()
        self.handler.reading_changed = self.watched.append
        self.host = Host(scratch_bytes)
        self.registration = Registration()
        self.processor = DeferredProcessor(lambda: None, lambda where, error: self.errors.append((where, error)))
        self.registration.bind(self.processor)
        options.setdefault("capacity_bytes", 1024)
        self.receiver = Receiver(self.registration, self.handler, self.read_into, clock=lambda: self.now, **options)
        if attach:
            self.receiver.attached(self.host)

    def read_into(self, room: memoryview) -> int:
        assert len(room) > 0, "a read into nothing cannot tell the end of the stream from no room"
        self.reads.append(len(room))
        if not self.feed:
            raise BlockingIOError
        head = self.feed.pop(0)
        if isinstance(head, Exception):
            raise head
        count = min(len(head), len(room))
        room[:count] = head[:count]
        if head[count:]:
            self.feed.insert(0, head[count:])
        return count

    def rounds(self) -> int:
        for number in range(1, 101):
            if not self.processor.run_round():
                return number
        raise AssertionError("the rounds do not end")

    def ready(self, *chunks) -> None:
        """Put `chunks` into the receive queue and tell the receiver as a loop does, if it watches."""
        self.feed += chunks
        if self.receiver.reading:
            self.receiver.input_ready()

    def settle(self) -> None:
        """Let loop turns pass until nothing happens any more."""
        for _ in range(1000):
            before = (len(self.reads), len(self.handler.offers), len(self.handler.ends))
            if self.feed and self.receiver.reading:
                self.receiver.input_ready()
            self.rounds()
            if before == (len(self.reads), len(self.handler.offers), len(self.handler.ends)):
                return
        raise AssertionError("it does not settle")

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.host.deadlines.run_due(self.now)
