"""W01 to W08: everything within the limits on sizes, counts and rates, and as much work for the server as that allows.

None of these is on anybody's list. They are examples of a kind: what a peer may do often is made as costly as it gets,
and several connections of one address do it at once. What has to hold is not a rule for each of them but one for all:
a peer that makes a server work is slowed down, and those beside it lose nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from flowctl.load.hostile.base import Attack, AttackForm, Run, hostile
from flowctl.load.hostile.octets import VIDEO_CONFIG, cut, header, picture, u29
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError, UnreachableError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.wire import (
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_DATA_AMF3,
    TYPE_VIDEO,
    Message,
    basic_header,
)

_CONNECTIONS: Final = 16
"""Connections of an attack without publishing: well within what servers allow an address."""
_PUBLISHING_CONNECTIONS: Final = 6
"""Connections of an attack that publishes."""
_END_MARGIN_S: Final = 0.7
"""Time from the end of an attack to its deadline, for a look at what has become of it."""
_RATE_PER_S: Final = 45
"""Commands a second: below what flowctl allows, 50."""
_AMF3_VALUES: Final = 1000
_COMMAND_BYTES: Final = 63_000
_PARTS: Final = 4096
_TINY: Final = 20_000
_CHUNK: Final = 128
_STREAMS: Final = 60
_PICTURE: Final = 10_000

Step = Callable[[Peer, Attack], Awaitable[bytes]]
"""Brings a connection to where the attack begins, and returns the octets that are then sent again and again."""


def _flood(prepare: Step, connections: int, *, per_s: float = 0.0) -> Run:
    """Return a form in which several connections send their octets again and again, and read what comes."""

    async def run(attack: Attack) -> None:
        await asyncio.gather(*(_one(attack, prepare, per_s) for _ in range(connections)))

    return run


async def _one(attack: Attack, prepare: Step, per_s: float) -> None:
    peer = None
    with contextlib.suppress(TimeoutError, PeerGoneError, RefusedError, UnreachableError):
        async with asyncio.timeout(max(attack.left_s - _END_MARGIN_S, 0)):
            peer = await attack.connected()
            octets = await prepare(peer, attack)
            reading = asyncio.ensure_future(peer.read_to_end())
            try:
                while peer.ended is None:
                    await peer.write(octets)
                    await asyncio.sleep(1 / per_s if per_s else 0)
            finally:
                reading.cancel()
    if peer is not None and peer.ended is None:
        peer.reset()  # our kernel holds minutes of work for a server that slows us down: it ends with the attack


def _own(attack: Attack, what: str) -> str:
    return attack.context.own_name(f"{what}-{len(attack.peers)}-{id(asyncio.current_task()) & 0xFFFF}")


async def _amf3_metadata(peer: Peer, attack: Attack) -> bytes:
    """Publish; then metadata of as many AMF3 objects as may be, which has to be made AMF0 for players."""
    await peer.publish(_own(attack, "metadata"))
    array = b"\x11\x09" + u29(_AMF3_VALUES << 1 | 1) + b"\x01" + b"\x0a\x0b\x01\x01" * _AMF3_VALUES
    body = b"\x00" + amf0.encode("@setDataFrame", "onMetaData") + array
    sound = peer.chunks(peer.media_message(TYPE_AUDIO, 0, b"\xaf"))  # it is there, as limits on silence see it
    return sound + b"".join(peer.chunks(Message(5, 0, TYPE_DATA_AMF3, peer.stream_id, body)) for _ in range(4))


async def _long_command(peer: Peer, _attack: Attack) -> bytes:
    """Send the commands of a player with arguments that fill a message."""
    values = amf0.encode("seek", 0.0, None, [{}] * 4000)
    filling = amf0.encode("x" * (_COMMAND_BYTES - len(values)))
    return peer.chunks(Message(3, 0, TYPE_COMMAND_AMF0, 0, values + filling))


async def _absent_streams(peer: Peer, attack: Attack) -> bytes:
    """Publish; then messages of one octet to streams that were never made."""
    await peer.publish(_own(attack, "absent"))
    await peer.send(peer.media_message(TYPE_AUDIO, 0, b"\xaf"))
    first = header(TYPE_AUDIO, 1, csid=8, msid=4711) + b"\xaf"
    return first + (basic_header(3, 8) + b"\xaf") * _TINY


async def _idle_stream(peer: Peer, _attack: Attack) -> bytes:
    """Make a stream, publish nothing, and send messages of one octet to it."""
    stream_id = await peer.create_stream()
    return header(TYPE_AUDIO, 1, csid=8, msid=stream_id) + b"\xaf" + (basic_header(3, 8) + b"\xaf") * _TINY


async def _aggregates(peer: Peer, attack: Attack) -> bytes:
    """Publish; then aggregates of as many parts as may be, of one octet each."""
    await peer.publish(_own(attack, "aggregate"))
    part = b"\x08\x00\x00\x01" + bytes(7) + b"\xaf" + bytes(4)
    return peer.chunks(Message(4, 0, TYPE_AGGREGATE, peer.stream_id, part * _PARTS))


async def _plays(peer: Peer, attack: Attack) -> bytes:
    """Play the live stream; then ask to play it, which it does."""
    name = attack.context.stream
    await peer.play(name)
    return peer.chunks(commands.command("play", 0.0, None, name, -2000.0, stream_id=peer.stream_id))


async def _pauses(peer: Peer, attack: Attack) -> bytes:
    """Play the live stream; then pause it and go on, which begins with all that a newcomer is given."""
    await peer.play(attack.context.stream)
    on, off = (commands.command("pause", 0.0, None, flag, 0.0, stream_id=peer.stream_id) for flag in (True, False))
    return peer.chunks(on) + peer.chunks(off)


async def _interleaved(peer: Peer, attack: Attack) -> bytes:
    """Publish; then pictures on 60 chunk streams at once, in the smallest chunks, one of each in turn."""
    await peer.publish(_own(attack, "chunks"))
    await peer.send(peer.media_message(TYPE_VIDEO, 0, VIDEO_CONFIG))
    await peer.write(cut(1, _CHUNK.to_bytes(4, "big"), csid=2))
    body = picture(_PICTURE)
    parts = [body[at : at + _CHUNK] for at in range(0, len(body), _CHUNK)]
    csids = range(4, 4 + _STREAMS)
    heads = [header(TYPE_VIDEO, len(body), csid=csid, msid=peer.stream_id) + parts[0] for csid in csids]
    rest = [basic_header(3, csid) + part for part in parts[1:] for csid in csids]
    return b"".join((*heads, *rest))


async def _flapping(attack: Attack) -> None:
    """Publish and end it again and again, while 16 players of ours are told each time."""
    name = attack.context.own_name("flapping")
    publisher = await attack.connected()
    with contextlib.suppress(TimeoutError, PeerGoneError, RefusedError, UnreachableError):
        async with asyncio.timeout(max(attack.left_s - _END_MARGIN_S, 0)):
            players = [await attack.playing(name) for _ in range(_CONNECTIONS)]
            reading = [asyncio.ensure_future(peer.read_to_end()) for peer in (publisher, *players)]
            cycle = (
                commands.command("createStream", 9.0, None),
                commands.command("publish", 0.0, None, name, "live", stream_id=1),
                commands.command("deleteStream", 0.0, None, 1.0),
            )
            try:
                while publisher.ended is None:
                    await publisher.write(b"".join(map(publisher.chunks, cycle)))
                    await asyncio.sleep(3 / _RATE_PER_S)
            finally:
                for task in reading:
                    task.cancel()


PROFILES: Final = (
    hostile(
        "W01 amf3-metadata",
        "publishes metadata of 1000 AMF3 objects, on six connections, as fast as it is taken",
        "It has to be read whole and written anew as AMF0, milliseconds each time. Sound servers slow the "
        "publisher down, or cut it, and others on the same thread keep their turn.",
        AttackForm(name="", run=_flood(_amf3_metadata, _PUBLISHING_CONNECTIONS)),
    ),
    hostile(
        "W02 long-commands",
        "sends a command with 63 kB of arguments, 45 times a second on 16 connections",
        "Each is decoded, and means nothing. Sound servers bound what that costs.",
        AttackForm(name="", run=_flood(_long_command, _CONNECTIONS, per_s=_RATE_PER_S)),
    ),
    hostile(
        "W03 absent-streams",
        "sends messages of one byte to streams that do not exist, or are not published",
        "Two bytes on the wire each, and nothing to do for any of them. Sound servers count them, and "
        "slow down or cut who goes on.",
        AttackForm(name="absent", run=_flood(_absent_streams, 1)),
        AttackForm(name="idle", run=_flood(_idle_stream, _CONNECTIONS)),
    ),
    hostile(
        "W04 full-aggregates",
        "publishes aggregates of 4096 messages, on six connections, as fast as they are taken",
        "One message is thousands. Sound servers take them apart a few at a time.",
        AttackForm(name="", run=_flood(_aggregates, _PUBLISHING_CONNECTIONS)),
    ),
    hostile(
        "W05 repeated-play",
        "asks to play what it plays, 45 times a second on 16 connections",
        "Leaving a stream and joining it again, with a burst of media and two lines of log, each time. "
        "Sound servers say that it plays.",
        AttackForm(name="", run=_flood(_plays, _CONNECTIONS, per_s=_RATE_PER_S)),
    ),
    hostile(
        "W06 flapping-publisher",
        "publishes a name and ends it 15 times a second, with 16 players waiting for it",
        "One command of one peer is a message to each of many. Sound servers are not busy with that alone.",
        AttackForm(name="", run=_flapping),
    ),
    hostile(
        "W07 interleaved-chunks",
        "publishes pictures on 60 chunk streams at once in chunks of 128 bytes, on six connections",
        "No two chunks that follow each other belong together, so each is looked at alone. Sound servers "
        "slow the publisher down, and others keep their turn.",
        AttackForm(name="", run=_flood(_interleaved, _PUBLISHING_CONNECTIONS)),
    ),
    hostile(
        "W08 pause-toggling",
        "pauses and goes on, 20 times a second on 16 connections",
        "Each time it goes on a player is given what a newcomer gets. Sound servers bound that, by rate or by work.",
        AttackForm(name="", run=_flood(_pauses, _CONNECTIONS, per_s=20)),
    ),
)
