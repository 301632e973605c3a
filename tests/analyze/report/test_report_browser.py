"""The pages in a real browser, offline: nothing on the console, no request, all drawn, fit for phone, dark and keys."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess

import install_browser
import pytest
from report_kit import NASTY, empty, felt, found_of, session, tables_of
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from flowctl.analyze.report.job import render

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
    visit = Visit(tmp_path / "report", render(found_of(tmp_path / "r", text=NASTY)))
    assert visit.console == []
    assert set() == visit.requests
    assert visit.dom.count("<canvas") == visit.dom.count("data-plot=") == 3
    assert visit.dom.count("<script") == 3
    assert "<img" not in visit.dom


def test_report_when_empty_opens_as_well(tmp_path):
    visit = Visit(tmp_path / "report", render(empty()))
    assert (visit.console, visit.requests) == ([], set())
    assert "was not run" in visit.dom


def test_visit_when_a_page_does_load_and_complain_sees_it(tmp_path):
    bad = '<!DOCTYPE html><img src="http://127.0.0.1:9/pixel"><script>console.error("seen")</script>'
    visit = Visit(tmp_path / "bad", bad)
    assert any("seen" in line for line in visit.console)
    assert {"http://127.0.0.1:9/pixel"} == visit.requests


FAINT = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
const ground = node => {
    for (; node; node = node.parentElement) {
        const found = rgb(getComputedStyle(node).backgroundColor);
        if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
};
const faint = [];
for (const node of document.querySelectorAll('main *')) {
    const said = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!said || !node.checkVisibility() || ['title', 'desc'].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const ink = rgb(node.closest('svg') ? style.fill : style.color);
    const pair = [light(ink), light(ground(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + .05) / (pair[1] + .05);
    if (contrast < 4.5) faint.push(`${node.tagName} ${node.textContent.slice(0, 30)} ${contrast.toFixed(2)}`);
}
return faint;
"""
"""Texts whose contrast with what is behind them is below 4.5, which WCAG asks for."""
WIDER = """
return [...document.querySelectorAll('main *')].filter(node => !node.closest('.wide, pre, svg')
    && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.tagName + ' ' + node.className);
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if reason := install_browser.no_browser():
        pytest.skip(reason)
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*install_browser.FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield found
    found.quit()


def test_page_when_looked_at_fits_phones_darkness_and_keys(driver, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(render(found_of(tmp_path / "r", text=NASTY)), "utf-8")
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            driver.get(page.as_uri())
            driver.execute_script("for (const node of document.querySelectorAll('details')) node.open = true")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            assert driver.execute_script(WIDER) == []
            assert driver.execute_script(FAINT) == []
    assert driver.get_log("browser") == []
    driver.get(page.as_uri())
    folded = driver.find_element("css selector", "summary")
    folded.send_keys(Keys.ENTER)
    assert driver.execute_script("return arguments[0].parentElement.open", folded)
    link = driver.find_element("css selector", "nav a[href='#read']")
    link.send_keys(Keys.ENTER)
    assert driver.current_url.endswith("#read")


BLANK = """
return [...document.querySelectorAll('canvas')].filter(canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size < 10;
}).length;
"""
"""How many charts have nothing drawn on them."""


def test_page_when_used_draws_sorts_searches_filters_and_gives_a_file(driver, tmp_path):
    page = tmp_path / "page.html"
    tables = tables_of("=evil,1")
    tables["sessions"] += [session(10 * number, stream="other", trouble_ms=5e5 + number) for number in range(3)]
    page.write_text(render(found_of(tmp_path / "r", tables)), "utf-8")
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    driver.get(page.as_uri())
    assert driver.execute_script("return document.querySelectorAll('[data-plot] canvas').length") == 3
    assert driver.execute_script(BLANK) == 0
    table = driver.find_element("css selector", "table[data-name=worst]")

    def cells(name):
        place = "[...arguments[0].tHead.rows[0].cells].findIndex(head => head.dataset.name === arguments[1])"
        script = f"const at = {place}; return [...arguments[0].tBodies[0].rows].filter(row => !row.hidden)"
        return driver.execute_script(
            f"{script}.map(row => row.cells[at].dataset.v || row.cells[at].textContent)", table, name
        )

    everyone = cells("trouble_ms")
    table.find_element("css selector", "th[data-name=trouble_ms] button").send_keys(Keys.ENTER)
    assert cells("trouble_ms") == sorted(everyone, key=float, reverse=True)
    table.find_element("css selector", "th[data-name=trouble_ms] button").send_keys(Keys.ENTER)
    assert cells("trouble_ms") == sorted(everyone, key=float)
    section = table.find_element("xpath", "./ancestor::section")
    search = section.find_element("css selector", "input")
    search.send_keys("OTHER")
    assert cells("stream") == ["live/other"] * 3
    search.send_keys(Keys.BACKSPACE * 5)
    assert len(cells("stream")) == len(everyone)
    Select(section.find_element("css selector", "select[aria-label=stream]")).select_by_visible_text("live/s2=evil,1")
    assert set(cells("stream")) == {"live/s2=evil,1"}
    assert len(cells("stream")) < len(everyone)
    section.find_element("css selector", "button[title]").click()
    WebDriverWait(driver, 30).until(lambda _: (tmp_path / "worst.csv").exists())
    rows = list(csv.DictReader((tmp_path / "worst.csv").read_text("utf-8").splitlines()))
    assert [float(row["trouble_ms"]) for row in rows] == [float(cell) for cell in cells("trouble_ms")]
    assert {row["stream"] for row in rows} == {"live/s2=evil,1"}
    assert driver.get_log("browser") == []


def test_file_of_a_table_when_a_name_is_a_formula_has_it_as_text(driver, tmp_path):
    page = tmp_path / "page.html"
    rows = [felt("stream", name, 40 - at) for at, name in enumerate(("=1+1", '+a"b', "VLC;=1+1"))]
    page.write_text(render(found_of(tmp_path / "r", {"experience": rows}, {})), "utf-8")
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    driver.get(page.as_uri())
    driver.find_element("css selector", ".tools button").click()
    WebDriverWait(driver, 30).until(lambda _: (tmp_path / "stream.csv").exists())
    text = (tmp_path / "stream.csv").read_text("utf-8")
    found = list(csv.DictReader(text.splitlines()))
    assert [(row["key"], row["viewers"]) for row in found] == [("'=1+1", "40"), ("'+a\"b", "39"), ("VLC;=1+1", "38")]
    assert '"VLC;=1+1"' in text  # half of the world divides by semicolons


def test_looks_when_a_page_is_faint_and_wide_find_it(driver, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!DOCTYPE html><main><p style='color:#bbb;width:3000px'>pale</p></main>", "utf-8")
    driver.get(page.as_uri())
    assert [text.split()[:2] for text in driver.execute_script(FAINT)] == [["P", "pale"]]
    assert [text.strip() for text in driver.execute_script(WIDER)] == ["P"]
