"""The report in a real browser, offline: no message on its console, no request for anything, all of it drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import install_browser
import pytest
from report_kit import NASTY, empty_data, some_data

from flowctl.pipeline.report.page import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *install_browser.FLAGS,
    # The browser looks for its maker's hosts whatever it is told; here no name leads anywhere.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
)
OWN_HOSTS = re.compile(r"https?://[^/]*\.(googleapis|google|gvt1|gstatic)\.com[/:]")
"""Requests of the browser itself, which it makes with an empty page as well."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


class Visit:
    """A page opened by a browser: what it became, what the console said, what was asked for."""

    def __init__(self, folder, text):
        folder.mkdir()
        page, log = folder / "report.html", folder / "net.json"
        page.write_text(text, "utf-8")
        profile = f"--user-data-dir={folder / 'profile'}"
        found = subprocess.run(
            [CHROMIUM, *FLAGS, profile, f"--log-net-log={log}", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=120,
        )
        self.dom = found.stdout
        self.console = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
        urls = {event.get("params", {}).get("url", "") for event in json.loads(log.read_text("utf-8"))["events"]}
        self.requests = {url for url in urls if url.startswith("http") and not OWN_HOSTS.match(url)}


def test_report_when_opened_in_a_browser_is_quiet_and_asks_for_nothing(tmp_path):
    """With peers that say bad things the browser draws every picture, logs nothing, and makes no request."""
    visit = Visit(tmp_path / "report", render(some_data(NASTY)))
    assert visit.console == []
    assert set() == visit.requests
    assert visit.dom.count("<svg") == 12
    assert "<script" not in visit.dom
    assert "<img" not in visit.dom


def test_report_when_empty_opens_as_well(tmp_path):
    """A report of nothing is a page too."""
    visit = Visit(tmp_path / "report", render(empty_data()))
    assert (visit.console, visit.requests) == ([], set())
    assert "was not run" in visit.dom


def test_visit_when_a_page_does_load_and_complain_sees_it(tmp_path):
    """The eyes of these tests are open: a request and a message of a bad page are found."""
    bad = '<!DOCTYPE html><img src="http://127.0.0.1:9/pixel"><script>console.error("seen")</script>'
    visit = Visit(tmp_path / "bad", bad)
    assert any("seen" in line for line in visit.console)
    assert {"http://127.0.0.1:9/pixel"} == visit.requests
