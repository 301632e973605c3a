"""``flowctl play``: plays an RTMP stream, counts what comes and what is missing, and can be a slow viewer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from flowctl.cli.common import (
    CaFile,
    Insecure,
    check_end,
    named_by_options,
    optional_duration,
    optional_rate,
    run_client,
    set_up_log,
)
from flowctl.core.text.output import failure, say
from flowctl.errors import ConfigError, FlowctlError
from flowctl.units import format_bit_rate, format_count, format_duration, format_size

if TYPE_CHECKING:
    from flowctl.wire.client.player import PlayProfile, RtmpPlayer
    from flowctl.wire.rtmp.url import RtmpUrl


def play(
    url: Annotated[str, typer.Argument(metavar="URL", help="What to play: rtmp://host/app/stream.")],
    *,
    rate: Annotated[str | None, typer.Option(help="Bits per second to read at most, like 200k.")] = None,
    stall_after: Annotated[str | None, typer.Option(help="Stop reading after this time, for good.")] = None,
    resume_after: Annotated[str | None, typer.Option(help="Lift --rate and --stall-after after this time.")] = None,
    pings: Annotated[int, typer.Option(min=0, help="Send so many ping requests per second.")] = 0,
    acknowledge: Annotated[bool, typer.Option("--ack/--no-ack", help="Acknowledge received bytes.")] = True,
    output: Annotated[str | None, typer.Option(metavar="FILE.flv", help="Write FLV; - is standard output.")] = None,
    duration: Annotated[
        str | None, typer.Option(help="End after this time, also if nothing comes. Default: when the stream ends.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Stay when the stream ends, until it is back.")] = False,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the summary as JSON.")] = False,
) -> None:
    """Play a stream, and say what came and what is missing.

    It says how it ended, too. Times count from the first message.
    """
    from flowctl.core.loop.trust import trust
    from flowctl.wire.client.address import parse_address
    from flowctl.wire.client.player import PlayProfile

    set_up_log()
    trust(authorities=ca_file, insecure=insecure)
    address = parse_address(url)
    values: dict[str, Any] = {
        "rate": optional_rate(rate, "--rate"),
        "stall_after_s": optional_duration(stall_after, "--stall-after"),
        "resume_after_s": optional_duration(resume_after, "--resume-after"),
        "pings_per_s": pings,
        "stay": stay,
    }
    with named_by_options({"rate": "--rate", "pings_per_s": "--pings"}):
        profile = PlayProfile(**values)
    settings: dict[str, Any] = {
        "profile": profile,
        "duration_s": optional_duration(duration, "--duration"),
        "acknowledge": acknowledge,
    }
    if output is None:
        _play(address, None, as_json=as_json, to_stderr=False, **settings)
        return
    with written(output) as file:
        _play(address, file, as_json=as_json, to_stderr=output == "-", **settings)


@contextlib.contextmanager
def written(output: str) -> Iterator[BinaryIO]:
    """Open what the media is written to, and say it in plain words when it takes no more."""
    if output == "-":
        try:
            yield sys.stdout.buffer
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failure(error) from error
        return
    opened = False
    try:
        with Path(output).open("wb") as file:
            opened = True
            yield file
    except OSError as error:
        if not opened:
            hint = "name a file in a folder that is there, and that you may write to"
            raise ConfigError(f"cannot write {output}: {error.strerror}", hint=hint) from error
        hint = "make room on its disk, or name another place"
        raise FlowctlError(f"cannot write {output}: {error.strerror}", hint=hint) from error


def _play(
    address: RtmpUrl,
    file: BinaryIO | None,
    *,
    profile: PlayProfile,
    duration_s: float | None,
    acknowledge: bool,
    as_json: bool,
    to_stderr: bool,
) -> None:
    from flowctl.flv import FlvWriter
    from flowctl.wire.client.player import RtmpPlayer
    from flowctl.wire.rtmp.session_config import ClientSessionConfig

    config = ClientSessionConfig(flash_version="LNX 9,0,124,2 flowctl play", acknowledge=acknowledge)
    writer = None if file is None else FlvWriter(file)
    settings: Any = {"writer": writer, "duration_s": duration_s, "config": config}
    player, signalled = run_client(
        "play",
        lambda parameters, on_end: RtmpPlayer(address, profile, parameters=parameters, on_end=on_end, **settings),
        capacity_bytes=profile.capacity_bytes,
        receive_buffer_bytes=profile.receive_buffer_bytes,
    )
    unwritten = player.write_error
    if file is not None and writer is not None and unwritten is None:
        try:
            if not to_stderr and file.seekable():  # what goes to standard output may be appended to something
                writer.correct_header(file)
            file.flush()
        except OSError as error:
            unwritten = error
    text = json.dumps(summary(player), ensure_ascii=False) if as_json else "\n".join(describe(player))
    say(text, to_stderr=to_stderr)
    if unwritten is not None:
        raise unwritten
    check_end(player, signalled, "played")
    if player.nothing_came and player.end is not None:
        raise FlowctlError(
            f"nobody publishes {player.url}: nothing came in {format_duration(player.end.after_s)}",
            hint="check the name; flowctl publish synthetic URL publishes something to look at",
        )


def summary(player: RtmpPlayer) -> dict[str, Any]:
    figures, end = player.statistics(), player.end

    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    return {
        "url": str(player.url),
        "received": figures.received.by_name(),
        "bytes": figures.received.total_bytes,
        "wire_bytes": figures.wire_bytes,
        "media_s": seconds(figures.media_s),
        "elapsed_s": seconds(figures.elapsed_s),
        "missing": {"video": figures.missing_video, "audio": figures.missing_audio, "exact": figures.exact},
        "video_gaps": figures.video_gaps,
        "broken_restarts": figures.broken_restarts,
        "started_on_key": figures.started_on_key,
        "first_frame_s": seconds(figures.first_frame_s),
        "delay_s": {"mean": seconds(figures.mean_delay_s), "max": seconds(figures.max_delay_s)},
        "pings_sent": figures.pings_sent,
        "written_tags": figures.written_tags,
        "statuses": [{"level": item.level, "code": item.code} for item in player.statuses],
        "end": None if end is None else end.as_dict(),
    }


def describe(player: RtmpPlayer) -> list[str]:
    figures = player.statistics()
    received = ", ".join(f"{count} {name}" for name, count in figures.received.by_name().items()) or "nothing"
    lines = [
        f"received {received}: {format_size(figures.received.total_bytes)}, {format_duration(figures.media_s)} of media"
    ]
    if figures.elapsed_s:
        rate = format_bit_rate(figures.wire_bytes * 8 / figures.elapsed_s)
        lines.append(f"read {rate} for {format_duration(figures.elapsed_s)}, the burst of the server's cache included")
    if figures.first_frame_s is not None:
        began = {None: "no pictures", True: "began with a key frame", False: "did not begin with a key frame"}
        lines.append(f"first frame after {format_duration(figures.first_frame_s)}, {began[figures.started_on_key]}")
    how = "counted by stamps" if figures.exact else "worked out from timestamps"
    missing = f"missing {figures.missing_video} pictures, {figures.missing_audio} audio frames ({how})"
    if figures.video_gaps:
        gaps = format_count(figures.video_gaps, "gap")
        missing += f", in {gaps}, {figures.broken_restarts} of them not ended by a key frame"
    lines.append(missing)
    if figures.mean_delay_s is not None and figures.max_delay_s is not None:
        delays = f"{format_duration(figures.mean_delay_s)} on average, {format_duration(figures.max_delay_s)} at most"
        lines.append(f"delay {delays}, of frames newer than the play")
    lines.append(f"ended: {player.end}")
    return lines


def add_to(app: typer.Typer) -> None:
    app.command("play")(play)
