"""Settings of the live server as a dataclass: ranges. Their text: test_live_settings.py."""

from __future__ import annotations

import pytest

from flowctl.core.server.program import ServeOptions
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.records.flight.options import FlightOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_grace_s", -0.1),
        ("return_grace_s", float("nan")),
        ("publishers_per_address", -1),
        ("memory_budget_bytes", -1),
        ("flush_interval_s", -0.1),
        ("return_after_s", float("nan")),
    ],
)
def test_field_when_out_of_range_is_named_with_its_value(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value}, it must be"):
        LiveConfig(**{field: value})


def test_policy_when_it_is_unknown_is_refused():
    with pytest.raises(ConfigError, match="policy is 'all', it must be all-or-cut, audio-first or pictures-first"):
        LiveConfig(policy="all")


def test_target_delay_when_nothing_is_said_is_by_the_stream():
    """The live server leaves out what would be late and brings stalled viewers back, unless it is told not to."""
    assert LiveConfig().limits.target_delay_ms is None
    assert LiveConfig().sender.return_after_s == 3.0


def test_flights_when_nothing_is_recorded_are_refused():
    with pytest.raises(ConfigError, match="flights are asked for, but nothing is recorded"):
        LiveConfig(flights=FlightOptions(share=0.5))


@pytest.mark.parametrize(("field", "value"), [("port", 70_000), ("group_count", 0), ("group_count", 257)])
def test_options_of_any_server_when_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value}, it must be"):
        ServeOptions(**{field: value})
