"""How a player behaves, and what it counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.client.throttle import MAX_RATE, MIN_RATE, read_size, receive_buffer
from flowctl.errors import ConfigError
from flowctl.flow.counts import NO_COUNTS, Counts
from flowctl.receiver import DEFAULT_CAPACITY_BYTES

MAX_PINGS_PER_S: Final = 100_000
_STALL_BUFFER_BYTES: Final = 64 * 1024
"""A stalled viewer shows when the buffers are full; with autotuning they may grow to 6 MiB before (tcp_rmem)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayProfile:
    """How a player behaves; times count from the first media message.

    Args:
        rate: bits per second it reads. None: as fast as it comes.
        stall_after_s: when it stops reading. None: it does not.
        resume_after_s: when rate and stall are lifted. None: they are not.
        pings_per_s: ping requests it sends per second, 0 to `MAX_PINGS_PER_S`.
        stay: whether to stay when the stream ends, for a publisher that may come back.

    Raises:
        ConfigError: a value is out of range.
    """

    rate: int | None = None
    stall_after_s: float | None = None
    resume_after_s: float | None = None
    pings_per_s: int = 0
    stay: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not MIN_RATE <= self.rate <= MAX_RATE:
            raise ConfigError(f"rate is {self.rate} bit/s, it must be {MIN_RATE} to {MAX_RATE}")
        for name in ("stall_after_s", "resume_after_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} is {value}, it must be 0 or more seconds")
        if not 0 <= self.pings_per_s <= MAX_PINGS_PER_S:
            raise ConfigError(f"pings_per_s is {self.pings_per_s}, it must be 0 to {MAX_PINGS_PER_S}")

    @property
    def capacity_bytes(self) -> int:
        """Most bytes to read at once, for `start_client`: what a line delivers at once."""
        return DEFAULT_CAPACITY_BYTES if self.rate is None else read_size(self.rate)

    @property
    def receive_buffer_bytes(self) -> int:
        """SO_RCVBUF for `start_client`, 0 for the kernel's choice; small for a viewer that is slow or stalls."""
        if self.rate is not None:
            return receive_buffer(self.rate)
        return 0 if self.stall_after_s is None else _STALL_BUFFER_BYTES


HEALTHY: Final = PlayProfile()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerStatistics:
    """A snapshot of a player.

    Args:
        playing: whether media has come and the connection is open.
        received: messages by class, bytes of their bodies.
        wire_bytes: bytes read from the socket.
        missing_video: pictures that never came.
        missing_audio: audio frames that never came.
        exact: whether the missing ones were counted by stamps; otherwise they were worked out from timestamps.
        video_gaps: how often pictures were missing.
        broken_restarts: gaps in video after which something else than a key frame came first. Disposable frames may
            be left out without a key frame, so this is 0 for a source that has none.
        started_on_key: whether the first picture was a key frame. None: none came.
        first_frame_s: seconds from connecting to the first audio or video frame. None: none came.
        mean_delay_s: mean time from the publisher's stamp to here, of frames stamped after the play began: older ones
            come from the server's cache, and their age is no delay. None: there are none, or they have no stamps.
        max_delay_s: the largest one. None: likewise.
        media_s: media time from the first frame to the latest, by timestamps: more than `elapsed_s` by what the
            server's cache held.
        elapsed_s: seconds from the first media message to the last.
        stalled: whether it has stopped reading.
        pings_sent: ping requests sent.
        written_tags: FLV tags written.
    """

    playing: bool = False
    received: Counts = NO_COUNTS
    wire_bytes: int = 0
    missing_video: int = 0
    missing_audio: int = 0
    exact: bool = False
    video_gaps: int = 0
    broken_restarts: int = 0
    started_on_key: bool | None = None
    first_frame_s: float | None = None
    mean_delay_s: float | None = None
    max_delay_s: float | None = None
    media_s: float = 0.0
    elapsed_s: float = 0.0
    stalled: bool = False
    pings_sent: int = 0
    written_tags: int = 0
