"""What a load run found: one row per peer, one sample per second, the whole run. Plain values, for JSON and Parquet.

Grain: `PeerResult` is one connection; a peer that leaves and joins again makes one row each time. Times are seconds,
delays milliseconds. None means not measured; it never stands for 0.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Final

PUBLISHER: Final = "publisher"
"""Name in place of a profile's in the rows of our own publishers."""


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
    """One connection of a load run."""

    number: int  # number of the peer in the run, from 0
    # name of its profile, as on the command line (``slow@200k``, ``stall``, ``B04``); ``publisher`` for ours
    profile: str
    kind: PeerKind  # see `PeerKind`
    url: str  # what it played or published, without secrets
    address: str = ""  # its own address on this machine, as address:port
    started_s: float = 0.0  # when it began to connect, since the start of the run
    connect_s: float | None = None  # time for TCP to connect
    handshake_s: float | None = None  # time from connected to the end of the RTMP handshake
    first_frame_s: float | None = None  # time from the begin of connecting to the first audio or video frame
    ended_s: float | None = None  # when it ended, since the start of the run
    parsed: bool = True  # whether its messages were parsed; if not, it read and discarded, and counts bytes only
    wire_bytes: int = 0  # bytes received (a publisher: sent)
    video: int = 0  # video frames received (a publisher: sent)
    keys: int = 0  # key frames among them
    audio: int = 0  # audio frames received (a publisher: sent)
    data: int = 0  # data messages received
    missing_video: int = 0  # frames of the stream that never came although later ones did
    missing_audio: int = 0  # the same for audio
    gaps: int = 0  # how often frames were missing
    broken_restarts: int = 0  # gaps in video that did not end with a key frame: the picture was broken
    started_on_key: bool | None = None  # whether the first video frame was a key frame. None: no video came.
    # median of the delay of frames against the publisher, from its stamp or its clock
    delay_p50_ms: float | None = None
    delay_p95_ms: float | None = None  # 95th percentile
    delay_p99_ms: float | None = None  # 99th percentile
    delay_max_ms: float | None = None  # largest
    delays: int = 0  # frames whose delay was measured
    stalls: int = 0  # times that nothing came for longer than a second while the peer was reading
    longest_stall_s: float = 0.0  # the longest of them
    freezes: int = 0  # times that no new picture came for 0.2 s or longer, between the first one and the end
    longest_freeze_s: float | None = None  # the longest time without a new picture. None: no picture came.
    # pictures that did not come after the last one, by the sound that did; estimated; 0 below 1 s
    missed_at_end: int = 0
    # how long it was in each rendition, by the size of the pictures that sequence headers say; no size, no entry
    renditions_s: dict[str, float] = field(default_factory=dict)
    switches: int = 0  # how often the rendition changed
    # bytes that the line of its profile could carry from the first frame to the end. None: its profile sets no rate.
    line_bytes: int | None = None
    line_used_bytes: int = 0  # bytes that came in that time
    # when it stopped reading for good, since the start of the run; its delays and stalls are of the time before. None:
    # it read to its end.
    stopped_reading_s: float | None = None
    end: PeerEnd = PeerEnd.RUN_ENDED  # how it ended
    end_details: str = ""  # in words; what the operating system said, or what the server said last
    # the last error or final status code of the server, like ``NetStream.Play.UnpublishNotify``
    end_code: str | None = None
    # whether the server ended it, rather than we. None: the peer had vanished and could not tell.
    cut: bool | None = False
    # for hostile profiles: whether the server did one of the things a sound server may do
    expectation_met: bool | None = None
    # of hostile profiles that are carried out in several ways: how each of them ended, a line for those that ended
    # alike
    forms: str = ""
    notes: str = ""  # anything a profile wants to report, in words

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "end": self.end.value}


@dataclass(slots=True, kw_only=True)
class RunSample:
    """The run at one moment, about once a second."""

    at_s: float
    connected: dict[str, int] = field(default_factory=dict)
    # peers that have received a frame and are connected, by profile
    playing: dict[str, int] = field(default_factory=dict)
    received_bytes_per_s: float = 0.0
    frames_per_s: float = 0.0
    missing: dict[str, int] = field(default_factory=dict)
    pictures: dict[str, int] = field(default_factory=dict)  # video frames received so far by parsed viewers, by profile
    # video frames missing so far, by profile, those for which only sound came among them
    missing_pictures: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # peers cut by the server so far, by profile
    # peers that could not connect or were refused so far, by profile
    failed: dict[str, int] = field(default_factory=dict)
    # over the frames since the sample before, of parsed healthy viewers. None: there were none.
    delay_p50_ms: float | None = None
    delay_p99_ms: float | None = None
    server_cpu_percent: float | None = None  # share of one core, user and system. None: no process id was given.
    server_rss_bytes: int | None = None
    server_fds: int | None = None
    # of one core, of the load tester's own processes: near 100 times their number, the delays measured are the tester's
    # own
    load_cpu_percent: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class RunResult:
    """A whole load run."""

    url: str  # the server and stream, without secrets
    command: str = ""  # the command line that made it, without secrets. "" for a run from Python.
    began_at: str = ""  # wall-clock time of its start, ISO 8601 with time zone
    duration_s: float = 0.0
    profiles: dict[str, int] = field(default_factory=dict)  # what was asked for: name -> number of peers
    peers: list[PeerResult] = field(default_factory=list)
    samples: list[RunSample] = field(default_factory=list)
    # delays of all measured frames by profile, a sorted sample of at most 10,000 each, for plots and for percentiles
    # over all frames
    delays_ms: dict[str, list[float]] = field(default_factory=dict)
    server_pid: int | None = None  # process measured. None: none was given.
    server_cpu_s: float | None = None  # processor time of the server in seconds. None: none was given.
    server_base_rss_bytes: int | None = None  # its resident memory before the first peer came
    interrupted: bool = False
    interrupted_by: int | None = None
    # what went wrong in mid run, like the end of the server; such a run may have been ended before its time, and what
    # it did not see says nothing. "": nothing did.
    failure: str = ""
    # what casts doubt on the figures, like a load tester that had no processor time left
    warnings: list[str] = field(default_factory=list)
    measured_every: int = 1  # frames and delays are of every n-th viewer of each profile; 1 is all of them
    delay_source: str = ""  # what delays were measured against: ``stamp``, ``publisher's clock``, ``fastest viewer``
