"""Errors say what can be done about them, also where there is no command line."""

import traceback

from flowctl.errors import ConfigError, RemoteProtocolError


def test_hint_stands_below_a_traceback():
    error = ConfigError("port is 70000, allowed is 0 to 65535", hint="choose another")
    assert traceback.format_exception(error)[-2:] == [
        "flowctl.errors.ConfigError: port is 70000, allowed is 0 to 65535\n",
        "hint: choose another\n",
    ]
    assert str(error) == "port is 70000, allowed is 0 to 65535"


def test_error_without_a_hint_is_one_line():
    assert traceback.format_exception(RemoteProtocolError("bad")) == ["flowctl.errors.RemoteProtocolError: bad\n"]
