"""Levels of settings: of each setting the nearest level that says it counts, whatever the order of the file."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.limits import Limits
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.settings import levels as levels_module
from flowctl.live.settings.levels import Level, Role

NAMES = ("talk/a", "talk/ab", "cams/a", "cams/door", "live/x/y", "room")
PATTERNS = ("*", "talk/*", "talk/a", "talk/a*", "cams/?", "*/a", "c*", "live/*/y", "[ct]*")
APPLICATIONS = ("talk", "cams", "*", "t*", "live", "room")
VALUES = {
    "media_silence_s": (1.0, 2.0, 3.0),
    "policy": ("audio-first", "pictures-first"),
    "settings.stuck_s": (4.0, 5.0),
    "limits.target_delay_ms": (None, 0, 700),
    "rtmp.limits.player_wait_s": (6.0, 7.0),
}

places = st.one_of(
    st.tuples(st.sampled_from(APPLICATIONS), st.just(""), st.sampled_from([None, *Role])),
    st.tuples(st.just(""), st.sampled_from(PATTERNS), st.sampled_from([None, *Role])),
    st.tuples(st.just(""), st.just(""), st.sampled_from(list(Role))),
)
values = st.fixed_dictionaries({}, optional={path: st.sampled_from(options) for path, options in VALUES.items()})
some_levels = st.lists(
    st.builds(
        lambda place, said: Level(application=place[0], stream=place[1], role=place[2], values=said), places, values
    ),
    max_size=8,
)


def nearest(found, stream, role, path):
    """Return the level that says `path`, by plain rules: look through role, stream, application in this order."""

    def fits(level):
        return (level.role is None or level.role is role) and (
            fnmatchcase(stream, level.stream)
            if level.stream
            else fnmatchcase(stream.split("/")[0], level.application or "*")
        )

    def ordered(kind):
        pattern = lambda level: level.stream or level.application  # noqa: E731 - a name for the sort below
        exact = lambda level: not set(pattern(level)) & set("*?[")  # noqa: E731 - likewise
        letters = lambda level: len([item for item in pattern(level) if item not in "*?["])  # noqa: E731 - likewise
        return sorted(kind, key=lambda level: (not exact(level), -letters(level)))

    said = [level for level in found if path in level.values and fits(level)]
    for with_role in (True, False):
        of_role = [level for level in said if (level.role is not None) is with_role]
        for kind in (
            [level for level in of_role if level.stream],
            [level for level in of_role if level.application],
            [level for level in of_role if not level.stream and not level.application],
        ):
            if kind:
                return ordered(kind)[0]
    return None


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@settings(max_examples=200, deadline=None)
@given(some_levels, st.sampled_from(NAMES), st.sampled_from([None, *Role]))
def test_at_when_several_levels_fit_takes_each_setting_of_the_nearest_that_says_it(found, stream, role):
    config = LiveConfig(levels=tuple(found), media_silence_s=9.0)
    effective = config.at(stream, role)
    for path in VALUES:
        level = nearest(found, stream, role, path)
        assert at(effective, path) == (at(config, path) if level is None else level.values[path])
    assert config.at(stream, role) is effective  # remembered


def test_at_when_there_are_no_levels_is_the_configuration_itself():
    config = LiveConfig()
    assert config.at("live/a", Role.VIEWER) is config
    assert not config.has_levels


def test_at_when_no_level_fits_is_the_configuration_itself():
    config = LiveConfig(levels=(Level(application="talk", values={"policy": "audio-first"}),))
    assert config.at("live/a", Role.VIEWER) is config
    assert config.at("talk/", None).policy == "audio-first"  # the application alone


def test_at_when_names_are_many_remembers_some(monkeypatch):
    monkeypatch.setattr(levels_module, "_MOST_REMEMBERED", 10)
    config = LiveConfig(levels=(Level(stream="talk/*", values={"policy": "audio-first"}),))
    found = {id(config.at(f"talk/{number}", Role.VIEWER)) for number in range(100)}
    assert len(found) == 1
    assert len(config._levels._by_name) <= 10


def test_marks_when_levels_say_some_of_them_come_from_the_nearest_and_follow_its_soft_one():
    level = Level(application="talk", values={"limits.soft": "1MiB,100,1s"})
    usual = LiveConfig(levels=(level,)).at("talk/a", Role.VIEWER).limits
    assert usual == Limits.parse("1MiB,100,1s")
    said = LiveConfig(limits=Limits.parse("2MiB,2048,4s", "9MiB,9000,9s"), levels=(level,)).at("talk/a", Role.VIEWER)
    assert said.limits == Limits.parse("1MiB,100,1s", "9MiB,9000,9s")


def test_marks_when_a_farther_one_does_not_go_with_a_nearer_one_leave_it_out():
    config = LiveConfig(
        levels=(
            Level(application="talk", values={"limits.soft": "1MiB,100,1s", "limits.hard": "1100KiB,110,1100ms"}),
            Level(role=Role.VIEWER, values={"limits.soft": "5MiB,500,5s"}),
        )
    )
    assert config.at("talk/a", Role.VIEWER).limits == Limits.parse("5MiB,500,5s")
    assert config.at("talk/a", Role.PUBLISHER).limits == Limits.parse("1MiB,100,1s", "1100KiB,110,1100ms")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"values": {}}, "of an application, of streams or of a role"),
        ({"application": "a", "stream": "a/*"}, "not of both"),
        ({"stream": 5}, "stream is 5 "),
    ],
)
def test_level_when_it_is_of_nothing_or_of_two_things_is_refused(fields, said):
    with pytest.raises(ConfigError) as caught:
        Level(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policy": "nope"}, """[stream."talk/*".viewer]: policy is 'nope'"""),
        ({"limits.hard": "1KiB,1,1ms"}, "hard limit of bytes is 1024, it must be at least the soft limit 2097152"),
        ({"nothing_of_that_name": 1}, "nothing_of_that_name"),
        ({"media_silence_s": -1.0}, "media_silence_s is -1.0, it must be 0 or more"),
    ],
)
def test_config_when_a_level_has_a_wrong_value_is_refused_and_says_which(values, said):
    with pytest.raises(ConfigError) as caught:
        LiveConfig(levels=(Level(stream="talk/*", role=Role.VIEWER, values=values),))
    assert said in str(caught.value)
