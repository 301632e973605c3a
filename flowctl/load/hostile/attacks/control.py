"""Protocol control with absurd values (B19, B32), and viewers that ignore its rules (B16, B17, B30, B33)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from flowctl.load.hostile.base import ENDED, STAYS, Attack, AttackForm, Run, Script, hostile
from flowctl.load.hostile.octets import picture
from flowctl.load.hostile.peer import Peer
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_SET_BUFFER_LENGTH,
    Acknowledgement,
    PeerBandwidth,
    UserControl,
    WindowAckSize,
    encode_control,
)
from flowctl.wire.rtmp.wire import (
    TYPE_ABORT,
    TYPE_ACK,
    TYPE_PEER_BANDWIDTH,
    TYPE_USER_CONTROL,
    TYPE_VIDEO,
    TYPE_WINDOW_ACK_SIZE,
    Message,
)

_KNOWN: Final = frozenset({1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 17, 18, 19, 20, 22})
_UNKNOWN: Final = [type_id for type_id in range(256) if type_id not in _KNOWN][:60]
_EVENTS: Final = (5, 8, 9, 17, 26, 31, 32, 33, 255, 0xFFFF)
_PAUSE_S: Final = 0.01
"""Time between two messages: a hundred a second are odd, and no flood."""
_FLOOD: Final = 3000
_VIDEO_BYTES: Final = 256 * 1024
_MOST_ACKS: Final = 256
"""Most acknowledgements of 256 KiB; a server that answers per octet, or per chunk of 128, sends many times that."""
_HIGHEST: Final = 0xFFFFFFFF


async def _unknown(attack: Attack) -> None:
    """Send messages and user control events of unknown types, a hundred a second, then ask for something."""
    peer = await attack.connected()
    for type_id in _UNKNOWN:
        await peer.send(Message(3, 0, type_id, 0, bytes(type_id % 7)))
        await asyncio.sleep(_PAUSE_S)
    for event in _EVENTS:
        await peer.send(encode_control(UserControl(event, raw=b"\x01\x02\x03")))
        await asyncio.sleep(_PAUSE_S)
    await peer.check_alive()


def _unknown_flood(_: Attack, peer: Peer) -> bytes:
    return b"".join(peer.chunks(Message(3, 0, 77, 0, b"")) for _ in range(_FLOOD))


def _short(type_id: int, size: int) -> Run:
    return Script(Attack.connected, lambda _, peer: peer.chunks(Message(2, 0, type_id, 0, bytes(size))))


def _window(size: int) -> Run:
    """Return a form that announces a window of `size` octets, publishes 256 KiB and counts the acknowledgements."""

    async def run(attack: Attack) -> None:
        peer = await attack.publishing(attack.context.own_name(f"window-{size}"))
        await peer.send(encode_control(WindowAckSize(size)))
        before = peer.controls.get(TYPE_ACK, 0)
        for index in range(_VIDEO_BYTES // 1024):
            await peer.send(peer.media_message(TYPE_VIDEO, index * 4, picture(1024, key=True)))
        await peer.check_alive()
        count = peer.controls.get(TYPE_ACK, 0) - before
        attack.details = f"{count} acknowledgements of {_VIDEO_BYTES} bytes"
        if count > _MOST_ACKS:
            attack.fault(f"{count} acknowledgements of {_VIDEO_BYTES} bytes: nearly one per message")

    return run


async def _absurd(attack: Attack) -> None:
    peer = await attack.connected()
    for sequence in (_HIGHEST, 0, 1, 0x80000000, 0xF0000000, 5):
        await peer.send(encode_control(Acknowledgement(sequence)))
    for timestamp in (0, _HIGHEST, 0x80000000):
        await peer.send(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=timestamp)))
    for stream_id in (0, 1, _HIGHEST):
        event = UserControl(EVENT_SET_BUFFER_LENGTH, stream_id=stream_id, buffer_ms=_HIGHEST)
        await peer.send(encode_control(event))
    await peer.send(Message(2, 0, TYPE_ABORT, 0, (40_000).to_bytes(4, "big")))
    await peer.check_alive()


_SMALL_BUFFER: Final = 4096
_SLOW_BYTES_PER_S: Final = 1000
_TICK_S: Final = 0.25
_ACK_STEP_BYTES: Final = 50_000
_FRAMES: Final = 10
_FIRST_FRAMES_S: Final = 5.0
_PINGS: Final = 250
_PING_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 95.0
"""Longest wait for the end of a silent connection: nginx-rtmp and we ping after 60 s and wait 30 s."""


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
        peer.check_open()
        await asyncio.sleep(_TICK_S)


async def _acknowledge(attack: Attack) -> None:
    peer = await _play(attack)
    await peer.wait_frames(1)
    count = peer.received_bytes
    while True:
        count += _ACK_STEP_BYTES
        await peer.send(encode_control(Acknowledgement.of(count)))
        peer.check_open()
        await asyncio.sleep(_TICK_S)


async def _silent_viewer(attack: Attack) -> None:
    """Play, and from the first frames on act like a machine that lost its power: no read, no answer, no end."""
    peer = await _play(attack)
    await peer.wait_frames(1)
    while True:
        await asyncio.sleep(_TICK_S)
        peer.check_open()


async def _silent_publisher(attack: Attack) -> None:
    peer = await attack.publishing(attack.context.own_name("silent"))
    for index in range(_FRAMES):
        await peer.send(peer.media_message(TYPE_VIDEO, index * 40, picture(1000, key=True)))
    while True:
        await asyncio.sleep(_TICK_S)
        peer.check_open()


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
        "B19 unknown-messages",
        "sends message types and user control events of unknown types, at ease and as a flood",
        "Servers and clients of some makers send undocumented types. Sound servers count and ignore them, "
        "and end the connection over their rate, not over their presence.",
        AttackForm(name="at-ease", run=_unknown, allowed=STAYS),
        AttackForm(name="flood", run=Script(Attack.connected, _unknown_flood)),
    ),
    hostile(
        "B32 absurd-control",
        "acknowledges what was never sent, asks for an acknowledgement per byte, sends bodies too short",
        "Window acknowledgement sizes of 0, 1 and 2^32-1; acknowledgements that go backwards; pings and "
        "buffer lengths of 2^32-1; control messages with too few bytes. Servers have answered per byte, divided by "
        "0, or read beyond the end. Sound servers have a least distance between answers.",
        AttackForm(name="window-0", run=_window(0)),
        AttackForm(name="window-1", run=_window(1)),
        AttackForm(name="window-4g", run=_window(_HIGHEST)),
        AttackForm(name="values", run=_absurd),
        AttackForm(name="short-acknowledgement", run=_short(TYPE_ACK, 2)),
        AttackForm(name="short-window", run=_short(TYPE_WINDOW_ACK_SIZE, 0)),
        AttackForm(name="short-bandwidth", run=_short(TYPE_PEER_BANDWIDTH, 3)),
        AttackForm(name="short-event", run=_short(TYPE_USER_CONTROL, 1)),
        AttackForm(name="short-abort", run=_short(TYPE_ABORT, 3)),
    ),
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
