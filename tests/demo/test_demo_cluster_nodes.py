"""Servers of the demonstration of a cluster as processes: what is said of one that does not get ready."""

from __future__ import annotations

import pytest

from flowctl.demo import processes
from flowctl.demo.processes import ServerProcesses
from flowctl.errors import FlowctlError


def test_start_when_a_server_is_not_ready_in_time_says_so_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_READY_S", 0.01)
    with ServerProcesses(tmp_path) as found, pytest.raises(FlowctlError, match="origin A was not ready") as caught:
        found.start("origin A", "serve", "live")
    assert "less busy" in caught.value.hint


def test_start_when_a_server_ends_at_once_says_with_what_and_shows_its_log(tmp_path):
    with (
        ServerProcesses(tmp_path) as found,
        pytest.raises(FlowctlError, match="origin A ended with status 2") as caught,
    ):
        found.start("origin A", "serve", "live", "--no-such-option")
    assert "--no-such-option" in caught.value.hint
