"""The shapes in which SRS answers (its HTTP API, version 1), so that exporters and panels made for it work; read-only.

Ids of clients are our numbers of connections, as text. What nobody here knows (pages, widths) is left out or empty, as
SRS does for clients of other protocols. Rates are means between two questions, of 30 s at most, or since the beginning.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from flowctl.live.access.request import stream_id

Json: TypeAlias = dict[str, Any]
SERVER: Final = "flowctl"
_VHOST: Final = "__defaultVhost__"
_CODECS: Final = {"avc1": "H264", "hvc1": "HEVC", "av01": "AV1", "mp4a": "AAC", ".mp3": "MP3"}
"""How SRS calls codecs, by their FourCC."""
_WINDOW_S: Final = 30.0
_MOST_RATES: Final = 4096
"""Streams and clients whose rates are remembered: more than a page has, again and again."""


class Rates:
    """Rates of counters between two questions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        # By name: when it was asked for first in this window, with what value, and the rate of the last one.
        self._known: Final[OrderedDict[str, tuple[float, int, float | None]]] = OrderedDict()

    def kbps(self, name: str, size_bytes: int, open_s: float) -> int:
        """Return the rate of a counter in kbit/s."""
        now = self._clock()
        began_at, value, last = self._known.get(name, (now, size_bytes, None))
        if size_bytes < value:  # it began anew
            began_at, value, last = now, size_bytes, None
        passed_s = now - began_at
        if passed_s >= 1.0:
            last = (size_bytes - value) / passed_s
            if passed_s >= _WINDOW_S:
                began_at, value = now, size_bytes
        self._known[name] = began_at, value, last
        self._known.move_to_end(name)
        if len(self._known) > _MOST_RATES:
            self._known.popitem(last=False)
        rate = size_bytes / max(open_s, 1.0) if last is None else last
        return round(rate * 8 / 1000)


def parts_of(name: str) -> tuple[str, str]:
    """Return application and stream of ``app/stream``."""
    app, _, stream = name.rpartition("/")
    return app, stream


def shaped_stream(row: Mapping[str, Any], rates: Rates, up_s: float, now_ms: int) -> Json:
    """Return what SRS tells of a stream."""
    name = str(row["stream"])
    app, stream = parts_of(name)
    video, audio = (row["codecs"].get(kind) for kind in ("video", "audio"))
    return {
        "id": stream_id(name),
        "name": stream,
        "vhost": _VHOST,
        "app": app,
        "tcUrl": f"rtmp://{SERVER}/{app}",
        "url": f"/{name}",
        "live_ms": now_ms,
        "clients": row["viewers"] + (row["publisher"] is not None),
        "frames": row["in_frames"],
        "send_bytes": row["sent_bytes"],
        "recv_bytes": row["in_bytes"],
        "kbps": {
            "recv_30s": rates.kbps(f"{name} in", row["in_bytes"], up_s),
            "send_30s": rates.kbps(f"{name} out", row["sent_bytes"], up_s),
        },
        "publish": {
            "active": row["publisher"] is not None,
            "cid": "" if row["connection"] is None else str(row["connection"]),
        },
        "video": None if video is None else {"codec": _CODECS.get(video, video)},
        "audio": None if audio is None else {"codec": _CODECS.get(audio, audio)},
    }


def shaped_client(row: Mapping[str, Any], rates: Rates) -> Json:
    """Return what SRS tells of a client."""
    number, name = str(row["connection"]), str(row["stream"] or "")
    app, stream = parts_of(name)
    publishes = row["role"] == "publisher"
    kind = str(row["protocol"])
    return {
        "id": number,
        "vhost": _VHOST,
        "stream": stream_id(name) if name else "",
        "ip": str(row["peer"]).rpartition(":")[0].strip("[]"),
        "pageUrl": "",
        "swfUrl": "",
        "tcUrl": f"rtmp://{SERVER}/{app}",
        "url": f"/{name}",
        "name": stream,
        "type": f"{kind}-publish" if publishes else f"{kind}-play",
        "publish": publishes,
        "alive": row["open_s"],
        "send_bytes": row["sent_bytes"],
        "recv_bytes": row["received_bytes"],
        "kbps": {
            "recv_30s": rates.kbps(f"{number} in", row["received_bytes"], row["open_s"]),
            "send_30s": rates.kbps(f"{number} out", row["sent_bytes"], row["open_s"]),
        },
    }


def head(pid: int) -> Json:
    """Return what each answer of SRS begins with."""
    return {"code": 0, "server": SERVER, "service": SERVER, "pid": str(pid)}


def version_of(version: str) -> Json:
    """Return what SRS tells of its version."""
    numbers = [int(part) if part.isdecimal() else 0 for part in (*version.split("."), "0", "0", "0")[:3]]
    return {"major": numbers[0], "minor": numbers[1], "revision": numbers[2], "version": version}


class Summaries:
    """What SRS tells of its process and the machine. One thread at a time."""

    def __init__(self) -> None:
        self._last = time.monotonic(), sum(os.times()[:4])

    def summary(self, server: Mapping[str, Any], version: str, totals: tuple[int, int]) -> Json:
        at, used_s = self._last
        now, now_used_s = time.monotonic(), sum(os.times()[:4])
        if now - at >= 1.0:
            self._last = now, now_used_s
        share = 100 * (now_used_s - used_s) / max(now - at, 0.001)
        memory_kb, whole_kb = _resident_kb(), _memory_kb("MemTotal")
        free_kb = _memory_kb("MemAvailable")
        load = os.getloadavg()
        now_ms = int(time.time() * 1000)
        return {
            "ok": True,
            "now_ms": now_ms,
            "self": {
                "version": version,
                "pid": server["pid"],
                "ppid": os.getppid(),
                "argv": "flowctl",  # options may name files that are nobody's business
                "cwd": "",
                "mem_kbyte": memory_kb,
                "mem_percent": round(memory_kb / whole_kb, 4) if whole_kb else 0.0,
                "cpu_percent": round(share / 100, 4),
                "srs_uptime": int(server["up_s"]),
            },
            "system": {
                "cpu_percent": round(min(1.0, load[0] / (os.cpu_count() or 1)), 4),
                "mem_ram_kbyte": whole_kb,
                "mem_ram_percent": round(1 - free_kb / whole_kb, 4) if whole_kb else 0.0,
                "cpus": os.cpu_count() or 1,
                "cpus_online": os.cpu_count() or 1,
                "uptime": time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else 0.0,
                "load_1m": round(load[0], 2),
                "load_5m": round(load[1], 2),
                "load_15m": round(load[2], 2),
                "srs_sample_time": now_ms,
                "srs_recv_bytes": totals[0],
                "srs_send_bytes": totals[1],
                "conn_srs": server["connections"],
            },
        }


def _resident_kb() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize() // 1024


def _memory_kb(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
