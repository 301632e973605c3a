"""The dashboard in a real browser: what it shows of a slow viewer, and when, what it does, and whom it asks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from operator import sub

import pytest
from certificate_kit import Pair
from dashboard_kit import COLOURS, PAGE_HOST, PHONE, WIDE, Browser, contrast, luminance, open_dashboard, why_not
from e2e_kit import NAME, Clients, wait_for_keys, wait_until
from e2e_players import LARGE, RENDITIONS, SHALLOW, SMALL, THIN, publish_set
from loopback_kit import LOOPBACK, loopback
from selenium.webdriver.common.keys import Keys

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import SendState
from flowctl.core.server.admission import AdmissionLimits
from flowctl.demo.line import ProxyLine
from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.session_config import ClientSessionConfig

THROTTLED = PlayProfile(rate=200_000)
LIMITS = Limits.parse("64KiB,0,0", "64MiB,0,0")
"""A viewer that reads an eighth of the stream is at the soft limit within half a second, and is not cut."""
TOKEN = "a-token-of-the-tests-0123456789"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
TURNED = "\u202egnp.live\u2066"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return the one browser of all these tests."""
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@contextlib.contextmanager
def shown_server(**options):
    """Run a live server with its dashboard and a stream; return the server, its clients and the dashboard's address."""
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(open_dashboard(limits=LIMITS, **options))
        clients = stack.enter_context(Clients())
        clients.publish(server, SyntheticSource(video_bit_rate=1_600_000, fps=30, key_interval_s=2))
        wait_for_keys(server, 1)
        yield server, clients, address


@pytest.fixture(scope="module")
def room():
    """Return a server that only this machine reaches, and that asks for no token."""
    with shown_server(http=loopback()) as found:
        yield found


@pytest.fixture
def slow(room):
    """Return a function that starts a viewer behind a thin line; it is gone after the test."""
    server, clients, _ = room
    started = []

    def play():
        started.append(clients.play(server, THROTTLED))
        return started[-1]

    yield play
    ports = {client.local_port for client in started}
    server.kick(lambda connection: connection.peer[1] in ports, "the test is over")
    wait_until(lambda: not any(item.peer[1] in ports for item in server.connections()), "the viewers gone")


def name_of(client):
    """Return how the page calls a client."""
    return loopback(client.local_port)


def state_of(browser, client):
    return browser.run(
        "const row = [...document.querySelectorAll('#viewers tbody')].find((item) => "
        "item.querySelector('button').textContent === arguments[0]); "
        "return row?.querySelector('.chip').textContent ?? ''",
        name_of(client),
    )


def choose(browser, client):
    """Choose a viewer of the list."""
    browser.wait(lambda: state_of(browser, client), f"{name_of(client)} in the list")
    browser.run(
        "[...document.querySelectorAll('#viewers button')].find((item) => item.textContent === arguments[0]).click()",
        name_of(client),
    )
    browser.wait(lambda: browser.text("#detail-peer") == name_of(client), "the viewer's figures")


def connection_of(server, client):
    return next((item for item in server.connections() if item.peer[1] == client.local_port), None)


def test_throttled_viewer_when_watched_turns_soft_limit_within_2_s_with_its_reason(browser, room, slow):
    server, _, address = room
    browser.open(address)
    browser.wait(lambda: browser.text("#freshness") == "live", "figures")
    viewer = slow()
    wait_until(lambda: (item := connection_of(server, viewer)) and item.sender.state is SendState.SOFT_LIMIT, "slow")
    began = time.monotonic()
    browser.wait(lambda: state_of(browser, viewer) == "SOFT_LIMIT", "SOFT_LIMIT on the page", 2.0)
    assert time.monotonic() - began < 2.0
    why = browser.run("return document.querySelector('#viewers .why').textContent")
    assert "limit 64.0 KiB" in why
    choose(browser, viewer)
    browser.wait(lambda: "SOFT_LIMIT" in browser.text("#ledger"), "the edge in the ledger")
    assert [text for text in browser.texts("#axes .label > span:last-child") if "soft 64" in text]
    assert browser.text("#states .lane:nth-child(3) b") == "1"


