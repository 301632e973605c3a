"""What viewers get behind real lines: a router with queues that drop, of single streams, sets and shared screens.

The viewers of `renditions`, but each is behind a line of a router (`kit.bottleneck`) in place of reading at its pace: a
shaper with a bucket and a queue, whose losses the server's TCP sees as it does those of the Internet. Each condition is
a queue, a congestion control and a bucket; in each the same crowd plays a single stream from flowctl, from nginx-rtmp
and from SRS where they are installed, and a set of three renditions from flowctl; then a shared screen with key frames
of 670 kB. Reported is what came of the pictures that were due, their delay and the longest time without one, and what
FFmpeg says of them. Rates of lines are with their packets' headers. Takes root, and is left out without.
``python bench lines``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from compare import rivals
from flowctl.errors import FlowctlError
from kit import bottleneck
from kit.bottleneck import Shape
from kit.sample import RENDITIONS, ScreenRecipe, rendition_recipes
from kit.tables import print_rows, table
from viewers.renditions import Published, length_s, lines_of, play, published
from viewers.slow import flowctl, rival

SHARES: Final = (0.3, 0.5, 0.8, 0.85, 0.95, 1.2)
SCREEN_SHARES: Final = (0.43, 0.6, 0.8, 0.95, 1.05)
CHANGING: Final = ("jump", "drop", "rise")
SHAPES: Final = (
    Shape(queue_ms=80),
    Shape(queue_ms=400),
    Shape(queue_ms=2000),
    Shape(queue_ms=80, congestion="bbr"),
    Shape(queue_ms=400, congestion="bbr"),
    Shape(queue_ms=2000, congestion="bbr"),
    Shape(queue_ms=400, bucket_bytes=64_000),
    Shape(queue_ms=400, bucket_bytes=256_000),
)
_LARGEST: Final = next(iter(RENDITIONS))
_SCREEN: Final = "screen"
_SCREEN_QUEUES_MS: Final = (400,)
"""Queues behind which a screen is watched: beside a key frame of ten seconds of the line they make no difference."""
FLOWCTL: Final = functools.partial(
    flowctl, "--host=0.0.0.0", "--renditions=" + ",".join(f"_{name}" for name in RENDITIONS)
)
RIVALS: Final = {"nginx-rtmp": (rivals.nginx, rivals.no_nginx), "SRS": (rivals.srs, rivals.no_srs)}


def run(
    window_s: float = 45.0,
    shares: Sequence[float] = SHARES,
    changing: Sequence[str] = CHANGING,
    screens: Sequence[float] = SCREEN_SHARES,
    shapes: Sequence[Shape] = SHAPES,
    servers: Sequence[str] = ("flowctl", *RIVALS),
) -> list[dict[str, Any]]:
    """Let the crowds play; return a row per condition, kind of viewer and line."""
    if why := bottleneck.absent():
        raise FlowctlError(why, hint="run it as root, where the kernel has network namespaces and htb")
    sent = published(rendition_recipes(length_s(window_s)))
    screen = published({_SCREEN: ScreenRecipe(seconds=length_s(window_s))})
    crowds: list[tuple[Published, Sequence[float], Sequence[str], str]] = [
        (sent, shares, changing, f"show_{_LARGEST}"),
        (screen, screens, (), f"show_{_SCREEN}"),
    ]
    rows: list[dict[str, Any]] = []
    for server in servers:
        if server in RIVALS and (why := RIVALS[server][1]()):
            sys.stderr.write(f"{server} is left out: {why}\n")
    for shape in shapes:
        for published_here, some, others, stream in crowds:
            if published_here is screen and shape.queue_ms not in _SCREEN_QUEUES_MS:
                continue
            lines = lines_of(some, others, window_s)
            for server in servers if lines else ():
                start, why_not = RIVALS.get(server, (None, str))
                if why_not():
                    continue
                serve = FLOWCTL if start is None else functools.partial(rival, start, "0.0.0.0")
                played = {server: stream}
                if start is None and published_here is sent:
                    played["set"] = "show"
                found = play(serve, played, published_here, lines, window_s, shape)
                content = _SCREEN if published_here is screen else "stream"
                rows += [{**shape._asdict(), "content": content, **row} for row in found]
                sys.stderr.write(f"{_words(shape)}: {content} from {server} played\n")
    return rows


def _words(shape: Shape) -> str:
    return f"{shape.congestion}, queue {shape.queue_ms} ms, bucket {shape.bucket_bytes // 1000} kB"


# -- what is shown


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per content and line, with a cell for each kind of viewer: the middle, and the worst condition."""
    return [
        {"content": content, "line": line} | {kind: _cell(_of(mine, kind)) for kind in _kinds(rows) if _of(mine, kind)}
        for content, line in dict.fromkeys((row["content"], row["line"]) for row in rows)
        for mine in ([row for row in rows if (row["content"], row["line"]) == (content, line)],)
    ]


