"""What slow viewers get: on lines of several rates, of H.264 with and without B-frames, beside other servers.

For each bit rate, time between key frames and kind of H.264 one stream, and for each line one viewer of it that reads
evenly at the rate of its line; beside them one without a line, by which the others are measured. The same crowd plays
from kit.machine import PROGRAMS from flowctl as it is, from flowctl told to leave nothing out (`all sent`), and from
nginx-rtmp where it is installed. What counts is a window after a warm-up: the share of the line that was used, of the
stream's pictures and sound that came, their delay, and the longest time without a picture. What each viewer got is
decoded by FFmpeg, which must find no error, and compared with the stream: no picture may come without those that it
needs (`broken`). ``python bench slow``; every row is kept in ``bench/results/slow.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from compare import rivals
from flowctl.charts.page import Figure
from flowctl.charts.pictures import Lines, Series
from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_VIDEO
from flowctl.wire.client.source import FlvFile
from flowctl.wire.rtmp.media.media import inspect
from kit import bottleneck, charts, processes
from kit.bottleneck import Bottleneck
from kit.machine import HERE, PROGRAMS
from kit.sample import SampleRecipe, ensure_sample, find_ffmpeg
from kit.tables import print_rows, table
from programs.lines import PICTURE_CLASSES, Order, Plan, as_json

SHARES: Final = (0.2, 0.5, 0.8, 0.85, 0.95)
BIT_RATES: Final = (1_500_000, 2_500_000)
GOPS_S: Final = (1.0, 2.0, 4.0)
B_FRAMES: Final = (0, 2)
CHANGING: Final = {
    "jump": ([(0.0, 1.2), (5.0, 0.3)], 10.0),
    "wifi": ([(0.0, 0.0), (0.4, 1.1)], 2.0),
}
"""Lines whose rate changes: (second, share of the stream's rate), and after how long it begins again."""

PICTURES: Final[dict[float, dict[str, float]]] = {
    1.0: {"20%": 1, "50%": 29, "80%": 75, "85%": 80, "95%": 91, "jump": 61, "wifi": 79},
    2.0: {"20%": 1, "50%": 31, "80%": 70, "85%": 77, "95%": 91, "jump": 59, "wifi": 82},
    4.0: {"20%": 0, "50%": 28, "80%": 67, "85%": 75, "95%": 89, "jump": 61, "wifi": 78},
}
"""Percent that can be had at a delay of 1.5 s, or three quarters of a group of pictures, by a simulation."""

CHART: Final = "slow.svg"
CACHE: Final = HERE / ".cache"
_AUDIO_BIT_RATE: Final = 96_000
HEAD_S: Final = 2.0
"""Head start of the publishers, in which they fill half of the largest cache."""
TAIL_S: Final = 4.0
_AT_ONCE: Final = 6
"""Streams that run side by side: 48 viewers, half of a core for those who read."""
LATE_S: Final = 0.05

Line = tuple[str, list[tuple[float, float]], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stream.

    Args:
        bit_rate: of picture and sound, as asked of the encoder.
        gop_s: time between key frames.
    """

    bit_rate: int
    gop_s: float
    b_frames: int

    @property
    def name(self) -> str:
        """Name of the stream."""
        return f"{self.bit_rate // 1000}k-{self.gop_s:g}s-b{self.b_frames}"


@contextlib.contextmanager
def flowctl(*options: str) -> Iterator[int]:
    """Run the live server for the time of a block; its port."""
    command = [sys.executable, str(PROGRAMS / "live_server.py"), *options]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield int(processes.read_json(child)["port"])


@contextlib.contextmanager
def rival(start: Callable[[rivals.Settings], AbstractContextManager[rivals.Running]], host: str) -> Iterator[int]:
    """Run another server for the time of a block; its port."""
    with start(rivals.Settings(viewers=900, bit_rate=0, host=host)) as running:
        yield running.port


nginx: Final = functools.partial(rival, rivals.nginx, "127.0.0.1")


SERVERS: Final[dict[str, Callable[[], AbstractContextManager[int]]]] = {
    "flowctl": flowctl,
    "all sent": functools.partial(flowctl, "--all-sent"),
    "nginx-rtmp": nginx,
}


def lines_of(shares: Sequence[float], changing: Sequence[str]) -> list[Line]:
    """Return the lines by name, with their steps as shares of the stream's rate."""
    constant: list[Line] = [(f"{share:.0%}", [(0.0, share)], 0.0) for share in shares]
    return constant + [(name, *CHANGING[name]) for name in changing]


def sample_of(case: Case, seconds: float) -> tuple[Path, float]:
    """Return the recording of a case and its bit rate; made once."""
    CACHE.mkdir(exist_ok=True)
    video = case.bit_rate - _AUDIO_BIT_RATE
    recipe = SampleRecipe(seconds=seconds, gop_s=case.gop_s, video_bit_rate=video, b_frames=case.b_frames)
    path = ensure_sample(CACHE, recipe)
    return path, path.stat().st_size * 8 / seconds


def run(
    window_s: float = 60.0,
    warm_s: float = 10.0,
    shares: Sequence[float] = SHARES,
    changing: Sequence[str] = tuple(CHANGING),
    bit_rates: Sequence[int] = BIT_RATES,
    gops_s: Sequence[float] = GOPS_S,
    b_frames: Sequence[int] = B_FRAMES,
    servers: Sequence[str] = tuple(SERVERS),
) -> list[dict[str, Any]]:
    """Let the crowd play from each server; return a row per server, stream and line."""
    cases = [
        Case(bit_rate=rate, gop_s=gop, b_frames=most)
        for gop, rate, most in itertools.product(gops_s, bit_rates, b_frames)
    ]
    rows: list[dict[str, Any]] = []
    for name in servers:
        if name == "nginx-rtmp" and (why := rivals.no_nginx()):
            sys.stderr.write(f"nginx-rtmp is left out: {why}\n")
            continue
        for some in _batches(cases):
            rows += play(name, some, lines_of(shares, changing), warm_s, window_s)
            sys.stderr.write(f"{name}: {', '.join(case.name for case in some)}\n")
    return rows


def _batches(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for at in range(0, len(cases), _AT_ONCE):
        yield cases[at : at + _AT_ONCE]


def play(
    server: str, cases: Sequence[Case], lines: Sequence[Line], warm_s: float, window_s: float
) -> list[dict[str, Any]]:
    """Let one crowd play some streams from a server; decode what it got."""
    seconds = HEAD_S + warm_s + window_s + TAIL_S
    samples = {case.name: sample_of(case, seconds) for case in cases}
    with tempfile.TemporaryDirectory() as folder, SERVERS[server]() as port:
        orders = []
        for name, (_, rate) in samples.items():
            orders.append(Order(stream=name, line="", steps=[]))
            for line, steps, period_s in lines:
                path = str(Path(folder) / f"{name}-{line.rstrip('%')}.flv")
                scaled = [[at_s, share * rate] for at_s, share in steps]
                orders.append(Order(stream=name, line=line, steps=scaled, period_s=period_s, path=path))
        found = watch(port, {name: path for name, (path, _) in samples.items()}, orders, warm_s, window_s)
        with ThreadPoolExecutor(2) as pool:
            decoded = dict(pool.map(decode, [order.path for order in orders if order.path]))
        broken = {
            order.path: broken_pictures(samples[order.stream][0], Path(order.path)) for order in orders if order.path
        }
    by_name = {case.name: case for case in cases}
    return [
        _row(server, by_name[stream], item, group, found["late_s"])
        | {"broken": broken[item["path"]], "decode_errors": decoded[item["path"]]}
        for stream, group in _by_stream(found["rows"]).items()
        for item in group
        if item["line"]
    ]


def watch(
    port: int,
    streams: dict[str, Path],
    orders: list[Order],
    warm_s: float,
    window_s: float,
    *,
    head_s: float = HEAD_S,
    each: bool = False,
    router: Bottleneck | None = None,
) -> dict[str, Any]:
    """Publish recordings to a server, and let a crowd watch them; return what `programs/lines.py` says.

    Behind a router the lines are its own, one for each order, and begin to change now.
    """
    named = [f"{name}={path}" for name, path in streams.items()]
    publisher = [sys.executable, str(PROGRAMS / "recordings.py"), str(port), *named]
    with processes.process(publisher, stdout=subprocess.PIPE) as publishing:
        began = float(processes.read_json(publishing)["began"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            publishing.wait(head_s)
        plan = Plan(port=port, began=began, warm_s=warm_s, window_s=window_s, orders=orders, each=each)
        crowd = [sys.executable, str(PROGRAMS / "lines.py")]
        if router is not None:
            behind = [dataclasses.replace(order, source=router.source(at)) for at, order in enumerate(orders)]
            plan = dataclasses.replace(plan, host=bottleneck.SERVER, orders=behind)
            crowd = [*router.viewers, *crowd]
            router.begin()
        with processes.process(crowd, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reading:
            processes.tell(reading, as_json(plan))
            return processes.read_json(reading)


def _by_stream(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["stream"], []).append(row)
    return found


def _row(server: str, case: Case, item: dict[str, Any], group: list[dict[str, Any]], late_s: float) -> dict[str, Any]:
    """Return the row of one viewer, measured by the one of its stream that has no line."""
    whole = next(row for row in group if not row["line"])
    could = min(item["line_bytes"], whole["bytes"])
    return {
        "server": server,
        **dataclasses.asdict(case),
        "line": item["line"],
        "used_percent": _percent(item["bytes"], could),
        "pictures_percent": _percent(item["pictures"], whole["pictures"]),
        "delay_p50_s": _rounded(item["delay_p50_s"]),
        "delay_p95_s": _rounded(item["delay_p95_s"]),
        "freeze_s": round(item["freeze_s"], 3),
        "audio_percent": _percent(item["audio"], whole["audio"]),
        "closed": item["closed"],
        "reader_late_ms": round(late_s * 1000) if late_s > LATE_S else 0,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


def broken_pictures(sample: Path, path: Path) -> int:
    """Return how many pictures came although one that they need had not come since the last key frame.

    FFmpeg tells of it only where there are B-frames: else it takes another picture for the missing one, silently.
    """
    published = list(_pictures(sample))
    places: dict[bytes, list[int]] = {}
    for place, (payload, _) in enumerate(published):
        places.setdefault(payload, []).append(place)
    last, whole, broken = -1, False, 0
    for payload, kind in _pictures(path):  # by content: nginx-rtmp writes timestamps of its own
        place = next(place for place in places[payload] if place > last)
        missing = (kind for _, kind in published[last + 1 : place])
        whole = kind is MessageClass.KEY or (whole and all(kind is MessageClass.DISPOSABLE for kind in missing))
        broken += not whole
        last = place
    return broken


def _pictures(path: Path) -> Iterator[tuple[bytes, MessageClass]]:
    """Yield content and class of each picture of an FLV file."""
    for tag in FlvFile(path):
        if tag.type_id == TAG_VIDEO:
            kind = inspect(tag.type_id, tag.payload).message_class
            if kind in PICTURE_CLASSES:
                yield bytes(tag.payload), kind


def decode(path: str) -> tuple[str, int]:
    """Decode a file with FFmpeg; return its path and how many lines of errors there were."""
    command = [str(find_ffmpeg()), "-nostdin", "-hide_banner", "-v", "error", "-err_detect", "explode"]
    # Pictures keep their own times, in ms: a constant frame rate would be made of those that a thinned viewer got.
    command += [
        "-threads",
        "1",
        "-i",
        path,
        "-fps_mode",
        "passthrough",
        "-enc_time_base:v",
        "1:1000",
        "-f",
        "null",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return path, len(done.stderr.splitlines()) or done.returncode


# -- what is shown


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per kind of stream and line, with a cell for each server: the middle of its bit rates."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    found = []
    for kind in dict.fromkeys((row["gop_s"], row["b_frames"], row["line"]) for row in rows):
        gop, b_frames, line = kind
        some = [row for row in rows if (row["gop_s"], row["b_frames"], row["line"]) == kind]
        cells = {name: _cell([row for row in some if row["server"] == name]) for name in servers}
        found.append({"GOP": f"{gop:g} s{', B' if b_frames else ''}", "line": line, **cells})
    return sorted(found, key=lambda row: row["GOP"])


def missed(row: dict[str, Any]) -> list[str]:
    """Return what a row falls short of: most of the line, most of the pictures that it can carry, and that in time."""
    changing = row["line"] in CHANGING
    least = {
        "line": (row["used_percent"], 90 if changing else 95),
        "pictures": (row["pictures_percent"], 0.9 * PICTURES.get(row["gop_s"], {}).get(row["line"], 0)),
    }
    found = [f"{name} {value:.0f} %, wanted {wanted:.0f}" for name, (value, wanted) in least.items() if value < wanted]
    most_s = min(max(1.5, 0.75 * row["gop_s"]), 4.0) + 0.5
    if row["line"] != "20%" and (row["delay_p95_s"] is None or row["delay_p95_s"] > most_s):
        found.append(f"delay p95 {row['delay_p95_s']} s, wanted {most_s:.1f}")
    if row["broken"] or row["decode_errors"]:
        found.append(f"{row['broken']} broken pictures, {row['decode_errors']} errors of decoding")
    return [*found, row["closed"]] if row["closed"] else found


def _middle(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


_FAULTS: Final = ("broken", "decode_errors", "closed")


def _cell(rows: list[dict[str, Any]]) -> str:
    used, pictures, audio = (_middle(rows, f"{key}_percent") for key in ("used", "pictures", "audio"))
    p50, p95, freeze = (_middle(rows, key) for key in ("delay_p50_s", "delay_p95_s", "freeze_s"))
    if used is None or pictures is None or audio is None or freeze is None:
        return ""
    delay = "none came" if p50 is None or p95 is None else f"{p50:.1f} / {p95:.1f} s"
    text = f"{used:.0f} %, {pictures:.0f} %, {delay}, {freeze:.1f} s, {audio:.0f} %"
    counts = {name: sum(int(bool(row[name])) if name == "closed" else row[name] for row in rows) for name in _FAULTS}
    return text + "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Draw the chart, and return the part of the document: chart and table."""
    alt = (
        "Share of the pictures and delay of viewers on constant lines, by the share of the stream that the line carries"
    )
    chart(rows, images / CHART, alt)
    errors, broken = (sum(row[name] for row in rows if row["server"] == "flowctl") for name in _FAULTS[1::-1])
    late = max(row["reader_late_ms"] for row in rows)
    rates = " and ".join(f"{rate / 1e6:g}" for rate in dict.fromkeys(row["bit_rate"] for row in rows))
    lines = [
        f"![{alt}](images/{CHART})",
        "",
        (
            "Line used, pictures, delay p50 / p95, longest time without a picture, sound; means over streams of "
            f"{rates} Mbit/s; B: with B-frames."
        ),
        "",
        table(shown(rows)),
        "",
        f"FFmpeg found {errors} errors in what flowctl's viewers got, and {broken} pictures lacked one that they need.",
    ]
    short = [(row, missed(row)) for row in rows if row["server"] == "flowctl" and missed(row)]
    lines += ["", f"Short of what is wanted ({len(short)}):", ""] if short else []
    lines += [
        f"- {row['bit_rate'] / 1e6:g} Mbit/s, GOP {row['gop_s']:g} s{', B' if row['b_frames'] else ''}, {row['line']}: "
        + "; ".join(what)
        for row, what in short
    ]
    if late:
        lines += ["", f"The viewers were woken up to {late} ms late."]
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path, alt: str) -> None:
    """Draw pictures and delay against the line, of the middle time between key frames, without B-frames."""
    gops = sorted({row["gop_s"] for row in rows})
    gop = gops[len(gops) // 2]
    constant = [row for row in rows if row["line"].endswith("%") and row["gop_s"] == gop and not row["b_frames"]]
    servers = list(dict.fromkeys(row["server"] for row in constant))
    found: dict[str, list[Series]] = {"pictures_percent": [], "delay_p95_s": []}
    for key, series in found.items():
        for number, name in enumerate(servers, 1):
            mine = [row for row in constant if row["server"] == name]
            places = sorted({float(row["line"].rstrip("%")) for row in mine})
            middles = [
                (at, _middle([row for row in mine if float(row["line"].rstrip("%")) == at], key)) for at in places
            ]
            series.append(Series(name, [(at, value) for at, value in middles if value is not None], number))
    found["pictures_percent"].insert(0, Series("the line itself", [(20.0, 20.0), (95.0, 95.0)], 0))
    label = f"line, % of the stream's rate (GOP {gop:g} s, no B-frames)"
    panels = [
        Lines(
            name=key,
            title=title,
            description=alt,
            series=found[key],
            x_label=label,
            y_label=unit,
            y_log=key == "delay_p95_s",
        )
        for key, title, unit in (
            ("pictures_percent", "What share of the pictures did viewers get?", "pictures, % of the stream's"),
            ("delay_p95_s", "How late were they?", "delay p95, s (logarithmic)"),
        )
    ]
    charts.save([Figure(item) for item in panels if not item.empty], path, alt)


QUICK: Final[dict[str, Any]] = {
    "window_s": 6.0,
    "warm_s": 2.0,
    "shares": (0.5, 0.85),
    "changing": ("wifi",),
    "bit_rates": (1_500_000,),
    "gops_s": (1.0,),
    "b_frames": (0,),
}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the window")
    parser.add_argument("--quick", action="store_true", help="one stream, three lines, some seconds")
    parser.add_argument("--servers", default=",".join(SERVERS), help="which; default: all")
    parser.add_argument("--gops", default=",".join(f"{gop:g}" for gop in GOPS_S), help="times between key frames, s")
    parser.add_argument("--json", action="store_true", help="every row instead of the table")
    arguments = parser.parse_args()
    servers = arguments.servers.split(",")
    gops = [float(text) for text in arguments.gops.split(",")]
    rows = run(servers=servers, **QUICK) if arguments.quick else run(arguments.seconds, gops_s=gops, servers=servers)
    print_rows(rows, as_json=True) if arguments.json else print(table(shown(rows)))


if __name__ == "__main__":
    main()
