"""Settings of commands: what they say and refuse, which names they keep, and what a name from the network may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.server.program import ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.live.settings.runs import RunRule, RunWhen, made_from, parse_runs, plain_name
from flowctl.live.settings.showing import effective
from flowctl.live.settings.sources import gather, read_settings
from flowctl.wire.rtmp.session_config import ServerSessionConfig

LIVE = ServerProgram(name="live", summary="", default_port=1935, build=LiveServer)
COMMAND = ["/bin/sh", "-c", "true"]


def rule(on="live/*", command=COMMAND, **more):
    return RunRule(on=on, command=tuple(command), **more)


def refused(table, name="file"):
    with pytest.raises(ConfigError) as caught:
        parse_runs([table], name)
    assert str(caught.value).startswith(f"{name}, table 1: ")
    assert caught.value.hint
    return str(caught.value)


def test_tables_when_they_are_in_the_file_are_commands_with_all_that_they_say(tmp_path):
    file = tmp_path / "flowctl.toml"
    file.write_text(
        '[[run]]\non = "live/*"\ncommand = ["sh", "-c", "true"]\npublish = ["{app}/{stream}_720"]\nwhen = "viewed"\n'
        'at_once = 3\nnice = 5\nmemory = "1GiB"\n[[run]]\non = "live/cam"\ncommand = ["/bin/sh"]\n'
    )
    config = read_settings(LIVE, file=file)
    assert isinstance(config, LiveConfig)
    first = {"publish": ("{app}/{stream}_720",), "when": RunWhen.VIEWED, "at_once": 3, "nice": 5, "memory": 1 << 30}
    assert config.run == (rule(command=["sh", "-c", "true"], **first), rule("live/cam", ["/bin/sh"]))
    shown = {item.name: item.value for item in effective(LIVE, gather(LIVE, file=file))}
    assert shown["run"] == "live/*: sh; live/cam: sh"


@pytest.mark.parametrize("value", ["off", "live/*=sh", '[{"on": "live/*", "command": ["/bin/sh"]}]'])
def test_commands_when_they_come_from_anywhere_but_the_file_are_refused(value, tmp_path):
    """Whoever can set a variable or an option of a server, or write to it, cannot have it run a program."""
    for source in (
        {"environment": {"FLOWCTL_RUN": value}},
        {"pairs": [f"run={value}"]},
        {"options": {"run": value}},
    ):
        with pytest.raises(ConfigError, match="from the file of settings alone"):
            read_settings(LIVE, **source)
    file = tmp_path / "flowctl.toml"
    file.write_text(f"run = {json.dumps(value)}\n")
    with pytest.raises(ConfigError, match="as tables"):
        read_settings(LIVE, file=file)


def test_commands_when_everybody_may_write_to_the_file_are_refused(tmp_path):
    file = tmp_path / "flowctl.toml"
    file.write_text('[[run]]\non = "live/*"\ncommand = ["/bin/sh"]\n')
    file.chmod(0o646)
    with pytest.raises(ConfigError, match="everybody may write"):
        read_settings(LIVE, file=file)
    file.chmod(0o644)
    assert read_settings(LIVE, file=file).run


def test_commands_when_everybody_may_put_another_file_in_the_place_of_theirs_are_refused(tmp_path):
    """Of a folder, or of that of the file behind a link; not of one like /tmp, where each has his own files."""
    folder = tmp_path / "open"
    folder.mkdir()
    file, link = folder / "flowctl.toml", tmp_path / "link.toml"
    file.write_text('[[run]]\non = "live/*"\ncommand = ["/bin/sh"]\n')
    link.symlink_to(file)
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):
        folder.chmod(mode)
        for path in (file, link):
            if refused:
                with pytest.raises(ConfigError, match=r"everybody may write to .*open"):
                    read_settings(LIVE, file=path)
            else:
                assert read_settings(LIVE, file=path).run


def test_variables_of_a_command_when_it_starts_a_server_are_no_settings_of_that():
    assert read_settings(LIVE, environment={"FLOWCTL_STREAM_NAME": "live/a"}) == read_settings(LIVE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"on": "cam"}, "on is 'cam', it must be a pattern"),
        ({"on": "live/mp4:x"}, "it must be a pattern"),
        ({"command": "ffmpeg -i {url}"}, "it must be a list of words; there is no shell"),
        ({"command": []}, "command has 0 words"),
        ({"command": ["/bin/sh", 1]}, "it must be a list of words"),
        ({"command": ["/bin/sh", "a\0b"]}, "command has 2 words"),
        ({"command": ["no-such-program-here"]}, "there is no such program"),
        ({"command": ["bin/sh"]}, "there is no such program"),
        ({"command": ["{name}"]}, "command begins with a name of peers"),
        ({"command": ["/bin/sh", "{ulr}"]}, "{ulr}, which stands for nothing"),
        ({"command": ["/bin/sh", "{publish_1}"]}, "{publish_1}, which stands for nothing"),
        ({"publish": "live/x"}, "publish is 'live/x', it must be a list"),
        ({"publish": ["{app}/{stream}"]}, "which is the stream itself"),
        ({"publish": ["live/{stream}_720"]}, "it must have {app} before"),
        ({"publish": ["{app}/x"]}, "it must have {app} before"),
        ({"publish": ["{stream}/{app}"]}, "it must be like {app}/{stream}_720"),
        ({"publish": ["{app}/{stream}{stream}"]}, "it must have {app} before"),
        ({"publish": ["{app}/../{stream}"]}, "it must be like {app}/{stream}_720"),
        ({"publish": ["{app}/{stream}.flv"]}, "it must be like {app}/{stream}_720"),
        ({"publish": ["{app}/{stream}_720"] * 2}, "two commands publish"),
        ({"on": "live/*_1", "publish": ["{app}/{base}_1"]}, "which is the stream itself"),
        ({"publish": ["{app}/{stream}{base}"]}, "it must have {app} before"),
        ({"on": "live/cam", "publish": ["live/{stream}"]}, "which is the stream itself"),
        ({"publish": [f"{{app}}/{{stream}}_{n}" for n in range(9)]}, "is a list of 9, 8 are allowed"),
        ({"when": "viewed"}, "it publishes nothing"),
        ({"when": "always"}, "when is 'always', it must be published or viewed"),
        ({"nice": -1}, "nice is -1, it must be 0 to 19"),
        ({"nice": 20}, "nice is 20, it must be 0 to 19"),
        ({"at_once": -1}, "at_once is -1"),
        ({"memory": "1KiB"}, "memory is 1024, it must be 0 or 16MiB and more"),
        ({"shell": True}, "there is no 'shell' in it"),
    ],
)
def test_table_when_wrong_is_refused_with_what_is_allowed(change, said):
    table = {"on": "live/*", "command": COMMAND} | change
    if "two commands" in said:
        with pytest.raises(ConfigError, match=said):
            parse_runs([table], "file")
    else:
        assert said in refused(table)


@pytest.mark.parametrize("lacking", ["on", "command"])
def test_table_when_it_lacks_what_it_needs_is_refused(lacking):
    table = {"on": "live/*", "command": COMMAND}
    del table[lacking]
    assert f"{lacking} is missing" in refused(table)


def test_commands_when_others_would_not_know_them_or_they_could_not_connect_are_refused():
    for more, said in (
        ({"workers": 2}, "one worker"),
        ({"rtmp": ServerSessionConfig(credentials={"ann": "pw"})}, "commands cannot log in"),
        ({"trusted_proxies": ("127.0.0.0/8",)}, "its commands connect from there"),
        ({"trusted_proxies": ("::1",)}, "its commands connect from there"),
    ):
        with pytest.raises(ConfigError, match=said):
            LiveConfig(run=(rule(),), **more)


def test_words_when_they_are_filled_in_stay_words_each():
    values = {
        "name": "live/a",
        "app": "live",
        "stream": "a",
        "base": "a",
        "url": "rtmp://h/live/a?x=1 2",
        "publish_1": "P",
    }
    command = ["/bin/sh", "{url}", "{app}-{stream}_{publish_1}", "{{name}}", '{"a":{stream}}', "{ }", "{}"]
    words = rule(command=command, publish=("{app}/{stream}_x",)).words(values)
    assert words == ["/bin/sh", "rtmp://h/live/a?x=1 2", "live-a_P", "{name}", '{"a":a}', "{ }", "{}"]


def test_words_when_a_value_looks_like_a_placeholder_are_filled_in_once():
    values = {"name": "live/{app}", "app": "live", "stream": "{app}", "url": ""}
    assert rule(command=["/bin/sh", "{name}"]).words(values)[1] == "live/{app}"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("live/bob_720", "live/bob"),
        ("live/bob_720_720", "live/bob_720"),
        ("live/a/bob_720", "live/a/bob"),
        ("live/_720", None),
        ("live/bob", None),
        ("live/bob_720x", None),
        ("other/bob_720", None),
        ("out/live/bob", "live/bob"),
        ("out/other/bob", None),
        ("tv/main", "studio/cam"),
        ("tv/cam", None),
        ("hd/bob_360", "hd/bob_1080"),
        ("hd/bob_1080", None),
        ("hd/bob_1080_360", "hd/bob_1080_1080"),
    ],
)
def test_name_when_a_command_publishes_under_it_is_of_one_stream(name, source):
    rules = (
        rule("live/*", publish=("{app}/{stream}_720", "out/{app}/{stream}")),
        rule("studio/cam", publish=("tv/main",)),
        rule("hd/*_1080", publish=("{app}/{base}_360",)),
    )
    assert made_from(rules, name) == source


PART = st.text("ab_/7", min_size=1, max_size=6).filter(lambda text: "//" not in text and text.strip("/") == text)


@given(
    app=PART,
    stream=PART.filter(lambda text: "/" not in text),
    on=st.sampled_from(["*/*", "a*", "*_*", "?/*", "*_/*_", "*/?b"]),
)
def test_names_when_a_command_may_publish_them_are_kept_whatever_its_stream_is_called(app, stream, on):
    """Two templates may make one name of two streams; each alone leads back to its own."""
    if "/" not in on:
        on = f"{on}/*"
    templates = ("{app}/{stream}_7", "x-{app}/a{stream}", "y/{app}/{base}")
    name = f"{app}/{stream}"
    for item in (rule(on, publish=templates), *(rule(on, publish=(template,)) for template in templates)):
        if item.fits(name):
            for made in item.names(name):
                found = item.source(made)
                assert made in item.names(found)
                assert found == name or len(item.publish) > 1


@pytest.mark.parametrize("name", ["live/bob", "live/Bob-2.1", "a/b/c_d", "live/bücher", "live/部屋"])
def test_name_when_it_is_plain_may_reach_a_command(name):
    assert plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("live/-i", "-i/live", "live/.hidden", "live/..", "live/a..b/../c", "live/a b", "live/$(id)", "live/`id`"),
        *("live/a;b", "live/a|b", "live/a&b", "live/a'b", 'live/a"b', "live/a\nb", "live/a{app}", "live/a%20", "live/"),
        *("/live/a", "live//a", "live", "live/concat:a", "live/a#b", "live/a,b", "live/a=b", "live/@a", "live/~a"),
        *("live/a\n", "live/" + "a" * 200, "live/a*", "live/a\u202eb", "live/a\u200bb", "live/\ud800"),
        "live/" + "部" * 80,
    ],
)
def test_name_when_it_may_mean_something_to_a_program_or_a_shell_reaches_no_command(name):
    assert not plain_name(name)


def test_program_when_it_is_in_path_is_found(tmp_path, monkeypatch):
    program = Path(tmp_path / "mine")
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no such program" in refused({"on": "a/b", "command": ["mine"]})
    program.chmod(0o755)
    assert parse_runs([{"on": "a/b", "command": ["mine"]}], "file")[0].program == "mine"
