"""Types of settings: a wrong one is refused where it is given, with a way out where there is one."""

from __future__ import annotations

import math

import pytest

from flowctl.connection import Session
from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.work import WorkLimits
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.program import ServeOptions
from flowctl.core.server.server import Server
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.records.telemetry.options import EventsOptions
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ServerSessionConfig


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (AdmissionLimits, "connections", "10"),
        (AdmissionLimits, "connections", True),
        (AdmissionLimits, "new_per_address_and_s", math.nan),
        (AxisLimits, "soft", "1MiB"),
        (Limits, "size", "1MiB"),
        (Limits, "target_delay_ms", "auto"),
        (SenderSettings, "stuck_s", "15s"),
        (SenderSettings, "stuck_s", math.nan),
        (SenderSettings, "turn_messages", 12.5),
        (SocketOptions, "notsent_lowat_bytes", "128KiB"),
        (WorkLimits, "share_per_address", None),
        (ServeOptions, "limits", "1MiB,10"),
        (ServeOptions, "settings", None),
        (ServeOptions, "admission", 64),
        (ServeOptions, "host", None),
        (LiveConfig, "limits_file", "limits.toml"),
        (ServeOptions, "extra", ["a=b"]),
        (LiveConfig, "rtmp", WireLimits()),
        (ServerSessionConfig, "limits", {}),
        (EventsOptions, "max_bytes", "1GiB"),
    ],
)
def test_field_when_it_has_another_type_is_refused(kind, field, value):
    given = {field: value}
    if kind is EventsOptions:
        given |= {"folder": "x", "node": "n1"}
    with pytest.raises(ConfigError, match=rf"{field} is .*it must be"):
        kind(**given)


def test_server_when_its_limits_are_text_says_how_to_read_it():
    with pytest.raises(ConfigError) as caught:
        Server(Session, limits="1MiB,10")
    assert caught.value.hint == "Limits.parse('1MiB,10')"
    with pytest.raises(ConfigError, match="session_factory"):
        Server(Session())


def test_set_limits_when_they_are_text_changes_nothing():
    server = Server(Session)
    before = server.limits
    with pytest.raises(ConfigError, match="limits is '1MiB,10'"):
        server.set_limits("1MiB,10")
    assert server.limits is before
    server.stop()


def test_field_when_it_is_a_whole_number_for_a_real_one_is_fine():
    assert SenderSettings(stuck_s=15).stuck_s == 15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limits", "1MiB,10"),
        ("settings", {"stuck_s": 3}),
        ("options", 128),
        ("admission", 64),
        ("work_limits", 0.5),
        ("host", 5),
        ("port", "1935"),
        ("deferred", "yes"),
        ("group_count", 0),
        ("group_count", 2.0),
        ("loop_factory", "uvloop"),
        ("on_error", "log"),
        ("on_refused", 5),
        ("policy", "live"),
        ("policy", LivePolicy),
        ("port", -1),
        ("port", 70000),
        ("rebalance", "no"),
        ("trusted_proxies", "10.0.0.0/8,192.0.2.1"),
    ],
)
def test_server_when_an_argument_is_of_no_use_names_it(name, value):
    """What would mean something else (port 70000 is 4464 to the system), or break for each connection, is refused."""
    with pytest.raises(ConfigError, match=rf"{name} is .*it must be"):
        Server(Session, **{name: value})
