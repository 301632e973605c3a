"""What a load run found: one row per peer, one sample per second, the whole run. Plain values, for JSON and Parquet.

Grain: `PeerResult` is one connection; a peer that leaves and joins again makes one row each time. Times are seconds,
delays milliseconds. None means not measured; it never stands for 0.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Final

PUBLISHER: Final = "publisher"
"""What stands for the name of a profile in the rows of our own publishers."""


class PeerKind(enum.Enum):
    """What sort of peer a profile makes."""

    HEALTHY = "healthy"
    SLOW = "slow"
    HOSTILE = "hostile"
    PUBLISHER = "publisher"


class PeerEnd(enum.Enum):
    """How a peer's connection ended.

    RUN_ENDED: we left because the run was over. LEFT: we left because the profile says so. SERVER_CLOSED: end of
    stream from the server. SERVER_RESET: reset by it. REFUSED: the server said no, in words or by closing before the
    handshake was done. NOT_CONNECTED: nobody answered, or not in time. ERROR: the server broke the protocol.
    TESTER_FAILED: the load tester itself failed, for want of descriptors for example; says nothing about the server.
    """

    RUN_ENDED = "run_ended"
    LEFT = "left"
    SERVER_CLOSED = "server_closed"
    SERVER_RESET = "server_reset"
    REFUSED = "refused"
    NOT_CONNECTED = "not_connected"
    ERROR = "error"
    TESTER_FAILED = "tester_failed"


@dataclass(slots=True, kw_only=True)
class PeerResult:
    """One connection of a load run.

    Args:
        number: of the peer in the run, from 0.
        profile: name of its profile, as on the command line (``slow@200k``, ``stall``, ``B04``);
            ``publisher`` for ours.
        kind: see `PeerKind`.
        url: what it played or published, without secrets.
        address: its own address on this machine, as address:port.
        started_s: when it began to connect, since the start of the run.
        connect_s: time for TCP to connect.
        handshake_s: from connected to the end of the RTMP handshake.
        first_frame_s: from the begin of connecting to the first audio or video frame.
        ended_s: when it ended, since the start of the run.
        parsed: whether its messages were parsed; if not, it read and discarded, and counts bytes only.
        wire_bytes: bytes received (a publisher: sent).
        video: video frames received (a publisher: sent).
        keys: key frames among them.
        audio: audio frames received (a publisher: sent).
        data: data messages received.
        missing_video: frames of the stream that never came although later ones did.
        missing_audio: the same for audio.
        gaps: how often frames were missing.
        broken_restarts: gaps in video that did not end with a key frame: the picture was broken.
        started_on_key: whether the first video frame was a key frame. None: no video came.
        delay_p50_ms: median of the delay of frames against the publisher, from its stamp or its clock.
        delay_p95_ms: 95th percentile.
        delay_p99_ms: 99th percentile.
        delay_max_ms: largest.
        delays: frames whose delay was measured.
        stalls: times that nothing came for longer than a second while the peer was reading.
        longest_stall_s: the longest of them.
        freezes: times that no new picture came for 0.2 s or longer, between the first one and the end.
        longest_freeze_s: the longest time without a new picture. None: no picture came.
        missed_at_end: pictures that did not come after the last one, by the sound that did; estimated; 0 below 1 s.
        line_bytes: bytes that the line of its profile could carry from the first frame to the end. None: its profile
            sets no rate.
        line_used_bytes: bytes that came in that time.
        stopped_reading_s: when it stopped reading for good, since the start of the run; its delays and stalls are of
            the time before. None: it read to its end.
        end: how it ended.
        end_details: in words; what the operating system said, or what the server said last.
        end_code: the last error or final status code of the server, like ``NetStream.Play.UnpublishNotify``.
        cut: whether the server ended it, rather than we. None: the peer had vanished and could not tell.
        expectation_met: for hostile profiles: whether the server did one of the things a sound server may do.
        forms: of hostile profiles that are carried out in several ways: how each of them ended, a line for those that
            ended alike.
        notes: anything a profile wants to report, in words.
    """

    number: int
    profile: str
    kind: PeerKind
    url: str
    address: str = ""
    started_s: float = 0.0
    connect_s: float | None = None
    handshake_s: float | None = None
    first_frame_s: float | None = None
    ended_s: float | None = None
    parsed: bool = True
    wire_bytes: int = 0
    video: int = 0
    keys: int = 0
    audio: int = 0
    data: int = 0
    missing_video: int = 0
    missing_audio: int = 0
    gaps: int = 0
    broken_restarts: int = 0
    started_on_key: bool | None = None
    delay_p50_ms: float | None = None
    delay_p95_ms: float | None = None
    delay_p99_ms: float | None = None
    delay_max_ms: float | None = None
    delays: int = 0
    stalls: int = 0
    longest_stall_s: float = 0.0
    freezes: int = 0
    longest_freeze_s: float | None = None
    missed_at_end: int = 0
    line_bytes: int | None = None
    line_used_bytes: int = 0
    stopped_reading_s: float | None = None
    end: PeerEnd = PeerEnd.RUN_ENDED
    end_details: str = ""
    end_code: str | None = None
    cut: bool | None = False
    expectation_met: bool | None = None
    forms: str = ""
    notes: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and Parquet: one column per field."""
        return {**asdict(self), "kind": self.kind.value, "end": self.end.value}


