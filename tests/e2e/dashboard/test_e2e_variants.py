"""HLS of a set in a real browser: two players go down on a line that has become slow, and up again."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import urllib.error
import urllib.request

import pytest
from cli_kit import served
from dashboard_kit import Browser, why_not
from e2e_kit import address_of, wait_until
from install_browser import PLAYERS, no_players, player
from loopback_kit import LOOPBACK, loopback

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}"),
    pytest.mark.skipif(bool(no_players()), reason=no_players()),
    pytest.mark.timeout(600),
]
SIZES = {"180": "100k", "240": "300k", "360": "900k"}
"""Heights of the pictures, and their bit rates."""
SLOW_BYTES_PER_S = 450_000 / 8
"""A line that carries two of them."""
PATIENCE_S = 60.0
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>Player</title>
<video muted playsinline></video>
<script src="hls.min.js"></script><script src="shaka-player.compiled.js"></script><script>
const video = document.querySelector("video"), said = {faults: [], heights: () => []};
function startHlsJs(url) {
  const hls = new Hls({lowLatencyMode: true});
  hls.on(Hls.Events.ERROR, (_, data) => {
    if (data.fatal) said.faults.push(`${data.details} ${data.reason}`);
  });
  hls.loadSource(url);
  hls.attachMedia(video);
  said.heights = () => hls.levels.map((level) => level.height);
}
async function startShaka(url) {
  shaka.polyfill.installAll();
  const made = new shaka.Player();
  await made.attach(video);
  made.configure({streaming: {lowLatencyMode: false}});  // with it a line counts as slow as parts are made
  made.addEventListener("error", (event) => said.faults.push(`Shaka: ${event.detail.code}`));
  await made.load(url).catch((error) => said.faults.push(`Shaka: ${error}`));
  said.heights = () => made.getVariantTracks().map((item) => item.height);
}
function start(name, url) {
  Promise.resolve((name === "hls.js" ? startHlsJs : startShaka)(url)).then(() => video.play());
}
function look() {
  return {heights: said.heights(), faults: said.faults, shown: video.videoHeight, at: video.currentTime};
}
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(tmp_path):
    """Return the address of a page with a player, of another origin than the live server."""
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text(PAGE)
    for name in PLAYERS:
        (folder / player(name).name).symlink_to(player(name).resolve())
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{loopback(server.server_port)}/index.html"
        server.shutdown()


@pytest.fixture
def show(tmp_path, tmp_path_factory, monkeypatch, programs):
    """Return the address of the playlist of a set that FFmpeg publishes."""
    folder = tmp_path_factory.mktemp("run")  # whose name is short, as those of sockets have to be
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    names = ",".join(f"_{height}" for height in reversed(SIZES))
    options = ("--hls", "live/show", "--hls-folder", tmp_path / "hls", "--renditions", names, "--http", loopback())
    with served("live", *map(str, options)) as server:
        server.address = (LOOPBACK, server.ready["port"])
        publish(programs, server)
        url = f"http://{server.ready['http'][0]}/live/show.m3u8"
        wait_until(lambda: fetched(url).count("#EXT-X-STREAM-INF") == len(SIZES), "a playlist of all", PATIENCE_S)
        one = url.replace(".m3u8", "%252b360.m3u8")
        # Shaka asks for the segment that is not complete where there are but one or two before it.
        wait_until(lambda: fetched(one).count("#EXTINF") > 3, "four segments", PATIENCE_S)
        yield url


def publish(programs, server):
    split = "".join(f"[{height}]" for height in SIZES)
    sizes = [f"[{height}]scale=-2:{height}[out{height}]" for height in SIZES]
    rates = [
        word
        for place, rate in enumerate(SIZES.values())
        for word in (f"-b:v:{place}", rate, f"-maxrate:v:{place}", rate, f"-bufsize:v:{place}", rate)
    ]
    outputs = [
        f"[f=flv:select=\\'v:{place},a\\']{address_of(server, 'live/show')}_{height}"
        for place, height in enumerate(SIZES)
    ]
    programs.start(
        *("-re", "-f", "lavfi", "-i", "testsrc2=size=640x360:rate=25", "-f", "lavfi", "-i", "sine=sample_rate=44100"),
        *("-filter_complex", ";".join([f"[0:v]noise=alls=12:allf=t,split={len(SIZES)}{split}", *sizes])),
        *(word for height in SIZES for word in ("-map", f"[out{height}]")),
        *("-map", "1:a", "-c:v", "libx264", "-preset", "ultrafast", "-tune", "zerolatency", "-pix_fmt", "yuv420p"),
        *("-g", "25", "-keyint_min", "25", "-sc_threshold", "0", *rates, "-c:a", "aac", "-b:a", "32k"),
        *("-flags", "+global_header", "-f", "tee", "|".join(outputs)),
    )


def fetched(url):
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()
    return ""


def on_line(browser, bytes_per_s):
    """Have the page on a line of that rate; -1: as fast as it goes."""
    browser.driver.execute_cdp_cmd("Network.enable", {})
    line = {"offline": False, "latency": 0, "downloadThroughput": bytes_per_s, "uploadThroughput": -1}
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", line)


@pytest.mark.realtime
@pytest.mark.parametrize("name", PLAYERS)
def test_player_when_its_line_becomes_slow_and_fast_again_goes_down_and_up(name, browser, page, show):
    browser.open(page)
    on_line(browser, -1)
    browser.run("start(arguments[0], arguments[1])", name, show)

    def shows(true, what):
        browser.wait(lambda: true(browser.run("return look().shown")), what, PATIENCE_S)

    shows(lambda height: height == 360, "the largest")
    on_line(browser, SLOW_BYTES_PER_S)
    shows(lambda height: 0 < height < 360, "a smaller one on a slow line")
    on_line(browser, -1)
    shows(lambda height: height == 360, "the largest again")
    at = browser.run("return look().at")
    browser.wait(lambda: browser.run("return look().at") > at + 1, "more of it", PATIENCE_S)
    said = browser.run("return look()")
    assert sorted(said["heights"]) == [180, 240, 360]
    assert said["faults"] == []
