"""B18, B20, B21, B23, B24 and B31: publishers that flood, send nonsense, or fight over a name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Final

from flowctl.load.hostile.base import STAYS, Attack, AttackForm, Run, hostile
from flowctl.load.hostile.octets import INTER_FRAME, KEY_FRAME, MARK_AT, VIDEO_CONFIG, picture
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO, Message, basic_header

_FLOOD_BYTES: Final = 8 << 20
_FLOOD_BATCH: Final = 4096
_KEYLESS_BYTES: Final = 24 << 20
_KEYLESS_BYTES_PER_S: Final = 12 << 20
_KEYLESS_FRAME: Final = 64 * 1024
_ROUNDS: Final = 4
_STEP_MS: Final = 20
_PACE_S: Final = 0.005
_LEAP_MS: Final = 1 << 30
"""Length of a leap of the clock: far, and still forward in `signed_difference`."""
_FRAMES_S: Final = 3.0
_OLD: Final = b"old!"
_NEW: Final = b"new!"

_BODIES: Final = (
    *((TYPE_AUDIO, body) for body in (b"", b"\xaf", b"\xaf\x01", b"\xaf\x00", b"\x90", b"\x94Opus", b"\xff")),
    *((TYPE_VIDEO, body) for body in (b"", b"\x17", b"\x17\x01", b"\x17\x00\0\0\0", b"\x17\x02\0\0\0", b"\x27\x01")),
    *((TYPE_VIDEO, body) for body in (b"\x90", b"\x90av", b"\x91hvc1", b"\x96avc1\x01", b"\x97\xff", b"\xff\xff")),
    (TYPE_VIDEO, KEY_FRAME + b"\xff\xff\xff\xff\x65"),
    (TYPE_VIDEO, INTER_FRAME + b"\0\x10\0\0\x41short"),
    (TYPE_VIDEO, VIDEO_CONFIG[:-4]),
    *((TYPE_DATA_AMF0, body) for body in (b"", b"\x02", b"\0\0\0\0", b"\x02\0\x0donMeta")),
)
"""Bodies that end where no reader expects it; NAL unit lengths beyond them; a frame before any configuration."""


async def _tiny_messages(attack: Attack) -> None:
    peer = await attack.publishing(attack.context.own_name("tiny"))
    await peer.send(peer.media_message(TYPE_AUDIO, 0, b"\xaf"))
    # A type 3 chunk: everything as before. Two octets a message is the least there is.
    batch = (basic_header(3, 4) + b"\xaf") * _FLOOD_BATCH
    try:
        while peer.sent_bytes < _FLOOD_BYTES:
            await peer.write(batch)
    finally:
        peer.reset()  # our kernel holds minutes of work for a server that slows us down: it ends with the attack


async def _short_bodies(attack: Attack) -> None:
    peer = await attack.publishing(attack.context.own_name("bodies"))
    for number in range(3):
        for index, (type_id, body) in enumerate(_BODIES):
            await peer.send(Message(6, (number * 100 + index) * _STEP_MS, type_id, peer.stream_id, body))
            await asyncio.sleep(_PACE_S)
    await peer.check_alive()


async def _replacements(attack: Attack) -> None:
    """Publish a name again and again while somebody plays it; each publisher before is reset in mid-frame."""
    name = attack.context.own_name("replaced")
    player = await attack.playing(name)
    reading = asyncio.ensure_future(player.read_to_end())
    refused = 0
    try:
        before: Peer | None = None
        for _ in range(_ROUNDS):
            try:
                publisher = await attack.publishing(name)
            except (RefusedError, PeerGoneError):
                refused += 1
                publisher = None
            if before is not None:
                before.reset()
            if publisher is None:
                # The name is free now, or soon: the same again, alone.
                with contextlib.suppress(RefusedError, PeerGoneError):
                    publisher = await attack.publishing(name)
            before = publisher
            if publisher is not None:
                with contextlib.suppress(PeerGoneError):
                    await _some_frames(publisher)
        attack.details = f"{refused} of {_ROUNDS} takeovers were refused; the player got {player.frames} frames"
    finally:
        reading.cancel()


async def _some_frames(publisher: Peer) -> None:
    """Send a configuration, a key frame, others, and half of one more."""
    for index, body in enumerate((VIDEO_CONFIG, picture(5000, key=True), *(picture(1000),) * 8)):
        await publisher.send(publisher.media_message(TYPE_VIDEO, index * _STEP_MS, body))
        await asyncio.sleep(_PACE_S)
    half = publisher.chunks(publisher.media_message(TYPE_VIDEO, 200, picture(9000)))
    await publisher.write(half[:4000])


def _without_keys(*, first: bool) -> Run:
    async def run(attack: Attack) -> None:
        peer = await attack.publishing(attack.context.own_name("one-key" if first else "no-key"))
        await peer.send(peer.media_message(TYPE_VIDEO, 0, VIDEO_CONFIG))
        if first:
            await peer.send(peer.media_message(TYPE_VIDEO, 0, picture(1000, key=True)))
        body = picture(_KEYLESS_FRAME)
        for index in range(_KEYLESS_BYTES // _KEYLESS_FRAME):
            await peer.send(peer.media_message(TYPE_VIDEO, (index + 1) * _STEP_MS, body))
            await asyncio.sleep(_KEYLESS_FRAME / _KEYLESS_BYTES_PER_S)

    return run


def _clock() -> Iterator[int]:
    """Return timestamps that pass 4.66 h and 49.7 d a few frames at a time, with leaps between."""
    for begin in (0xFFFFFF - 5 * _STEP_MS, *(step * _LEAP_MS for step in range(1, 4)), CLOCK_MASK - 5 * _STEP_MS):
        for index in range(10):
            yield (begin + index * _STEP_MS) & CLOCK_MASK


async def _clock_wraps(attack: Attack) -> None:
    """Publish timestamps beyond 24 bit and beyond 32 bit to a player of our own, which has to get every frame."""
    name = attack.context.own_name("clock")
    publisher = await attack.publishing(name)
    times = list(_clock())
    # A key frame first, and until the player has one: it counts from there.
    player = await attack.playing(name)
    player.media = []
    await publisher.send(publisher.media_message(TYPE_VIDEO, times[0] - 2 * _STEP_MS, VIDEO_CONFIG))
    await publisher.send(publisher.media_message(TYPE_VIDEO, times[0] - _STEP_MS, picture(100, key=True)))
    try:
        async with asyncio.timeout(min(_FRAMES_S, attack.left_s)):
            await player.wait_frames(1)
    except TimeoutError:
        attack.details = "no frame came to the player"
        return
    for index, timestamp in enumerate(times):
        # Long enough for several chunks of 128, which repeat an extended timestamp.
        body = picture(300, index.to_bytes(2, "big"))
        await publisher.send(publisher.media_message(TYPE_VIDEO, timestamp, body))
        await asyncio.sleep(_PACE_S)
    with contextlib.suppress(TimeoutError, PeerGoneError):
        async with asyncio.timeout(min(_FRAMES_S, attack.left_s)):
            while _inter_frames(player) < len(times):
                await player.pump()
    missing = len(times) - _inter_frames(player)
    if missing and player.frames:
        attack.fault(f"{missing} of {len(times)} frames never came")


def _inter_frames(player: Peer) -> int:
    return sum(message.payload.startswith(INTER_FRAME) for message in player.media or ())


async def _duplicate(attack: Attack) -> None:
    name = attack.context.own_name("duplicate")
    second = await attack.connected()
    first = await attack.publishing(name)
    player = await attack.playing(name)
    player.media = []
    sending = asyncio.ensure_future(_send_marked(first, _OLD))
    reading = asyncio.ensure_future(player.read_to_end())
    try:
        await asyncio.sleep(0.3)
        await second.publish(name)
        await _send_marked(second, _NEW)
    finally:
        await asyncio.sleep(0.2)
        sending.cancel()
        reading.cancel()
        await asyncio.gather(sending, reading, return_exceptions=True)
        marks = [_mark(message) for message in player.media if message.payload[:5] in (KEY_FRAME, INTER_FRAME)]
        changes = sum(one != other for one, other in itertools.pairwise(marks))
        attack.details = f"the player saw {marks.count(_OLD)} frames of the first, {marks.count(_NEW)} of the second"
        if changes > 1:
            attack.fault("the frames of two publishers were mixed")


def _mark(message: Message) -> bytes:
    return message.payload[MARK_AT : MARK_AT + len(_OLD)]


async def _send_marked(peer: Peer, mark: bytes) -> None:
    """Send 30 frames that bear `mark`; a publisher that is replaced meanwhile stops."""
    with contextlib.suppress(PeerGoneError):
        for index in range(30):
            await peer.send(peer.media_message(TYPE_VIDEO, index * _STEP_MS, picture(200, mark, key=index % 10 == 0)))
            await asyncio.sleep(_STEP_MS / 1000)


PROFILES: Final = (
    hostile(
        "B18 tiny-messages",
        "publishes audio messages of one byte, up to four million, as fast as they are taken",
        "Two bytes on the wire cost a whole turn through the server, and a place in every queue. Sound "
        "servers slow the publisher down, or cut it, and others on the same thread keep their turn.",
        AttackForm(name="", run=_tiny_messages),
    ),
    hostile(
        "B20 short-bodies",
        "publishes audio and video of 0, 1 and 2 bytes, and lengths beyond the end",
        "Readers of codec headers look at bytes that are not there, or trust the length of a NAL unit. "
        "Sound servers pass such messages on, or drop them.",
        AttackForm(name="", run=_short_bodies),
    ),
    hostile(
        "B21 replaced-publisher",
        "replaces the publisher of a stream in mid-frame while somebody plays it",
        "A player that still points to the old publication reads freed memory, or gets half of one frame "
        "and half of another. Sound servers refuse the second publisher, or switch at a frame.",
        AttackForm(name="", run=_replacements),
    ),
    hostile(
        "B23 no-key-frames",
        "publishes 24 MiB without a key frame, or after a single one",
        "The cache that starts new viewers at a key frame grows until the next one comes. Sound servers "
        "bound it in bytes, frames and time.",
        AttackForm(name="none", run=_without_keys(first=False)),
        AttackForm(name="one", run=_without_keys(first=True)),
    ),
    hostile(
        "B24 clock-wrap",
        "publishes timestamps beyond 4.66 hours and beyond 49.7 days",
        "Beyond 24 bit a timestamp moves to another field, beyond 32 bit it begins anew. Servers have "
        "filled their memory waiting for the past, or lost the stream. Sound servers pass every frame on.",
        AttackForm(name="", run=_clock_wraps, allowed=STAYS),
    ),
    hostile(
        "B31 duplicate-publisher",
        "publishes a name that is being published",
        "Sound servers refuse the second, replace the first, or keep the second in reserve; the frames of "
        "the two are never mixed.",
        AttackForm(name="", run=_duplicate),
    ),
)
