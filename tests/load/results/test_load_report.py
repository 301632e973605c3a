"""What is made of a load run: summary, report, Parquet file, live display; and that a server's words stay words."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_kit import Page
from result_kit import NASTY, some_run, some_samples, viewer

from flowctl.core.text.files import check_target, replacing, write_text
from flowctl.core.text.printable import foreign, printable
from flowctl.errors import ConfigError, FlowctlError
from flowctl.load.results import parquet as parquet_module
from flowctl.load.results import summary
from flowctl.load.results.failon import parse_condition
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.plots import plots_of
from flowctl.load.results.report import render
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunSample
from flowctl.load.results.table import RunDisplay

CONDITIONS = ["healthy.missing>0", "p99_ms>200", "stall.missing_share>50%"]


def verdicts_of(run):
    return [parse_condition(text).judge(RunFigures(run)) for text in CONDITIONS]


# ------------------------------------------------------------------------------------------------ report


def test_report_when_a_server_says_bad_things_only_shows_them():
    run = some_run(warnings=[NASTY], url=f"rtmp://127.0.0.1/{NASTY}", command=NASTY)
    run.profiles[NASTY] = 1
    run.peers.append(viewer(99, NASTY, PeerKind.SLOW, cut=True, end_details=NASTY, address=NASTY, end_code=NASTY))
    run.delays_ms[NASTY] = [1.0]
    page = Page(render(run, verdicts_of(run)))
    assert {"script", "img", "link", "iframe", "object", "base", "form"}.isdisjoint(page.tags)
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    assert (page.crossed, page.open) == ([], [])
    assert "alert('x')" in page.words


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_report_when_texts_are_of_any_kind_has_the_same_tags(text):
    def page(words):
        peer = viewer(1, "stall", PeerKind.SLOW, cut=True, end=PeerEnd.SERVER_RESET, end_details=words, end_code="x")
        hostile = viewer(2, "B04", PeerKind.HOSTILE, notes=f"n{words}", expectation_met=False)
        return render(some_run(peers=[peer, hostile]))

    shown = page(text)
    assert Page(page("plain")).tags == Page(shown).tags
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]", shown) is None


def test_report_when_opened_asks_for_nothing():
    text = render(some_run())
    page = Page(text)
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value for value in policy)
    assert [item for item in page.attributes if item[1] in {"src", "href", "srcset", "data", "action"}] == []
    assert "url(" not in text
    assert "@import" not in text


def test_report_when_read_without_eyes_says_what_is_drawn():
    run = some_run()
    plots = plots_of(RunFigures(run))
    page = Page(render(run))
    names = {value for tag, name, value in page.attributes if name == "id"}
    assert [plot.picture.name for plot in plots] == [
        "playing",
        "delays",
        "delays-over-time",
        "first-frames",
        "cuts",
        "pictures",
        "missing",
        "processor",
        "memory",
    ]
    assert page.tags.count("svg") == page.tags.count("desc") == page.tags.count("details") == len(plots)
    for plot in plots:
        assert {f"{plot.picture.name}-title", f"{plot.picture.name}-description"} <= names
        assert re.search(r"\d", plot.picture.description)
        assert plot.rows
        assert all(len(row) == len(plot.heads) for row in plot.rows)


def test_report_when_nothing_was_measured_is_still_a_page():
    nothing = {"connect_s": None, "first_frame_s": None, "video": 0, "audio": 0, "delays": 0, "delay_p99_ms": None}
    peer = viewer(0, "healthy", PeerKind.HEALTHY, end=PeerEnd.NOT_CONNECTED, end_details="refused", **nothing)
    run = some_run(peers=[peer], samples=[], delays_ms={}, server_cpu_s=None, server_base_rss_bytes=None)
    page = Page(render(run))
    assert "svg" not in page.tags
    assert "The run failed: nobody could connect: refused" in page.words


def test_report_when_all_is_well_says_so():
    run = some_run(peers=[viewer(number, "healthy", PeerKind.HEALTHY) for number in range(3)])
    words = Page(render(run, [parse_condition("missing>0").judge(RunFigures(run))])).words
    assert "Nobody: no viewer missed a frame" in words
    assert "Passed" in words
    assert "40 healthy, 6 slow@200k, 4 stall" in words


def test_report_when_there_are_many_profiles_shares_lines():
    peers = [viewer(number, f"slow@{number + 1}M", PeerKind.SLOW) for number in range(30)]
    peers += [viewer(30 + number, f"B{number + 1:02}", PeerKind.HOSTILE) for number in range(34)]
    run = some_run(peers=peers, profiles={peer.profile: 1 for peer in peers})
    run.samples = [RunSample(at_s=1.0, connected=run.profiles, playing=run.profiles)]
    (playing, *_) = plots_of(RunFigures(run))
    assert [series.label for series in playing.picture.series][-2:] == ["25 other profiles", "hostile"]
    assert len({series.colour for series in playing.picture.series}) == len(playing.picture.series) <= 8


# ------------------------------------------------------------------------------------------------ summary


def test_summary_when_for_machines_is_json():
    run = some_run(warnings=["slow tester"])
    found = json.loads(json.dumps(summary.summarize(run, verdicts_of(run)), allow_nan=False))
    assert found["passed"] is False
    assert [item["failed"] for item in found["conditions"]] == [False, True, False]
    assert found["profiles"]["stall"]["ends"] == {"server_reset": 4}
    assert found["profiles"]["healthy"]["missing"] == 0
    assert found["run"]["fds"] == 60
    assert found["warnings"] == ["slow tester"]
    assert found["hostile"][0] == {
        "profile": "B04",
        "peers": 2,
        "met": 1,
        "failed": 1,
        "undecided": 0,
        "ends": {"server_closed": 1, "run_ended": 1},
        "forms": [],
        "notes": foreign(NASTY),
    }
    whole = json.loads(json.dumps(summary.whole(run), allow_nan=False))
    assert (len(whole["peers"]), len(whole["samples"])) == (53, 30)


def test_summary_when_viewers_are_slow_tells_shares():
    slow = {"video": 770, "missing_video": 230, "longest_freeze_s": 1.04, "freezes": 9}
    slow |= {"line_bytes": 4_000_000, "line_used_bytes": 3_920_000}
    peers = [viewer(0, "healthy", PeerKind.HEALTHY, longest_freeze_s=0.05), viewer(1, "slow@1M", PeerKind.SLOW, **slow)]
    run = some_run(peers=peers, delays_ms={"healthy": [1.0], "slow@1M": [900.0]})
    text = "\n".join(summary.lines(run))
    came = text.partition("what came:")[2].partition("\n\n")[0]
    rows = {line.split()[0]: line.split()[1:] for line in came.splitlines() if line.strip()}
    assert rows["slow@1M"][:4] == ["77.0%", "98.0%", "1.0", "s"]
    assert rows["healthy"][:4] == ["100.0%", "-", "0.05", "s"]
    found = json.loads(json.dumps(summary.summarize(run)))
    assert found["kinds"]["slow"]["picture_share"] == found["profiles"]["slow@1M"]["picture_share"] == 0.77
    assert (found["kinds"]["slow"]["line_share"], found["kinds"]["slow"]["longest_freeze_s"]) == (0.98, 1.04)
    assert (found["kinds"]["healthy"]["picture_share"], found["kinds"]["healthy"]["line_share"]) == (1.0, None)
    words = Page(render(run)).words
    assert "77.0%" in words
    assert "98.0%" in words


def test_summary_when_viewers_switch_tells_the_time_in_each_rendition():
    both = {"renditions_s": {"640x360": 2.0, "854x480": 18.0}, "switches": 1}
    peers = [viewer(0, "healthy", PeerKind.HEALTHY, renditions_s={"854x480": 20.0})]
    peers += [viewer(number, "slow@1M", PeerKind.SLOW, **both) for number in (1, 2)]
    run = some_run(peers=peers)
    rows = ["profile  switches             in which rendition", "healthy         0                   854x480 100%"]
    rows += ["slow@1M         2       854x480 90%, 640x360 10%"]
    found = summary.lines(run)
    at = found.index("share of the time in each rendition")
    assert [line.split() for line in found[at + 1 : at + 4]] == [row.split() for row in rows]
    profile = summary.summarize(run)["profiles"]["slow@1M"]
    assert (profile["renditions"], profile["switches"]) == ({"854x480": 0.9, "640x360": 0.1}, 2)
    assert "854x480 90%, 640x360 10%" in Page(render(run)).words
    alone = some_run(peers=peers[:1])
    assert "share of the time in each rendition" not in summary.lines(alone)
    assert "Which renditions" not in Page(render(alone)).words


def test_plot_of_pictures_when_viewers_lose_some_draws_their_share():
    (plot,) = [plot for plot in plots_of(RunFigures(some_run())) if plot.picture.name == "pictures"]
    assert plot.rows == [["healthy", "100 %", "100 %", "100 %"], ["slow@200k", "62 %", "62 %", "62 %"]]
    assert {y for series in plot.picture.series for _, y in series.points} == {100.0, 62.5}
    run = some_run()
    next(peer for peer in run.peers if peer.profile == "slow@200k").stopped_reading_s = 20.0
    (plot,) = [plot for plot in plots_of(RunFigures(run)) if plot.picture.name == "pictures"]
    assert plot.rows[1] == ["slow@200k", "62 %*", "62 %*", "62 %*"]  # of the time in which it read


def test_summary_when_for_people_is_safe_for_a_terminal():
    run = some_run(warnings=[NASTY])
    lines = summary.lines(run, verdicts_of(run))
    assert lines[0].startswith("warning: ")
    assert lines[-1].startswith("pass  stall.missing_share <= 50%")
    assert [line for line in lines if printable(line) != line] == []
    assert any("4 stall: reset after" in line for line in lines)


def _unfolded(lines):
    return " ".join(" ".join(lines).split())


def test_summary_when_for_people_fits_a_terminal():
    peers = [viewer(number, "healthy", PeerKind.HEALTHY) for number in range(1000)]
    peers += [viewer(1000, "slow@1280k", PeerKind.SLOW, stopped_reading_s=12.0)]
    end = {"cut": True, "end": PeerEnd.SERVER_CLOSED, "end_details": "hard limit: " + "a reason of many words " * 8}
    peers += [viewer(1001, "B04", PeerKind.HOSTILE, forms="video, command, data: cut " * 9, notes="slow " * 50, **end)]
    run = some_run(peers=peers, delays_ms={"healthy": [12345.0], "slow@1280k": [12345.0]}, warnings=["so slow " * 40])
    lines = summary.lines(run, verdicts_of(run))
    assert max(map(len, lines)) <= 80
    assert "a reason of many words " * 7 in _unfolded(lines)


def test_cuts_when_worded_with_other_numbers_are_one_group():
    (stalled, hostile) = summary.cut_groups(some_run().peers)
    assert (stalled["profile"], stalled["count"], stalled["end"]) == ("stall", 4, "server_reset")
    assert stalled["after_s"]["first"] <= stalled["after_s"]["median"] <= stalled["after_s"]["last"]
    assert (hostile["profile"], hostile["count"]) == ("B04", 1)


def test_cuts_when_the_words_repeat_the_code_say_it_once():
    code = "NetConnection.Connect.Rejected"
    end = {"cut": True, "end": PeerEnd.SERVER_CLOSED, "end_code": code, "end_details": f"zero: {code}: too small"}
    run = some_run(peers=[viewer(0, "B03", PeerKind.HOSTILE, expectation_met=True, **end)])
    text = _unfolded(summary.lines(run))
    assert text.count(code) == 1
    assert f": {code}, zero: too small" in text


def test_summary_when_an_attack_has_several_forms_has_a_line_for_each_end():
    forms = "video, data: cut (NetConnection.Connect.Rejected)\nwithin: contained"
    run = some_run(peers=[viewer(0, "B04", PeerKind.HOSTILE, expectation_met=True, forms=forms)])
    lines = [line.strip() for line in summary.lines(run)]
    place = lines.index("B04                      ok         1 in several forms")
    assert lines[place + 1 : place + 3] == forms.splitlines()
    assert "video, data: cut (NetConnection.Connect.Rejected)<br>within: contained" in render(run)


def test_cuts_when_there_are_very_many_kinds_are_bounded():
    peers = [
        viewer(number, "stall", PeerKind.SLOW, cut=True, end=PeerEnd.SERVER_CLOSED, end_details="x" * number)
        for number in range(80)
    ]
    groups = summary.cut_groups(peers)
    assert len(groups) == 51
    assert sum(group["count"] for group in groups) == 80


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ([], "no peer was started"),
        (
            [viewer(0, "healthy", PeerKind.HEALTHY, connect_s=None, end_details="refused")],
            "nobody could connect: refused",
        ),
        ([viewer(0, "healthy", PeerKind.HEALTHY, first_frame_s=None)], "no healthy viewer got a frame"),
        ([viewer(0, "healthy", PeerKind.HEALTHY)], None),
        ([viewer(0, "B04", PeerKind.HOSTILE, first_frame_s=None)], None),
        ([viewer(0, "never-read", PeerKind.SLOW, first_frame_s=None)], None),
    ],
)
def test_run_when_it_measured_nothing_has_failed(peers, said):
    found = summary.what_failed(some_run(peers=peers))
    assert found is None if said is None else said in found


# ------------------------------------------------------------------------------------------------ files


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_text_when_made_printable_is_one_short_line(text):
    found = foreign(text, 50)
    assert found == printable(found)
    assert len(found) <= 50
    if text.isprintable() and len(text) <= 50:
        assert found == " ".join(text.split())


def test_parquet_when_read_again_has_what_was_written(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    run = some_run(warnings=["careful"])
    run.peers[40].renditions_s = {"640x360": 1.5}
    path = tmp_path / "run.parquet"
    parquet_module.write_parquet(path, run)
    found = parquet.read_table(path)
    assert found.column_names == [item.name for item in dataclasses.fields(PeerResult)]
    assert found.to_pylist() == [
        {**peer.as_dict(), "renditions_s": json.dumps(peer.renditions_s)} for peer in run.peers
    ]
    metadata = {key.decode(): value.decode() for key, value in found.schema.metadata.items()}
    assert {key: metadata[key] for key in ("flowctl.format", "flowctl.url")} == {
        "flowctl.format": "1",
        "flowctl.url": run.url,
    }
    assert json.loads(metadata["flowctl.profiles"]) == run.profiles
    assert json.loads(metadata["flowctl.warnings"]) == ["careful"]


def test_parquet_when_rows_lack_values_keeps_types_and_nulls(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    peers = [PeerResult(number=0, profile="healthy", kind=PeerKind.HEALTHY, url="rtmp://h/a/b")]
    parquet_module.write_parquet(path, some_run(peers=peers))
    schema = parquet.read_schema(path)
    types = {field.name: (str(field.type), field.nullable) for field in schema}
    assert types == parquet_module.column_types()
    assert types["connect_s"] == ("double", True)
    assert types["video"] == ("int64", False)
    assert types["expectation_met"] == ("bool", True)
    assert types["kind"] == ("string", False)
    parquet_module.write_parquet(path, some_run(peers=[]))
    assert parquet.read_table(path).num_rows == 0


def test_parquet_when_pyarrow_is_missing_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--parquet needs the extra 'telemetry': pyarrow") as caught:
        parquet_module.write_parquet(tmp_path / "x", some_run())
    assert caught.value.hint == "in flowctl's source folder: pip install '.[telemetry]'"


def test_file_when_writing_fails_is_as_it_was(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("report.html", "old")]
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o077 == 0o666 & ~current_mask() & 0o077


def current_mask():
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_file_when_it_cannot_be_written_is_refused_before_and_reported_after(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        check_target(tmp_path, "--report")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_target(tmp_path / "none" / "report.html", "--report")
    check_target(tmp_path / "report.html", "--report")
    with pytest.raises(FlowctlError, match="cannot write"):
        write_text(tmp_path / "none" / "report.html", "text")


# ------------------------------------------------------------------------------------------------ display


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_display_when_nobody_gets_frames_says_so_after_a_while(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("COLUMNS", "200")
    display = RunDisplay("rtmp://h/a", {"healthy": 9}, 30.0, table=True)
    with display:
        display.show_sample(RunSample(at_s=4.0, connected={"healthy": 9}, playing={"healthy": 0}))
        display.show_sample(RunSample(at_s=6.0, connected={"healthy": 9}, playing={"healthy": 1}))
        assert "is there a publisher" not in sys.stderr.getvalue()
        display.show_sample(RunSample(at_s=7.0, connected={"healthy": 9}, playing={"healthy": 0}))
        assert "no healthy viewer gets frames: is there a publisher on that stream?" in sys.stderr.getvalue()


def test_summary_when_peers_stop_reading_marks_what_they_measured():
    """Since when and how long they did not read, a star at what is of the time before, and who cannot see its end."""
    peers = [viewer(number, "healthy", PeerKind.HEALTHY) for number in range(2)]
    peers.append(viewer(2, "stall", PeerKind.SLOW, stopped_reading_s=12.0))
    peers.append(viewer(3, "vanish", PeerKind.SLOW, stopped_reading_s=2.0, ended_s=30.0, cut=None))
    run = some_run(peers=peers, delays_ms={"healthy": [1.0], "stall": [5.0], "vanish": [5.0]})
    text = "\n".join(summary.lines(run))
    came = text.partition("what came:")[2].partition("\n\n")[0]
    rows = {line.split()[0]: line for line in came.splitlines() if line.strip()}
    assert "*" not in rows["healthy"]
    assert rows["stall"].count("5.0*") == 3
    assert "100.0%*" in rows["stall"]
    page = render(run)
    for note in (
        "* stall: 1 of 1 not reading since 12.0 s, for 18.0 s (medians); figures with a star are of the time before",
        "vanish: 1 of 1 cannot see whether they were cut; only the server can tell",
    ):
        assert note in _unfolded(text.splitlines())
        assert note in page


def test_summary_when_interrupted_has_neither_passed_nor_failed():
    run = some_run(interrupted=True)
    verdicts = verdicts_of(run)
    found = summary.summarize(run, verdicts)
    assert found["passed"] is None
    assert {None} == {item["failed"] for item in found["conditions"]}
    assert {"interrupted"} == {item["not_judged"] for item in found["conditions"]}
    text = "\n".join(summary.lines(run, verdicts))
    assert "not judged  healthy.missing <= 0  (interrupted; measured 0)" in text
    assert "pass  " not in text
    assert "<h2>Interrupted</h2>" in render(run, verdicts)
    assert "✓ passes" not in render(run, verdicts)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_display_when_the_run_goes_on_shows_it(stream, monkeypatch):
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    asked = {"healthy": 40, "slow@200k": 6, "stall": 4}
    display = RunDisplay("rtmp://h/[bold]a", asked, 30.0, table=True)
    with display:
        display.show_sample(some_samples()[19])
        display.show_sample(RunSample(at_s=30.2))
    text = errors.getvalue()
    for part in (
        "delay p50 22 ms, p99 51 ms",
        "server 11 % of a core, 57.4 MiB, 60 descriptors",
        "10.0 s left",
        "ending",
    ):
        assert part in text
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", text) is None
    if stream is Terminal:
        assert "rtmp://h/[bold]a" in text
        assert "slow@200k" in text
    else:
        assert "1200 frames missing (healthy 0)" in text
