"""What a live server records: every event with its figures, samples that add up, and no secret anywhere."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import json
import re
from dataclasses import replace

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_kit import disposable
from recorded_kit import RecordedWorld, audio, config, inter, key, totals
from telemetry_kit import read

from flowctl.core.connecting.host import ConnectionHost
from flowctl.core.flow.counts import Counts, total
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import Cause, MessageClass, SendState, StateChange
from flowctl.core.loop.sockets import LineFigures
from flowctl.core.sending.figures import Account
from flowctl.live import Level, LiveServer, Role
from flowctl.live.access.request import UNDECIDED, Question, Refusal
from flowctl.live.access.rules import StreamAccess
from flowctl.live.config import LiveConfig
from flowctl.live.playing import CONTROL_LANE
from flowctl.live.records import recording
from flowctl.live.records.recording import Recording
from flowctl.live.rows import connection_in_full
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.telemetry.options import Addresses, EventsOptions, RecordedStreams
from flowctl.records.telemetry.schema import CLASS_NAMES, FLOW_CLOSES, RECORDED
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.messages import Acknowledgement, encode_control
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import Message

PLAIN = {"streams": RecordedStreams.PLAIN}
LINE = LineFigures(0, 0, 3, 0, 700, 900, 70_000, 0)
"""What the kernel says of a line, scripted: the sockets of these worlds have none."""
CLOSES = tuple(name for name in FLOW_CLOSES.names if name not in {"node", "seq"})


def names(world, conn_id=None) -> list[str]:
    return [item["event"] for item in world.told() if conn_id in {None, item["conn_id"]}]


def stream_some(world, publisher, frames=10, size=1000) -> None:
    """Publish a key frame and some others, 40 ms apart."""
    for number in range(frames):
        publisher.video(number * 40, key(b"k", size) if not number else inter(b"i", size))
        publisher.audio(number * 40, audio(b"a"))
        world.run(0.04)


def test_connection_when_it_plays_and_leaves_is_told_from_open_to_close(tmp_path):
    world = RecordedWorld(tmp_path, record=PLAIN)
    publisher = world.publisher()
    player = world.player()
    conn_id = world.events.conn_id(player.connection.number)
    stream_some(world, publisher)
    player.leave()
    told = [item for item in world.told() if item["conn_id"] == conn_id]
    assert [item["event"] for item in told] == [
        "conn_opened",
        "handshake_done",
        "command",
        "command",
        "play_started",
        "conn_closed",
    ]
    assert [item["reason"] for item in told if item["event"] == "command"] == ["connect", "play"]
    assert {item["peer_ip"] for item in told} == {"192.0.2.1"}
    assert [item["role"] for item in told][-1] == "play"
    assert (told[-1]["app"], told[-1]["stream"]) == ("live", "room")
    (closed,) = world.closes()
    assert told[-1]["reason"] == closed["reason"] == CloseReason.PEER_CLOSED.value
    assert told[-1]["state_from"] == "READY"
    assert told[-1]["state_ms"] == pytest.approx(closed["duration_s"] * 1000, abs=1)
    assert (closed["conn_id"], closed["role"], closed["stream"], closed["events_count"]) == (conn_id, "play", "room", 0)
    assert closed["time_ready_ms"] == pytest.approx(closed["duration_s"] * 1000, abs=1)
    assert closed["opened_at"] == told[0]["ts"]
    assert closed["ts"] == told[-1]["ts"]
    assert [closed["handshake_ms"], closed["startup_ms"]] == [told[1]["value"], told[4]["value"]]
    assert closed["handshake_ms"] <= closed["asked_ms"] <= closed["startup_ms"]
    assert closed["agent"] == "FMLE/3.0 (compatible; flowctl)"
    assert (closed["sent_messages_inter"], closed["pictures_wanted"], closed["pictures_sent"]) == (9, 10, 10)
    assert closed["sent_bytes"] == player.connection.sender.statistics().bytes_sent
    started = next(item for item in world.told("publish_started"))
    assert (started["role"], started["stream"]) == ("publish", "room")


def test_player_when_it_waits_is_told_to_start_with_its_publisher(tmp_path):
    world = RecordedWorld(tmp_path)
    world.player()
    world.run(1.0)
    assert world.told("play_started") == []
    publisher = world.publisher()
    world.run(1.0)
    (started,) = world.told("play_started")
    assert started["value"] >= 1000
    publisher.leave()
    world.run(5.0)
    world.publisher()
    assert len(world.told("play_started")) == 1


def test_open_when_it_waits_is_told_of_and_again_when_media_begins(tmp_path):
    world = RecordedWorld(tmp_path)
    player = world.player()
    conn_id = world.events.conn_id(player.connection.number)
    rows = []
    for second in range(45):
        world.run(1.0)
        if second == 30:
            publisher = world.publisher()
        if second >= 30:
            publisher.audio(second * 1000, audio(b"a"))
        rows += [(second, row["startup_ms"]) for row in world.opens() if row["conn_id"] == conn_id]
    assert [startup_ms is None for _, startup_ms in rows] == [True, False]
    soon = world.player()
    told = [row for _ in range(13) for row in (world.run(1.0), world.opens())[1]]
    assert [row["conn_id"] for row in told].count(world.events.conn_id(soon.connection.number)) == 1
    assert 9 <= rows[0][0] <= 11
    assert 39 <= rows[1][0] <= 42


def slow_viewer(world, seconds=12.0, size=4000):
    """Let a player stop reading while a stream goes on, and read again at the end."""
    publisher, player = world.publisher(), world.player()
    stream_some(world, publisher, 5)
    player.wire.room = 0
    for number in range(int(seconds / 0.1)):
        publisher.video(1000 + number * 100, key(b"k", size) if number % 10 == 0 else inter(b"i", size))
        world.run(0.1)
        if player.ended:
            break
    return publisher, player


def test_viewer_when_slow_has_every_edge_with_cause_and_time(tmp_path):
    world = RecordedWorld(tmp_path, limits=Limits.parse("40k,100,0", "4M,4000,0"))
    publisher, player = slow_viewer(world, 6.0)
    player.wire.room = None
    stream_some(world, publisher, 30)
    world.run(3.0)
    player.leave()
    conn_id = world.events.conn_id(player.connection.number)
    told = [item for item in world.told() if item["conn_id"] == conn_id]
    edges = [item for item in told if item["event"] == "state_changed"]
    assert len(edges) >= 2
    assert edges[0]["state_from"] == "READY"
    for before, after in itertools.pairwise(edges):
        assert after["state_from"] == before["state_to"]
    soft = next(item for item in edges if item["state_to"] == "SOFT_LIMIT")
    assert (soft["axis"], soft["limit"]) == ("bytes", 40 * 1024)
    assert soft["value"] >= soft["limit"]
    assert soft["queued_messages"] is not None
    closed = told[-1]
    (row,) = [item for item in world.closes() if item["conn_id"] == conn_id]
    whole_ms = sum(item["state_ms"] for item in edges) + closed["state_ms"]
    assert whole_ms == pytest.approx(row["duration_s"] * 1000, abs=2)
    for name, state in (("ready", "READY"), ("overloaded", "OVERLOADED"), ("soft", "SOFT_LIMIT")):
        of_state = [item["state_ms"] for item in (*edges, closed) if item["state_from"] == state]
        assert row[f"time_{name}_ms"] == pytest.approx(sum(of_state), abs=2)
    back = [item["value"] for item in edges if item["state_to"] == "READY"]
    assert [row["recoveries"], row["recover_ms"], row["recover_max_ms"]] == [len(back), sum(back), max(back)]
    assert row["episodes_soft"] == sum(item["state_to"] == "SOFT_LIMIT" for item in edges)
    assert [row["input_pauses"], row["edges_missed"]] == [names(world, conn_id).count("input_paused"), 0]
    assert row["input_paused_ms"] == sum(item["value"] for item in told if item["event"] == "input_resumed")
    assert row["events_count"] == sum(item["event"] in RECORDED for item in told)
    assert row["unrecovered_ms"] is None
    assert row["dropped_by_thinned"] + row["dropped_by_late"] > 0
    for name in CLASS_NAMES:
        assert row[f"accepted_messages_{name}"] == row[f"sent_messages_{name}"] + row[f"dropped_messages_{name}"]
    assert {"input_paused", "input_resumed", "dropped"} <= set(names(world, conn_id))
    dropped = [item for item in told if item["event"] == "dropped"]
    by_class = json.loads(dropped[0]["detail"])["dropped"]
    assert sum(sum(classes.values()) for classes in by_class.values()) == dropped[0]["dropped_messages"]


def test_pictures_when_late_are_told_at_once_and_with_their_shares_at_the_end(tmp_path):
    world = RecordedWorld(tmp_path)
    world.publisher()
    player = world.player()
    record, account = world.events.open[player.connection.number], Account()
    record.ledger_entry(LedgerEntry(LedgerKind.LATE, world.clock(), "pictures would be late"), account)
    lost = {DropReason.LATE: Counts((0, 0, 0, 7, 0, 0, 0), (0, 0, 0, 700, 0, 0, 0))}
    shares = {"picture_share": 0.77, "line_share": 0.98, "delay_max_ms": 912.0}
    record.ledger_entry(LedgerEntry(LedgerKind.DROPS, world.clock(), "", dropped=lost, **shares), account)
    late, dropped = [item for item in world.told() if item["event"] in ("pictures_late", "dropped")]
    assert late["reason"] == "pictures would be late"
    assert dropped["reason"] == "late"
    detail = json.loads(dropped["detail"])
    assert {name: detail[name] for name in shares} == shares


def test_viewers_when_their_lines_are_short_are_no_fault_of_a_thread_that_was_busy(tmp_path, monkeypatch):
    world = RecordedWorld(tmp_path, limits=Limits.parse("4M,4000,0", "8M,8000,0"))
    publisher, players = world.publisher(), {}
    monkeypatch.setattr(type(world.group), "strained", lambda _: True)
    for number in range(400):
        if number == 100:
            players = {share: world.player() for share in (27, 33, 40, 46, 53, 60, 66, 72, 79, 85)}
            for player in players.values():
                player.reads, player.wire.room = False, 8000
        for share, player in players.items():
            del player.wire.down[: 40 * share]
        publisher.video(number * 100, key(b"k", 4000) if number % 50 == 0 else inter(b"i", 4000))
        world.run(0.04)
        if number % 25 == 24:
            world.sample()
    for player in players.values():
        why = player.connection.why()
        assert why.startswith("READY") or "to blame: peer's line" in why
        player.wire.room = None
        player.leave()
        row = world.close_of(player)
        assert row["lag_ms"] > 5000
        assert (row["lag_server_ms"], row["lag_burst_ms"]) == (0, 0)


def test_viewer_when_slow_has_what_samples_saw_in_its_close(tmp_path):
    world = RecordedWorld(tmp_path, limits=Limits.parse("4M,4000,0", "8M,8000,0"))
    publisher, player = world.publisher(), world.player()
    healthy = world.player(address="192.0.2.77")
    player.wire.room = 0
    for number in range(100):
        publisher.video(number * 100, key(b"k", 4000) if number % 10 == 0 else inter(b"i", 4000))
        world.run(0.1)
        if number % 10 == 9:
            world.sample()
    player.wire.room = None
    stream_some(world, publisher, 30)
    for peer in (player, healthy):
        peer.leave()
    slow, well = world.close_of(player), world.close_of(healthy)
    assert slow["stall_count"] == 1
    same_story([item for item in world.sampled if item["conn_id"] == slow["conn_id"]], slow)
    assert slow["stall_ms"] > 5000
    assert slow["delay_max_ms"] > slow["delay_p50_ms"] > 1000
    assert slow["target_delay_ms"] == 1500.0
    assert 5000 < slow["late_ms"] <= slow["sampled_ms"]
    assert slow["lag_ms"] > 0
    assert slow["trouble_ms"] >= slow["lag_ms"]
    names = ("delay_p99_ms", "delay_max_ms", "late_ms", "stall_count", "trouble_ms", "line_bytes", "lag_ms")
    assert [well[name] for name in names] == [0] * len(names)
    assert well["sampled_ms"] == pytest.approx(well["duration_s"] * 1000, abs=5)
    assert well["ingest_bytes"] is None


def test_publisher_when_it_pauses_has_its_gap_in_its_close(tmp_path):
    world = RecordedWorld(tmp_path)
    publisher = world.publisher()
    for number in range(50):
        publisher.video(number * 40, inter(b"i", 1000) if number % 25 else key(b"k", 1000))
        publisher.audio(number * 40, audio(b"a"))
        world.run(0.04 if number != 30 else 2.04)
    publisher.leave()
    row = world.close_of(publisher)
    counts = [row[f"ingest_{name}"] for name in ("pictures", "key_frames", "audio")]
    assert counts == [50, 2, 50]
    assert (row["key_interval_ms"], row["key_interval_max_ms"]) == (1000.0, 1000.0)
    assert row["gap_count"] == 1
    assert row["gap_ms"] == row["gap_max_ms"] == pytest.approx(2040, abs=90)
    assert row["jitter_ms"] > 0  # 2 s of one picture of fifty
    assert row["ingest_bytes"] > 50_000
    assert (row["role"], row["refusal"], row["sent_messages_key"]) == ("publish", None, 0)


def test_close_when_a_player_said_what_it_has_read_tells_it(tmp_path):
    world = RecordedWorld(tmp_path)
    publisher, player, silent = world.publisher(), world.player(), world.player()
    stream_some(world, publisher, 5)
    player.send(player.session.send_message(encode_control(Acknowledgement(4711))))
    player.leave()
    silent.leave()
    assert [world.close_of(peer)["read_bytes"] for peer in (player, silent)] == [4711, None]


def test_open_when_it_plays_for_long_is_told_of_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(ConnectionHost, "line_figures", lambda _: LINE)
    world = RecordedWorld(tmp_path)
    publisher = world.publisher()
    player = world.player()
    gone = world.player(address="192.0.2.50")
    world.connect("192.0.2.51")  # asks for nothing
    stream_some(world, publisher, 5)
    gone.leave()
    assert world.opens() == []
    for _ in range(12):
        stream_some(world, publisher, 25)
    rows = {item["conn_id"]: item for item in world.opens()}
    conn_ids = [world.events.conn_id(peer.connection.number) for peer in (publisher, player)]
    assert set(rows) == set(conn_ids)
    row = rows[conn_ids[1]]
    assert (row["reason"], row["role"], row["startup_ms"] is not None) == (None, "play", True)
    assert row["sent_messages_inter"] == player.connection.sender.statistics().sent.of(MessageClass.INTER)
    assert row["pictures_wanted"] == row["pictures_sent"]
    assert (row["rtt_us"], row["probes"]) == (900, 0)
    assert rows[conn_ids[0]]["ingest_pictures"] > 0
    assert world.opens() == []
    for _ in range(310):
        publisher.video(0, inter(b"i", 100))
        world.run(1.0)
    again = world.opens()
    assert {item["conn_id"] for item in again} == set(conn_ids)
    assert {item["duration_s"] > 300 for item in again} == {True}
    for peer in (publisher, player):
        peer.leave()
    world.run(400.0)
    assert world.opens() == []
    assert not world.sampler._begun


def test_request_when_refused_says_why_in_a_word(tmp_path):
    world = RecordedWorld(tmp_path, config(publishers_per_address=2, players_may_wait=False))
    world.publisher("live/one")
    taken = world.connect("192.0.2.20").publish("live/one")
    nothing = world.connect("192.0.2.21").play("live/two")
    world.publisher("live/three", address="192.0.2.22")
    world.publisher("live/four", address="192.0.2.22")
    many = world.connect("192.0.2.22").publish("live/five")
    well = world.connect("192.0.2.23").play("live/one")
    world.run(0.5)
    for peer in (taken, nothing, many, well):
        if not peer.ended:
            peer.leave()
    found = {item["peer_ip"]: item for item in world.closes()}
    words = [world.close_of(peer)["refusal"] for peer in (taken, nothing, many, well)]
    assert words == ["name taken", "no stream", "limit", None]
    assert all(item["asked_ms"] is not None for item in found.values())
    assert [found[f"192.0.2.{number}"]["startup_ms"] is None for number in (20, 21, 23)] == [True, True, False]
    assert found["192.0.2.22"]["limit_hits"] == 1


class Undecided:
    """Hooks of an application that decide who plays, when the test says so."""

    decide_s = 1.0
    tap = None
    told_kinds = frozenset()

    def __init__(self) -> None:
        self.decides = {"connect": False, "publish": False, "play": True}
        self.asked = {}

    def ask(self, request, answer):
        return self.asked.setdefault(request.peer[0], Question(answer))

    def check_news(self, request) -> None:
        pass

    def note_begin(self, request) -> None:
        pass

    def note_end(self, request, why) -> None:
        pass


def test_request_when_settings_or_a_hook_refuse_it_says_which(tmp_path):
    here = (ipaddress.ip_network("192.0.2.30"),)
    world = RecordedWorld(tmp_path, config(access=StreamAccess(deny_play=here)))
    hooks = world.hub.gate.hooks = Undecided()
    world.publisher()
    words = {"192.0.2.30": "access", "192.0.2.31": "hook", "192.0.2.32": "undecided", "192.0.2.33": None}
    players = {address: world.connect(address).play() for address in words}
    assert set(hooks.asked) == set(words) - {"192.0.2.30"}
    hooks.asked["192.0.2.31"].tell(Refusal("You may not."))
    hooks.asked["192.0.2.32"].tell(UNDECIDED)
    hooks.asked["192.0.2.33"].tell(None)
    world.run(0.5)
    for peer in players.values():
        if not peer.ended:
            peer.leave()
    assert {address: world.close_of(peer)["refusal"] for address, peer in players.items()} == words
    assert {address: world.close_of(peer)["startup_ms"] is None for address, peer in players.items()} == {
        address: word is not None for address, word in words.items()
    }


def test_request_when_the_connection_plays_already_says_so(tmp_path):
    world = RecordedWorld(tmp_path)
    publisher, player = world.publisher(), world.player()
    world.publisher("live/other", address="192.0.2.60")
    stream_some(world, publisher)
    player.command("createStream", None, stream_id=0, transaction_id=9)
    player.command("play", None, "other", stream_id=2)
    assert commands.PLAY_FAILED in player.codes
    player.leave()
    row = world.close_of(player)
    assert (row["refusal"], row["app"], row["sent_messages_inter"]) == ("plays already", "live", 9)


def test_viewer_when_slow_has_lost_what_it_missed_and_not_what_it_did_not_want(tmp_path):
    world = RecordedWorld(tmp_path, limits=Limits.parse("64k,0,0", "4M,0,0", "32k,0,0"))
    publisher, player = world.publisher(), world.player()
    healthy, quiet = world.player(address="192.0.2.77"), world.player(address="192.0.2.78")
    quiet.command("receiveAudio", None, False, stream_id=1)
    blind = world.player(address="192.0.2.79")
    blind.command("receiveVideo", None, False, stream_id=1)
    player.wire.room = 0
    for number in range(60):
        picture = (
            key(b"k", 4000) if number % 20 == 0 else disposable(b"d" * 4000) if number % 4 == 1 else inter(b"i", 4000)
        )
        publisher.video(number * 40, picture)
        publisher.audio(number * 40, audio(b"a"))
        world.run(0.04)
    player.wire.room = None
    world.run(1.0)
    for peer in (player, healthy, quiet, blind):
        peer.leave()
    slow, well, deaf, dark = map(world.close_of, (player, healthy, quiet, blind))
    reasons = {name for name in DropReason.__members__ if slow[f"dropped_by_{name.lower()}"]}
    assert reasons <= {"REFUSED", "LATE", "THINNED", "KEY_WAIT", "HELD", "RETURNED"}  # all of them because it was slow
    needed = sum(slow[f"dropped_messages_{name}"] for name in ("key", "inter", "audio"))
    assert slow["lost_messages"] == needed > 0
    assert slow["dropped_messages_disposable"] > 0
    assert (deaf["dropped_messages_audio"], dark["dropped_messages_key"]) == (60, 3)
    assert [row["lost_messages"] for row in (well, deaf, dark)] == [0, 0, 0]
    assert [row["pictures_wanted"] - row["pictures_sent"] for row in (well, deaf, dark)] == [0, 0, 0]


def test_viewer_when_cut_at_its_hard_limit_says_so(tmp_path):
    world = RecordedWorld(tmp_path, limits=Limits.parse("8k,0,0", "12k,0,0"))
    _, player = slow_viewer(world, size=20_000)
    closed = next(item for item in world.told("conn_closed"))
    assert player.ended[0] is CloseReason.HARD_LIMIT
    assert (closed["reason"], closed["state_from"]) == ("hard limit", "HARD_LIMIT")
    (row,) = world.closes()
    assert (row["reason"], row["episodes_hard"], row["recoveries"]) == ("hard limit", 1, 0)
    assert row["unrecovered_ms"] is not None
    assert row["unrecovered_bytes"] == 0


def test_limits_when_hit_are_the_same_in_records_and_hub(tmp_path):
    world = RecordedWorld(tmp_path, config(wire={"messages_per_second": 50}, publishers_per_address=1))
    world.publisher("live/one").command("releaseStream", None, "x")
    world.connect().publish("live/two")  # one too many of the address
    flooder = world.publisher("live/three", address="192.0.2.9")
    flooder.send(b"".join(flooder.session.send_tag(8, 0, audio()) for _ in range(400)))
    world.run(1.0)
    loud = world.connect("192.0.2.10").publish("live/four")
    loud.message(Message(type_id=1, timestamp=0, payload=(7).to_bytes(4, "big"), msid=0, csid=2))
    world.run(7.0)
    world.connect("192.0.2.11")  # says nothing: the time of its handshake
    world.run(7.0)
    counted = world.hub.limits_hit
    hits = world.told("limit_hit")
    assert {name: sum(item["axis"] == name for item in hits) for name in {item["axis"] for item in hits}} == counted
    assert {"publishers_per_address", "messages_per_second", "chunk_size_min_bytes", "handshake_time_s"} <= set(counted)
    assert all(item["value"] is not None and item["limit"] is not None for item in hits)
    timeouts = [item for item in world.told("conn_closed") if item["reason"] == "handshake timeout"]
    assert [item["axis"] for item in timeouts] == ["handshake_time_s"]


def test_peer_when_it_floods_the_control_lane_is_a_limit_hit(tmp_path):
    world = RecordedWorld(tmp_path)
    player = world.player()
    player.wire.room = 0
    for _ in range(1100):
        player.live.connection.sender.send(b"y" * 300, MessageClass.CONTROL)
    world.run(1.0)
    assert world.told("limit_hit")[-1]["axis"] == CONTROL_LANE
    assert world.hub.limits_hit == {CONTROL_LANE: 1}


def names_of_parts(world):
    """Publish and play names with a slash, with the key in each place where a client may put it."""
    for url in (
        RtmpUrl(host="h", app="live", stream="k3y-of-publisher/720p"),
        RtmpUrl(host="h", app="live/k3y-of-publisher", stream="360p"),  # as ffmpeg splits it
        RtmpUrl(host="h", stream="k3y-of-publisher/240p"),  # no application at connect
    ):
        for peer, name in ((world.connect("192.0.2.8"), "publish"), (world.connect("192.0.2.9"), "play")):
            getattr(peer.session, name)()
            peer.session.connect(url)
            world.run()


SECRETS = ("t0ken-in-query", "k3y-of-publisher", "pa55word", "s3cret-app-query", "s3cret-url")


def test_secrets_when_planted_everywhere_are_in_no_record(tmp_path, monkeypatch):
    flights = []  # under which names flights are recorded
    monkeypatch.setattr(recording, "name_flight", lambda sender, who: flights.append(who))
    world = RecordedWorld(tmp_path, limits=Limits.parse("20k,0,0", "60k,0,0"))
    publisher = world.connect()
    publisher.session.publish(kind="live")
    publisher._connect("live/k3y-of-publisher?token=t0ken-in-query&auth=pa55word")
    publisher.headers()
    player = world.connect("192.0.2.5")
    player.session.play()
    player._connect("live/k3y-of-publisher?token=t0ken-in-query")
    world.connect("192.0.2.6").publish("live/k3y-of-publisher")  # refused: the words of the refusal name the stream
    other = world.connect("192.0.2.7").publish("live/other?s3cret-app-query=1")
    other.message(commands.command("connect", 1, {"app": "a", "tcUrl": "rtmp://u:s3cret-url@h/a"}, stream_id=0))
    other.command("s3cret-url-command", None, "pa55word")
    names_of_parts(world)
    stream_some(world, publisher, 5)
    player.wire.room = 0
    stream_some(world, publisher, 40, 4000)
    world.sample()
    publisher.vanish()
    world.run(1.0)
    world.sample()
    told = world.told()
    assert {"conn_closed", "publish_started", "play_started", "state_changed"} <= {item["event"] for item in told}
    assert {"live"} <= {item["app"] for item in told} <= {"live", "", None}
    assert len(flights) >= 7
    text = json.dumps([told, world.closes(), world.sampled, flights], default=str)
    assert len(world.closed) >= 1
    assert [secret for secret in SECRETS if secret in text] == []


def test_addresses_when_hashed_stand_in_no_record(tmp_path):
    world = RecordedWorld(tmp_path, record={"addresses": Addresses.HASHED})
    world.publisher(address="203.0.113.9")
    world.sample()
    world.events.conn_refused(world.clock(), ("203.0.113.9", 1), "connections", 2, 1)
    text = json.dumps([world.told(), world.sampled], default=str)
    assert "203.0.113" not in text
    assert len({item["peer_ip"] for item in [*world.told(), *world.sampled]}) == 1


def test_refusals_when_a_flood_are_summed_up(tmp_path):
    world = RecordedWorld(tmp_path)
    for number in range(500):
        world.events.conn_refused(1.0 + number / 1000, ("203.0.113.9", number), "connections", 2, 1)
    world.events.conn_refused(2.5, ("203.0.113.9", 1), "connections", 2, 1)
    world.events.conn_refused(2.5, ("203.0.113.10", 1), "banned", 0, 0)
    world.events.tell_refused()
    told = world.told("conn_refused")
    assert len(told) == 22
    counts = [item["count"] or 1 for item in told]
    assert sum(counts) == 502
    assert {item["reason"] for item in told} == {"connections", "banned"}


@pytest.mark.parametrize("addresses", [["203.0.113.9"], [f"2001:db8::{number:x}" for number in range(1, 51)]])
def test_refusals_when_a_flood_of_one_network_ends_are_told_by_the_recorder(tmp_path, addresses):
    world = RecordedWorld(tmp_path)
    for number in range(50):
        host = addresses[number % len(addresses)]
        world.events.conn_refused(1.0 + number / 1000, (host, number), "connections", 2 + number, 1)
    world.recorder.turn()
    world.recorder._end()
    told = [item for item in read(tmp_path) if item["event"] == "conn_refused"]
    assert [item["count"] or 1 for item in told] == [1] * 20 + [30]
    assert int(told[-1]["ts"].timestamp() * 1e6) == world.events.wall.us(1.049)
    assert (told[-1]["peer_ip"], told[-1]["value"], told[-1]["limit"]) == (addresses[-1], 51.0, 1.0)


def test_refusals_when_they_have_ended_are_forgotten(tmp_path):
    world = RecordedWorld(tmp_path)
    for number in range(30):
        world.events.conn_refused(1.0, ("203.0.113.9", number), "connections", 2, 1)
        world.events.tell_refused()
    assert len(world.told("conn_refused")) == 20 + 10
    assert len(world.events._refused) == 1
    world.events.tell_refused()
    assert len(world.events._refused) == 0


@pytest.mark.parametrize("disk", ["full", "fine"])
def test_records_when_not_written_at_the_stop_are_counted_and_said(tmp_path, monkeypatch, disk):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    world = RecordedWorld(tmp_path / "other")
    options = EventsOptions(folder=str(tmp_path), node="n1", key=b"k" * 16)
    recording = Recording(options, world.hub.fanouts, list, world.clock)
    if disk == "full":
        monkeypatch.setattr(recording.recorder._files, "write", full)
    with structlog.testing.capture_logs() as logs:
        recording.start(LiveConfig())
        recording.stop(7, 20.0)
    left = [(line["rows"], line["why"]) for line in logs if line["event"] == "records not written at the stop"]
    (last,) = [line for line in logs if line["event"] == "records written"]
    if disk == "full":
        assert left == [(2, "OSError: No space left on device")]
        assert (last["rows"], last["lost"]) == (0, 2)
    else:
        assert left == []
        assert (last["rows"], last["lost"]) == (2, 0)


def test_start_when_levels_differ_for_viewers_says_them(tmp_path, monkeypatch):
    levels = (
        Level(application="talk", values={"policy": "audio-first", "limits.target_delay_ms": 800}),
        Level(stream="cams/s3cret", role=Role.VIEWER, values={"limits.target_delay_ms": None}),
        Level(role=Role.PUBLISHER, values={"limits.target_delay_ms": 0}),
        Level(role=Role.VIEWER, values={"policy": "pictures-first"}),
    )
    server = LiveServer(LiveConfig(levels=levels, events=EventsOptions(folder=str(tmp_path))))
    said = []
    monkeypatch.setattr(server.recording.events, "server_started", lambda now, detail: said.append(detail))
    with server:
        pass
    found = said[0]["levels"]
    assert re.fullmatch(r"talk/\*=800ms audio-first; cams/h:[0-9a-f]{16}=auto; \*=pictures-first", found)


@pytest.mark.parametrize(("mode", "cidr"), [(Addresses.HASHED, None), (Addresses.TRUNCATED, "203.0.113.0/24")])
def test_bans_when_addresses_are_hidden_do_not_show_them(tmp_path, mode, cidr):
    """The network of a ban is stored as addresses are: a ban of one address would tell it."""
    world = RecordedWorld(tmp_path, record={"addresses": mode})
    detail = {"cidr": "203.0.113.9/32", "score": 9.0, "expires": None}
    world.events.banned(1.0, 1, ("203.0.113.9", 5), detail)
    world.events.config_changed(1.0, "ban", detail)
    for name in ("banned", "config_changed"):
        (told,) = world.told(name)
        assert "203.0.113.9" not in json.dumps(told, default=str)
        assert json.loads(told["detail"]).get("cidr") == cidr
        assert json.loads(told["detail"])["score"] == 9.0


def test_edges_when_some_were_not_seen_are_counted_in_the_close(tmp_path):
    world = RecordedWorld(tmp_path)
    player = world.player()
    record = world.events.open[player.connection.number]
    change = StateChange(
        sequence=3, old=SendState.READY, new=SendState.SOFT_LIMIT, axis=None, value=1, limit=1, cause=Cause.TICK, at=2.0
    )
    record.ledger_entry(LedgerEntry(LedgerKind.STATE, 2.0, "", change=change), Account())
    statistics = replace(player.connection.sender.statistics(), transitions=4)
    record.closed(3.0, CloseReason.PROTOCOL_ERROR, "bad-chunk: what the peer sent", statistics, "chunk_streams", "")
    row = dict(zip(CLOSES, record.whole(3.0, statistics, {}), strict=True))
    assert (row["edges_missed"], row["episodes_soft"]) == (3, 1)
    assert (row["reason"], row["code"], row["limit_name"]) == ("protocol error", "bad-chunk", "chunk_streams")
    assert json.loads(world.told("state_changed")[0]["detail"]) == {"edges_missed": 2}


# -- samples


def test_samples_when_all_keep_up_share_everything_but_identity(tmp_path):
    world = RecordedWorld(tmp_path, record=PLAIN)
    publisher = world.publisher()
    players = [world.player(address=f"192.0.2.{number + 10}") for number in range(20)]
    stream_some(world, publisher, 5)
    for _ in range(3):
        world.sample()
        stream_some(world, publisher, 5)
    rows = [row for row in world.sample() if row["role"] == "play"]
    assert len(rows) == 20
    assert {row["peer_ip"] for row in rows} == {player.connection.peer[0] for player in players}
    assert {(row["sent_messages_inter"], row["sent_messages_key"], row["sent_messages_audio"]) for row in rows} == {
        (4, 1, 5)
    }
    assert {(row["state"], row["picture_share"], row["stream"]) for row in rows} == {("READY", 1.0, "room")}
    assert len({row["interval_ms"] for row in rows}) == 1
    assert any(seen.round == world.sampler.rounds for seen in world.sampler._squads.values())


def test_sample_when_a_viewer_is_slow_shows_its_queue_and_state(tmp_path, monkeypatch):
    monkeypatch.setattr(ConnectionHost, "line_figures", lambda _: LINE)
    world = RecordedWorld(tmp_path, limits=Limits.parse("40k,100,0", "4M,4000,0"))
    _, player = slow_viewer(world, 3.0)
    conn_id = world.events.conn_id(player.connection.number)
    (row,) = [row for row in world.sample() if row["conn_id"] == conn_id]
    assert row["state"] == player.state.name != "READY"
    assert row["queued_bytes"] > 0
    assert row["stalled_ms"] > 1000
    assert row["input_paused"] == player.connection.receiver.paused
    assert {name: row[name] for name in LINE._fields} == LINE._asdict()
    told = world.told("sample")
    assert len(told) == (row["state"] == "SOFT_LIMIT")
    assert all((item["conn_id"], item["queued_bytes"]) == (conn_id, row["queued_bytes"]) for item in told)
    player.leave()
    monkeypatch.undo()  # closed by now: the kernel knows it no more
    assert {name: world.close_of(player)[name] for name in LINE._fields} == LINE._asdict()


def test_samples_when_turned_off_leave_the_events_of_those_in_trouble(tmp_path):
    world = RecordedWorld(tmp_path, limits=Limits.parse("40k,100,0", "4M,4000,0"), record={"samples": False})
    slow_viewer(world, 3.0)
    assert world.sample() == []
    assert len(world.told("sample")) == 1


OWN = bytes((2, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 0, 1))
"""An Acknowledgement: a message of a viewer's own, which the log of its stream knows nothing of."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 8)),
        st.tuples(st.just("stall"), st.integers(0, 3)),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 3)),
        st.tuples(st.just("own"), st.integers(0, 3)),
        st.tuples(st.just("sample"), st.just(0)),
    ),
    min_size=4,
    max_size=20,
)


