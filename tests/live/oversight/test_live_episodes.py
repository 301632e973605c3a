"""Log lines of the live server: one per episode, never one per packet, naming peer, stream, cause, value and limit."""

from __future__ import annotations

import pytest
import structlog
from live_kit import AVC_HEADER, World, audio, config, disposable, inter, key

from flowctl.core.flow.counts import NO_COUNTS, Counts
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import Axis, Limits
from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.flow.state import Cause, SendState, StateChange
from flowctl.core.sending.episodes import LINE_SHORT, VIEWER_SLOW, Episode
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.rows import connection_in_full
from flowctl.reasons import CloseReason, DropReason
from flowctl.wire.rtmp.wire import Message

TIGHT = Limits.parse("8KiB,0", "32KiB,0", target_delay_ms=0)
FIELDS = {"stream": "live/a", "peer": "192.0.2.1:1", "connection": 1}


@pytest.fixture
def lines():
    with structlog.testing.capture_logs() as captured:
        yield captured


def named(lines, event):
    return [line for line in lines if line["event"] == event]


class Script:
    """An episode with a hand-made Sender behind it."""

    def __init__(self, words=VIEWER_SLOW) -> None:
        self.dropped = NO_COUNTS
        self.episode = Episode(FIELDS, lambda: "because", lambda: self.dropped, words)
        self.state = SendState.READY

    def edge(self, state, at, *, closed=False) -> None:
        change = StateChange(1, self.state, state, Cause.QUEUED, Axis.BYTES, 9000.0, 8192, at)
        self.state = state
        entry = LedgerEntry(LedgerKind.STATE, at, "queued: bytes 9000, limit 8192", change=change)
        self.episode.note_entry(entry, closed=closed)

    def late(self, at) -> None:
        self.episode.note_entry(LedgerEntry(LedgerKind.LATE, at, "pictures would be late; it takes 160 kB/s"))

    def drop(self, count, at, reason=DropReason.THINNED) -> None:
        lost = Counts((0, 0, 0, count, 0, 0, 0), (0, 0, 0, count * 100, 0, 0, 0))
        self.dropped += lost
        self.episode.note_entry(LedgerEntry(LedgerKind.DROPS, at, "thinned", dropped={reason: lost}))


def test_episode_in_a_shared_stall_is_one_debug_line_and_asks_nobody_why(lines):
    """What a thousand viewers would say at once costs next to nothing: it is said once for all of them."""
    script, asked = Script(), []
    episode = Episode(
        FIELDS, lambda: asked.append(1) or "", lambda: script.dropped, VIEWER_SLOW, lambda: StallSpan(1.0, 6.0)
    )
    script.episode = episode
    script.edge(SendState.OVERLOADED, 1.2)
    for at in range(2, 6):
        script.late(float(at))
        script.drop(3, at + 0.5)
    assert [line["log_level"] for line in named(lines, "viewer slow")] == ["debug"]
    assert not asked


def test_episode_when_viewer_only_blocks_now_and_then_is_a_debug_line(lines):
    script = Script()
    script.edge(SendState.OVERLOADED, 1.0)
    script.edge(SendState.READY, 1.5)
    script.episode.check(3.4)
    assert lines == []
    script.episode.check(3.5)
    assert [(line["event"], line["log_level"], line["worst"]) for line in lines] == [
        ("viewer recovered", "debug", "OVERLOADED")
    ]


def test_episode_when_viewer_is_slow_has_one_line_when_it_gets_worse_and_one_at_the_end(lines):
    script = Script()
    for number in range(50):
        script.edge(SendState.OVERLOADED, number)
        script.edge(SendState.SOFT_LIMIT, number + 0.2)
        script.drop(10, number + 0.3)
        script.edge(SendState.READY, number + 0.4)
        script.episode.check(number + 0.9)
    script.episode.check(60.0)
    script.episode.check(63.0)
    slow, recovered = lines
    assert slow == {
        "event": "viewer slow",
        "log_level": "info",
        **FIELDS,
        "state": "SOFT_LIMIT",
        "cause": "queued: bytes 9000, limit 8192",
        "why": "because",
    }
    assert (recovered["event"], recovered["dropped"], recovered["changes"]) == ("viewer recovered", {"inter": 500}, 150)


def test_episode_when_a_line_of_ours_is_short_is_told_again_each_minute_with_a_hint(lines):
    script = Script(LINE_SHORT)
    script.edge(SendState.OVERLOADED, 1.0)
    assert script.episode.due_at is None
    script.late(2.0)
    assert script.episode.due_at == 62.0
    for second in range(3, 150):
        script.episode.check(second)
    assert [(line["event"], line["hint"]) for line in lines] == [("line short", LINE_SHORT.hint)] * 3
    script.edge(SendState.READY, 150.0)
    assert script.episode.due_at == 152.0
    script.episode.check(152.0)
    assert lines[-1]["event"] == "line carries all again"
    assert script.episode.due_at is None


