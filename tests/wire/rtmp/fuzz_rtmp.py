"""Fuzz target for everything that reads octets of an RTMP peer: handshakes, chunks, AMF, messages, aggregates, tracks.

`check(data)` is one run; it raises `AssertionError` for a broken promise and lets any unexpected exception through.
The promises: only protocol errors; the same messages for every way of cutting the input; memory within the limits
and never beyond what was received; what was read can be written and is read back the same.

On its own it makes inputs by itself (a model peer's chunks and recorded ones, mutated) with a seeded generator::

    python tests/wire/rtmp/fuzz_rtmp.py --seconds 60 --seed 1
    python tests/wire/rtmp/fuzz_rtmp.py --atheris -max_total_time=60     # coverage-guided, where atheris is installed
    python tests/wire/rtmp/fuzz_rtmp.py --input 0601...                  # one input again, in hex

An input that fails is printed in hex; it belongs into `FOUND` below, which `test_rtmp_fuzz.py` runs first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kits"))

from rtmp_chunk_peer import ChunkPeer, header0, interleave, pieces, random_messages, set_chunk_size

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp import commands, messages
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter, serialise
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.enhanced import MAX_TRACKS
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.tracks import split_tracks, wrap_track
from flowctl.wire.rtmp.messages import split_aggregate
from flowctl.wire.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_VIDEO,
    Message,
)

VECTORS = Path(__file__).resolve().parents[3].parent / "shared" / "vectors"

# The account of unfinished octets depends on how the input is cut (a message within one piece is never unfinished),
# so the comparison of cuts needs a limit that this input cannot reach, and a third reader is held to a small one.
LIMITS = WireLimits(trusted=True, chunk_streams=8, command_message_bytes=4096)
SMALL = WireLimits(trusted=True, chunk_streams=8, command_message_bytes=4096, unfinished_bytes=600)

INTERESTING = (
    b"\0\0\0\0",
    b"\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0\0\1",
    b"\0\0\0\x80",
    b"\xc4",
)

FOUND: tuple[str, ...] = ()
"""Inputs, in hex, that failed once. None has been found since the first version of the reader."""


# ------------------------------------------------------------------------------------------------- the promises


def check(data: bytes) -> None:
    """Read `data` as chunks and as handshakes; its first octet chooses the reader's options and the cutting."""
    choice = data[0] if data else 0
    options = {
        "type3_after_type0": ("delta", "zero")[choice & 1],
        "extended_delta": ("delta", "absolute")[choice >> 1 & 1],
    }
    stream = data[1:]
    whole = _read(ChunkReader(LIMITS, **options), [stream], LIMITS)
    cut = list(pieces(stream, random.Random(choice), (1, 4, 40, 300)[choice >> 2 & 3]))
    assert _read(ChunkReader(LIMITS, **options), cut, LIMITS) == whole
    _read(ChunkReader(SMALL, **options), cut, SMALL)
    for message in whole[0]:
        _check_message(message)
        if message.type_id in (TYPE_AUDIO, TYPE_VIDEO):
            _check_tracks(message.type_id, message.payload)
    for type_id in (TYPE_AUDIO, TYPE_VIDEO):
        _check_tracks(type_id, stream)
    _check_written(whole[0])
    _check_handshake(Handshake.server(random.Random(1)), stream)
    client = Handshake.client("digest", random.Random(1))
    client.start()
    _check_handshake(client, stream)


def _read(reader: ChunkReader, cut: list[bytes], limits: WireLimits) -> tuple[list[Message], str | None]:
    found: list[Message] = []
    for piece in cut:
        try:
            found += reader.feed(piece)
        except RemoteProtocolError as error:
            found += reader.completed_before_fault
            assert (reader.failed, reader.unfinished_bytes, reader.chunk_streams) == (True, 0, 0)
            return found, error.code
        held = sum(len(stream.body) for stream in (*reader._streams, *(reader._more_streams or {}).values()))
        assert reader.unfinished_bytes == held <= min(limits.unfinished_bytes, reader.bytes_received)
        assert reader.chunk_streams <= limits.chunk_streams
    for message in found:
        assert len(message.payload) <= limits.message_limit(message.type_id)[1]
    assert sum(len(message.payload) for message in found) <= reader.bytes_received
    return found, None


