"""Conditions of --fail-on: what is one, what is refused before a run, and how each is judged after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_kit import some_run, viewer

from flowctl.errors import ConfigError
from flowctl.load.results.failon import _UNITS, MAX_CONDITIONS, parse_condition, parse_conditions
from flowctl.load.results.figures import FIGURES, SCOPES, RunFigures
from flowctl.load.results.result import PeerKind

CROWD = {"healthy": PeerKind.HEALTHY, "slow@1.5M": PeerKind.SLOW, "sawtooth@1M-2M/3s": PeerKind.SLOW}
OPERATORS = {
    ">": lambda left, right: left > right,
    "<": lambda left, right: left < right,
    ">=": lambda left, right: left >= right,
    "<=": lambda left, right: left <= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}


def judged(text, run=None):
    return parse_condition(text).judge(RunFigures(some_run() if run is None else run))


@given(
    name=st.sampled_from(sorted(FIGURES)),
    scope=st.sampled_from([None, "healthy", "all", "slow@1.5M", "sawtooth"]),
    op=st.sampled_from(sorted(OPERATORS)),
    number=st.decimals(0, 10**9, places=3, allow_nan=False),
    spaces=st.sampled_from(["", " ", "  "]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_condition_when_written_by_its_grammar_is_understood(name, scope, op, number, spaces, data):
    figure = FIGURES[name]
    scope = None if figure.of_run is not None else scope
    unit = data.draw(st.sampled_from(["", *_UNITS[figure.unit]]))
    where = name if scope is None else f"{scope}.{name}"
    found = parse_condition(f"{spaces}{where}{spaces}{op}{spaces}{number}{unit}{spaces}")
    factor = _UNITS[figure.unit].get(unit, 1.0) if unit else 1.0
    assert (found.figure, found.scope, found.op) == (figure, scope, op)
    assert found.bound == pytest.approx(float(number) * factor)
    assert found.where == where


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_condition_when_it_is_any_text_is_understood_or_refused(text):
    hint = ""
    try:
        found = parse_condition(text)
    except ConfigError as error:
        hint, found = error.hint, None
    assert hint if found is None else found.figure.name in FIGURES


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("p99_ms", "is no condition", "p99_ms>200"),
        ("p99_ms>", "is no condition", "p99_ms>200"),
        ("p99_ms>-1", "is no condition", "p99_ms>200"),
        ("p99_ms=>200", "is no condition", "p99_ms>200"),
        ("p9_ms>200", "no figure 'p9_ms'", "did you mean p99_ms?"),
        ("nonsense>1", "no figure 'nonsense'", "cpu_us_per_viewer_s"),
        ("healthy.fds>10", "is a figure of the whole run", "leave out 'healthy.'"),
        ("p99_ms>200kB", "'kB' is no unit of p99_ms", "us, ms, s, min"),
        ("missing>1%", "'%' is no unit of missing", "none"),
    ],
)
def test_condition_when_it_is_wrong_is_refused(text, said, hint):
    """An error names what is wrong with a condition, and what would be right."""
    with pytest.raises(ConfigError) as caught:
        parse_condition(text)
    assert said in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["stall.missing>0", "hostile.cut>0", "expectation_failed>0", "publisher.failed>0"])
def test_conditions_when_nobody_is_meant_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_conditions([text], CROWD)
    assert "no peer of this run is" in str(caught.value)
    assert "slow@1.5M" in caught.value.hint


@pytest.mark.parametrize("scope", ["slow@1.5M", "SLOW@1.5M", "slow", "sawtooth", "viewers", "all", "healthy"])
def test_conditions_when_somebody_is_meant_are_taken(scope):
    (found,) = parse_conditions([f"{scope}.p99_ms>1"], CROWD)
    assert found.scope == scope


def test_conditions_when_there_are_too_many_are_refused():
    with pytest.raises(ConfigError, match="at most 100"):
        parse_conditions(["fds>1"] * (MAX_CONDITIONS + 1), CROWD)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("bound", [3, 4, 5])
def test_verdict_when_measured_follows_the_operator(op, bound):
    verdict = judged(f"cut{op}{bound}")
    assert verdict.value == 4.0
    assert verdict.failed is OPERATORS[op](4, bound)


@pytest.mark.parametrize(
    ("text", "failed", "words"),
    [
        ("healthy.missing>0", False, "0"),
        ("slow@200k.missing>2000", True, "2,115"),
        ("slow.cut>3", True, "4"),
        ("healthy.p99_ms>0.2s", False, "ms"),
        ("missing_share>1%", True, "1.84%"),
        ("playing_share<100%", False, "100.0%"),
        ("expectation_failed>0", True, "1"),
        ("rss_kb_per_viewer>10kB", True, "26.0 kB"),
        ("fds>100", False, "60"),
        ("cpu_us_per_viewer_s<1ms", False, "us"),
    ],
)
def test_verdict_when_judged_says_what_was_measured(text, failed, words):
    verdict = judged(text)
    assert (verdict.failed, words in verdict.measured) == (failed, True)
    assert str(verdict).startswith("FAIL" if failed else "pass")


@pytest.mark.parametrize("text", ["fds>10", "rss_kb<1000000", "cpu_us_per_viewer_s>1", "load_cpu_percent>1"])
def test_verdict_when_the_server_was_not_measured_fails(text):
    verdict = judged(text, some_run(samples=[], server_cpu_s=None, server_base_rss_bytes=None))
    assert (verdict.value, verdict.failed) == (None, True)
    assert "not measured" in verdict.measured


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"warnings", "duration_s"}))
def test_verdict_when_nothing_happened_fails(name):
    """Every figure of a run without peers and samples was not measured, so that no condition on it can pass."""
    verdict = judged(f"{name}<1000000", some_run(peers=[], samples=[], delays_ms={}, server_cpu_s=None))
    assert (verdict.value, verdict.failed) == (None, True) or (name, verdict.value) == ("connections", 0.0)


@pytest.mark.parametrize("figure", ["missing", "missing_share", "gaps", "broken_restarts", "p99_ms", "stalls"])
def test_verdict_when_no_frame_came_is_not_that_none_is_missing(figure):
    nothing = {"video": 0, "audio": 0, "first_frame_s": None, "delays": 0, "delay_p99_ms": None}
    run = some_run(peers=[viewer(0, "healthy", PeerKind.HEALTHY, **nothing)], delays_ms={})
    assert judged(f"healthy.{figure}>0", run).failed


def test_scopes_when_named_in_an_error_are_all_understood():
    kinds = {kind.value: kind for kind in PeerKind}
    for scope in SCOPES:
        assert parse_conditions([f"{scope}.cut>0"], kinds)[0].scope == scope
