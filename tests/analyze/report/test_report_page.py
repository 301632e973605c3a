"""The page of the report, made of results in a folder: figures, missing tables, peers' words; without Spark."""

from __future__ import annotations

import json
import re
import shutil
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_kit import Page
from report_kit import (
    BEGAN,
    JOBS,
    NASTY,
    choice,
    empty,
    felt,
    found_of,
    lay,
    minute,
    notes,
    publication,
    session,
    tables_of,
    texts_of,
)

from flowctl.analyze.records.place import RecordPlace, Storage
from flowctl.analyze.report import evidence, gather, job
from flowctl.analyze.report.answers import RULES, Advice
from flowctl.analyze.report.job import render
from flowctl.core.server.bans import BanList


def test_page_when_made_answers_first_and_keeps_books_last(tmp_path):
    shown = render(found_of(tmp_path / "r"))
    assert re.findall(r"<h2>(.*?)</h2>", shown) == [
        title.replace("'", "&#39;") for title in (section.title for section in job.SECTIONS.values())
    ]
    assert shown.index("Set the limits of limits.toml") < shown.index("What viewers felt</h2>")
    assert re.findall(r'<section class="bad"><h3>(.*?)</h3>', shown) == [
        *("Viewers&#39; own lines <span>behind 40 of 40 viewers in trouble</span>", "Streams that come to us badly"),
        "Peers that mean harm",
    ]
    assert re.findall(r"<summary>Nothing to do: (.*?) </summary>", shown) == ["How many more viewers?"]
    words = Page(shown).words
    for said in (
        "10 %",
        "7 clock skew" if "7 clock skew" in words else "clock skew",
        "live/s1",
        "edge-0",
        "soft=2MiB",
    ):
        assert said in words


def test_page_when_peers_say_bad_things_only_shows_them(tmp_path):
    shown = Page(render(found_of(tmp_path / "r", text=NASTY)))
    assert shown.tags.count("script") == 3
    assert {"img", "link", "iframe", "object", "base", "form"}.isdisjoint(shown.tags)
    assert [name for _, name, _ in shown.attributes if name.startswith("on")] == []
    assert (shown.crossed, shown.open) == ([], [])
    assert shown.words.count("alert('x')") >= 8


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return render(found_of(tmp_path_factory.mktemp("plain") / "r", text="plain"))


@given(st.text(max_size=60))
@settings(max_examples=15, deadline=None)
def test_page_when_texts_are_of_any_kind_has_the_same_tags(tmp_path_factory, plain, text):
    folder = tmp_path_factory.mktemp("any") / "r"
    text = text.encode("utf-8", "ignore").decode()
    shown = render(found_of(folder, text=f"a{text}"))
    shutil.rmtree(folder)
    assert Page(plain).tags == Page(shown).tags
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]", shown) is None


def test_page_when_opened_asks_for_nothing(tmp_path):
    text = render(found_of(tmp_path / "r"))
    shown = Page(text)
    policy = [value for tag, name, value in shown.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value for value in policy)
    links = {value for _, name, value in shown.attributes if name in {"src", "href", "srcset", "data", "action"}}
    ids = [value for _, name, value in shown.attributes if name == "id"]
    assert links
    assert links <= {f"#{name}" for name in ids}
    assert len(ids) == len(set(ids))
    assert not re.search(r"url\(|@import", text)


def test_page_when_read_without_eyes_says_what_is_drawn(tmp_path):
    text = render(found_of(tmp_path / "r"))
    shown = Page(text)
    said = [value for tag, name, value in shown.attributes if tag == "div" and name == "aria-label"]
    plots = [json.loads(value) for _, name, value in shown.attributes if name == "data-plot"]
    assert len(said) == len(plots) == 3
    assert all(re.search(r"\d", text) for text in said)
    assert {"delays", "pictures", "states", "blames", "closes", "capacity-nodes", "crowd"} <= {
        value for _, name, value in shown.attributes if name == "id"
    }
    assert shown.tags.count("noscript") == 3


