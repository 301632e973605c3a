"""Levels as text: tables of the file, variables and --set; what is refused, and with which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowctl.core.flow.limits import Limits
from flowctl.core.server.program import ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.live.settings.levels import Level, Role
from flowctl.live.settings.sources import read_settings

LIVE = ServerProgram(name="live", summary="", default_port=1935, build=LiveServer)
OTHER = ServerProgram(name="other", summary="", default_port=7000, build=LiveServer, has_streams=False)
FILE = """
policy = "audio-first"
stuck = "9s"

[application.talk]
soft = "1MiB,100,1s"
stuck = "3s"

[stream."live/cam*"]
flush = "100ms"

[stream."live/cam*".viewer]
policy = "pictures-first"

[role.publisher]
media_silence = 5
"""


def read(text=None, program=LIVE, **given):
    return read_settings(program, **({"file": Path("f.toml"), "text": text} if text is not None else {}), **given)


def refused(text=None, **given):
    with pytest.raises(ConfigError) as caught:
        read(text, **given)
    return str(caught.value), caught.value.hint or ""


def test_file_when_it_has_levels_gives_each_its_settings():
    config = read(FILE)
    assert config.levels == (
        Level(application="talk", values={"limits.soft": "1MiB,100,1s", "settings.stuck_s": 3.0}),
        Level(stream="live/cam*", values={"flush_interval_s": 0.1}),
        Level(stream="live/cam*", role=Role.VIEWER, values={"policy": "pictures-first"}),
        Level(role=Role.PUBLISHER, values={"media_silence_s": 5.0}),
    )
    camera, talk = config.at("live/cam1", Role.VIEWER), config.at("talk/a", Role.PUBLISHER)
    assert (camera.policy, camera.flush_interval_s, camera.settings.stuck_s) == ("pictures-first", 0.1, 9.0)
    assert (talk.policy, talk.media_silence_s, talk.settings.stuck_s) == ("audio-first", 5.0, 3.0)
    assert talk.limits == Limits.parse("1MiB,100,1s")


def test_level_when_it_is_given_twice_is_of_the_stronger_source():
    environment = {"FLOWCTL_APPLICATION__TALK__STUCK": "4s", "FLOWCTL_ROLE__VIEWER__POLICY": "pictures-first"}
    config = read(FILE, environment=environment, pairs=["application.talk.stuck=5s"], options={"stuck": "1s"})
    assert config.at("talk/a", Role.VIEWER).settings.stuck_s == 5.0
    assert config.at("talk/a", Role.VIEWER).policy == "pictures-first"
    assert config.at("x/a").settings.stuck_s == 1.0


def test_set_when_the_name_of_a_stream_is_quoted_may_have_any_character():
    config = read(pairs=['stream."live/a=*".viewer.policy=audio-first'])
    assert config.levels == (Level(stream="live/a=*", role=Role.VIEWER, values={"policy": "audio-first"}),)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ('[role.watcher]\npolicy = "x"', "f.toml, line 1: role.watcher: there is no role 'watcher'", "publisher"),
        (
            "\n[application]\nport = 3",
            "f.toml, line 3: application.port is 3, it must be a table",
            "[application.NAME]",
        ),
        (
            "[application.talk]\nport = 3",
            "line 2: application.talk.port: port is a setting of the whole server",
            "soft",
        ),
        ('[role.viewer]\nflush = "1s"', "line 2: role.viewer.flush: flush is of the stream itself", "application"),
        (
            '[role.viewer]\nmedia_silence = "1s"',
            "line 2: role.viewer.media_silence: media_silence is of a publisher",
            "",
        ),
        (
            '[stream."x/*"]\nhard = "1KiB,1,1s"',
            'line 2: stream."x/*".hard: hard limit of bytes is 1024, it must be',
            "",
        ),
        ('[stream."x/*"]\npolicy = "no"', "line 2: stream.\"x/*\".policy is 'no', it must be all-or-cut", ""),
        ('[stream."x/*"]\npolicyy = "no"', "line 2: stream.\"x/*\".policyy: server 'live' has no setting", "policy?"),
        ("[role]\n[role.viewer]\npolicy.x = 1", "f.toml, line 3: role.viewer.policy is {'x': 1}, allowed", ""),
        ("stream = 3", "f.toml, line 1: stream is 3, it must be a table of settings", "[application.NAME]"),
        ("stuck = 1\n\nstuck = 2", "f.toml, line 3: stuck is there twice, line 1 has it already", "leave one"),
        ('[role.viewer]\npolicy = "a"\npolicy = "b"', "f.toml, line 3: policy of [role.viewer] is there twice", ""),
        ('[stream."a"]\n#\n[stream."a"]', "f.toml, line 3: [stream.a] is there twice, line 1 has it already", ""),
        ('hooks = """\nx\n"""\nstuck = "soon"', "f.toml, line 4: stuck: 'soon' is not a number with a unit", ""),
        ("role = { viewer = { policy = 'no' } }", "f.toml, line 1: role.viewer.policy is 'no'", ""),
        ('[application.""]\npolicy = "a"', "the name is empty", "[application.NAME]"),
        (
            '[stream."live/x"]\non_connect = "http://127.0.0.1:1/x"',
            'f.toml, line 2: stream."live/x".on_connect: on_connect is of connections, and over RTMP a connection',
            "set on_publish and on_play for the stream, or on_connect for the application",
        ),
    ],
)
def test_file_when_a_level_is_wrong_names_line_key_value_and_rule(text, said, hint):
    message, hinted = refused(text)
    assert said in message
    assert hint in hinted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": {"FLOWCTL_ROLE__VIEWER": "x"}}, "FLOWCTL_ROLE__VIEWER names no setting"),
        ({"environment": {"FLOWCTL_ROLE__GUEST__POLICY": "x"}}, "there is no role 'guest'"),
        ({"environment": {"FLOWCTL_APPLICATION__A__PORT": "1"}}, "FLOWCTL_APPLICATION__A__PORT: port is a setting of"),
        ({"pairs": ["role.viewer=3"]}, "--set 'role.viewer' names no setting"),
        ({"pairs": ["stream.live/a.policy=x"]}, "'stream.live/a.policy' is no key"),
        ({"pairs": ["role.viewer.policy=a", "role.viewer.policy=b"]}, "set the same"),
        ({"program": OTHER, "pairs": ["role.viewer.policy=audio-first"]}, "server 'other' has no streams"),
    ],
)
def test_level_when_a_variable_or_pair_is_wrong_names_it(given, said):
    assert said in refused(**given)[0]


def test_config_when_only_levels_are_given_keeps_the_server_as_it_was():
    config = read('[role.viewer]\npolicy = "audio-first"\n')
    assert LiveConfig(port=1935, levels=config.levels) == config
