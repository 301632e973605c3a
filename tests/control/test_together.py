"""Operations on several processes that are one server: what their answers come to."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowctl.control.operations import BY_NAME, error_dict, error_of, read_arguments
from flowctl.control.summary import shown
from flowctl.control.together import WorkerAnswer, combine, merge_figures, worst_first
from flowctl.errors import BusyError, ConfigError, FlowctlError, LocalProtocolError


def asked_of(name, **given):
    return read_arguments(name, BY_NAME[name].arguments, given)


def come_to(name, *answers, **given):
    return combine(BY_NAME[name].merge, asked_of(name, **given), list(answers))


def server(**figures):
    usual = {"connections": 1, "accepted": 2, "refused": {}, "closed": {}, "busy": 0.1, "bans": 0}
    return usual | {"limits": "soft", "pid": 1, "up_s": 1.0, "change": 0} | figures


def viewer(number, **figures):
    return {"connection": number, "state": "READY", "pictures": 1.0, "delay_ms": 0} | figures


def stream(name, viewers=0, publisher=None, media="", in_bytes=0):
    found = {
        "stream": name,
        "publisher": publisher,
        "media": media,
        "viewers": viewers,
        "standby": 0,
        "slow": 0,
        "unwritten": {},
    }
    found |= {"connection": None, "codecs": {}, "in_messages": 0, "in_frames": 0, "sent_bytes": 0}
    return found | {"in_bytes": in_bytes, "states": {"READY": viewers}, "renditions": []}


def stats(number, viewers=(), streams=(), **figures):
    found = {"viewers": len(viewers), "streams": len(streams)}
    lists = {"viewers": list(viewers), "streams": list(streams)}
    return WorkerAnswer(number, result={"server": server(**figures), "found": found, **lists})


def test_stats_when_of_two_workers_are_added():
    closed = ({"kicked": 1}, {"kicked": 2, "shutdown": 1})
    found = come_to("stats", *(stats(n + 1, closed=closed[n], busy=n / 2, pid=n) for n in range(2)))["server"]
    assert (found["connections"], found["accepted"], found["busy"]) == (2, 4, 0.5)
    assert found["closed"] == {"kicked": 3, "shutdown": 1}
    assert [(row["worker"], row["pid"]) for row in found["workers"]] == [(1, 0), (2, 1)]


def test_stats_when_limits_of_workers_differ_say_so():
    found = come_to("stats", stats(1, limits="a"), stats(2, limits="b"))
    assert found["server"]["limits_of_workers"] == ["a", "b"]


def test_stats_when_a_stream_is_followed_is_one_stream_of_its_publisher():
    here = stream("live/a", viewers=2, publisher="192.0.2.1:5", media="h264", in_bytes=100)
    there = stream("live/a", viewers=3, publisher="follows worker 2", media="h264", in_bytes=90)
    found = come_to("stats", stats(1, streams=[there]), stats(2, streams=[here]))
    assert found["streams"] == [here | {"viewers": 5, "states": {"READY": 5}, "worker": 2}]
    assert found["found"]["streams"] == 1


RANKED = st.lists(
    st.tuples(st.sampled_from(["READY", "SOFT_LIMIT", "HARD_LIMIT"]), st.floats(0, 1), st.integers(0, 5000)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RANKED, min_size=1, max_size=4), st.integers(1, 7))
def test_stats_when_paged_show_each_viewer_once_the_worst_first(workers, page):
    answers, everybody = [], []
    for number, items in enumerate(workers, 1):
        rows = [viewer(number * 1000 + at, state=s, pictures=p, delay_ms=d) for at, (s, p, d) in enumerate(items)]
        rows.sort(key=worst_first)
        answers.append(stats(number, viewers=rows))
        everybody += rows
    seen = []
    for offset in range(0, len(everybody) + page, page):
        found = come_to("stats", *answers, offset=offset, limit=page)
        assert found["found"]["viewers"] == len(everybody)
        seen += [row["connection"] for row in found["viewers"]]
    assert seen == [row["connection"] for row in sorted(everybody, key=worst_first)]


def test_answers_when_one_is_missing_name_it():
    found = come_to("stats", stats(1), WorkerAnswer(2, missing="has not answered within 10 s"))
    assert found["server"]["connections"] == 1
    assert found["warning"] == "worker 2 has not answered within 10 s"
    with pytest.raises(BusyError, match="worker 2 has not answered"):
        come_to("stats", WorkerAnswer(2, missing="has not answered"))


def test_kick_when_one_worker_has_the_connection_is_its_answer():
    """That the others have no such connection is no fault; if none has it, that is the answer."""
    none = WorkerAnswer(1, error=LocalProtocolError("there is no such connection 7"))
    kicked = {"kicked": 1, "connections": [7]}
    assert come_to("kick", none, WorkerAnswer(2, result=kicked), connection=7) == kicked
    with pytest.raises(LocalProtocolError, match="no such connection"):
        come_to("kick", none, none, connection=7)


def test_kick_when_many_are_kicked_is_their_sum():
    answers = [WorkerAnswer(n, result={"kicked": 80, "connections": list(range(80))}) for n in (1, 2)]
    found = come_to("kick", *answers, peer="192.0.2.1")
    assert (found["kicked"], len(found["connections"])) == (160, 100)


def test_reload_when_one_worker_finds_a_fault_tells_it_once():
    fault = {"file": "x", "state": "invalid", "changed": False, "fault": "line 1"}
    well = {"file": "x", "state": "valid", "changed": True}
    found = come_to(
        "reload",
        *(
            WorkerAnswer(n, result={"bans": item} | ({"faults": ["line 1"]} if n else {}))
            for n, item in enumerate((well, fault, fault))
        ),
    )
    assert found == {"bans": well | {"state": "invalid", "fault": "line 1"}, "faults": ["line 1"]}


def test_drain_when_of_all_is_that_of_the_slowest():
    one = {"draining": True, "again": False, "ends_within_s": 3.0, "connections": 2}
    found = come_to(
        "drain", WorkerAnswer(1, result=one), WorkerAnswer(2, result=one | {"ends_within_s": 5.0, "again": True})
    )
    assert found == {"draining": True, "again": False, "ends_within_s": 5.0, "connections": 4}


@pytest.mark.parametrize("kind", [ConfigError, LocalProtocolError, BusyError, FlowctlError])
def test_error_when_it_has_been_json_is_the_same(kind):
    found = error_of(error_dict(kind("it is so", hint="do that")))
    assert (type(found), str(found), found.hint) == (kind, "it is so", "do that")


def test_figures_when_of_several_processes_are_sums_and_the_worst():
    one = {"connections": 1, "busy": 0.25, "closed": {"kicked": 1}, "bans_file": "valid", "held": 1024}
    one |= {"least_pictures": 0.5, "worst_delay_s": 1.0}
    other = one | {"busy": 0.5, "bans_file": "bad line", "least_pictures": 0.25, "worst_delay_s": 3.0}
    found = shown(merge_figures([one, other]))
    assert (found["connections"], found["busy"], found["closed"]) == (2, "50%", {"kicked": 2})
    assert (found["bans_file"], found["held"]) == ("bad line", "2.0 KiB")
    assert (found["least_pictures"], found["worst_delay_s"]) == ("25%", 3.0)


def stream_row(name, publisher=None, **figures):
    usual = {"stream": name, "publisher": publisher, "connection": None, "media": "", "codecs": {}, "viewers": 0}
    usual |= {"states": {"READY": 0, "SOFT_LIMIT": 0}, "slow": 0, "standby": 0, "unwritten": {}, "renditions": []}
    return usual | {"in_bytes": 0, "in_messages": 0, "in_frames": 0, "sent_bytes": 0} | figures


def test_streams_when_of_several_workers_are_one_each():
    here = stream_row("live/a", "198.51.100.1:5", viewers=2, states={"READY": 1, "SOFT_LIMIT": 1}, slow=1, in_bytes=90)
    there = stream_row("live/a", "follows worker 2", viewers=3, states={"READY": 3, "SOFT_LIMIT": 0}, in_bytes=80)
    found = come_to(
        "streams",
        WorkerAnswer(1, result={"streams": [there, stream_row("live/b")], "found": {"streams": 2}}),
        WorkerAnswer(2, result={"streams": [here], "found": {"streams": 1}}),
    )
    assert [row["stream"] for row in found["streams"]] == ["live/a", "live/b"]
    first = found["streams"][0]
    assert (first["viewers"], first["slow"], first["in_bytes"], first["worker"]) == (5, 1, 90, 2)
    assert (first["publisher"], first["states"]) == ("198.51.100.1:5", {"READY": 4, "SOFT_LIMIT": 1})
    assert found["found"] == {"streams": 2, "offset": 0, "limit": 50}


def test_renditions_when_of_several_workers_have_the_viewers_of_all():
    def row(**viewers):
        return stream_row(
            "live/a", renditions=[{"rendition": name, "viewers": count} for name, count in viewers.items()]
        )

    workers = [{"large": 2, "small": 1}, {}, {"small": 5, "tiny": 1}]
    answers = (WorkerAnswer(n, result={"streams": [row(**there)], "found": {}}) for n, there in enumerate(workers, 1))
    (found,) = come_to("streams", *answers)["streams"]
    assert {item["rendition"]: item["viewers"] for item in found["renditions"]} == {"large": 2, "small": 6, "tiny": 1}


@pytest.mark.parametrize("reverse", [False, True])
def test_connections_when_of_several_workers_are_sorted_as_one_list(reverse):
    def rows(*numbers):
        found = [viewer(number, dropped=number % 7) for number in numbers]
        return {"connections": found, "found": {"connections": len(found)}}

    answers = WorkerAnswer(1, result=rows(1, 8, 15)), WorkerAnswer(2, result=rows(2, 9, 20))
    whole = come_to("connections", *answers, sort="number", reverse=reverse)["connections"]
    assert [row["connection"] for row in whole] == sorted((1, 2, 8, 9, 15, 20), reverse=reverse)
    page = come_to("connections", *answers, sort="number", reverse=reverse, limit=2, offset=3)
    assert page["connections"] == whole[3:5]
    assert page["found"]["connections"] == 6
    assert {row["worker"] for row in whole} == {1, 2}


def test_events_when_a_worker_does_not_answer_keep_its_place():
    def told(run, number, *times):
        return {"events": [{"at": at} for at in times], "cursor": f"{run}:{number}", "lost": 1}

    found = come_to("events", WorkerAnswer(1, result=told("a", 3, 1.0, 3.0)), WorkerAnswer(2, result=told("b", 9, 2.0)))
    assert [event["at"] for event in found["events"]] == [1.0, 2.0, 3.0]
    assert (found["cursor"], found["lost"]) == ("a:3,b:9", 2)
    silent = come_to(
        "events", WorkerAnswer(1, result=told("a", 4)), WorkerAnswer(2, missing="is silent"), since=found["cursor"]
    )
    assert silent["cursor"] == "a:4,b:9"
    assert "worker 2 is silent" in silent["warning"]
