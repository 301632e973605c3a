"""Limits: marks, text form, what an error names, and the limits file."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.limits import DEFAULT_OVERHEAD_BYTES, NO_LIMITS, OFF_MARK, AxisLimits, HardPolicy, Limits
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file, render
from flowctl.core.text.tomltext import MOST_BYTES
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


SMALL = 'version = 1\n[limits]\nsoft = "2MiB,2048,4s"\n'
FULL = """
version = 1
objective = "fewest cuts"  # why
made_at = "2026-11-21T16:00:00Z"

[limits]
soft = "2MiB,2048,4s"
hard = "4MiB,4096,8s"
low = "1MiB,1024,2s"
hard_policy = "hold"
overhead_bytes = 0
target_delay = "1500ms"

[times]
stuck_s = 15
soft_too_long_s = 0
return_after_s = 2.5
"""


def axis(name, most):
    """Marks of one axis in any order that is allowed, each of them on or off."""

    def build(numbers):
        low, soft, hard = sorted(numbers)
        return st.sampled_from(
            [
                AxisLimits(name=name),
                AxisLimits(soft=soft, hard=hard, low=low, name=name),
                AxisLimits(soft=soft, hard=0, low=low, name=name),
                AxisLimits(hard=hard, low=low, name=name),
                AxisLimits(soft=hard, name=name),
            ]
        )

    return (
        st.lists(st.integers(0, most), min_size=3, max_size=3, unique=True)
        .map(lambda numbers: [number + 1 if index else number for index, number in enumerate(sorted(numbers))])
        .flatmap(build)
    )


seconds = st.none() | st.floats(0, 86_400) | st.integers(0, 86_400).map(float)
words = st.text(st.characters(codec="utf-8"), max_size=50)
FILES = st.builds(
    LimitsFile,
    limits=st.builds(
        Limits,
        size=axis("bytes", 10**12),
        messages=axis("messages", 10**12),
        age_ms=axis("age (ms)", 10**9),
        overhead_bytes=st.integers(0, 1024 * 1024),
        hard_policy=st.sampled_from(HardPolicy),
        target_delay_ms=st.sampled_from([None, 0, 1, 1500, 4000]),
    ),
    objective=words,
    made_at=words,
    stuck_s=seconds,
    soft_too_long_s=seconds,
    return_after_s=seconds,
)


@settings(max_examples=200, deadline=None)
@given(FILES)
def test_render_when_read_again_gives_the_same(file):
    assert parse_limits_file(render(file), "x") == file


def test_parse_when_everything_is_there_reads_everything():
    file = parse_limits_file(FULL, "limits.toml")
    limits = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s", "1MiB,1024,2s", overhead_bytes=0, hard_policy=HardPolicy.HOLD)
    limits = replace(limits, target_delay_ms=1500)
    assert file == LimitsFile(
        limits=limits,
        objective="fewest cuts",
        made_at="2026-11-21T16:00:00Z",
        stuck_s=15.0,
        soft_too_long_s=0.0,
        return_after_s=2.5,
    )
    assert file.times == {"stuck_s": 15.0, "soft_too_long_s": 0.0, "return_after_s": 2.5}


def test_parse_when_only_soft_is_there_leaves_the_rest_open():
    file = parse_limits_file(SMALL, "limits.toml")
    assert file == LimitsFile(limits=Limits.parse("2MiB,2048,4s", target_delay_ms=None))
    assert file.times == {}


WRONG = [
    ("version = 1\n[limits\n", "limits.toml: not valid TOML", "line 2"),
    ("", "version is missing", "the number 1"),
    (SMALL.replace("version = 1", "version = 2"), "line 1: version is 2", "the number 1"),
    (SMALL.replace("version = 1", "version = true"), "version is True", "the number 1"),
    ("version = 1\n", "limits is missing", "[limits]"),
    ("version = 1\nlimits = 3\n", "line 2: limits is 3", "[limits]"),
    ("version = 1\n[limits]\n", "line 2: soft is missing", "2MiB,2048,4s"),
    ("version = 1\n[limits]\nhard = '3,3'\n", "soft is missing", "2MiB,2048,4s"),
    ("version = 1\n[limits]\nsoft = 5\n", "line 3: soft is 5", "text in quotes"),
    ("version = 1\n[limits]\nsoft = '5'\n", "line 3: soft: '5'", "bytes,messages"),
    ("version = 1\n[limits]\nsoft = '5x,2'\n", "line 3: soft bytes", "unknown unit"),
    ("version = 1\n[limits]\nsoft = '5,-2'\n", "line 3: soft messages", "whole number"),
    (SMALL + "hard = '1MiB,1,1s'\n", "line 4: hard limit of bytes", "at least the soft limit"),
    (SMALL + "low = '3MiB,1,1s'\n", "line 4: low mark of bytes", "below the first limit"),
    (SMALL + "hard_policy = 'never'\n", "line 4: hard_policy is 'never'", "close or hold"),
    (SMALL + "hard_policy = ['close']\n", "line 4: hard_policy is ['close']", "close or hold"),
    (SMALL + "overhead_bytes = 1.5\n", "line 4: overhead_bytes is 1.5", "whole number"),
    (SMALL + "overhead_bytes = -1\n", "line 4: overhead_bytes is -1", "0 to"),
    (SMALL + "sofd = '1,1'\n", "line 4: unknown key 'sofd'", ""),
    ("versoin = 1\n" + SMALL, "line 1: unknown key 'versoin'", ""),
    (SMALL + "[time]\n", "line 4: unknown key 'time'", ""),
    (SMALL + "[times]\nstuck = 1\n", "line 5: unknown key 'stuck'", ""),
    (SMALL + "[times]\nstuck_s = -1\n", "line 5: stuck_s is -1", "0 (off) to 86400"),
    (SMALL + "[times]\nstuck_s = nan\n", "line 5: stuck_s is nan", "0 (off) to 86400"),
    (SMALL + "[times]\nstuck_s = inf\n", "line 5: stuck_s is inf", "0 (off) to 86400"),
    (SMALL + "[times]\nstuck_s = true\n", "line 5: stuck_s is True", "seconds"),
    (SMALL + "[times]\nstuck_s = '3s'\n", "line 5: stuck_s is '3s'", "seconds"),
    (SMALL + "target_delay = 'soon'\n", "line 4: target_delay", "number with a unit"),
    (SMALL + "target_delay = 3\n", "line 4: target_delay is 3", "text in quotes"),
    (SMALL + "[ladder]\non = true\n", "line 4: unknown key 'ladder'", ""),
    ("objective = 3\n" + SMALL, "line 1: objective is 3", "text in quotes"),
    (f"objective = '{'x' * 1001}'\n" + SMALL, "line 1: objective is", "1000 characters"),
    ("a = " + "[" * 5000, "limits.toml: not valid TOML", ""),
    ("a = " + "9" * 5000, "limits.toml: not valid TOML", ""),
    ("#" * (MOST_BYTES + 1), f"limits.toml: it has more than {MOST_BYTES} bytes", ""),
]


@pytest.mark.parametrize(("text", "place", "allowed"), WRONG, ids=range(len(WRONG)))
def test_parse_when_something_is_wrong_names_file_place_value_and_what_is_allowed(text, place, allowed):
    with pytest.raises(ConfigError) as caught:
        parse_limits_file(text, "limits.toml")
    said = str(caught.value)
    assert said.startswith("limits.toml")
    assert said.count("limits.toml") == 1
    assert place in said
    assert allowed in said
    assert "\n" not in said
    assert len(said) < 300


def test_parse_when_a_key_is_unknown_hints_at_those_there_are():
    with pytest.raises(ConfigError) as caught:
        parse_limits_file(SMALL + "sofd = '1,1'\n", "limits.toml")
    assert "hard, hard_policy, low, overhead_bytes, soft" in caught.value.hint


def test_render_when_a_value_could_not_be_read_refuses():
    with pytest.raises(ConfigError, match="stuck_s is 90000"):
        render(LimitsFile(limits=Limits.parse("1,1"), stuck_s=90_000.0))


def test_documents_when_they_show_a_limits_file_show_a_valid_one():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "change-limits-and-bans.md").read_text("utf-8")
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    files = [parse_limits_file(example, "the page") for example in examples if "[limits]" in example]
    assert len(files) == 1
    assert len(files[0].times) == 3