def test_episode_when_still_waiting_for_a_key_frame_is_not_over(lines):
    script = Script()
    script.edge(SendState.SOFT_LIMIT, 1.0)
    script.edge(SendState.READY, 1.1)
    script.dropped = Counts((0, 0, 0, 7, 0, 0, 0), (0,) * 7)
    script.episode.check(3.2)
    assert named(lines, "viewer recovered") == []
    script.episode.check(5.3)
    assert named(lines, "viewer recovered")[0]["dropped"] == {"inter": 7}


@pytest.mark.parametrize("states", [[SendState.OVERLOADED, SendState.SOFT_LIMIT], []])
def test_episode_when_the_hard_limit_has_closed_the_viewer_leaves_that_to_the_line_of_its_end(lines, states):
    script = Script()
    for number, state in enumerate(states):
        script.edge(state, number)
    script.edge(SendState.HARD_LIMIT, 5.0, closed=True)
    assert [line["state"] for line in lines] == [states[-1].name if states else "HARD_LIMIT"]


def test_episode_when_the_hard_limit_is_held_says_that_it_got_worse(lines):
    script = Script()
    script.edge(SendState.SOFT_LIMIT, 1.0)
    script.edge(SendState.HARD_LIMIT, 2.0)
    assert [line["state"] for line in lines] == ["SOFT_LIMIT", "HARD_LIMIT"]


@pytest.mark.parametrize("reason", DropReason)
def test_drops_when_without_an_edge_are_no_trouble(lines, reason):
    """A muted track, or the frames before a joiner's first key frame, make nobody a slow viewer."""
    script = Script()
    script.drop(100, 1.0, reason)
    script.episode.check(100.0)
    assert lines == []


def test_drops_when_the_viewer_left_the_stream_itself_are_not_its_slowness(lines):
    script = Script()
    script.edge(SendState.OVERLOADED, 1.0)
    script.drop(5, 1.1, DropReason.UNFOLLOWED)
    assert named(lines, "viewer slow") == []


def test_limits_when_changed_are_a_line_for_who_looks_closely(lines):
    script = Script()
    script.episode.note_entry(LedgerEntry(LedgerKind.LIMITS, 1.0, "soft 1 MiB"))
    assert lines == [{"event": "limits changed", "log_level": "debug", **FIELDS, "limits": "soft 1 MiB"}]


def test_log_when_a_viewer_is_slow_for_long_does_not_grow_with_the_packets(lines):
    world = World(limits=TIGHT)
    publisher = world.publisher()
    viewer = world.player()
    viewer.wire.room = 3000
    for number in range(500):
        publisher.video(number * 40, key(b"%d" % number, 500) if number % 25 == 0 else inter(b"%d" % number, 500))
        publisher.audio(number * 40 + 1, audio(b"%d" % number))
        viewer.reads = number % 20 == 0
    viewer.reads = True
    world.run(8)
    told = [line for line in lines if line.get("connection") == viewer.connection.number]
    assert [line["event"] for line in told] == ["play started", "viewer slow", "viewer recovered"]
    assert {line["peer"] for line in told} == {"192.0.2.1:40001"}
    assert {line["stream"] for line in told} == {"live/room"}
    assert "limit 8.0 KiB" in told[1]["cause"]
    assert "queued" in told[1]["why"]
    assert told[2]["dropped"]["inter"] > 0


@pytest.mark.parametrize(
    ("limits", "settings", "reason", "words"),
    [
        (Limits.parse("4KiB,0", "8KiB,0"), SenderSettings(), CloseReason.HARD_LIMIT, "limit 8.0 KiB"),
        (Limits.parse("0,0,100s", "0,0,200s"), SenderSettings(stuck_s=3.0), CloseReason.STUCK, "the limit is 3 s"),
        (
            Limits.parse("1KiB,0", "0,0", "1,0"),
            SenderSettings(stuck_s=0.0, soft_too_long_s=5.0),
            CloseReason.SOFT_TOO_LONG,
            "the limit is 5 s",
        ),
    ],
)
def test_log_when_a_viewer_is_cut_names_limit_and_value(lines, limits, settings, reason, words):
    """Its end is one line with the reason, and the socket is reset so that the kernel frees what it holds."""
    world = World(limits=limits, sender=settings)
    publisher = world.publisher(limits=Limits())
    healthy, stuck = world.player(limits=Limits()), world.player()
    world.run(1)
    stuck.wire.room = 0
    for number in range(60):
        publisher.video(number * 100, AVC_HEADER + b"." * 400)  # headers are never dropped, so the queue grows
        world.run(0.1)
    (ended,) = [line for line in named(lines, "play ended") if line["connection"] == stuck.connection.number]
    (closed,) = [line for line in named(lines, "connection closed") if line["connection"] == stuck.connection.number]
    assert stuck.ended[0] is reason
    assert "HARD_LIMIT" not in [line["state"] for line in named(lines, "viewer slow")]
    assert (closed["reason"], words in closed["details"]) == (reason.value, True)
    assert ended["why"].startswith(reason.value)
    assert ended["dropped"]
    assert stuck.wire.reset
    assert len(healthy.payloads) == 62


