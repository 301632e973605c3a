"""Messages of a peer that wait: for our caller's answer to a request, or for its output to be taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from flowctl.wire.rtmp.wire import Message

_OVERHEAD_BYTES: Final = 96
"""Octets charged for a held message on top of its payload, as in a Sender's queue."""


class HeldMessages:
    """Messages in the order in which they are to be treated."""

    __slots__ = ("_messages", "size_bytes")

    def __init__(self) -> None:
        self._messages: deque[Message] | None = None  # nearly no connection holds any
        self.size_bytes = 0  # their payloads, and an overhead for each; above 0 as long as there is a message

    def __len__(self) -> int:
        return 0 if self._messages is None else len(self._messages)

    def append(self, message: Message) -> None:
        if self._messages is None:
            self._messages = deque()
        self._messages.append(message)
        self.size_bytes += _charge(message)

    def put_first(self, messages: Sequence[Message]) -> None:
        """Put `messages` before the others: they came in one whose turn it was. Costs nothing for the others."""
        if messages:
            if self._messages is None:
                self._messages = deque()
            self._messages.extendleft(reversed(messages))
            self.size_bytes += sum(map(_charge, messages))

    def pop(self) -> Message:
        """Take the first message; there is one."""
        messages = self._messages or deque()
        message = messages.popleft()
        self.size_bytes -= _charge(message)
        if not messages:
            self._messages = None
        return message

    def drop_stream(self, stream_id: int) -> int:
        before = len(self)
        kept = [message for message in self._messages or () if message.msid != stream_id]
        self._messages = deque(kept) if kept else None
        self.size_bytes = sum(map(_charge, kept))
        return before - len(kept)


def _charge(message: Message) -> int:
    return len(message.payload) + _OVERHEAD_BYTES
