"""Recordings in the dashboard: a real browser lists them, and plays FLV and MP4 from the HTTP listener."""

from __future__ import annotations

import contextlib

import pytest
from dashboard_kit import Browser, open_dashboard, why_not
from loopback_kit import loopback
from remux_kit import moved, tags_of

from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.remux.container import Mp4Form
from flowctl.live.remux.files import NameTemplate
from flowctl.live.remux.flvform import FlvForm
from flowctl.live.remux.intake import MessageTaken, PublicationEnded
from flowctl.live.remux.recorder import RecordSettings, StreamRecorder
from flowctl.live.remux.retention import TEMPLATE
from flowctl.live.settings.media import MediaOptions, StreamPatterns

ASKED = """return document.querySelector('#recordings-video').currentSrc +
    performance.getEntriesByType('resource').map((item) => item.name).join()"""
SECRET = b"a secret of thirty-two or more bytes, for tests"
BEGAN_S = 1_764_496_800.0  # 2025-11-30T10:00:00Z

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}"),
    pytest.mark.realtime,
    pytest.mark.timeout(120),
]


@pytest.fixture
def recorded(tmp_path, sample):
    """Settings of a server with two recordings of a film by FFmpeg: as FLV, and an hour later as MP4."""
    tags = tags_of(sample("large"))
    for form, hours in ((FlvForm, 0), (Mp4Form, 1)):
        settings = RecordSettings(folder=tmp_path, template=NameTemplate(TEMPLATE))
        recorder = StreamRecorder("live", "room", settings, form, wall=lambda hours=hours: BEGAN_S + 3600 * hours)
        recorder.work([MessageTaken(*tag) for tag in moved(tags, 0)])
        recorder.work([PublicationEnded("over")])
    return {"media": MediaOptions(record_folder=tmp_path, record_play=StreamPatterns(("live/*",))), "http": loopback()}


def time_of(browser):
    return browser.run("return document.querySelector('#recordings-video').currentTime")


def test_recordings_when_a_browser_plays_them_are_seen(tmp_path, recorded):
    access = StreamAccess(play_auth=(Proof.TOKEN,), token_secrets=SecretFile("secrets", (SECRET,)))
    with (
        open_dashboard(access=access, **recorded) as (_, address),
        contextlib.closing(Browser(tmp_path / "profile")) as browser,
    ):
        browser.open(address)
        browser.wait(lambda: "live" in browser.text("#freshness"), "the figures of the server")
        browser.fill("#recordings-form [name=stream]", "live/room")
        browser.click("#recordings-form button")
        browser.fill("#ask-fields input", signed_query(SECRET, "play", "live/room", 4_000_000_000))
        browser.click("#ask-do")
        rows = browser.wait(lambda: browser.texts("#recordings-list li"), "a list")
        assert [row[:23] for row in rows] == ["2025-11-30 11:00:00 UTC", "2025-11-30 10:00:00 UTC"]
        for number in (1, 2):  # MP4, and FLV
            browser.click(f"#recordings-list li:nth-child({number}) button")
            browser.wait(lambda: time_of(browser) > 0.5, f"a picture of {rows[number - 1]}")
            assert browser.run("return document.querySelector('#recordings-video').videoWidth") > 0
            browser.run(
                "const at = document.querySelector('#recordings-at'); at.value = 2;"
                "at.dispatchEvent(new Event('input'));"
            )
            assert browser.text("#recordings-time") == f"{12 - number}:00:02"
            part = f"from=2025-11-30T{12 - number}%3A00%3A02"
            browser.wait(lambda part=part: part in browser.run(ASKED), "the part from there on")
            browser.wait(lambda: time_of(browser) > 0.5, "its picture")
        asked = browser.run(ASKED).count("limit=")
        browser.run("for (const _ of [1, 2]) document.querySelector('#recordings-form').requestSubmit()")
        browser.wait(lambda: browser.run(ASKED).count("limit=") >= asked + 2, "both answers")
        browser.wait(lambda: browser.texts("#recordings-list li"), "the list again")
        assert browser.texts("#recordings-list li") == rows  # once
        assert [fault for fault in browser.faults() if "401" not in fault and "403" not in fault] == []
        assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_recording_when_it_is_long_is_played_part_by_part_to_its_end(tmp_path, recorded, sample):
    """Of six minutes, 74 MiB: no more is loaded at once than a browser keeps, and no part is asked for in ranges."""
    tags = tags_of(sample("large"))
    settings = RecordSettings(folder=recorded["media"].record_folder, template=NameTemplate(TEMPLATE))
    recorder = StreamRecorder("live", "long", settings, FlvForm, wall=lambda: BEGAN_S)
    for number in range(8):
        recorder.work([MessageTaken(*tag) for tag in moved(tags, number * (tags[-1].timestamp + 40))])
    recorder.work([PublicationEnded("over")])
    ends = "const video = document.querySelector('#recordings-video'), end = video.buffered.length - 1;"
    loaded = f"{ends} return end < 0 ? 0 : video.buffered.end(end) - video.duration * (video.readyState > 1)"
    with (
        open_dashboard(**recorded) as (_, address),
        contextlib.closing(Browser(tmp_path / "profile")) as browser,
    ):
        browser.open(address)
        browser.wait(lambda: "live" in browser.text("#freshness"), "the figures of the server")
        browser.fill("#recordings-form [name=stream]", "live/long")
        browser.click("#recordings-form button")
        browser.wait(lambda: browser.texts("#recordings-list li"), "a list")
        browser.click("#recordings-list li button")
        browser.wait(lambda: time_of(browser) > 0.5 and browser.run(loaded) == 0, "all of the first part")
        browser.run(f"{ends} video.currentTime = video.duration - 2;")
        browser.wait(lambda: "from=2025-11-30T10%3A04" in browser.run(ASKED), "what follows")
        browser.wait(lambda: 0.5 < time_of(browser) < 60, "its picture")
