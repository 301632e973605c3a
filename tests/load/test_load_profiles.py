"""Profiles: how they are written, what adds up to a crowd, and what is refused with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.load.profiles import SLOW_PROFILES, parse_crowd, parse_profile, profiles
from flowctl.load.results.result import PeerKind


@pytest.mark.parametrize(
    "profile", [item for item in SLOW_PROFILES if item.name != "trace"], ids=lambda item: item.name
)
def test_example_when_of_any_profile_is_understood(profile):
    choice = parse_profile(profile.example)
    assert profile is choice.profile
    assert profile.summary
    assert profile.explanation
    assert profile.expectation
    assert choice.manner is not None


def test_hostile_profiles_when_listed_have_ids_and_names():
    hostile = [item for item in profiles().values() if item.kind is PeerKind.HOSTILE]
    assert len(hostile) > 25
    for item in hostile:
        assert item is parse_profile(f"{item.name.lower()}:2").profile is parse_profile(item.alias).profile
        assert item.name == parse_profile(item.alias).text


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("stall@2s/64KiB", {"receive_buffer_bytes": 65536}),
        ("stall", {"receive_buffer_bytes": 0}),
        ("pause@3s/500ms", {"receive_buffer_bytes": 65536}),
        ("pause@3s/500ms/16KiB", {"receive_buffer_bytes": 16384}),
        ("churn@5s", {"stay_s": 5}),
        ("tiny-window@8KiB", {"receive_buffer_bytes": 8192, "window_bytes": 8192}),
        ("ack-only", {"reads_never": True, "ack_rate": 2_500_000}),
        ("vanish@500ms", {"vanish_after_s": 0.5}),
        ("burst@10s:30%", {"join_at_s": 10}),
    ],
)
def test_parameters_when_written_with_units_are_understood(text, fields):
    manner = parse_profile(text).manner
    assert {name: getattr(manner, name) for name in fields} == fields


def test_pace_when_of_a_profile_reads_as_its_parameters_say(tmp_path):
    path = tmp_path / "link.csv"
    path.write_text("0,100000\n1,200000\n")
    choice = parse_profile(f"trace@{path}:5%")
    assert (choice.share, choice.text) == (0.05, f"trace@{path}")
    carried = {"slow@200k:8%": 25_000, "sawtooth@200k-4M/10s": 48_750, f"trace@{path}": 12_500}
    for text, one_second in carried.items():
        assert parse_profile(text).manner.pace(7.0).carried_bytes(8.0) == pytest.approx(one_second, rel=0.01), text
    pause, stall = (parse_profile(text).manner.pace(0.0) for text in ("pause@3s/2s", "stall@2s"))
    assert [pause.allowance(now) > 0 for now in (2.9, 3.1, 5.1)] == [True, False, True]
    assert [stall.allowance(now) > 0 for now in (1.9, 2.1, 1e6)] == [True, False, False]
    assert stall.wake_at(2.1) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("helthy", "no profile 'helthy'"),
        ("", "no profile ''"),
        ("healthy@5", "has no parameters"),
        ("slow", "needs RATE"),
        ("slow@", "needs RATE"),
        ("stall@", r"needs \[AFTER"),
        ("slow@fast", "not a number"),
        ("slow@10", "allowed is 1000"),
        ("slow@200k:120%", "0% to 100%"),
        ("slow@200k:1.5", "is whole"),
        ("sawtooth@4M-200k/10s", "must be below HIGH"),
        ("sawtooth@4M", "LOW-HIGH/PERIOD"),
        ("pause@3s", "ON/OFF"),
        ("pause@3s/2s/1", "allowed is 1 KiB"),
        ("pause@3s/2s/", "not a number"),
        ("churn@1ms", "allowed is 0.1"),
        ("stall@900h", "allowed is 0"),
        ("tiny-window@1", "allowed is 1 KiB"),
        ("trace@/no/such/file", "cannot read"),
        ("B27", "cannot be carried out"),
    ],
)
def test_parse_profile_when_the_text_is_wrong_says_what_is_allowed(text, what):
    with pytest.raises(ConfigError, match=what) as caught:
        parse_profile(text)
    assert text in str(caught.value) or text == "B27"
    assert caught.value.hint or "not a number" in what


def test_trace_when_the_file_is_wrong_names_it(tmp_path):
    path = tmp_path / "link.csv"
    path.write_text("0,5\n")
    with pytest.raises(ConfigError, match="line 1") as caught:
        parse_profile(f"trace@{path}")
    assert "seconds,bit_rate" in caught.value.hint


def test_crowd_when_shares_add_up_is_exact():
    crowd = parse_crowd(["healthy:90%", "slow@200k:8%", "stall:2%"], 2000)
    assert crowd == {"healthy": 1800, "slow@200k": 160, "stall": 40}


@pytest.mark.parametrize(
    ("texts", "crowd"),
    [
        ([], {"healthy": 10}),
        (["stall:3"], {"stall": 3, "healthy": 7}),
        (["healthy:2", "stall:3"], {"healthy": 7, "stall": 3}),
        (["stall"], {"stall": 10}),
        (["stall", "slow@200k:40%"], {"stall": 6, "slow@200k": 4}),
        (["stall:0", "healthy"], {"healthy": 10}),
        (["b04:1"], {"B04": 1, "healthy": 9}),
    ],
)
def test_crowd_when_something_is_left_over_is_filled(texts, crowd):
    """What is left goes to the profile without a share, otherwise to healthy viewers."""
    assert crowd == parse_crowd(texts, 10)


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["stall:8", "slow@200k:50%"], "make 13 viewers, there are 10"),
        (["stall:1", "stall:2"], "given twice"),
        (["stall", "stall"], "given twice"),
        (["stall", "slow@200k"], "have no share"),
    ],
)
def test_crowd_when_it_does_not_add_up_is_refused(texts, what):
    with pytest.raises(ConfigError, match=what):
        parse_crowd(texts, 10)


@pytest.mark.parametrize(
    ("texts", "viewers", "crowd"),
    [
        (["slow@200k:33%", "stall:33%", "healthy:34%"], 150, {"slow@200k": 50, "stall": 49, "healthy": 51}),
        (["stall:3%", "healthy:97%"], 150, {"stall": 5, "healthy": 145}),
        (["stall:1%", "never-read:2%", "healthy:97%"], 150, {"stall": 2, "never-read": 3, "healthy": 145}),
        (["stall:50%", "never-read:50%"], 151, {"stall": 76, "never-read": 75}),
        (["stall:2.5%", "never-read:2.5%", "healthy:95%"], 10, {"stall": 0, "never-read": 0, "healthy": 10}),
        (["stall:33.3333%", "never-read:33.3333%", "healthy:33.3334%"], 20000, None),
    ],
)
def test_crowd_when_shares_are_the_whole_has_exactly_the_viewers(texts, viewers, crowd):
    found = parse_crowd(texts, viewers)
    assert viewers == sum(found.values())
    assert crowd is None or {name: count for name, count in crowd.items() if count} == found


@given(
    st.lists(st.integers(1, 2500), min_size=1, max_size=4).filter(lambda parts: sum(parts) < 10_000),
    st.integers(1, 5000),
)
def test_crowd_when_shares_with_decimals_are_the_whole_is_never_refused(parts, viewers):
    names = ["stall", "never-read", "half-close", "ack-only", "vanish"]
    shares = [*parts, 10_000 - sum(parts)]
    texts = [f"{name}:{share / 100:.2f}%" for name, share in zip(names, shares, strict=False)]
    crowd = parse_crowd(texts, viewers)
    assert viewers == sum(crowd.values())
    for name, share in zip(names, shares, strict=False):
        assert abs(crowd.get(name, 0) - share * viewers / 10_000) < 1
