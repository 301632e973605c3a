"""``flowctl load``: loads an RTMP server with viewers of all kinds, and says what they got and how it held."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowctl.cli.common import (
    SYNTHETIC_OPTIONS,
    CaFile,
    Insecure,
    named_by_options,
    optional_duration,
    print_json,
    set_up_log,
)
from flowctl.cli.errors import FAILED, INTERRUPTED, TERMINATED
from flowctl.core.text.extras import require_extra
from flowctl.core.text.output import say
from flowctl.errors import ConfigError
from flowctl.units import format_size, parse_bit_rate, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowctl.load.plan import LoadPlan
    from flowctl.load.results.failon import ConditionResult, FailCondition
    from flowctl.load.results.result import RunResult

_VIEWERS_PER_S = 200
"""Viewers that join each second by default; a server's listen queue of 128, a common default, holds more than half."""

_Profiles = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[@P][:SHARE]", help="Of which kind, like healthy:90%, slow@200k:8%, stall:40. Repeatable."
    ),
]
_Measure = Annotated[
    str, typer.Option(metavar="auto|all|N", help="Whose frames are looked at: as many as fit, all, every N-th.")
]
_Addresses = Annotated[
    bool | None,
    typer.Option("--spread-addresses/--one-address", help="Each its own 127.x.y.z; the default on loopback."),
]
# None is left to the run, which resolves the server's name. Servers limit what comes from one address, ours too; a
# crowd that is one address tests that limit only.
_Conditions = Annotated[
    list[str] | None,
    typer.Option(metavar="CONDITION", help="Exit with 1 if it holds, like 'healthy.p99_ms>200'. Repeatable."),
]


def load(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="What to play: rtmp://host/app/stream, or http:// and ws:// with .flv; an s for TLS.",
        ),
    ] = None,
    *,
    viewers: Annotated[int, typer.Option(min=1, help="Number of viewers, all profiles together.")] = 100,
    profile: _Profiles = None,
    ramp: Annotated[str | None, typer.Option(help="Time over which they join. Default: 200 a second.")] = None,
    duration: Annotated[str, typer.Option(help="Length of the run, from the end of the ramp.")] = "30s",
    until_end: Annotated[bool, typer.Option("--until-end", help="End sooner, with the stream.")] = False,
    publishers: Annotated[int, typer.Option(min=0, help="Publish so many streams; 0: play what is there.")] = 0,
    streams: Annotated[int | None, typer.Option(min=1, help="Spread viewers over URL-1, URL-2 ...")] = None,
    source: Annotated[str | None, typer.Option(metavar="FILE.flv", help="Publish this, not a synthetic one.")] = None,
    bit_rate: Annotated[str, typer.Option(help="Synthetic stream: bits per second.")] = "2.5M",
    fps: Annotated[float, typer.Option(min=1, max=240, help="Synthetic stream: frames per second.")] = 30.0,
    key_interval: Annotated[str, typer.Option(help="Synthetic stream: from key frame to key frame.")] = "2s",
    key_frame_size: Annotated[str | None, typer.Option(help="Synthetic stream: bytes of a key frame.")] = None,
    disposable_every: Annotated[int, typer.Option(min=0, help="Synthetic stream: every n-th frame.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: by viewers and cores.")] = None,
    measure: _Measure = "auto",
    server_pid: Annotated[int | None, typer.Option(min=1, help="Server process here whose load to measure.")] = None,
    spread_addresses: _Addresses = None,
    query_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Lines like key=...: each viewer brings one of them, in turn.")
    ] = None,
    connect_timeout: Annotated[str, typer.Option(help="Time to connect and shake hands.")] = "10s",
    seed: Annotated[int, typer.Option(help="For what is random in hostile profiles.")] = 0,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Load servers elsewhere, yours only.")] = False,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    fail_on: _Conditions = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots.")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one row per connection.")] = None,
    json_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the summary as JSON.")] = False,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Show a live table on a terminal.")] = True,
    list_profiles: Annotated[bool, typer.Option("--list-profiles", help="Explain the profiles, and end.")] = False,
) -> None:
    """Load an RTMP server with viewers of all kinds.

    It is on this machine unless --allow-remote is given. A run always ends by itself. Exit status: 0 all went well; 1 a
    condition of --fail-on holds or could not be measured, nobody could connect, no healthy viewer got a frame, the
    server or a publisher was lost in mid run, or the load tester itself failed for a peer; 2 wrong use; 130 or 143
    ended by a signal.
    """
    given = dict(locals())  # as options are: text in, values out, in `_plan` alone

    from flowctl.core.loop.trust import trust

    set_up_log()
    trust(authorities=ca_file, insecure=insecure)
    if list_profiles:
        from flowctl.load.profiles import as_dicts, as_lines

        if as_json:
            print_json(as_dicts())
        else:
            say("\n".join(as_lines()))
        return
    plan = _plan(**given)
    _load(
        plan,
        _conditions(fail_on or [], plan),
        {"--report": report, "--parquet": parquet, "--json-file": json_file},
        as_json=as_json,
        table=table and not as_json,
    )


