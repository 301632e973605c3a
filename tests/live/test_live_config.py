"""Settings of the live server as a dataclass: ranges, and audiences. Their text: test_live_settings.py."""

from __future__ import annotations

import pytest

from flowctl.core.server.program import ServeOptions
from flowctl.errors import ConfigError
from flowctl.live.config import Audience, LiveConfig, parse_audiences
from flowctl.live.settings.levels import Role
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
    """What is left out for slow viewers is one of three ways."""
    with pytest.raises(ConfigError, match="policy is 'all', it must be all-or-cut, audio-first or pictures-first"):
        LiveConfig(policy="all")


def test_audiences_when_several_fit_are_the_nearest():
    """Target delay and policy of viewers per stream; what is not said stays as usual, for publishers all of it."""
    text = "talk/*=800ms audio-first; cams/*=4s; cams/door=off; x/*=pictures-first"
    config = LiveConfig(audiences=parse_audiences(text))
    found = [config.at(name, Role.VIEWER) for name in ("talk/a", "cams/door", "cams/b", "x/y", "live/room")]
    assert [(item.limits.target_delay_ms, item.policy) for item in found] == [
        (800, "audio-first"),
        (0, "all-or-cut"),
        (4000, "all-or-cut"),
        (None, "pictures-first"),
        (None, "all-or-cut"),
    ]
    assert config.at("talk/a", Role.PUBLISHER) is config


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "nope"}, "policy is 'nope', it must be all-or-cut, audio-first or pictures-first"),
        ({"target_delay_ms": -5}, "target_delay_ms must be 0 to 3600000, or -1"),
        ({"target_delay_ms": "800ms"}, "target_delay_ms is '800ms' "),
        ({"target_delay_ms": 0.8}, "target_delay_ms is 0.8 "),
        ({"target_delay_ms": True}, "target_delay_ms is True "),
        ({"streams": ""}, "'' is no pattern"),
        ({"streams": 5}, "streams is 5 "),
    ],
)
def test_audience_when_written_in_code_is_checked_at_once(fields, said):
    """What is wrong is told when the settings are made, not when somebody plays."""
    with pytest.raises(ConfigError, match=said):
        Audience(**{"streams": "x"} | fields)


def test_audiences_when_one_is_a_plain_tuple_are_refused():
    """What only looks like an audience would break the connection of each viewer."""
    with pytest.raises(ConfigError, match="it must be Audience"):
        LiveConfig(audiences=(("talk/*", 800, "audio-first"),))


def test_audience_when_written_as_text_reads_as_the_same():
    """Records say of audiences what a command line would, whoever set them."""
    found = parse_audiences("talk/*=800ms audio-first; cams/*=off; x/*=pictures-first; y=auto")
    assert parse_audiences("; ".join(map(str, found))) == found


@pytest.mark.parametrize("words", ["800ms 900ms", "auto off", "audio-first pictures-first"])
def test_audiences_when_one_says_something_twice_are_refused(words):
    """The last of two does not win silently."""
    with pytest.raises(ConfigError, match="beside another one"):
        parse_audiences(f"talk/*={words}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("talk/*=800ms audio-fist", "'audio-fist' is neither a target delay nor a policy"),
        ("talk/*=audio-fist", "'audio-fist' is neither a target delay nor a policy"),
        ("talk/*=800mss", "unknown unit 'mss' in '800mss'"),
        ("talk/*", "'talk/\\*' is not app/stream=target delay and policy"),
    ],
)
def test_audiences_when_a_word_is_unknown_say_which(text, said):
    """A slip in the name of a policy is no second target delay; each error has a hint."""
    with pytest.raises(ConfigError, match=said) as caught:
        parse_audiences(text)
    assert caught.value.hint


def test_target_delay_when_nothing_is_said_is_by_the_stream():
    """The live server leaves out what would be late and brings stalled viewers back, unless it is told not to."""
    assert LiveConfig().limits.target_delay_ms is None
    assert LiveConfig().sender.return_after_s == 3.0


def test_flights_when_nothing_is_recorded_are_refused():
    with pytest.raises(ConfigError, match="flights are asked for, but nothing is recorded"):
        LiveConfig(flights=FlightOptions(share=0.5))


@pytest.mark.parametrize(("field", "value"), [("port", 70_000), ("group_count", 0), ("group_count", 257)])
def test_options_of_any_server_when_out_of_range_are_refused(field, value):
    """What no server can do is told before there is one."""
    with pytest.raises(ConfigError, match=f"{field} is {value}, it must be"):
        ServeOptions(**{field: value})