@pytest.mark.parametrize("gone", sorted(tables_of()))
def test_page_when_a_table_is_missing_has_the_others(tmp_path, gone):
    tables = {name: rows for name, rows in tables_of().items() if name != gone}
    shown = Page(render(found_of(tmp_path / "r", tables)))
    assert (shown.crossed, shown.open) == ([], [])
    words = shown.words
    assert ("How late were viewers?" in words) == (gone != "sessions")
    assert ("Call the publisher" in words) == (gone != "ingest")
    assert ("Set the limits of limits.toml" in words) == (gone != "whatif_choices")


def test_page_when_a_table_is_broken_says_which_and_why(tmp_path):
    folder = lay(tmp_path / "r", tables_of(), texts_of())
    (folder / "whatif_choices" / "part-0.parquet").write_bytes(b"PAR1 is not enough")
    found = gather.gather(gather.Tables(RecordPlace(str(folder))), "e", notes())
    words = Page(render(found)).words
    assert "a table could not be read (whatif_choices: " in words
    assert "found nothing to say" not in words.partition("Whom to keep out?")[0]
    assert "Keep out 1 address" in words


@pytest.mark.parametrize(
    ("address", "unit"),
    [
        ("198.51.100.7", "198.51.100.7/32"),
        ("::ffff:198.51.100.7", "198.51.100.7/32"),
        ("64:ff9b::c633:6407", "198.51.100.7/32"),
        ("2002:c633:6407::1", "198.51.100.7/32"),
        ("203.0.113.200", "203.0.113.200/32"),
        ("2001:db8:1:2::9%eth0", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("192.0.2.1", "192.0.2.1/32"),
        ("h:1f00", "h:1f00"),
    ],
)
def test_listed_when_asked_says_what_a_server_does(address, unit):
    """Who is kept out counts as such by every address by which the server finds them; what a ban would name, too."""
    cidrs = ["198.51.100.7/32", "203.0.113.0/24", "2001:db8:1:2::/64"]
    bans = BanList.parse("\n".join(json.dumps({"cidr": cidr, "expires": "2100-01-01T00:00:00Z"}) for cidr in cidrs))
    assert (address in gather.Listed(cidrs)) is (bans.match(address, 0.0) is not None)
    assert gather._networks_of(address)[0] == unit


def test_report_when_results_lie_in_a_place_reads_them_as_that_does(tmp_path, monkeypatch):
    place, written = RecordPlace(str(lay(tmp_path / "r", tables_of(), texts_of()))), {}
    since = BEGAN - timedelta(days=1)
    given = {"since": since, "until": None, "events": "/data/events", "accounts": [], "notes": {}}
    parts = SimpleNamespace(place=place, staging=place, write_text=written.__setitem__, **given)
    monkeypatch.setattr(Storage, "of", lambda *_: pytest.fail("a place is opened by its address"))
    assert job.answer(parts).summary["figures"]["totals"]["viewers"] == 400
    window = f"from {since:%Y-%m-%d %H:%M} UTC"
    assert f"Records of <code>/data/events</code>, {window}, analyzed at" in written["report.html"]


def test_page_when_a_job_failed_shows_neither_its_old_tables_nor_hides_why(tmp_path):
    failed = notes(whatif={"state": "failed", "message": f"no flights in it {NASTY}", "hint": "record with --flights"})
    words = Page(render(found_of(tmp_path / "r", jobs=failed))).words
    assert words.index("record with --flights") < words.index("Recorded: 400")
    assert "the job whatif failed: no flights in it" in words
    assert "number=7" not in words


def test_page_when_nothing_was_run_says_so_for_each_question():
    shown = Page(render(empty()))
    assert (shown.crossed, shown.open) == ([], [])
    assert "svg" not in shown.tags
    for name in ("sessions", "abuse", "whatif", "capacity"):
        assert f"the job {name} was not run" in shown.words


def test_page_when_viewers_are_few_has_no_percentages_of_them(tmp_path):
    tables = {
        "sessions": [session(number) for number in range(7)],
        "experience": [felt(by, "live/s0", 7, 1) for by in ("all", "stream")],
    }
    words = Page(render(found_of(tmp_path / "r", tables, {}))).words
    assert "1 of 7" in words
    assert "That is few" in words
    assert "14.3 %" not in words


def test_page_when_streams_are_ten_thousand_stays_small(tmp_path):
    many = range(10_000)
    tables = {
        "sessions": [session(number, stream=f"s{number}", node=f"n{number}", agent="x" * 500) for number in many],
        "experience": [felt(by, f"{by}{number}", 5, 1) for number in many for by in ("stream", "network")],
        "fleet_streams": [minute(number) for number in many],
        "whatif_choices": [choice(number) for number in range(300)],
        "abuse_scores": [{"cidr": f"10.0.0.{number}", "score": 1.0, "points": 1.0} for number in many],
    }
    shown = render(found_of(tmp_path / "r", tables, {}))
    assert len(shown.encode()) < 2_000_000
    assert "The first 100 of 10,000 rows." in shown


@pytest.mark.parametrize("huge", [10**15, 1e300, float("inf"), float("nan"), -1.0])
def test_page_when_figures_are_absurd_is_still_a_page(tmp_path, huge):
    names = ("duration_s", "trouble_ms", "delay_p99_ms", "delay_p50_ms", "stall_ratio", "picture_share", "sent_bytes")
    tables = {
        "sessions": [session(number, **dict.fromkeys(names, float(huge))) for number in range(3)],
        "fleet_streams": [minute(0, viewers=float(huge), delay_p99_ms=float(huge))],
        "whatif_choices": [choice(1, disconnected_share=float(huge), delay_p95_ms=float(huge)), choice(7)],
    }
    shown = Page(render(found_of(tmp_path / "r", tables, {})))
    assert (shown.crossed, shown.open) == ([], [])
    assert not {"nan", "inf"} & set(re.findall(r"\b[a-z]+\b", shown.words))


def test_figures_when_sessions_lie_in_several_files_are_those_of_all(tmp_path, monkeypatch):
    rows = [session(number, delay_p95_ms=float(number + 1)) for number in range(400)]
    felt_by_all = {"experience": [felt("all", "all", 400, 40)]}
    whole = found_of(tmp_path / "one", {"sessions": rows} | felt_by_all, {})
    monkeypatch.setattr(gather, "_BATCH_ROWS", 9)
    parts = found_of(
        tmp_path / "many",
        {"sessions": rows[:300], "sessions_open": [row | {"closed_at": None} for row in rows[300:]]} | felt_by_all,
        {},
    )
    assert parts.totals == whole.totals
    assert {name: found["n"] for name, found in parts.measures.items()} == dict.fromkeys(whole.measures, 400)
    for bound in ("low", "high"):
        assert {name: found[bound] for name, found in parts.measures.items()} == pytest.approx(
            {name: found[bound] for name, found in whole.measures.items()}
        )
    assert [row["conn_id"] for row in parts.rows("worst")] == [row["conn_id"] for row in whole.rows("worst")]


def test_figures_when_sessions_are_very_many_are_of_a_random_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "MOST_SAMPLED", 1000)
    monkeypatch.setattr(gather, "_BATCH_ROWS", 50)
    tables = {"sessions": [session(number) for number in range(3000)], "experience": [felt("all", "all", 3000, 300)]}
    found = found_of(tmp_path / "r", tables, {})
    assert found.totals["drawn_share"] == 0.25
    assert 500 < found.measures["picture_share"]["n"] < 1000
    assert found.totals["connections"] == pytest.approx(3000, rel=0.1)
    assert (found.totals["viewers"], found.measures["troubled"]["value"]) == (3000, 0.1)
    assert "Curves and errors are of a random sample, 25 %." in Page(render(found)).words


