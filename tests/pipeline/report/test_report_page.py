"""The page of the report: peers' words stay words, it says what is missing, and figures are those given."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_kit import Page
from report_kit import (
    BEGAN,
    NASTY,
    a_choice,
    a_moment,
    accounts,
    empty_data,
    some_data,
    some_whole,
    worst_viewer,
)

from flowctl.charts.page import STYLE
from flowctl.pipeline.report import answers, decisions, pictures
from flowctl.pipeline.report.data import Cut, JobNote, JobState, number
from flowctl.pipeline.report.page import MORE_STYLE, render

QUESTIONS = (
    "Who was slow, and why?",
    "Which limits would be better?",
    "Whom to keep out?",
    "How many viewers does a node carry, and how many nodes?",
    "How late were viewers?",
    "What happened?",
    "Which streams and networks?",
    "What was read, and what could not be used?",
)


def test_page_when_peers_say_bad_things_only_shows_them():
    """Markup in names, agents and reasons is text of the page: no tag, attribute or address comes of it."""
    page = Page(render(some_data()))
    assert {"script", "img", "link", "iframe", "object", "base", "form"}.isdisjoint(page.tags)
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    assert (page.crossed, page.open) == ([], [])
    assert page.words.count("alert('x')") >= 8


@given(st.text(max_size=60))
@settings(max_examples=40, deadline=None)
def test_page_when_texts_are_of_any_kind_has_the_same_tags(text):
    """No text of a peer changes which tags there are, nor brings a character that a page may not have."""
    shown = render(some_data(f"a{text}"))
    assert Page(render(some_data("plain"))).tags == Page(shown).tags
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]", shown) is None


def test_page_when_opened_asks_for_nothing():
    """The page names no other resource, and forbids itself to load any; its links lead to its own places."""
    text = render(some_data())
    page = Page(text)
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value for value in policy)
    links = {value for _, name, value in page.attributes if name in {"src", "href", "srcset", "data", "action"}}
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert links
    assert links <= {f"#{name}" for name in ids}
    assert "url(" not in STYLE + MORE_STYLE
    assert "@import" not in STYLE + MORE_STYLE


def test_page_when_made_answers_in_order():
    """Answers come first, bookkeeping is last, each question once as a heading."""
    shown = render(some_data())
    assert list(QUESTIONS) == re.findall(r"<h2>(.*?)</h2>", shown)
    assert shown.index("What was read</h3>") > shown.index(f"<h2>{QUESTIONS[-1]}")
    assert "records read" not in shown


def test_page_when_read_without_eyes_says_what_is_drawn():
    """Every picture has a title and a description with figures, under ids of its own."""
    page = Page(render(some_data()))
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-labelledby"]
    assert {
        "pictures",
        "states",
        "blame",
        "drops",
        "ends",
        "delays",
        "delays-over-time",
        "front",
        "scores",
        "capacity-curve",
        "node-loads",
        "stream-loads",
    } == {label.split()[0].removesuffix("-title") for label in labels}
    assert all(set(label.split()) <= set(ids) for label in labels)
    for said in re.findall(r"<desc[^>]*>(.*?)</desc>", render(some_data())):
        assert re.search(r"\d", said)


def test_page_when_viewers_missed_pictures_tells_shares():
    """How many viewers got what share, of each of the worst its share and its line; what is not known is named so."""
    words = Page(render(some_data())).words
    for said in ("300 (76.9 %)", "50 to 80 %", "60 (15.4 %)", "not known", "30 (7.7 %)", "77.0 %", "85.0 %", "91.0 %"):
        assert said in words
    unknown = some_data(picture_shares=[{"least": None, "viewers": 390}])
    assert "What share of the pictures" not in Page(render(unknown)).words


def test_page_when_a_fleet_was_recorded_tells_nodes_and_streams_before_one_node():
    """The answer for the fleet comes before that for a node; loads and what is worth following stand below."""
    words = Page(render(some_data())).words
    assert words.index("900 viewers need 6 edges and 2 origins") < words.index("A node carries 2,400 viewers")
    for said in ("150.5 of 200", "7.5 viewers", "a follower costs as much as 2.0", "The first 1 of 3 nodes", "1.5"):
        assert said in words


def test_page_when_nothing_was_run_says_so_for_each_question():
    """Without any table the page is whole, has no picture, and names the job that would answer each question."""
    page = Page(render(empty_data()))
    assert (page.crossed, page.open) == ([], [])
    assert "svg" not in page.tags
    for job in answers.JOB_QUESTIONS:
        assert f"the job {job} was not run" in page.words


def test_page_when_a_job_failed_says_why_first_and_shows_the_rest():
    """The error and its hint stand before any figure; the job's section has the error, the others their figures."""
    failed = JobNote("whatif", JobState.FAILED, f"no flights in it {NASTY}", "record with --flights")
    data = some_data(choices=None, limits_toml=None)
    words = Page(render(replace(data, jobs={**data.jobs, "whatif": failed}))).words
    assert words.index("no flights in it") < words.index("of them viewers")
    assert "record with --flights" in words
    assert "The job whatif failed: no flights in it" in words
    assert "The viewers that were worst off" in words


