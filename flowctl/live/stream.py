"""One live stream: who publishes it, what a newcomer needs first, and the logs that its viewers follow.

A stream outlives its publisher while somebody waits for it. Its timeline goes on then: the timestamps of the next
publisher are shifted so that viewers see no jump back. So are those of a publisher whose clock begins anew, or leaps
ahead, within its connection. As long as there was one clock only, timestamps pass untouched.

Threads: `publish` runs on the publisher's thread under the stream's lock, which also makes the change from one
publisher to the next a clean cut. Viewers read the logs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import structlog

from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.streamlog import Entry
from flowctl.errors import LimitExceededError
from flowctl.live.config import LiveConfig
from flowctl.wire.rtmp.media.media import MediaInfo, inspect, named_tracks
from flowctl.wire.rtmp.wire import CLOCK_HALF, CLOCK_MASK, TYPE_AUDIO, TYPE_VIDEO, signed_difference
from flowctl.wire.streams.groups import FRAMES, LONGEST_KEY_INTERVAL_S, PictureGroups
from flowctl.wire.streams.wirelog import KeptHeaders, RtmpChunks, WireFormat, WireLog

_log: Final = structlog.get_logger("flowctl.live")
CLOCKED: Final = FRAMES | {MessageClass.KEY, MessageClass.AUDIO}
"""Messages that show the publisher's clock: headers and metadata have timestamp 0, whatever that clock says."""
# Bound once: an attribute of an Enum class is looked up by code in Python, for each message.
_KEY, _HEADER = MessageClass.KEY, MessageClass.HEADER
_USUAL_MSID: Final = 1
"""Message stream id on which nearly every player plays: the first that createStream gives."""
_LINK_MSID: Final = -1
"""Key of the wire of servers that follow this one, whose message stream id is 1; no player has this id."""
_TRACKS: Final = "tracks "
"""Beginning of the keys of logs of all tracks, where others are not for them."""
_USUAL_TRACKS: Final = f"{_TRACKS}{_USUAL_MSID}"
MOST_WIRES: Final = 8
"""Message stream ids on which a stream can be played at a time; as many as a connection may open by default."""
GIVEN_WIRES: Final = MOST_WIRES // 2
"""Ids up to this one are never refused: createStream gives out the lowest free one, so players who make up numbers, or
open many streams, do not use up those of the others."""
_LONGEST_GAP_MS: Final = 3_600_000
_AHEAD_MS: Final = 10_000
"""Step ahead of the time that has gone by, beyond which it is another clock: as for files (`remux.course`)."""
_BACK_MS: Final = 1_000
"""The same for a step back: frames of one track are not so far out of order, and a player would wait for so long."""
_LEAST_BACK_STEP: Final = CLOCK_MASK + 1 - _BACK_MS
_JUMP_LINE_S: Final = 10.0
"""Least time between two lines on jumps of a publisher's clock, which may be one for each message."""
BELIEVED_S: Final = 10.0
"""Time from the first frame of a publisher in which a track is believed to come that has a header alone, or a name in
metadata: bridges from WebRTC and drones send sound seconds behind the picture. Some encoders name what they never send.
"""


_KINDS: Final = {TYPE_AUDIO: "audio", TYPE_VIDEO: "video"}
MEDIA_TYPES: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})


Tap = Callable[[str, MessageClass, int, int, bytes], None]
StartPlace = tuple[Entry, tuple[bytes, ...], bool]
"""Where a viewer starts: the entry of the log, wire messages before it, whether it waits for a key frame first."""


class StreamMember(Protocol):
    """A publisher or viewer of a stream, as the stream and the hub see it."""

    @property
    def peer(self) -> tuple[str, int]:
        """Address and port of the peer."""

    @property
    def number(self) -> int:
        """Number of the connection."""

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call on its own thread, soon. Any thread."""


class StreamTap(Protocol):
    """Gets the messages of published streams, with the timestamps of their publishers.

    Called under the stream's lock: it must neither block nor call back.
    """

    def took_over(self, name: str, publisher: StreamMember | None) -> None:
        """Another publisher counts from now on, or the same one's clock begins anew; None: no publisher."""

    def message(self, name: str, message_class: MessageClass, type_id: int, timestamp: int, payload: bytes) -> None:
        """A message was passed on."""


