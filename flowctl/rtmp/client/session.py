"""The client's side of one RTMP connection as an event machine: to publish or to play one stream.

Theory of operation. `connect` starts the handshake; `publish` or `play` says what the connection is for, before or
after it is up. From then on the session goes ahead by itself: connect, releaseStream, FCPublish, createStream, publish
or play, each when the reply to the one before has come, and says how far it is by events. Media comes as `Message`
(player) or goes out through `send_audio`, `send_video` and `send_data` (publisher), which return octets::

    session = ClientSession(config, now=now)
    session.publish()
    session.connect("rtmp://host/live/room")
    ...  # session.data_to_send() to the socket, what it gives to session.receive(octets, now), until PublishStarted
    octets = session.send_video(timestamp, payload)

Say `play` before `connect`: a player's connect tells its decoders. For load tests the manners can be switched off: no
acknowledgements, no pongs (`ControlConfig`), and messages of any content (`send_message`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal

from flowctl.errors import InternalError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.rtmp.client import commands as client_commands
from flowctl.rtmp.client.replies import ClientReplies
from flowctl.rtmp.client.states import ClientInput, ClientState
from flowctl.rtmp.events import ClientEvent, HandshakeDone, PublishKind, ReconnectRequested
from flowctl.rtmp.messages import Acknowledgement, encode_control
from flowctl.rtmp.url import RtmpUrl, from_connect, parse_url
from flowctl.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO, Message

_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})

# Chunk streams of media: one each, so that audio can go between the chunks of a long video frame (section 5.3.1).
_AUDIO_CSID: Final = 4
_VIDEO_CSID: Final = 6
_DATA_CSID: Final = 7


class ClientSession(ClientReplies):
    """One RTMP connection, client side; not thread-safe, sans-I/O.

    Args:
        config: settings.
        now: seconds on any steady clock; when the connection was made.
        rng: source of the handshake's random octets, for tests. None: the system's.
    """

    __slots__ = ()

    # -------------------------------------------------------------------------------------------- intents

    def connect(self, url: RtmpUrl | str, *, parameters: str = "", app: str | None = None) -> None:
        """Start the handshake, and connect when it is done.

        Args:
            url: the address; its user and password are used when the server asks for Adobe authentication.
            parameters: `Rejected.retry_parameters` of the session before this one; "" for a first try.
            app: overrides the application of `url`, for servers that want a fixed one. None: that of `url`.

        Raises:
            LocalProtocolError: it was called before.
            RemoteProtocolError: code ``bad-url`` or ``bad-name``; `url` is no address.
        """
        self._url = parse_url(url) if isinstance(url, str) else url
        self._move(ClientInput.CONNECT)
        self._parameters = parameters
        self._app = app
        if self._handshake is not None:
            self._out += self._handshake.start()

    def publish(self, name: str | None = None, kind: PublishKind = "live") -> None:
        """Publish as soon as the server lets us.

        Args:
            name: stream name with its query. None: that of the address.
            kind: what the server is to do with the stream.

        Raises:
            LocalProtocolError: the session is for something already, or the server refused us.
        """
        self._kind = kind
        self._ask("publish", name)

    def play(self, name: str | None = None, *, start_ms: int = -2000) -> None:
        """Play as soon as the server lets us.

        Args:
            name: stream name with its query. None: that of the address.
            start_ms: where to start; -2000 is live or recorded, -1000 live only.

        Raises:
            LocalProtocolError: the session is for something already, or the server refused us.
        """
        self._start_ms = start_ms
        self._ask("play", name)

    def close_stream(self) -> None:
        """Stop publishing or playing; the connection stays and may be asked for another stream.

        Raises:
            LocalProtocolError: there is nothing to stop.
        """
        publishing = self._purpose == "publish"
        self._move(ClientInput.CLOSE)
        self._purpose = None
        if publishing and self._config.release_stream:
            self._call("FCUnpublish", None, self._stream_name())
        if self._stream_id:
            self._call("deleteStream", None, float(self._stream_id))
        self._stream_id = 0

    def reconnect_url(self, request: ReconnectRequested) -> RtmpUrl:
        """Return where a `ReconnectRequested` sends us: its address with our stream name, query and credentials.

        Args:
            request: the event; a relative ``tcUrl`` counts from the present one, as in RFC 3986 section 5.2.

        Raises:
            RemoteProtocolError: code ``bad-url`` or ``bad-name``; the server's address is none.
        """
        text = request.tc_url
        if text is None:
            return self._url
        scheme, _, rest = self._url.tc_url.partition("://")
        host, _, path = rest.partition("/")
        if text.startswith("//"):
            text = f"{scheme}:{text}"
        elif text.startswith("/"):
            text = f"{scheme}://{host}{text}"
        elif "://" not in text:
            text = f"{scheme}://{host}/{path.rpartition('/')[0]}/{text}"
        target = from_connect(text, None)
        if not target.host:
            raise RemoteProtocolError("the address to reconnect to has no host", code="bad-url")
        ours = self._url
        return dataclasses.replace(
            target,
            stream=ours.stream,
            raw_query=ours.raw_query,
            query=ours.query,
            user=ours.user,
            password=ours.password,
        )

    def _ask(self, purpose: Literal["publish", "play"], name: str | None) -> None:
        if self._purpose is not None or self._state in (ClientState.REJECTED, ClientState.CLOSED):
            raise LocalProtocolError(f"cannot {purpose}: the session is {self._state.value}, for {self._purpose}")
        self._purpose = purpose
        self._name = name
        self._create_stream()

    # ------------------------------------------------------------------------------------------ statistics

    @property
    def state(self) -> ClientState:
        """How far the session has come."""
        return self._state

    @property
    def stream_id(self) -> int:
        """Message stream id that the server gave us, 0 for none."""
        return self._stream_id

    @property
    def url(self) -> RtmpUrl:
        """The address of `connect`."""
        return self._url

    @property
    def counters(self) -> dict[str, int]:
        """How often what was ignored, by name; the session's own, so copy it to keep it."""
        return self._control.counters

    @property
    def last_acknowledged_bytes(self) -> int:
        """Octets that the server has acknowledged last, modulo 2^32."""
        return self._control.last_acknowledged_bytes

    @property
    def bytes_received(self) -> int:
        """Octets received after the handshake."""
        return self._reader.bytes_received

    # ----------------------------------------------------------------------------------------------- output

    def data_to_send(self) -> bytes:
        """Return and forget what waits to be sent: handshake octets, or whole messages."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def send_audio(self, timestamp: int, payload: bytes) -> bytes:
        """Return an audio message for the socket; `timestamp` in ms. Raises `LocalProtocolError` if not publishing."""
        return self._media(_AUDIO_CSID, timestamp, TYPE_AUDIO, payload)

    def send_video(self, timestamp: int, payload: bytes) -> bytes:
        """Return a video message for the socket; `timestamp` in ms. Raises `LocalProtocolError` if not publishing."""
        return self._media(_VIDEO_CSID, timestamp, TYPE_VIDEO, payload)

    def send_data(self, timestamp: int, payload: bytes) -> bytes:
        """Return an AMF0 data message for the socket; `payload` is encoded AMF0. Raises like `send_video`."""
        return self._media(_DATA_CSID, timestamp, TYPE_DATA_AMF0, payload)

    def send_metadata(self, values: dict[str, Any], timestamp: int = 0) -> bytes:
        """Return ``@setDataFrame onMetaData`` for the socket. Raises like `send_video`."""
        return self.send_data(timestamp, client_commands.metadata_payload(values))

    def send_message(self, message: Message) -> bytes:
        """Return any message for the socket, whatever the state; for tests and load tests.

        What waited to be sent stands before it, since a Set Chunk Size might be in there.
        """
        if self._handshake is not None:
            raise LocalProtocolError("the handshake is not done")
        octets = self._writer.write(message)
        return self.data_to_send() + octets if self._out else octets

    def send_acknowledgement(self, sequence_number: int) -> bytes:
        """Return an Acknowledgement of any value, for load tests; honest ones are sent by themselves."""
        return self.send_message(encode_control(Acknowledgement(sequence_number)))

    def send_ping(self, now: float) -> None:
        """Queue a ping request; the answer becomes a `Pong` with the round trip time."""
        self._control.ping(now)

    def _media(self, csid: int, timestamp: int, type_id: int, payload: bytes) -> bytes:
        if self._state is not ClientState.ACTIVE or self._purpose != "publish":
            raise LocalProtocolError(f"not publishing, the session is {self._state.value}")
        octets = self._writer.write(Message(csid, timestamp, type_id, self._stream_id, payload))
        return self.data_to_send() + octets if self._out else octets

    # --------------------------------------------------------------------------------------- octets and time

    def receive(self, data: bytes | memoryview, now: float) -> list[ClientEvent]:
        """Take octets from the server.

        Args:
            data: any number of octets; not kept.
            now: seconds on the clock of the constructor.

        Returns:
            What happened, in the order of the wire.

        Raises:
            RemoteProtocolError: the server broke the protocol; the session has ended.
            LimitExceededError: the server went over a limit; the session has ended.
            LocalProtocolError: the session had ended before, or `connect` was not called.
        """
        self._check_open()
        self._control.last_input = now
        events: list[ClientEvent] = []
        try:
            if self._handshake is not None:
                data = self._shake(data, events)
            append = events.append
            for message in self._reader.feed(data):
                if message.type_id in _MEDIA:
                    append(message)
                else:
                    self._handle(message, events, now)
            received = self._reader.bytes_received
            if received >= self._control.ack_due:
                self._control.acknowledge(received)
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        self._phase_start(now)
        return events

    def tick(self, now: float) -> list[ClientEvent]:
        """Look at the clock: limits of time and pings.

        Returns:
            Nothing at present; a list like that of the server's session.

        Raises:
            LimitExceededError: ``handshake_time_s``, ``reply_time_s`` or ``ping_silence_s``; the session has ended.
        """
        self._check_open()
        try:
            self._check_phase(now)
            if self._handshake is None:
                self._control.tick(now)
        except LimitExceededError as error:
            self._fail(error)
            raise
        return []

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` has something to do, in seconds, at the earliest `now`. None: never."""
        if self._state is ClientState.CLOSED:
            return None
        limit = self._phase_limit()
        times = [] if limit is None else [self._phase_start(now) + limit[1]]
        ping = self._control.next_deadline() if self._handshake is None else None
        if ping is not None:
            times.append(ping)
        return max(min(times), now) if times else None

    def _shake(self, data: bytes | memoryview, events: list[ClientEvent]) -> bytes:
        """Run the handshake; return what follows it, b"" while it lasts."""
        handshake = self._handshake
        if handshake is None:
            raise InternalError("the handshake is over")
        self._out += handshake.receive(data)
        if not handshake.done:
            return b""
        self._handshake = None
        self._move(ClientInput.HANDSHAKE_DONE)
        events.append(HandshakeDone(handshake.style or "simple"))
        self._send_connect()
        return handshake.leftover
