"""What a server says: each function returns one message, encoded once for all who are told the same."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

from flowctl.core.text.printable import printable
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf.values import UNDEFINED, AmfValue
from flowctl.wire.rtmp.messages import UserControl, encode_control
from flowctl.wire.rtmp.wire import Message

_FMS_VERSION: Final = "FMS/3,0,1,123"
"""What the server calls itself: clients look for FMS. The value of nginx-rtmp and many others."""
_DESCRIPTION_CHARS: Final = 1024
"""Most characters of a description for a client; FFmpeg and librtmp read 255 octets of it."""


def words(description: str) -> str:
    """Return what an application says to a client in a form that can be sent, and shown on a terminal."""
    return printable(description[:_DESCRIPTION_CHARS])


@lru_cache(256)
def status(stream_id: int, code: str, description: str, level: str = "status") -> Message:
    """Return an ``onStatus``, shared since every viewer gets the same two."""
    return commands.on_status(stream_id, level, code, description)


def stream_event(event: int, stream_id: int) -> Message:
    return encode_control(UserControl(event, stream_id=stream_id))


@lru_cache(64)
def connect_result(transaction_id: float, object_encoding: int, caps_ex: int | None) -> Message:
    server = {"fmsVer": _FMS_VERSION, "capabilities": 31.0, "mode": 1.0}
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


def connect_error(transaction_id: float, code: str, description: str) -> Message:
    return commands.command("_error", transaction_id, None, commands.status("error", code, description))


class Courtesy(NamedTuple):
    """The answer to a command that changes nothing here."""

    result: AmfValue
    notify: Message | None = None  # a call of Flash Media Server that goes with it. None: there is none.


def _notification(name: str, code: str, description: str) -> Message:
    """Return one of the onFC... calls of Flash Media Server, on the connection and not on a stream."""
    return commands.command(name, 0, None, commands.status("status", code, description))


NOT_KNOWN: Final = Courtesy(None)
"""Answer to a command that is not known."""

UNPUBLISH_NOTIFICATION: Final = _notification("onFCUnpublish", commands.UNPUBLISH_SUCCESS, "Stopped publishing stream.")

COURTESIES: Final[dict[str, Courtesy]] = {
    # An encoder wants the name freed of its own last session; whose it is, publish decides.
    "releaseStream": Courtesy(UNDEFINED),
    # Flash Media Live Encoder waits for the notification.
    "FCPublish": Courtesy(
        UNDEFINED, _notification("onFCPublish", commands.PUBLISH_START, "Started publishing stream.")
    ),
    # Content networks asked for a subscription before play; librtmp sends it, nobody checks it.
    "FCSubscribe": Courtesy(UNDEFINED, _notification("onFCSubscribe", commands.PLAY_START, "Started playing stream.")),
    # What ends the stream is closeStream or deleteStream.
    "FCUnsubscribe": Courtesy(
        UNDEFINED, _notification("onFCUnsubscribe", commands.PLAY_STOP, "Stopped playing stream.")
    ),
    # 0 s long means live; FFmpeg asks before it plays.
    "getStreamLength": Courtesy(0.0),
    "_checkbw": Courtesy(None),
    "checkBandwidth": Courtesy(None),
}
"""The commands that only want an answer, by name."""
