"""`flowctl config`: a wrong file ends with 2 and says where, a right one shows what it comes to; both as JSON too."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.errors import ConfigError
from flowctl.live.settings.sources import read_settings
from flowctl_servers.live import SERVER


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWCTL_CONFIG", raising=False)

    def run(*args, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.toml").write_text(text, "utf-8")
        return CliRunner().invoke(app, ["config", *args])

    return run


def test_check_when_the_file_is_valid_says_so(run):
    result = run("check", "one.toml", "--json", one='stuck = 5\n[role.viewer]\npolicy = "audio-first"\n')
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"valid": True, "settings": 1, "levels": 1})
    assert "one.toml is valid: 1 setting of the server, 1 level" in run("check", "one.toml").stdout


def test_check_when_the_file_of_keys_has_none_yet_says_whom_that_keeps_out(run, tmp_path):
    """It is no error, since a command may make the first key while the server runs, but it may be a wrong path."""
    one = "keys_file = 'nokeys'\npublish_auth = 'key'\n[application.b]\nplay_auth = 'key'\n"
    result = run("check", "one.toml", one=one)
    assert result.exit_code == 0
    whom = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert whom == ["hint: nobody will be let in: publish_auth asks for key, but there is none in nokeys yet"]
    (tmp_path / "nokeys").write_text(f"sha256:{bytes(16).hex()}:{bytes(32).hex()}\n")
    assert run("check", "one.toml").stderr == ""


def test_check_when_the_log_file_has_no_folder_says_so(run, tmp_path):
    """It is no error: the folder of a service is made when that starts."""
    result = run("check", "one.toml", one="log_file = 'logs/flowctl.log'\n")
    assert (result.exit_code, "hint: log_file: there is no folder logs" in result.stderr) == (0, True)
    (tmp_path / "logs").mkdir()
    assert run("check", "one.toml").stderr == ""


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ("stuck = 'soon'", "one.toml, line 1: stuck: 'soon' is not a number with a unit"),
        ("limits = 'two.toml'", "two.toml, line 2: unknown key 'sofd'"),
        ("limits = 'three.toml'", "cannot read the limits in three.toml"),
        ("bans = 'two.toml'", "two.toml, line 1"),
        ("rtmps = '127.0.0.1:1936'", "rtmps: TLS needs a certificate"),
        ("tls_certificate = 'none.pem'\ntls_key = 'none.key'", "tls_key: cannot read none.key"),
        ("publish_auth = 'key'", "one.toml, line 1: publish_auth asks for key, but there is no keys_file"),
        ("[role.viewer]\nplay_auth = 'token'", "one.toml, line 2: role.viewer.play_auth asks for token"),
        ("[stream.main]\nstuck = 3", "one.toml, line 1: stream.main: 'main' fits no stream"),
        ("[stream.'live/mp4:*']\nstuck = 3", "one.toml, line 1: stream.\"live/mp4:*\": 'live/mp4:*' fits no stream"),
        ("[application.'a/b']\nstuck = 3", "one.toml, line 1: application.\"a/b\": 'a/b' is no application"),
    ],
)
def test_check_when_a_file_is_wrong_names_it(run, one, said):
    """The file itself, those that it names, and what a server would refuse to start with."""
    result = run("check", "one.toml", "--json", one=one, two='version = 1\nsofd = "1"\n')
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["valid"]) == (2, False)
    assert answer["error"].startswith(said)
    plain = run("check", "one.toml")
    assert isinstance(plain.exception, ConfigError)  # written as error and hint by `flowctl.cli.errors`


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('publish_auth = "key"', "asks for key, but there is no keys_file"),
        ('admin = "0.0.0.0:8936"', "there is no token"),
        ('control = "tcp://127.0.0.1:5000"', "control_keys is missing"),
        ('rtmps = "127.0.0.1:8443"', "TLS needs a certificate"),
        ('http = "127.0.0.1:1935"', "http and rtmp both listen on 127.0.0.1:1935"),
        ('origin = "127.0.0.1:1936"\nworkers = 2', "cannot be an origin"),
        ('origin = "127.0.0.1:1935"', "origin and rtmp both listen on 127.0.0.1:1935"),
        ('http = "0.0.0.0:8936"\nadmin = "127.0.0.1:8936"', "admin and http both listen on 127.0.0.1:8936"),
        ('host = "0.0.0.0,127.0.0.1"', "rtmp listens twice on 127.0.0.1:1935"),
        ('host = "203.0.113.77"', "cannot listen on 203.0.113.77:1935 .*: Cannot assign requested address"),
        ('http = "203.0.113.77:8080"', "cannot listen on 203.0.113.77:8080"),
        ('limits = "afile"', "afile: not valid TOML"),
        ('limits = "none"', "cannot read the limits in "),
        ('bans = "afile"', "afile, line 1: not valid JSON"),
        ('control = "ipc:///nowhere/flowctl.sock"', "control: cannot use the folder /nowhere"),
        ('control = "ipc://{folder}/afile"', "afile is there and is no socket of this user"),
        ('ban_store = "gone/bans.sqlite"', "ban_store .*: there is no folder"),
        ('hooks = "no_such_module:Hooks"', "hooks 'no_such_module:Hooks' cannot be used"),
        ('limits = "gone.toml"', "cannot read the limits in .*gone.toml"),
        ('events = "one.toml/records"', "events .*: nothing can be written there"),
    ],
)
def test_file_when_a_server_would_not_start_with_it_is_refused_by_check_and_by_reload(run, text, said, tmp_path):
    """What the next start would refuse is not called valid by a server that runs: it keeps what is in force."""
    text = text.replace("{folder}", str(tmp_path))
    tmp_path.chmod(0o700)
    (tmp_path / "afile").write_text("[garbage", "utf-8")
    path = tmp_path / "one.toml"
    path.write_text('stuck = "9s"\ncontrol = "off"\n', "utf-8")
    source = read_settings(SERVER, file=path).source
    with pytest.raises(ConfigError, match=said):
        source.read(f"{text}\n")
    result = run("check", "one.toml", one=f"{text}\n")
    assert isinstance(result.exception, ConfigError)
    assert re.search(said, str(result.exception))


def test_file_when_it_names_a_host_twice_listens_there_once(run):
    assert run("check", "one.toml", one='host = "127.0.0.1,127.0.0.1"\ncontrol = "off"\n').exit_code == 0


def test_reload_when_a_file_in_force_is_broken_is_about_the_settings_alone(tmp_path):
    limits, path = tmp_path / "limits.toml", tmp_path / "one.toml"
    limits.write_text("version = 1\n", "utf-8")
    path.write_text('limits = "limits.toml"\ncontrol = "off"\n', "utf-8")
    source = read_settings(SERVER, file=path).source
    limits.write_text("[garbage", "utf-8")
    assert source.read('limits = "limits.toml"\ncontrol = "off"\nstuck = "9s"\n').settings.stuck_s == 9.0


def test_show_when_asked_for_a_stream_has_value_and_source_of_each(run, monkeypatch):
    monkeypatch.setenv("FLOWCTL_ROLE__VIEWER__POLICY", "audio-first")
    args = ("show", "one.toml", "--stream", "talk/a", "--role", "viewer", "--changed", "--set", "stuck=4s")
    result = run(*args, "--json", one="stuck = 5\ntarget_delay = 7\n")
    assert json.loads(result.stdout) == {
        "stuck": {"value": "4s", "source": "--set stuck"},
        "target_delay": {"value": "7000ms", "source": "one.toml, line 2: target_delay"},
        "policy": {"value": "audio-first", "source": "FLOWCTL_ROLE__VIEWER__POLICY"},
    }
    assert "policy        audio-first  (FLOWCTL_ROLE__VIEWER__POLICY)\n" in run(*args).stdout


def test_show_when_there_is_no_file_shows_the_defaults(run):
    found = json.loads(run("show", "--json").stdout)
    assert found["host"] == {"value": "127.0.0.1", "source": "default"}
    assert isinstance(run("show", "--role", "guest").exception, ConfigError)
