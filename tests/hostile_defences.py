"""What the live server does about each hostile profile: asserted by the end-to-end tests, shown in docs/security.md.

One table for both, so that the document cannot say what the tests do not see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.config import LiveConfig
from flowctl.live.hub import MOST_STREAMS
from flowctl.live.session import MESSAGES_PER_TURN
from flowctl.load.hostile.base import AttackOutcome
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.streams.groups import LONGEST_KEY_INTERVAL_S

CUT, REFUSED, CONTAINED = AttackOutcome.CUT, AttackOutcome.REFUSED, AttackOutcome.CONTAINED
OWNERS = (WireLimits, AmfLimits, ServerSessionConfig, AdmissionLimits, LiveConfig, SenderSettings, CacheLimits)
"""Where settings are looked up, for their defaults."""
CONSTANTS = {"streams": MOST_STREAMS, "messages_per_turn": MESSAGES_PER_TURN, "key_wait_s": LONGEST_KEY_INTERVAL_S}
"""Figures that are no settings."""
COUNTED_ELSEWHERE = {"amf_depth": "depth", "ping_silence_s": "ping_after_s"}
"""Names of counters whose setting has another name."""


@dataclass(frozen=True, kw_only=True)
class Defence:
    """What is seen when a profile is run against the live server.

    Args:
        closed: connections that the server ends, by reason.
    """

    forms: dict[str, AttackOutcome]
    acts: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    closed: dict[CloseReason, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    seen: str = ""
    log: tuple[str, ...] = ()

    @property
    def settings(self) -> list[str]:
        names = [COUNTED_ELSEWHERE.get(name, name) for name in (*self.limits, *self.refused)]
        return list(dict.fromkeys((*names, *self.acts)))


def every(outcome: AttackOutcome, names: str) -> dict[str, AttackOutcome]:
    return dict.fromkeys(names.split(), outcome)


def limit_hits(**limits: int) -> dict[str, object]:
    return {"limits": limits, "closed": {CloseReason.LIMIT_HIT: sum(limits.values())}}


DEFENCES = {
    "B01": Defence(forms=every(CUT, "largest first-bit"), **limit_hits(chunk_size_max_bytes=2)),
    "B02": Defence(forms={"": CUT}, **limit_hits(chunk_size_min_bytes=1)),
    "B03": Defence(
        forms=every(CUT, "zero 0-bytes 1-bytes 2-bytes 3-bytes"),
        closed={CloseReason.PROTOCOL_ERROR: 5},
        log=("Set Chunk Size of",),
    ),
    "B04": Defence(
        forms={**every(CUT, "video command data control filled"), "within": CONTAINED},
        **limit_hits(
            media_message_bytes=1,
            command_message_bytes=1,
            data_message_bytes=1,
            control_message_bytes=1,
            unpublished_bytes=1,
        ),
        seen="a message within the limits costs what has come of it",
    ),
    "B05": Defence(forms={"": CUT}, acts=("unfinished_bytes",), **limit_hits(chunk_streams=1)),
    "B06": Defence(
        forms=every(CUT, "longer shorter type"),
        closed={CloseReason.PROTOCOL_ERROR: 3},
        log=("header for a message of type",),
    ),
    "B07": Defence(forms=every(CONTAINED, "larger smaller"), seen="connect is answered"),
    "B08": Defence(
        forms=every(CUT, "connect long-connect amf3 metadata"),
        acts=("nodes",),
        **limit_hits(amf_depth=3, command_message_bytes=1),
    ),
    "B09": Defence(
        forms=every(
            CUT,
            "array ecma-array long-string amf3-array int-vector object-vector dictionary amf3-string traits type-17",
        ),
        closed={CloseReason.PROTOCOL_ERROR: 10},
        log=("data ends inside a value",),
    ),
    "B10": Defence(
        forms={**every(CUT, "connect anywhere publish"), "metadata": CONTAINED},
        closed={CloseReason.PROTOCOL_ERROR: 3},
        log=("data ends inside a value",),
        seen="metadata is passed on as it is",
    ),
    "B11": Defence(
        forms={
            **every(CONTAINED, "publish-false publish-number publish-object publish-nothing play-null play-array"),
            **every(CONTAINED, "delete-text connect-app"),
            "connect-undefined": CUT,
        },
        closed={CloseReason.PROTOCOL_ERROR: 1},
        seen="`NetStream.Publish.BadName`, `NetStream.Play.StreamNotFound`",
    ),
    "B12": Defence(forms=every(CUT, "at-once slowly"), acts=("commands_per_second",), **limit_hits(message_streams=2)),
    "B13": Defence(
        forms={"": CONTAINED},
        acts=("burst_per_address", "connections_per_address", "connections"),
        refused=("new_per_address_and_s",),
        log=("connection refused",),
        seen="reset at once; taken again as soon as others have left",
    ),
    "B14": Defence(
        forms={**every(REFUSED, "silent drip"), **every(CUT, "half after-handshake after-connect")},
        limits={"handshake_time_s": 3, "first_command_s": 1, "first_media_s": 1},
        closed={CloseReason.HANDSHAKE_TIMEOUT: 3, CloseReason.IDLE: 2},
    ),
    "B15": Defence(forms={"": CUT}, acts=("players_may_wait", "streams"), **limit_hits(player_wait_s=16)),
    "B16": Defence(
        forms={"": CUT},
        acts=("stuck_s", "soft_too_long_s"),
        closed={CloseReason.STUCK: 1},
        log=("viewer slow",),
        seen="states OVERLOADED and SOFT_LIMIT; what is dropped, by class",
    ),
    "B17": Defence(
        forms=every(CUT, "acknowledging control-flood"),
        acts=("stuck_s", "soft_too_long_s", "ping_answer_interval_s"),
        limits={"control_messages_per_second": 1},
        closed={CloseReason.STUCK: 1, CloseReason.LIMIT_HIT: 1},
    ),
    "B18": Defence(
        forms={"": CONTAINED},
        acts=("messages_per_turn",),
        limits={"messages_per_second": 1},
        log=("input slowed",),
        seen="the publisher is read at that rate, and nothing of it is lost",
    ),
    "B19": Defence(
        forms={"at-ease": CONTAINED, "flood": CUT},
        **limit_hits(control_messages_per_second=1),
        log=("unknown-message-type",),
    ),
    "B20": Defence(forms={"": CONTAINED}, seen="passed on as they are"),
    "B21": Defence(
        forms={"": CONTAINED},
        acts=("second_publisher", "return_grace_s"),
        log=("is being published",),
        seen="`NetStream.Publish.BadName` while the first one is there; half a frame is not passed on",
    ),
    "B22": Defence(forms={"": CONTAINED}, acts=("return_grace_s",), seen="the name is free again"),
    "B23": Defence(
        forms=every(CONTAINED, "none one"),
        acts=("size_bytes", "messages", "duration_s", "key_wait_s"),
        seen="the cache is emptied until the next key frame",
    ),
    "B24": Defence(forms={"": CONTAINED}, seen="every frame arrives"),
    "B25": Defence(
        forms={**every(REFUSED, "parent nul long line-break"), **every(CONTAINED, "absolute empty")},
        acts=("name_max_chars",),
        seen="`NetStream.Publish.BadName`; a leading slash is taken off, an empty name is the application's",
    ),
    "B26": Defence(forms=every(CONTAINED, "connect metadata"), acts=("string_bytes",), seen="kept as text"),
    "B28": Defence(
        forms={"accepted": CONTAINED, "refused": REFUSED},
        seen="neither the log nor an error shows the value of a query, a user's password or a refused name",
    ),
    "B29": Defence(
        forms={"": CONTAINED},
        acts=("credentials",),
        seen="there are no default credentials; with a `credentials_file`: `NetConnection.Connect.Rejected`",
    ),
    "B30": Defence(
        forms=every(CUT, "viewer publisher"),
        acts=("stuck_s", "ping_after_s"),
        limits={"media_silence_s": 1},
        closed={CloseReason.STUCK: 1, CloseReason.IDLE: 1},
    ),
    "B31": Defence(
        forms={"": REFUSED},
        acts=("second_publisher",),
        log=("is being published",),
        seen="`NetStream.Publish.BadName`; with `replace` the first one is closed as KICKED",
    ),
    "B32": Defence(
        forms={
            **every(CONTAINED, "window-0 window-1 window-4g values"),
            **every(CUT, "short-acknowledgement short-window short-bandwidth short-event short-abort"),
        },
        acts=("ack_floor_bytes", "ping_answer_interval_s"),
        closed={CloseReason.PROTOCOL_ERROR: 5},
    ),
    "B33": Defence(forms={"": CONTAINED}, seen="answered with a window, not obeyed"),
}
"""By id of the profile."""


def default_of(setting: str) -> object:
    if setting in CONSTANTS:
        return CONSTANTS[setting]
    owners = [owner for owner in OWNERS if setting in owner.__dataclass_fields__]
    assert owners, f"no setting {setting}"
    return getattr(owners[0](), setting)
