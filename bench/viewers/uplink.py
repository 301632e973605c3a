"""What viewers of a far server get where the line to that server is short: a publisher's, or that of a relay's push.

A recording is published in real time through a line that carries a share of its rate (`programs/thinline.py`): by the
publisher of ``flowctl publish``, told to send all or left as it is, or to a server that pushes it on through that line.
A viewer without a line plays it from the far server. What counts is a window after a warm-up: the share of the pictures
that came, how late, and the longest time without one. What came is decoded by FFmpeg, which must find no error, no
picture may come without those that it needs (`broken`), and no sound may be missing. ``python bench uplink``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from flowctl.flv import TAG_AUDIO
from flowctl.wire.client.source import FlvFile
from kit import processes
from kit.machine import PROGRAMS
from kit.tables import print_rows
from programs.lines import Order, Plan, as_json
from viewers.slow import CHANGING, Case, Line, broken_pictures, decode, flowctl, lines_of, sample_of

WAYS: Final = ("publisher, all sent", "publisher", "relay")
CASE: Final = Case(bit_rate=1_500_000, gop_s=2.0, b_frames=0)
_FPS: Final = 30
_HEAD_S: Final = 1.0
_TAIL_S: Final = 4.0
_AT_ONCE: Final = 4
"""Lines that are measured side by side: five processes each, with two cores' worth of work for none of them."""


@contextlib.contextmanager
def thin_line(port: int, line: Line, rate: float) -> Iterator[int]:
    """Carry what comes to a port, which this yields, to another one at shares of `rate` bits per second."""
    _, steps, period_s = line
    scaled = json.dumps([(at_s, share * rate) for at_s, share in steps])
    command = [sys.executable, str(PROGRAMS / "thinline.py"), str(port), scaled, str(period_s)]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield int(processes.read_json(child)["port"])


def watch(way: str, line: Line, warm_s: float, window_s: float) -> dict[str, Any]:
    """Publish through one line, and watch at its other end; return the row of what came."""
    sample, rate = sample_of(CASE, _HEAD_S + warm_s + window_s + _TAIL_S)
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "seen.flv"
        far = stack.enter_context(flowctl())
        to = stack.enter_context(thin_line(far, line, rate))
        if way == "relay":
            near = stack.enter_context(flowctl("--push", f"live/*=rtmp://127.0.0.1:{to}/live/{{stream}}"))
            command = ["recordings.py", str(near), f"x={sample}"]
        else:
            target_delay = "off" if way.endswith("all sent") else "auto"
            command = ["publish_file.py", f"rtmp://127.0.0.1:{to}/live/x", str(sample), target_delay]
        program = [sys.executable, str(PROGRAMS / command[0]), *command[1:]]
        publishing = stack.enter_context(processes.process(program, stdout=subprocess.PIPE))
        began = float(processes.read_json(publishing)["began"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            publishing.wait(_HEAD_S)
        order = Order(stream="x", line="", steps=[], path=str(path))
        plan = Plan(port=far, began=began, warm_s=warm_s, window_s=window_s, orders=[order])
        crowd = [sys.executable, str(PROGRAMS / "lines.py")]
        reading = stack.enter_context(processes.process(crowd, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        processes.tell(reading, as_json(plan))
        (seen,) = processes.read_json(reading)["rows"]
        broken, (_, errors), missing = broken_pictures(sample, path), decode(str(path)), missing_sound(sample, path)
    sys.stderr.write(f"{way}, {line[0]}\n")
    return {
        "way": way,
        "line": line[0],
        "pictures_percent": round(100 * seen["pictures"] / (window_s * _FPS), 1),
        **{name: None if seen[name] is None else round(seen[name], 2) for name in ("delay_p50_s", "delay_p95_s")},
        "freeze_s": round(seen["freeze_s"], 2),
        "sound_missing": missing,
        "broken": broken,
        "decode_errors": errors,
        "closed": seen["closed"],
    }


def missing_sound(sample: Path, path: Path) -> int:
    """Return how many messages of sound did not come between the first and the last that did."""
    sent, came = ([bytes(tag.payload) for tag in FlvFile(item) if tag.type_id == TAG_AUDIO] for item in (sample, path))
    frames = [item for item in came if item[1]]  # less the headers, which are repeated
    return sent.index(frames[-1]) - sent.index(frames[0]) + 1 - len(frames)


def run(
    window_s: float = 60.0,
    warm_s: float = 10.0,
    shares: Sequence[float] = (0.5, 0.85),
    changing: Sequence[str] = tuple(CHANGING),
    ways: Sequence[str] = WAYS,
) -> list[dict[str, Any]]:
    """Measure each way on each line; return a row for each."""
    sample_of(CASE, _HEAD_S + warm_s + window_s + _TAIL_S)  # made once, before several want it
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pairs = list(itertools.product(ways, lines_of(shares, changing)))
        return list(pool.map(lambda pair: watch(pair[0], pair[1], warm_s, window_s), pairs))


QUICK: Final[dict[str, Any]] = {"window_s": 3.0, "warm_s": 2.0, "shares": (0.5,), "changing": (), "ways": WAYS[1:]}


def main() -> int:
    """Measure what the options say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--window", type=float, default=60.0, help="seconds")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.5, 0.85])
    parser.add_argument("--changing", nargs="*", choices=list(CHANGING), default=list(CHANGING))
    parser.add_argument("--json", action="store_true")
    found = parser.parse_args()
    print_rows(run(found.window, 10.0, found.shares, found.changing, found.ways), as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
