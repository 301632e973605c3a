"""A peer that sends RTMP chunks in every way that real ones do: the test's own model, written without the tested code.

It works chunk by chunk and field by field, the slow and obvious way, so that a mistake in the tested code's run
arithmetic cannot be in here as well. The fuzz target makes its inputs with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from flowctl.wire.rtmp.wire import Message

MASK = 0xFFFFFFFF


def basic(fmt: int, csid: int) -> bytes:
    if csid < 64:
        return bytes([fmt << 6 | csid])
    if csid < 320:
        return bytes([fmt << 6, csid - 64])
    return bytes([fmt << 6 | 1, (csid - 64) % 256, (csid - 64) // 256])


def header0(csid: int, timestamp: int, length: int, type_id: int, msid: int = 1) -> bytes:
    short = min(timestamp, 0xFFFFFF)
    fields = short.to_bytes(3, "big") + length.to_bytes(3, "big") + bytes([type_id]) + msid.to_bytes(4, "little")
    return basic(0, csid) + fields + (timestamp.to_bytes(4, "big") if short == 0xFFFFFF else b"")


def header1(csid: int, delta: int, length: int, type_id: int) -> bytes:
    short = min(delta, 0xFFFFFF)
    fields = short.to_bytes(3, "big") + length.to_bytes(3, "big") + bytes([type_id])
    return basic(1, csid) + fields + (delta.to_bytes(4, "big") if short == 0xFFFFFF else b"")


def header2(csid: int, delta: int) -> bytes:
    short = min(delta, 0xFFFFFF)
    return basic(2, csid) + short.to_bytes(3, "big") + (delta.to_bytes(4, "big") if short == 0xFFFFFF else b"")


def set_chunk_size(size: int, csid: int = 2) -> bytes:
    return header0(csid, 0, 4, 1, 0) + size.to_bytes(4, "big")


def pieces(data: bytes, rng: random.Random, longest: int = 200) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        count = rng.randint(1, longest)
        yield data[at : at + count]
        at += count


class ChunkPeer:
    """Sends messages as chunks, choosing at random among the header types that are allowed."""

    def __init__(self, rng: random.Random, extended: str | None = None, *, repeat_header: bool = False) -> None:
        self.rng = rng
        self.chunk_size = 128
        self._extended = extended
        self._repeat_header = repeat_header
        self._modes: dict[int, str] = {}
        # csid -> timestamp, delta, length, type, msid, extended field or None
        self._last: dict[int, tuple[int, int, int, int, int, int | None]] = {}

    def chunks(self, message: Message) -> Iterator[tuple[bytes, bool]]:
        """Yield each chunk of `message`, cut by the chunk size when it is asked for, and whether it is the last."""
        csid, payload = message.csid, message.payload
        header, field = self._open(message)
        mode = self._modes.setdefault(csid, self._extended or self.rng.choice(["repeated", "absent", "zero"]))
        type3 = basic(3, csid)
        if field is not None and mode != "absent":
            type3 += (field if mode == "repeated" else 0).to_bytes(4, "big")
        at = min(self.chunk_size, len(payload))
        yield header + payload[:at], at == len(payload)
        while at < len(payload):
            head = type3
            if self._repeat_header and field is None and self.rng.random() < 0.2:
                head = header1(csid, self._last[csid][1], len(payload), message.type_id)
            end = min(at + self.chunk_size, len(payload))
            yield head + payload[at:end], end == len(payload)
            at = end

    def write(self, message: Message) -> bytes:
        return b"".join(chunk for chunk, _ in self.chunks(message))

    def _open(self, message: Message) -> tuple[bytes, int | None]:
        csid, length = message.csid, len(message.payload)
        last = self._last.get(csid)
        allowed = [0]
        delta = message.timestamp
        if last is not None and last[4] == message.msid:
            delta = (message.timestamp - last[0]) & MASK
            allowed.append(1)
            if last[2:4] == (length, message.type_id):
                allowed.append(2)
                # An extended type 3 chunk that opens a message would need the mode first; peers do not send it.
                if last[1] == delta and last[5] is None:
                    allowed += [3, 3, 3]
        fmt = self.rng.choice(allowed)
        if fmt == 0:
            delta = message.timestamp
            header = header0(csid, delta, length, message.type_id, message.msid)
        elif fmt == 1:
            header = header1(csid, delta, length, message.type_id)
        elif fmt == 2:
            header = header2(csid, delta)
        else:
            header = basic(3, csid)
        field = delta if delta >= 0xFFFFFF else None
        self._last[csid] = (message.timestamp, delta, length, message.type_id, message.msid, field)
        return header, field


def random_messages(rng: random.Random, count: int, csids: list[int], longest: int = 1500) -> list[Message]:
    """Return `count` messages on `csids` with clocks that run, stand, jump, go back and wrap."""
    clocks = {csid: rng.choice([0, 1000, 0xFFFFF0, 0xFFFFFF, 0x1000000, 0xFFFFFFF0]) for csid in csids}
    messages = []
    for _ in range(count):
        csid = rng.choice(csids)
        step = rng.choice([0, 0, 20, 20, 20, 33, -10, 0xFFFFFE, 0xFFFFFF, 0x1000000, 2**31])
        clocks[csid] = (clocks[csid] + step) & MASK
        length = rng.choice([0, 1, 3, 4, 127, 128, 129, 256, 300, 300, 300, rng.randint(0, longest)])
        type_id = rng.choice([8, 9, 9, 18, 20])
        # No octet that could be taken for an extended timestamp by a reader that cannot know whether there is one.
        payload = bytes(rng.choices(range(0x20, 0x7F), k=length))
        messages.append(Message(csid, clocks[csid], type_id, rng.choice([1, 1, 1, 5]), payload))
    return messages


def interleave(peer: ChunkPeer, messages: list[Message], sizes: list[int]) -> tuple[bytes, list[Message]]:
    """Send `messages` with chunks of different chunk streams mixed, and Set Chunk Size in between."""
    waiting: dict[int, list[Message]] = {}
    for message in messages:
        waiting.setdefault(message.csid, []).append(message)
    running: dict[int, Iterator[tuple[bytes, bool]]] = {}
    octets, completed, left = [], [], list(sizes)
    while waiting:
        if left and peer.rng.random() < 0.1:
            size = left.pop()
            # Through the same cutting: in chunks of 1 octet it takes four.
            completed.append(Message(2, 0, 1, 0, size.to_bytes(4, "big")))
            octets.append(peer.write(completed[-1]))
            peer.chunk_size = size
        csid = peer.rng.choice(list(waiting))
        chunk, last = next(running.setdefault(csid, peer.chunks(waiting[csid][0])))
        octets.append(chunk)
        if last:
            del running[csid]
            completed.append(waiting[csid].pop(0))
            if not waiting[csid]:
                del waiting[csid]
    return b"".join(octets), completed