class StreamFeed(Protocol):
    """Gets the messages that a stream passes on, with its own timestamps: a set of which it is a part.

    Called under the stream's lock: it may publish to streams that are parts of nothing, and call nobody else.
    """

    as_published: bool  # whether it gets timestamps as the publisher sent them
    sees_jumps: bool  # whether they jump as the publisher's do: it knows better what to make of that

    def accept(self, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float) -> None:
        """A message is about to be passed on."""


class Stream:
    """One stream by name, or one rendition of it."""

    def __init__(
        self,
        name: str,
        config: LiveConfig,
        now: float,
        tap: Tap | None = None,
        taker: StreamTap | None = None,
        *,
        rendition: str = "",
        on_tracks: Callable[[Stream], StreamFeed | None] | None = None,
    ) -> None:
        self.name: Final = name
        self.rendition: Final = rendition  # which one of the stream `name`; empty: the stream itself
        self.renditions: tuple[Stream, ...] = ()  # of this stream, where it is the face of a set; replaced as a whole
        self.feed: StreamFeed | None = None  # set that it is a part of; guarded by _lock
        self._on_tracks: Final = on_tracks  # gives the feed of a publication with several video tracks
        self._tap: Final = tap
        self._taker: Final = taker
        self.config = config  # guarded by _lock
        self.created_at: Final = now
        self._lock = OwnedLock()
        self.publisher: StreamMember | None = None  # guarded by _lock
        self.viewers: dict[StreamMember, None] = {}  # guarded by the hub's lock
        self.links: set[object] = set()  # other servers that follow it; guarded by the hub's lock
        self.ended_at = float("-inf")  # when viewers were told last that it ended; guarded by the hub's lock
        self.ended = True  # viewers were told that nobody publishes; guarded by the hub's lock
        # By message stream id, or by the name of another format; guarded by _lock
        self._wires: dict[int | str, WireLog] = {}
        # What publishers on standby would need to have sent, as (type id, payload): encoders send headers once, at the
        # start; guarded by _lock
        self._standby_headers: dict[StreamMember, KeptHeaders[tuple[int, bytes]]] = {}
        self._batched = False  # what comes was gathered by another server; guarded by _lock
        self._shift: int | None = None  # added to timestamps; None: the next frame will show it; guarded by _lock
        self._last_timestamp: int | None = None  # guarded by _lock
        self._last_at = now  # when the last message came; guarded by _lock
        # By type of audio and video: timestamp of the last frame as it was published; guarded by _lock
        self._own_ms = [0] * (TYPE_VIDEO + 1)
        self._jump_told_at = float("-inf")  # guarded by _lock
        # A track whose clock has not jumped as that of the other one did, 0 for none, and what is added to its
        # timestamps, or was to all before the jump; guarded by _lock
        self._kept_type = self._kept_shift = 0
        self._first_shift: int | None = None  # of this publisher, before its clock jumped; guarded by _lock
        self._key_seen = False  # since this publisher began; guarded by _lock
        self._groups = PictureGroups()  # of this publisher; guarded by _lock
        self._began_at = now  # when this publisher began; guarded by _lock
        self.media_at = now  # when the publisher that counts began, or sent audio or video last
        self.published_at: float | None = None
        self.messages_in = [0] * len(MessageClass)
        self.bytes_in = 0
        self.before_key_count = 0
        self.takeovers = 0  # changes of `publisher`; guarded by _lock
        # what is to be recorded, or written as HLS, and is not: by kind, with the reason; replaced as a whole
        self.unwritten: Mapping[str, str] = {}
        self.commands: tuple[Mapping[str, Any], ...] = ()  # that are run for it, as rows; replaced as a whole
        self.codecs: dict[str, str] = {}  # "video" and "audio", as the publisher last showed them
        self._sent: dict[str, float] = {}  # the same: when its first frame came
        self._named: frozenset[str] = frozenset()  # the same: those that its metadata name

    def configure(self, config: LiveConfig) -> None:
        """Take other settings: cache and flush interval at once, others for logs that are made later. Any thread."""
        with self._lock:
            self.config = config
            for msid, wire in self._wires.items():
                wire.log.cache = config.cache
                if msid != _LINK_MSID:
                    wire.fanouts.set_interval(config.flush_interval_s)
        for rendition in self.renditions:
            rendition.configure(config)

    # -- publishing

    def stand_by(self, publisher: StreamMember) -> None:
        """Remember the headers that `publisher` sends from now on, for `take_over`."""
        with self._lock:
            self._standby_headers[publisher] = KeptHeaders()

    def stand_down(self, publisher: StreamMember) -> None:
        with self._lock:
            self._standby_headers.pop(publisher, None)

    @property
    def standby(self) -> list[StreamMember]:
        """Publishers that wait for their turn. Any thread."""
        with self._lock:
            return list(self._standby_headers)

    def take_over(
        self, publisher: StreamMember | None, now: float, *, announce: bool = False, batched: bool = False
    ) -> None:
        """Make `publisher` the one whose messages count; None: no publisher.

        With `batched` they have been gathered by another server, see `StreamLog`. With `announce` the players who wait
        are told through the logs, so that it reaches each of them behind what it was told before.

        One that was on standby has sent its headers already: they are passed on now. The headers of the publisher
        before it are forgotten, since its tracks may be others.
        """
        with self._lock:
            self._wire_locked(_USUAL_MSID)  # before the first viewer comes, so that it finds the GOP cache filled
            self.publisher = publisher
            self._batched = batched
            for wire in self._wires.values():
                wire.log.batched = batched
            self.takeovers += 1
            self.unwritten = {}  # what lacks is told again soon, for the owner of this publication
            self.media_at = now
            self._shift = None
            self._own_ms = [0] * (TYPE_VIDEO + 1)
            self._kept_type = 0
            self._first_shift = None
            self._key_seen = False
            self._groups = PictureGroups()
            self._began_at = now
            if self._taker is not None:
                self._taker.took_over(self.name, publisher)
            if publisher is None:
                return
            self.published_at = now
            for wire in self._wires.values() if announce else ():
                if wire.viewers:
                    wire.begin(self._last_timestamp or 0, now)
            self._forget_headers()
            waiting = self._standby_headers.pop(publisher, None)
            for key, _, (type_id, payload) in waiting.items() if waiting is not None else ():
                timestamp = (self._last_timestamp or 0) if type_id in MEDIA_TYPES else 0
                info = inspect(type_id, payload)
                self._note_tracks(info, payload, now)
                self._show(info, MessageClass.HEADER, type_id, timestamp, timestamp, payload, now)
                for wire in self._wires.values():
                    wire.append(type_id, timestamp, payload, MessageClass.HEADER, now, header_key=key)

    def publish(
        self,
        publisher: StreamMember,
        type_id: int,
        timestamp: int,
        payload: bytes,
        now: float,
        info: MediaInfo | None = None,
    ) -> bool:
        """Pass one message on to the viewers; return False when `publisher` is not the one whose messages count."""
        info = info or inspect(type_id, payload)
        with self._lock:
            if self.publisher is not publisher:
                self._keep_for_standby(publisher, type_id, payload, info)
                return False
            message_class, leading, ahead = self._groups.place(info, timestamp, payload, now)
            if type_id in MEDIA_TYPES:
                self.media_at = now
                own_ms, self._own_ms[type_id] = self._own_ms[type_id], timestamp
                if _BACK_MS < timestamp - own_ms & CLOCK_MASK < _LEAST_BACK_STEP:
                    self._look_for_jump(type_id, own_ms, timestamp, message_class, now)
            published_ms = timestamp
            shift, last = self._shift, self._last_timestamp
            if shift is None or last is None:
                timestamp = self._rebase(timestamp, message_class, now)
            else:  # as `_rebase` does, without the call
                timestamp = timestamp + (self._kept_shift if type_id == self._kept_type else shift) & CLOCK_MASK
                clocked = message_class is not _HEADER
                self._last_at = now if clocked else self._last_at
                self._last_timestamp = timestamp if clocked and timestamp - last & CLOCK_MASK < CLOCK_HALF else last
            self.messages_in[message_class] += 1
            self.bytes_in += len(payload)
            header_key = None
            if message_class is _HEADER or info.kind not in self._sent:
                self._note_tracks(info, payload, now)
            if message_class is _HEADER:
                header_key = info.sticky_key
            elif message_class is _KEY:
                self._key_seen = True
            elif not self._key_seen and self._is_before_key(message_class, now):
                self.before_key_count += 1  # nobody could decode it
                return True
            if self._tap is not None or self._taker is not None or self.feed is not None or info.multitrack:
                self._show(info, message_class, type_id, timestamp, published_ms, payload, now)
            if len(self._wires) > 1:
                self._drop_unused(key=message_class is _KEY)
            over: LimitExceededError | None = None
            for wire in self._wires.values():
                try:
                    wire.append(
                        type_id,
                        timestamp,
                        payload,
                        message_class,
                        now,
                        header_key=header_key,
                        leading=leading,
                        ahead=ahead,
                    )
                except LimitExceededError as error:
                    over = error
            if over is not None:
                raise over
            return True

    def _is_before_key(self, message_class: MessageClass, now: float) -> bool:
        """Return whether a message is a picture that comes while the first key frame is still waited for."""
        self._lock.assert_owned()
        if message_class not in FRAMES:
            return False
        self._key_seen = now - self._began_at >= LONGEST_KEY_INTERVAL_S
        return not self._key_seen

    def _keep_for_standby(self, publisher: StreamMember, type_id: int, payload: bytes, info: MediaInfo) -> None:
        self._lock.assert_owned()
        waiting = self._standby_headers.get(publisher)
        if waiting is not None and info.message_class is _HEADER:
            waiting.keep(info.sticky_key, len(payload), (type_id, payload))

    def _show(
        self,
        info: MediaInfo,
        message_class: MessageClass,
        type_id: int,
        timestamp: int,
        published_ms: int,
        payload: bytes,
        now: float,
    ) -> None:
        """Hand a message that is passed on to those who take all of them."""
        self._lock.assert_owned()
        if self._tap is not None:
            self._tap(self.name, message_class, type_id, timestamp, payload)
        if self._taker is not None:
            self._taker.message(self.name, message_class, type_id, published_ms, payload)
        if self.feed is None and info.multitrack and info.kind == "video" and self._on_tracks is not None:
            self._feed_locked(self._on_tracks(self), now)
            self._part_tracks()
        if self.feed is not None:
            if self.feed.as_published:
                timestamp = published_ms
            elif self.feed.sees_jumps and self._first_shift is not None:
                timestamp = published_ms + self._first_shift & CLOCK_MASK
            self.feed.accept(type_id, timestamp, payload, info, now)

    def _part_tracks(self) -> None:
        """Let go on with all tracks only those who take them; others follow the set from now on, if there is one."""
        self._lock.assert_owned()
        if self.feed is None:
            return
        self._tracks_locked(RtmpChunks(_USUAL_MSID, self.config.rtmp.out_chunk_size))
        for wire in self._wires.values():
            if not wire.all_tracks:
                wire.frozen = True
                wire.log.drop_cache()

    @property
    def rendition_key(self) -> str:
        """Name of this rendition that no other one has, before it or after."""
        return f"{self.rendition}:{self.created_at:.6f}"

    def find_rendition(self, key: str) -> Stream | None:
        return next((item for item in self.renditions if item.rendition_key == key), None)

    def set_feed(self, feed: StreamFeed | None, now: float) -> None:
        """Let a set have what is passed on from now on, and the headers that were. Any thread."""
        with self._lock:
            self._feed_locked(feed, now)

    def _feed_locked(self, feed: StreamFeed | None, now: float) -> None:
        self._lock.assert_owned()
        self.feed = feed
        if feed is None or _USUAL_MSID not in self._wires:
            return
        wire = self._wires[_USUAL_MSID]
        for _, _, header in wire.headers.items():
            type_id, timestamp, payload = wire.wire_format.deserialise(header)
            feed.accept(type_id, timestamp, payload, inspect(type_id, payload), now)

    def _rebase(self, timestamp: int, message_class: MessageClass, now: float) -> int:
        """Return `timestamp` on the stream's own timeline.

        The first frame of a publisher that follows another one goes on where that one stopped, by wall-clock time;
        what comes before its first frame stands there too.
        """
        self._lock.assert_owned()
        shift, last = self._shift, self._last_timestamp
        if last is None:
            shift = self._shift = 0
        elif shift is None:
            resumed = self._resumed(last, now)
            if message_class not in CLOCKED:
                return resumed  # without moving the end of the timeline, so that the first frame is not behind it
            shift = self._shift = (resumed - timestamp) & CLOCK_MASK
        self._first_shift = shift
        rebased = (timestamp + (shift or 0)) & CLOCK_MASK
        if message_class is not _HEADER:
            # Audio may lag video by a little, so the latest one counts.
            if last is None or signed_difference(rebased, last) >= 0:
                self._last_timestamp = rebased
            self._last_at = now
        return rebased

    def _resumed(self, last: int, now: float) -> int:
        """Return where the timeline goes on that has stopped at `last`: by as much as has gone by."""
        self._lock.assert_owned()
        return (last + min(max(int((now - self._last_at) * 1000), 1), _LONGEST_GAP_MS)) & CLOCK_MASK

    def _look_for_jump(
        self, type_id: int, own_ms: int, timestamp: int, message_class: MessageClass, now: float
    ) -> None:
        """Have a track go on by wall-clock time, as after another publisher, where its clock has jumped.

        Or as the other track does, if it comes where that is: one of them jumps first. A track that goes on after a
        pause, or begins, has not jumped. The renditions of a set have the time of that, by which they are the same
        pictures.
        """
        self._lock.assert_owned()
        if message_class not in CLOCKED:
            self._own_ms[type_id] = own_ms
            return
        common, last = self._shift, self._last_timestamp
        if common is None or last is None or _KINDS[type_id] not in self._sent or self.rendition:
            return
        resumed, other_type = self._resumed(last, now), TYPE_AUDIO + TYPE_VIDEO - type_id
        own, other = (self._kept_shift if kind == self._kept_type else common for kind in (type_id, other_type))
        known = own, other, self._kept_shift
        ahead_ms = {shift: signed_difference(timestamp + shift & CLOCK_MASK, resumed) for shift in known}
        goes_on = signed_difference(last, resumed) - _BACK_MS <= ahead_ms[own] <= _AHEAD_MS
        fitting = [shift for shift in known if (goes_on if shift == own else abs(ahead_ms[shift]) <= _BACK_MS)]
        shift = min(fitting, key=lambda item: abs(ahead_ms[item]), default=resumed - timestamp & CLOCK_MASK)
        if shift == own:
            return
        self._shift = shift
        apart = shift != other and _KINDS[other_type] in self._sent
        self._kept_type, self._kept_shift = other_type if apart else 0, other
        if now - self._jump_told_at >= _JUMP_LINE_S:
            self._jump_told_at = now
            _log.info("clock of a publisher jumped", stream=self.name, by_s=round(ahead_ms[own] / 1000, 1))

    def begin_clock(self, timestamp: int, now: float) -> int:
        """Return what is added to timestamps of the present publisher, settled as by a first frame. Any thread."""
        with self._lock:
            return (self._rebase(timestamp, MessageClass.KEY, now) - timestamp) & CLOCK_MASK

    def _note_tracks(self, info: MediaInfo, payload: bytes, now: float) -> None:
        self._lock.assert_owned()
        if info.packet == "metadata" and info.kind == "data":
            self._named = named_tracks(payload)
        elif info.codec:
            if 0 in info.tracks or info.kind not in self.codecs:  # some have no header
                self.codecs[info.kind] = info.codec
            if info.message_class in CLOCKED:
                self._sent.setdefault(info.kind, now)

    def tracks(self, now: float) -> tuple[set[str], float | None]:
        """Return which of "audio" and "video" the publisher sends, or has told of and may still send, and since when.

        None: it has sent none yet. Any thread.
        """
        sent = dict(self._sent)
        began = min(sent.values(), default=None)
        told = self._named.union(self.codecs) if began is None or now - began < BELIEVED_S else ()
        return {"audio", "video"}.intersection(sent.keys() | told), began

    def _forget_headers(self) -> None:
        self._lock.assert_owned()
        for wire in self._wires.values():
            wire.forget_headers()
        self._named = frozenset()
        self.codecs.clear()
        self._sent.clear()

    def end(self, now: float) -> None:
        """Tell the viewers, through the logs, that the stream has ended, and empty the caches."""
        with self._lock:
            for key, wire in list(self._wires.items()):
                wire.end(self._last_timestamp or 0, now)
                wire.frozen = False
                if wire.wire_format.ends:
                    del self._wires[key]
            self.feed = None
            self._drop_unused(key=True)
            self._forget_headers()
        for rendition in self.renditions:
            rendition.ended = True
            rendition.end(now)

    # -- viewing

    def join(self, msid: int) -> WireLog:
        """Return the log for a player on message stream `msid`, made when first asked for. Any thread; then `leave`.

        A player may choose any number, and each log costs as much to fill as all viewers of one: their number is
        limited, but for the lowest ones; and one that nobody has any more goes, with the next key frame: a player that
        comes and goes as fast as it can has the GOP cache rewritten once.
        """
        with self._lock:
            if msid not in self._wires and msid > GIVEN_WIRES:
                others = sum(isinstance(other, int) and other > GIVEN_WIRES for other in self._wires)
                most = MOST_WIRES - GIVEN_WIRES
                if others >= most:
                    raise LimitExceededError("player_stream_ids", others + 1, most)
            wire = self._wire_locked(msid)
            wire.viewers += 1
            return wire

    def join_format(self, wire_format: WireFormat) -> WireLog:
        """Return the log in a format other than RTMP's, made when first asked for. Any thread; then `leave`."""
        with self._lock:
            wire = self._wires.get(wire_format.name) or self._made_locked(wire_format.name, wire_format)
            wire.viewers += 1
            return wire

    def rejoin(self, wire: WireLog) -> WireLog:
        """Return the log that is filled now in the format of `wire`, which is given up if it is another one."""
        found = self.join_format(wire.wire_format)
        self.leave(wire)
        return found

    def rejoin_tracks(self, wire: WireLog) -> WireLog:
        """Return the log of all tracks in the format of `wire`, which is given up. Any thread; then `leave`."""
        with self._lock:
            found = self._tracks_locked(wire.wire_format)
            found.viewers += 1
        self.leave(wire)
        return found

    def _tracks_locked(self, wire_format: WireFormat) -> WireLog:
        self._lock.assert_owned()
        key = _TRACKS + wire_format.name
        return self._wires.get(key) or self._made_locked(key, wire_format)

    def join_link(self) -> WireLog:
        """Return the log for servers that follow this one, on message stream id 1. Any thread; then `leave`.

        It is one of their own, whose fan-out writes each message at once where there are few viewers here, and as often
        as that of the viewers where there are many: there are about as many elsewhere, whose turn comes right then.
        """
        with self._lock:
            wire = self._wire_locked(_LINK_MSID)
            wire.viewers += 1
            return wire

    def leave(self, wire: WireLog) -> None:
        """Give up what `join`, `join_format` or `join_link` returned. Any thread."""
        with self._lock:
            wire.viewers -= 1
            self._drop_unused(key=False)

    def _drop_unused(self, *, key: bool) -> None:
        """Drop the logs without viewers; one with a GOP cache, which was costly to make, only at a key frame."""
        self._lock.assert_owned()
        for msid, wire in list(self._wires.items()):
            usual = msid == _USUAL_MSID or (msid == _USUAL_TRACKS and self.feed is not None)
            if not (wire.viewers or usual) and (key or wire.log.cached is None):
                del self._wires[msid]

    def drop_caches(self) -> None:
        with self._lock:
            for wire in self._wires.values():
                wire.log.drop_cache()
            self._drop_unused(key=True)
        for rendition in self.renditions:
            rendition.drop_caches()

    def _wire_locked(self, msid: int) -> WireLog:
        self._lock.assert_owned()
        wire = self._wires.get(msid)
        if wire is None:
            usual = _USUAL_MSID if msid == _LINK_MSID else msid
            wire = self._made_locked(msid, RtmpChunks(usual, self.config.rtmp.out_chunk_size))
        return wire

    def _made_locked(self, key: int | str, wire_format: WireFormat) -> WireLog:
        self._lock.assert_owned()
        links = key == _LINK_MSID
        wire = self._wires[key] = WireLog(
            self.name,
            wire_format,
            rendition=self.rendition,
            all_tracks=isinstance(key, str) and key.startswith(_TRACKS),
            cache=self.config.cache,
            flush_interval_s=0.0 if links else self.config.flush_interval_s,
            flush_adaptive=self.config.flush_adaptive,
            viewers_log=self._wire_locked(_USUAL_MSID) if links else None,
        )
        usual = self._wires.get(_USUAL_TRACKS if wire.all_tracks else _USUAL_MSID) or self._wires.get(_USUAL_MSID)
        wire.log.batched = self._batched
        if usual is not None and usual is not wire:
            wire.seed(usual)
        if links:  # first, so that they need not wait for a round of the viewers
            self._wires = {_LINK_MSID: self._wires.pop(_LINK_MSID), **self._wires}
        return wire

    def start_place(self, wire: WireLog) -> StartPlace:
        """Return where a viewer starts now: (entry, messages before it, whether it has to wait for a key frame).

        That is the key frame of the GOP cache; without one, the next key frame of a stream that has video; else, for
        sound alone and for a stream that nobody publishes, whatever comes next. Any thread: whatever is published
        after this call stands in the log at the entry or behind it, so that a viewer misses nothing in between.
        """
        with self._lock:
            cached = wire.log.cached
            if wire.for_links and self.publisher is not None and not self._key_seen:
                # What is cached is of the publisher before, and the other server has it already, from wherever it was.
                return wire.log.tail, wire.headers.values, False
            if cached is not None:
                return cached, cached.gop.restart, False
            # A frame that was passed on is what shows video: H.263 and VP6 have no header that could, and the log of
            # another message stream id begins empty.
            if self._key_seen:
                return wire.log.tail, (), True
            return wire.log.tail, wire.headers.values, False

    @property
    def wires(self) -> list[WireLog]:
        """All its logs, those of its renditions included. Any thread."""
        with self._lock:
            own = list(self._wires.values())
        return [*own, *(wire for rendition in self.renditions for wire in rendition.wires)]

    @property
    def standby_bytes(self) -> int:
        with self._lock:
            return sum(headers.size_bytes for headers in self._standby_headers.values())

    @property
    def media(self) -> str:
        # One look-up each: the publisher's thread may take an entry away between two.
        names = [f"{kind} {codec}" for kind in ("video", "audio") if (codec := self.codecs.get(kind))]
        return ", ".join(names) or "nothing yet"

    @property
    def messages_by_type(self) -> tuple[int, int]:
        counts = self.messages_in
        video = counts[MessageClass.KEY] + counts[MessageClass.INTER] + counts[MessageClass.DISPOSABLE]
        return video, counts[MessageClass.AUDIO]
