"""A price list over WebSocket in a real browser: the page of the documents, a page that is busy, and one that is cut.

A busy page asks the server, in a loop that lets nothing else happen in it, whether it may go on: what is sent to it
meanwhile fills the browser's buffers, then the kernel's. Publishing waits for the page that is not busy.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random

import pytest
from dashboard_kit import Browser, why_not
from e2e_kit import wait_until
from loopback_kit import LOOPBACK, loopback
from source_kit import ROOT

from flowctl import HttpAnswer, Limits, Server, Topic, WebSocketSession
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.reasons import CloseReason

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}")
PRICES = (ROOT / "docs/how-to/prices.html").read_bytes()
PATIENT = SenderSettings(stuck_s=0, soft_too_long_s=0)
"""Time is no reason to end a page: a slow machine takes long for what these tests do."""
KEYS = [f"K{number}" for number in range(20)]
PAD = base64.b64encode(random.Random(29).randbytes(6000)).decode()  # does not deflate to nothing
ROUNDS = 100
"""16 MB: several times what a browser and two kernels take for a page that does not read."""
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>Reader</title><script>
const seen = {}; let ended = null, busy = false;
const socket = new WebSocket(`ws://${location.host}/${location.search}`);
socket.onmessage = (event) => {
  const {key, number} = JSON.parse(event.data);
  if (key === "busy") return beBusy();
  (seen[key] ??= []).push(number);
};
socket.onclose = (event) => { ended = [event.code, event.reason]; };
function beBusy() {
  busy = true;
  const asked = new XMLHttpRequest();
  do { asked.open("GET", "/busy", false); asked.send(); } while (asked.responseText === "busy");
  busy = false;
}
</script>"""


class Market:
    """A server with one topic, its pages by the name in their query."""

    def __init__(self, **options):
        self.topic = Topic("prices")
        self.pages, self.ended = {}, {}
        self.busy = False
        self.asked = 0
        admission = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)
        self.server = Server(lambda: Page(self), LOOPBACK, 0, admission=admission, **options)

    def publish(self, number, names, **options):
        """Publish a message for each name; wait until the quick page's kernel has them."""
        for name in names:
            key = None if options else name
            self.topic.publish(json.dumps({"key": name, "number": number, "pad": PAD}), key=key, **options)
        quick = self.pages["quick"].connection.sender
        wait_until(lambda: not quick.load().messages, "what was published is with the quick page")


class Page(WebSocketSession):
    ping_interval_s = 0

    def __init__(self, market):
        super().__init__()
        self.market, self.name = market, ""

    def requested(self, request):
        self.name = request.query.get("name", "")
        if request.path == "/busy":
            self.market.asked += 1
            return HttpAnswer(200, "busy" if self.market.busy else "over")
        page = PRICES if request.path == "/prices" else PAGE
        return None if request.websocket else HttpAnswer(200, page, [("Content-Type", "text/html; charset=utf-8")])

    def accepted(self):
        self.market.pages[self.name] = self
        self.follow(self.market.topic)

    def closed(self, reason, details):
        if self.market.pages.get(self.name) is self:  # no page or answer
            self.market.ended[self.name] = reason


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@contextlib.contextmanager
def two_pages(browser, **options):
    """A market with a page that is busy until `market.busy` is False, and a quick one; yields how to look at each.

    They have processes of their own in the browser, because their hosts differ.
    """
    market = Market(**options)
    with market.server as server:
        port = server.address[1]
        browser.open(f"http://{loopback(port)}/?name=quick")
        quick = browser.driver.current_window_handle
        browser.driver.switch_to.new_window("tab")
        browser.driver.get(f"http://localhost:{port}/?name=slow")
        slow = browser.driver.current_window_handle
        wait_until(lambda: len(market.pages) == 2, "both pages")
        browser.driver.switch_to.window(quick)  # nothing is asked of the slow page while it is busy
        market.busy = True
        market.pages["slow"].send_message('{"key": "busy"}')
        wait_until(lambda: market.asked, "the page is busy")

        def look(window, expression):
            browser.driver.switch_to.window(window)
            return browser.run(f"return {expression}")

        try:
            yield market, lambda expression: look(quick, expression), lambda expression: look(slow, expression)
        finally:
            market.busy = False
            browser.driver.switch_to.window(slow)
            browser.driver.close()
            browser.driver.switch_to.window(quick)


def test_page_of_the_documents_shows_prices_as_they_change_and_why_it_was_closed(browser):
    market = Market()
    with market.server as server:
        market.topic.publish('{"EUR": 1.5}', key="EUR")
        market.topic.publish('{"EUR": 1.25, "USD": 1}', key="EUR")
        browser.open(f"http://{loopback(server.address[1])}/prices")
        browser.wait(lambda: browser.texts("td") == ["EUR", "1.2500", "1", "USD", "1.0000", "1"], "the newest prices")
        market.topic.publish('{"EUR": 0.125}', key="EUR")
        browser.wait(lambda: browser.texts("td")[:3] == ["EUR", "0.1250", "2"], "the next price")
        assert browser.text("#state") == "connected"
        market.pages[""].close_with(1008, "not allowed any more")
        browser.wait(lambda: browser.text("#state") == "closed: 1008 not allowed any more", "why it was closed")
        assert browser.faults() == []


def test_page_that_was_busy_gets_the_newest_values_while_another_sees_every_update(browser):
    with two_pages(browser, limits=NO_LIMITS, settings=PATIENT) as (market, quick, slow):
        for number in range(ROUNDS):
            market.publish(number, KEYS)
        last = ROUNDS - 1
        browser.wait(lambda: quick(f"Object.values(seen).every((numbers) => numbers.at(-1) === {last})"), "all updates")
        assert quick("seen") == {key: list(range(ROUNDS)) for key in KEYS}
        assert not market.ended
        market.busy = False
        newest = f"!busy && Object.values(seen).filter((numbers) => numbers.at(-1) === {last}).length"
        browser.wait(lambda: slow(newest) == len(KEYS), "the newest values")
        seen = slow("seen")
        for numbers in seen.values():
            assert numbers == sorted(set(numbers))
            assert len(numbers) < ROUNDS / 2
            assert numbers[-1] - numbers[-2] > ROUNDS / 4, "what it missed was left out, not sent late"


def test_page_that_is_cut_for_being_slow_sees_why(browser):
    with two_pages(browser, limits=Limits.parse("256KiB,0,0", "512KiB,0,0"), settings=PATIENT) as (market, quick, slow):
        count = 0
        while "slow" not in market.ended and count < ROUNDS * len(KEYS):
            market.publish(count, ["news"], droppable=False)
            count += 1
        market.busy = False  # before the socket's end has lingered
        assert market.ended == {"slow": CloseReason.HARD_LIMIT}
        browser.wait(lambda: slow("ended"), "the end")
        assert slow("ended") == [1013, "too slow: more waits for you than the limit"]
        assert slow("seen.news") == list(range(len(slow("seen.news")))), "whole messages up to its end"
        browser.wait(lambda: quick("seen.news?.length") == count, "every message")
        assert quick("ended") is None
