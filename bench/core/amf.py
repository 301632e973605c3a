"""How fast AMF0 is encoded and decoded: the messages that every RTMP connection begins with.

Run ``python bench amf``. Every figure stands beside that of `json`, which is written in C, for the same values
in the same process, because figures of one machine at one moment mean little by themselves: compare the ratio.
The messages are those of OBS (connect, onMetaData) and of a server's onStatus, and, as the worst case that the default
limits admit, metadata with a keyframe index of 4000 numbers.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import EcmaArray, simplify

CONNECT = (
    "connect",
    1.0,
    {
        "app": "live",
        "type": "nonprivate",
        "flashVer": "FMLE/3.0 (compatible; FMSc/1.0)",
        "swfUrl": "rtmp://localhost:1935/live",
        "tcUrl": "rtmp://localhost:1935/live",
        "fpad": False,
        "capabilities": 15.0,
        "audioCodecs": 3191.0,
        "videoCodecs": 252.0,
        "videoFunction": 1.0,
        "objectEncoding": 0.0,
    },
)
METADATA = (
    "@setDataFrame",
    "onMetaData",
    EcmaArray(
        {
            "duration": 0.0,
            "fileSize": 0.0,
            "width": 1920.0,
            "height": 1080.0,
            "videocodecid": 7.0,
            "videodatarate": 2500.0,
            "framerate": 30.0,
            "audiocodecid": 10.0,
            "audiodatarate": 160.0,
            "audiosamplerate": 48000.0,
            "audiosamplesize": 16.0,
            "audiochannels": 2.0,
            "stereo": True,
            **dict.fromkeys(("2.1", "3.1", "4.0", "4.1", "5.1", "7.1"), False),
            "encoder": "obs-output module (libobs version 30.2.3)",
        }
    ),
)
STATUS = (
    "onStatus",
    0.0,
    None,
    {"level": "status", "code": "NetStream.Publish.Start", "description": "live/stream is now published."},
)
KEYFRAMES = (
    "onMetaData",
    {
        "keyframes": {
            "times": [2.0 * index for index in range(2000)],
            "filepositions": [625_000.0 * index for index in range(2000)],
        }
    },
)
MESSAGES: dict[str, tuple[Any, ...]] = {
    "connect": CONNECT,
    "onMetaData": METADATA,
    "onStatus": STATUS,
    "keyframe index": KEYFRAMES,
}


def seconds_per_call(call: Callable[[], object], budget_s: float) -> float:
    """Return the least time of one `call` in five runs, which together take about `budget_s` seconds.

    The least and not the mean: whatever else the machine does can only add time.
    """
    timer = timeit.Timer(call)
    once_s = min(timer.repeat(repeat=3, number=1))
    number = max(1, round(budget_s / 5 / once_s))
    return min(timer.repeat(repeat=5, number=number)) / number


QUICK: Final[dict[str, Any]] = {"budget_s": 0.01}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def run(budget_s: float = 1.0) -> list[dict[str, Any]]:
    """Measure encoding and decoding of every message."""
    rows: list[dict[str, Any]] = []
    for message, values in MESSAGES.items():
        plain = [simplify(value) for value in values]
        text = json.dumps(plain)
        json_s = {
            "decode": seconds_per_call(partial(json.loads, text), budget_s),
            "encode": seconds_per_call(partial(json.dumps, plain), budget_s),
        }
        data = amf0.encode(*values)
        calls: dict[str, Callable[[], object]] = {
            "decode": partial(amf0.decode, data),
            "encode": partial(amf0.encode, *values),
        }
        for direction, call in calls.items():
            taken_s = seconds_per_call(call, budget_s)
            rows.append(
                {
                    "message": message,
                    "direction": direction,
                    "size_bytes": len(data),
                    "us": taken_s * 1e6,
                    "mb_per_s": len(data) / taken_s / 1e6,
                    "times_json": taken_s / json_s[direction],
                }
            )
    return rows


def main() -> None:
    """Print the rows of `run` as a table, or as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description="Speed of the AMF0 codec beside json.")
    parser.add_argument(
        "--budget", type=float, default=1.0, metavar="SECONDS", help="time for each figure (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    arguments = parser.parse_args()
    rows = run(arguments.budget)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'message':<16}{'direction':<10}{'bytes':>7}{'us':>9}{'MB/s':>8}{'x json':>8}")
    for row in rows:
        print(
            f"{row['message']:<16}{row['direction']:<10}{row['size_bytes']:>7}"
            f"{row['us']:>9.1f}{row['mb_per_s']:>8.1f}{row['times_json']:>8.1f}"
        )


if __name__ == "__main__":
    main()
