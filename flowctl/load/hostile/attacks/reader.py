"""B16, B17, B30 and B33: viewers that take the live stream and do not play by the rules of flow control."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from flowctl.load.hostile.base import ENDED, STAYS, Attack, AttackForm, Script, hostile
from flowctl.load.hostile.octets import picture
from flowctl.load.hostile.peer import Peer
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    Acknowledgement,
    PeerBandwidth,
    UserControl,
    encode_control,
)
from flowctl.wire.rtmp.wire import TYPE_VIDEO

_SMALL_BUFFER: Final = 4096
_SLOW_BYTES_PER_S: Final = 1000
_TICK_S: Final = 0.25
_ACK_STEP_BYTES: Final = 50_000
_FRAMES: Final = 10
_FIRST_FRAMES_S: Final = 5.0
_PINGS: Final = 250
_PING_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 95.0
"""nginx-rtmp and we ping after 60 s of silence and wait 30 s."""


def _play(attack: Attack) -> Coroutine[Any, Any, Peer]:
    return attack.playing(receive_buffer_bytes=_SMALL_BUFFER)


def _ping(peer: Peer, number: int) -> bytes:
    return peer.chunks(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=number)))


_flood: Final = Script(
    _play, lambda _, peer: _ping(peer, 1), again=lambda _, peer: _ping(peer, 2) * _PINGS, every_s=_PING_PAUSE_S
)


async def _slow(attack: Attack) -> None:
    peer = await _play(attack)
    while True:
        await peer.read_some(round(_SLOW_BYTES_PER_S * _TICK_S))
        peer.look()
        await asyncio.sleep(_TICK_S)


async def _acknowledge(attack: Attack) -> None:
    peer = await _play(attack)
    await peer.wait_frames(1)
    count = peer.received_bytes
    while True:
        count += _ACK_STEP_BYTES
        await peer.send(encode_control(Acknowledgement.of(count)))
        peer.look()
        await asyncio.sleep(_TICK_S)


async def _silent_viewer(attack: Attack) -> None:
    """Play, and from the first frames on be as one whose machine lost its power: no read, no answer, no end."""
    peer = await _play(attack)
    await peer.wait_frames(1)
    while True:
        await asyncio.sleep(_TICK_S)
        peer.look()


async def _silent_publisher(attack: Attack) -> None:
    peer = await attack.publishing(attack.context.own_name("silent"))
    for index in range(_FRAMES):
        await peer.send(peer.media_message(TYPE_VIDEO, index * 40, picture(1000, key=True)))
    while True:
        await asyncio.sleep(_TICK_S)
        peer.look()


async def _bandwidth(attack: Attack) -> None:
    peer = await attack.playing()
    try:
        async with asyncio.timeout(min(_FIRST_FRAMES_S, attack.left_s)):
            await peer.wait_frames(_FRAMES)
    except TimeoutError:
        attack.details = "nothing is published, so nothing can be told"
        attack.undecided = True
        return
    for size in (0, 1, 0xFFFFFFFF):
        for limit_type in (0, 1, 2, 7):
            await peer.send(encode_control(PeerBandwidth(size, limit_type)))
    seen = peer.frames
    try:
        async with asyncio.timeout(min(_FIRST_FRAMES_S, attack.left_s)):
            await peer.wait_frames(seen + 3 * _FRAMES)
    except TimeoutError:
        attack.fault("the stream stopped")


PROFILES: Final = (
    hostile(
        "B16 slow-reader",
        "plays the live stream and reads 1 kB/s",
        "What it does not take piles up in the server. Sound servers bound that, drop frames up to a key "
        "frame, and cut the viewer when that does not help.",
        AttackForm(name="", run=_slow, allowed=ENDED, needs_s=_PATIENCE_S, reads=False),
    ),
    hostile(
        "B17 deaf-acknowledger",
        "acknowledges but never reads; floods control messages without reading the answers",
        "Acknowledgements are the peer's word, not a fact: who believes them sends on for ever. And each "
        "ping makes an answer that nobody reads. Sound servers go by what the kernel takes, and limit the rate of "
        "control messages.",
        AttackForm(name="acknowledging", run=_acknowledge, allowed=ENDED, needs_s=_PATIENCE_S, reads=False),
        AttackForm(name="control-flood", run=_flood, allowed=ENDED, needs_s=_PATIENCE_S, reads=False),
    ),
    hostile(
        "B30 silent-death",
        "a viewer and a publisher go silent without closing",
        "As after a power cut: the connection stays, nothing is read, nothing is answered. Sound servers "
        "notice it by what the kernel no longer takes, or by a ping that is not answered, and free the name.",
        AttackForm(name="viewer", run=_silent_viewer, allowed=ENDED, needs_s=_PATIENCE_S, reads=False),
        AttackForm(name="publisher", run=_silent_publisher, allowed=ENDED, needs_s=_PATIENCE_S, reads=False),
    ),
    hostile(
        "B33 peer-bandwidth",
        "asks for a bandwidth of 0, 1 and 4 GiB",
        "Set Peer Bandwidth is ignored by nearly everybody; who obeys it stops sending, for good. Sound "
        "servers go on with the stream.",
        AttackForm(name="", run=_bandwidth, allowed=STAYS),
    ),
)
