"""The closed loop: how the comparison judges its two runs, and what it refuses. The whole of it: test_e2e_loop.py."""

from __future__ import annotations

import dataclasses

import pytest

from flowctl.cli import main
from flowctl.demo.loop import LoopComparison, LoopPlan, LoopRun, addresses, run_loop, side_of
from flowctl.errors import ConfigError, FlowctlError
from flowctl.load.results.result import PeerKind, PeerResult, RunResult

QUICK = LoopPlan(duration_s=10.0, healthy=3, slow=2)
SIDE = LoopRun(
    limits="l",
    slow=12,
    slow_cut=6,
    honest_refused=0,
    healthy=20,
    healthy_cut=0,
    healthy_missing=0,
    healthy_p50_ms=5.0,
    healthy_p99_ms=40.0,
    slow_p50_ms=None,
    slow_p99_ms=None,
    abusers=4,
    abusers_refused=0,
    refusals=0,
)
BETTER = dataclasses.replace(SIDE, limits="wider", slow_cut=3, abusers_refused=4, refusals=9)


def compared(after, before=SIDE, *, same_process=True):
    return LoopComparison(before=before, after=after, same_process=same_process, files={"log": "x"})


@pytest.mark.parametrize(
    ("comparison", "fault"),
    [
        (compared(dataclasses.replace(BETTER, slow_cut=4)), "honest slow viewers cut: 6 before, 4 after"),
        (compared(dataclasses.replace(BETTER, limits="l", slow_cut=8)), "honest slow viewers cut: 6 before, 8 after"),
        (compared(BETTER, dataclasses.replace(SIDE, slow_cut=0)), "there was nothing to mend"),
        (compared(dataclasses.replace(BETTER, abusers_refused=3)), "3 of 4 abusers were refused"),
        (compared(dataclasses.replace(BETTER, honest_refused=1)), "1 honest viewers were refused"),
        (compared(dataclasses.replace(BETTER, healthy_missing=1)), "served worse than before"),
        (compared(dataclasses.replace(BETTER, healthy_cut=1)), "served worse than before"),
        (compared(BETTER, same_process=False), "started again in between"),
    ],
)
def test_comparison_when_one_thing_is_not_better_fails_and_says_which(comparison, fault):
    assert len(comparison.faults) == 1
    assert fault in comparison.faults[0]
    assert comparison.lines()[-2:] == ["FAILED:", f"  {comparison.faults[0]}"]
    assert comparison.as_dict()["passed"] is False


def test_comparison_when_the_advice_was_to_keep_the_limits_passes_with_as_many_cut():
    comparison = compared(dataclasses.replace(BETTER, limits="l", slow_cut=7))
    assert comparison.faults == []
    assert comparison.lines()[-1].startswith("passed: limits kept as was advised")


def test_comparison_when_all_is_better_shows_both_sides():
    comparison = compared(BETTER)
    assert comparison.faults == []
    text = "\n".join(comparison.lines())
    assert "honest slow viewers cut               6 of 12       3 of 12" in text
    assert "- / -" in text
    assert text.splitlines()[-1].startswith("passed")


def test_side_when_made_of_a_run_counts_who_is_who():
    honest, abusers = addresses(QUICK)
    assert len(honest) == 3 + 3 * 2
    assert len(abusers) == 4
    assert not honest & abusers
    peers = [
        PeerResult(number=0, profile="healthy", kind=PeerKind.HEALTHY, url="u", missing_video=2, video=9),
        PeerResult(number=1, profile="slow@200k", kind=PeerKind.SLOW, url="u", cut=True, video=9),
    ]
    result = RunResult(url="u", peers=peers, profiles={"healthy": 1, "slow@200k": 1})
    side = side_of(QUICK, result, {*abusers, min(honest), "10.0.0.1"}, 7, "l")
    assert (side.slow, side.slow_cut, side.healthy, side.healthy_cut, side.healthy_missing) == (1, 1, 1, 0, 2)
    assert (side.abusers_refused, side.honest_refused, side.refusals) == (4, 1, 7)


def test_loop_when_the_analysis_makes_nothing_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.demo.loop.run_load", lambda plan, _: RunResult(url=plan.url))
    with pytest.raises(FlowctlError, match=r"the analysis made no limits.toml"):
        run_loop(QUICK, tmp_path, decide=lambda *_: None, record=False)


def test_plan_when_a_value_is_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="healthy is 1, it must be 2 to 500"):
        LoopPlan(healthy=1)


def test_demo_when_the_analysis_cannot_run_says_so_before_the_load(monkeypatch, tmp_path, capsys):
    def absent(_):
        raise ConfigError("it is not there", hint="get it")

    monkeypatch.setattr("flowctl.demo.loop.run_loop", lambda *_, **__: pytest.fail("the load has begun"))
    monkeypatch.setattr("flowctl.analyze.engine.check_available", absent)
    assert main(["demo", "--pipeline", "--folder", str(tmp_path / "x")]) == 2
    assert "it is not there" in capsys.readouterr().err


def test_demo_when_options_of_the_two_demonstrations_are_mixed_is_wrong_use(capsys):
    """What would be ignored is refused."""
    assert main(["demo", "--pipeline", "--soft", "1,1"]) == 2
    assert main(["demo", "--folder", "x"]) == 2
    assert "--soft means nothing beside --pipeline" in capsys.readouterr().err
