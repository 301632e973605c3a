"""Settings of the live server: ranges, and what the command line may set."""

from __future__ import annotations

import pytest

from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.server import EXTRA_SETTINGS, config_from, read_credentials
from flowctl.serving import ServeOptions


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
        "publishers_per_address": "3",
    }
    config = config_from(ServeOptions(extra=extra, flush_interval_s=0.1))
    assert (
        config.second_publisher,
        config.return_grace_s,
        config.players_may_wait,
        config.publishers_per_address,
        config.flush_interval_s,
    ) == (SecondPublisher.STANDBY, 1.5, False, 3, 0.1)


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
    ],
)
def test_extra_when_wrong_is_refused_by_name(extra, words):
    """A typing error is no silent default."""
    with pytest.raises(ConfigError) as caught:
        config_from(ServeOptions(extra=extra))
    assert words in str(caught.value)


def test_extra_when_unknown_hints_at_all_that_are_known():
    """The hint lists the settings."""
    with pytest.raises(ConfigError) as caught:
        config_from(ServeOptions(extra={"x": "1"}))
    assert all(name in caught.value.hint for name in EXTRA_SETTINGS)


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
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by everybody"):
        read_credentials(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_credentials(tmp_path / "absent")
