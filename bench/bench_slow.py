"""Slow viewers: on which step of the ladder they settle, what they get there, and whether it can be decoded.

One server, one stream of FFmpeg (H.264 with B-frames, so that there are disposable frames, and AAC), one viewer for
each share of its rate (20, 50 and 80 % unless others are given), beside one that keeps up. What counts is the second
half of the run: the step held for longest, the share of key frames, other frames and audio that was delivered, the
changes of step and of state per minute, the delay. What each viewer got is written as FLV and decoded by FFmpeg, which
must find no error. ``python bench/bench_slow.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

import processes
from flowctl.counts import Counts
from flowctl.flow import MessageClass
from flowctl.ladder import HELD_STEPS
from flowctl.live import LiveServer, build_live_server
from flowctl.live.statistics import ViewerStatistics
from flowctl.media.sample import SampleRecipe, ensure_sample, find_ffmpeg
from flowctl.serving import ServeOptions
from tables import print_rows

SHARES: Final = (0.2, 0.5, 0.8)
_STREAM: Final = "live/slow"
_LOOK_S: Final = 0.5
_END_S: Final = 30.0
"""A player that has not ended by itself so long after its run is a failure."""
RECIPE: Final = SampleRecipe(seconds=20, gop_s=2, width=640, height=360, video_bit_rate=1_500_000, b_frames=2)


@dataclass
class Watched:
    """One viewer: its share of the rate, and what was seen of it.

    Attributes:
        share: of the stream's rate at which it reads. None: as fast as it comes.
        path: what it got, as FLV.
        number: of its connection.
        half: figures in the middle of the run.
        last: the newest figures.
        delays_ms: one per look of the second half.
    """

    share: float | None
    path: Path
    number: int = -1
    half: ViewerStatistics | None = None
    last: ViewerStatistics | None = None
    delays_ms: list[float] = field(default_factory=list)


def run(
    seconds: float = 120.0, shares: Sequence[float] = SHARES, *, ladder: bool = True, keep: str | None = None
) -> list[dict[str, Any]]:
    """Let viewers of several speeds settle; return a row for each.

    Args:
        seconds: length of the run; the second half of it counts.
        shares: of the stream's rate at which the viewers read.
        ladder: whether the server steps slow viewers down.
        keep: directory for what the viewers got. None: a temporary one.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with contextlib.ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory()))
        sample = ensure_sample(folder, RECIPE)
        rate = sample.stat().st_size * 8 / RECIPE.seconds
        server = stack.enter_context(build_live_server(ServeOptions(ladder=ladder)))
        url = f"rtmp://127.0.0.1:{server.address[1]}/{_STREAM}"
        stack.enter_context(_flowctl("publish", str(sample), url, "--loop", "--duration", f"{seconds + 15:.0f}s"))
        time.sleep(2)
        viewers, players = [], []
        for share in (None, *shares):
            name = "all" if share is None else f"{share:.0%}".rstrip("%")
            watched = Watched(share, folder / f"viewer-{name}.flv")
            limit = () if share is None else ("--rate", f"{rate * share:.0f}")
            known = {viewer.number for viewer in _viewers(server)}
            command = ("play", url, "--output", str(watched.path), "--duration", f"{seconds:.0f}s", *limit)
            players.append(stack.enter_context(_flowctl(*command)))
            watched.number = _new_viewer(server, known)
            viewers.append(watched)
        _watch(server, viewers, seconds * 0.9)
        for player in players:  # each ends by itself
            player.wait(_END_S)
        return [_row(watched, seconds) for watched in viewers]


def _flowctl(*arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", *arguments]
    return processes.process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _viewers(server: LiveServer) -> list[ViewerStatistics]:
    stream = server.hub.snapshot().streams.get(_STREAM)
    return [] if stream is None else stream.viewers


def _new_viewer(server: LiveServer, known: set[int]) -> int:
    """Wait for a viewer that is not in `known` and return its number."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for viewer in _viewers(server):
            if viewer.number not in known:
                return viewer.number
        time.sleep(0.05)
    raise RuntimeError("the viewer did not come")


def _watch(server: LiveServer, watched: list[Watched], seconds: float) -> None:
    """Look at the viewers until the time is over."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        found = {viewer.number: viewer for viewer in _viewers(server)}
        for item in watched:
            item.last = found.get(item.number, item.last)
            if passed >= seconds / 2 and item.last is not None:
                item.half = item.half or item.last
                item.delays_ms.append(item.last.viewer_delay_ms)
        time.sleep(_LOOK_S)


def _row(item: Watched, seconds: float) -> dict[str, Any]:
    half, last = item.half, item.last
    if half is None or last is None:
        raise RuntimeError("a viewer was not seen in the second half of the run")
    before, after = half.sender, last.sender
    steps = [b - a for a, b in zip(before.time_in_steps_s, after.time_in_steps_s, strict=True)]
    minutes = seconds / 2 / 60
    errors, pictures = decode(item.path)
    delays = sorted(item.delays_ms)
    return {
        "reads": "all" if item.share is None else f"{item.share:.0%}",
        "step": max(HELD_STEPS, key=lambda step: steps[step]).name if any(steps) else "FULL",
        "key_percent": _percent(before.sent, after.sent, before.accepted, after.accepted, MessageClass.KEY),
        "inter_percent": _percent(before.sent, after.sent, before.accepted, after.accepted, MessageClass.INTER),
        "disposable_percent": _percent(
            before.sent, after.sent, before.accepted, after.accepted, MessageClass.DISPOSABLE
        ),
        "audio_percent": _percent(before.sent, after.sent, before.accepted, after.accepted, MessageClass.AUDIO),
        "delay_p50_ms": round(delays[len(delays) // 2]),
        "delay_max_ms": round(delays[-1]),
        "step_changes_per_min": round((after.step_changes - before.step_changes) / minutes, 1),
        "state_changes_per_min": round((after.transitions - before.transitions) / minutes, 1),
        "closed": "" if after.close_reason is None else after.close_reason.value,
        "pictures": pictures,
        "decode_errors": errors,
    }


def _percent(sent_before: Counts, sent: Counts, before: Counts, after: Counts, item: MessageClass) -> float:
    """Return which part of a class was delivered between two snapshots."""
    offered = after.of(item) - before.of(item)
    return round(100 * (sent.of(item) - sent_before.of(item)) / offered, 1) if offered else 100.0


def decode(path: Path) -> tuple[int, int]:
    """Decode a file with FFmpeg; return (lines of errors, pictures decoded)."""
    command = [str(find_ffmpeg()), "-nostdin", "-hide_banner", "-v", "error", "-err_detect", "explode"]
    command += ["-progress", "pipe:1", "-i", str(path)]
    # Pictures keep their own times, in ms: a constant frame rate would be made of those that a thinned viewer got.
    command += ["-fps_mode", "passthrough", "-enc_time_base:v", "1:1000", "-f", "null", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    frames = [line.partition("=")[2] for line in done.stdout.splitlines() if line.startswith("frame=")]
    return len(done.stderr.splitlines()), int(frames[-1]) if frames else 0


QUICK: Final[dict[str, Any]] = {"seconds": 8.0, "shares": (0.5,)}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="of the stream's rate, for example 0.2,0.5"
    )
    parser.add_argument("--no-ladder", action="store_true", help="let the drop policy act alone")
    parser.add_argument("--keep", help="directory for what the viewers got")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shares = [float(item) for item in arguments.shares.split(",")]
    rows = run(arguments.seconds, shares, ladder=not arguments.no_ladder, keep=arguments.keep)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
