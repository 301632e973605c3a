"""What a player may ask: play and its relatives, pause, seek, and switching audio or video off.

Streams are live, so there is nothing to seek in, and a pause stops delivery without keeping anything: when the player
resumes it gets the stream as it is then. Who asks without playing is ignored, since players close and pause in any
order when their user leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from flowctl.rtmp import commands
from flowctl.rtmp.amf.values import UNDEFINED
from flowctl.rtmp.events import (
    PauseRequested,
    PlayRequested,
    ReceiveAudio,
    ReceiveVideo,
    SeekRefused,
    StreamClosed,
)
from flowctl.rtmp.messages import EVENT_STREAM_BEGIN, EVENT_STREAM_EOF
from flowctl.rtmp.server.calls import Call, ServerCalls
from flowctl.rtmp.server.core import PLAYING_STATES, MessageStream
from flowctl.rtmp.server.states import StreamInput


class PlayCommands(ServerCalls):
    """Commands of players; not for use on its own."""

    __slots__ = ()

    def _play(self, call: Call) -> None:
        """Play (section 7.2.2.1): name, start, duration, reset.

        The specification counts start and duration in seconds; librtmp and FFmpeg send milliseconds.
        """
        self._ask_to_play(
            call,
            call.argument(0),
            start_ms=commands.whole(call.argument(1), -2000),
            duration_ms=commands.whole(call.argument(2), -1),
            reset=commands.flag(call.argument(3), default=True),
        )

    def _play2(self, call: Call) -> None:
        """Switch to another rendition (section 7.2.2.2): for a live stream the same as play of another name."""
        values = commands.properties(call.argument(0))
        self._ask_to_play(
            call,
            values.get("streamName"),
            start_ms=commands.whole(values.get("start"), -2000),
            duration_ms=commands.whole(values.get("len"), -1),
            reset=values.get("transition") == "reset",
        )

    def _ask_to_play(self, call: Call, name: Any, *, start_ms: int, duration_ms: int, reset: bool) -> None:
        """Put the question to our caller; a stream that plays another name is closed first.

        One that plays this name goes on: closing it and joining again would be much work, for nothing that is seen.
        """
        stream = self._open_stream(call.stream_id)
        if name is False:
            # ActionScript's NetStream.play(false) stops, and Wirecast says it so.
            self._stop(call, stream, "play(false)")
            return
        url = self._named(call, stream, name, commands.PLAY_NOT_FOUND)
        if url is None:
            return
        before = stream.state
        if before in PLAYING_STATES and stream.path == url.path and not stream.paused:
            self._ignore(call, "play-again", "")
            self._status(stream, commands.PLAY_START, "Started playing stream.")
            return
        self._move_stream(stream, StreamInput.PLAY)
        if before in PLAYING_STATES:
            call.events.append(StreamClosed(stream.stream_id, call.command.name))
        stream.path = commands.shared(url.path)
        stream.reset = reset
        call.events.append(
            PlayRequested(
                stream_id=stream.stream_id,
                name=url.stream,
                query=url.query,
                start_ms=start_ms,
                duration_ms=None if duration_ms < 0 else duration_ms,
                reset=reset,
                url=url,
            )
        )

    def _playing(self, call: Call) -> MessageStream | None:
        """Return the stream that a player's command is for; None (and counted) when it plays nothing."""
        stream = self._stream(call.stream_id)
        if stream is not None:
            self._move_stream(stream, StreamInput.CONTROL)
            if stream.state in PLAYING_STATES:
                return stream
        self._ignore(call, "command-without-play", call.command.name)
        return None

    def _pause(self, call: Call) -> None:
        """Pause or resume (section 7.2.2.8), answered as SRS does: the status, and Stream EOF or Stream Begin."""
        stream = self._playing(call)
        if stream is None:
            return
        # Without a flag it toggles.
        stream.paused = commands.flag(call.argument(0), default=not stream.paused)
        event = PauseRequested(stream.stream_id, stream.paused, commands.whole(call.argument(1), 0))
        if stream.paused:
            self._status(stream, commands.PAUSE_NOTIFY, "Paused stream.")
            self._user_control(EVENT_STREAM_EOF, stream)
        else:
            self._status(stream, commands.UNPAUSE_NOTIFY, "Unpaused stream.")
            self._user_control(EVENT_STREAM_BEGIN, stream)
        call.events.append(event)

    def _seek(self, call: Call) -> None:
        """Refuse to seek (section 7.2.2.7); the player plays on."""
        stream = self._playing(call)
        if stream is not None:
            self._status(stream, commands.SEEK_FAILED, "A live stream cannot be searched.", "error")
            call.events.append(SeekRefused(stream.stream_id, commands.whole(call.argument(0), 0)))

    def _receive_audio(self, call: Call) -> None:
        """Switch audio on or off (section 7.2.2.4)."""
        stream = self._playing(call)
        if stream is not None:
            call.events.append(ReceiveAudio(stream.stream_id, self._wanted(call, stream)))

    def _receive_video(self, call: Call) -> None:
        """Switch video on or off (section 7.2.2.5)."""
        stream = self._playing(call)
        if stream is not None:
            call.events.append(ReceiveVideo(stream.stream_id, self._wanted(call, stream)))

    def _wanted(self, call: Call, stream: MessageStream) -> bool:
        """Return what a receiveAudio or receiveVideo says, and answer it."""
        wanted = commands.flag(call.argument(0), default=True)
        if wanted:
            # The specification answers true with these two, and false with nothing.
            self._status(stream, commands.SEEK_NOTIFY, "Resumed at the live position.")
            self._status(stream, commands.PLAY_START, "Started playing stream.")
        return wanted

    def _fc_subscribe(self, call: Call) -> None:
        """Answer the subscription that content networks asked for before play; librtmp sends it, nobody checks it."""
        self._result(call, None, UNDEFINED)
        self._notify("onFCSubscribe", commands.PLAY_START, "Started playing stream.")

    def _fc_unsubscribe(self, call: Call) -> None:
        """Answer the end of a subscription; what ends the stream is closeStream or deleteStream."""
        self._result(call, None, UNDEFINED)
        self._notify("onFCUnsubscribe", commands.PLAY_STOP, "Stopped playing stream.")

    play_handlers: ClassVar[Mapping[str, Callable[[Any, Call], None]]] = MappingProxyType(
        {
            "play": _play,
            "play2": _play2,
            "pause": _pause,
            "pauseRaw": _pause,
            "seek": _seek,
            "receiveAudio": _receive_audio,
            "receiveVideo": _receive_video,
            "FCSubscribe": _fc_subscribe,
            "FCUnsubscribe": _fc_unsubscribe,
        }
    )
    """The method of each command of a player; part of `ServerCommands.handlers`."""
