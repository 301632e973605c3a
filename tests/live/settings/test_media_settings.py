"""What settings say of recordings and HLS: which streams, in which form, and what of it cannot be."""

from __future__ import annotations

import sys

import pytest

from flowctl.cli.servers import load_server
from flowctl.errors import ConfigError
from flowctl.live.cluster.media.watch import order_of
from flowctl.live.settings.sources import read_settings


@pytest.fixture
def read(tmp_path):
    def settings(text):
        path = tmp_path / "flowctl.toml"
        path.write_text(text, "utf-8")
        return read_settings(load_server("live"), file=path)

    return settings


def test_orders_when_levels_differ_are_of_the_nearest(read):
    config = read(
        'record = ["live/*", "vod/x"]\nhls = "live/*"\n[stream."live/secret*"]\nrecord = "off"\n'
        '[application.live]\nrecord_format = "mp4"\nhls_segment = 1\nhls_part = "2s"\n'
    )
    assert not order_of(config, "other/x").writes
    assert not order_of(config, "vod/y").writes
    plain, both, secret = (order_of(config, name) for name in ("vod/x", "live/room", "live/secret1"))
    assert (plain.record_format, plain.record_length_s, plain.hls) == ("flv", 3600.0, False)
    assert (both.record_format, both.hls) == ("mp4", True)
    assert (secret.record_format, secret.hls) == ("", True)
    assert (both.hls_segment_s, both.hls_part_s) == (1.0, 0.5)  # a segment has two parts at least
    assert config.asked_for("hls").fits("live/room")


def test_recordings_when_no_setting_gives_them_are_for_nobody(read):
    assert not read('record = "*"').media.record_play.fits("live/room")
    config = read('record_play = "live/*"\n[stream."live/secret*"]\nrecord_play = "off"\n')
    given = [name for name in ("live/room", "live/secret1", "vod/x") if config.at(name).media.record_play.fits(name)]
    assert given == ["live/room"]


def test_media_when_only_a_level_asks_for_it_is_asked_for(read):
    assert not read("port = 1935").writes_media
    config = read('[application.live]\nhls = "*"\n')
    assert config.writes_media
    assert str(config.hls_place) == "hls"


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ('record = "room"', "'room' fits no stream", "live/room"),
        ('[application."my%20app"]\nstuck = 3', "'my%20app' fits no stream", "decoded"),
        ('record = "live/a,live/a%20b"', "'live/a%20b' fits no stream", "decoded"),
        ('record_format = "avi"', "record_format is 'avi'", ""),
        ('hls = "/srv/hls"', "'/srv/hls' fits no stream", "hls_folder"),
        ('record = "../recordings"', "'../recordings' fits no stream", "record_folder"),
        ('record = "live/"', "'live/' fits no stream", "live/*"),
        ('[stream."/live/*"]\nstuck = 3', "'/live/*' fits no stream", "no / before it"),
        ('relay_push = "/live/*=rtmp://h/{app}/{stream}"', "'/live/*' fits no stream", "no / before it"),
        ("record_keep = -1", "0 or more", ""),
        ("hls_part = 3", ": hls_part is 3, it must be 0, or 0.1 to 2 s", ""),
        ("hls_segment = 60", "1 to 30 s", ""),
        ('[role.viewer]\nrecord = "*"', "of the stream itself", ""),
        ('record = "live/*"\nrecord_folder = "flowctl.toml"', "nothing can be written there", "folder of your own"),
        ('hls = "live/*"\nhls_folder = "flowctl.toml"', "hls_folder", "folder of your own"),
    ],
)
def test_media_settings_when_they_cannot_be_are_refused_with_their_place(read, text, error, hint):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert error in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text", ['hls = "live/*"', 'record = "live/*"\n[application.live]\nrecord_format = "mp4"', 'record = "live/*"']
)
def test_media_settings_when_pyav_is_not_installed_say_how_to_get_it_if_it_is_needed(read, monkeypatch, text):
    monkeypatch.setitem(sys.modules, "av", None)
    if text == 'record = "live/*"':
        assert read(text).writes_media
        return
    with pytest.raises(ConfigError, match="the extra 'media': av is not installed") as caught:
        read(text)
    assert "[media]" in caught.value.hint
