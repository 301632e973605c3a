"""B19 and B32: messages that nobody knows, and protocol control with absurd values."""

from __future__ import annotations

import asyncio
from typing import Final

from flowctl.load.hostile.base import STAYS, Attack, AttackForm, Run, Script, hostile
from flowctl.load.hostile.octets import picture
from flowctl.load.hostile.peer import Peer
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_SET_BUFFER_LENGTH,
    Acknowledgement,
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
"""A hundred a second: odd, and no flood."""
_FLOOD: Final = 3000
_VIDEO_BYTES: Final = 256 * 1024
_MOST_ACKS: Final = 256
"""Answers to 256 KiB; a server that answers per octet, or per chunk of 128, sends many times that."""
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
)