def _check_message(message: Message) -> None:
    """Decode `message`; what is decoded can be encoded, and means the same."""
    code = None
    try:
        value = messages.decode_message(message, LIMITS)
        parts = split_aggregate(message, LIMITS) if message.type_id == TYPE_AGGREGATE else []
    except RemoteProtocolError as error:
        code = error.code
    if code is not None:
        assert code != "protocol", "every refusal has a code of its own"
        return
    assert sum(len(part.payload) for part in parts) <= len(message.payload)
    # Compared by their text: a number that is NaN is not equal to itself.
    if isinstance(value, messages.Command):
        sent = commands.command(value.name, value.transaction_id, value.object, *value.arguments)
        assert repr(messages.decode_message(sent, LIMITS)) == repr(value)
    elif message.type_id in (TYPE_DATA_AMF0, TYPE_DATA_AMF3):
        with contextlib.suppress(RemoteProtocolError):
            commands.read_metadata(message, LIMITS)
    elif not isinstance(value, Message):
        assert messages.decode_message(messages.encode_control(value)) == value


def _check_tracks(type_id: int, body: bytes) -> None:
    """Take `body` apart; each track is plain, no longer than it was, and means the same as a track of several."""
    info = inspect(type_id, body)
    found = split_tracks(type_id, body)
    assert len(found) <= MAX_TRACKS
    assert sum(len(plain) - 4 for _, plain in found) <= len(body)
    if found and found[0].payload is not body:  # what is rewritten is understood
        assert info.multitrack or info.packet not in ("malformed", "unknown", "command")
    for track, plain in found:
        told = inspect(type_id, plain)
        assert not told.multitrack
        assert track in info.tracks
        assert split_tracks(type_id, plain) == [(0, plain)]
        wrapped = wrap_track(type_id, track or 255, plain)
        if wrapped is not None and told.packet != "malformed":
            ((again, same),) = split_tracks(type_id, wrapped)
            meant = inspect(type_id, same)
            assert (again, meant.codec, meant.packet) == (track or 255, told.codec, told.packet)
            assert meant.message_class is told.message_class
            assert meant.composition_ms in (told.composition_ms, None)  # AV1 has one in classic FLV only
            assert inspect(type_id, wrapped).tracks == (again,)


def _check_written(found: list[Message]) -> None:
    """Write `found` in both ways and read it again."""
    # Set Chunk Size and Abort would change how the rest is read.
    sent = [message for message in found if message.type_id not in (1, 2)]
    limits = WireLimits(chunk_streams=65598, command_message_bytes=4096)
    writer = ChunkWriter()
    assert ChunkReader(limits).feed(b"".join(map(writer.write, sent))) == sent
    octets = b"".join(serialise(m.type_id, m.msid, m.timestamp, m.payload, m.csid, 128) for m in sent)
    assert ChunkReader(limits).feed(octets) == sent


