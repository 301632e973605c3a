"""The demonstration: a shortened one passes, a broken expectation fails it, and its verdicts are judged one by one."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest

from flowctl.cli import main
from flowctl.core.flow.state import Load, SendState
from flowctl.demo import DemoPlan, run, run_demo
from flowctl.demo.plan import RENDITIONS, ViewerKind, ViewerPlan
from flowctl.demo.report import SeenPictures, ShowReport, check_set, judge, make_report
from flowctl.demo.runner import cache_directory
from flowctl.demo.watch import ViewerDisplay, ViewerWatch, WatchedViewer
from flowctl.errors import ConfigError
from flowctl.load.results.result import PeerKind, PeerResult, RunResult, RunSample
from flowctl.log import configure
from flowctl.reasons import CloseReason
from flowctl.sender import Sender
from flowctl.testing import ManualHost, ScriptedTransport

QUICK = DemoPlan(
    duration_s=6.0,
    healthy=6,
    slow_shares=(0.4,),
    stall_after_s=0.5,
    soft="96KiB,1024,1s",
    hard="2MiB,4096,4s",
    stuck_s=1.5,
)
LOAD = QUICK.load_plan("rtmp://127.0.0.1/demo/sample")


class Looked(threading.Event):
    """What a demonstration that stays waits for: its dashboard has shown the set, and all viewers of the stream."""

    def __init__(self, capsys):
        super().__init__()
        self.capsys, self.shown, self.page = capsys, None, b""

    def wait(self, timeout=None):
        self.shown = self.shown or self.capsys.readouterr()
        address = json.loads(self.shown.out)["dashboard"]
        self.page = httpx.get(address).content
        streams = httpx.get(f"{address}api/v1/streams").json()["streams"]
        viewers = {item["stream"]: item["viewers"] for item in streams if item["publisher"]}
        return viewers.get("demo/sample") == 8 and viewers.keys() >= {f"demo/show{suffix}" for suffix in RENDITIONS}


IDLE = Sender(ManualHost(), ScriptedTransport([])).statistics()


def test_dashboard_when_its_packages_are_missing_is_done_without(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("flowctl.live.admin.", "starlette"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    server = run._build_server(QUICK)
    assert run._add_dashboard(server) is None
    server.close_listeners()
    said = capsys.readouterr().err
    assert "no dashboard: admin needs the extra 'admin'" in said
    assert "pip install '.[admin]'" in said


def test_last_line_when_over_names_the_dashboard():
    assert "--stay" in run._of_dashboard("http://127.0.0.1:1/", stays=False)
    assert "until Ctrl-C" in run._of_dashboard("http://127.0.0.1:1/", stays=True)


# ------------------------------------------------------------------------------------------------ the whole of it


def test_demo_when_everything_acts(capsys, tmp_path, monkeypatch):
    configure("error")
    monkeypatch.setenv("FLOWCTL_CACHE", str(tmp_path / "made"))
    stays = Looked(capsys)
    assert run_demo(QUICK, as_json=True, stays=True, until=stays) is True
    shown, report = stays.shown, json.loads(stays.shown.out)
    assert f"dashboard: {report['dashboard']}" in shown.err
    assert b"<title>flowctl</title>" in stays.page
    assert (report["passed"], report["faults"]) == (True, [])
    healthy = [viewer for viewer in report["viewers"].values() if viewer["kind"] == "healthy"]
    assert [viewer["client"]["missing"] for viewer in healthy] == [{}] * 6
    assert all(viewer["client"]["received"] > 300 for viewer in healthy)
    slow = report["viewers"]["slow 40%"]
    assert sum(slow["client"]["missing"].values()) > 0
    assert (sum(slow["server"]["dropped"].values()) > 0, slow["client"]["broken_restarts"]) == (True, 0)
    assert report["viewers"]["stalled"]["server"]["cut"] in {"hard limit", "stuck"}
    assert report["viewers"]["hostile"]["server"]["cut"] in {"hard limit", "stuck"}
    assert report["floods_cut"] >= 1
    seen = report["seen"]
    assert list(seen) == ["healthy", "slow 40%", "set 50%"]
    assert seen["set 50%"]["picture_share"] > seen["slow 40%"]["picture_share"]
    assert set(seen["set 50%"]["renditions"]) <= {"640x360", "854x480", "1280x720"}
    assert "slow@800k of the set" in (tmp_path / "made" / "demo-report.html").read_text()
    assert (seen["healthy"]["picture_share"], seen["healthy"]["line_share"]) == (1.0, None)
    assert seen["slow 40%"]["picture_share"] < 1
    assert seen["slow 40%"]["line_share"] > 0
    assert all(0 <= count <= 30 for item in seen.values() for count in item["pictures_per_s"])
    assert "slow 40%" in shown.err
    page = tmp_path / "made" / "demo-report.html"
    assert report["page"] == str(page)
    assert "How much memory did the server take?" in page.read_text()


def test_demo_when_a_limit_is_off(capsys, tmp_path):
    page = tmp_path / "page.html"
    arguments = ["demo", "--duration", "4s", "--healthy", "2", "--soft", "96KiB,0", "--hard", "0,0"]
    assert main([*arguments, "--report", str(page)]) == 1
    shown = capsys.readouterr()
    assert "FAILED" in shown.out
    assert "stalled: does not read and was not cut" in shown.out
    assert f"with plots: {page}" in shown.out
    assert shown.err.splitlines()[-1].startswith("error: the demo did not go as it should")


def test_cache_when_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWCTL_CACHE", str(tmp_path / "a"))
    assert cache_directory() == tmp_path / "a"
    monkeypatch.delenv("FLOWCTL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_directory() == tmp_path / "b" / "flowctl"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_directory().name == ".demo"


# ------------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize(
    "values", [{"duration_s": 1}, {"healthy": 0}, {"slow_shares": (1.5,)}, {"soft": "1"}, {"stall_after_s": -1}]
)
def test_plan_when_a_value_is_out_of_range(values):
    with pytest.raises(ConfigError):
        DemoPlan(**values)


def test_plan_when_asked_for_viewers():
    plan = DemoPlan()
    viewers = plan.viewers(plan.load_plan("rtmp://127.0.0.1/demo/sample"))
    counts = {kind: sum(viewer.kind is kind for viewer in viewers) for kind in ViewerKind}
    assert counts == {ViewerKind.HEALTHY: 20, ViewerKind.SLOW: 3, ViewerKind.STALLED: 1, ViewerKind.HOSTILE: 1}
    assert [viewer.profile for viewer in viewers if viewer.kind is ViewerKind.SLOW] == [
        "slow@1360k",
        "slow@800k",
        "slow@320k",
    ]
    assert [viewer.label for viewer in viewers][20:] == ["slow 85%", "slow 50%", "slow 20%", "stalled", "hostile"]
    assert len({viewer.label for viewer in viewers}) == len({viewer.host for viewer in viewers}) == 25


# ------------------------------------------------------------------------------------------------ watch


def end(watch, number, host, reason, details=""):
    sender = SimpleNamespace(statistics=lambda: dataclasses.replace(IDLE, state=SendState.HARD_LIMIT))
    made = SimpleNamespace(number=number, peer=(host, 5000 + number), sender=sender, now=lambda: 2.5, opened_at=1.0)
    watch.asked(made, "play", "demo/sample", 1.0)
    watch.closed(made, reason, details, None)


def test_watch_when_an_attacker_has_several_connections():
    viewers = QUICK.viewers(LOAD)
    hostile = viewers[-1]
    watch = ViewerWatch(viewers)
    end(watch, 7, hostile.host, CloseReason.HARD_LIMIT, "age_ms 5001, limit 5000")
    end(watch, 8, hostile.host, CloseReason.STUCK)
    end(watch, 9, "127.99.9.9", CloseReason.STUCK)
    changed = watch.update_viewers([])
    assert [(item.plan.label, item.cut) for item in changed] == [("hostile", "hard limit"), ("hostile 2", "stuck")]
    assert watch.update_viewers([]) == []
    assert len(watch.viewers) == len(viewers) + 1


# ------------------------------------------------------------------------------------------------ verdict

VIEWERS = {viewer.kind: viewer for viewer in reversed(QUICK.viewers(LOAD))}
PUBLISHED = {"frames": 1, "bytes": 1}


def watched(kind, **values):
    return dataclasses.replace(WatchedViewer(VIEWERS[kind]), **values)


def peer(kind, **values):
    fields = {"video": 90, "audio": 100, "started_on_key": True, "first_frame_s": 0.5}
    plan = VIEWERS[kind]
    return PeerResult(
        number=plan.number, profile=plan.profile, kind=PeerKind.SLOW, url="rtmp://h/a/s", **(fields | values)
    )


FINE = {
    ViewerKind.HEALTHY: {"time_in_states_s": (9.0, 0.1, 0.0, 0.0), "cut": "peer closed"},
    ViewerKind.SLOW: {"time_in_states_s": (1.0, 4.0, 4.0, 0.0), "dropped": {"inter": 9}},
    ViewerKind.STALLED: {"time_in_states_s": (1.0, 1.0, 1.0, 0.1), "cut": "hard limit"},
    ViewerKind.HOSTILE: {"cut": "limit hit", "cut_details": "control_messages_per_second is 201, the limit is 200"},
}


@pytest.mark.parametrize("kind", ViewerKind)
def test_verdict_when_all_is_well(kind):
    assert judge(watched(kind, **FINE[kind]), peer(kind), 1.0).faults == ()


@pytest.mark.parametrize(
    ("kind", "changes", "values", "said"),
    [
        (ViewerKind.HEALTHY, {}, {"missing_video": 1}, "lost 1 video"),
        (ViewerKind.HEALTHY, {"dropped": {"audio": 2}}, {}, "the server dropped 2 audio"),
        (ViewerKind.HEALTHY, {"cut": "stuck"}, {}, "was cut"),
        (ViewerKind.HEALTHY, {}, {"video": 0, "audio": 0}, "received nothing"),
        (ViewerKind.HEALTHY, {}, {"started_on_key": False}, "did not begin with a key frame"),
        (ViewerKind.SLOW, {"dropped": {}}, {}, "was not thinned"),
        (ViewerKind.SLOW, {"cut": "hard limit"}, {}, "was cut instead of being thinned"),
        (ViewerKind.SLOW, {}, {"broken_restarts": 3}, "3 times got pictures that build on missing ones"),
        (ViewerKind.STALLED, {"cut": None}, {}, "still there"),
        (ViewerKind.STALLED, {"cut": "peer closed"}, {}, "was not cut by a hard limit"),
        (ViewerKind.HOSTILE, {"cut": None}, {}, "still there"),
        (ViewerKind.HOSTILE, {"cut": "peer closed"}, {}, "was not cut by a limit"),
        (
            ViewerKind.HOSTILE,
            {},
            {"expectation_met": False, "notes": "no newcomer"},
            "what no sound one does: no newcomer",
        ),
    ],
)
def test_verdict_when_something_is_wrong(kind, changes, values, said):
    outcome = judge(watched(kind, **(FINE[kind] | changes)), peer(kind, **values), 1.0)
    report = ShowReport((outcome,), PUBLISHED, "limits")
    assert said in " ".join(outcome.faults)
    assert not report.passed
    assert "FAILED:" in report.lines()


def test_report_when_a_stalled_viewer_was_cut():
    stalled = watched(
        ViewerKind.STALLED, **FINE[ViewerKind.STALLED], connected_s=8.5, cut_details="tick: age_ms 3001, limit 3000"
    )
    outcome = judge(stalled, peer(ViewerKind.STALLED), 1.5)
    text = " ".join(" ".join(ShowReport((outcome,), PUBLISHED, "l").lines()).split())
    assert "cut 6.5 s after it stopped reading by hard limit (tick: age_ms 3001, limit 3000)" in text


@pytest.mark.parametrize(("floods", "passed"), [(0, False), (1, True)])
def test_report_when_made_of_both_accounts(floods, passed):
    viewers = [watched(kind, **FINE[kind]) for kind in ViewerKind]
    of_set = dataclasses.replace(peer(ViewerKind.HEALTHY), number=9, profile=QUICK.set_profile, kind=PeerKind.SLOW)
    result = RunResult(url="rtmp://h/a/s", peers=[*(peer(kind) for kind in ViewerKind), of_set])
    assert make_report(QUICK, viewers, floods, result).passed is passed
    result.peers.pop(0)
    assert "healthy 1: received nothing" in make_report(QUICK, viewers, floods, result).faults


def test_report_when_the_viewer_of_the_set_sees_no_more_than_the_other_fails():
    seen = [SeenPictures("slow 50%", (), 0.4), SeenPictures("set 50%", (), 0.97, renditions={"640x360": 1.0})]
    assert check_set(seen) == ()
    assert "640x360 for 100% of the time" in " ".join(ShowReport((), PUBLISHED, "l", seen=tuple(seen)).lines())
    assert (
        "set 50%: saw 40% of the pictures" in check_set([seen[0], dataclasses.replace(seen[1], picture_share=0.4)])[0]
    )
    assert check_set([dataclasses.replace(seen[1], picture_share=None)]) == ("set 50%: received nothing",)


# ------------------------------------------------------------------------------------------------ display


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_display_when_viewers_have_changed(stream, monkeypatch):
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    slow = watched(
        ViewerKind.SLOW,
        state=SendState.SOFT_LIMIT,
        load=Load(2048, 7, 900.0),
        dropped={"inter": 9},
        why="SOFT_LIMIT for 1 ms; queued [bold]x",
    )
    gone = watched(ViewerKind.HOSTILE, **FINE[ViewerKind.HOSTILE], connected_s=0.5)
    healthy = WatchedViewer(ViewerPlan("healthy 1", ViewerKind.HEALTHY, "healthy", 0))
    healthy.state = SendState.READY
    with ViewerDisplay(table=True) as shown:
        shown.say("hello [red]")
        shown.show_viewers(1.0, [healthy, slow, gone], [slow, gone])
    text = errors.getvalue()
    dropped = "9 inter" if stream is io.StringIO else " 9 "  # the table has no room for classes
    for part in ("hello [red]", "1 READY", "SOFT_LIMIT", "2.0 KiB", dropped, "[bold]x", "cut after 500 ms"):
        assert part in text


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_display_when_a_viewer_is_served_77_percent_says_so_although_nothing_changes(stream, monkeypatch):
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    slow = watched(ViewerKind.SLOW, state=SendState.OVERLOADED, picture_share=0.77)
    healthy = watched(ViewerKind.HEALTHY, state=SendState.READY, picture_share=0.99)
    with ViewerDisplay(table=True) as shown:
        shown.show_viewers(6.0, [healthy, slow], [])
    text = errors.getvalue()
    assert "OVERLOADED, 77%" in text
    assert "1 miss pictures" in text
    assert "keeping up" not in text


def test_table_when_the_terminal_is_80x24_shows_every_kind_of_viewer():
    from rich.console import Console

    plan = DemoPlan()
    watch = ViewerWatch(plan.viewers(plan.load_plan("rtmp://127.0.0.1/demo/sample")))
    for watched in watch.viewers:
        watched.state = SendState.READY
        watched.why = "READY; " + "a long reason that does not fit into any terminal of this world " * 3
        watched.load = Load(size_bytes=900_000, messages=1000, age_ms=12_345.0)
        if watched.plan.kind is ViewerKind.SLOW:
            watched.dropped, watched.picture_share = {"disposable": 123, "inter": 45_678}, 0.77
    stream = io.StringIO()
    display = ViewerDisplay(table=False)
    display.console = Console(file=stream, width=80, height=24, force_terminal=False)
    display.console.print(display._table(12.0, watch.viewers))
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    text = stream.getvalue()
    assert all(word in text for word in ("20 healthy", "slow 85%", "slow 50%", "slow 20%", "stalled", "hostile"))
    assert text.count("READY, 77%") == 3


@pytest.mark.parametrize("seconds", [1, 6, 26, 600])
def test_report_when_viewers_were_measured_draws_them_side_by_side(seconds):
    plan, peers = DemoPlan(), []
    fields = {"kind": PeerKind.SLOW, "url": "rtmp://h/a/s", "audio": 1, "first_frame_s": 0.1, "delays": 9}
    peers.append(PeerResult(number=0, profile="healthy", video=900, longest_freeze_s=0.05, **fields))
    slow = {"video": 770, "missing_video": 230, "longest_freeze_s": 1.04, "line_bytes": 1000, "line_used_bytes": 980}
    peers.append(PeerResult(number=1, profile="slow@1360k", **slow, **fields))
    samples = [
        RunSample(
            at_s=float(second),
            playing={"healthy": 20, "slow@1360k": 1},
            pictures={"healthy": 20 * 30 * second, "slow@1360k": 15 * second},
        )
        for second in range(1, seconds + 1)
    ]
    delays = {"healthy": [10.0], "slow@1360k": [800.0, 1300.0]}
    result = RunResult(url="rtmp://h/a/s", peers=peers, samples=samples, delays_ms=delays)
    report = make_report(plan, [], 1, result)
    lines = report.lines()
    assert max(map(len, lines)) <= 80
    healthy, slow_line = (
        next(line for line in lines if line.startswith(f"  {name} ")) for name in ("healthy", "slow 85%")
    )
    bars = min(seconds, 26) if seconds < 600 else 25
    assert healthy.split() == ["healthy", "█" * bars, "100%", "-", "0.0", "/", "0.0", "s", "0.1", "s"]
    assert slow_line.split() == ["slow", "85%", "▄" * bars, "77%", "98%", "0.8", "/", "1.3", "s", "1.0", "s"]
    seen = json.loads(json.dumps(report.as_dict()))["seen"]
    assert seen["slow 85%"]["pictures_per_s"] == [15.0] * seconds
    assert seen["slow 50%"]["picture_share"] is None  # nobody measured it


def test_bars_when_hardly_a_picture_was_seen_are_not_empty():
    assert SeenPictures("slow 20%", (30.0, 0.5, 0.0)).bars == "█▁ "


def test_report_when_shown_fits_80_columns():
    plan = DemoPlan()
    result = RunResult(url="rtmp://127.0.0.1/demo/sample")
    watch = ViewerWatch(plan.viewers(plan.load_plan(result.url)))
    for watched in watch.viewers:
        watched.cut_details = "a value that is large and a limit that was lower than that, in words"
        watched.cut, watched.reasons = "hard limit", {"thinned from the queue": 12_345, "refused by policy": 1}
    lines = make_report(plan, watch.viewers, 1, result).lines()
    assert max(map(len, lines)) <= 80
    assert "slow@1360k" in "\n".join(lines)