def test_people_when_sessions_are_very_many_are_those_of_whole_addresses(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "MOST_SAMPLED", 3000)
    monkeypatch.setattr(gather, "_BATCH_ROWS", 50)
    visits = [BEGAN + timedelta(seconds=700 * n) for n in range(9)]
    rows = [
        session(9 * one + n, peer_ip=f"10.{one // 250}.0.{one % 250}", close_reason="peer closed", opened_at=at,
                closed_at=at + timedelta(seconds=600), blame="viewer_link" if one < 250 and n < 2 else "none")
        for one in range(500)
        for n, at in enumerate(visits)
    ]  # fmt: skip
    proxy = [session(10**6 + n, peer_ip="10.9.9.9", blame="none") for n in range(2000)]  # all of them at once
    found = found_of(tmp_path / "r", {"sessions": rows + proxy, "experience": [felt("all", "all", 2500, 250)]}, {})
    assert found.totals["drawn_share"] == 0.25
    [link] = found.rows("links")
    assert (link["key"], link["viewers"]) == ("10.0.0.0/24", pytest.approx(250, rel=0.3))
    assert link["viewers"] == link["troubled"] == link["addresses"]
    assert found.totals["people"] == pytest.approx(2500, rel=0.1)
    assert found.totals["connections"] == pytest.approx(6500, rel=0.1)


