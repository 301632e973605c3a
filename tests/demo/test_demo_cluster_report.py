"""The verdict on the demonstration of a cluster, and its page: what is wrong is named, and what is right is not."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from flowctl.demo.cluster.frames import ViewerVerdict
from flowctl.demo.cluster.page import render
from flowctl.demo.cluster.report import (
    BY_SEGMENTS,
    EDGES,
    FOLLOWING,
    LIAR,
    ORIGIN_A,
    ORIGIN_B,
    ORIGINS,
    SLOW,
    ClusterPlan,
    ClusterReport,
    Fetched,
)
from flowctl.errors import ConfigError

VIEWER = ViewerVerdict(
    label="viewer 1", frames=1848, lost=0, doubled=0, disordered=0, changed=0, delay_p50_ms=31.0, delay_p99_ms=80.0,
    longest_pause_s=0.4, recovered_s=0.6,
)  # fmt: skip


def fetched():
    """Two edges over 24 s: A until it dies at 12 s, B throughout, the slow one a little, the liar once."""
    found = []
    for at in range(25):
        counts = {ORIGIN_A: min(at, 12) // 2, ORIGIN_B: at - min(at, 12) // 2, SLOW: at // 8, LIAR: min(at, 1)}
        for edge in EDGES:
            for origin in ORIGINS:
                gone = (origin == ORIGIN_A and at > 12) or (origin == LIAR and at >= 1)
                found.append(
                    Fetched(
                        at_s=float(at), edge=edge, origin=origin, requests=counts[origin],
                        size_bytes=counts[origin] * 200_000, faults=counts[origin] if origin == LIAR else 0,
                        connected=not gone,
                    )
                )  # fmt: skip
    return found


def report(**values):
    one = ClusterReport(
        watched=[replace(VIEWER, node=edge, label=f"viewer {n}") for edge in EDGES for n in (1, 2)],
        fetched=fetched(),
        per_segment={FOLLOWING: None, BY_SEGMENTS: 1.04},
        killed=ORIGIN_A,
        killed_s=12.0,
        duration_s=24.0,
        lies_told=3,
        sent_all=3,
    )
    return replace(one, **values)


def test_report_when_all_is_as_it_should_be_passes():
    found = report()
    assert found.faults == []
    said = found.as_dict()
    assert (said["frames_lost"], said["recovered_s"], said["passed"]) == (0, dict.fromkeys(EDGES, 0.6), True)
    lines = "\n".join(found.lines())
    assert "all as it should be" in lines
    assert "origin A was killed 12.0 s after the first frame of 24 s." in lines
    assert all(len(line) <= 90 for line in found.lines())


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"watched": [replace(VIEWER, node=FOLLOWING, lost=2)]},
            "viewer 1 at edge 1 (follows): 2 lost",
        ),
        (
            {"watched": [replace(VIEWER, node=FOLLOWING, doubled=1, changed=3)]},
            "1 doubled, 3 changed",
        ),
        ({"watched": [replace(VIEWER, node=FOLLOWING, frames=0)]}, "nothing came"),
        (
            {"watched": [replace(VIEWER, node=FOLLOWING, recovered_s=11.0)]},
            "not as before 11 s after",
        ),
        ({"sent_all": 0}, "the encoder has sent all to no origin"),
        ({"lies_told": 0}, "it was asked for nothing, so it has not lied"),
        ({"per_segment": {BY_SEGMENTS: 2.5}}, "2.50 times the bytes of its segments were fetched"),
        (
            {"fetched": [replace(item, connected=True) if item.origin == LIAR else item for item in fetched()]},
            "edge 2 (segments): origin D (lies) is still connected",
        ),
        (
            {"fetched": [replace(item, size_bytes=10**9) if item.origin == SLOW else item for item in fetched()]},
            "origin C (slow) was asked for as much as the others",
        ),
    ],
)
def test_report_when_something_is_wrong_names_it(values, fault):
    found = report(**values)
    assert not found.passed
    assert any(fault in item for item in found.faults)
    assert f"WRONG: {found.faults[0]}" in found.lines()


class _Ids(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.svg = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.svg += [dict(attributes)["aria-labelledby"]] if tag == "svg" else []

    def handle_data(self, data):
        self.text += data


def test_page_when_made_draws_network_timeline_and_delays():
    delays = {edge: [(second / 5, 40.0 + second) for second in range(100)] for edge in EDGES}
    page = _Ids(render(report(), delays))
    assert [name.split("-title")[0] for name in page.svg] == ["network", "timeline", "delays"]
    for said in ("every viewer has every frame", "frames lost by viewers", "1.04", "killed at 12.0 s", "lied"):
        assert said in page.text
    wrong = _Ids(render(report(lies_told=0), {}))
    assert "so it has not lied" in wrong.text


def test_plan_when_out_of_range_is_refused():
    assert ClusterPlan(duration_s=20).kill_s == 10
    for values in ({"duration_s": 5}, {"viewers": 0}, {"kill_share": 0.95}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            ClusterPlan(**values)
