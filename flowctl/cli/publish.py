"""``flowctl publish``: publishes an FLV file or a synthetic source to an RTMP server."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowctl.cli.common import (
    SYNTHETIC_OPTIONS,
    CaFile,
    Insecure,
    check_end,
    given,
    named_by_options,
    optional_duration,
    print_json,
    run_client,
    set_up_log,
)
from flowctl.core.flow.state import SendState
from flowctl.core.text.output import say
from flowctl.errors import ConfigError
from flowctl.units import format_count, format_duration, format_size, parse_bit_rate, parse_duration, parse_size

if TYPE_CHECKING:
    from flowctl.flv import FlvTag
    from flowctl.wire.client.publisher import RtmpPublisher
    from flowctl.wire.rtmp.url import RtmpUrl


def publish(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="FILE.flv|synthetic", help="What to publish; a pipe too: /dev/stdin.")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: rtmp://host/app/stream.")],
    *,
    loop: Annotated[bool, typer.Option("--loop/--no-loop", help="Begin again at the end of the file.")] = False,
    duration: Annotated[str | None, typer.Option(help="End after this much media time. Default: at the end.")] = None,
    pace: Annotated[float, typer.Option(min=0, help="Media seconds per second; 0: as fast as it is taken.")] = 1.0,
    target_delay: Annotated[
        str | None,
        typer.Option(
            metavar="auto|off|T",
            help="How late pictures may reach the server on a short line; later ones are left out. off: all are sent, "
            "however late. Default: auto in real time, off at any other pace.",
        ),
    ] = None,
    bit_rate: Annotated[str, typer.Option(help="Synthetic: video bits per second.")] = "2.5M",
    fps: Annotated[float, typer.Option(min=1, max=240, help="Synthetic: frames per second.")] = 30.0,
    key_interval: Annotated[str, typer.Option(help="Synthetic: time from key frame to key frame.")] = "2s",
    key_frame_size: Annotated[str | None, typer.Option(help="Synthetic: bytes of a key frame.")] = None,
    disposable_every: Annotated[int, typer.Option(min=0, help="Synthetic: every n-th frame is disposable.")] = 0,
    audio: Annotated[bool, typer.Option("--audio/--no-audio", help="Send audio.")] = True,
    video: Annotated[bool, typer.Option("--video/--no-video", help="Send video.")] = True,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the summary as JSON.")] = False,
) -> None:
    """Publish a file or a synthetic source to a server.

    A file is sent once, or with --loop for ever; a synthetic source for ever, or for --duration. Synthetic frames carry
    numbers and times, by which "flowctl play" tells exactly what was lost and how late it came.

    In real time it stays live: where the line is too short for all of it, pictures that would come too late are left
    out, and said to be. What the server records is whole with --target-delay off.
    """
    from flowctl.core.flow.limits import parse_target_delay
    from flowctl.core.loop.trust import trust
    from flowctl.wire.client.address import parse_address

    set_up_log()
    trust(authorities=ca_file, insecure=insecure)
    address = parse_address(url)
    duration_s = optional_duration(duration, "--duration")
    if duration_s == 0:
        raise ConfigError("--duration is 0: nothing to send")
    target_delay = target_delay or ("auto" if pace == 1 else "off")
    target_delay_ms = parse_target_delay(target_delay, "--target-delay")
    if not pace and target_delay_ms != 0:
        raise ConfigError("--target-delay is for a source with a pace, and --pace is 0", hint="leave one of them out")
    settings: dict[str, Any] = {"pace": pace, "duration_s": duration_s, "target_delay_ms": target_delay_ms}
    if source == "synthetic":
        synthetic = {
            "video_bit_rate": parse_bit_rate(bit_rate, "--bit-rate"),
            "fps": fps,
            "key_interval_s": parse_duration(key_interval, "--key-interval"),
            "key_frame_bytes": None if key_frame_size is None else parse_size(key_frame_size, "--key-frame-size"),
            "disposable_every": disposable_every,
        }
        tags = _synthetic(synthetic, audio=audio, video=video)
        # It never ends, so there is nothing to begin again.
        publish_tags(address, tags, as_json=as_json, **settings)
        return
    _refuse_ignored(context, source)
    file = _file(source, audio=audio, video=video, loop=loop)
    publish_tags(address, file, as_json=as_json, loop=loop, **settings)


def _synthetic(settings: dict[str, Any], *, audio: bool, video: bool) -> Iterable[FlvTag]:
    from flowctl.wire.media.synthetic import SyntheticSource

    with named_by_options(SYNTHETIC_OPTIONS):
        return SyntheticSource(**settings, audio=audio, video=video)


def _refuse_ignored(context: typer.Context, source: str) -> None:
    for option in SYNTHETIC_OPTIONS.values():
        if given(context, option[2:].replace("-", "_")):
            raise ConfigError(
                f"{option} is for the synthetic source, and {source} is a file",
                hint=f"leave it out, or: flowctl publish synthetic URL {option} ...",
            )


def _file(path: str, *, audio: bool, video: bool, loop: bool) -> Iterable[FlvTag | None]:
    from flowctl.wire.client.source import FlvFile, FlvPipe, Tracks, check_has_media, is_pipe

    if difflib.get_close_matches(path, ["synthetic"]) and not Path(path).exists():
        raise ConfigError(f"there is no file {path}", hint="did you mean synthetic?")
    if is_pipe(Path(path)):
        if loop:
            raise ConfigError(f"--loop: {path} is a pipe, it can be read once", hint="leave it out, or name a file")
        return Tracks(FlvPipe(path), audio=audio, video=video)
    tags = Tracks(FlvFile(path), audio=audio, video=video)
    check_has_media(tags, path)
    return tags


def publish_tags(address: RtmpUrl, tags: Iterable[FlvTag | None], *, as_json: bool, **settings: Any) -> None:
    from flowctl.wire.client.publisher import RtmpPublisher
    from flowctl.wire.rtmp.session_config import ClientSessionConfig

    config = ClientSessionConfig(flash_version="FMLE/3.0 (compatible; flowctl publish)")
    settings["config"] = config
    publisher, signalled = run_client(
        "publish",
        lambda parameters, on_end: RtmpPublisher(address, tags, parameters=parameters, on_end=on_end, **settings),
    )
    _show(publisher, as_json=as_json)
    if publisher.source_error is not None:
        raise publisher.source_error
    check_end(publisher, signalled, "published")


def _show(publisher: RtmpPublisher, *, as_json: bool) -> None:
    figures, end = publisher.statistics(), publisher.end
    if as_json:
        print_json(
            {
                "url": str(publisher.url),
                "sent": figures.sent.by_name(),
                "bytes": figures.sent.total_bytes,
                "media_s": round(figures.media_s, 3),
                "left_out": figures.left_out.by_name(),
                "unsent": figures.unsent.by_name(),
                "picture_share": round(figures.picture_share, 4),
                "max_delay_s": round(figures.max_delay_s, 3),
                "states_s": {state.name: round(figures.states_s[state], 3) for state in SendState},
                "rounds": figures.rounds,
                "max_lag_s": round(figures.max_lag_s, 3),
                "waits": figures.waits,
                "waited_s": round(figures.waited_s, 3),
                "end": None if end is None else end.as_dict(),
            }
        )
        return
    sent = ", ".join(f"{count} {name}" for name, count in figures.sent.by_name().items()) or "nothing"
    say(f"sent {sent}: {format_size(figures.sent.total_bytes)}, {format_duration(figures.media_s)} of media")
    if figures.hint:
        lost = ", ".join(f"{count} {name}" for name, count in figures.left_out.by_name().items())
        short_s = sum(figures.states_s[SendState.OVERLOADED :])
        say(
            f"left out {lost}, so that {figures.picture_share:.0%} of the pictures were sent: the line was short for "
            f"{format_duration(short_s)}, up to {format_duration(figures.max_delay_s)} behind"
        )
        say(f"hint: {figures.hint}")
    say(
        f"tags were queued up to {format_duration(figures.max_lag_s)} late; "
        f"waited {format_count(figures.waits, 'time')} for the connection, {format_duration(figures.waited_s)} in all"
    )
    say(f"ended: {end}")


def add_to(app: typer.Typer) -> None:
    app.command("publish")(publish)
