"""``flowctl record`` and ``flowctl hls``: live streams pulled over RTMP and written to files, without transcoding.

``flowctl recordings`` lists what a server has recorded, and fetches parts of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowctl.cli.common import CaFile, Insecure, named_by_options, optional_duration, print_json, set_up_log
from flowctl.cli.errors import TerminatedError, terminable
from flowctl.cli.play import written
from flowctl.core.text.extras import require_extra
from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError, FlowctlError, RemoteProtocolError
from flowctl.units import format_count, format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from flowctl.live.cluster.follow import FollowStatistics, StreamFollower
    from flowctl.live.playback.sources import FolderRecordings, ServerRecordings
    from flowctl.live.remux.hls import HlsWriter
    from flowctl.live.remux.recorder import FinishedFile, Form, StreamRecorder
    from flowctl.wire.rtmp.url import RtmpUrl

_STOP_S = 30.0
"""Longest wait for a disk that takes the rest; the next start finds what is on it then."""
_LOOK_S = 0.2
_MOST_URLS = 64
_MOST_TOLD = 1 << 60  # seconds or octets of a recording


def record(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="What to record: rtmp://host/app/stream.")],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if it is not there.")],
    form: Annotated[str, typer.Option("--format", help="flv: as it came; mp4: fragmented, needs PyAV.")] = "flv",
    name: Annotated[
        str, typer.Option(help="Names of files, of {app}, {stream} and {time}; / makes folders.")
    ] = "{app}-{stream}-{time}",
    max_size: Annotated[
        str | None, typer.Option(help="Begin a new file at the key frame behind so many bytes.")
    ] = None,
    max_time: Annotated[str | None, typer.Option(help="Begin a new file at the key frame behind so much time.")] = None,
    keep_free: Annotated[str, typer.Option(help="Room on the disk that is left to others; 0: none.")] = "256MiB",
    duration: Annotated[str | None, typer.Option(help="End after this time. Default: when interrupted.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when each stream has ended.")] = False,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write a line of JSON per file, and the summary.")] = False,
) -> None:
    """Record live streams as FLV or MP4 files.

    The name of each finished file is written to standard output. A stream that is not published yet is waited for. A
    server that is lost, or not there, is tried again until the end, and the log says why. A file that is being written
    ends with .part; what an earlier run has left behind is finished first.
    """
    from flowctl.core.loop.trust import trust
    from flowctl.live.remux.files import NameTemplate
    from flowctl.live.remux.recorder import RecordSettings, StreamRecorder

    set_up_log()
    trust(authorities=ca_file, insecure=insecure)
    addresses = _addresses(urls)
    duration_s = optional_duration(duration, "--duration")
    settings = RecordSettings(
        folder=_resolved(out),
        template=NameTemplate(name),
        max_bytes=0 if max_size is None else parse_size(max_size, "--max-size"),
        max_s=optional_duration(max_time, "--max-time") or 0.0,
        keep_free_bytes=parse_size(keep_free, "--keep-free"),
    )
    make_form = _form(form)
    _made(settings.folder)
    lock = threading.Lock()
    untold: list[Exception] = []  # why names of files cannot be written any more: who reads them may have gone

    def finished(file: FinishedFile) -> None:
        with lock:
            try:
                if not untold:
                    _tell(file, as_json=as_json)
            except (OSError, FlowctlError) as error:  # on a recorder's thread, which has files to finish
                untold.append(error)

    recorders = [StreamRecorder(*_named(url), settings, make_form, on_finished=finished) for url in addresses]
    _take_up(settings.folder)
    follows = _run(addresses, recorders, duration_s=duration_s, once=once, untold=untold)
    if untold:
        raise untold[0]
    _summarise(addresses, recorders, follows, as_json=as_json)


def hls(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="What to write: rtmp://host/app/stream.")],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if it is not there.")],
    form: Annotated[str, typer.Option("--format", help="auto: as the codecs need it; ts; fmp4.")] = "auto",
    segment_time: Annotated[str, typer.Option(help="A segment ends at the key frame behind so much time.")] = "4s",
    part: Annotated[str, typer.Option(help="Longest part of a segment, for low latency, as 0.5s; 0: none.")] = "0",
    segments: Annotated[int, typer.Option(min=3, max=100, help="Segments in the playlist.")] = 6,
    keep_free: Annotated[str, typer.Option(help="Room on the disk that is left to others; 0: none.")] = "64MiB",
    duration: Annotated[str | None, typer.Option(help="End after this time. Default: when interrupted.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when each stream has ended.")] = False,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the summary as JSON.")] = False,
) -> None:
    """Write live streams as HLS, for players to fetch.

    That is DIR/app/stream.m3u8 and its segments, in as few files as players need. Have them served by "flowctl serve
    live --hls-folder DIR", or by any server of files.
    """
    from flowctl.core.loop.trust import trust

    set_up_log()
    trust(authorities=ca_file, insecure=insecure)
    addresses = _addresses(urls)
    require_extra("media", "HLS", "av")
    from flowctl.live.remux.hls import HlsSettings, HlsWriter, SegmentForm

    if form not in (names := [item.value for item in SegmentForm]):
        raise ConfigError(f"--format {form!r} is not one of {', '.join(names)}")
    with named_by_options({"segment_s": "--segment-time", "part_s": "--part"}):
        settings = HlsSettings(
            folder=_resolved(out),
            segment_s=parse_duration(segment_time, "--segment-time"),
            listed=segments,
            part_s=parse_duration(part, "--part"),
            form=SegmentForm(form),
            keep_free_bytes=parse_size(keep_free, "--keep-free"),
        )
    duration_s = optional_duration(duration, "--duration")
    writers = [HlsWriter(*_named(url), settings) for url in addresses]
    playlists = [writer.playlist_path for writer in writers]
    for path, url in zip(playlists, addresses, strict=True):
        if playlists.count(path) > 1:
            raise ConfigError(f"two streams would be written to {path}, one is {url}", hint="give each its own --out")
    _made(settings.folder)
    for writer in writers:
        writer.claim()
    follows = _run(addresses, writers, duration_s=duration_s, once=once)
    _summarise(addresses, writers, follows, as_json=as_json)


def recordings(
    source: Annotated[
        str, typer.Argument(metavar="URL|DIR", help="A stream at a server, http://host:8080/live/room, or its folder.")
    ],
    *,
    begin: Annotated[str | None, typer.Option("--from", metavar="TIME", help="As 2026-11-30T10:00:00Z.")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="The end of that time.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="List so many, the latest first.")] = 100,
    fetch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write that time to FILE, of MP4 if it ends with .mp4, or of FLV; -: standard output."
        ),
    ] = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write a line of JSON per recording.")] = False,
) -> None:
    """List a stream's recordings, or fetch a part by time.

    A part begins with the key frame at or before --from, and ends at --to, where nothing was recorded, or where the
    codec changes. A server lists its recordings where record_play says so, to those who may play the stream.
    """
    from flowctl.core.loop.trust import trust
    from flowctl.live.playback.sources import FolderRecordings, ServerRecordings

    set_up_log()
    from_s, to_s = _time_of(begin, "--from"), _time_of(end, "--to")
    if from_s is not None and to_s is not None and to_s <= from_s:
        raise ConfigError("--to is not after --from")
    if "://" in source:
        trust(authorities=ca_file, insecure=insecure)
    shelf = ServerRecordings(source) if "://" in source else FolderRecordings(Path(source))
    with contextlib.closing(shelf):
        if fetch is None:
            rows, more = shelf.find(from_s, to_s, limit)
            _show_recordings(rows, more=more, as_json=as_json)
        else:
            _fetch_part(shelf, from_s or 0.0, to_s, fetch)


def _fetch_part(shelf: FolderRecordings | ServerRecordings, from_s: float, to_s: float | None, output: str) -> None:
    start, length, parts = shelf.fetch(from_s, to_s, ".mp4" if output.endswith(".mp4") else ".flv")
    got = 0
    with written(output) as file:
        for data in parts:
            got += len(data)
            file.write(data)
        file.flush()
    if got != length:
        raise FlowctlError(f"{format_size(got)} of {format_size(length)} came", hint="fetch it again")
    say(f"{format_size(got)}, from {foreign(start)} on", to_stderr=True)


def _show_recordings(rows: list[dict[str, Any]], *, more: bool, as_json: bool) -> None:
    for row in rows:
        if as_json:
            print_json(row)
            continue
        length, size = (_number(row.get(name)) for name in ("duration_s", "bytes"))
        words = [
            foreign(row.get("start"))[:24].ljust(24),
            ("?" if length is None else format_duration(length)).rjust(8),
            ("?" if size is None else format_size(size)).rjust(9),
            foreign(row.get("file")),
            "being written" if row.get("being_written") else "",
        ]
        say("  ".join(words).rstrip())
    if not rows:
        say("no recordings", to_stderr=True)
    if more:
        say(f"there are more: --to {foreign(rows[-1].get('start'))}", to_stderr=True)


def _number(value: object) -> int | None:
    """Return a number of a list, which is a server's word; None: it is none that makes sense."""
    return round(value) if isinstance(value, int | float) and 0 <= value < _MOST_TOLD else None


