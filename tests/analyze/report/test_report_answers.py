"""What the report says first: each answer's words from planted tables, with how sure it is; without Spark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_kit import BEGAN, choice, empty, felt, node, notes, publication

from flowctl.analyze.capacity.node import MEASURE
from flowctl.analyze.report import answers
from flowctl.analyze.report.found import CutTable, ReportFindings
from flowctl.charts.words import percent, sentences, share, span, standard_errors_between


def found(jobs=None, totals=None, peaks=None, **tables):
    whole = {"viewers": 400.0, "plays": 400.0, "troubled": 40.0, "people": 400, "span_s": 600.0} | (totals or {})
    named = [row for row in tables.get("network", ()) if row["key"]]
    links = [row | {"addresses": row["troubled"]} for row in named]
    links.append({"key": "others", "troubled": 40 - sum(row["troubled"] for row in links), "addresses": 40})
    cuts = {name: CutTable(rows, len(rows)) for name, rows in ({"links": links} | tables).items()}
    return ReportFindings(
        events="e", made_at=BEGAN, jobs=notes() if jobs is None else jobs, totals=whole, tables=cuts, peaks=peaks or {}
    )


def answer_about(about, shown):
    return next(item for item in answers.answers(shown) if item.about == about)


def calls(shown):
    return [item for item in answers.answers(shown) if item.about not in ("limits", "bans", "capacity")]


def test_limits_when_another_choice_is_recommended_says_what_it_would_have_changed():
    said = answer_about("limits", found(whatif_choices=[choice(1), choice(7)]))
    assert (said.kind, said.do) == ("act", "Set the limits of limits.toml, which lies beside this page.")
    assert "disconnected 9.5 % (37 of 390) → 4.9 % (19 of 390)" in said.why
    assert "390 viewers, recorded message by message." in said.sure
    assert "a sample: 50 %" in said.sure
    assert "4 % of what was tried is drawn" in said.sure


def test_limits_when_few_were_recorded_counts_them_and_says_so():
    few = [choice(1, viewers=7, disconnected=3), choice(7, viewers=7, disconnected=1)]
    said = answer_about("limits", found(whatif_choices=few))
    assert "disconnected 3 of 7 → 1 of 7" in said.why
    assert "So few viewers show what limits do" in said.sure


def test_limits_when_there_are_ranges_promise_no_more_than_these():
    ends = {"disconnected_low": 2.2, "disconnected_high": 19.0, "delay_p95_ms_low": 400.0, "delay_p95_ms_high": 900.0}
    jobs = notes(whatif={"state": "done", "summary": {"viewers_troubled": 40, "viewers_tried": 12}})
    said = answer_about("limits", found(jobs, whatif_choices=[choice(1), choice(7, **ends)]))
    assert "disconnected 9.5 % (37 of 390) → 2 to 19 of 390" in said.why
    assert "→ 400 ms to 900 ms" in said.why
    assert "Tried were 12 of 40 viewers in trouble" in said.sure


def test_limits_when_only_a_look_would_tell_say_what_to_widen_them_to():
    told = {"known": False, "widen": "--soft 4MiB,0,8s", "why": "not known: stalls that were cut"}
    jobs = notes(whatif={"state": "done", "summary": told})
    said = answer_about("limits", found(jobs, whatif_choices=[choice(1, recommended=True), choice(7)]))
    assert said.kind == "unknown"
    assert said.do == "Not known: widen the limits for an hour, to --soft 4MiB,0,8s, and look again."


def test_limits_when_too_few_were_in_trouble_are_not_known():
    told = {"known": False, "why": "not known whether other limits are better: 3 of 3 viewers; keep what is in force"}
    jobs = notes(whatif={"state": "done", "summary": told})
    present = choice(1, recommended=True) | {"in_force": True}
    said = answer_about("limits", found(jobs, whatif_choices=[present, choice(7)]))
    assert (said.kind, said.do) == ("unknown", f"N{told['why'][1:]}.")


def test_limits_when_few_were_refused_anything_or_the_present_ones_are_not_known_say_so():
    odd = {"viewers_troubled": 11, "in_force": "not in the records; the defaults are taken"}
    jobs = notes(whatif={"state": "done", "summary": odd})
    said = answer_about("limits", found(jobs, whatif_choices=[choice(1), choice(7)]))
    assert "Only 11 of those recorded were ever in trouble" in said.sure
    assert "the defaults are taken for them" in said.sure
    many = notes(whatif={"state": "done", "summary": {"viewers_troubled": 200, "in_force": "of the records"}})
    said = answer_about("limits", found(many, whatif_choices=[choice(1), choice(7)]))
    assert "refused" not in said.sure
    assert "defaults" not in said.sure


def test_limits_when_they_rest_on_one_viewer_say_so_in_the_order():
    jobs = notes(whatif={"state": "done", "summary": {"viewers_troubled": 1, "viewers_cut": 1}})
    said = answer_about("limits", found(jobs, whatif_choices=[choice(1), choice(7)]))
    assert said.do == "Set the limits of limits.toml, which lies beside this page: that rests on 1 viewer in trouble."
    assert "1 viewer of them had been cut: what would have followed nobody has seen." in said.sure


def test_limits_when_the_choice_in_force_is_best_are_left():
    said = answer_about("limits", found(whatif_choices=[choice(1, recommended=True), choice(2)]))
    assert (said.kind, said.do) == (
        "fine",
        "Keep the limits as they are: of 2 choices none brings more than its error.",
    )
    none = answer_about("limits", found(whatif_choices=[choice(1), choice(2)]))
    assert none.kind == "unknown"
    assert "none meets what was asked for" in none.do


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ({}, "the job whatif was not run"),
        (notes(whatif={"state": "failed", "message": "no flights"}), "the job whatif failed: no flights"),
        (notes(), "the job whatif found nothing to say"),
        (notes(whatif={"state": "done", "summary": {"viewers": 0, "why": "no viewer"}}), "Not known: no viewer."),
    ],
)
def test_limits_when_there_is_no_table_say_why(jobs, said):
    answer = answer_about("limits", found(jobs))
    assert answer.kind == "unknown"
    assert said in answer.do


def test_bans_when_there_are_some_names_them_with_their_evidence():
    scores = [{"cidr": "10.0.0.1/32", "banned": True, "connections": 12}]
    listed = [
        {"cidr": "10.0.0.1/32", "action": "ban", "evidence": {"flood": 30, "odd": 1}},
        {"cidr": "10.0.0.2/32", "action": "limit", "reason": "shared: x", "evidence": '{"reconnects": 8}'},
    ]
    said = answer_about("bans", found(abuse_scores=scores, bans=listed))
    assert said.do == (
        "Keep out 1 address or subnet and limit new connections of 1 address or subnet (others behave there: 1): "
        "see bans.jsonl."
    )
    assert said.why == "10.0.0.1/32: flood 30, odd 1; 10.0.0.2/32: reconnects 8."
    assert "Each of those whose connections are known made 12 connections or more. Little evidence: 1 of" in said.sure


def test_bans_when_all_are_limited_keep_nobody_out():
    scores = [{"cidr": "10.0.0.1/32", "connections": 30}, {"cidr": "10.0.0.9/32", "connections": 2, "banned": True}]
    listed = [{"cidr": "10.0.0.1/32", "action": "limit", "evidence": {}}]
    said = answer_about("bans", found(abuse_scores=scores, bans=listed))
    assert said.do.startswith("Limit new connections of 1 address")
    assert "Each of them made 30 connections or more. Who" in said.sure


@pytest.mark.parametrize("expires", [None, "2099-01-01T00:00:00Z"])
def test_bans_when_a_limit_was_set_by_hand_say_so(expires):
    listed = [{"cidr": "10.0.0.1/32", "action": "limit", "score": 0.0, "evidence": {}, "expires": expires}]
    assert "(set by hand: 1)" in answer_about("bans", found(bans=listed)).do


def test_bans_when_nobody_has_enough_against_it_say_keep_nobody_out():
    said = answer_about("bans", found(abuse_scores=[{"cidr": "10.0.0.1/32", "score": 0.1}], bans=[]))
    assert (said.kind, said.do[:17]) == ("fine", "Keep nobody out: ")
    assert "1 address or subnet with evidence" in said.do
    allowed = notes(abuse={"state": "done", "summary": {"verdicts": {"address_allowed": 2}}})
    said = answer_about("bans", found(allowed, abuse_scores=[{"cidr": "127.0.0.1/32", "score": 12.0}], bans=[]))
    assert (
        said.do
        == "Keep nobody out: 2 addresses with enough evidence are allowed, being private, loopback or named by --allow."
    )


def test_capacity_when_nodes_have_room_counts_it_with_headroom():
    nodes = [node(), node(node="edge-1", viewers_peak=190.0, load_peak=0.95, busy_peak=0.8)]
    assert answer_about("capacity", found(capacity_nodes=[node()])).do == (
        "No node is needed now: there is room for 60 more viewers on edge-0."
    )
    two = [node(), node(node="edge-1", viewers_peak=140.0, load_peak=0.7)]
    assert answer_about("capacity", found(capacity_nodes=two)).do == (
        "No node is needed now: there is room for 20 more viewers on edge-1 and 60 on edge-0."
    )
    full = answer_about("capacity", found(capacity_nodes=nodes))
    assert full.kind == "act"
    assert full.do == "Add a node, or move streams away from edge-1: there is room for 60 more viewers on edge-0."
    assert "edge-1, had 95 % of what it carries" in full.why
    jobs = notes(capacity={"state": "done", "summary": {"headroom_share": 0.4}})
    asked = answer_about("capacity", found(jobs, capacity_nodes=[node()]))
    assert "room for 20 more viewers" in asked.do
    assert "40 % of each node are kept free." in asked.why


def test_capacity_when_a_thread_had_no_room_counts_its_node_as_full():
    blamed = [{"node": "edge-1", "blame": "server_loop", "count": 16}, {"node": "edge-0", "blame": "none", "count": 9}]
    late = node(node="edge-1", busy_peak=0.9)
    said = answer_about("capacity", found(capacity_nodes=[node(), late], nodes=blamed))
    assert said.do == "Add a node, or move streams away from edge-1: there is room for 60 more viewers on edge-0."
    assert "A thread of edge-1 came late, and was busy" in said.why
    alone = answer_about("capacity", found(capacity_nodes=[late], nodes=blamed))
    assert alone.do == "Add a node, or move streams away from edge-1: no node has room."
    unknown = [node(node=name, carries_viewers=None, load_peak=None, busy_peak=0.9) for name in ("edge-0", "edge-1")]
    said = answer_about("capacity", found(capacity_nodes=unknown, nodes=blamed))
    assert said.do.startswith("Add a node, or move streams away from edge-1: what others carry is not known for your ")


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_capacity_when_a_node_is_late_or_seems_full_and_is_not_busy_advises_no_node(load):
    blamed = [{"node": "edge-1", "blame": "server_loop", "count": 16}] if load == 0.5 else []
    idle = node(node="edge-1", load_peak=load, busy_peak=0.2)
    said = answer_about("capacity", found(capacity_nodes=[node(), idle], nodes=blamed))
    assert said.kind == "unknown"
    assert said.do.startswith(
        "No node is known to be needed: edge-1 seemed full, but no thread there was busy for more"
    )
    assert ("Find what held up the threads there first" in said.why) == bool(blamed)
    said = answer_about("capacity", found(capacity_nodes=[idle | {"busy_peak": None}], nodes=blamed))
    assert said.do.startswith("Not known whether a node is needed: edge-1 seemed full, and how busy its threads were")
    memory = notes(capacity={"state": "done", "summary": {"ended_by": "memory"}})
    said = answer_about("capacity", found(memory, capacity_nodes=[idle], nodes=blamed))
    assert said.do.startswith("Add a node" if load == 0.95 else "No node is known to be needed")


def test_capacity_when_the_machine_was_not_measured_is_one_plain_line():
    jobs = notes(capacity={"state": "done", "summary": {"fitted_to": "", "answer": f"Not {MEASURE[4:]}."}})
    unknown = node(node="edge-1", carries_viewers=None, carries_from="", load_peak=None)
    said = answer_about("capacity", found(jobs, capacity_nodes=[unknown]))
    assert (said.kind, said.do, said.why) == ("unknown", f"Not {MEASURE[4:]}.", "")
    both = answer_about("capacity", found(capacity_nodes=[unknown, node(carries_at_least=True)]))
    assert both.do == "No node is needed now: there is room for at least 60 more viewers on edge-0."
    assert f"What 1 node can carry is {MEASURE}." in both.sure


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ({}, "takes the peaks of 3 whole days"),
        ({0: 100.0, 1: 110.0}, "takes the peaks of 3 whole days"),
        ({0: 100.0, 1: 110.0, 2: 120.0, 3: 130.0}, "grow by 10 viewers a day: the next one is needed in 6 days"),
        ({0: 100.0, 1: 140.0, 2: 90.0, 3: 130.0}, "no growth that is more than chance"),
        ({0: 100.0, 1: 100.0, 2: 100.0}, "no growth"),
        ({0: 130.0, 1: 120.0, 2: 110.0, 3: 100.0}, "no growth"),
    ],
)
def test_capacity_when_peaks_have_a_trend_tells_the_day(peaks, said):
    assert said in answer_about("capacity", found(peaks=peaks, capacity_nodes=[node()])).why


def test_calls_when_a_network_stands_out_name_it():
    (said,) = calls(found(network=[felt("network", "10.1.2.0/24", 50, 30)]))
    assert (said.about, said.do) == ("network", "Call the operator of the network 10.1.2.0/24.")
    assert said.why == "60 % (30 of 50) of its viewers had trouble by their own link; of all others 2.9 % (10 of 350)."
    few = calls(found(network=[felt("network", "10.1.2.0/24", 12, 9)]))[0]
    assert "9 of 12 of its viewers" in few.why
    assert "Only 12 viewers: the share may well be another one." in few.sure
    assert "one address" not in few.sure
    links = [{"key": "10.1.2.0/24", "viewers": 12, "troubled": 9, "addresses": 1}]
    (one,) = calls(found(network=[felt("network", "10.1.2.0/24", 12, 9)], links=links))
    assert "All of the trouble is at one address" in one.sure


@pytest.mark.parametrize(
    ("key", "viewers", "troubled"),
    [("10.1.2.0/24", 50, 6), ("10.1.2.0/24", 4, 4), ("", 50, 30), (None, 50, 30), ("10.1.2.0/24", 400, 40)],
)
def test_calls_when_a_network_is_as_others_name_nobody(key, viewers, troubled):
    (said,) = calls(found(network=[felt("network", key, viewers, troubled)]))
    assert (said.about, said.kind) == ("calls", "fine")
    assert said.why == "10 % (40 of 400) of plays had trouble."


def test_calls_when_a_network_stands_out_in_a_sample_alone_is_as_sure_as_the_sample():
    """Counts of a tenth that are multiplied by ten make no network surer."""
    shown = found(network=[felt("network", "10.1.2.0/24", 60, 20)])
    assert [item.about for item in calls(shown)] == ["network"]
    assert [item.about for item in calls(replace(shown, totals={**shown.totals, "drawn_share": 0.1}))] == ["calls"]


ALL = "68 % (272 of 400) of plays had trouble"
CAUSES = {
    "viewer_link": "Serve smaller renditions, or a lower bit rate: {all}, most by their "
    "own lines, and in no network more than elsewhere.",
    "publisher_burst": "Have encoders send evenly: {all}, most by bursts of publishers",
    "server_loop": "Look at the threads of all nodes: {all}, most because a thread",
    "policy": "Look at the limits: {all}, most by limits and policy",
}


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_calls_when_trouble_is_everywhere_say_what_to_do_about_its_cause(cause):
    rows = [{"blame": cause, "count": 200}, {"blame": "other", "count": 72}] if cause else []
    (said,) = calls(found(totals={"troubled": 272.0}, blames=rows))
    if cause is None:
        assert said.do == f"Not known whom to call: {ALL}, and its cause is not known."
        return
    assert (said.kind, said.do.startswith(CAUSES[cause].format(all=ALL))) == ("act", True)
    assert said.why.startswith(f"By cause: {answers.CAUSES[cause]} 73.5 %, ")


@pytest.mark.parametrize(
    ("viewers", "said"),
    [
        (1, "Not known whom to call: of 1 viewer no network or node can stand out."),
        (19, "Not known whom to call: of 19 viewers no network or node can stand out."),
        (20, "Call nobody: no network, publisher or node stands out."),
    ],
)
def test_calls_when_viewers_are_too_few_for_one_to_stand_out_say_so(viewers, said):
    few = {"people": viewers, "viewers": viewers, "plays": viewers, "troubled": 1.0}
    (item,) = calls(found(totals=few, ingest=[publication()]))
    assert item.do == said
    assert ("1 of 1 plays had trouble" in item.why) == (viewers == 1)
    assert ("No publisher stands out." in item.why) == (viewers < 20)


def test_calls_when_a_publisher_comes_in_badly_say_what_is_wrong():
    rows = [publication(), publication(stream="s1", gap_share=0.02, gap_ms=9000.0, gap_max_ms=6e3, jitter_ms=150.0)]
    (said,) = calls(found(ingest=rows))
    assert (said.about, said.do) == ("publisher", "Call the publisher of live/s1.")
    assert said.why == "No media for 9.0 s in all; no media for up to 6.0 s; jitter 150 ms."


def test_calls_when_a_publisher_was_there_for_a_moment_or_has_a_hash_for_a_name_help_the_caller():
    row = publication(stream="h:76c6", peer_ip="192.0.2.7", node="edge-3", jitter_ms=180.0)
    (moment,) = calls(found(ingest=[row | {"duration_s": 0.295}]))
    assert moment.kind == "fine"
    (said,) = calls(found(ingest=[row]))
    assert said.why == "Jitter 180 ms. Its name is known as a hash alone: it comes from 192.0.2.7 to the node edge-3."
    assert "hash" not in calls(found(ingest=[row | {"stream": "s1"}]))[0].why


@pytest.mark.parametrize(
    ("aways", "called"),
    [([4.0], False), ([4.0, 4.0], False), ([4.0] * 3, True), ([50.0] * 9, False), ([0.0] * 9, False)],
)
def test_calls_when_a_publisher_came_back_name_it_if_that_is_often_and_within_seconds(aways, called):
    rows = [publication(), *(publication(health="came back", away_s=away) for away in aways)]
    said = [item.do for item in calls(found(ingest=rows))]
    assert said == (
        ["Call the publisher of live/s0."] if called else ["Call nobody: no network, publisher or node stands out."]
    )


def test_calls_when_a_publisher_who_came_back_has_jitter_too_tell_the_jitter():
    (said,) = calls(found(ingest=[publication(health="came back", away_s=4.0, jitter_ms=180.0)]))
    assert said.why == "Jitter 180 ms."


def test_calls_when_publishers_are_many_name_the_first_and_count_the_others():
    rows = [publication(stream=f"s{number % 7}", jitter_ms=200.0) for number in range(21)]
    said = [item.do for item in calls(found(ingest=rows))]
    assert said == [
        *(f"Call the publisher of live/s{number}." for number in range(5)),
        "And 2 more publishers: see the tables.",
    ]


def test_calls_when_what_viewers_felt_is_not_known_say_so():
    (said,) = calls(replace(found(notes(experience={})), totals={"connections": 3}))
    assert (said.kind, said.do[:41]) == ("unknown", "Not known: the job experience was not run")


def test_calls_when_there_are_publishers_alone_judge_these():
    (said,) = calls(replace(found(ingest=[publication()] * 3), totals={"connections": 3}))
    assert (said.kind, said.do) == ("fine", "Call nobody: no publisher stands out.")
    assert said.sure == "Recorded: 3 publications, and no viewer."


def test_calls_when_a_thread_had_no_room_name_its_node():
    def blamed(server_loop, none=80, **more):
        counts = {"none": none, "viewer_link": 4, "server_loop": server_loop}
        rows = [{"node": "edge-1", "blame": name, "count": count} for name, count in counts.items()]
        return found(nodes=rows, capacity_nodes=[node(node="edge-1", **more)])

    said = calls(blamed(16, busy_peak=0.9))[0]
    late = "It came late for 80 % (16 of 20) of the viewers who were in trouble there."
    assert said.do == "Give the node edge-1 more processor, or fewer viewers."
    assert said.why == f"{late} No thread of it was busy for more than 90 % of the time."
    idle = calls(blamed(16, busy_peak=0.2))[0]
    assert idle.do == "Find what held up the threads of the node edge-1."
    assert "No thread of it was busy for more than 20 % of the time. Something else had its processor" in idle.why
    unknown = calls(blamed(16))[0]
    assert (unknown.do, unknown.why) == (idle.do, late)
    assert [item.kind for item in calls(blamed(4))] == ["fine"]
    assert [item.kind for item in calls(blamed(16, none=4000))] == ["fine"]


def test_answers_when_nothing_is_known_are_all_unknown():
    said = answers.answers(empty())
    assert [item.about for item in said] == ["limits", "bans", "capacity", "calls"]
    assert {item.kind for item in said} == {"unknown"}
    assert all("was not run" in item.do for item in said)


def test_recorded_when_viewers_are_few_says_so():
    assert answers.recorded(found()) == "Recorded: 400 viewers in 10 min 0 s."
    assert "That is few" in answers.recorded(found(totals={"viewers": 7.0}))
    assert answers.recorded(replace(found(), totals=None)) == ""


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (share(3, 7), "3 of 7"),
        (share(0, 0), "0 of 0"),
        (share(5, 20), "25 % (5 of 20)"),
        (share(5, 20, brief=True), "25 %"),
        (percent(0.0001), "< 0.1 %"),
        (percent(0.9999), "> 99.9 %"),
        (percent(1), "100 %"),
        (percent(float("nan")), "-"),
        (span(3 * 86400), "3.0 days"),
        (span(0.0042), "4.2 ms"),
    ],
)
def test_figures_when_written_are_honest(shown, said):
    assert shown == said


def test_sentences_when_a_fact_is_lacking_are_left_out_and_facts_are_not_filled_again():
    text = "{few?}Few.\nOf {all} it is {part}.\nNothing of {none}, {all}."
    assert sentences({"few": True, "all": "{part}", "part": "0", "none": ""}, text) == "Few. Of {part} it is 0."
    assert sentences({"all": 9, "part": "0", "none": 0}, text) == "Of 9 it is 0."
    assert (
        sentences({"late_share": 0.5, "delay_ms": 2.0}, "{late_share} are {delay_ms} late.") == "50 % are 2.0 ms late."
    )


def test_shares_when_of_few_viewers_are_never_surely_apart():
    assert abs(standard_errors_between(3, 3, 0, 3)) < answers.SURE_ENOUGH_TO_CALL
    assert standard_errors_between(30, 30, 0, 30) > answers.SURE_ENOUGH_TO_CALL
    assert standard_errors_between(5, 50, 5, 50) == 0