def test_tiles_when_some_waited_or_left_soon_say_what_the_table_of_all_says(tmp_path):
    waiting = [session(n, play_s=None, first_frame_ms=None, picture_share=None, duration_s=36e3) for n in range(30)]
    rows = [*(session(number) for number in range(90)), *waiting]
    row = felt("all", "all", 90, 9, attempts=120, start_failures=30, play_hours=14.975, picture_share=0.83)
    found = found_of(tmp_path / "r", {"sessions": rows, "experience": [row]}, {})
    words = Page(render(found)).words
    for said in ("Recorded: 90 viewers", "watched, all together15.0 h", "attempts that failed to start25 %"):
        assert said in words
    for said in ("viewers in trouble10 %", "pictures delivered83 %", "95 % of viewers, half of their time90 ms"):
        assert said in words


def test_bounds_of_ratios_when_viewers_weigh_differently_are_those_of_sums(tmp_path):
    rows = [session(1, pictures_wanted=wanted, picture_share=share) for wanted, share in ((1000, 0.5), (3000, 0.9))]
    tables = {"sessions": rows, "experience": [felt("all", "all", 2, picture_share=0.8)]}
    found = found_of(tmp_path / "r", tables, {}).measures["picture_share"]
    error = ((0.5 - 0.8) ** 2 * (1000 / 3000) ** 2 + (0.9 - 0.8) ** 2 * 3**2) ** 0.5 * 0.5**0.5
    off = gather._student(4000**2 / (1000**2 + 3000**2) - 1) * error
    assert found == {
        "n": 2,
        "value": 0.8,
        "low": pytest.approx(0.8 - off),
        "high": pytest.approx(0.8 + off),
        "part": None,
    }
    assert [gather._student(freedom) for freedom in (10, 30, 1e6)] == pytest.approx([3.22, 2.77, 2.6], abs=0.01)


def test_calls_when_a_viewer_comes_back_again_and_again_count_it_once(tmp_path):
    def found(number, seconds):
        """What nine connections are that begin so many seconds apart; each is cut as the next begins, 5 s after it."""
        folder, begun = tmp_path / f"r{number}", [BEGAN + timedelta(seconds=seconds * n) for n in range(9)]
        last = {"close_reason": "stuck", "closed_by": "server", "blame": "viewer_link", "trouble_ms": 8_000.0}
        rows = [
            session(n, peer_ip="10.1.2.3", node="edge-9", opened_at=at, closed_at=at + timedelta(seconds=65), **last)
            for n, at in enumerate(begun)
        ]
        rows += [session(n, peer_ip=f"10.2.{n}.1", blame="none", close_reason="peer closed") for n in range(40)]
        network = [felt("network", "10.1.2.0/24", 9, 9), *(felt("network", f"10.2.{n}.0/24", 1) for n in range(40))]
        return found_of(folder, {"sessions": rows, "experience": [felt("all", "all", 49, 9), *network]}, {})

    one, nine = found(1, 60), found(9, 0)
    assert [
        [row["viewers"], row["troubled"], row["addresses"]] for shown in (one, nine) for row in shown.rows("links")
    ] == [
        [1, 1, 1],
        [9, 9, 1],
    ]
    assert [shown.totals["people"] for shown in (one, nine)] == [41, 49]
    assert [row["count"] for row in one.rows("nodes") if row["node"] == "edge-9"] == [1]
    assert "Call the operator" not in Page(render(one)).words
    assert "Call the operator of the network 10.1.2.0/24" in Page(render(nine)).words


