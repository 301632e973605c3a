"""What the caller of a server session may answer and announce; each method queues messages for `data_to_send`.

Every method raises `LocalProtocolError` when the present state does not allow it (the tables of `server_states`), for
example an accept of a stream that the client has closed meanwhile; nothing has been sent or changed then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flowctl.rtmp import commands
from flowctl.rtmp.amf import amf0
from flowctl.rtmp.messages import (
    EVENT_STREAM_BEGIN,
    EVENT_STREAM_DRY,
    EVENT_STREAM_EOF,
    PeerBandwidth,
    encode_control,
)
from flowctl.rtmp.server.core import PLAYER_STATES, MessageStream, ServerCore, words
from flowctl.rtmp.server.states import ConnectionInput, StreamInput, StreamState
from flowctl.rtmp.wire import TYPE_DATA_AMF0, Message


@lru_cache(64)
def _connect_result(transaction_id: float, fms_version: str, object_encoding: int, caps_ex: int | None) -> Message:
    """Return the answer to a connect, encoded once for all clients of a kind.

    Args:
        transaction_id: of the connect.
        fms_version: what we say we are.
        object_encoding: 0 or 3, as the client asked.
        caps_ex: our capabilities, for a client that knows Enhanced RTMP. None: it has not said so.
    """
    server = {"fmsVer": fms_version, "capabilities": 31.0, "mode": 1.0}
    more: dict[str, Any] = {"objectEncoding": float(object_encoding)}
    if caps_ex is not None:
        # Only to clients that told theirs: the others cannot read it, and it doubles the length of the result.
        forwards = {"*": float(commands.CAN_FORWARD)}
        more |= {
            "fourCcList": ["*"],
            "videoFourCcInfoMap": forwards,
            "audioFourCcInfoMap": forwards,
            "capsEx": float(caps_ex),
        }
    information = commands.status("status", commands.CONNECT_SUCCESS, "Connection succeeded.", **more)
    return commands.command("_result", transaction_id, server, information)


class ServerReplies(ServerCore):
    """Our caller's answers; not for use on its own."""

    __slots__ = ()

    # --------------------------------------------------------------------------------------------- connect

    def accept_connect(self) -> None:
        """Let the client in: window, bandwidth, chunk size, then ``NetConnection.Connect.Success``.

        The order is that of SRS and gortmplib; the chunk size stands before the result because OBS breaks on a result
        in chunks of 128 octets.
        """
        self._move_connection(ConnectionInput.ACCEPT)
        config = self._config
        self._control.announce_window(config.window_ack_size_bytes)
        self._send(encode_control(PeerBandwidth(config.window_ack_size_bytes)))
        self._send_chunk_size()
        caps_ex = config.caps_ex if self._enhanced else None
        self._send(_connect_result(self._connect_id, config.fms_version, self._object_encoding, caps_ex))

    def reject_connect(self, description: str, code: str = commands.CONNECT_REJECTED) -> None:
        """Turn the client away; close the connection once the reply has been flushed.

        Args:
            description: words for the user, for example why.
            code: status code.
        """
        self._move_connection(ConnectionInput.REJECT)
        self._send_rejection(words(description), code)

    def request_reconnect(
        self, tc_url: str | None = None, description: str = "The server is going down.", *, force: bool = False
    ) -> bool:
        """Ask the client to connect again at its next key frame (Enhanced RTMP v2, "Reconnect Request").

        Args:
            tc_url: where to. None: the same address.
            description: words for the user.
            force: True asks also a client that did not announce that it understands.

        Returns:
            Whether it was asked.
        """
        self._check_open()
        if not force and not self.client_caps_ex & commands.CAPS_RECONNECT:
            return False
        more = {} if tc_url is None else {"tcUrl": tc_url}
        self._send(commands.on_status(0, "status", commands.RECONNECT_REQUEST, words(description), **more))
        return True

    # --------------------------------------------------------------------------------------------- publish

    def accept_publish(self, stream_id: int) -> None:
        """Let the client publish: Stream Begin and ``NetStream.Publish.Start``. Its media becomes events from now on.

        Args:
            stream_id: of the `PublishRequested`.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.ACCEPT_PUBLISH)
        self._user_control(EVENT_STREAM_BEGIN, stream)
        self._status(stream, commands.PUBLISH_START, "Started publishing stream.")

    def reject_publish(
        self, stream_id: int, code: str = commands.PUBLISH_BAD_NAME, description: str = "The stream is taken."
    ) -> None:
        """Refuse a publish, or take the stream away from a client that is publishing.

        Args:
            stream_id: of the `PublishRequested`.
            code: status code, for example ``NetStream.Publish.BadName`` or ``NetStream.Publish.Unauthorized``.
            description: words for the user.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.REJECT_PUBLISH)
        self._drop_held(stream_id)
        self._status(stream, code, description, "error")

    # ------------------------------------------------------------------------------------------------ play

    def accept_play(self, stream_id: int) -> None:
        """Let the client play: Stream Begin, ``NetStream.Play.Reset`` (if asked for) and ``NetStream.Play.Start``.

        There is no ``NetStream.Data.Start``: FFmpeg shows an extra data stream for it. A player that waits gets
        ``NetStream.Play.PublishNotify`` instead, having got the others when it began to wait.

        Args:
            stream_id: of the `PlayRequested`.
        """
        stream = self._find_stream(stream_id)
        if stream.state is StreamState.WAITING:
            self.publish_notify(stream_id)
            return
        self._move_stream(stream, StreamInput.ACCEPT_PLAY)
        self._start_play(stream)

    def play_waiting(self, stream_id: int) -> None:
        """Let the client wait for a publisher; it is told that playing has started, as nginx-rtmp and SRS do it.

        Args:
            stream_id: of the `PlayRequested`.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.WAIT_PLAY)
        self._start_play(stream)

    def reject_play(
        self, stream_id: int, code: str = commands.PLAY_NOT_FOUND, description: str = "There is no such stream."
    ) -> None:
        """Refuse a play, or end one that waits or plays.

        Args:
            stream_id: of the `PlayRequested`.
            code: status code, for example ``NetStream.Play.StreamNotFound`` or ``NetStream.Play.Failed``.
            description: words for the user.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.REJECT_PLAY)
        self._status(stream, code, description, "error")

    def publish_notify(self, stream_id: int, *, send: bool = True) -> None:
        """Tell a player that the stream is published (again): Stream Begin and ``NetStream.Play.PublishNotify``.

        Args:
            stream_id: message stream id.
            send: False changes the state only: the player gets `commands.start_of_stream_bytes` from a shared log.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.PUBLISH_NOTIFY)
        if send:
            self._tell_published(stream)

    def unpublish_notify(self, stream_id: int, *, send: bool = True) -> None:
        """Tell a player that the publisher left: Stream EOF and ``NetStream.Play.UnpublishNotify``; it waits then.

        Args:
            stream_id: message stream id.
            send: False changes the state only: the player gets `commands.end_of_stream_bytes` from a shared log.
        """
        stream = self._find_stream(stream_id)
        self._move_stream(stream, StreamInput.UNPUBLISH_NOTIFY)
        if send:
            self._tell_unpublished(stream)

    def repeat_notify(self, stream_id: int) -> None:
        """Tell a player again whether the stream is published: what a shared log had for it was lost."""
        stream = self._find_stream(stream_id)
        if stream.state is StreamState.WAITING:
            self._tell_unpublished(stream)
        else:
            self._tell_published(stream)

    def _tell_published(self, stream: MessageStream) -> None:
        self._user_control(EVENT_STREAM_BEGIN, stream)
        self._status(stream, commands.PLAY_PUBLISH_NOTIFY, "Stream is now published.")

    def _tell_unpublished(self, stream: MessageStream) -> None:
        self._user_control(EVENT_STREAM_EOF, stream)
        self._status(stream, commands.PLAY_UNPUBLISH_NOTIFY, "Stream is now unpublished.")

    # ------------------------------------------------------------------------------------------ any stream

    def stream_eof(self, stream_id: int) -> None:
        """Send Stream EOF: no more data until further notice (section 7.1.7)."""
        self._user_control(EVENT_STREAM_EOF, self._find_stream(stream_id))

    def stream_dry(self, stream_id: int) -> None:
        """Send Stream Dry: the publisher has gone quiet (section 7.1.7)."""
        self._user_control(EVENT_STREAM_DRY, self._find_stream(stream_id))

    def limit_status(self, stream_id: int, limit: str, value: float, maximum: float) -> None:
        """Tell the client which limit it went over; the state does not change, so close or reject afterwards.

        Args:
            stream_id: message stream id.
            limit: name of the setting.
            value: what was reached.
            maximum: what is allowed.
        """
        stream = self._find_stream(stream_id)
        code = commands.PLAY_FAILED if stream.state in PLAYER_STATES else commands.STREAM_FAILED
        self._status(stream, code, commands.limit_description(limit, value, maximum), "error")

    def send_data(self, stream_id: int, *values: Any) -> None:
        """Send a data message (AMF0) to a client that publishes and has asked for it.

        Args:
            stream_id: message stream id.
            values: its name and what follows, see `flowctl.rtmp.amf.amf0`.
        """
        stream = self._find_stream(stream_id)
        self._send(Message(commands.STREAM_CSID, 0, TYPE_DATA_AMF0, stream.stream_id, amf0.encode(*values)))

    def send_ping(self, now: float) -> None:
        """Send a ping request; the answer becomes a `Pong` with the round trip time."""
        self._check_open()
        self._control.ping(now)

    def _start_play(self, stream: MessageStream) -> None:
        self._user_control(EVENT_STREAM_BEGIN, stream)
        if stream.reset:
            self._status(stream, commands.PLAY_RESET, "Playing and resetting stream.")
        self._status(stream, commands.PLAY_START, "Started playing stream.")
        if self._config.sample_access:
            self._send(commands.sample_access(stream.stream_id))