def test_page_when_a_table_cannot_be_read_says_which_and_why():
    """A table that is broken costs its own section only."""
    words = Page(render(some_data(capacity=None, unreadable={"capacity": "not a Parquet file"}))).words
    assert "The tables of the job capacity could not be read: not a Parquet file" in words


def test_page_when_there_is_one_viewer_has_no_plural():
    """One of anything is written in the singular, and a share of one viewer is 100 %."""
    data = some_data(whole=some_whole(connections=1, viewers=1, troubled=0, dropped_messages=0), node_count=1)
    words = Page(render(data)).words
    assert "1 connection to 1 node, from 2026-11-21 16:00:00 UTC on, for 10 min 0 s." in words
    assert "1 viewer watched" in words
    assert "All of them kept up all the time." in words


def test_page_when_there_was_no_viewer_divides_by_nothing():
    """Connections without a viewer among them are told, and no share is made up."""
    nothing = dict.fromkeys(some_whole(), None) | {"connections": 5, "viewers": 0, "troubled": 0}
    words = Page(render(some_data(whole=nothing, worst=Cut(), moments=(), delay_curves={}, blames=(), drops=()))).words
    assert "5 connections to 3 nodes" in words
    assert "None of them was a viewer." in words


@pytest.mark.parametrize("huge", [10**18, 1e300, float("inf"), float("nan"), -1, "many", True])
def test_page_when_figures_are_absurd_is_still_a_page(huge):
    """Numbers of any size, and what is no number at all, neither break the page nor stand in it as such."""
    names = ("viewers", "troubled", "dropped_messages", "play_ms", "sent_bytes", "stall_ratio", "delay_p95_of_p95_ms")
    data = some_data(
        whole=some_whole(**dict.fromkeys(names, huge)),
        moments=[a_moment(0, delay_p99_ms=huge, viewers=huge, hard=huge)],
        worst=Cut([worst_viewer(0, duration_s=huge, trouble_ms=huge, dropped_messages=huge)], 1),
        choices=Cut([a_choice(0, disconnected_share=huge, delay_p95_ms=huge, memory_peak_bytes=huge)], 1),
        capacity=Cut([{"viewers": huge, "busy_p95": huge}, {"viewers": 1, "busy_p95": 0.5}], 2),
        scores=Cut([{"cidr": "10.0.0.1/32", "score": huge, "evidence": {"a": huge}}], 1),
        blames=[{"blame": "policy", "viewers": huge, "trouble_ms": huge}],
        closes=[{"reason": "x", "closed_by": "peer", "connections": huge}],
    )
    page = Page(render(data))
    assert (page.crossed, page.open) == ([], [])
    assert not {"nan", "inf"} & set(re.findall(r"\b[a-z]+\b", page.words))


@given(
    viewers=st.integers(1, 10**9),
    troubled=st.integers(0, 10**9),
    dropped=st.integers(0, 10**12),
    connections=st.integers(1, 10**10),
)
@settings(max_examples=50, deadline=None)
def test_page_when_figures_are_given_shows_them_exactly(viewers, troubled, dropped, connections):
    """Counts stand in the page as they are in the tables, to the last digit."""
    troubled = min(viewers, troubled)
    whole = some_whole(viewers=viewers, troubled=troubled, dropped_messages=dropped, connections=connections)
    words = Page(render(some_data("x", whole=whole))).words
    assert f"{viewers:,} viewer" in words
    assert f"{connections:,} connection" in words
    if troubled:
        assert f"{troubled:,} viewer" in words
        assert f"{dropped:,} message" in words or (dropped == 0 and "Nothing was dropped." in words)


