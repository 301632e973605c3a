"""What settings come to and where each came from; the sample file; secrets are masked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.server.program import ServerProgram
from flowctl.live.config import LiveConfig
from flowctl.live.server import build_live_server
from flowctl.live.settings.levels import Role
from flowctl.live.settings.model import LiveSettings, rule_of, settings_of
from flowctl.live.settings.showing import effective, sample
from flowctl.live.settings.sources import gather, read_settings

LIVE = ServerProgram(
    name="live",
    summary="",
    default_port=1935,
    build=build_live_server,
    extra={"api_key": "of another service", "colour": "of the page"},
)
PLAIN = ServerProgram(name="plain", summary="", default_port=7000, build=build_live_server, has_streams=False)
SAMPLE = Path(__file__).parents[3] / "docs" / "flowctl.toml"
FILE = """
soft = "1MiB,100,1s"
stuck = "9s"
api_key = "s3cret"
on_publish = "http://ann:s3cret@127.0.0.1/hook?token=s3cret&x=1"

[application.talk]
policy = "audio-first"
stuck = "3s"

[role.viewer]
policy = "pictures-first"
"""


def shown(text=FILE, program=LIVE, stream="", role=None, limits_file=None, **given):
    found = gather(program, file=Path("f.toml"), text=text, **given)
    items = effective(program, found, stream=stream, role=role, limits_file=limits_file)
    return {item.name: (item.value, item.source) for item in items}


def test_effective_when_shown_for_the_server_names_the_source_of_each_setting():
    found = shown(environment={"FLOWCTL_GOP_CACHE": "1MiB"}, options={"stuck": "4s"})
    assert list(found) == [*LiveSettings.model_fields, "api_key", "colour"]
    assert found["soft"] == ("1MiB,100,1s", "f.toml, line 2: soft")
    assert found["hard"] == ("2MiB,200,2s", "follows soft")
    assert found["stuck"] == ("4s", "--stuck")
    assert found["gop_cache"] == ("1MiB", "FLOWCTL_GOP_CACHE")
    assert found["policy"] == ("all-or-cut", "default")
    assert found["limits"] == ("", "default")


def test_effective_when_shown_for_a_stream_and_a_role_names_the_level():
    found = shown(stream="talk/a", role=Role.VIEWER, pairs=['stream."talk/*".viewer.target_delay=800ms'])
    assert found["policy"] == ("pictures-first", "f.toml, line 12: role.viewer.policy")
    assert found["stuck"] == ("3s", "f.toml, line 9: application.talk.stuck")
    assert found["target_delay"] == ("800ms", '--set stream."talk/*".viewer.target_delay')
    assert found["soft"] == ("1MiB,100,1s", "f.toml, line 2: soft")
    assert "port" not in found
    assert "media_silence" not in found
    assert shown(stream="talk/a")["policy"] == ("audio-first", "f.toml, line 8: application.talk.policy")


def test_effective_when_compared_with_the_settings_is_what_holds():
    config = read_settings(LIVE, file=Path("f.toml"), text=FILE)
    for stream in ("talk/a", "x/y"):
        for role in Role:
            found = shown(stream=stream, role=role)
            text = "".join(f"{name} = '{found[name][0]}'\n" for name in ("soft", "hard", "stuck"))
            again = read_settings(LIVE, file=Path("f.toml"), text=text)
            assert (again.limits, again.settings) == (config.at(stream, role).limits, config.at(stream, role).settings)


def test_effective_when_there_is_a_limits_file_has_what_it_says():
    limits = LimitsFile(limits=Limits.parse("5MiB,500,5s"), stuck_s=6.0)
    found = shown('limits = "limits.toml"\nstuck = "1s"\n', limits_file=limits)
    assert found["soft"] == ("5MiB,500,5s", "limits.toml (f.toml, line 1: limits)")
    assert found["stuck"] == ("6s", "limits.toml (f.toml, line 1: limits)")


def test_effective_when_settings_hold_secrets_masks_them():
    """Passwords and tokens of addresses, and what a program calls a key or a secret."""
    found = shown()
    assert "s3cret" not in str(found)
    assert found["api_key"] == ("***", "f.toml, line 4: api_key")
    assert found["on_publish"][0] == "http://ann:***@127.0.0.1/hook?token=***&x=1"


def test_effective_when_the_server_has_no_streams_leaves_out_what_it_has_not():
    found = shown("stuck = 5\n", program=PLAIN)
    assert found["stuck"] == ("5s", "f.toml, line 1: stuck")
    assert "policy" not in found


def test_sample_when_read_is_the_defaults():
    assert SAMPLE.read_text("utf-8") == sample()
    assert read_settings(LIVE, file=SAMPLE) == read_settings(LIVE)


def test_sample_when_its_defaults_are_taken_in_changes_nothing(tmp_path):
    lines = re.findall(r"^#(\w+) = (.*)$", SAMPLE.read_text("utf-8").partition("\n#[")[0], re.MULTILINE)
    assert [name for name, _ in lines] == [item.name for item in settings_of() if item.is_text]
    given = [f"{name} = {value}" for name, value in lines if "<" not in value]
    assert len(given) > 25
    usual = read_settings(LIVE, options={"events": str(tmp_path)})
    text = "\n".join([*given, f'events = "{tmp_path}"'])
    assert read_settings(LIVE, file=Path("f.toml"), text=text) == usual


def test_sample_when_its_levels_are_taken_in_is_valid():
    tables = SAMPLE.read_text("utf-8").partition("\n#[")[2].partition("\n# A command")[0]
    text = re.sub(r"^#", "", "[" + tables, flags=re.MULTILINE)
    config = read_settings(LIVE, file=Path("f.toml"), text=text)
    assert isinstance(config, LiveConfig)
    assert len(config.levels) == len(re.findall(r"^\[", text, re.MULTILINE)) == 5
    assert tomllib.loads(text).keys() == {"application", "stream", "role"}


def test_sample_when_its_command_is_taken_in_is_valid():
    table = "[[run]]" + SAMPLE.read_text("utf-8").partition("\n#[[run]]")[2].replace("\n#", "\n")
    config = read_settings(LIVE, file=Path("f.toml"), text=table.replace('"ffmpeg"', '"/bin/sh"'))
    assert [rule.names("live/bob") for rule in config.run] == [("live/bob_copy",)]


@pytest.mark.parametrize("name", [name for name in LiveSettings.model_fields if rule_of(name).roles is not None])
def test_levels_when_a_setting_may_differ_are_shown_for_it(name):
    roles = rule_of(name).roles or frozenset(Role)
    for role in Role:
        assert (name in shown("", stream="a/b", role=role)) is (role in roles)
