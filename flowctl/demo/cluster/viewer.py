"""A viewer that keeps number, checksum and times of every frame, to be held against what was sent."""

from __future__ import annotations

import time
import zlib
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.connect import parse_address, start_client
from flowctl.wire.client.player import PlayProfile, RtmpPlayer
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.rtmp.wire import Message


class SeenFrame(NamedTuple):
    """One frame that came."""

    type_id: int
    number: int
    checksum: int
    timestamp: int
    due_us: int
    came_us: int


class FrameViewer:
    """Plays a stream and keeps what comes."""

    def __init__(self, label: str, url: str) -> None:
        self.label: Final = label
        self.seen: Final[list[SeenFrame]] = []
        self._player = RtmpPlayer(parse_address(url), PlayProfile(stay=True), on_message=self._take)

    def start(self, group: PollGroup) -> None:
        start_client(group, self._player)

    def _take(self, message: Message, message_class: MessageClass) -> None:
        del message_class
        found = read_stamp(message.payload)
        if found is not None:
            number, due_us = found
            came_us = time.time_ns() // 1000
            checksum = zlib.crc32(message.payload)
            self.seen.append(SeenFrame(message.type_id, number, checksum, message.timestamp, due_us, came_us))

    @property
    def cut(self) -> str:
        """Why its connection ended. Empty: it has not."""
        end = self._player.end
        return "" if end is None else str(end)

    def has(self, type_id: int, number: int) -> bool:
        return any(item.type_id == type_id and item.number == number for item in self.seen[-_TAIL:])


_TAIL: Final = 200
"""Frames among which the last one of a stream is looked for."""
