"""The timeline of a stream that is written to files: its headers, its clock without wraps, where it can be cut.

No sockets, no files, no threads: messages in, `Unit` out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO
from flowctl.wire.rtmp.media.media import MediaInfo, inspect
from flowctl.wire.rtmp.wire import signed_difference

FORWARD_MS: Final = 10_000
"""A clock that goes on by more than this at once is another one: no file should claim hours that were not filmed."""
BACK_MS: Final = 5_000
"""A clock that goes back by more than this is another one, too. Audio and video of one publisher are less apart."""
HEADERS: Final = 32
HEADERS_BYTES: Final = 1 << 20
"""Headers kept of a stream, a hundred times what encoders send; they stand at the beginning of each file."""
_CONFIGURATIONS: Final = frozenset({"sequence_header", "mpeg2ts_sequence_header"})


class Unit(NamedTuple):
    """One message of a stream."""

    type_id: int  # 8 audio, 9 video, 18 script data, as in FLV
    at_ms: int  # time of decoding, on a clock that does not wrap; 0 and more
    payload: bytes
    message_class: MessageClass
    cut: bool = False  # whether a file or a segment can begin with it: a key frame, any frame where there is no video
    broken: str = ""  # why what follows does not belong to what came before. Empty: it does.


class FileTimeline:
    """The timeline of one stream. Not locked: its owner has one thread at a time."""

    __slots__ = ("_broken", "_headers", "_headers_bytes", "_last_ms", "_seen", "_video", "codecs")

    def __init__(self) -> None:
        self.codecs: dict[str, str] = {}  # codecs of the tracks so far, by kind
        self.restart()

    def restart(self) -> None:
        """Forget everything: another publication begins."""
        self._headers: dict[object, tuple[int, bytes]] = {}
        self._headers_bytes = 0
        self._last_ms: int | None = None
        self._video = False  # a stream with video is cut at key frames alone
        self._seen = False  # a frame has come
        self._broken = ""
        self.codecs.clear()

    def note_gap(self, why: str) -> None:
        """Note that messages are missing here: the next unit says why."""
        self._broken = self._broken or why

    @property
    def headers(self) -> tuple[tuple[int, bytes], ...]:
        """Type and payload of each header, in the order in which the first of its kind came."""
        return tuple(self._headers.values())

    def add_message(self, type_id: int, timestamp: int, payload: bytes) -> Unit | None:
        if type_id == 15 and payload[:1] == b"\0":  # AMF3 data, which begins with this octet and goes on in AMF0
            type_id, payload = TAG_SCRIPT, payload[1:]
        if type_id not in (TAG_AUDIO, TAG_VIDEO, TAG_SCRIPT) or not payload:
            return None
        info = inspect(type_id, payload)
        if info.kind != "data" and info.codec:
            self.codecs[info.kind] = info.codec
        self._video = self._video or info.kind == "video"
        if info.message_class is MessageClass.HEADER:
            self._keep_header(info, type_id, payload)
            return Unit(type_id, self._last_ms or 0, payload, info.message_class, broken=self._take_break())
        at_ms = self._unwrap(timestamp)
        broken = self._take_break()
        self._seen = True
        key = info.message_class is MessageClass.KEY
        cut = key or (not self._video and info.message_class is MessageClass.AUDIO)
        return Unit(type_id, at_ms, payload, info.message_class, cut, broken)

    def _take_break(self) -> str:
        """Return why the next unit does not follow the one before, once; empty: it does, or it is the first frame."""
        broken, self._broken = self._broken if self._seen else "", ""
        return broken

    def _unwrap(self, timestamp: int) -> int:
        last = self._last_ms
        if last is None:
            self._last_ms = timestamp
            return timestamp
        step = signed_difference(timestamp, last)
        if not -BACK_MS <= step <= FORWARD_MS:
            self._broken = self._broken or f"its timestamps went {'on' if step > 0 else 'back'} by {abs(step)} ms"
            self._last_ms = timestamp
            return timestamp
        self._last_ms = max(last, last + step)
        return max(last + step, 0)

    def _keep_header(self, info: MediaInfo, type_id: int, payload: bytes) -> None:
        key = info.sticky_key
        before = self._headers.get(key)
        if before is not None and before[1] != payload and info.packet in _CONFIGURATIONS:
            self._broken = self._broken or f"its {info.kind} changed"
        size_bytes = self._headers_bytes + len(payload) - (0 if before is None else len(before[1]))
        if size_bytes > HEADERS_BYTES or (before is None and len(self._headers) >= HEADERS):
            self._headers.pop(key, None)  # none is better than one that does not hold any more
            self._headers_bytes -= 0 if before is None else len(before[1])
        else:
            self._headers[key] = (type_id, payload)  # where it stood: tracks of files stay in their order
            self._headers_bytes = size_bytes