def test_viewer_of_a_set_when_listed_has_its_rendition_and_why(browser, room, slow):
    """The column is there where a viewer follows a set, and a pointer on it, and the viewer's facts, tell the rest."""
    server, _, address = room
    client = slow()
    browser.open(address)
    choose(browser, client)
    column, facts = ".viewers th.rendition", "return document.querySelector('#detail-facts').innerText"
    assert not browser.find(column).is_displayed()
    assert "of its time" not in browser.run(facts)

    connection = connection_of(server, client)
    book = connection.renditions = RenditionBook()
    book.enter(connection.now() - 3000.0, "360", "", lambda: ("360", "720", "1080"))
    book.switch(connection.now() - 1000.0, "720", "the line takes 1.25 of 2.5 Mbit/s", failed=True)
    cell = browser.wait(lambda: browser.find("#viewers td.rendition"), "the cell")
    browser.wait(lambda: cell.text == "720", "the rendition")
    told = cell.get_attribute("title")
    assert told.startswith("720 of 3 for 16 min 4")
    for words in (": the line takes 1.25 of 2.5 Mbit/s; ", "67 % of its time in 360", "1 switch, 1 up in vain"):
        assert words in told
    assert browser.find(column).is_displayed()
    assert "67 % of its time in 360" in browser.run(facts)
    browser.emulate(PHONE)
    assert cell.is_displayed()
    assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_kick_when_confirmed_ends_the_connection(browser, room, slow):
    server, _, address = room
    browser.open(address)
    viewer = slow()
    choose(browser, viewer)
    browser.click("#do-kick")
    browser.fill("#ask input[name=reason]", "too slow")
    assert connection_of(server, viewer) is not None
    browser.click("#ask-do")
    wait_until(lambda: viewer.end is not None, "the end")
    wait_until(lambda: connection_of(server, viewer) is None, "gone at the server")
    browser.wait(lambda: browser.text("#detail-state") == "GONE", "its end on the page")
    assert "Kicked" in browser.text("#said")


def test_limits_when_changed_are_in_force_for_that_connection(browser, room, slow):
    server, _, address = room
    browser.open(address)
    viewer = slow()
    choose(browser, viewer)
    browser.click("#do-limits")
    browser.fill("#ask input[name=soft]", "1MiB,500,2s")
    browser.fill("#ask input[name=hard]", "nonsense")
    browser.click("#ask-do")
    browser.wait(lambda: "nonsense" in browser.text("#ask-fault"), "what is wrong with them")
    browser.fill("#ask input[name=hard]", "8MiB,5000,20s")
    browser.click("#ask-do")
    sender = connection_of(server, viewer).sender
    wait_until(lambda: sender.limits.size.soft == 1 << 20, "the limits in force")
    assert (sender.limits.messages.hard, server.limits.size.soft) == (5000, 64 * 1024)
    browser.wait(lambda: "soft 1.0 MiB" in browser.text("#axes"), "the new marks on the page")


@pytest.mark.parametrize("host", [PAGE_HOST, "localhost"])
def test_picture_when_watched_moves(browser, room, host):
    """By whichever of its names the page was opened: its policy allows the media of that one alone."""
    _, _, address = room
    browser.open(address.replace(PAGE_HOST, host))
    browser.click("#streams button")
    browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > 0, "a first picture")
    first = browser.run("return document.querySelector('video').currentTime")
    browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > first + 1, "a second more")
    assert browser.run("return document.querySelector('video').videoWidth") > 0
    assert browser.run("return document.getElementById('picture-note').hidden") is True
    assert browser.hosts() == {host}


