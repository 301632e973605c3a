"""The demonstration: a shortened one passes, a broken expectation fails it, and its verdicts are judged one by one."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.cli import main
from flowctl.demo import DemoPlan, run_demo
from flowctl.demo.audit import Audit, Published, frame_key
from flowctl.demo.plan import Kind, ViewerPlan, cache_directory
from flowctl.demo.report import Report, judge
from flowctl.demo.run import make_recording
from flowctl.demo.show import LineDisplay, TableDisplay
from flowctl.demo.watch import Watched
from flowctl.errors import ConfigError, FlowctlError
from flowctl.flow import Load, MessageClass, SendState
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.log import configure

QUICK = DemoPlan(
    duration_s=6.0,
    healthy=6,
    slow_shares=(0.4,),
    stall_after_s=0.5,
    soft="96KiB,1024,1s",
    hard="2MiB,4096,3s",
    synthetic=True,
)


# ------------------------------------------------------------------------------------------------ the whole of it


def test_demo_when_everything_acts(capsys):
    """A short demonstration passes: nobody healthy loses a frame, and each of the others meets its fate."""
    configure("error")
    assert run_demo(QUICK, as_json=True) is True
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["passed"], report["faults"]) == (True, [])
    healthy = [viewer for viewer in report["viewers"].values() if viewer["kind"] == "healthy"]
    assert [viewer["client"]["missing"] for viewer in healthy] == [{}] * 6
    assert all(viewer["client"]["received"] > 300 for viewer in healthy)
    assert sum(report["viewers"]["slow 40%"]["client"]["missing"].values()) > 0
    assert report["viewers"]["stalled"]["server"]["cut"] == "hard limit"
    assert report["viewers"]["flooding"]["server"]["cut"] == "limit hit"
    assert "flooding" in shown.err


def test_demo_when_a_limit_is_off(capsys):
    """Without a limit that could cut the stalled viewer the demonstration fails, with status 1, and says so."""
    arguments = ["demo", "--synthetic", "--duration", "4s", "--healthy", "2", "--soft", "96KiB,0", "--hard", "0,0"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "FAILED" in shown.out
    assert "stalled: does not read and was not cut" in shown.out
    assert shown.err.splitlines()[-1].startswith("error: the demo did not go as it should")


def test_demo_when_there_is_no_ffmpeg(monkeypatch, tmp_path):
    """Without FFmpeg the error says how to get it, or to do without."""
    monkeypatch.setenv("FLOWCTL_CACHE", str(tmp_path))
    monkeypatch.setattr("flowctl.media.sample.find_ffmpeg", _no_ffmpeg)
    with pytest.raises(FlowctlError) as caught:
        make_recording(DemoPlan(), LineDisplay())
    assert caught.value.hint.startswith("give --synthetic")
    assert "install FFmpeg" in caught.value.hint


def _no_ffmpeg(*_):
    raise FlowctlError("FFmpeg was not found", hint="install FFmpeg")


def test_cache_when_it_is_named(monkeypatch, tmp_path):
    """Recordings go where FLOWCTL_CACHE says, else to the user's cache, else beside us."""
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
    """A plan refuses what it cannot carry out."""
    with pytest.raises(ConfigError):
        DemoPlan(**values)


def test_plan_when_it_goes_to_another_process():
    """A plan survives the way through JSON."""
    assert DemoPlan.from_dict(json.loads(json.dumps(QUICK.as_dict()))) == QUICK


def test_plan_when_asked_for_viewers():
    """By default there are twenty healthy viewers, three slow ones, one that stalls and one that floods."""
    viewers = DemoPlan().viewers(1_000_000)
    counts = {kind: sum(viewer.kind is kind for viewer in viewers) for kind in Kind}
    assert counts == {Kind.HEALTHY: 20, Kind.SLOW: 3, Kind.STALLED: 1, Kind.FLOODING: 1}
    assert [viewer.profile.rate for viewer in viewers if viewer.kind is Kind.SLOW] == [800_000, 500_000, 200_000]
    assert len({viewer.label for viewer in viewers}) == 25


# ------------------------------------------------------------------------------------------------ audit

