"""The limits file: what is written is read again exactly, and what is wrong is named with its line or key."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file, render
from flowctl.core.text.tomltext import MOST_BYTES
from flowctl.errors import ConfigError

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


def test_parse_when_it_still_has_a_ladder_hints_at_what_came_instead():
    with pytest.raises(ConfigError) as caught:
        parse_limits_file(SMALL + "[ladder]\non = true\n", "limits.toml")
    assert caught.value.hint == "the ladder has gone: leave [ladder] out; see target_delay"


def test_render_when_a_value_could_not_be_read_refuses():
    with pytest.raises(ConfigError, match="stuck_s is 90000"):
        render(LimitsFile(limits=Limits.parse("1,1"), stuck_s=90_000.0))


def test_documents_when_they_show_a_limits_file_show_a_valid_one():
    text = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text("utf-8")
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    files = [parse_limits_file(example, "docs/how-to.md") for example in examples if "[limits]" in example]
    assert len(files) == 1
    assert len(files[0].times) == 3