def test_abusers_when_they_are_on_the_list_are_neither_called_nor_among_the_worst_off(tmp_path):
    rows = [session(number, peer_ip=f"10.{number % 4}.0.1" if number % 10 == 0 else None) for number in range(40)]
    bad = {"health": "gaps", "gap_share": 0.5, "gap_ms": 9e3, "stream": "s9"}
    tables = {"sessions": rows, "experience": [felt("all", "all", 40, 4)]}
    tables |= {"ingest": [publication(peer_ip="::ffff:10.2.0.1", **bad), publication(peer_ip="10.9.0.1")]}
    tables |= {"abuse_scores": [{"cidr": "10.2.0.0/16", "score": 9.0, "points": 9.0}]}
    texts = {"bans.jsonl": '{"cidr": "10.2.0.0/16", "action": "limit"}\n{"cidr": "10.7.0.1/32", "action": "ban"}\n'}
    found = found_of(tmp_path / "r", tables, texts)
    assert {row["peer_ip"] for row in found.rows("worst")} == {"10.0.0.1"}
    assert [row["peer_ip"] for row in found.rows("ingest")] == ["10.9.0.1"]
    assert [row["key"] for row in found.rows("links")] == ["10.0.0.0/24"]
    words = Page(render(found)).words
    assert "2 connections came from addresses to be kept out or limited" in words
    assert "Call the publisher" not in words
    assert "First frame: from a request until the first of the stream is ready to be sent. Delay ends when" in words
    assert "a percentile of it may be 1.6 % off, up or down, however many viewers there are." in words
    assert "Viewers are those who were there for 2 s or more; peak viewers are all at once, for however long." in words


def test_bans_when_more_than_the_page_lists_are_all_counted(tmp_path):
    kinds = [("ban", "limit_hit.amf_depth", 21), ("limit", "shared: flood", 2), ("limit", "limited: deaf_close", 1)]
    ban = {"cidr": "10.0.0.1/32", "score": 9.0}
    lines = [ban | {"action": act, "reason": why} for act, why, count in kinds for _ in range(count)]
    texts = {"bans.jsonl": "\n".join(map(json.dumps, lines))}
    words = Page(render(found_of(tmp_path / "r", None, texts))).words
    assert "Keep out 21 addresses and subnets and limit new connections of 3 addresses and subnets (mild " in words


def test_publishers_when_many_are_bad_are_listed_the_worst_first(tmp_path):
    rows = [publication(stream="back", health="came back", away_s=5.0) for _ in range(100)]
    wrong = {"steady": {}, "jitter": {"jitter_ms": 200.0}, "no media": {}, "gaps": {"gap_share": 0.5}}
    rows += [publication(stream=name, health=name, **values) for name, values in wrong.items()]
    tables = {"sessions": [session(1)], "ingest": [*rows, publication(stream="old", health=None)]}
    found = found_of(tmp_path / "r", tables, {})
    called = re.findall(r"Call the publisher of live/(no media|[a-z]+)", Page(render(found)).words)
    assert called == ["no media", "gaps", "back", "jitter"]
    assert [row[0].text for row in evidence.shown(found, "ingest")["rows"][:4]] == [
        "live/no media",
        "live/gaps",
        "live/jitter",
        "live/back",
    ]


def test_calls_when_trouble_is_not_of_the_link_name_no_network(tmp_path):
    quiet = [session(number, peer_ip=f"10.1.0.{number % 99}", blame="none") for number in range(300)]
    bad = {"10.2.0.": "server_loop", "10.3.0.": "publisher_burst", "10.4.0.": "policy", "10.5.0.": "viewer_link"}
    rows = [session(0, peer_ip=f"{net}{n}", blame=blame) for net, blame in bad.items() for n in range(20)]
    rows += [session(0, peer_ip="10.6.0.1") for _ in range(20)]
    networks = [felt("network", f"10.{number}.0.0/24", 20, 20) for number in (2, 3, 4, 5, 6)]
    experience = [felt("all", "all", 400, 100), felt("network", "10.1.0.0/24", 300), *networks]
    texts = {"bans.jsonl": json.dumps({"cidr": "10.6.0.1/32", "evidence": {}})}
    words = Page(render(found_of(tmp_path / "r", {"sessions": quiet + rows, "experience": experience}, texts))).words
    assert re.findall(r"operator of the network ([0-9.]+/24)", words) == ["10.5.0.0/24"]
    assert "100 % (20 of 20) of its viewers had trouble by their own link; of all others 0 % (0 of 360)" in words


