"""Settings of the live server: ranges, and what the command line may set."""

from __future__ import annotations

import dataclasses

import pytest

from flowctl.errors import ConfigError
from flowctl.flow.limits import Limits
from flowctl.live.config import Audience, LiveConfig, SecondPublisher, parse_audiences
from flowctl.live.server import EXTRA_SETTINGS, LiveServer, config_from, read_credentials, settings_from
from flowctl.outgoing.streamlog import CacheLimits
from flowctl.rtmp.limits import WireLimits
from flowctl.sending.settings import SenderSettings
from flowctl.server.program import ServeOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_grace_s", -0.1),
        ("return_grace_s", float("nan")),
        ("publishers_per_address", -1),
        ("key_wait_s", -1.0),
        ("streams", 0),
        ("control_bytes_per_s", 0),
        ("messages_per_turn", 0),
    ],
)
def test_field_when_out_of_range_is_named_with_its_value(field, value):
    """An error names field, value and what is allowed."""
    with pytest.raises(ConfigError, match=f"{field} is {value}, it must be"):
        LiveConfig(**{field: value})


def test_extra_when_given_as_text_sets_the_field():
    """Each setting of the command line has its effect."""
    extra = {
        "second_publisher": "standby",
        "return_grace": "1.5",
        "players_may_wait": "no",
        "flush_adaptive": "no",
        "publishers_per_address": "3",
    }
    config = config_from(ServeOptions(extra=extra, flush_interval_s=0.1))
    assert (
        config.second_publisher,
        config.return_grace_s,
        config.players_may_wait,
        config.flush_adaptive,
        config.publishers_per_address,
        config.flush_interval_s,
    ) == (SecondPublisher.STANDBY, 1.5, False, False, 3, 0.1)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"seconds": "1"}, "unknown setting 'seconds'"),
        ({"second_publisher": "both"}, "second_publisher is 'both'"),
        ({"return_grace": "soon"}, "return_grace is 'soon', it must be a number"),
        ({"return_grace": "-1"}, "return_grace_s is -1.0"),
        ({"players_may_wait": "maybe"}, "it must be yes or no"),
        ({"publishers_per_address": "x"}, "publishers_per_address is 'x'"),
        ({"publishers_per_address": "inf"}, "publishers_per_address is 'inf'"),
        ({"publishers_per_address": "2.5"}, "publishers_per_address is '2.5'"),
        ({"publishers_per_address": "9" * 5000}, "publishers_per_address is '9"),
        ({"media_message_bytes": "1"}, "media_message_bytes is 1, allowed is a whole number from 512 to 16777215"),
        ({"media_message_bytes": "big"}, "media_message_bytes: 'big' is not a number with a unit"),
        ({"chunk_streams": "0"}, "chunk_streams is 0, allowed is a whole number from 1 to 65598"),
        ({"chunk_streams": "1.5"}, "chunk_streams is '1.5', it must be a whole number"),
        ({"commands_per_second": "-1"}, "commands_per_second is -1.0, allowed is a number from 0"),
        ({"player_wait_s": "1year"}, "player_wait_s: unknown unit 'year'"),
        ({"cache_bytes": "-1"}, "cache_bytes: '-1' is not a number with a unit"),
        ({"cache_messages": "many"}, "cache_messages is 'many', it must be a whole number, 0 or more"),
        ({"trusted": "1"}, "unknown setting 'trusted'"),
        ({"audiences": "live/*"}, "audiences: 'live/*' is not app/stream=target delay and policy"),
        ({"audiences": "live/*=soon"}, "audiences, 'live/*': 'soon'"),
    ],
)
def test_extra_when_wrong_is_refused_by_name(extra, words):
    """A typing error is no silent default."""
    with pytest.raises(ConfigError) as caught:
        LiveServer(ServeOptions(extra=extra), config_from(ServeOptions(extra=extra)))
    assert words in str(caught.value)


def test_wire_limits_when_given_as_text_are_those_of_every_session(tmp_path):
    """Sizes, durations and counts with their units, and the credentials, end in the same settings of the sessions."""
    users = tmp_path / "users"
    users.write_text("ann:pw\n")
    users.chmod(0o600)
    extra = {
        "media_message_bytes": "2MiB",
        "player_wait_s": "2min",
        "ping_after_s": "0",
        "chunk_streams": "8",
        "commands_per_second": "2.5",
        "credentials_file": str(users),
    }
    config = config_from(ServeOptions(extra=extra)).rtmp
    assert config.credentials == {"ann": "pw"}
    assert config.limits == WireLimits(
        media_message_bytes=2 << 20, player_wait_s=120.0, ping_after_s=0.0, chunk_streams=8, commands_per_second=2.5
    )
    assert config_from(ServeOptions()) == LiveConfig()


