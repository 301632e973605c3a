"""What it says about a peer that it went over a limit: points, for penalties and for scores (pure).

A limit that others can have a peer break, or that says something of the server and not of the peer, has few or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PROOF: Final = 12.0
_PLAIN: Final = {
    # what no sound implementation announces or sends
    "chunk_size_min_bytes": PROOF,
    "chunk_streams": PROOF,
    "unfinished_bytes": PROOF,
    "command_message_bytes": PROOF,
    "control_message_bytes": PROOF,
    "aggregate_messages": PROOF,
    "amf_depth": PROOF,
    "amf_nodes": PROOF,
    "amf_repeated_bytes": PROOF,
    "control_messages_per_second": PROOF,
    "commands_per_second": PROOF,
    "paused_input_bytes": 6.0,
    "pending_output_bytes": 6.0,
}
_MILD: Final = {
    # seen of broken ones as well
    "chunk_size_max_bytes": 6.0,
    "media_message_bytes": 6.0,
    "amf_string_bytes": 6.0,
    "input_buffer_bytes": 6.0,
    "first_command_s": 0.5,
    "unpublished_bytes": 1.0,  # an encoder that does not wait for the answer, and was refused its name
    "message_streams": 1.0,  # a player that makes a stream per channel, and deletes none
    "data_message_bytes": 1.0,  # the key frame index of a very long file
    "work_share_per_connection": 1.0,  # an encoder far above what the server is meant for
    "work_share_per_address": 0.5,  # the same, of several behind one router
    "first_media_s": 0.5,  # an encoder that is slow to start
    "publishers_per_address": 0.5,
    "streams": 0.1,
}
_NONE: Final = (
    # a server's own fullness, a phone that went away, or what another kind of evidence says already
    *("connections", "connections_per_address", "new_per_address_and_s", "ping_silence_s"),
    "messages_per_second",  # slows the peer down; a file sent faster than it plays goes over it
    "handshake_time_s",  # told by handshake_timeout
    "player_stream_ids",  # others may have used them up
    "media_silence_s",  # an encoder that hangs
    "player_wait_s",  # waiting for a stream that has not begun is what viewers do
    # over HTTP: a page can have its visitors' browsers ask for what is too long, too much or too late;
    # header_bytes of RTMP are a publisher's that are not kept
    *("target_bytes", "header_bytes", "header_count", "body_bytes", "request_time_s", "frames_per_second", "wait_s"),
)
LIMIT_POINTS: Final[Mapping[str, float]] = MappingProxyType({**_PLAIN, **_MILD, **dict.fromkeys(_NONE, 0.0)})
"""Points of one hit, by name of the limit."""
MILD_LIMITS: Final = frozenset(_MILD)
"""Limits that honest clients break for hours, or third parties have them break: these alone lead to no ban."""
