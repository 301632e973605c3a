"""Signals to the programs: none of them kills one without a line."""

from __future__ import annotations

import json
import signal
import time
from types import SimpleNamespace

import pytest
from cli_kit import finish, served, start

from flowctl.cli.errors import TerminatedError, terminable

OTHERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.realtime
def test_serve_when_signalled_goes_on_and_says_what_it_did():
    with served("live", "--log-json") as server:
        # SIGUSR1 has a log file opened again, which there is none of here.
        for number, text in zip(OTHERS, ("SIGHUP: there is nothing to do", "", "figures"), strict=True):
            server.process.send_signal(number)
            if text:
                server.wait_logged(text)
            time.sleep(0.1)
            assert server.process.poll() is None
        server.stop(signal.SIGQUIT)
        assert server.status == 0
    events = [json.loads(line)["event"] for line in server.log.splitlines()]
    assert "SIGHUP: there is nothing to do, it is ignored" in events
    assert events.count("figures") == 1
    assert "SIGQUIT: ending in order" in events
    assert events[-1] == "stopped"


@pytest.mark.realtime
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_publish_when_it_is_ended_says_what_it_did(number):
    with served("live") as server:
        client = start("publish", "synthetic", server.url(), "--json")
        server.wait_logged("publish started")
        client.send_signal(signal.SIGUSR1)
        client.send_signal(number)
        status, output, _ = finish(client)
    assert status == 143
    figures = json.loads(output)
    assert figures["end"] is not None
    assert (figures["left_out"], figures["picture_share"]) == ({}, 1.0)


def test_signals_when_two_come_at_once_raise_one_error(monkeypatch):
    """``timeout`` sends two; an error raised while the first leaves a wait would leave its lock held."""
    now = [100.0]
    monkeypatch.setattr("flowctl.cli.errors.time", SimpleNamespace(monotonic=lambda: now[0]))
    with terminable():
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        now[0] += 1.0
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.realtime
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_record_when_it_is_ended_while_its_server_is_lost_ends_in_order(tmp_path, number):
    with served("live") as server:
        url = server.url().replace("rtmp://", "rtmps://")
    client = start("record", url, "--once", "--duration", "20s", "--out", str(tmp_path))
    heard = []
    while not any("trying again" in line for line in heard):
        heard.append(client.stderr.readline())
        assert heard[-1], heard
    client.send_signal(number)
    status, _, errors = finish(client)
    assert status == 0
    assert f"{url}: 0 files" in errors
