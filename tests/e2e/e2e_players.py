"""Players of other people: what each shows of a stream while it plays, read from what it says, and what went wrong.

A player is watched through its log, which it writes as it goes: the size of its pictures each time that it changes, and
its words on what it could not decode.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import groupby

from e2e_kit import PATIENCE_S, figures, wait_until

from flowctl.errors import FlowctlError
from flowctl.live.settings.renditions import RenditionNames
from flowctl.wire.client.source import FlvFile
from kit.sample import find_ffmpeg

LARGE, SMALL = (640, 360), (480, 270)
SIZES_BY_BYTES = {wide * high * 3 // 2: (wide, high) for wide, high in (LARGE, SMALL)}
"""Octets of a decoded picture, 4:2:0, and its size."""
RENDITIONS = RenditionNames(suffixes=("_large", "_small"))
THIN = 160_000
"""Octets a second of a line that has become slow: three quarters of the large pictures, all of the small ones."""
SHALLOW = 24 * 1024
"""Octets that a line itself may hold: what is in there looks as if it had arrived."""
NOBODY = 65534
"""VLC runs for no superuser."""


def publish_set(server, clients, sample):
    """Publish both renditions of `live/show` to a server with `RENDITIONS`."""
    sources = {name: FlvFile(sample(name)) for name in ("large", "small")}
    for name, source in sources.items():
        clients.publish(server, source, name=f"live/show_{name}")
    wait_until(lambda: (face := figures(server, "live/show")) and len(face.renditions) == 2, "the set")


class Player:
    """A program that plays one address until that ends.

    Attributes:
        sizes: width and height in one line of its log.
        faults: words that say that it could not decode something, or had to begin again.
        needs: programs and, for GStreamer, elements without which it cannot be run.
    """

    sizes = faults = None
    needs = ()

    def __init__(self, url, folder):
        self.log_path = folder / f"{type(self).__name__}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(url), stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self.options()
            )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    @classmethod
    def missing(cls):
        """Return which of what it needs is not here; "" where nothing is."""
        return " and ".join(item for item in cls.needs if not shutil.which(item))

    def command(self, url):
        raise NotImplementedError

    def options(self):
        return {}

    @property
    def log(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def shown(self):
        """Return the sizes of its pictures in their order, each once until it changes."""
        return [size for size, _ in groupby((int(wide), int(high)) for wide, high in re.findall(self.sizes, self.log))]

    def complaints(self):
        """Return what it said of anything that it could not decode."""
        return [line for line in self.log.splitlines() if re.search(self.faults, line)]

    def wait(self):
        return self.process.wait(PATIENCE_S)


class Mpv(Player):
    needs = ("mpv",)
    sizes = r"VO: \[null\] (\d+)x(\d+)"
    faults = r"^\[(ffmpeg|vd|ad|demux)\b.*([Ee]rror|conceal|[Ii]nvalid|corrupt)|^Error"

    def command(self, url):
        silent = ("--no-config", "--no-input-terminal", "--vo=null", "--ao=null")
        return ["mpv", *silent, "--msg-level=all=v", "--term-status-msg=", url]


class Vlc(Player):
    needs = ("cvlc",)
    sizes = r"VoutDisplayEvent 'resize' (\d+)x(\d+)"
    faults = r"decode_slice|conceal|error while decoding"

    def command(self, url):
        silent = ("--ignore-config", "--no-interact", "--no-color", "--aout=adummy", "--vout=vdummy")
        return ["cvlc", "-vv", *silent, url, "vlc://quit"]

    def options(self):
        environment = {"env": {**os.environ, "HOME": "/"}}
        return environment if os.geteuid() else {**environment, "user": NOBODY, "group": NOBODY, "extra_groups": []}


class GStreamer(Player):
    needs = ("gst-launch-1.0",)
    elements = ("rtmp2src", "souphttpsrc", "flvdemux", "h264parse", "avdec_h264", "aacparse", "avdec_aac")
    sizes = r"GstFakeSink:pictures\.GstPad:sink: caps = video/x-raw,.* width=\(int\)(\d+), height=\(int\)(\d+)"
    faults = r"ERROR|WARNING"

    @classmethod
    def missing(cls):
        found = super().missing()
        absent = [] if found else [item for item in cls.elements if not has_element(item)]
        return found or " and ".join(absent)

    def command(self, url):
        source = "rtmp2src" if url.startswith("rtmp") else "souphttpsrc is-live=true"
        pictures = "d.video ! queue ! h264parse ! avdec_h264 ! fakesink name=pictures sync=false"
        sound = "d.audio ! queue ! aacparse ! avdec_aac ! fakesink sync=false"
        return ["gst-launch-1.0", "-v", *f"{source} location={url} ! flvdemux name=d {pictures} {sound}".split()]


class Ffmpeg(Player):
    """FFmpeg, which lists each picture and each piece of sound that it has decoded."""

    faults = r"."  # it is asked for warnings alone

    def __init__(self, url, folder):
        self.list_path = folder / "frames.txt"
        super().__init__(url, folder)

    @classmethod
    def missing(cls):
        try:
            find_ffmpeg()
        except FlowctlError as error:
            return str(error)
        return ""

    def command(self, url):
        said = ("-hide_banner", "-nostdin", "-loglevel", "warning", "-err_detect", "explode")
        listed = (
            "-noautoscale",
            "-fps_mode",
            "passthrough",
            "-enc_time_base:v",
            "1/1000",
            "-flush_packets",
            "1",
            "-f",
            "framecrc",
        )
        return [str(find_ffmpeg()), *said, "-i", url, *listed, str(self.list_path)]

    def frames(self, stream):
        """Return (time in ticks of its clock, octets) of what it has decoded of a stream: 0 pictures, 1 sound."""
        text = self.list_path.read_text("ascii") if self.list_path.exists() else ""
        rows = [row.split(",") for row in text.splitlines() if row.startswith(f"{stream},") and row.count(",") == 5]
        return [(int(row[2]), int(row[4])) for row in rows]

    def shown(self):
        return [SIZES_BY_BYTES[octets] for octets, _ in groupby(octets for _, octets in self.frames(0))]


def has_element(name):
    if shutil.which("gst-inspect-1.0") is None:
        return False
    found = subprocess.run(["gst-inspect-1.0", "--exists", name], check=False, timeout=PATIENCE_S)
    return found.returncode == 0