def test_wire_limits_when_numeric_can_all_be_set():
    """Each number of the wire limits is a setting, and its own default is accepted as text."""
    numeric = {
        item.name: item.default for item in dataclasses.fields(WireLimits) if item.name not in {"amf", "trusted"}
    }
    assert set(numeric) <= set(EXTRA_SETTINGS)
    config = config_from(ServeOptions(extra={name: f"{value:g}" for name, value in numeric.items() if value < 1e6}))
    assert config.rtmp.limits == WireLimits()


def test_cache_limits_when_given_as_text_bound_the_cache():
    """The GOP cache has settings of its own for each of its bounds."""
    extra = {"cache_bytes": "1MiB", "cache_messages": "100", "cache_s": "1500ms"}
    config = config_from(ServeOptions(extra=extra))
    assert config.cache == CacheLimits(size_bytes=1 << 20, messages=100, duration_s=1.5)


def test_extra_when_unknown_hints_at_all_that_are_known():
    """The hint lists the settings."""
    with pytest.raises(ConfigError) as caught:
        config_from(ServeOptions(extra={"x": "1"}))
    assert all(name in caught.value.hint for name in EXTRA_SETTINGS)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cache_byte", "cache_bytes"),
        ("cach_messages", "cache_messages"),
        ("flush_adaptiv", "flush_adaptive"),
    ],
)
def test_extra_when_nearly_known_hints_at_the_nearest_first(name, meant):
    """A typing error, or a name without its prefix, is answered with the setting that was meant."""
    with pytest.raises(ConfigError) as caught:
        config_from(ServeOptions(extra={name: "1"}))
    assert caught.value.hint.startswith(f"did you mean {meant} ({EXTRA_SETTINGS[meant]})?")


def test_credentials_when_read_are_by_user_and_never_shown(tmp_path):
    """Comments and empty lines are skipped; errors name the line, not the password."""
    path = tmp_path / "users"
    path.write_text("# people\nann:a:b\n\nbob:secret word\n")
    path.chmod(0o600)
    assert read_credentials(path) == {"ann": "a:b", "bob": "secret word"}
    for text, words in (("ann\n", "line 1"), (":pw-hidden\n", "line 1"), ("# nobody\n", "holds no user")):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_credentials(path)
        assert words in str(caught.value)
        assert "pw-hidden" not in str(caught.value)
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"users has mode {mode:04o}") as caught:
            read_credentials(path)
        assert caught.value.hint == f"chmod 600 {path}"
    with pytest.raises(ConfigError, match="cannot read"):
        read_credentials(tmp_path / "absent")


def test_target_delay_when_nothing_is_said_is_by_the_stream():
    """The live server leaves out what would be late and brings stalled viewers back, unless it is told not to."""
    assert ServeOptions().limits.target_delay_ms is None
    assert settings_from(ServeOptions()).return_after_s == 3.0


def test_policy_when_it_is_unknown_is_refused():
    """What is left out for slow viewers is one of three ways."""
    with pytest.raises(ConfigError, match="policy is 'all', it must be all-or-cut, audio-first or pictures-first"):
        config_from(ServeOptions(policy="all"))


def test_audiences_when_several_fit_are_the_first_that_does():
    """Target delay and policy per application and stream; what is not said stays as usual."""
    text = "talk/*=800ms audio-first; cams/door=off; cams/*=4s; x/*=pictures-first"
    config = config_from(ServeOptions(extra={"audiences": text}))
    found = {name: config.audience(name) for name in ("talk/a", "cams/door", "cams/b", "x/y", "live/room")}
    assert [item and (item.target_delay_ms, item.policy) for item in found.values()] == [
        (800, "audio-first"),
        (0, None),
        (4000, None),
        (-1, "pictures-first"),
        None,
    ]


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
        config_from(ServeOptions(extra={"audiences": text}))
    assert caught.value.hint


@pytest.mark.parametrize("words", ["800ms 900ms", "auto off", "audio-first pictures-first"])
def test_audiences_when_one_says_something_twice_are_refused(words):
    """The last of two does not win silently."""
    with pytest.raises(ConfigError, match="beside another one"):
        config_from(ServeOptions(extra={"audiences": f"talk/*={words}"}))


def test_shadow_when_its_limits_are_given_is_all_else_like_the_real_policy():
    """The candidate of the command line differs from the real settings in the marks of its limits alone."""
    limits = Limits.parse("1MiB,100")
    options = ServeOptions(shadow_limits=limits, settings=SenderSettings(stuck_s=7), memory_budget_bytes=1 << 20)
    config = config_from(options)
    assert (config.shadow.limits, config.shadow.marks_only) == (limits, True)
    assert config.memory_budget_bytes == 1 << 20
    assert config_from(ServeOptions()).shadow is None
    assert config_from(ServeOptions(extra={"memory_budget_per_address": "yes"})).memory_budget_per_address
