"""Settings of the RTMP sessions, beyond the wire limits that both share (`flowctl.wire.rtmp.limits.WireLimits`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.wire.rtmp.adobe_auth import AdobeAuthenticator
from flowctl.wire.rtmp.limits import CHUNK_SIZE_CEILING, WireLimits
from flowctl.wire.rtmp.url import NAME_MAX_CHARS

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

WINDOW_ACK_SIZE_BYTES: Final = 2_500_000
"""Acknowledgement window we announce, that of SRS and gortmplib. We never wait for an acknowledgement."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """Settings of the protocol control that both ends have in common: acknowledgements, pings, windows."""

    limits: WireLimits = dataclasses.field(default_factory=WireLimits)
    """Limits that the peer is held to."""

    ack_floor_bytes: int = 64 * _KIB
    """We acknowledge at most once per this many bytes, however small the peer's window is: a window of 0 or 1 would
    otherwise cost a reply per byte."""

    acknowledge: bool = True
    """False never acknowledges; for load tests."""

    answer_pings: bool = True
    """False never answers a ping; for load tests."""

    ping_answer_interval_s: float = 1.0
    """Pings of the peer are answered at most once in this time, since a pong cannot be dropped. 0: every one."""

    control_messages_per_second: int = 200
    """Most protocol control, user control and ignored messages per second; more ends the session. 0: off. A busy
    player acknowledges ten times per second; a flood of pings or of unknown types passes this at once."""

    pending_output_bytes: int = 256 * _KIB
    """Most bytes of replies that may wait for `data_to_send`. Requests are limited by rate, so only a caller that
    does not collect them gets here."""

    out_chunk_size: int = 65536
    """Chunk size we send with, 128..2^31-1 (gortmplib 65536, SRS 60000)."""

    type3_after_type0: Literal["delta", "zero"] = "delta"
    """How the peer's clock is read where implementations disagree, see `flowctl.wire.rtmp.chunk.reader.ChunkReader`."""

    extended_delta: Literal["delta", "absolute"] = "delta"
    """The same for extended timestamps in type 1 and 2 chunks."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, low, high in (
            ("ack_floor_bytes", 1, 0xFFFFFFFF),
            ("ping_answer_interval_s", 0, 3600),
            ("control_messages_per_second", 0, 1_000_000),
            ("pending_output_bytes", 4 * _KIB, 2**40),
            ("out_chunk_size", 128, CHUNK_SIZE_CEILING),
        ):
            value = getattr(self, name)
            # A comparison with NaN is false, so NaN is refused as well.
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}, allowed is {low} to {high}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerSessionConfig(ControlConfig):
    """Settings of `ServerSession`; immutable, one object serves all connections of a server."""

    paused_input_bytes: int = 4 * _MIB
    """Most bytes of messages held back while input is paused or while our caller decides about a request: 3 s of a
    10 Mbit/s publisher that does not wait for the answer to its publish. More ends the session."""

    name_max_chars: int = NAME_MAX_CHARS
    """Longest application or stream name, 1..4096."""

    sample_access: bool = False
    """True sends ``|RtmpSampleAccess`` to players, which only Flash players need."""

    caps_ex: int = 15
    """Enhanced RTMP v2 capabilities told to clients that tell theirs: media passes through untouched, so all four."""

    credentials: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)
    """Password of each user for Adobe authentication. None: no authentication. There are no default credentials."""

    authenticator: AdobeAuthenticator | None = dataclasses.field(init=False, repr=False, compare=False, default=None)
    """Made of `credentials`; shared by all sessions, because a login takes three connections."""

    def __post_init__(self) -> None:
        # Two arguments: with slots the class is made twice, and the short form would look in the first one.
        super(ServerSessionConfig, self).__post_init__()
        if not 1 <= self.name_max_chars <= 4096:
            raise ConfigError(f"name_max_chars is {self.name_max_chars!r}, allowed is 1 to 4096")
        if not 1 <= self.paused_input_bytes <= 2**40:
            raise ConfigError(f"paused_input_bytes is {self.paused_input_bytes!r}, allowed is 1 to {2**40}")
        if self.credentials is not None:
            object.__setattr__(self, "authenticator", AdobeAuthenticator(self.credentials))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientSessionConfig(ControlConfig):
    handshake: Literal["simple", "digest"] = "simple"
    """Style of the handshake. Any server takes simple; the Flash-era ones want digest for H.264."""

    flash_version: str = "FMLE/3.0 (compatible; flowctl)"
    """What the client calls itself; FMLE makes servers treat it as an encoder, as OBS and FFmpeg do."""

    buffer_ms: int = 1000
    """Buffer that a player announces, 0..2^32-1."""

    multitrack: bool = False
    """Whether the client says that it reads several tracks of a kind, which no usual player does."""

    reply_time_s: float = 10.0
    """Time that the server has to answer connect, createStream and publish. 0: off. Play is not held to it: players
    may wait for a publisher."""

    def __post_init__(self) -> None:
        super(ClientSessionConfig, self).__post_init__()
        if self.handshake not in ("simple", "digest"):
            raise ConfigError(f"handshake is {self.handshake!r}, allowed is 'simple' or 'digest'")
        if not 0 <= self.buffer_ms <= 0xFFFFFFFF:
            raise ConfigError(f"buffer_ms is {self.buffer_ms!r}, allowed is 0 to {0xFFFFFFFF}")
        if not 0 <= self.reply_time_s <= 3600:
            raise ConfigError(f"reply_time_s is {self.reply_time_s!r}, allowed is 0 to 3600")