def test_picture_when_its_address_says_so_is_shown_beside_that_of_a_slow_line(browser, room):
    server, _, address = room
    port = next(item.address[1] for item in server.listeners if item.name == "http")
    with (
        ProxyLine(port, rate=40_000, buffer_bytes=32 * 1024, host=LOOPBACK) as line,
        ProxyLine(port, host=LOOPBACK) as other,
    ):
        asked = f"watch={NAME}&beside={line.port}&line=half+a+line&set={NAME}&by={other.port}&what=a+set"
        browser.open(f"{address}#{asked}")
        for video in ("picture-video", "beside-video", "chosen-video"):
            time_s = f"return document.getElementById('{video}').currentTime"
            browser.wait(lambda time_s=time_s: browser.run(time_s) > 0, f"the first picture of {video}")
        assert (browser.text("#beside-name"), browser.text("#chosen-name")) == ("half a line", "a set")
        assert browser.run("return document.getElementById('beside').hidden") is False
    assert browser.hosts() == {PAGE_HOST}


@pytest.mark.timeout(150)
def test_picture_of_a_set_when_its_line_becomes_slow_is_smaller_and_goes_on(browser, sample):
    """A change of size either way is no fault to mpegts.js, and the time of both pictures goes on."""
    with open_dashboard(http=loopback(), renditions=RENDITIONS) as (server, address), Clients() as clients:
        publish_set(server, clients, sample)
        port = next(item.address[1] for item in server.listeners if item.name == "http")
        with ProxyLine(port, buffer_bytes=SHALLOW, host=LOOPBACK) as line:
            browser.open(f"{address}#watch=live/show&beside={line.port}&line=a+line")
            pictures = "return ['picture', 'beside'].map((id) => document.getElementById(`${id}-video`).%s)"
            wide, times = pictures % "videoWidth", pictures % "currentTime"
            browser.wait(lambda: browser.run(wide) == [LARGE[0]] * 2, "large pictures on both")
            line.rate = THIN
            browser.wait(lambda: browser.run(wide) == [LARGE[0], SMALL[0]], "small ones on the slow line alone")
            changed = browser.run(times)
            browser.wait(lambda: min(map(sub, browser.run(times), changed)) > 1, "a second more of both")
            notes = "return ['picture', 'beside'].map((id) => document.getElementById(`${id}-note`).hidden)"
            assert browser.run(notes) == [True, True]
            assert browser.faults() == []


def test_picture_when_a_stream_asks_for_a_key_is_watched_with_it(browser, tmp_path):
    key = make_key()
    (tmp_path / "keys").write_text(f"{hash_key(key)} play live/*\n")
    access = StreamAccess(play_auth=(Proof.KEY,), keys=read_keys(tmp_path / "keys"))
    with shown_server(http=loopback(), access=access) as (_, _, address):
        browser.open(address)
        browser.click("#streams button")
        browser.fill("#ask input[name=proof]", f"key={key}")
        browser.click("#ask-do")
        browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > 0.5, "a picture")
        assert browser.run("return document.querySelector('video').videoWidth") > 0


def test_picture_and_changes_when_the_page_comes_over_tls_need_nothing_without_it(browser, tmp_path):
    """A browser loads nothing over plain HTTP into such a page, and tells the server that it is of the same origin."""
    pair = Pair(tmp_path)
    secure = {"tls_certificate": pair.certificate, "tls_key": pair.key, "https": loopback()}
    browser.driver.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})
    try:
        with shown_server(admin=f"tls://{loopback()}", http=loopback(), **secure) as (server, clients, address):
            assert address.startswith("https://")
            viewer = clients.play(server, THROTTLED)
            browser.open(f"{address}#watch={NAME}")
            browser.wait(lambda: browser.run("return document.querySelector('video').currentTime") > 0.5, "a picture")
            choose(browser, viewer)
            browser.click("#do-kick")
            assert browser.faults() == []
            browser.click("#ask-do")
            wait_until(lambda: viewer.end is not None, "the end of the viewer")
    finally:
        browser.driver.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": False})


def test_requests_when_all_is_used_go_to_no_other_host(browser, room, slow):
    _, _, address = room
    browser.open(address)
    viewer = slow()
    choose(browser, viewer)
    browser.click("#token-open")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    time_s = browser.run("return performance.now()")
    browser.wait(lambda: browser.run("return performance.now()") > time_s + 1500, "another look")
    entries = browser.run("return performance.getEntriesByType('resource').map((item) => new URL(item.name).host)")
    assert set(entries) == {address.split("/")[2]}
    assert browser.hosts() == {PAGE_HOST}
    assert browser.faults() == []


