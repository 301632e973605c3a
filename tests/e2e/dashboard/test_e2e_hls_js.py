"""Low latency end to end: FFmpeg publishes, ``flowctl hls`` writes parts, and hls.js plays them in a real browser.

How late a picture is, is read from the picture. Each one that is given to the encoder has the time of day painted into
it, in ms, as a row of black and white fields, and below it the same inverted, so that a picture that is torn or blurred
is not taken for a time. The page draws the picture that it shows and reads the fields; its clock is the same machine's.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import statistics
import subprocess
import sys
import threading
import time

import pytest
from dashboard_kit import Browser, why_not
from e2e_kit import address_of, open_live_server, wait_until
from install_browser import hls_js

from flowctl_servers.live import SERVER

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}"),
    pytest.mark.skipif(not hls_js().exists(), reason="hls.js is not there (make browser)"),
]
COMMAND = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())"]
BITS, FIELD, HEIGHT, FPS = 32, 16, 96, 25
GLASS_TO_GLASS_MS = 3000
PAGE = """<!doctype html><meta charset="utf-8"><title>hls.js</title><video muted playsinline></video>
<script src="hls.min.js"></script><script>
const video = document.querySelector("video"), canvas = document.createElement("canvas");
const said = {errors: [], parts: 0, whole: 0, asked: 0};
let hls;
function start(url, lowLatencyMode) {
  hls = new Hls({lowLatencyMode});
  hls.on(Hls.Events.ERROR, (_, data) => said.errors.push([data.details, data.fatal, data.response?.code ?? 0]));
  hls.on(Hls.Events.FRAG_LOADED, (_, data) => data.part ? said.parts++ : said.whole++);
  hls.on(Hls.Events.LEVEL_LOADING, (_, data) => said.asked += (data.deliveryDirectives?.part ?? -1) >= 0 ? 1 : 0);
  hls.loadSource(url);
  hls.attachMedia(video);
  video.play();
}
function look() {
  const now = Date.now();
  if (!video.videoWidth) return null;
  canvas.width = video.videoWidth; canvas.height = video.videoHeight;
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.drawImage(video, 0, 0);
  const read = (y) => {
    const row = context.getImageData(0, y, canvas.width, 1).data;
    let value = "";
    for (let bit = 0; bit < BITS; bit++) value += row[(bit * FIELD + FIELD / 2) * 4] > 127 ? "1" : "0";
    return value;
  };
  const upper = read(canvas.height / 4), lower = read(canvas.height * 3 / 4);
  const whole = [...upper].every((bit, index) => bit !== lower[index]);
  const painted = whole ? parseInt(upper, 2) : null;
  return {painted, late: painted === null ? null : (now % 2 ** BITS) - painted, ahead: hls.latency,
    dated: hls.playingDate ? now - hls.playingDate.getTime() : null, waiting: video.readyState < 3};
}
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(tmp_path):
    """Return the address of a page with hls.js, of another origin than the live server."""
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text(PAGE.replace("BITS", str(BITS)).replace("FIELD", str(FIELD)))
    (folder / "hls.min.js").symlink_to(hls_js().resolve())
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def painted_with(milliseconds):
    """Return a grey picture with a time in it."""
    bits = [milliseconds >> bit & 1 for bit in reversed(range(BITS))]
    upper = b"".join(bytes([235 if bit else 16]) * FIELD for bit in bits)
    lower = b"".join(bytes([16 if bit else 235]) * FIELD for bit in bits)
    return upper * (HEIGHT // 2) + lower * (HEIGHT // 2)


@contextlib.contextmanager
def painting(ffmpeg, address):
    """Publish pictures with the time in them, and sound, as encoders for live do it."""
    source = ("-f", "rawvideo", "-pix_fmt", "gray", "-s", f"{BITS * FIELD}x{HEIGHT}", "-r", str(FPS), "-i", "-")
    sound = ("-f", "lavfi", "-i", "sine=440:sample_rate=44100")
    encode = (
        "-c:v",
        "libx264",
        "-preset",
        "ultrafast",
        "-tune",
        "zerolatency",
        "-pix_fmt",
        "yuv420p",
        "-g",
        str(FPS),
    )
    command = [
        str(ffmpeg),
        "-v",
        "error",
        "-probesize",
        "32",
        *source,
        *sound,
        *encode,
        "-c:a",
        "aac",
        "-f",
        "flv",
        address,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    over = threading.Event()

    def paint():
        due = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            while not over.wait(max(due - time.monotonic(), 0)):
                due += 1 / FPS
                process.stdin.write(painted_with(int(time.time() * 1000) % (1 << BITS)))

    thread = threading.Thread(target=paint)
    thread.start()
    try:
        yield
    finally:
        over.set()
        process.kill()
        thread.join(10)
        process.communicate(timeout=10)


@contextlib.contextmanager
def writing(server, folder, *options):
    """``flowctl hls`` of the server's stream, until its playlist is served."""
    command = [*COMMAND, "hls", address_of(server), "--out", str(folder), "--segment-time", "1s", *options]
    process = subprocess.Popen(command, env=os.environ | {"NO_COLOR": "1"}, stderr=subprocess.DEVNULL)
    try:
        # So many segments that a player who goes by them is further behind.
        wait_until(lambda: len(list((folder / "live").glob("stream-*[0-9].m4s"))) > 16, "four segments and their parts")
        yield
    finally:
        process.terminate()
        process.wait(20)


def looks_of(browser, page, url, *, low_latency, seconds):
    """Play for a while, and return what was seen, and what hls.js said."""
    browser.open(page)
    browser.run("start(arguments[0], arguments[1])", url, low_latency)
    browser.wait(lambda: (browser.run("return look()") or {}).get("painted"), "a picture")
    looks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        looks.append(browser.run("return look()"))
        time.sleep(0.1)
    return looks, browser.run("return said")


def test_hls_js_when_it_plays_low_latency_is_less_than_three_seconds_behind(tmp_path, browser, page, ffmpeg_path):
    folder = tmp_path / "hls"
    with (
        open_live_server(make=SERVER.build, http="127.0.0.1:0", hls_folder=folder) as server,
        painting(ffmpeg_path, address_of(server)),
        writing(server, folder, "--part", "0.5s"),
    ):
        port = next(item.address[1] for item in server.listeners if item.name == "http")
        looks, said = looks_of(browser, page, f"http://127.0.0.1:{port}/live/stream.m3u8", low_latency=True, seconds=5)
    late = [look["late"] for look in looks if look["late"] is not None]
    assert len(late) > len(looks) // 2
    assert statistics.median(late) < GLASS_TO_GLASS_MS
    assert [error for error in said["errors"] if error[1] or error[2] >= 400] == []
    assert said["parts"] > said["whole"]
    assert said["asked"] >= 8
    dated = [abs(look["dated"] - look["late"]) for look in looks if look["late"] is not None and look["dated"]]
    assert statistics.median(dated) < 500
