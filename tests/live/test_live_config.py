"""Settings of the live server as a dataclass: ranges. Their text: test_live_settings.py."""

from __future__ import annotations

import pytest

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


def test_flights_when_nothing_is_recorded_are_refused():
    with pytest.raises(ConfigError, match="flights are asked for, but nothing is recorded"):
        LiveConfig(flights=FlightOptions(share=0.5))