def test_page_when_only_keys_are_used_can_be_operated(browser, room, slow):
    server, _, address = room
    browser.open(address)
    viewer = slow()
    browser.wait(lambda: state_of(browser, viewer), "the viewer")
    keys = browser.driver.switch_to
    seen = []
    for _ in range(40):
        keys.active_element.send_keys(Keys.TAB)
        said, outline = browser.run(
            "const a = document.activeElement; "
            "const o = getComputedStyle(a.matches('.tabs input') ? a.nextElementSibling : a); "
            "return [a.getAttribute('aria-label') || a.textContent || a.name || a.id, "
            "o.outlineStyle !== 'none' && parseFloat(o.outlineWidth) >= 1]"
        )
        seen.append(said)
        assert outline, f"focus cannot be seen on {said!r}"
        if said == name_of(viewer):
            break
    assert seen[-1] == name_of(viewer), seen
    assert {"Token", f"Watch {NAME}"} <= set(seen)
    keys.active_element.send_keys(Keys.ENTER)
    browser.wait(lambda: browser.text("#detail-peer") == name_of(viewer), "its figures")
    for _ in range(6):
        keys.active_element.send_keys(Keys.TAB)
        if keys.active_element.get_attribute("id") == "do-kick":
            break
    keys.active_element.send_keys(Keys.ENTER)
    assert browser.run("return document.getElementById('ask').open") is True
    keys.active_element.send_keys(Keys.ESCAPE)
    browser.wait(lambda: not browser.run("return document.getElementById('ask').open"), "the dialog to close")
    keys.active_element.send_keys(Keys.ESCAPE)
    browser.wait(lambda: keys.active_element.text == name_of(viewer), "focus back in the list")
    assert connection_of(server, viewer) is not None


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_when_light_or_dark_wide_or_narrow_fits_and_can_be_read(browser, room, slow, size, scheme):
    _, _, address = room
    browser.open(address, size=size, scheme=scheme)
    viewer = slow()
    choose(browser, viewer)
    wide = browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    ink, paper = browser.run(COLOURS, browser.find("body"))
    assert (luminance(paper) > 0.8, luminance(ink) < 0.1) == ((True, True) if scheme == "light" else (False, False))
    card = browser.run(COLOURS, browser.find("section"))[1]
    for css in (
        "h2",
        ".hint",
        ".tiles dt",
        ".viewers .why",
        ".viewers .of",
        ".facts dt",
        "#do-kick",
        ".empty",
        ".clock",
    ):
        colour = browser.run(COLOURS, browser.wait(lambda css=css: browser.find(css), css))[0]
        assert contrast(colour, card) >= 4.5, f"{css}: {colour} on {card}"
    assert browser.run("return document.querySelectorAll('button:not(:disabled)').length") > 5
    for opener in ("#do-limits", "#do-kick", "#do-ban", "#ban-add", "#token-open"):
        browser.run("arguments[0].click()", browser.find(opener))
        for button in browser.driver.find_elements("css selector", "dialog[open] button"):
            colour, ground = browser.run(COLOURS, button)
            assert contrast(colour, ground) >= 4.5, f"{button.text!r} after {opener}: {colour} on {ground}"
        browser.run("document.querySelector('dialog[open]').close()")