@dataclass(slots=True, kw_only=True)
class RunSample:
    """The run at one moment, about once a second.

    Args:
        playing: peers that have received a frame and are connected, by profile.
        pictures: video frames received so far by parsed viewers, by profile.
        missing_pictures: video frames missing so far, by profile, those for which only sound came among them.
        cut: peers cut by the server so far, by profile.
        failed: peers that could not connect or were refused so far, by profile.
        delay_p50_ms: over the frames since the sample before, of parsed healthy viewers. None: there were none.
        server_cpu_percent: of one core, user and system. None: no process id was given.
        load_cpu_percent: of one core, of the load tester's own processes: near 100 times their number, the delays
            measured are the tester's own.
    """

    at_s: float
    connected: dict[str, int] = field(default_factory=dict)
    playing: dict[str, int] = field(default_factory=dict)
    received_bytes_per_s: float = 0.0
    frames_per_s: float = 0.0
    missing: dict[str, int] = field(default_factory=dict)
    pictures: dict[str, int] = field(default_factory=dict)
    missing_pictures: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    delay_p50_ms: float | None = None
    delay_p99_ms: float | None = None
    server_cpu_percent: float | None = None
    server_rss_bytes: int | None = None
    server_fds: int | None = None
    load_cpu_percent: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class RunResult:
    """A whole load run.

    Args:
        url: the server and stream, without secrets.
        command: the command line that made it, without secrets. "" for a run from Python.
        began_at: wall-clock time of its start, ISO 8601 with time zone.
        profiles: what was asked for: name -> number of peers.
        delays_ms: delays of all measured frames by profile, a sorted sample of at most 10,000 each, for plots and
            for percentiles over all frames.
        server_pid: process measured. None: none was given.
        server_cpu_s: processor time of the server in seconds. None: none was given.
        server_base_rss_bytes: its resident memory before the first peer came.
        failure: what went wrong in mid run, like the end of the server; such a run may have been ended before its time,
            and what it did not see says nothing. "": nothing did.
        warnings: what casts doubt on the figures, like a load tester that had no processor time left.
        measured_every: frames and delays are of every n-th viewer of each profile; 1 is all of them.
        delay_source: what delays were measured against: ``stamp``, ``publisher's clock``, ``fastest viewer``.
    """

    url: str
    command: str = ""
    began_at: str = ""
    duration_s: float = 0.0
    profiles: dict[str, int] = field(default_factory=dict)
    peers: list[PeerResult] = field(default_factory=list)
    samples: list[RunSample] = field(default_factory=list)
    delays_ms: dict[str, list[float]] = field(default_factory=dict)
    server_pid: int | None = None
    server_cpu_s: float | None = None
    server_base_rss_bytes: int | None = None
    interrupted: bool = False
    interrupted_by: int | None = None
    failure: str = ""
    warnings: list[str] = field(default_factory=list)
    measured_every: int = 1
    delay_source: str = ""