def _time_of(text: str | None, option: str) -> float | None:
    from flowctl.live.playback.library import parse_time

    if text is None:
        return None
    time_s = parse_time(text)
    if time_s is None:
        raise ConfigError(f"{option} {text!r} is no time", hint="write it like 2026-11-30T10:00:00Z")
    return time_s


def _named(url: RtmpUrl) -> tuple[str, str]:
    """Return application and stream as files are called: as a server calls them, which may have to find them."""
    from flowctl.wire.rtmp.url import canonical

    try:
        url = canonical(url)
    except RemoteProtocolError as error:
        raise ConfigError(f"{url}: {error}") from error
    return url.app, url.stream or url.app


def _addresses(urls: list[str]) -> list[RtmpUrl]:
    from flowctl.wire.client.address import parse_address

    if len(urls) > _MOST_URLS:
        raise ConfigError(f"{len(urls)} streams are too many for one process", hint=f"at most {_MOST_URLS}")
    addresses = [parse_address(url) for url in urls]
    places = [(url.host, url.port, url.path) for url in addresses]
    for place, url in zip(places, addresses, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{url} is there twice")
    return addresses


def _form(form: str) -> Callable[[], Form]:
    from flowctl.live.remux.flvform import FlvForm

    if form == "flv":
        return FlvForm
    if form == "mp4":
        require_extra("media", "MP4", "av")
        from flowctl.live.remux.container import Mp4Form

        return Mp4Form
    raise ConfigError(f"--format {form!r} is not one of flv, mp4")


def _resolved(folder: Path) -> Path:
    from flowctl.core.folders.folders import resolve_folder

    return resolve_folder(folder, "--out")


def _made(folder: Path) -> None:
    from flowctl.core.folders.folders import check_folder, opened_folder

    check_folder(folder, "--out")
    try:
        with opened_folder(folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}", hint="name a folder that you may write to") from error


def _take_up(folder: Path) -> None:
    """Finish what an earlier run has left behind, beside the recording: it may be long."""
    from flowctl.live.remux.files import recover
    from flowctl.live.remux.flvform import whole_bytes
    from flowctl.log import get_logger

    def work() -> None:
        for path in recover(folder, whole_bytes):
            get_logger("flowctl.remux").warning("a recording of an earlier run was finished", file=str(path))

    threading.Thread(target=work, name="flowctl-recover", daemon=True).start()


def _tell(file: FinishedFile, *, as_json: bool) -> None:
    if as_json:
        values = {"size_bytes": file.size_bytes, "media_s": round(file.media_s, 3), "why": file.why}
        print_json({"file": str(file.path), **values})
    else:
        say(str(file.path))


def _run(
    addresses: list[RtmpUrl],
    recorders: Sequence[StreamRecorder | HlsWriter],
    *,
    duration_s: float | None,
    once: bool,
    untold: Sequence[Exception] = (),
) -> list[StreamFollower]:
    """Record until it is to end, also when something cannot be told; then finish the files."""
    from flowctl.live.remux.intake import pull
    from flowctl.pollgroup import PollGroup

    group = PollGroup("record")
    end = None if duration_s is None else time.monotonic() + duration_s
    shown = sys.stderr.isatty()
    with terminable():
        group.start()
        follows = [pull(url, recorder.intake, group) for url, recorder in zip(addresses, recorders, strict=True)]
        reasons = [""] * len(follows)
        try:
            for recorder, follow in zip(recorders, follows, strict=True):
                recorder.start()
                follow.start()
            while (end is None or time.monotonic() < end) and not (
                untold or (once and all(recorder.stream_ended.is_set() for recorder in recorders))
            ):
                time.sleep(_LOOK_S)
                reasons = [
                    _outage(url, follow.statistics(), why)
                    for url, follow, why in zip(addresses, follows, reasons, strict=True)
                ]
                if shown:
                    _progress(recorders)
        except (KeyboardInterrupt, TerminatedError):
            pass  # how recordings end
        if shown:
            say("", to_stderr=True)
        group.stop(_LOOK_S)
        for recorder in recorders:
            recorder.stop(_STOP_S)
    return follows


def _outage(url: RtmpUrl, figures: FollowStatistics, last_reason: str) -> str:
    """Report each reason why no media comes once, and that it is tried again; return it, empty for none."""
    from flowctl.live.cluster.follow import FollowState
    from flowctl.log import get_logger

    if figures.state is FollowState.RUNNING:
        return ""
    why = figures.why.partition(" (")[0]  # behind it are figures, new with each try
    if figures.state is FollowState.RESTING and figures.tries and why != last_reason:
        get_logger("flowctl.remux").warning("nothing to record, trying again", url=str(url), why=figures.why)
        return why
    return last_reason


def _progress(recorders: Sequence[StreamRecorder | HlsWriter]) -> None:
    figures = [recorder.statistics() for recorder in recorders]
    states = {item.state.value for item in figures}
    seconds = format_duration(round(sum(item.media_s for item in figures)))
    size = format_size(sum(item.written_bytes for item in figures))
    lost = sum(item.lost_messages for item in figures)
    files = format_count(sum(item.files for item in figures), "file")
    line = f"{', '.join(sorted(states))}: {seconds}, {size}, {files}, {lost} lost"
    say(f"{line[:78]:<78}", to_stderr=True, end="\r")


def _summarise(
    addresses: list[RtmpUrl],
    recorders: Sequence[StreamRecorder | HlsWriter],
    follows: list[StreamFollower],
    *,
    as_json: bool,
) -> None:
    rows: list[dict[str, Any]] = []
    for url, recorder, follow in zip(addresses, recorders, follows, strict=True):
        figures = recorder.statistics()
        rows.append(
            {
                "url": str(url),
                "files": figures.files,
                "bytes": figures.written_bytes,
                "media_s": round(figures.media_s, 3),
                "lost_messages": figures.lost_messages,
                "lost_bytes": figures.lost_bytes,
                "connections": follow.statistics().connections,
                "why": figures.why,
            }
        )
    if as_json:
        print_json({"streams": rows})
    else:
        for row in rows:
            lost = f", {format_count(row['lost_messages'], 'message')} lost" if row["lost_messages"] else ""
            say(f"{row['url']}: {format_count(row['files'], 'file')}, {row['media_s']:g} s{lost}", to_stderr=True)
    lost_messages = sum(row["lost_messages"] for row in rows)
    if lost_messages:
        why = ", ".join(sorted({row["why"] for row in rows if row["why"] and row["lost_messages"]}))
        hint = "make room on the disk of --out, or name another one"
        lost = format_count(lost_messages, "message")
        raise FlowctlError(f"{lost} not written{': ' + why if why else ''}", hint=hint)


def add_to(app: typer.Typer) -> None:
    app.command("record")(record)
    app.command("hls")(hls)
    app.command("recordings")(recordings)
