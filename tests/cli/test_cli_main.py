"""The command line as such: help, version, errors with hints, exit statuses, and how little it imports."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flowctl.cli import app, errors, main
from flowctl.cli import serve as serve_module
from flowctl.errors import BrokenError, ConfigError, FlowctlError
from flowctl.live.config import LiveConfig
from flowctl.live.server import build_live_server
from flowctl.wire.client import connect, player


def test_settings_when_given_on_the_command_line_are_what_the_server_is_built_with(monkeypatch, tmp_path):
    built = []
    monkeypatch.setattr(serve_module, "run_server", lambda program, options, *_, **__: built.append(options))
    path = tmp_path / "flowctl.toml"
    path.write_text('target_delay = "1s"\nstuck = "1s"\nflush = "1s"\ngroups = 4\n')
    for source in ({"args": ["--config", str(path)]}, {"args": [], "FLOWCTL_CONFIG": str(path)}):
        arguments = source.pop("args")
        for name, value in source.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("FLOWCTL_STUCK", "2s")
        monkeypatch.setenv("FLOWCTL_FLUSH", "2s")
        assert main(["serve", *arguments, "--flush", "3s", "--set", "groups=3"]) == 0
        (options,) = built
        assert isinstance(options, LiveConfig)
        assert (options.limits.target_delay_ms, options.settings.stuck_s) == (1000, 2.0)
        assert (options.flush_interval_s, options.group_count, options.port) == (3.0, 3, 1935)
        built.clear()


def test_version_when_asked_for_json():
    result = CliRunner().invoke(app, ["version", "--json"])
    assert result.exit_code == 0
    assert {"flowctl", "python", "loop", "system"} == set(json.loads(result.output))


def test_version_when_asked_for_text(capsys):
    assert main(["version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("flowctl ")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["serv"], "No such command 'serv'", "flowctl --help"),
        (["play"], "Missing argument 'URL'", "flowctl play --help"),
        (["play", "--rate"], "--rate", "flowctl play --help"),
        (["rpc", "call"], "Missing argument", "flowctl rpc call --help"),
        (["rpc", "cal"], "No such command 'cal'", "flowctl rpc --help"),
        (["stats", "--timeout", "0"], "--timeout is 0, it must be more than 0", "15s"),
        (["publish", "nowhere.flv", "rtmp://127.0.0.1:1/live/room"], "cannot read nowhere.flv", "or synthetic"),
        (["stats", "--key", "nowhere.key"], "cannot read the keys", "flowctl rpc keygen FILE"),
        (
            ["rpc", "keygen", "/nowhere/at/all.key"],
            "cannot write keys to '/nowhere/at/all.key'",
            "a folder",
        ),
        (["ban", "192.0.2.7", "--duration", "5mind"], "unknown unit 'mind'", "min"),
        (["serve", "--groups", "0"], "--groups is 0", "--list-settings"),
        (["serve", "nothing"], "unknown server 'nothing'", "known servers: echo, live"),
        (["serve", "ehco"], "unknown server 'ehco'", "did you mean echo?"),
        (["serve", "--soft", "2MiB"], "soft: '2MiB'", "2MiB,2048"),
        (["serve", "--soft", "2MiB,2", "--hard", "1MiB,2"], "hard limit of bytes", ""),
        (["serve", "--hard", "1MiB,100"], "the soft limit 2097152, which is the default", "give soft as well"),
        (["serve", "--hard", "much"], "hard: 'much'", "2MiB,2048"),
        (["serve", "echo", "--flush", "40ms"], "no streams, it would ignore --flush", "leave it out"),
        (["serve", "echo", "--memory-budget", "1MiB"], "no streams, it would ignore --memory-budget", "leave it out"),
        (["serve", "--memory-budget", "much"], "--memory-budget", "2MiB"),
        (["serve", "--target-delay", "up"], "--target-delay: 'up'", "auto"),
        (["serve", "--limits", "x", "--target-delay", "2s"], "--target-delay and --limits both set the limits", ""),
        (
            ["serve", "--policy", "all"],
            "--policy is 'all', it must be all-or-cut, audio-first or pictures-first",
            "",
        ),
        (["serve", "--return-grace", "soon"], "--return-grace", "8s"),
        (["serve", "--flush", "soon"], "--flush", "8s"),
        (["serve", "--workers", "two"], "--workers is 'two', it must be a number of processes, or auto", ""),
        (["serve", "--workers", "2", "--origin", "127.0.0.1:0"], "cannot be an origin", "each one process"),
        (["serve", "--port", "70000"], "--port is 70000", ""),
        (["serve", "--set", "color=red"], "no setting 'color'", "--list-settings"),
        (["serve", "--set", "color"], "not name=value", ""),
        (["serve", "--set", "gop_cach=1"], "no setting 'gop_cach'", "did you mean gop_cache?"),
        (["serve", "--config", "/nowhere.toml"], "cannot read the settings in /nowhere.toml", "--config"),
        (["serve", "echo", "--set", "x=1"], "'echo' has no setting 'x'", "--list-settings"),
        (["serve", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1", "address"),
        (["--log-level", "loud", "serve"], "log level 'loud'", ""),
        (["play", "http://host/live/room"], "scheme 'http'", "rtmp://"),
        (["play", "ADDRESS"], "'ADDRESS': address is not", "rtmp://host/app/stream"),
        (["play", "rtmp://host/"], "names no stream", "rtmp://host/app/stream"),
        (["play", "rtmp://host/live/room", "--rate", "fast"], "--rate", "2.5M"),
        (["play", "rtmp://host/live/room", "--rate", "1"], ": --rate is 1 bit/s", ""),
        (["play", "rtmp://host/live/room", "--pings", "999999"], ": --pings is 999999", ""),
        (["hls", "rtmp://host/live/room", "--out", "hls", "--part", "9s"], ": --part is 9", ""),
        (["hls", "rtmp://host/live/room", "--out", "hls", "--segment-time", "90s"], ": --segment-time is 90", ""),
        (["record", "rtmp://host/live/room", "--out", "/proc/x"], "--out /proc/x: nothing can be written", "name"),
        (["play", "rtmp://host/live/room", "--output", "/nowhere/at/all.flv"], "/nowhere/at/all.flv", ""),
        (["publish", "nothing.flv", "rtmp://host/live/room"], "cannot read nothing.flv", ""),
        (["publish", "synthetic", "rtmp://host/live/room", "--bit-rate", "1k"], "--bit-rate 1000", "--key-frame-size"),
        (["publish", "synthetic", "rtmp://host/live/room", "--bit-rate", "0"], "--bit-rate 0", "raise --bit-rate"),
        (["publish", "syntetic", "rtmp://host/live/room"], "no file syntetic", "did you mean synthetic?"),
        (["publish", "a.flv", "rtmp://host/live/room", "--fps", "30"], "--fps is for the synthetic", "leave it out"),
        (["publish", "synthetic", "rtmp://h/a/b", "--pace", "0", "--target-delay", "1s"], "--pace is 0", "leave one"),
        (["publish", "synthetic", "rtmp://h/a/b", "--target-delay", "soon"], "--target-delay", "1500ms"),
        (["publish", "synthetic", "rtmp://host/live/room", "--no-audio", "--no-video"], "nothing to send", ""),
        (["demo", "--duration", "1s"], ": --duration is 1,", ""),
        (["demo", "--cluster", "--duration", "1s"], ": --duration is 1,", ""),
        (["demo", "--pipeline", "--healthy", "1"], ": --healthy is 1,", ""),
        (["serve", "--hls-part", "9s"], ": --hls-part is 9,", ""),
        (["serve", "--hls", "/srv/hls"], "--hls: '/srv/hls' fits no stream", "--hls-folder"),
        (["load", "rtmp://127.0.0.1:1/live/x", "--duration", "0"], "--duration is 0, allowed is 0.1", ""),
        (
            ["load", "rtmp://127.0.0.1:1/live/x", "--publishers", "1", "--bit-rate", "0"],
            "--bit-rate 0 leaves 0 bytes",
            "--key-frame-size",
        ),
    ],
)
def test_errors_when_use_or_settings_are_wrong(arguments, error, hint, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, *rest = shown.err.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert [line.startswith("hint: ") for line in rest] == [True] * len(rest)
    assert hint in "".join(rest)


@pytest.mark.parametrize("arguments", [[], ["rpc"], ["analyze"]])
def test_help_when_no_command_is_given_is_no_error(arguments, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Usage: flowctl")
    assert "hint:" not in shown.err


def test_errors_when_nobody_listens(capsys, monkeypatch):
    monkeypatch.setattr(connect, "STARTING_S", 0.0)
    assert main(["--log-level", "error", "play", "rtmp://127.0.0.1:1/live/room?token=S3CRET"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: cannot connect to 127.0.0.1:1")
    assert "hint: " in shown.err
    assert "S3CRET" not in shown.err


def test_play_when_nobody_publishes_says_so_in_time(capsys, monkeypatch):
    monkeypatch.setattr(player, "BEGINS_S", 0.1)
    with build_live_server(LiveConfig(port=0)) as server:
        url = f"rtmp://127.0.0.1:{server.address[1]}/live/room"
        assert main(["play", url, "--duration", "200ms"]) == 1
    assert f"error: nobody publishes {url}: nothing came in " in capsys.readouterr().err


def run_raising(error, *arguments):
    app_ = typer.Typer()

    @app_.command()
    def fail(*, debug: bool = False) -> None:
        raise error

    return errors.run(app_, list(arguments))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (BrokenError("x"), 1),
        (FlowctlError("x"), 1),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 130),
        (errors.TerminatedError(), 143),
        (typer.Abort(), 130),
        (typer.Exit(7), 7),
    ],
)
def test_status_when_a_command_raises(error, status, capsys):
    assert run_raising(error) == status
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConfigError("x"), ZeroDivisionError("x")])
def test_errors_when_debugging(error):
    with pytest.raises(type(error)):
        run_raising(error, "--debug")


def test_errors_when_they_hold_an_address(capsys):
    run_raising(FlowctlError("no rtmp://h/a?key=S3CRET", hint="try rtmp://u:S3CRET@h/a"))
    assert "S3CRET" not in capsys.readouterr().err
