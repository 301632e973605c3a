"""Limits: defaults of low and hard, text form, what an error names, and what comes back from text."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.limits import DEFAULT_OVERHEAD_BYTES, NO_LIMITS, OFF_MARK, AxisLimits, HardPolicy, Limits
from flowctl.errors import ConfigError


@st.composite
def ordered_marks(draw):
    """Return (low, soft, hard) that keep to the rule, soft on."""
    low = draw(st.integers(0, 10**6))
    soft = draw(st.integers(low + 1, 10**7))
    return low, soft, draw(st.integers(soft, 10**8))


@pytest.mark.parametrize(
    ("given_marks", "marks"),
    [
        ({"soft": 10}, (5, 10, 20)),
        ({"soft": 1}, (0, 1, 2)),
        ({"soft": 7}, (3, 7, 14)),
        ({"soft": 10, "hard": 10}, (5, 10, 10)),
        ({"soft": 10, "hard": 0}, (5, 10, OFF_MARK)),
        ({"soft": 10, "low": 0}, (0, 10, 20)),
        ({"soft": 10, "low": 9}, (9, 10, 20)),
        ({"hard": 10}, (5, OFF_MARK, 10)),
        ({}, (OFF_MARK, OFF_MARK, OFF_MARK)),
        ({"soft": 0, "hard": 0, "low": 7}, (OFF_MARK, OFF_MARK, OFF_MARK)),
    ],
)
def test_axis_when_marks_are_left_out_low_is_half_and_hard_twice(given_marks, marks):
    axis = AxisLimits(**given_marks)
    assert axis.marks == marks
    assert axis.on is any(given_marks.get(name) for name in ("soft", "hard"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"soft": -1}, ["soft", "-1", "0 (off) or more"]),
        ({"soft": 5, "hard": -2}, ["hard", "-2", "0 (off) or more"]),
        ({"soft": 5, "low": -3}, ["low", "-3", "0 (off) or more"]),
        ({"soft": 10, "hard": 9}, ["hard", "9", "at least the soft limit 10"]),
        ({"soft": 10, "low": 10}, ["low", "10", "below the first limit 10"]),
        ({"hard": 10, "low": 11}, ["low", "11", "below the first limit 10"]),
    ],
)
def test_axis_when_marks_break_the_order_names_field_value_and_rule(wrong, words):
    with pytest.raises(ConfigError) as caught:
        AxisLimits(**wrong, name="messages")
    for word in [*words, "of messages"]:
        assert word in str(caught.value)


@given(st.integers(-3, 12), st.none() | st.integers(-3, 12), st.none() | st.integers(-3, 12))
@settings(max_examples=300, deadline=None)
def test_axis_for_any_marks_either_keeps_to_the_order_or_is_refused(soft, hard, low):
    try:
        axis = AxisLimits(soft=soft, hard=hard, low=low)
    except ConfigError:
        full_hard = 2 * soft if hard is None else hard
        first = soft or full_hard
        full_low = first // 2 if low is None else low
        negative = min(soft, full_hard, full_low) < 0
        assert negative or (soft and full_hard and full_hard < soft) or (first and full_low >= first)
        return
    assert (axis.soft, hard, low) == (
        soft,
        axis.hard if hard is not None else None,
        axis.low if low is not None else None,
    )
    assert min(axis.soft, axis.hard, axis.low) >= 0
    if axis.on:
        assert axis.low < axis.marks[1]
        assert axis.low < axis.marks[2]
    if axis.soft and axis.hard:
        assert axis.soft <= axis.hard


@pytest.mark.parametrize(
    ("text", "soft", "hard", "low"),
    [
        ("2MiB,2048", (2 << 20, 2048, 0), (4 << 20, 4096, 0), (1 << 20, 1024, 0)),
        ("2MiB,2048,4s", (2 << 20, 2048, 4000), (4 << 20, 4096, 8000), (1 << 20, 1024, 2000)),
        (" 64k , 10 , 800ms ", (65536, 10, 800), (131072, 20, 1600), (32768, 5, 400)),
        ("0,0", (0, 0, 0), (0, 0, 0), (0, 0, 0)),
        ("0,100", (0, 100, 0), (0, 200, 0), (0, 50, 0)),
    ],
)
def test_parse_when_text_is_a_pair_or_a_triple_gives_the_axes(text, soft, hard, low):
    limits = Limits.parse(text)
    axes = (limits.size, limits.messages, limits.age_ms)
    assert tuple(axis.soft for axis in axes) == soft
    assert tuple(axis.hard for axis in axes) == hard
    assert tuple(axis.low for axis in axes) == low
    assert limits.overhead_bytes == DEFAULT_OVERHEAD_BYTES
    assert limits.hard_policy is HardPolicy.CLOSE


def test_parse_when_age_is_missing_in_hard_and_low_follows_the_soft_age():
    limits = Limits.parse("1000,10,4s", "5000,50", "100,1")
    assert limits.size.marks == (100, 1000, 5000)
    assert limits.messages.marks == (1, 10, 50)
    assert limits.age_ms.marks == (2000, 4000, 8000)


def test_parse_when_nothing_is_limited_equals_no_limits():
    assert Limits.parse("0,0") == NO_LIMITS
    assert Limits.parse("0,0,0s") == NO_LIMITS


def test_parse_when_given_overhead_and_policy_keeps_them():
    limits = Limits.parse("1,1", overhead_bytes=7, hard_policy=HardPolicy.HOLD)
    assert (limits.overhead_bytes, limits.hard_policy) == (7, HardPolicy.HOLD)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("2MiB",), ["soft", "'2MiB'", "bytes,messages"]),
        (("1,2,3,4",), ["soft", "'1,2,3,4'"]),
        (("1,",), ["soft", "'1,'"]),
        ((",1",), ["soft"]),
        (("",), ["soft"]),
        (("2MiX,1",), ["soft bytes", "'mix'"]),
        (("-1,1",), ["soft bytes", "'-1'"]),
        (("1,1.5",), ["soft messages", "'1.5'", "whole number"]),
        (("1,-1",), ["soft messages", "'-1'"]),
        (("1,\u0663",), ["soft messages", "whole number"]),
        (("1," + "9" * 5000,), ["soft messages", "whole number"]),
        (("1,1,4x",), ["soft age", "'x'"]),
        (("1,1,100us",), ["soft age", "'100us'", "1 ms"]),
        (("1,1", "1,x"), ["hard messages", "'x'"]),
        (("1,1", "2,2", "1"), ["low", "'1'"]),
        (("10,10", "9,20"), ["hard limit of bytes", "9", "at least the soft limit 10"]),
        (("10,10", "20,9"), ["hard limit of messages", "9"]),
        (("10,10,2s", "20,20,1s"), ["hard limit of age", "1000", "2000"]),
        (("10,10", "20,20", "10,1"), ["low mark of bytes", "10", "below"]),
        (("10,10,2s", "20,20,4s", "1,1,2s"), ["low mark of age", "2000", "below"]),
    ],
)
def test_parse_when_text_is_wrong_names_field_value_and_rule(texts, words):
    with pytest.raises(ConfigError) as caught:
        Limits.parse(*texts)
    for word in words:
        assert word in str(caught.value)


@given(st.text(alphabet="0123456789., kKMGiBmsuhx-\n\u0663", max_size=20))
@settings(max_examples=300, deadline=None)
def test_parse_for_any_text_gives_limits_or_says_what_is_wrong(text):
    try:
        limits = Limits.parse(text)
    except ConfigError as caught:
        limits, error = None, str(caught)
    if limits is None:
        assert "soft" in error
    else:
        assert 2 <= len(text.split(",")) <= 3
        assert min(limits.size.soft, limits.messages.soft, limits.age_ms.soft) >= 0


@given(ordered_marks(), ordered_marks(), ordered_marks())
@settings(max_examples=200, deadline=None)
def test_parse_of_written_marks_gives_them_back(size, messages, age):
    low, soft, hard = (f"{size[i]},{messages[i]},{age[i]}ms" for i in range(3))
    limits = Limits.parse(soft, hard, low)
    assert limits.size.marks == size
    assert limits.messages.marks == messages
    assert limits.age_ms.marks == age
    assert limits == Limits(
        size=AxisLimits(low=size[0], soft=size[1], hard=size[2]),
        messages=AxisLimits(low=messages[0], soft=messages[1], hard=messages[2]),
        age_ms=AxisLimits(low=age[0], soft=age[1], hard=age[2]),
    )


def test_limits_when_shown_say_all_marks_for_people():
    shown = str(Limits.parse("2MiB,2048,4s"))
    assert shown == "soft 2.0 MiB, 2048 messages, 4.0 s; hard 4.0 MiB, 4096 messages, 8.0 s"
    assert str(Limits.parse("1KiB,1")) == "soft 1.0 KiB, 1 message, any age; hard 2.0 KiB, 2 messages, any age"
    assert str(Limits.parse("0,0,4s")).startswith("soft any size, any number of messages, 4.0 s;")


def test_limits_when_they_are_off_are_shown_so():
    assert str(Limits.parse("0,0,0")) == "soft off; hard off"
    assert str(Limits.parse("0,0", "1KiB,10")) == "soft off; hard 1.0 KiB, 10 messages, any age"


def test_limits_when_no_target_delay_is_given_have_that_of_the_stream():
    for limits in (Limits(), NO_LIMITS, Limits.parse("2MiB,2048,4s")):
        assert limits.target_delay_ms is None
        assert "target" not in str(limits)
        assert str(dataclasses.replace(limits, target_delay_ms=0)) == f"{limits}; no target delay"
        assert str(dataclasses.replace(limits, target_delay_ms=1500)) == f"{limits}; target delay 1.5 s"


def test_limits_when_overhead_is_negative_are_refused():
    with pytest.raises(ConfigError, match="overhead_bytes is -1"):
        Limits(overhead_bytes=-1)
    assert Limits(overhead_bytes=0).overhead_bytes == 0


def test_limits_when_made_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NO_LIMITS.overhead_bytes = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        NO_LIMITS.size.soft = 1