def test_viewers_when_many_are_read_page_by_page_and_nothing_jumps(browser):
    with shown_server(admission=AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)) as (
        server,
        clients,
        address,
    ):
        clients.publish(server, SyntheticSource(video_bit_rate=50_000, fps=10), name="live/small")
        wait_for_keys(server, 1, "live/small")
        for _ in range(120):
            clients.play(server, name="live/small", keep=lambda *_: None)
        browser.open(address)
        browser.click(".tabs label:last-child")
        browser.wait(lambda: browser.text("#page-where") == "1 to 50 of 120", "the first page")
        browser.run(
            "window.moved = 0; new PerformanceObserver((list) => { for (const item of list.getEntries()) "
            "if (!item.hadRecentInput) window.moved += item.value; }).observe({type: 'layout-shift'})"
        )
        assert len(browser.texts("#viewers tbody")) == 50
        browser.click("#page-next")
        browser.wait(lambda: browser.text("#page-where") == "51 to 100 of 120", "the second page")
        browser.click("#page-next")
        browser.wait(lambda: len(browser.texts("#viewers tbody")) == 20, "the last page")
        assert browser.find("#page-next").is_enabled() is False
        browser.fill("#filters input[name=stream]", NAME)
        browser.wait(lambda: browser.text("#viewers-empty") == "No viewer fits.", "none of that stream")
        assert browser.run("return window.moved") < 0.1


def test_token_when_one_is_set_is_asked_for_kept_in_the_tab_and_lets_ban(browser, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} admin\n")
    with shown_server(admin_token_file=tokens) as (server, clients, address):
        slow = clients.play(server, THROTTLED)
        browser.open(address)
        browser.wait(lambda: browser.run("return document.getElementById('token-dialog').open"), "to be asked")
        assert browser.text("#viewers tbody") == ""
        browser.fill("#token", TOKEN)
        browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
        choose(browser, slow)
        browser.click("#do-ban")
        browser.fill("#ask input[name=network]", "127.0.0.77")  # not ours: the publisher comes from the same address
        browser.fill("#ask input[name=duration]", "10min")
        browser.fill("#ask input[name=reason]", "abuse")
        browser.click("#ask-do")
        wait_until(lambda: server.admission.bans.bans, "the ban")
        assert [(str(ban.network), ban.reason) for ban in server.admission.bans.bans] == [("127.0.0.77/32", "abuse")]
        kept = browser.run("return [location.href, document.cookie, JSON.stringify(localStorage)]")
        assert not any(TOKEN in text for text in kept)
        asked = browser.run("return performance.getEntriesByType('resource').map((item) => item.name)")
        assert not any(TOKEN in text for text in asked)
        browser.run("sessionStorage.clear()")


@pytest.mark.parametrize(
    ("stream", "agent"),
    [(HOSTILE, HOSTILE), ("turned", TURNED), ("x" * 200, "y" * 4000)],
    ids=["markup", "turned round", "4 kB"],
)
def test_names_when_hostile_are_only_read(browser, room, stream, agent):
    server, clients, address = room
    config = dataclasses.replace(ClientSessionConfig(), flash_version=agent)
    source = SyntheticSource(video_bit_rate=100_000)
    peers = [clients.publish(server, source, name=f"live/{stream}", config=config)]
    wait_for_keys(server, 1, f"live/{stream}")
    peers.append(clients.play(server, name=f"live/{stream}", config=config))
    browser.open(address, size=PHONE)
    browser.click(".tabs label:last-child")
    browser.wait(lambda: len(browser.texts("#streams tr")) == 2, "both streams")
    choose(browser, peers[1])
    browser.wait(
        lambda: agent[:5] in browser.text("#detail-facts") or "\\" in browser.text("#detail-facts"), "its name"
    )
    assert browser.driver.title.endswith("flowctl")
    assert browser.run("return document.querySelectorAll('main script, main img').length") == 0
    assert not set(browser.text("main")) & set(TURNED[:1] + TURNED[-1:])
    assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.faults() == []
    ports = {client.local_port for client in peers}
    server.kick(lambda connection: connection.peer[1] in ports, "")
    wait_until(lambda: not any(connection_of(server, client) for client in peers), "both gone")


def test_server_when_gone_is_said_and_found_again(browser):
    with shown_server() as (_, _, address):
        browser.open(address)
        browser.wait(lambda: browser.text("#freshness") == "live", "figures")
    browser.wait(lambda: "stale" in browser.text("#freshness"), "that it is stale")
    assert browser.run("return document.body.classList.contains('stale')")
    port = address.rstrip("/").rpartition(":")[2]
    with open_dashboard(limits=LIMITS, admin=loopback(port)):
        browser.wait(lambda: browser.text("#freshness") == "live", "the server again")