def _by_shape(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per condition: the lines of a stream that are steady and too slow for it."""
    slow = [row for row in rows if row["content"] == "stream" and row["line"] in {"50%", "80%", "85%", "95%"}]
    return [
        {"router": _words(shape)} | {kind: _cell(_of(mine, kind)) for kind in _kinds(rows) if _of(mine, kind)}
        for shape in dict.fromkeys(Shape(*(row[name] for name in Shape._fields)) for row in rows)
        for mine in ([row for row in slow if Shape(*(row[name] for name in Shape._fields)) == shape],)
    ]


def _kinds(rows: list[dict[str, Any]]) -> list[str]:
    found = list(dict.fromkeys(row["viewer"] for row in rows))
    return sorted(found, key=lambda kind: (kind != "set", kind != "flowctl"))


def _of(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["viewer"] == kind]


def _cell(rows: list[dict[str, Any]]) -> str:
    came = [row["pictures_percent"] for row in rows]
    delays = [row["delay_p95_s"] for row in rows if row["delay_p95_s"] is not None]
    freezes = [row["freeze_s"] for row in rows]
    text = f"{statistics.median(came):.0f} ({min(came):.0f}) %"
    text += f", {statistics.median(delays):.1f} ({max(delays):.1f}) s" if delays else ", none came"
    text += f", {statistics.median(freezes):.1f} ({max(freezes):.1f}) s"
    counts = {name: sum(row[name] for row in rows) for name in ("broken", "decode_errors")}
    counts["closed"] = sum(bool(row["closed"]) for row in rows)
    return text + "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document: by line, and by what the router is."""
    del images
    mine = [row for row in rows if row["viewer"] in {"set", "flowctl"}]
    errors, closed = sum(row["broken"] + row["decode_errors"] for row in mine), sum(bool(row["closed"]) for row in mine)
    sound = min(row["sound_percent"] for row in mine)
    lines = [
        "Pictures, delay p95, longest time without a picture: the middle of the conditions, and in brackets the worst.",
        "",
        table(shown(rows)),
        "",
        f"Of flowctl's {len(mine)} viewers {closed} were closed; FFmpeg found {errors} errors in what they got.",
        f"The least share of the sound was {sound:.0f} %.",
        "",
        "By the router, steady lines of 50 to 95 %:",
        "",
        table(_by_shape(rows)),
    ]
    if late := max(row["reader_late_ms"] for row in rows):
        lines += ["", f"The viewers were woken up to {late} ms late."]
    return "\n".join(lines)


QUICK: Final[dict[str, Any]] = {
    "window_s": 8.0,
    "shares": (0.5,),
    "changing": ("drop",),
    "screens": (),
    "shapes": (Shape(),),
}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="length of the window")
    parser.add_argument("--quick", action="store_true", help="two lines, some seconds")
    parser.add_argument("--servers", default=",".join(("flowctl", *RIVALS)), help="which; default: all")
    parser.add_argument("--shapes", default="", help="queue:congestion:bucket,... in ms and bytes; default: eight")
    parser.add_argument("--json", action="store_true", help="every row instead of the table")
    arguments = parser.parse_args()
    servers = arguments.servers.split(",")
    words = [text.split(":") for text in arguments.shapes.split(",") if text]
    shapes = [Shape(int(queue), control, int(bucket)) for queue, control, bucket in words] or SHAPES
    chosen = {**QUICK, "servers": servers} if arguments.quick else {"window_s": arguments.seconds, "shapes": shapes}
    rows = run(**{"servers": servers, **chosen})
    print_rows(rows, as_json=True) if arguments.json else print(table(shown(rows)))


if __name__ == "__main__":
    main()
