"""What slow viewers get of a set: the rendition that the server chooses, beside pictures left out and nothing left out.

One content in three renditions, 2.5, 1.2 and 0.5 Mbit/s, and for each line one viewer that reads evenly at the rate of
its line, a share of the largest one's. Viewers of the set (`renditions`) and of the largest one alone (`cutting`) play
from flowctl, viewers of the largest one from nginx-rtmp where it is installed. What counts are all pictures that are
due within the window, which begins with the first one of a viewer: the share that came, their delay, the longest time
without one after the first switch, the time in each rendition and in the largest that the line carries at that moment,
and the switches. What each viewer got is decoded by FFmpeg, which must find no error, and no picture may come without
those before it (`broken`). ``python bench renditions``; every row is kept in ``bench/results/renditions.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

from compare import rivals
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.wire.client.source import FlvFile
from flowctl.wire.rtmp.media.media import inspect
from kit.bottleneck import Bottleneck, Shape
from kit.bottleneck import Line as RouterLine
from kit.sample import RENDITIONS, SampleRecipe, ensure_sample, rendition_recipes
from kit.tables import print_rows, table
from programs.lines import Order
from viewers.slow import CACHE, LATE_S, TAIL_S, decode, flowctl, nginx, watch

SHARES: Final = (0.3, 0.5, 0.85, 1.2, 3.0)
CHANGING: Final = ("jump", "drop", "rise")
FPS: Final = 30
SOUND_S: Final = 1024 / 48_000
TARGET_S: Final = 1.5
SIZES: Final = {f"{width}x{height}": name for name, (width, height, _) in RENDITIONS.items()}
_LARGEST: Final = next(iter(RENDITIONS))
_HEAD_S: Final = 6.0
"""Head start of the publishers: the server looks at their clocks for 1.5 s, and each joins the set with a key frame."""
PLAYED: Final = {
    "renditions": ("flowctl", "show"),
    "cutting": ("flowctl", f"show_{_LARGEST}"),
    "nginx-rtmp": ("nginx-rtmp", f"show_{_LARGEST}"),
}
"""Which server each kind of viewer plays from, and which stream."""
SERVERS: Final[dict[str, Callable[[], AbstractContextManager[int]]]] = {
    "flowctl": functools.partial(flowctl, "--renditions=" + ",".join(f"_{name}" for name in RENDITIONS)),
    "nginx-rtmp": nginx,
}


class Line(NamedTuple):
    """What passes: (second, share of the largest rendition's rate), and after how long it begins again."""

    steps: list[tuple[float, float]]
    period_s: float

    def carries(self, second: float) -> float:
        """Return the share that can be relied on at a second: where it swings, the least."""
        if self.period_s < 60.0:
            return min(share for _, share in self.steps)
        return next(share for at_s, share in reversed(self.steps) if at_s <= max(second, 0.0))


def lines_of(shares: Sequence[float], changing: Sequence[str], window_s: float) -> dict[str, Line]:
    """Return the lines by name; `drop` and `rise` change once, in the middle of the window."""
    never_s = max(2 * window_s, 60.0)
    others = {
        "jump": Line([(0.0, 1.2), (5.0, 0.3)], 10.0),
        "drop": Line([(0.0, 1.2), (window_s / 2, 0.3)], never_s),
        "rise": Line([(0.0, 0.3), (window_s / 2, 1.2)], never_s),
    }
    return {f"{share:.0%}": Line([(0.0, share)], never_s) for share in shares} | {
        name: others[name] for name in changing
    }


class Published(NamedTuple):
    """What the publisher sends."""

    paths: dict[str, Path]
    rates: dict[str, float]
    pictures_s: list[float]
    sound_s: list[float]
    fps: int = FPS

    @property
    def largest(self) -> str:
        return next(iter(self.rates))


def published(recipes: dict[str, SampleRecipe]) -> Published:
    """Return recordings, the largest first, made once, and when their pictures and pieces of sound are due."""
    CACHE.mkdir(exist_ok=True)
    paths = {name: ensure_sample(CACHE, recipe) for name, recipe in recipes.items()}
    first = next(iter(recipes))
    seconds = recipes[first].seconds
    due: dict[int, list[float]] = {TAG_VIDEO: [], TAG_AUDIO: []}
    for tag in FlvFile(paths[first]):
        info = inspect(tag.type_id, tag.payload)
        if tag.type_id in due and info.packet == "coded":
            due[tag.type_id].append(tag.timestamp / 1000)
    rates = {name: path.stat().st_size * 8 / seconds for name, path in paths.items()}
    return Published(paths, rates, due[TAG_VIDEO], due[TAG_AUDIO], recipes[first].fps)


def length_s(window_s: float) -> float:
    """Return how long a recording for a window is."""
    return _HEAD_S + window_s + 2 * TAIL_S


def run(
    window_s: float = 120.0,
    shares: Sequence[float] = SHARES,
    changing: Sequence[str] = CHANGING,
    kinds: Sequence[str] = tuple(PLAYED),
) -> list[dict[str, Any]]:
    """Let the crowds play; return a row per kind of viewer and line."""
    lines = lines_of(shares, changing, window_s)
    sent = published(rendition_recipes(length_s(window_s)))
    rows: list[dict[str, Any]] = []
    for server in dict.fromkeys(PLAYED[kind][0] for kind in kinds):
        if server == "nginx-rtmp" and (why := rivals.no_nginx()):
            sys.stderr.write(f"nginx-rtmp is left out: {why}\n")
            continue
        streams = {kind: PLAYED[kind][1] for kind in kinds if PLAYED[kind][0] == server}
        rows += play(SERVERS[server], streams, sent, lines, window_s)
        sys.stderr.write(f"{server}: played\n")
    return rows


def play(
    serve: Callable[[], AbstractContextManager[int]],
    played: dict[str, str],
    sent: Published,
    lines: dict[str, Line],
    window_s: float,
    shape: Shape | None = None,
) -> list[dict[str, Any]]:
    """Let one crowd play from a server, which stream each kind of viewer plays is `played`; decode what it got.

    With the shape of a router the lines are those of one; else viewers read at the pace of theirs.
    """
    rate = sent.rates[sent.largest]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        viewers = {f"{folder}/{kind}-{name}.flv": (kind, name) for kind in played for name in lines}
        orders = [
            Order(
                stream=played[kind],
                line=name,
                steps=[[at_s, share * rate] for at_s, share in lines[name].steps],
                period_s=lines[name].period_s,
                path=path,
            )
            for path, (kind, name) in viewers.items()
        ]
        behind = [RouterLine([(at_s, bits) for at_s, bits in order.steps], order.period_s) for order in orders]
        router = None if shape is None else running.enter_context(Bottleneck(behind, shape))
        port = running.enter_context(serve())
        streams = {f"show_{name}": path for name, path in sent.paths.items()}
        found = watch(port, streams, orders, 0.0, window_s + TAIL_S, head_s=_HEAD_S, each=True, router=router)
        with ThreadPoolExecutor(2) as pool:
            errors = dict(pool.map(decode, viewers))
    late_ms = round(found["late_s"] * 1000) if found["late_s"] > LATE_S else 0
    return [
        {"viewer": viewers[item["path"]][0], "line": item["line"]}
        | figures(item, sent, lines[item["line"]], window_s)
        | {"decode_errors": errors[item["path"]], "closed": item["closed"], "reader_late_ms": late_ms}
        for item in found["rows"]
    ]


def figures(item: dict[str, Any], sent: Published, line: Line, window_s: float) -> dict[str, Any]:
    """Return what one viewer got of what was due in its window."""
    joined_s, each = item["started_s"], item["each_picture"]
    begin_s = each[0][1] if each else joined_s
    end_s = begin_s + window_s
    pictures = [due_s for due_s in sent.pictures_s if begin_s <= due_s < end_s]
    sound = [due_s for due_s in sent.sound_s if begin_s <= due_s < end_s]
    each = [(at_s, due_s, SIZES.get(size, size), key) for at_s, due_s, size, key in each if due_s < end_s]
    heard = [due_s for _, due_s in item["each_sound"] if begin_s <= due_s < end_s]
    switched = [at_s for (_, _, old, _), (at_s, _, new, _) in itertools.pairwise(each) if new != old]
    numbers = {round((due_s - begin_s) * sent.fps): name for _, due_s, name, _ in each}
    since_s = switched[0] if switched else each[0][0] if each else joined_s
    arrivals = sorted([since_s, *(at_s for at_s, *_ in each if at_s >= since_s)])
    arrivals += [end_s] if arrivals[-1] < end_s else []
    delays = sorted(at_s - due_s for at_s, due_s, _, _ in each if due_s >= joined_s)
    fitting = [
        max((name for name in sent.rates if sent.rates[name] <= share), key=sent.rates.__getitem__, default="")
        for due_s in pictures
        for share in (line.carries(due_s - joined_s) * sent.rates[sent.largest],)
    ]
    in_each = {name: sum(found == name for found in numbers.values()) for name in sent.rates}
    return {
        "window_s": window_s,
        "pictures_percent": _percent(len(numbers), len(pictures)),
        "delay_p50_s": _part(delays, 0.5),
        "delay_p95_s": _part(delays, 0.95),
        "freeze_s": round(max(later - earlier for earlier, later in itertools.pairwise(arrivals)), 3),
        "fitting_percent": _percent(
            sum(numbers.get(number) == name for number, name in enumerate(fitting)), len(pictures)
        ),
        **{f"in_{name}_percent": _percent(count, len(pictures)) for name, count in in_each.items()},
        "switches": len(switched),
        "first_switch_s": round(switched[0] - joined_s, 3) if switched else None,
        "sound_percent": _percent(len({round(due_s / SOUND_S) for due_s in heard}), len(sound)),
        "sound_gap_s": round(max((b - a for a, b in itertools.pairwise(heard)), default=window_s), 3),
        "repeated": len(each) - len(numbers) + sum(b <= a for a, b in itertools.pairwise(heard)),
        "broken": broken(each, sent.fps),
    }


def broken(each: Sequence[tuple[float, float, str, bool]], fps: int) -> int:
    """Return how many pictures came although one that they need had not come since the last key frame."""
    count, whole, before = 0, False, (0.0, "")
    for _, due_s, name, key in each:
        follows = name == before[1] and due_s - before[0] < 1.5 / fps
        whole = key or (whole and follows)
        count += not whole
        before = (due_s, name)
    return count


def _part(values: list[float], share: float) -> float | None:
    return round(values[min(int(len(values) * share), len(values) - 1)], 3) if values else None


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


# -- what is shown


def missed(row: dict[str, Any]) -> list[str]:
    """Return what a viewer of the set falls short of."""
    steady, allowed = row["line"].endswith("%"), max(round(row["window_s"] / 20), 1)
    bounds = [
        ("pictures %", row["pictures_percent"], 98.0, row["pictures_percent"] >= 98.0),
        ("delay p95 s", row["delay_p95_s"], TARGET_S, (row["delay_p95_s"] or 99.0) <= TARGET_S),
        ("freeze s", row["freeze_s"], 0.5, row["freeze_s"] <= 0.5),
        ("in the largest that fits %", row["fitting_percent"], 85.0, row["fitting_percent"] >= 85.0),
        ("switches", row["switches"], allowed, not steady or row["switches"] <= allowed),
    ]
    found = [f"{name} {value}, wanted {wanted:g}" for name, value, wanted, met in bounds if not met]
    faults = ("broken", "decode_errors", "repeated", "closed")
    return found + [f"{row[name]} {name.replace('_', ' ')}" for name in faults if row[name]]


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per line, with a cell for each kind of viewer."""
    kinds = list(dict.fromkeys(row["viewer"] for row in rows))
    return [
        {"line": line}
        | {kind: _cell(row) for kind in kinds for row in rows if (row["viewer"], row["line"]) == (kind, line)}
        for line in dict.fromkeys(row["line"] for row in rows)
    ]


def _cell(row: dict[str, Any]) -> str:
    delays = [row[key] for key in ("delay_p50_s", "delay_p95_s")]
    delay = "none came" if None in delays else f"{delays[0]:.1f} / {delays[1]:.1f} s"
    text = f"{row['pictures_percent']:.0f} %, {delay}, {row['freeze_s']:.1f} s, {row['sound_percent']:.0f} %"
    counts = {name: row[name] for name in ("broken", "decode_errors")}
    return text + "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document: what each kind of viewer got, and which renditions those of the set were in."""
    del images
    mine = [row for row in rows if row["viewer"] == "renditions"]
    stays = [
        {
            "line": row["line"],
            "in the largest that fits": f"{row['fitting_percent']:.0f} %",
            **{f"in {name}": f"{row[f'in_{name}_percent']:.0f} %" for name in RENDITIONS},
            "switches": row["switches"],
            "the first after": "" if row["first_switch_s"] is None else f"{row['first_switch_s']:.1f} s",
            "longest step of sound": f"{1000 * row['sound_gap_s']:.0f} ms",
        }
        for row in mine
    ]
    lines = [
        "Pictures, delay p50 / p95, longest time without a picture after the first switch, sound:",
        "",
        table(shown(rows)),
    ]
    if mine:
        lines += [
            "",
            "The viewers of the set; what is missing to 100 % are pictures that did not come:",
            "",
            table(stays),
        ]
        errors = sum(row["decode_errors"] + row["broken"] for row in mine)
        lines += ["", f"FFmpeg found {errors} errors in what they got."]
    short = [(row["line"], missed(row)) for row in mine if missed(row)]
    lines += ["", f"Short of what is wanted ({len(short)}):", ""] if short else []
    lines += [f"- {line}: {'; '.join(what)}" for line, what in short]
    if late := max(row["reader_late_ms"] for row in rows):
        lines += ["", f"The viewers were woken up to {late} ms late."]
    return "\n".join(lines)


QUICK: Final[dict[str, Any]] = {"window_s": 8.0, "shares": (0.5,), "changing": ("drop",)}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the window")
    parser.add_argument("--quick", action="store_true", help="two lines, some seconds")
    parser.add_argument("--viewers", default=",".join(PLAYED), help="which kinds; default: all")
    parser.add_argument("--json", action="store_true", help="every row instead of the table")
    arguments = parser.parse_args()
    kinds = arguments.viewers.split(",")
    rows = run(kinds=kinds, **QUICK) if arguments.quick else run(arguments.seconds, kinds=kinds)
    print_rows(rows, as_json=True) if arguments.json else print(table(shown(rows)))


if __name__ == "__main__":
    main()