def same_accounts(players):
    for player in players:
        account, statistics = player.connection.sender.account(), player.connection.sender.statistics()
        assert account.accepted == statistics.accepted.figures
        assert account.sent == statistics.sent.figures
        assert account.dropped == total(statistics.dropped.values()).figures
        assert account.idle == (not statistics.queued.total_messages)
        for name in ("bytes_sent", "state", "picture_share", "load", "stalled_s", "drain_bytes_per_s"):
            assert getattr(account, name) == getattr(statistics, name)
        open_ms = (player.connection.now() - player.connection.opened_at) * 1000
        assert 0 <= account.delay_ms <= open_ms + 0.001


def same_story(samples, row):
    assert row["samples_count"] == len(samples)
    assert row["sampled_ms"] == pytest.approx(sum(item["interval_ms"] for item in samples), abs=5)
    trouble = [item for item in samples if item["state"] != "READY" or item["picture_share"] < 1]
    assert row["trouble_ms"] == pytest.approx(sum(item["interval_ms"] for item in trouble))
    calm = [item for item in samples if item not in trouble and not item["stalled_ms"]]
    lost = sum(item[f"dropped_messages_{name}"] for item in calm for name in CLASS_NAMES)
    assert row["unforced_drops"] == lost
    stalls = [min(item["stalled_ms"], item["interval_ms"]) for item in samples if (item["stalled_ms"] or 0) >= 500]
    assert row["stall_ms"] == pytest.approx(sum(stalls))
    told = [item for item in samples if (item["viewer_delay_ms"] or 0) >= 60]  # less is the flush that all wait for
    if told:
        assert row["delay_max_ms"] == max(item["viewer_delay_ms"] for item in told)
    else:
        assert row["delay_max_ms"] < 60
    if row["role"] == "play":
        assert row["target_delay_ms"] == 1500.0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_samples_when_summed_up_are_the_totals_whatever_happened(tmp_path, steps):
    world = RecordedWorld(tmp_path, limits=Limits.parse("30k,40,0", "400k,400,0"))
    publisher = world.publisher()
    players = [world.player(address=f"192.0.2.{number + 10}") for number in range(4)]
    clock = 0
    for what, number in steps:
        if what == "publish":
            for frame in range(number):
                clock += 40
                publisher.video(clock, key(b"k", 3000) if clock % 400 == 40 else inter(b"i", 2000))
                world.run(0.02 * (1 + frame % 2))
        elif what == "sample":
            world.sample()
        elif what == "join":
            players.append(world.player(address=f"192.0.2.{number + 30}"))
        else:
            player = players[number % len(players)]
            if player.ended is not None:
                continue
            if what == "own":
                player.connection.sender.send(OWN, MessageClass.CONTROL)
                world.run(0.1)
            elif what == "leave":
                player.leave()
            else:
                player.wire.room = 0 if what == "stall" else None
                world.run(0.06)
        same_accounts(players)
    world.sample()
    for peer in world.peers:
        if peer.ended is None:
            peer.leave()
    world.sample()
    for peer in world.peers:
        sums, expected = world.sums(world.events.conn_id(peer.connection.number)), totals(peer.connection)
        assert {name: sums[name] for name in expected} == expected
    closed = {item["conn_id"]: item for item in world.closes()}
    assert len(closed) == len(world.peers) == len(world.told("conn_closed"))
    for conn_id, row in closed.items():
        sums = world.sums(conn_id)
        assert sums["interval_ms"] == pytest.approx(row["duration_s"] * 1000, abs=5)
        assert {name: sums[name] for name in row if name in sums} == {name: row[name] for name in row if name in sums}
        same_story([item for item in world.sampled if item["conn_id"] == conn_id], row)
    assert len(world.sampler._books) == 0


