"""Which streams are renditions of which, by the setting."""

from __future__ import annotations

import pytest

from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.settings.levels import Level
from flowctl.live.settings.renditions import Member, RenditionNames, parse_renditions

SUFFIXES = RenditionNames(suffixes=("_1080", "_720", "0", "-low"))


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("live/show_1080", Member("live/show", "1080", 0)),
        ("live/a/show_720", Member("live/a/show", "720", 1)),
        ("live/show0", Member("live/show", "0", 2)),
        ("live/show_720-low", Member("live/show_720", "low", 3)),
        ("live/show", None),
        ("live/_1080", Member("live/_108", "0", 2)),  # the shorter suffix leaves a name
        ("live/-low", None),
        ("-low", None),
    ],
)
def test_member_when_suffixes_end_names_is_of_the_longest(name, member):
    assert SUFFIXES.member(name) == member


@pytest.mark.parametrize("text", ["tracks", "off", "_1080,_720"])
def test_setting_when_written_is_read_as_the_same(text):
    assert str(parse_renditions(text, "renditions")) == text


@pytest.mark.parametrize("text", ["Tracks", "OFF"])
def test_setting_when_a_word_has_capitals_is_no_suffix(text):
    assert str(parse_renditions(text, "renditions")) == text.lower()


def test_setting_when_there_are_workers_or_levels():
    """Streams by suffix would be in any of several workers; an application may have renditions of its own."""
    with pytest.raises(ConfigError, match="one worker alone"):
        LiveConfig(renditions=SUFFIXES, workers=2)
    config = LiveConfig(levels=(Level(application="tv", values={"renditions": SUFFIXES}),))
    assert config.at("tv/show_720").renditions is SUFFIXES
    assert config.at("live/show_720").renditions == RenditionNames(tracks=True)