def _plan(url: str | None, *, viewers: int, profile: list[str] | None, source: str | None, **given: Any) -> LoadPlan:
    from flowctl.core.text.keyfiles import with_files
    from flowctl.load.plan import MAX_PEERS, LoadPlan
    from flowctl.load.profiles import parse_crowd, parse_profile
    from flowctl.load.target import SCHEMES
    from flowctl.log import redact_text
    from flowctl.wire.client.address import parse_address

    if url is None:
        raise ConfigError("URL is missing", hint="give what to play, like rtmp://127.0.0.1/live/test")
    if given["publishers"] and parse_address(url, SCHEMES).scheme not in {"rtmp", "rtmps"}:
        raise ConfigError("--publishers publish over RTMP", hint="publish to the server's RTMP address beside this run")
    if viewers > MAX_PEERS:
        raise ConfigError(f"--viewers is {viewers}, allowed is 1 to {MAX_PEERS}", hint="use several runs side by side")
    if source is not None and not given["publishers"]:
        raise ConfigError("--source is for publishing", hint="give --publishers 1 as well")
    if source is not None and not Path(source).is_file():
        raise ConfigError(f"there is no file {source}", hint="--source takes an FLV file")
    ramp_s, key_frame_size = optional_duration(given["ramp"], "--ramp"), given["key_frame_size"]
    crowd = parse_crowd(profile or [], viewers)
    for choice in map(parse_profile, profile or []):
        if choice.text not in crowd:
            say(f"warning: of {viewers} viewers nobody is left for --profile {choice.text}", to_stderr=True)
    values = dict(
        url=with_files(url),
        profiles=crowd,
        source=source,
        ramp_s=viewers / _VIEWERS_PER_S if ramp_s is None else ramp_s,
        duration_s=parse_duration(given["duration"], "--duration"),
        until="stream-end" if given["until_end"] else "duration",
        bit_rate=parse_bit_rate(given["bit_rate"], "--bit-rate"),
        key_interval_s=parse_duration(given["key_interval"], "--key-interval"),
        key_frame_bytes=None if key_frame_size is None else _key_frame_bytes(key_frame_size),
        measure_every=_measure_every(given["measure"]),
        connect_timeout_s=parse_duration(given["connect_timeout"], "--connect-timeout"),
        command=redact_text(shlex.join(["flowctl", *sys.argv[1:]])),  # as it can be given again, without secrets
        **{name: given[name] for name in _AS_GIVEN},
    )
    with named_by_options(_OPTIONS):
        plan = LoadPlan(**values)
        if plan.publishers and source is None:
            plan.synthetic(0)
        return plan