GOP = (MessageClass.KEY, MessageClass.DISPOSABLE, MessageClass.INTER, MessageClass.INTER)


def published(classes=GOP * 3):
    """Return what was published, and the key of each frame: pictures of `classes`, each followed by audio."""
    record, keys = Published(), []
    for index, message_class in enumerate(classes):
        for type_id, item in ((TAG_VIDEO, message_class), (TAG_AUDIO, MessageClass.AUDIO)):
            record.add(type_id, index * 40, item)
            keys.append(frame_key(type_id, index * 40))
    return record, keys


def test_audit_when_everything_came():
    """Nothing is missing from the first frame on, and all can be decoded."""
    record, keys = published()
    audit = record.audit(keys[8:], to_end=True)
    assert (audit.received, audit.missing, audit.faults) == (16, {}, {})


def test_audit_when_a_disposable_frame_is_missing():
    """A lost disposable frame costs itself only."""
    record, keys = published()
    audit = record.audit([key for key in keys if key != frame_key(TAG_VIDEO, 40)], to_end=True)
    assert (audit.missing, audit.faults) == ({"disposable": 1}, {})


def test_audit_when_pictures_follow_a_lost_one():
    """What comes between a lost inter frame and the next key frame cannot be decoded."""
    record, keys = published()
    audit = record.audit([key for key in keys if key != frame_key(TAG_VIDEO, 80)], to_end=True)
    assert (audit.missing, audit.faults) == ({"inter": 1}, {"undecodable": 1})


def test_audit_when_it_begins_without_a_key_frame():
    """Pictures before the first key frame cannot be decoded."""
    record, keys = published()
    assert record.audit(keys[4:], to_end=True).faults == {"undecodable": 2}


def test_audit_when_the_end_did_not_come():
    """What comes after the last frame is missing only for who was there to the end."""
    record, keys = published()
    assert record.audit(keys[:16], to_end=True).missing_total == 8
    assert record.audit(keys[:16], to_end=False).missing_total == 0


def test_audit_when_frames_are_repeated_disordered_or_unknown():
    """What nobody may ever get is named."""
    record, keys = published()
    audit = record.audit([*keys, keys[3], frame_key(TAG_VIDEO, 77)], to_end=True)
    assert audit.faults == {"repeated": 1, "disordered": 1, "unknown": 1}


def test_audit_when_nothing_came():
    """Nothing received is nothing missing: there was no first frame."""
    assert published()[0].audit([], to_end=True) == Audit()


@given(st.sets(st.integers(0, 23)))
@settings(max_examples=150, deadline=None)
def test_audit_when_any_frames_are_lost(lost):
    """Received and missing are all frames from the first on, and its plain values give the same audit again."""
    record, keys = published()
    got = [key for index, key in enumerate(keys) if index not in lost]
    audit = record.audit(got, to_end=True)
    first = min((index for index in range(24) if index not in lost), default=24)
    assert audit.received + audit.missing_total == 24 - first
    assert audit.received == len(got)
    assert Audit.from_dict(json.loads(json.dumps(audit.as_dict()))) == audit


# ------------------------------------------------------------------------------------------------ verdict

VIEWERS = {viewer.kind: viewer for viewer in QUICK.viewers(1_000_000)}


def watched(kind, **values):
    return dataclasses.replace(Watched(VIEWERS[kind]), **values)


FINE = {
    Kind.HEALTHY: {"time_in_states_s": (9.0, 0.1, 0.0, 0.0), "cut": "peer closed"},
    Kind.SLOW: {"time_in_states_s": (1.0, 4.0, 4.0, 0.0), "dropped": {"inter": 9}},
    Kind.STALLED: {"time_in_states_s": (1.0, 1.0, 1.0, 0.1), "cut": "hard limit"},
    Kind.FLOODING: {"cut": "limit hit", "cut_details": "control_messages_per_second is 201, the limit is 200"},
}


@pytest.mark.parametrize("kind", Kind)
def test_verdict_when_all_is_well(kind):
    """Each kind of viewer passes with the fate that is meant for it."""
    outcome = judge(watched(kind, **FINE[kind]), Audit(received=10), {"started_on_key": True})
    assert outcome.faults == ()