def test_episode_when_pictures_are_late_says_so_and_ends_with_what_the_viewer_got(lines):
    script = Script()
    script.edge(SendState.OVERLOADED, 1.0)
    script.late(1.5)
    script.episode.note_entry(LedgerEntry(LedgerKind.RETURN, 2.0, "returned to live", delay_removed_ms=3210.0))
    script.late(3.0)
    lost = {DropReason.LATE: Counts((0, 0, 0, 7, 0, 0, 0), (0, 0, 0, 700, 0, 0, 0))}
    shares = {"picture_share": 0.77, "line_share": 0.98, "delay_max_ms": 912.0}
    script.episode.note_entry(LedgerEntry(LedgerKind.DROPS, 30.0, "late", dropped=lost, **shares))
    script.edge(SendState.READY, 30.0)
    script.episode.check(32.5)
    slow, recovered = lines
    assert (slow["event"], slow["cause"]) == ("viewer slow", "pictures would be late; it takes 160 kB/s")
    assert recovered["event"] == "viewer recovered"
    names = ("pictures", "line_in_use", "delay_max_s", "returns_to_live", "delay_removed_s")
    assert [recovered[name] for name in names] == ["77%", "98%", 0.9, 1, 3.2]


def test_log_when_refused_names_the_limit(lines):
    world = World(config(publishers_per_address=1))
    world.publisher("live/1")
    world.connect().publish("live/2")
    (line,) = named(lines, "publish refused")
    assert (line["limit"], line["value"], line["maximum"], line["stream"]) == (
        "publishers_per_address",
        2,
        1,
        "live/2",
    )


def test_log_when_a_limit_ends_a_connection_names_it(world, lines):
    world.player().leave()
    world.player("live/nobody")
    world.run(61)
    left, line = named(lines, "connection closed")
    assert "limit" not in left
    assert (line["reason"], line["limit"]) == ("limit hit", "player_wait_s")
    assert "player_wait_s" not in line["details"]


def test_log_when_something_unknown_comes_says_so_once(world, lines):
    """What is ignored is a hint for people who look for it: one line per kind and connection, at debug."""
    viewer = world.player()
    for type_id in (77, 78, 77):
        viewer.message(Message(3, 0, type_id, 0, b"x"))
    (line,) = named(lines, "message ignored")
    assert (line["what"], line["detail"], line["log_level"]) == ("unknown-message-type", "77", "debug")


def test_log_when_a_disposable_frame_is_left_out_says_so_at_the_end(lines):
    """Without a target delay OVERLOADED refuses frames nobody needs: told once, with the count at the end."""
    world = World(limits=Limits(target_delay_ms=0))
    publisher = world.publisher()
    viewer = world.player()
    publisher.video(0, key(b"k"))
    viewer.wire.room = 0
    for number in range(10):
        publisher.video(40 + number * 40, disposable(b"%d" % number))
    viewer.wire.room = None
    world.run(6)
    assert [line["state"] for line in named(lines, "viewer slow")] == ["OVERLOADED"]
    assert named(lines, "viewer recovered")[0]["dropped"]["disposable"] > 0


def test_log_when_secrets_are_in_addresses_shows_none_of_them(world, lines):
    secret = "s3cr3t-token"
    publisher = world.connect()
    publisher.session.publish(f"room?key={secret}&token={secret}")
    publisher._connect(f"live?secret={secret}")
    publisher.headers()
    viewer = world.connect()
    viewer.session.play(f"room?token={secret}")
    viewer._connect(f"live?secret={secret}")
    second = world.connect()
    second.session.publish(f"room?key={secret}")
    second._connect("live")
    bad = world.connect()
    bad.session.publish(f"../../x?key={secret}")
    bad._connect("live")
    publisher.vanish()
    viewer.leave()
    world.run(90)
    assert len(named(lines, "publish started")) >= 1
    assert len(named(lines, "connection closed")) == 4
    assert secret not in repr(lines)
    assert secret not in repr([connection_in_full(peer.connection) for peer in world.peers])