_AS_GIVEN: Final = (
    "publishers", "streams", "fps", "disposable_every", "workers", "server_pid", "spread_addresses", "seed",
    "allow_remote", "query_file",
)  # fmt: skip
"""Options that are fields of a plan as they are."""
_OPTIONS: Final = SYNTHETIC_OPTIONS | {
    "bit_rate": "--bit-rate",
    "publishers": "--publishers",
    "streams": "--streams",
    "ramp_s": "--ramp",
    "duration_s": "--duration",
    "workers": "--workers",
    "measure_every": "--measure",
    "connect_timeout_s": "--connect-timeout",
}
"""Field of a plan, or of its synthetic source, and the option that sets it."""


def _key_frame_bytes(text: str) -> int:
    """Return the size of key frames, 1 byte to what servers take as one message."""
    from flowctl.wire.media.synthetic import MAX_FRAME_SIZE_BYTES

    size = parse_size(text, "--key-frame-size")
    if not 1 <= size <= MAX_FRAME_SIZE_BYTES:
        raise ConfigError(f"--key-frame-size is {text!r}, allowed is up to {format_size(MAX_FRAME_SIZE_BYTES)}")
    return size


def _measure_every(text: str) -> int | None:
    """Return which part of the viewers is looked at closely; None: as many as fit."""
    if text in ("auto", "all"):
        return None if text == "auto" else 1
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise ConfigError(f"--measure is {text!r}, allowed is auto, all, or a number N of 1 or more for every N-th")
    return int(text)


def _conditions(texts: Sequence[str], plan: LoadPlan) -> list[FailCondition]:
    from flowctl.load.profiles import parse_profile
    from flowctl.load.results.failon import parse_conditions
    from flowctl.load.results.result import PUBLISHER, PeerKind

    kinds = {name: parse_profile(name).profile.kind for name in plan.profiles}
    if plan.publishers:
        kinds[PUBLISHER] = PeerKind.PUBLISHER
    return parse_conditions(texts, kinds, server_watched=plan.server_pid is not None)


def _load(
    plan: LoadPlan, conditions: list[FailCondition], files: dict[str, Path | None], *, as_json: bool, table: bool
) -> None:
    from flowctl.core.text.files import check_target
    from flowctl.load.results import summary
    from flowctl.load.results.figures import RunFigures
    from flowctl.load.results.table import RunDisplay
    from flowctl.load.run import run_load

    for option, path in files.items():
        if path is not None:
            check_target(path, option)
    if files["--parquet"] is not None:
        require_extra("telemetry", "--parquet", "pyarrow")
    with RunDisplay(plan.url, plan.profiles, plan.length_s, table=table) as display:
        result = run_load(plan, display.show_sample)
    figures = RunFigures(result)
    verdicts = [condition.judge(figures) for condition in conditions]
    if as_json:
        print_json(summary.summarize(result, verdicts))
    else:
        say("\n".join(summary.lines(result, verdicts)))
    _write(result, verdicts, files)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED if result.interrupted_by == signal.SIGINT else TERMINATED)
    if summary.what_failed(result) is not None or any(verdict.failed for verdict in verdicts):
        raise typer.Exit(FAILED)


def _write(result: RunResult, verdicts: list[ConditionResult], files: dict[str, Path | None]) -> None:
    """Write the files that were asked for, each of them whole or not at all."""
    from flowctl.core.text.files import write_text
    from flowctl.load.results.summary import whole

    if (path := files["--json-file"]) is not None:
        write_text(path, json.dumps(whole(result, verdicts), ensure_ascii=False) + "\n")
    if (path := files["--parquet"]) is not None:
        from flowctl.load.results.parquet import write_parquet

        write_parquet(path, result)
    if (path := files["--report"]) is not None:
        from flowctl.load.results.report import render

        write_text(path, render(result, verdicts))
    for path in files.values():
        if path is not None:
            say(f"written: {path}", to_stderr=True)


def add_to(app: typer.Typer) -> None:
    app.command("load")(load)