@pytest.mark.parametrize(
    "agent",
    [
        "FMLE/3.0 rtmp://user:CANARY@example.org/live",
        "FMLE/3.0 (rtmp://example.org/live?key=CANARY)",
        "live?secret=CANARY",
        "rtmp://example.org/live?a=b&token=CANARY&c=d",
    ],
)
def test_agent_when_it_holds_a_secret_shows_it_nowhere(tmp_path, agent):
    world = RecordedWorld(tmp_path, record=PLAIN)
    with structlog.testing.capture_logs() as logs:
        publisher = world.publisher(settings=ClientSessionConfig(flash_version=agent))
        player = world.player(settings=ClientSessionConfig(flash_version=agent))
        stream_some(world, publisher)
        world.sample()
        shown = repr([connection_in_full(peer.connection) for peer in world.peers])
        player.command(f"rtmp://user:CANARY@host/?key=CANARY{agent}", None)
        player.leave()
        publisher.vanish()
        world.run(4)
    shown += repr(world.told()) + repr(world.closes()) + repr(world.sampled) + repr(logs)
    assert "CANARY" not in shown
    assert any(line["event"] == "play started" and line["agent"] for line in logs)


# -- renditions of a set


def test_renditions_when_viewers_follow_a_set_are_in_samples_events_and_the_close(tmp_path):
    """Viewers of one squad differ in the rendition that is told; a switch is an event, and the close has the times."""
    order = ("360", "720")
    world = RecordedWorld(tmp_path, record=PLAIN)
    publisher, plain, player = world.publisher(), world.player(), world.player()
    stream_some(world, publisher, 5)
    connection, began = player.connection, world.clock()
    book = connection.renditions = RenditionBook()
    book.enter(began, "360", "the smallest first", lambda: order)
    for _ in range(3):
        world.sample()
        stream_some(world, publisher, 5)
    of = {row["conn_id"]: row["rendition"] for row in world.sample()}
    assert of[world.events.conn_id(connection.number)] == "360"
    assert of[world.events.conn_id(plain.connection.number)] is None
    assert any(len(seen.crowds) == 2 for seen in world.sampler._squads.values())

    now = world.clock()
    words = book.switch(now, "720", "the line carries 1.5 Mbit/s")
    with structlog.testing.capture_logs() as logged:
        connection.sender.note(LedgerKind.SWITCH, words, duration_s=now - began)
        world.run(1.0)
    (line,) = [line for line in logged if line["event"] == "rendition switched"]
    assert (line["why"], line["connection"]) == ("rendition 360 to 720: the line carries 1.5 Mbit/s", connection.number)
    (event,) = world.told("rendition_switched")
    assert event["reason"] == "rendition 360 to 720: the line carries 1.5 Mbit/s"
    assert event["value"] == pytest.approx((now - began) * 1000)

    player.leave()
    plain.leave()
    row, seconds = world.close_of(player), {"360": round(now - began, 3), "720": 1.0}
    assert json.loads(row["renditions"]) == pytest.approx(seconds, abs=0.01)
    assert list(json.loads(row["renditions"])) == list(seconds)
    assert (row["switches"], row["smaller_ms"]) == (1, pytest.approx((now - began) * 1000))
    assert row["why_smaller"] == "the smallest first"
    assert {world.close_of(plain)[name] for name in ("renditions", "smaller_ms", "why_smaller", "switches")} == {None}
