"""Low latency end to end: FFmpeg publishes, ``flowctl hls`` writes parts, and two players play them in a real browser.

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
from install_browser import PLAYERS, no_players, player
from loopback_kit import loopback

from flowctl_servers.live import SERVER

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}"),
    pytest.mark.skipif(bool(no_players()), reason=no_players()),
    pytest.mark.timeout(300),
]
COMMAND = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())"]
BITS, FIELD, HEIGHT, FPS = 32, 16, 96, 25
GLASS_TO_GLASS_MS = 3000
SECONDS = 5.0
PATIENCE_S = 60.0
IN_TIME = "const {hls, shaka, dated} = look(); return [hls ?? 1e9, shaka ?? 1e9, dated === null ? 1e9 : 0]"
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>Players</title>
<video muted playsinline></video><video muted playsinline></video>
<script src="hls.min.js"></script><script src="shaka-player.compiled.js"></script><script>
const [first, second] = document.querySelectorAll("video"), canvas = document.createElement("canvas");
const said = {errors: [], parts: 0, whole: 0, asked: []};
let hls, shakaPlayer;
function startHlsJs(url) {
  hls = new Hls({lowLatencyMode: true, maxLiveSyncPlaybackRate: 1.5});
  hls.on(Hls.Events.ERROR, (_, data) => {
    const code = data.response?.code;
    if (data.fatal || (code >= 400 && code !== 503)) said.errors.push(`hls.js: ${data.details} ${code}`);
  });
  hls.on(Hls.Events.FRAG_LOADED, (_, data) => data.part ? said.parts++ : said.whole++);
  hls.loadSource(url);
  hls.attachMedia(first);
  first.play();
}
async function startShaka(url) {
  shaka.polyfill.installAll();
  shakaPlayer = new shaka.Player();
  await shakaPlayer.attach(second);
  shakaPlayer.configure({streaming: {lowLatencyMode: true}});
  shakaPlayer.addEventListener("error", (event) => said.errors.push(`Shaka: ${event.detail.code}`));
  shakaPlayer.getNetworkingEngine().registerRequestFilter((_, request) => { said.asked.push(request.uris[0]); });
  await shakaPlayer.load(url).catch((error) => said.errors.push(`Shaka: ${error}`));
  second.play();
}
function lateness(video) {
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
  return [...upper].every((bit, index) => bit !== lower[index]) ? now % 2 ** BITS - parseInt(upper, 2) : null;
}
function look() {
  const dated = hls.playingDate && Date.now() - hls.playingDate.getTime();
  return {hls: lateness(first), shaka: lateness(second), dated};
}
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(tmp_path):
    """Return the address of a page with two players, of another origin than the live server."""
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text(PAGE.replace("BITS", str(BITS)).replace("FIELD", str(FIELD)))
    for name in PLAYERS:
        (folder / player(name).name).symlink_to(player(name).resolve())
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
        files = folder / "live"
        wait_until(lambda: len(list(files.glob("stream-*[0-9].m4s"))) > 16, "four segments and their parts", PATIENCE_S)
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_players_of_low_latency_when_they_play_are_less_than_three_seconds_behind(tmp_path, browser, page, ffmpeg_path):
    """Both go by parts; Shaka asks for the part that was announced before it is there, and both for the next list."""
    folder = tmp_path / "hls"
    with (
        open_live_server(make=SERVER.build, http=loopback(), hls_folder=folder) as server,
        painting(ffmpeg_path, address_of(server)),
        writing(server, folder, "--part", "0.5s"),
    ):
        port = next(item.address[1] for item in server.listeners if item.name == "http")
        url = f"http://{loopback(port)}/live/stream.m3u8"
        browser.open(page)
        browser.run("startHlsJs(arguments[0]); startShaka(arguments[0]);", url)
        # A player that was late at first, on a busy machine, has time to catch up.
        browser.wait(lambda: max(browser.run(IN_TIME)) < GLASS_TO_GLASS_MS, "pictures of both in time", PATIENCE_S)
        browser.wait(lambda: low_latency(watched(browser)), "both in time, by parts", PATIENCE_S)
        assert browser.run("return said.errors") == []


def watched(browser):
    """Return what the players show for some seconds."""
    looks, end = [], time.monotonic() + SECONDS
    while time.monotonic() < end:
        looks.append(browser.run("return look()"))
        time.sleep(0.1)
    return looks, browser.run("return said")


def low_latency(watched):
    """Return whether both were in time, by the clock in the picture, and asked for parts."""
    looks, said = watched
    times = [[look[name] for look in looks if look[name] is not None] for name in ("hls", "shaka")]
    if min(map(len, times)) <= len(looks) // 2 or max(map(statistics.median, times)) >= GLASS_TO_GLASS_MS:
        return False
    dated = [abs(look["dated"] - look["hls"]) for look in looks if None not in (look["hls"], look["dated"])]
    by_parts = said["parts"] > said["whole"] and sum("_HLS_part=" in address for address in said["asked"]) >= SECONDS
    return by_parts and statistics.median(dated or [GLASS_TO_GLASS_MS]) < GLASS_TO_GLASS_MS / 6
