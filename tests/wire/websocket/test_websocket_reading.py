"""What a client sends, after the cases of the Autobahn test suite: messages, control frames, and every broken rule."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
from wsproto.events import Ping, Pong

from flowctl.wire.websocket.reading import FrameReader, PeerClose

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
MOST = 100_000


def masked(opcode, payload=b"", *, fin=True, rsv=0, mask=b"\x12\x34\x56\x78", announce=None):
    size = len(payload) if announce is None else announce
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    bit = 0x80 if mask else 0
    if size < 126:
        head += bytes([bit | size])
    elif size < 65_536:
        head += struct.pack(">BH", bit | 126, size)
    else:
        head += struct.pack(">BQ", bit | 127, size)
    return head + mask + (bytes(octet ^ mask[at % 4] for at, octet in enumerate(payload)) if mask else payload)


def deflated(payload):
    deflater = zlib.compressobj(wbits=-15)
    return (deflater.compress(payload) + deflater.flush(zlib.Z_SYNC_FLUSH))[:-4]


def read(*frames, inflates=False, piece=None, most_bytes=MOST):
    """Return what came of the frames; given in pieces it must be the same."""
    wire, reader, events = b"".join(frames), FrameReader(most_bytes, inflates=inflates), []
    for at in range(0, len(wire), piece or len(wire)):
        reader.feed(wire[at : at + (piece or len(wire))])
        events += [event for event in reader.events() if event is not None]
        if events and isinstance(events[-1], PeerClose):
            break
    return events


def fault(*frames, **how):
    """Return the code of the fault with which the frames end."""
    last = read(*frames, **how)[-1]
    assert isinstance(last, PeerClose), last
    assert last.fault
    assert last.reason
    return last.code


@pytest.mark.parametrize("piece", [None, 1, 3])
def test_messages_when_cut_into_frames_with_control_frames_between_are_whole(piece):
    frames = [
        masked(TEXT, "grü".encode(), fin=False),
        masked(PING, b"there?"),
        masked(0, "ße".encode()[:1], fin=False),
        masked(PONG, b""),
        masked(0, "ße".encode()[1:], fin=False),
        masked(0, b""),
        masked(BINARY, b"", fin=True),
        masked(BINARY, b"\0" * 300),
        masked(CLOSE, struct.pack(">H", 1000) + b"bye"),
    ]
    assert read(*frames, piece=piece) == [
        Ping(payload=b"there?"),
        Pong(payload=b""),
        "grüße",
        b"",
        b"\0" * 300,
        PeerClose(1000, "bye", fault=False),
    ]


@pytest.mark.parametrize(
    "frames",
    [
        [masked(TEXT, b"not masked", mask=b"")],
        [masked(TEXT, b"x", rsv=1)],
        [masked(TEXT, b"x", rsv=2)],
        [masked(BINARY, b"x", rsv=4)],
        [masked(PING, b"x", rsv=4)],
        [masked(CLOSE, b"", rsv=1)],
        *([masked(opcode, b"x")] for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)),
        [masked(0, b"continues nothing")],
        [masked(0, b"continues nothing", fin=False)],
        [masked(TEXT, b"a", fin=False), masked(TEXT, b"b")],
        [masked(TEXT, b"a", fin=False), masked(BINARY, b"b", fin=False)],
        [masked(TEXT, b"a"), masked(0, b"b")],
        [masked(PING, b"x", fin=False)],
        [masked(PING, b"x" * 126)],
        [masked(CLOSE, struct.pack(">H", 1000) + b"x" * 124)],
        [masked(CLOSE, b"\x03")],
        [b"\x82\xfe\x00\x05" + b"\0" * 9],
        [b"\x82\xff" + struct.pack(">Q", 300) + b"\0" * 304],
        [b"\x82\xff" + struct.pack(">Q", 1 << 63) + b"\0" * 4],
    ],
)
def test_frames_when_they_break_a_rule_are_a_protocol_error(frames):
    for piece in (None, 1):
        assert fault(*frames, piece=piece) == 1002


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999])
def test_close_codes_when_they_are_valid_are_answered_alike(code):
    (close,) = read(masked(CLOSE, struct.pack(">H", code) + b"why"))
    assert close == PeerClose(code, "why", fault=False)
    assert close.answer == bytes([0x88, 2]) + struct.pack(">H", code)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535])
def test_close_codes_when_they_are_not_valid_are_a_protocol_error(code):
    assert fault(masked(CLOSE, struct.pack(">H", code))) == 1002


def test_close_frames_when_they_have_no_code_are_answered_with_1000():
    (close,) = read(masked(CLOSE))
    assert not close.fault
    assert close.answer == bytes([0x88, 2]) + struct.pack(">H", 1000)


def test_frames_when_they_come_behind_a_close_frame_are_not_looked_at():
    assert read(masked(CLOSE), masked(TEXT, b"late"), masked(PING)) == [PeerClose(1005, "", fault=False)]


@pytest.mark.parametrize(
    "frames",
    [
        [masked(TEXT, b"\xff")],
        [masked(TEXT, b"ends within \xc3")],
        [masked(TEXT, b"\xce\xba\xe1\xbd\xb9", fin=False), masked(0, b"\xf4\x90\x80\x80")],
        [masked(TEXT, b"\xed\xa0\x80")],  # a surrogate
        [masked(TEXT, b"\xc0\xaf")],  # longer than need be
        [masked(TEXT, b"\xe2\x82", fin=False), masked(0, b"x")],
        [masked(CLOSE, struct.pack(">H", 1000) + b"\xff\xfe")],
    ],
)
def test_text_when_it_is_no_utf8_is_refused_as_such(frames):
    for piece in (None, 1):
        assert fault(*frames, piece=piece) == 1007


def test_text_when_a_fragment_cannot_become_utf8_is_refused_before_the_message_ends():
    assert fault(masked(TEXT, b"good \xf4\x90", fin=False)) == 1007


def test_messages_when_they_are_too_long_are_refused_before_their_payload_comes():
    assert read(masked(BINARY, b"x" * MOST)) == [b"x" * MOST]
    assert fault(masked(BINARY, announce=MOST + 1)) == 1009
    assert fault(masked(BINARY, announce=1 << 62)) == 1009
    assert fault(masked(BINARY, b"x" * 60_000, fin=False), masked(0, announce=40_001)) == 1009


def test_messages_when_they_have_fragments_without_end_are_refused():
    frames = [masked(BINARY, b"x", fin=False), masked(0, b"", fin=False) * 20_000]
    assert fault(*frames, most_bytes=1 << 30) == 1008


@pytest.mark.parametrize("piece", [None, 1, 100])
def test_deflated_messages_when_agreed_to_are_inflated_each_for_itself(piece):
    text, octets = "grüße " * 400, bytes(range(256)) * 100
    wire = deflated(text.encode())
    frames = [
        masked(TEXT, wire[:5], fin=False, rsv=4),
        masked(PING, b"p"),
        masked(0, wire[5:], fin=False),
        masked(0, b""),
        masked(BINARY, deflated(octets), rsv=4),
        masked(TEXT, b"plain"),
        masked(BINARY, deflated(b""), rsv=4),
    ]
    assert read(*frames, inflates=True, piece=piece) == [Ping(payload=b"p"), text, octets, "plain", b""]


def test_deflated_messages_when_their_last_block_says_so_are_read_as_the_rfc_has_it():
    """RFC 7692 section 7.2.3.4: a block with BFINAL, and an empty octet behind it."""
    assert read(masked(TEXT, bytes.fromhex("f348cdc9c9070000"), rsv=4), inflates=True) == ["Hello"]
    assert fault(masked(TEXT, bytes.fromhex("f348cdc9c90700") + b"more", rsv=4), inflates=True) == 1007


class CountedInflater:
    """An inflater that counts what it keeps: octets behind the last block, all of which it copies for each call."""

    copied = 0
    make = staticmethod(zlib.decompressobj)

    def __init__(self, wbits):
        self.inflater = self.make(wbits)

    def __getattr__(self, name):
        return getattr(self.inflater, name)

    def decompress(self, data, most):
        inflated = self.inflater.decompress(data, most)
        CountedInflater.copied += len(self.inflater.unused_data)
        return inflated


def test_deflated_messages_when_much_comes_behind_their_last_block_cost_no_more_than_it(monkeypatch):
    last = bytes.fromhex("f348cdc9c90700")
    frames = [masked(TEXT, last, fin=False, rsv=4), *[masked(0, bytes(9), fin=False)] * 3000]
    monkeypatch.setattr(zlib, "decompressobj", CountedInflater)
    assert read(*frames, masked(0), inflates=True) == ["Hello"]
    assert CountedInflater.copied < 3000 * 9
    assert fault(*frames, masked(0, b"more"), inflates=True) == 1007


@pytest.mark.parametrize(("opcode", "octets"), [(BINARY, b"ab"), (TEXT, "\u20ac".encode())])
def test_messages_when_they_come_in_tiny_pieces_take_little_more_memory_than_their_size(opcode, octets):
    wire, reader = masked(opcode, octets * 8000), FrameReader(MOST)
    tracemalloc.start()
    try:
        for at in range(0, len(wire) - 3, len(octets)):
            reader.feed(wire[at : at + len(octets)])
            assert list(reader.events()) in ([], [None])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000, "each piece by itself, they would take 350,000 or more"


def test_deflated_frames_when_they_break_a_rule_are_refused():
    good = deflated(b"x" * 50)
    assert fault(masked(TEXT, good, rsv=4)) == 1002  # not agreed to
    assert fault(masked(TEXT, good[:3], fin=False, rsv=4), masked(0, good[3:], rsv=4), inflates=True) == 1002
    assert fault(masked(PING, b"", rsv=4), inflates=True) == 1002
    assert fault(masked(TEXT, b"\xff\xff\xff\xff", rsv=4), inflates=True) == 1007
    assert fault(masked(TEXT, deflated(b"\xff\xfe"), rsv=4), inflates=True) == 1007


def test_deflated_messages_when_they_would_inflate_beyond_the_limit_allocate_no_more_than_that():
    """A bomb of a hundred megabytes in a hundred kilobytes costs what the limit allows."""
    bomb = deflated(b"\0" * 100_000_000)
    assert len(bomb) < MOST
    frames = masked(BINARY, bomb, rsv=4)
    tracemalloc.start()
    try:
        assert fault(frames, inflates=True) == 1009
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * MOST


def test_deflated_messages_when_in_fragments_are_limited_all_together():
    wire = deflated(b"\0" * (MOST + 1))
    halves = [masked(BINARY, wire[:40], fin=False, rsv=4), masked(0, wire[40:])]
    assert fault(*halves, inflates=True) == 1009
    assert read(masked(BINARY, deflated(b"\0" * MOST), rsv=4), inflates=True) == [b"\0" * MOST]


def test_events_when_looking_stops_in_between_go_on_where_it_stopped():
    reader = FrameReader(MOST)
    reader.feed(b"".join(masked(TEXT, str(number).encode()) for number in range(10)))
    got = []
    while (event := next(reader.events(), None)) is not None:
        got.append(event)
    assert got == [str(number) for number in range(10)]
