"""One viewer of a load run: plays a stream in the manner of its profile, and measures or discards what comes.

Theory of operation. Until the first frame of media the session is spoken through `ClientSession`; everything
after the handshake is skimmed beside it. From then on a *parsed* viewer only skims, and answers what a client has to
answer (acknowledgements, pings); one that is *not parsed* has the kernel throw away what arrived, uncopied
(MSG_TRUNC), counts bytes, and acknowledges by them. Pings it cannot see. Over TLS everything is decrypted.

Reading follows the pace of the profile: while the pace allows nothing, the socket is only watched for its end.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Final

from flowctl.load.peers.http import HTTP_SCHEMES, WEBSOCKET_SCHEMES, FlvSkimmer, HttpSpeech
from flowctl.load.peers.link import HANDSHAKE_BYTES, SCRATCH, PeerLink
from flowctl.load.peers.paces import UNLIMITED, ReadPace
from flowctl.load.peers.reactor import HANGUP, READ
from flowctl.load.peers.skim import FrameBook, Skimmer
from flowctl.load.peers.slow import Manner, drop_everything, prepare_socket
from flowctl.load.results.result import PeerEnd, PeerResult
from flowctl.wire.client.base import Status
from flowctl.wire.client.measure import OTHER, STALL_S, ViewerMeasure
from flowctl.wire.client.throttle import SLOW_SEGMENT_BYTES, RatePace
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_PING_RESPONSE,
    EVENT_STREAM_EOF,
    Acknowledgement,
    Command,
    UserControl,
    WindowAckSize,
    decode_message,
    encode_control,
    split_aggregate,
)
from flowctl.wire.rtmp.wire import CONTROL_CSID, TYPE_AGGREGATE, Message

_READ_MOST: Final = 128 * 1024
_ACK_BYTES: Final = 250_000
"""Most octets that a viewer receives between two acknowledgements, whatever window the server announces: a tenth of
what SRS and gortmplib announce, so that a server that waits for acknowledgements never waits for ours."""

_ACK_ONLY_S: Final = 0.5
_LOOK_S: Final = 0.25
"""Time that a viewer that did not read looks, before it leaves, whether the server has closed long ago."""


@dataclass(slots=True, kw_only=True, eq=False)
class LoadViewer(PeerLink):
    """One connection that plays."""

    manner: Manner
    measure: ViewerMeasure  # what it has counted so far
    book: FrameBook
    parsed: bool
    asked: bool = False  # whether play was asked for
    playing: bool = False  # whether a frame has come
    _over_http: bool = False
    _pace: ReadPace | None = None  # set with the first frame
    _skimmer: Skimmer | FlvSkimmer | None = None
    _unread_acknowledged: int = 0  # octets acknowledged without being read
    _ack_due: int = _ACK_BYTES
    _armed_at: float = 0.0  # since when it has been waiting for something to come
    _reading: bool = True
    _farewell: bytes = b""
    _vanished: bool = False  # vanished
    _concluded: bool = False  # what it measures is complete
    _line_from: int = 0  # octets read when its pace began
    _looking: bool = False  # did not read, and looks at last whether the server is still there

    def __post_init__(self) -> None:
        self._over_http = self.url.scheme in HTTP_SCHEMES
        self.result.parsed = self.parsed

    @property
    def _received(self) -> int:
        """Octets read after the handshake; these are acknowledged."""
        return self.result.wire_bytes - HANDSHAKE_BYTES

    def tuned(self, sock: socket.socket) -> None:
        prepare_socket(sock, self.manner)

    def input(self, now: float) -> None:
        if self._looking:
            self._drain(now)
            return
        pace = self._pace
        if pace is not None:
            allowed = pace.allowance(now)
            if not allowed:
                self._stop_reading(pace, now)
                return
        else:
            # The pace begins in the middle of a read, and whatever comes behind the first frame is read too early.
            allowed = UNLIMITED if self.manner.pace is None else SLOW_SEGMENT_BYTES
        before = self.result.wire_bytes
        if self.session is not None:
            self._introduce(now, allowed)
        elif self.parsed:
            self._skim(now, allowed)
        else:
            self._discard(now, allowed)
        count = self.result.wire_bytes - before
        if count and not self.ended:
            self._note_arrival(now)
            pace = self._pace
            if pace is not None:
                pace.note_read(count, now)
                if not pace.allowance(now):
                    self._stop_reading(pace, now)

    # -- reading

    def _introduce(self, now: float, allowed: int) -> None:
        """Read through the session; hand over to the skimmer when media comes."""
        before = self.result.wire_bytes
        octets = self.read_session(now, min(allowed, _READ_MOST))
        if self.ended or not octets:
            return
        if self.session is not None and not self.asked and self.session.stream_id:
            self.asked = True
            self.measure.asked_us = time.time_ns() // 1000
            if self.manner.reads_never:
                self._go_deaf(now)
                return
        spoken = HANDSHAKE_BYTES
        if isinstance(self.session, HttpSpeech):
            head_bytes = self.session.head_bytes
            spoken = before + len(octets) if head_bytes is None else head_bytes
        start = max(spoken - before, 0)
        if start < len(octets):
            if self._skimmer is None:
                self._skimmer = self._new_skimmer()
            self._read_media(self._skimmer, octets[start:], now, speaking=True)
        if self.playing and not self.ended:
            self._hand_over()

    def _new_skimmer(self) -> Skimmer | FlvSkimmer:
        if self._over_http:
            return FlvSkimmer(self.book, websocket=self.url.scheme in WEBSOCKET_SCHEMES)
        return Skimmer(self.book, self.config.limits)

    def _hand_over(self) -> None:
        """Stop speaking through the session: from here on, skimming or discarding is all there is."""
        session = self.session
        if session is not None and session.stream_id:
            session.close_stream()
            self._farewell = session.data_to_send()
        self._ack_due = self._received + _ACK_BYTES
        self.session = None
        if not self.parsed:
            self._skimmer = None
            # The first few frames were looked at only to see that they come: figures of them would be of the beginning.
            self.measure = self.measure.fresh_copy()

    def _skim(self, now: float, allowed: int) -> None:
        skimmer = self._skimmer
        count = self.receive(min(allowed, _READ_MOST), now)
        if count and skimmer is not None:
            self._read_media(skimmer, SCRATCH[:count], now, speaking=False)

    def _discard(self, now: float, allowed: int) -> None:
        if self.sock is None:
            return
        count = self.sock.recv_into(SCRATCH, min(allowed, len(SCRATCH)), socket.MSG_TRUNC if self._tls is None else 0)
        if not count:
            self.closed_by_server(now)
        self.result.wire_bytes += count

    def _read_media(self, skimmer: Skimmer | FlvSkimmer, octets: memoryview, now: float, *, speaking: bool) -> None:
        """Count media; answer control, unless the session does."""
        media = skimmer.skim(octets)
        if skimmer.control:
            messages, skimmer.control = skimmer.control, []
            for message in messages:
                if message.type_id == TYPE_AGGREGATE:
                    parts = split_aggregate(message, self.config.limits)
                    media += ((part.timestamp, self.book.of(part.type_id, part.payload)) for part in parts)
                elif not speaking:
                    self._answer_control(message, now)
        if isinstance(skimmer, FlvSkimmer) and skimmer.replies:
            replies, skimmer.replies = skimmer.replies, b""
            self.send(replies, now)
        if media and not self.ended:
            self.measure.count_media(media, time.time_ns() // 1000)
            if not self.playing and any(frame.kind != OTHER for _, frame in media):
                self._first_frame(now)

    def _note_arrival(self, now: float) -> None:
        if self.playing:
            silent_s = now - self._armed_at
            if silent_s > STALL_S:
                self._note_stall(silent_s)
            if self.session is None and self._received >= self._ack_due:
                self._ack_due = self._received + _ACK_BYTES
                if self.config.acknowledge and not self._over_http:
                    self._send_message(encode_control(Acknowledgement.of(self._received)), now)
        self._armed_at = now

    def _note_stall(self, silent_s: float) -> None:
        self.result.stalls += 1
        self.result.longest_stall_s = max(self.result.longest_stall_s, silent_s)

    def _send_message(self, message: Message, now: float) -> None:
        # Type 0 headers only: they refer to nothing, so nothing has to be remembered of what was sent before.
        chunks = serialise(message.type_id, 0, 0, message.payload, CONTROL_CSID, self.config.out_chunk_size)
        self.send(chunks, now)

    def _answer_control(self, message: Message, now: float) -> None:
        value = decode_message(message, self.config.limits)
        if isinstance(value, UserControl):
            if value.event == EVENT_PING_REQUEST and self.config.answer_pings:
                self._send_message(encode_control(UserControl(EVENT_PING_RESPONSE, timestamp=value.timestamp)), now)
            elif value.event == EVENT_STREAM_EOF:
                self.note_status(Status("status", "stream_eof", ""))
        elif isinstance(value, WindowAckSize):
            pass  # we acknowledge more often than any window asks for
        elif isinstance(value, Command) and value.name == "onStatus":
            information = commands.first_properties([*value.arguments, value.object])
            self.note_status(
                Status(*(commands.text(information.get(name)) for name in ("level", "code", "description")))
            )

    # -- manners

    def _first_frame(self, now: float) -> None:
        """The first frame has come: from now on the profile shows its manners."""
        self.playing = True
        manner = self.manner
        self.result.first_frame_s = now - self.started
        self._armed_at = now
        if manner.pace is not None:
            self._pace = manner.pace(now)
            self._line_from = self.result.wire_bytes
        if manner.half_close:
            self.half_close()
            farewell = "" if self._tls is None else ", without the farewell of TLS"
            self.result.notes = f"sending half closed after the first frame{farewell}"
        if manner.vanish_after_s is not None:
            self.reactor.call_at(now + manner.vanish_after_s, self._vanish)
        if manner.stay_s is not None:
            self.reactor.call_at(now + manner.stay_s, self._stay_over)

    def _stop_reading(self, pace: ReadPace, now: float) -> None:
        """Stop reading until the pace allows more; the end of the connection is still seen."""
        self._reading = False
        self.watch(HANGUP)
        when = pace.wake_at(now)
        if when is not None:
            self.reactor.call_at(when, self._resume_reading)
        elif self.result.stopped_reading_s is None:
            self.result.stopped_reading_s = now - self.began

    def _resume_reading(self, now: float) -> None:
        pace = self._pace
        if self.ended or self._reading or self._vanished or pace is None:
            return
        if not pace.allowance(now):
            self._stop_reading(pace, now)
            return
        self._reading = True
        self._armed_at = now  # silence while it did not read is its own
        before = self.result.wire_bytes
        self.ready(READ, now)  # as a rule there is something: to ask epoll first would cost a turn of the loop
        if self._reading and not self.ended:
            if self.result.wire_bytes == before:
                pace.note_read(0, now)
            self.watch(READ)

    def _go_deaf(self, now: float) -> None:
        """Read nothing more; acknowledge all the same, if that is the profile."""
        self._reading = False
        self.result.stopped_reading_s = now - self.began
        self.watch(HANGUP)
        if self.manner.ack_rate and not self._over_http:
            self.reactor.call_at(now + _ACK_ONLY_S, self._acknowledge_unread)

    def _acknowledge_unread(self, now: float) -> None:
        """Acknowledge half a second of media that was not read."""
        if self.ended or self.leaving is not None or self._looking:
            return
        self._unread_acknowledged += int(self.manner.ack_rate / 8 * _ACK_ONLY_S)
        acknowledged = self._received + self._unread_acknowledged
        self._send_message(encode_control(Acknowledgement.of(acknowledged)), now)
        self.result.notes = f"acknowledged {acknowledged} bytes, read {self.result.wire_bytes}"
        self.reactor.call_at(now + _ACK_ONLY_S, self._acknowledge_unread)

    def _vanish(self, now: float) -> None:
        """Vanish: from here on the kernel drops packets that come in, and sends none."""
        if self.ended or self.sock is None:
            return
        self._vanished = True
        self._reading = False
        self.result.stopped_reading_s = now - self.began
        self.out.clear()
        self.watch(HANGUP)
        if drop_everything(self.sock):
            self.sees_end = False  # the filter drops FIN and reset as well
            at_s = now - self.began
            self.result.notes = f"vanished at {at_s:.3f} s: every packet is dropped, the end of the connection too"
        else:
            self.result.notes = f"stopped reading and answering at {now - self.began:.3f} s: no packet filter here"

    def _stay_over(self, now: float) -> None:
        if not self.ended:
            self.depart(PeerEnd.LEFT, "stayed as long as the profile says", now)

    # -- ending

    def depart(self, end: PeerEnd, details: str, now: float) -> None:
        """Leave in order.

        Who did not read may have been left by the server without hearing of it: with a full window its FIN waits
        behind what was not read. So such a viewer reads first, and says farewell only if the server has not closed.
        """
        self._conclude(now)
        if self._vanished:
            self.end(end, details, now)  # who is gone says no farewell
        elif self._reading or self.ended:
            self.leave(end, details, [self._farewell], now)
        else:
            self._looking = True
            self._reading = True
            self._armed_at = now
            if self.session is not None:
                self._hand_over()
            self.watch(READ)
            self.reactor.call_at(now + _LOOK_S, lambda later: self.leave(end, details, [self._farewell], later))

    def ending(self, now: float) -> None:
        if self.playing and self._reading and now - self._armed_at > STALL_S:
            self._note_stall(now - self._armed_at)
        self._conclude(now)
        write_row(self.result, self.measure)

    def _conclude(self, now: float) -> None:
        """End the measurement; from now on input is thrown away."""
        if self._concluded or not self.playing:
            return
        self._concluded = True
        result, pace = self.result, self._pace
        if result.stopped_reading_s is None:
            now_us = time.time_ns() // 1000
            self.measure.note_wait(now_us)
            self.measure.note_rendition(self.measure.rendition, now_us)
        if isinstance(pace, RatePace):
            result.line_bytes = round(pace.carried_bytes(now))
            result.line_used_bytes = result.wire_bytes - self._line_from


_SAME: Final = "video keys audio data missing_video missing_audio missed_at_end gaps broken_restarts freezes switches"
"""Fields of a row that have the same names in a measure."""


def write_row(result: PeerResult, measure: ViewerMeasure) -> None:
    for name in _SAME.split():
        setattr(result, name, getattr(measure, name))
    result.started_on_key = measure.started_on_key
    result.renditions_s = {name: round(us / 1e6, 3) for name, us in measure.rendition_us.items()}
    result.longest_freeze_s = measure.longest_freeze_us / 1e6 if measure.picture_us else None
    delays = measure.delays
    result.delays = delays.count
    result.delay_p50_ms = delays.percentile_ms(0.50)
    result.delay_p95_ms = delays.percentile_ms(0.95)
    result.delay_p99_ms = delays.percentile_ms(0.99)
    result.delay_max_ms = delays.max_us / 1000 if result.delays else None