@pytest.mark.parametrize(
    ("kind", "changes", "audit", "said"),
    [
        (Kind.HEALTHY, {}, Audit(received=9, missing={"disposable": 1}), "lost 1 disposable"),
        (Kind.HEALTHY, {"dropped": {"audio": 2}}, Audit(received=9), "the server dropped 2 audio"),
        (Kind.HEALTHY, {"cut": "stuck"}, Audit(received=9), "was cut"),
        (Kind.HEALTHY, {}, Audit(), "received nothing"),
        (Kind.HEALTHY, {}, Audit(received=9, repeated=1), "1 frames repeated"),
        (Kind.SLOW, {"dropped": {}}, Audit(received=9), "was not thinned"),
        (Kind.SLOW, {"cut": "hard limit"}, Audit(received=9), "was cut instead of being thinned"),
        (Kind.SLOW, {}, Audit(received=9, undecodable=3), "3 frames undecodable"),
        (Kind.STALLED, {"cut": None}, Audit(received=9), "still there"),
        (Kind.STALLED, {"cut": "peer closed"}, Audit(received=9), "was not cut by a hard limit"),
        (Kind.FLOODING, {"cut": None}, Audit(received=9), "still there"),
        (Kind.FLOODING, {"cut_details": "commands_per_second is 9"}, Audit(received=9), "was not cut by control"),
    ],
)
def test_verdict_when_something_is_wrong(kind, changes, audit, said):
    """Whatever is not as it should be becomes a fault in words, and fails the whole."""
    outcome = judge(watched(kind, **(FINE[kind] | changes)), audit, {"started_on_key": True})
    report = Report((outcome,), {"frames": 1, "bytes": 1}, "limits")
    assert said in " ".join(outcome.faults)
    assert not report.passed
    assert "FAILED:" in report.lines()


def test_verdict_when_it_did_not_begin_with_a_key_frame():
    """A viewer must begin with a key frame, whatever it is like."""
    outcome = judge(watched(Kind.SLOW, **FINE[Kind.SLOW]), Audit(received=10), {"started_on_key": False})
    assert outcome.faults == ("did not begin with a key frame",)


def test_report_when_a_stalled_viewer_was_cut():
    """The report says how long after it stopped reading a viewer was cut, and by which limit."""
    stalled = watched(Kind.STALLED, **FINE[Kind.STALLED], connected_s=8.5, cut_details="tick: age_ms 3001, limit 3000")
    outcome = judge(stalled, Audit(received=10), {"started_on_key": True, "stalled_after_s": 2.0})
    (line,) = [
        line for line in Report((outcome,), {"frames": 1, "bytes": 1}, "l").lines() if line.startswith("  stalled")
    ]
    assert "cut 6.5 s after it stopped reading by hard limit (tick: age_ms 3001, limit 3000)" in line


# ------------------------------------------------------------------------------------------------ display


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("display", "stream"), [(TableDisplay, Terminal), (LineDisplay, io.StringIO)])
def test_display_when_viewers_have_changed(display, stream, monkeypatch):
    """Table and lines show state, queue, drops and reason; markup in a reason is shown as it is."""
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    slow = watched(
        Kind.SLOW,
        state=SendState.SOFT_LIMIT,
        load=Load(2048, 7, 900.0),
        dropped={"inter": 9},
        why="SOFT_LIMIT for 1 ms; queued [bold]x",
    )
    gone = watched(Kind.FLOODING, **FINE[Kind.FLOODING], connected_s=0.5)
    healthy = dataclasses.replace(Watched(ViewerPlan("healthy 1", Kind.HEALTHY, slow.plan.profile)))
    healthy.state = SendState.READY
    with display() as shown:
        shown.say("hello [red]")
        shown.show(1.0, [healthy, slow, gone], [slow, gone])
    text = errors.getvalue()
    for part in ("hello [red]", "1 READY", "SOFT_LIMIT", "2.0 KiB", "9 inter", "[bold]x", "cut after 500 ms"):
        assert part in text
