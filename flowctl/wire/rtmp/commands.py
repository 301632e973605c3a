"""The words of RTMP commands: replies and status messages as peers expect them, and how to read what peers send.

Replies follow what Flash Media Server said and SRS, nginx-rtmp and gortmplib repeat; clients compare codes, and
Wirecast the order of the members of a status object too: ``level`` before ``code`` (nginx-rtmp, 2012).
``onStatus`` has transaction id 0, since it answers nothing by number.

Reading is forgiving, because each argument here has been seen missing, null, or of a wrong type: the readers return a
neutral value, and the session decides what that means.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any, Final

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import simplify
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import EVENT_STREAM_BEGIN, EVENT_STREAM_EOF, UserControl, amf0_body, encode_control
from flowctl.wire.rtmp.wire import (
    TYPE_COMMAND_AMF0,
    TYPE_DATA_AMF0,
    Message,
)

COMMAND_CSID: Final = 3
"""Chunk stream of commands on the connection (msid 0), as in librtmp, SRS and nginx-rtmp."""

STREAM_CSID: Final = 5
"""Chunk stream of status messages and data of a message stream, as in SRS and nginx-rtmp."""

CONNECT_SUCCESS: Final = "NetConnection.Connect.Success"
REDIRECT: Final = 302
"""``ex.code`` of a rejection that names another server (Adobe, SRS)."""
CONNECT_REJECTED: Final = "NetConnection.Connect.Rejected"
CALL_FAILED: Final = "NetConnection.Call.Failed"
RECONNECT_REQUEST: Final = "NetConnection.Connect.ReconnectRequest"
STREAM_FAILED: Final = "NetStream.Failed"
"""Code of an error that has no other name; librtmp, and so OBS, ends the stream on it."""
PUBLISH_START: Final = "NetStream.Publish.Start"
PUBLISH_BAD_NAME: Final = "NetStream.Publish.BadName"
PUBLISH_UNAUTHORIZED: Final = "NetStream.Publish.Unauthorized"
UNPUBLISH_SUCCESS: Final = "NetStream.Unpublish.Success"
PLAY_RESET: Final = "NetStream.Play.Reset"
PLAY_START: Final = "NetStream.Play.Start"
PLAY_STOP: Final = "NetStream.Play.Stop"
PLAY_FAILED: Final = "NetStream.Play.Failed"
PLAY_NOT_FOUND: Final = "NetStream.Play.StreamNotFound"
PLAY_PUBLISH_NOTIFY: Final = "NetStream.Play.PublishNotify"
PLAY_UNPUBLISH_NOTIFY: Final = "NetStream.Play.UnpublishNotify"
PAUSE_NOTIFY: Final = "NetStream.Pause.Notify"
UNPAUSE_NOTIFY: Final = "NetStream.Unpause.Notify"
SEEK_FAILED: Final = "NetStream.Seek.Failed"
SEEK_NOTIFY: Final = "NetStream.Seek.Notify"

CAPS_RECONNECT: Final = 1
"""Bit of ``capsEx``: understands `RECONNECT_REQUEST` (Enhanced RTMP v2, "Enhancing NetConnection connect Command")."""
CAPS_MULTITRACK: Final = 2
"""Bit of ``capsEx``: reads several tracks of a kind. No player that we tried says so, FFmpeg 9 not either."""

CAN_FORWARD: Final = 4
"""Bit of a FourCcInfoMap entry: passes the codec on; with key ``*``, any codec."""

SET_DATA_FRAME: Final = amf0.encode("@setDataFrame")
"""What stands before metadata and other script data that a server is to keep and pass on."""
ON_METADATA: Final = amf0.encode("onMetaData")

REWRITTEN_VALUES: Final = 1024
"""Most values in metadata that has to be written anew: 5 us each, and no message may hold a thread for more than a few
ms. Encoders that send AMF3 state some twenty."""

_TEXT_MAX_CHARS: Final = 256
"""Limit on texts that are kept for logs, such as flashVer; longer ones are cut."""

_SHARED_TEXTS: Final = 1024
"""Most texts of peers that are kept to be shared."""

_WHOLE_MAX: Final = 2**40

ENDING_CODES: Final = frozenset(
    {
        "NetConnection.Connect.AppShutdown",
        "NetConnection.Connect.Closed",
        "NetConnection.Connect.ReconnectRequest",
        "NetStream.Play.Complete",
        "NetStream.Play.Stop",
        "NetStream.Play.UnpublishNotify",
        "NetStream.Unpublish.Success",
        "stream_eof",
    }
)
"""Codes with which a server ends a stream or a connection without an error; Play.Reset, for one, ends nothing."""


# ---------------------------------------------------------------------------------------------------- writing


def command(name: str, transaction_id: float, *values: Any, stream_id: int = 0) -> Message:
    payload = amf0.encode(name, float(transaction_id), *values)
    return Message(STREAM_CSID if stream_id else COMMAND_CSID, 0, TYPE_COMMAND_AMF0, stream_id, payload)


def status(level: str, code: str, description: str, **more: Any) -> dict[str, Any]:
    """Return a status object, its members in the order that Wirecast wants."""
    return {"level": level, "code": code, "description": description, **more}


def on_status(stream_id: int, level: str, code: str, description: str, **more: Any) -> Message:
    return command("onStatus", 0, None, status(level, code, description, **more), stream_id=stream_id)


def stream_notice(stream_id: int, *, published: bool) -> tuple[Message, Message]:
    """Return what tells a player that its stream begins or has ended: Stream Begin or EOF, and a status."""
    event, code = (EVENT_STREAM_BEGIN, PLAY_PUBLISH_NOTIFY) if published else (EVENT_STREAM_EOF, PLAY_UNPUBLISH_NOTIFY)
    description = f"Stream is now {'published' if published else 'unpublished'}."
    control = encode_control(UserControl(event, stream_id=stream_id))
    return control, on_status(stream_id, "status", code, description)


def stream_notice_bytes(stream_id: int, *, published: bool, chunk_size: int, timestamp: int = 0) -> bytes:
    """Return the octets of `stream_notice`.

    Both messages have full (type 0) headers, so the octets fit behind any message and can stand in a log that many
    players share.
    """
    messages = zip(stream_notice(stream_id, published=published), (0, timestamp), strict=True)
    return b"".join(
        serialise(message.type_id, message.msid, when, message.payload, message.csid, chunk_size)
        for message, when in messages
    )


# ---------------------------------------------------------------------------------------------------- reading


def text(value: Any, maximum: int = _TEXT_MAX_CHARS) -> str:
    """Return `value` if it is a string, cut to `maximum` characters; "" for anything else."""
    return value[:maximum] if isinstance(value, str) else ""


@lru_cache(_SHARED_TEXTS)
def _shared(text: str) -> str:
    return text


def shared(text: str) -> str:
    """Return `text`, as one object for all peers that send the same, such as the name of a stream.

    Not by `sys.intern`: Python 3.12 never frees what it interns, and peers may send another text each time. One that
    may hold a secret is its peer's own, and must not outlive the connection.
    """
    return text if len(text) > _TEXT_MAX_CHARS or any(mark in text for mark in "?=@") else _shared(text)


def number(value: Any, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return float(value)


def whole(value: Any, default: int) -> int:
    """Return `value` as a whole number, held to +-2^40 (34 years of ms); `default` if it is no finite number."""
    return round(max(-_WHOLE_MAX, min(number(value, default), _WHOLE_MAX)))


def flag(value: Any, *, default: bool) -> bool:
    return bool(value) if isinstance(value, bool | int | float) else default


def properties(value: Any) -> dict[str, Any]:
    """Return the members of an object of any kind, simplified; {} for other values (null, undefined, a text)."""
    simple = simplify(value)
    return simple if isinstance(simple, dict) else {}


def first_properties(values: list[Any]) -> dict[str, Any]:
    return next((members for members in map(properties, values) if members), {})


def member(values: dict[str, Any], name: str) -> Any:
    """Return member `name` whatever its case (cameras write ``tcurl``). None: there is none."""
    if name in values:
        return values[name]
    lowered = name.lower()
    return next((value for key, value in values.items() if key.lower() == lowered), None)


def command_name(message: Message) -> str:
    """Return the name of a command message without decoding the rest; "" when it does not start with a string."""
    payload = amf0_body(message)
    if payload[:1] != b"\x02":
        return ""
    length = int.from_bytes(payload[1:3], "big")
    return payload[3 : 3 + length].decode("utf-8", "replace")


def command_head(message: Message) -> Message:
    """Return a command without what follows its transaction id; for those whose arguments are not looked at."""
    body = amf0_body(message)
    end = 3 + int.from_bytes(body[1:3], "big")
    if body[end : end + 1] == b"\0":  # a number
        end += 9
    return Message(message.csid, message.timestamp, TYPE_COMMAND_AMF0, message.msid, body[:end])


def read_metadata(message: Message, limits: WireLimits) -> Message | None:
    """Return ``onMetaData`` as players are to get it.

    It keeps its octets, less the ``@setDataFrame`` in front, and is not decoded, only walked. What has AMF3 values in
    it is encoded anew as AMF0, which every player reads.
    """
    payload = amf0_body(message).removeprefix(SET_DATA_FRAME)
    if not payload.startswith(ON_METADATA):
        return None
    try:
        if not amf0.walk(payload, limits.amf.for_data(len(payload))):
            # References and AMF3 may stand for more than their octets, and have to be made values to be sent on: that
            # costs some hundred times as much.
            few = dataclasses.replace(limits.amf, nodes=min(limits.amf.nodes, REWRITTEN_VALUES))
            payload = amf0.encode(*map(simplify, amf0.decode(payload, few)))
            if len(payload) > limits.data_message_bytes:  # edges and players would refuse what references repeat
                raise LimitExceededError("data_message_bytes", len(payload), limits.data_message_bytes)
    except RemoteProtocolError as error:
        # A limit is hit on purpose. What is merely broken is for the player to read: an array without its end marker,
        # which some encoders leave out, is to all of them as good as one with it.
        if error.code.startswith("limit:"):
            raise
    return Message(message.csid, message.timestamp, TYPE_DATA_AMF0, message.msid, payload)