def test_page_when_tables_are_cut_says_how_many_rows_are_left_out():
    """A table that does not show all of its rows says how many there are and how many are not shown."""
    words = Page(render(some_data())).words
    assert "The first 20 of 39 viewers in trouble; 19 are left out here." in words
    assert "The first 12 of 50 choices; 38 are left out here." in words
    assert "The first 1 of 9 addresses and subnets with evidence against them; 8 are left out here." in words


def test_page_when_rows_were_set_aside_has_them_by_reason():
    """Reasons, rows and files of the quarantine are a table; tables that two jobs have read count once."""
    data = some_data()
    assert data.set_aside() == [
        {"table": "flow_events", "reason": "clock skew", "rows": 7, "files": 0},
        {"table": "flow_events", "reason": "truncated", "rows": 0, "files": 1},
    ]
    words = Page(render(data)).words
    assert "7 rows and 1 file were set aside" in words
    assert "How many rows 1 file held is not known" in words
    clean = {"sessions": JobNote("sessions", JobState.DONE, accounts=[accounts(aside=0) | {"files_quarantined": 0}])}
    assert "Nothing: every file and every row was used." in answers.unused(some_data(jobs=clean))


def test_page_when_limits_are_recommended_has_them_line_by_line():
    """The file to paste is there with its lines; what a line holds of a peer's words is text."""
    text = render(some_data())
    pasted = re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)[1]
    assert pasted.splitlines()[1:] == ["version = 1", "", "[limits]", "soft = &quot;2MiB,2048,4s&quot;"]
    assert "recommended" in text
    assert "in force" in text


@pytest.mark.parametrize("best", [1, 0])
def test_answers_when_there_were_audiences_say_how_they_were_judged(best):
    """Whoever has a target delay of its own keeps it: no choice is about it, be one recommended or none."""
    jobs = {"whatif": JobNote("whatif", JobState.DONE, summary={"audiences": f"talk/*=800ms {NASTY}"})}
    rows = [a_choice(0, in_force=True, recommended=not best), a_choice(1, in_force=False, recommended=bool(best))]
    said = decisions.better_limits(some_data(choices=Cut(rows, 2), jobs=jobs))
    assert "their own (talk/*=800ms" in said
    assert "judged with those of each choice" in said
    assert "Audiences" not in decisions.better_limits(some_data(choices=Cut(rows, 2)))


def test_answers_when_the_choice_in_force_is_best_says_so():
    """Where nothing better was found the page does not pretend otherwise."""
    rows = [a_choice(0), a_choice(1, recommended=True)]
    said = decisions.better_limits(some_data(choices=Cut(rows, 2)))
    assert said.startswith("None: of 2 choices the one in force is the best")
    assert "none meets what was asked for" in decisions.better_limits(some_data(choices=Cut([a_choice(0)], 1)))


def test_pictures_when_hardly_anybody_is_in_trouble_keep_it_small():
    """The axis of shares never ends below 10 %, so that little trouble looks little; shares of all make it whole."""
    (small,) = [
        pictures.states_over_time(some_data(moments=[a_moment(0, ready=0.99, soft=0.01, hard=0, overloaded=0)]))
    ]
    assert small.picture.y_top == 0.1
    full = pictures.states_over_time(some_data(moments=[a_moment(0, ready=0.0, hard=1.0, soft=0, overloaded=0)]))
    assert full.picture.y_top == 1.0
    assert "100 %" in full.picture.description


@pytest.mark.parametrize(
    ("share", "said"),
    [(0, "0 %"), (1, "100 %"), (0.5, "50.0 %"), (0.0001, "< 0.1 %"), (None, "-"), (0.9999, "100 %"), (0.999, "99.9 %")],
)
def test_shares_when_small_are_not_nothing(share, said):
    """A share that is not 0 is never written as 0 %."""
    assert said == pictures.percent(share)


def test_notes_when_written_and_read_are_the_same():
    """What is remembered of a job survives JSON; what is no note at all is a job that was not run."""
    note = JobNote("abuse", JobState.FAILED, "why", "do this", [accounts()], 1.5, {"a": 1}, {"x": "/y"})
    assert note == JobNote.from_dict("abuse", note.as_dict())
    assert JobNote.from_dict("x", {"state": ["odd"], "accounts": "odd", "took_s": "long"}).state is JobState.NOT_RUN
    assert number("1e400") is None
    assert BEGAN.tzinfo is not None
