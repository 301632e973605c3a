"""B01 to B07: lies in the chunk stream, about sizes mostly."""

from __future__ import annotations

from typing import Final

from flowctl.load.hostile.base import ANY, Attack, AttackForm, Run, Script, hostile
from flowctl.load.hostile.octets import CONNECT, header, set_chunk_size
from flowctl.load.hostile.peer import UnreachableError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.wire import (
    CSID_MAX,
    TYPE_ACK,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_DATA_AMF0,
    TYPE_VIDEO,
    Message,
    basic_header,
)

_FIRST_PART: Final = bytes(128)
"""Octets that fill one chunk of the default size."""
_BATCH: Final = 64
_HUGE: Final = set_chunk_size(b"\x7f\xff\xff\xff") + header(TYPE_VIDEO, 0xFFFFFF, csid=6, msid=1) + bytes(1024)
_FILL_BYTES: Final = 64 * 1024


def after_handshake(octets: bytes) -> Run:
    return Script(Attack.shaken, octets)


async def _filled(attack: Attack) -> None:
    """Declare a message of 9 MiB before anything else, and send all of it but the last octets."""
    peer = await attack.shaken()
    await peer.write(set_chunk_size(_FILL_BYTES.to_bytes(4, "big")))
    await peer.write(header(TYPE_VIDEO, 9 << 20, csid=6, msid=1))
    for index in range((9 << 20) // _FILL_BYTES):
        if index:
            await peer.write(basic_header(3, 6))
        await peer.write(bytes(_FILL_BYTES - (index == (9 << 20) // _FILL_BYTES - 1)))


async def _one_octet_chunks(attack: Attack) -> None:
    peer = await attack.shaken()
    writer = ChunkWriter()
    octets = writer.set_chunk_size(1)
    octets += writer.write(commands.command("connect", 1.0, peer.connect_object()))
    octets += writer.write(commands.command("createStream", 2.0, None))
    name = attack.context.own_name("one-byte")
    octets += writer.write(commands.command("publish", 3.0, None, name, "live", stream_id=1))
    await peer.write(octets)
    for index in range(16):
        await peer.write(writer.write(Message(6, index * 40, TYPE_VIDEO, 1, bytes(16 * 1024))))


async def _many_chunk_streams(attack: Attack) -> None:
    peer = await attack.shaken()
    for start in range(3, CSID_MAX + 1, _BATCH):
        csids = range(start, min(start + _BATCH, CSID_MAX + 1))
        await peer.write(b"".join(header(TYPE_VIDEO, 200, csid=csid, msid=1) + _FIRST_PART for csid in csids))


def _changed(second: bytes) -> Run:
    """Return a form that begins a message of 1000 octets and goes on with another header."""
    return after_handshake(header(TYPE_COMMAND_AMF0, 1000) + CONNECT.ljust(128, b"\0") + second)


def _resized(first: int, second: int) -> Run:
    async def run(attack: Attack) -> None:
        peer = await attack.shaken()
        body = amf0.encode("connect", 1.0, peer.connect_object(pageUrl="x" * 1200))
        octets = set_chunk_size(first.to_bytes(4, "big"))
        octets += header(TYPE_COMMAND_AMF0, len(body)) + body[:first]
        octets += set_chunk_size(second.to_bytes(4, "big"))
        rest = body[first:]
        octets += b"".join(basic_header(3, 3) + rest[at : at + second] for at in range(0, len(rest), second))
        await peer.write(octets)
        try:
            await peer.answer(1.0, "connect")
        except UnreachableError:
            attack.fault("no answer to a connect whose chunk size changed on the way: it has lost its place")

    return run


PROFILES: Final = (
    hostile(
        "B01 huge-chunk-size",
        "announces chunks of 2 GiB, begins one, and waits",
        "Set Chunk Size 0x7FFFFFFF, and 0xFFFFFFFF, whose first bit may not be set. A server that makes "
        "room for a whole chunk takes 2 GiB per connection. Sound servers refuse the size, or let memory follow the "
        "bytes that have come.",
        AttackForm(name="largest", run=after_handshake(_HUGE)),
        AttackForm(name="first-bit", run=after_handshake(set_chunk_size(b"\xff\xff\xff\xff"))),
    ),
    hostile(
        "B02 tiny-chunks",
        "sets a chunk size of 1 and sends 256 KiB so",
        "Each byte then needs a header and a turn of the parser. Sound servers have a least chunk size, "
        "or do the work without disturbing others.",
        AttackForm(name="", run=_one_octet_chunks),
    ),
    hostile(
        "B03 bad-chunk-size",
        "sets a chunk size of 0, or sends no, 1, 2 or 3 bytes of the 4",
        "A chunk size of 0 makes a parser loop for ever; a short body makes it read beyond the end. Sound "
        "servers refuse both.",
        AttackForm(name="zero", run=after_handshake(set_chunk_size(bytes(4)))),
        *(
            AttackForm(name=f"{size}-bytes", run=after_handshake(set_chunk_size(b"\0\0\x10"[:size])))
            for size in range(4)
        ),
    ),
    hostile(
        "B04 declared-length",
        "declares long messages and sends only their beginning",
        "Messages of 16 MiB (video, command, data, control) are declared, and two of 9 MiB, which many "
        "servers allow. One of those is sent but for its last byte, by a peer that has not even said connect. A "
        "server that allocates what is declared loses that much per connection. Sound servers refuse by the length, "
        "let memory follow the bytes that have come, and take little from a peer that does not publish.",
        AttackForm(name="video", run=after_handshake(header(TYPE_VIDEO, 0xFFFFFF, csid=6, msid=1) + _FIRST_PART)),
        AttackForm(name="command", run=after_handshake(header(TYPE_COMMAND_AMF0, 0xFFFFFF) + _FIRST_PART)),
        AttackForm(name="data", run=after_handshake(header(TYPE_DATA_AMF0, 0xFFFFFF) + _FIRST_PART)),
        AttackForm(name="control", run=after_handshake(header(TYPE_ACK, 0xFFFFFF, csid=2) + _FIRST_PART)),
        AttackForm(name="filled", run=_filled),
        AttackForm(name="within", run=after_handshake(header(TYPE_AUDIO, 9 << 20, csid=4, msid=1) + _FIRST_PART)),
    ),
    hostile(
        "B05 many-chunk-streams",
        "begins a message on each of 65,597 chunk streams",
        "Each chunk stream has a state and a partial message, which a server may not forget. Sound servers "
        "limit the number of chunk streams, or the bytes held in all of them.",
        AttackForm(name="", run=_many_chunk_streams),
    ),
    hostile(
        "B06 changed-length",
        "changes the length, or the type, inside a message",
        "A receiver that allocated for the first length writes beyond it (CVE-2016-10191 in FFmpeg). "
        "Sound servers refuse the second header, or begin anew.",
        AttackForm(name="longer", run=_changed(header(TYPE_COMMAND_AMF0, 100_000) + _FIRST_PART * 2)),
        AttackForm(name="shorter", run=_changed(header(TYPE_COMMAND_AMF0, 16) + bytes(16))),
        AttackForm(name="type", run=_changed(header(TYPE_VIDEO, 1000) + _FIRST_PART)),
    ),
    hostile(
        "B07 resized-chunks",
        "changes the chunk size in the middle of a message",
        "Set Chunk Size comes between two chunks of a connect: from 128 to 4096 bytes, and from 4096 to "
        "128. It applies from the next chunk on. nginx-rtmp overran its buffer here. Sound servers answer the connect, "
        "or end the connection.",
        AttackForm(name="larger", run=_resized(128, 4096), allowed=ANY),
        AttackForm(name="smaller", run=_resized(512, 128), allowed=ANY),
    ),
)
