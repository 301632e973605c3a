"""A load run as the engine could have found it, with a server that says bad things; for tests of what is made of it."""

from __future__ import annotations

import math
import random

from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult, RunSample

NASTY = "</title></style><script>alert('x')</script>\x1b[31m\u202eevil\x00 & \"quoted\" 'single' <img src=http://x/>"
"""What a hostile server may say about itself: markup, escape sequences, a change of direction, a NUL."""

ASKED = {"healthy": 40, "slow@200k": 6, "stall": 4, "B04": 2, "publisher": 1}


def viewer(number, profile, kind, **values):
    fields = {
        "url": "rtmp://127.0.0.1:1935/live/room",
        "address": f"127.0.0.1:{40000 + number}",
        "started_s": number * 0.05,
        "connect_s": 0.001 + number * 1e-5,
        "handshake_s": 0.003,
        "first_frame_s": 0.02 + number * 1e-3,
        "ended_s": 30.0,
        "wire_bytes": 9_000_000,
        "video": 900,
        "keys": 15,
        "audio": 1400,
        "started_on_key": True,
        "delay_p50_ms": 21.0,
        "delay_p95_ms": 40.0,
        "delay_p99_ms": 45.0,
        "delay_max_ms": 60.0 + number,
        "delays": 2300,
    }
    return PeerResult(number=number, profile=profile, kind=kind, **(fields | values))


def some_peers():
    """Healthy viewers, slow ones that miss frames, stalled ones that were cut, two attackers, a publisher."""
    peers = [viewer(number, "healthy", PeerKind.HEALTHY) for number in range(40)]
    peers += [
        viewer(number, "slow@200k", PeerKind.SLOW, missing_video=300 + number, missing_audio=10, gaps=9, video=500)
        for number in range(40, 46)
    ]
    peers += [
        viewer(
            number,
            "stall",
            PeerKind.SLOW,
            ended_s=9.0 + number / 10,
            end=PeerEnd.SERVER_RESET,
            cut=True,
            end_details=f"hard limit: age_ms {8000 + number}, limit 8000 {NASTY}",
            end_code=f"NetStream.Play.{NASTY}",
        )
        for number in range(46, 50)
    ]
    nothing = {"first_frame_s": None, "video": 0, "keys": 0, "audio": 0, "delays": 0, "parsed": False}
    nothing |= {"delay_p50_ms": None, "delay_p95_ms": None, "delay_p99_ms": None, "delay_max_ms": None}
    closed = {"end": PeerEnd.SERVER_CLOSED, "cut": True, "ended_s": 4.0}
    peers.append(viewer(50, "B04", PeerKind.HOSTILE, expectation_met=True, **nothing, **closed))
    peers.append(viewer(51, "B04", PeerKind.HOSTILE, expectation_met=False, notes=NASTY, **nothing))
    peers.append(viewer(52, "publisher", PeerKind.PUBLISHER, **nothing))
    return peers


def some_samples(seconds=30):
    """A sample for each second of a run in which the stalled viewers are cut after 14 s."""
    samples = []
    for second in range(1, seconds + 1):
        healthy = min(40, second * 20)
        stalled = 4 if second < 14 else 0
        samples.append(
            RunSample(
                at_s=float(second),
                connected={"healthy": healthy, "slow@200k": 6, "stall": stalled, "B04": 1, "publisher": 1},
                playing={"healthy": healthy, "slow@200k": 6, "stall": stalled},
                received_bytes_per_s=1.5e7,
                frames_per_s=3400.0,
                missing={"healthy": 0, "slow@200k": second * 60, "stall": 0},
                pictures={"healthy": healthy * 30 * second, "slow@200k": second * 100, "stall": 0},
                missing_pictures={"healthy": 0, "slow@200k": second * 60, "stall": 0},
                cut={"stall": 4 - stalled, "B04": int(second > 4)},
                failed={"healthy": 0},
                delay_p50_ms=20.0 + second % 3,
                delay_p99_ms=45.0 + second % 7,
                server_cpu_percent=11.0 + second % 4,
                server_rss_bytes=60_000_000 + second * 10_000,
                server_fds=60,
                load_cpu_percent=20.0 + second % 5,
            )
        )
    return samples


def some_run(**values):
    rng = random.Random(7)
    delays = {
        name: sorted(math.exp(rng.gauss(math.log(middle), 0.4)) for _ in range(2000))
        for name, middle in (("healthy", 20.0), ("slow@200k", 900.0), ("stall", 60.0))
    }
    fields = {
        "url": "rtmp://127.0.0.1:1935/live/room",
        "command": "flowctl load rtmp://127.0.0.1/live/room --viewers 50 --profile healthy:80%",
        "began_at": "2026-01-01T12:00:00+00:00",
        "duration_s": 30.0,
        "profiles": dict(ASKED),
        "peers": some_peers(),
        "samples": some_samples(),
        "delays_ms": delays,
        "server_pid": 4711,
        "server_cpu_s": 3.3,
        "server_base_rss_bytes": 59_000_000,
    }
    return RunResult(**(fields | values))