@pytest.mark.parametrize(
    ("hours", "peaks"), [(30, {0: 23.0}), (47.5, {0: 23.0, 1: 47.0}), (72, {0: 23.0, 1: 47.0, 2: 71.0}), (20, {})]
)
def test_peaks_when_a_day_was_not_recorded_to_its_end_leave_it_out(tmp_path, hours, peaks):
    rows = [minute(number, viewers=float(number // 60)) for number in range(0, int(hours * 60), 30)]
    assert found_of(tmp_path / "r", {"fleet_streams": rows}, {}).peaks == peaks


def test_calls_when_a_network_is_not_among_the_first_of_the_page_name_it(tmp_path):
    networks = [felt("network", f"10.0.{number}.0/24", 100 - number) for number in range(99)]
    networks += [felt("network", f"10.1.{number}.0/24", 1) for number in range(20)]
    bad = [session(0, peer_ip=f"10.9.9.{number}") for number in range(18)]
    tables = {"sessions": [*(session(number) for number in range(3982)), *bad]}
    tables["experience"] = [felt("all", "all", 4000, 400), *networks, felt("network", "10.9.9.0/24", 20, 18)]
    words = Page(render(found_of(tmp_path / "r", tables, {}))).words
    assert "Call the operator of the network 10.9.9.0/24." in words
    assert "The first 100 of 120 rows." in words


def test_pictures_when_viewers_missed_some_are_told_from_all_to_none(tmp_path):
    shares = [1.0, 1.0, 0.96, 0.5, 0.1, None]
    found = found_of(tmp_path / "r", {"sessions": [session(1, picture_share=share) for share in shares]}, {})
    drawn = evidence.bars(found, "pictures").bars
    assert [(label, text) for label, _, text, _ in drawn] == [
        *(("all", "2"), ("95 % and more", "1"), ("50 to 80 %", "1"), ("less than half", "1"), ("not known", "1")),
    ]
    assert len({paint for *_, paint in drawn}) == len(drawn)


def test_sets_when_viewers_followed_some_tell_what_each_saw_and_why_it_was_small(tmp_path):
    small = {"renditions": '{"360":48.0,"720":552.0}', "set_s": 600.0, "smaller_rendition_share": 1.0}
    small |= {"why_smaller": "the line takes 1.25 of 2.5 Mbit/s", "switches": 1, "peer_ip": "192.0.2.7"}
    large = {"renditions": '{"360":0.0,"1080":400.0}', "set_s": 400.0, "smaller_rendition_share": 0.0, "switches": 1}
    tables = tables_of() | {"sessions": [session(1, **small), session(2, **large, picture_share=0.98), session(3)]}
    tables["experience"][0] |= {"smaller_rendition_share": 0.6, "switches": 2}
    shown = render(found_of(tmp_path / "r", tables=tables))
    words = Page(shown).words
    assert "every picture, 92 % of the time in 720" in words
    assert "98 % of the pictures, 100 % of the time in 1080" in words
    assert words.index("192.0.2.7") < words.index("98 % of the pictures, ")
    assert "the line takes 1.25 of 2.5 Mbit/s" in words
    for line in ("72055.2 %: 1 viewers", "108040 %: 1 viewers", "3604.8 %: 1 viewers"):
        assert line in words
    assert "smaller rendition share" in words


def test_page_when_nobody_followed_a_set_says_nothing_of_renditions(tmp_path):
    assert "rendition" not in render(found_of(tmp_path / "r"))


def test_figures_when_a_window_is_asked_for_are_of_it(tmp_path):
    folder = lay(tmp_path / "r", {"sessions": [session(number) for number in range(60)]})
    first, last = session(10)["closed_at"], session(20)["closed_at"]
    found = gather.gather(gather.Tables(RecordPlace(str(folder)), since=first, until=last), "e", {})
    assert found.totals["connections"] == 10


def test_jobs_when_summed_up_are_those_of_the_runner():
    from flowctl.analyze.run import JOBS as RUN

    assert set(JOBS) <= set(RUN)
    assert {top.job for top in gather.TOPS.values()} <= set(RUN)


def test_crowd_when_streams_are_many_has_the_largest_and_all_others(tmp_path):
    rows = [
        minute(at, stream=f"s{number}", viewers=10.0 + number)
        for number in range(9)
        for at in range(0, 4, 1 + number % 2)
    ]
    tables = {
        "fleet_streams": rows,
        "experience": [felt("stream", f"live/s{number}", 90 - number) for number in range(9)],
    }
    found = found_of(tmp_path / "r", tables, {})
    assert list(found.streams) == [*(f"live/s{number}" for number in range(7)), "all others"]
    assert found.streams["live/s1"] == [11.0, 0.0, 11.0, 0.0]
    assert found.streams["all others"] == [35.0, 18.0, 35.0, 18.0]
    assert [sum(each) for each in zip(*found.streams.values(), strict=True)] == [
        row["viewers"] for row in found.moments
    ]


def test_crowd_when_records_begin_and_end_within_minutes_is_of_the_part_that_was_watched(tmp_path):
    ends = {0: (42.0, 60.0), 1: (0.0, 60.0), 2: (0.0, 12.0)}
    rows = [
        minute(at, stream=name, viewers=most * (last - first) / 60, first_s=first, last_s=last)
        for at, (first, last) in ends.items()
        for name, most in (("s0", 50.0), ("s1", 8.0))
    ]
    found = found_of(tmp_path / "r", {"fleet_streams": [*rows, minute(5, viewers=7.0)]}, {})
    assert [row["viewers"] for row in found.moments] == pytest.approx([58.0, 58.0, 58.0, 7.0])
    said = evidence.crowd(found).description
    assert ": 58, the mean of 60.0 s: of each minute, of the part from its first viewer to its last." in said


def test_crowd_when_most_minutes_had_no_viewers_is_the_mean_over_all_of_them(tmp_path):
    rows = [minute(at, stream="s0", viewers=100.0) for at in (0, 2000)]
    found = found_of(tmp_path / "r", {"fleet_streams": rows}, {})
    first, last = found.moments
    assert first["length_s"] > 60
    assert first["viewers"] == pytest.approx(100 * 60 / first["length_s"])
    assert last["viewers"] <= 100
    assert found.streams["all others"] == pytest.approx([row["viewers"] for row in found.moments], abs=0.01)


@pytest.mark.parametrize(("still", "said"), [(3, True), (0, False)])
def test_page_when_viewers_are_open_says_where_their_figures_end(tmp_path, still, said):
    found = found_of(tmp_path / "r", jobs=notes(sessions={"state": "done", "summary": {"open": still}}))
    assert ("3 connections still open: the time watched goes on until" in Page(render(found)).words) is said


def test_curve_of_delays_when_a_target_was_in_force_marks_it(tmp_path):
    rows = [session(number, target_delay_ms=1500.0) for number in range(30)]
    found = found_of(tmp_path / "r", {"sessions": rows, "experience": [felt("all", "all", 30)]}, {})
    assert evidence.delays(found).plot.marks == [("x", 1500.0, "target 1.5 s")]
    assert evidence.delays(found_of(tmp_path / "none", {"sessions": [session(1)]}, {})).plot.marks == ()


def test_answers_when_there_is_something_to_do_have_a_cause_and_else_a_question():
    about = {rule.kind: {item.about for item in RULES if item.kind == rule.kind} for rule in RULES}
    assert about["act"] <= {"calls", *(name for of, _ in job.CAUSES.values() for name in of)}
    assert about["fine"] | about["unknown"] <= job._ASKED.keys()


def test_causes_when_nobody_is_named_have_the_advice_where_most_suffer(tmp_path):
    rows = [session(number, blame="publisher_burst" if number % 3 else "viewer_link") for number in range(30)]
    found = found_of(tmp_path / "r", {"sessions": rows, "experience": [felt("all", "all", 30, 30)]}, {})
    said = [Advice(about, "act", about) for about in ("network", "calls", "bans")]
    assert [(cause, behind, [item.about for item in advice]) for cause, behind, advice in job._causes(found, said)] == [
        ("Streams that come to us badly", "behind 20 of 30 viewers in trouble", ["calls"]),
        ("Viewers' own lines", "behind 10 of 30 viewers in trouble", ["network"]),
        ("Peers that mean harm", "", ["bans"]),
    ]
