"""The pictures of the documents, taken anew by a browser from what flowctl shows today.

``make pictures`` has them put into docs/images, so that a picture that became untrue is replaced by one command.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dashboard_kit import Browser, open_dashboard, why_not
from e2e_kit import Clients, wait_for_viewers, wait_until
from loopback_kit import loopback
from report_kit import found_of

from flowctl.analyze.report.job import render as render_report
from flowctl.core.flow.limits import Limits
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.client.source import FlvFile

FOLDER = os.environ.get("FLOWCTL_PICTURES")
WATCHED_S = 25.0 if FOLDER else 0.0
"""Time that a picture of the documents shows of the viewers; a test needs none."""
RATES = (480_000, 720_000, 1_000_000, 1_300_000)
"""Bits a second of the slow viewers; the stream has 1.7 million."""
LIMITS = Limits.parse("192KiB,1024,2s", "2MiB,4096,8s", target_delay_ms=1000)

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}"),
    pytest.mark.realtime,
    pytest.mark.timeout(900 if FOLDER else 120),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with contextlib.closing(Browser(tmp_path_factory.mktemp("profile"))) as found:
        yield found


@pytest.fixture
def take(browser, tmp_path):
    """Return a function that takes a picture of what the browser shows, and sees that it is one."""

    def picture(name, width, height):
        browser.emulate((width, height))
        path = Path(FOLDER or tmp_path) / name
        assert browser.driver.save_screenshot(str(path))
        data = path.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (width, height)
        assert len(data) > 20_000  # an empty page has a tenth
        assert browser.faults() == []

    return picture


def run_flowctl(folder, *arguments):
    command = [sys.executable, "-m", "flowctl", *map(str, arguments)]
    patience_s = 600 if FOLDER else 100
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_when_viewers_are_slow_is_as_the_documents_show_it(browser, take, sample):
    options = {"limits": LIMITS, "http": loopback()}
    with open_dashboard(**options) as (server, address), Clients() as clients:
        clients.publish(server, FlvFile(sample("large")), name="live/main-stage")
        wait_until(lambda: server.hub.find_stream("live/main-stage"), "the stream")
        browser.open(address, size=(1280, 1500))
        profiles = [PlayProfile()] * 30 + [PlayProfile(rate=rate) for rate in RATES]
        players = [clients.play(server, profile, name="live/main-stage") for profile in profiles]
        wait_for_viewers(server, len(players), "live/main-stage")
        browser.click("#streams button")  # Watch
        browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > 1, "a picture")
        browser.wait(lambda: len(browser.texts("#viewers tbody button")) >= len(RATES), "the slow viewers")
        time.sleep(WATCHED_S)
        browser.wait(lambda: "too late to show" in browser.text("#viewers"), "what was left out for them")
        browser.click("#viewers tbody button")
        assert browser.text("#detail-peer")
        take("dashboard.png", 1280, 1500)


def test_load_report_when_made_is_as_the_documents_show_it(browser, take, tmp_path):
    with open_dashboard(limits=LIMITS) as (server, _):
        url = f"rtmp://{loopback(server.address[1])}/live/load"
        run_flowctl(
            tmp_path, "load", url, "--publishers", 1, "--viewers", 30, "--duration", "6s", "--report", "run.html",
            "--profile", "slow@1M:10%", "--profile", "stall:2", "--fail-on", "healthy.missing>0",
        )  # fmt: skip
    browser.open((tmp_path / "run.html").as_uri())
    assert "healthy.missing>0" in browser.text("body")
    take("load-report.png", 1060, 1900)


def test_page_of_the_cluster_when_made_is_as_the_documents_show_it(browser, take, tmp_path):
    run_flowctl(tmp_path, "demo", "--cluster", "--duration", "12s", "--healthy", 2, "--report", "cluster.html")
    browser.open((tmp_path / "cluster.html").as_uri())
    assert "every viewer has every frame" in browser.text("body")
    take("cluster-demo.png", 1000, 1095)


def test_report_of_the_pipeline_when_made_is_as_the_documents_show_it(browser, take, tmp_path):
    page = tmp_path / "results" / "report.html"
    if FOLDER:  # of an analysis; a test is content with what is made of tables
        run_flowctl(tmp_path, "analyze", "synth", "events", "--events", "40k", "--samples", "10s", "--days", "0.05")
        run_flowctl(tmp_path, "analyze", "all", "events", "--out", "results")
    else:
        text = render_report(found_of(tmp_path / "results"))
        page.write_text(text, "utf-8")
    browser.open(page.as_uri())
    assert "How sure?" in browser.text("body")
    take("pipeline-report.png", 1280, 1600)
