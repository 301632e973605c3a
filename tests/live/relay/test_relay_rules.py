"""Settings of relays: what they say, what they refuse, and that no message or text of theirs shows a key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowctl.core.flow.limits import Limits
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.config import LiveConfig
from flowctl.live.relay.relay import hops_of
from flowctl.live.settings.relays import MOST_RELAYS, RelayRule, parse_relays


def test_rules_when_written_say_pattern_address_and_always():
    rules = parse_relays("live/*=rtmp://h/x/{app}-{stream}?key=s ; live/cam=rtmp://o:1936/a/b always;", "relay_push")
    assert rules == (
        RelayRule("live/*", "rtmp://h/x/{app}-{stream}?key=s"),
        RelayRule("live/cam", "rtmp://o:1936/a/b", always=True),
    )
    target = rules[0].target("live/room")
    assert (target.host, target.path, target.raw_query) == ("h", "x/live-room", "key=s")
    assert rules[0].fits("live/room")
    assert not rules[0].fits("other/room")


@pytest.mark.parametrize(
    "text",
    [
        "live/*",
        "live/*=rtmp://h/a/SECRET sometimes",
        "room=rtmp://h/a/SECRET",
        "live/*=rtmp://h/a/SECRET always",
        "live/*=http://h/a/SECRET",
        "live/*=rtmp:///a/SECRET",
        "live/*=SECRET",
        "live/*=rtmpt://user:SECRET@h/a/b",
        "live/*=rtmps://h/a/b?key=@/SECRET-file-that-is-not-there",
        "=rtmp://h/a/SECRET",
    ],
)
def test_rules_when_wrong_are_refused_without_showing_a_key(text):
    with pytest.raises(ConfigError) as caught:
        parse_relays(text, "relay_push")
    assert "SECRET" not in f"{caught.value} {caught.value.hint}".replace("/SECRET-file", "")


@pytest.mark.parametrize(
    ("words", "target_delay_ms"),
    [("", 900), (" target-delay=2s", 2000), (" target-delay=off", 0), (" target-delay=auto", None)],
)
def test_rule_when_it_has_a_target_delay_of_its_own_takes_the_place_of_that_of_viewers(words, target_delay_ms):
    (rule,) = parse_relays(f"live/*=rtmp://h/a/{{stream}}{words}", "relay_push")
    viewers = Limits.parse("1MiB,100", target_delay_ms=900)
    assert rule.limits_of(viewers) == replace(viewers, target_delay_ms=target_delay_ms)
    assert str(rule) == f"live/*=rtmp://h:1935/a/***{words}"


@pytest.mark.parametrize("words", ["target-delay=", "target-delay=soon", "target-delay=1s target-delay=2s", "delay=1s"])
def test_rule_when_its_target_delay_is_none_is_refused(words):
    with pytest.raises(ConfigError):
        parse_relays(f"live/*=rtmp://h/a/b {words}", "relay_push")


def test_rule_when_it_pulls_has_no_target_delay():
    with pytest.raises(ConfigError, match="relay_pull has a target delay"):
        LiveConfig(relay_pull=parse_relays("live/*=rtmp://h/a/b target-delay=1s", "relay_pull"))


def test_rules_when_shown_have_no_secrets():
    rules = parse_relays("live/*=rtmp://ann:PW@h/app/SECRET?token=SECRET; live/cam=rtmp://h/a/SECRET always", "x")
    shown = f"{rules} {rules[0]} {rules[1]} {LiveConfig(relay_push=rules)}"
    assert "SECRET" not in shown
    assert "PW" not in shown
    assert str(rules[1]) == "live/cam=rtmp://h:1935/a/*** always"


@pytest.mark.parametrize("name", ["live/news#2", "live/news#key=mine", "live/news?key=mine", "live#/news"])
def test_rule_when_a_peer_chose_a_name_that_would_be_read_as_another_one_has_no_address(name):
    (rule,) = parse_relays("live*/*=rtmp://h/{app}/{stream}?key=s", "x")
    with pytest.raises(RemoteProtocolError, match="no address"):
        rule.target(name)


def test_rule_when_its_key_is_in_a_file_has_what_the_file_holds_now_and_never_one_that_a_peer_names(tmp_path):
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("one\n")
    (rule,) = parse_relays(f"live/*=rtmps://h/x/{{stream}}?key=@{file}", "x")
    assert (rule.target("live/a").raw_query, str(rule)) == ("key=one", "live/*=rtmps://h:443/x/***")
    file.write_text("two\n")
    assert rule.target("live/a").raw_query == "key=two"
    assert rule.target("live/@key").path == "x/@key"
    with pytest.raises(RemoteProtocolError, match="no address"):
        rule.target(f"live/x?token=@{file}")
    assert rule.address("live/a").raw_query == f"key=@{file}"
    (rule,) = parse_relays(f"live/cam=rtmps://h/live2/@{file}", "x")
    assert (rule.target("live/cam").path, str(rule)) == ("live2/two", "live/cam=rtmps://h:443/live2/***")


def test_rules_when_too_many_are_refused():
    with pytest.raises(ConfigError, match="64"):
        parse_relays(";".join(f"a/{n}=rtmp://h/a/b" for n in range(MOST_RELAYS + 1)), "relay_push")


def test_pulls_when_there_are_several_workers_are_refused():
    """Workers follow each other; which of them would pull is not for a setting to guess."""
    with pytest.raises(ConfigError, match="one worker"):
        LiveConfig(relay_pull=parse_relays("a/b=rtmp://h/a/b", "x"), workers=2)


@pytest.mark.parametrize(
    ("agent", "hops"), [("FMLE/3.0 (compatible; flowctl relay; hops=2)", 2), ("obs", 0), ("flowctl relay; hops=x)", 0)]
)
def test_hops_when_a_publisher_says_them_are_counted(agent, hops):
    assert hops_of(agent) == hops