def _check_handshake(handshake: Handshake, data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        out = handshake.receive(data)
        assert len(out) in (0, 1536, 3073)
    assert not (handshake.failed and handshake.done)
    assert len(handshake.leftover) <= len(data)


# ------------------------------------------------------------------------------------------------- the inputs


def recorded() -> list[bytes]:
    return [
        bytes.fromhex(vector["input_hex"])
        for path in sorted(VECTORS.glob("rtmp_*.json"))
        for vector in json.loads(path.read_text())["vectors"]
        if vector["kind"] in ("chunk_stream", "message", "ertmp_message", "handshake_packet1")
    ]


def generated(rng: random.Random) -> bytes:
    """Return the octets of a model peer: media, commands, control, aggregates, in chunks of any size."""
    peer = ChunkPeer(rng, repeat_header=rng.random() < 0.3)
    mixed = random_messages(rng, rng.randint(1, 8), rng.sample([3, 4, 6, 64, 320], 3), 400)
    values = ["connect", 1.0, {"app": "live", "tcUrl": "rtmp://localhost/live"}, None, [1.0, True, "x"]]
    body = tracks(rng)
    extra = [
        Message(6, 0, TYPE_VIDEO if body[0] & 0x60 or body[0] & 7 == 6 else TYPE_AUDIO, 1, body),
        Message(3, 0, 20, 0, amf0.encode(*values[: rng.randint(0, 5)])),
        Message(3, 0, 17, 0, b"\0" + amf0.encode(*values)),
        Message(5, 7, 18, 1, amf0.encode("@setDataFrame", "onMetaData", {"width": 1280.0})),
        Message(2, 0, 4, 0, rng.choice([b"\0\6\0\0\0\1", b"\0\3\0\0\0\1\0\0\0\1", b"\0\x1f\0\0\0\1"])),
        Message(2, 0, rng.choice([2, 3, 5, 6]), 0, rng.randbytes(5)),
        Message(4, 9, 22, 1, b"\x08\0\0\2\0\0\1\0\0\0\0ab\0\0\0\x0d\x09\0\0\1\0\0\2\0\0\0\0v"),
    ]
    data, _ = interleave(peer, mixed + rng.sample(extra, rng.randint(0, 4)), [rng.choice([1, 2, 50, 128, 300, 4096])])
    return data


def tracks(rng: random.Random) -> bytes:
    """Return the body of a message with several tracks, or with one, behind ModEx prefixes or none."""
    video = rng.random() < 0.6
    codecs = [b"avc1", b"hvc1", b"av01", b"vp09"] if video else [b"mp4a", b".mp3", b"Opus", b"ac-3"]
    packet_type = rng.choice([0, 1, 1, 1, 2, 3, 4, 5])
    form = rng.randrange(3)
    out = b"".join(bytes((rng.randrange(3), *rng.randbytes(3), 7)) for _ in range(rng.choice([0, 0, 0, 1, 2])))
    first = rng.choice([0x80, 0x90, 0x90, 0xA0, 0xB0, 0xD0]) if video else 0x90
    out = bytes((first | (7 if out else 6 if video else 5),)) + out[:-1] + bytes((6 if video else 5,)) * bool(out)
    out += bytes((form << 4 | packet_type,)) + (rng.choice(codecs) if form < 2 else b"")
    for track in range(1 if form == 0 else rng.choice([1, 2, 3, MAX_TRACKS + 1])):
        data = rng.choice([b"", b"\0\0\x50", b"\x01\x64"]) + rng.choice([b"\0\0\0\2\x65\x88", rng.randbytes(24)])
        out += (rng.choice(codecs) if form == 2 else b"") + bytes((track,))
        out += (len(data).to_bytes(3, "big") if form else b"") + data
    return out


def mutated(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Return `data` with up to eight changes: octets, bits, cuts, repetitions, insertions, pieces of `other`."""
    octets = bytearray(data)
    for _ in range(rng.randint(0, 8)):
        at = rng.randrange(len(octets) + 1)
        end = min(len(octets), at + rng.choice([1, 1, 2, 4, 16, 128]))
        match rng.randrange(8):
            case 0 if at < len(octets):
                octets[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(octets):
                octets[at] = rng.randrange(256)
            case 2:
                del octets[at:end]
            case 3:
                octets[at:at] = octets[at:end]
            case 4:
                octets[at:end] = rng.choice(INTERESTING)
            case 5:
                octets[at:at] = rng.choice(INTERESTING)
            case 6:
                start = rng.randrange(len(other) + 1)
                octets[at:end] = other[start : start + rng.randint(0, 64)]
            case 7:
                octets[at:at] = rng.choice(
                    [set_chunk_size(rng.choice([0, 1, 128, 2**31])), header0(2, 0, 4, 2) + b"\0\0\0\4"]
                )
    return bytes(octets[:20_000])


def inputs(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    corpus = recorded()
    while True:
        base = rng.choice(corpus) if corpus and rng.random() < 0.4 else rng.choice([generated, tracks])(rng)
        other = rng.choice(corpus) if corpus else generated(rng)
        yield bytes([rng.randrange(256)]) + mutated(base, rng, other)


def run(seconds: float, seed: int) -> int:
    end = time.monotonic() + seconds
    for count, data in enumerate(inputs(seed), start=1):
        try:
            check(data)
        except Exception as error:
            raise AssertionError(f"input {data.hex()} of seed {seed}: {error!r}") from error
        if time.monotonic() > end:
            return count
    return 0


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Fuzz the RTMP readers.")
    parser.add_argument("--seconds", type=float, default=60, help="how long to run")
    parser.add_argument("--seed", type=int, default=0, help="of the generator")
    parser.add_argument("--input", help="check this one input, in hex")
    parser.add_argument("--atheris", action="store_true", help="use atheris; further arguments are for libFuzzer")
    arguments, rest = parser.parse_known_args()
    if arguments.atheris:
        import atheris

        atheris.instrument_all()
        atheris.Setup([sys.argv[0], *rest], check)
        atheris.Fuzz()
    elif arguments.input is not None:
        check(bytes.fromhex(arguments.input))
    else:
        count = run(arguments.seconds, arguments.seed)
        sys.stdout.write(f"{count} inputs in {arguments.seconds:g} s, none failed (seed {arguments.seed})\n")


if __name__ == "__main__":
    main()
