"""Operations on a live server over real sockets: what each does, and what is said to a wrong call."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
from e2e_kit import NAME, Clients, connection_to, open_live_server, wait_for_viewers, wait_until
from live_kit import perform

from flowctl.control.arguments import read_arguments
from flowctl.control.operations import BY_NAME, OPERATIONS, ForbiddenError, Permission, allowed_operation, answer
from flowctl.control.summary import figures_of
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.errors import ClosedError, ConfigError, LocalProtocolError
from flowctl.live.settings.renditions import RenditionNames
from flowctl.reasons import CloseReason
from flowctl.wire.media.synthetic import SyntheticSource

ADMIN = Permission.ADMIN
LOCAL = "127.0.0.1/32"


@pytest.fixture
def live():
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(open_live_server(**settings))


@pytest.fixture
def clients():
    with Clients() as clients:
        yield clients


def do(server, name, **given):
    return perform(server, name, given)


@contextlib.contextmanager
def visitor(server, source="127.0.0.1"):
    with socket.create_connection(server.address, timeout=20, source_address=(source, 0)) as sock:
        yield sock


def turned_away(server, source):
    before = server.accepted_count
    with contextlib.suppress(ConnectionResetError), visitor(server, source) as sock:
        assert sock.recv(1) == b""
    return server.accepted_count == before


# -- calls


def test_table_when_read_has_each_operation_once_with_words_for_all_of_it():
    assert len(BY_NAME) == len(OPERATIONS)
    for item in OPERATIONS:
        assert item.name.isidentifier()
        assert item.summary.endswith(".")
        assert len({argument.name for argument in item.arguments}) == len(item.arguments)
        assert sum(argument.first for argument in item.arguments) <= 1
        for argument in item.arguments:
            assert argument.what.endswith(".")
            if argument.default not in {None, ""}:
                assert argument.kind.read(argument.default, argument.name) == argument.default
        assert json.loads(json.dumps(item.describe()))["name"] == f"flow.{item.name}"


@pytest.mark.parametrize(
    ("name", "given", "said", "hint"),
    [
        ("kick", {"conection": 1}, "kick: unknown argument 'conection'", "did you mean connection?"),
        ("kick", {"connection": 0}, "connection is 0, it must be a whole number from 1", None),
        ("kick", {"connection": True}, "connection is True", None),
        ("kick", {"connection": "7x"}, "connection is '7x'", None),
        ("kick", {"peer": "here"}, "peer: 'here' is no address", "write it like 192.0.2.7"),
        ("kick", {"reason": "a\nb", "connection": 1}, "reason is 'a\\nb'", None),
        ("kick", {"reason": "x" * 201, "connection": 1}, "it must be up to 200 characters", None),
        ("ban", {}, "ban: network is missing", "NETWORK"),
        ("ban", {"network": "192.0.2.7/24"}, "has host bits set", "write it like"),
        ("ban", {"network": "192.0.2.7", "duration": "for ever"}, "duration: 'for ever'", "write it like 8s"),
        ("ban", {"network": "192.0.2.7", "duration": -1}, "duration is -1, it must be a duration", "7d"),
        ("ban", {"network": "192.0.2.7", "duration": float("nan")}, "it must be a duration", "7d"),
        ("ban", {"network": "192.0.2.7", "action": "kill"}, "it must be ban or limit", None),
        ("limits", {"soft": "lots"}, "soft: 'lots' is not bytes,messages", "2MiB,2048"),
        ("limits", {"target_delay": "soon"}, "target_delay: 'soon'", "auto is by the stream"),
        ("bans", {"limit": 1001}, "limit is 1001, it must be a whole number from 1 to 1000", None),
        ("stats", {"viewers": 3}, "it must be slow or all or none", None),
        ("reload", {"now": True}, "reload: unknown argument 'now'", "it has none"),
    ],
)
def test_arguments_when_wrong_are_named_with_what_is_allowed(name, given, said, hint):
    with pytest.raises(ConfigError) as caught:
        read_arguments(name, BY_NAME[name].arguments, given)
    assert said in str(caught.value)
    assert hint is None or hint in caught.value.hint


def test_arguments_when_given_as_text_or_as_json_have_the_same_values():
    ban = BY_NAME["ban"].arguments
    text = read_arguments("ban", ban, {"network": "192.0.2.7", "duration": "1d"})
    assert text == read_arguments("ban", ban, {"network": "192.0.2.7/32", "duration": 86400})
    assert text["duration"] == 86400.0
    page = BY_NAME["stats"].arguments
    assert read_arguments("stats", page, {"limit": "7"}) == read_arguments("stats", page, {"limit": 7})


def test_answer_when_something_is_wrong_is_an_error_with_a_code(live):
    server = live()
    calls = {
        (b"[]", "stats", ADMIN): "WRONG_ARGUMENT",
        (b"{", "stats", ADMIN): "WRONG_ARGUMENT",
        (b"[" * 5000, "stats", ADMIN): "WRONG_ARGUMENT",
        (b" " * 70_000, "stats", ADMIN): "WRONG_ARGUMENT",
        (b"", "kick", Permission.BASIC): "FORBIDDEN",
        (b"{", "kick", Permission.BASIC): "FORBIDDEN",
        (b"", "stats", Permission.NONE): "FORBIDDEN",
        (b"", "fly", ADMIN): "WRONG_ARGUMENT",
        (b'{"connection": 99999999}', "kick", ADMIN): "NOT_POSSIBLE",
        (b"", "reload", ADMIN): "NOT_POSSIBLE",
    }
    for (call, name, level), code in calls.items():
        error = json.loads(answer(server, name, call, level))["error"]
        assert error["code"] == code, (call[:20], name)
        assert set(error) == {"code", "message", "hint"}
    assert "result" in json.loads(answer(server, "stats", b"", Permission.BASIC))


def test_perform_when_the_level_is_too_low_looks_at_nothing_else():
    with pytest.raises(ForbiddenError, match=r"flow.ban takes the level admin, the caller has basic"):
        allowed_operation("ban", Permission.BASIC)


# -- stats


def test_stats_when_asked_tells_server_streams_and_viewers(live, clients):
    server = live()
    for _ in range(3):
        clients.play(server)
    wait_for_viewers(server, 3)
    found = do(server, "stats")
    assert found["server"]["connections"] == 3
    assert found["server"]["limits_from"] == "start"
    assert [(item["stream"], item["viewers"], item["publisher"]) for item in found["streams"]] == [(NAME, 3, None)]
    assert (found["viewers"], found["found"]["viewers"]) == ([], 0)
    pages = [do(server, "stats", viewers="all", limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [len(page["viewers"]) for page in pages] == [2, 1, 0]
    assert [page["found"]["viewers"] for page in pages] == [3, 3, 3]
    seen = {viewer["connection"] for page in pages for viewer in page["viewers"]}
    assert seen == {connection.number for connection in server.connections()}
    assert do(server, "stats", viewers="all", stream="other/*")["found"] == {
        "streams": 0,
        "viewers": 0,
        "offset": 0,
        "limit": 50,
    }
    assert json.loads(json.dumps(found)) == found


def test_connections_when_of_one_have_its_ledger_in_words(live, clients):
    server = live()
    client = clients.play(server)
    wait_for_viewers(server, 1)
    connection = connection_to(server, client)
    do(server, "limits", connection=connection.number, soft="1MiB,100")
    found = wait_until(
        lambda: (shown := do(server, "connections", connection=connection.number)["connection"])["ledger"] and shown,
        "ledger",
    )
    assert found["ledger"][-1]["what"] == LedgerKind.LIMITS.value
    assert "1.0 MiB, 100 messages" in found["ledger"][-1]["why"]
    assert found["streams"] == [NAME]
    assert found["state"] == "READY"
    with pytest.raises(LocalProtocolError, match="there is no connection 99999999"):
        do(server, "connections", connection=99999999)


# -- kick


def test_kick_when_by_number_stream_or_peer_ends_those_and_says_why(live, clients):
    server = live()
    first, second, other = clients.play(server), clients.play(server), clients.play(server, name="live/other")
    wait_for_viewers(server, 2)
    wait_for_viewers(server, 1, name="live/other")
    target = connection_to(server, first)
    ledger = target.sender.ledger
    assert do(server, "kick", connection=target.number, reason="too loud")["connections"] == [target.number]
    wait_for_viewers(server, 1)
    assert target.ended == (CloseReason.KICKED, "by an operator: too loud")
    assert "too loud" in ledger()[-1].why
    assert do(server, "kick", stream="live/other")["kicked"] == 1
    wait_until(lambda: len(server.connections()) == 1, "one left")
    assert connection_to(server, second).ended is None
    with visitor(server, "127.0.0.9"):
        wait_until(lambda: len(server.connections()) == 2, "a visitor")
        assert do(server, "kick", peer="127.0.0.8/31", stream=NAME)["kicked"] == 0
        assert do(server, "kick", peer="127.0.0.8/31")["kicked"] == 1
    assert other is not None
    with pytest.raises(ConfigError, match="whom is missing"):
        do(server, "kick")


# -- limits


def test_streams_when_one_is_a_set_tell_its_renditions_and_who_is_in_which(live, clients):
    server = live(renditions=RenditionNames(suffixes=("_720", "_360")))
    for suffix, rate in (("_720", 600_000), ("_360", 200_000)):
        clients.publish(server, SyntheticSource(video_bit_rate=rate, key_interval_s=1), name=f"live/show{suffix}")
    player = clients.play(server, name="live/show")
    wait_for_viewers(server, 1, name="live/show")
    row = wait_until(
        lambda: next(
            (
                row
                for row in do(server, "streams")["streams"]
                if sum(item["viewers"] for item in row["renditions"]) == 1
                and all(item["bit_rate"] for item in row["renditions"])
            ),
            None,
        ),
        "a viewer in a rendition, and their rates",
    )
    assert row["stream"] == "live/show"
    large, small = row["renditions"]
    assert (large["rendition"], small["rendition"]) == ("720", "360")
    assert large["codec"] == small["codec"] == "avc1"
    assert large["bit_rate"] > 2 * small["bit_rate"] > 200_000
    found = do(server, "connections", connection=connection_to(server, player).number)["connection"]
    assert found["rendition"] in {"720", "360"}
    assert found["renditions"]["of"] == 2
    assert f"rendition {found['rendition']} of 2 for " in found["why"]
    others = [row for row in do(server, "streams")["streams"] if row["stream"] != "live/show"]
    assert [row["renditions"] for row in others] == [[], []]
    assert sum(figures_of(server)["renditions"].values()) == 1


def test_connections_when_of_a_viewer_of_a_set_tell_its_rendition_since_when_and_why(live, clients):
    server = live()
    clients.publish(server, SyntheticSource())
    player = clients.play(server)
    wait_for_viewers(server, 1)
    connection = connection_to(server, player)
    order = ("360", "720")
    assert do(server, "connections", role="viewer")["connections"][0]["renditions"] is None
    book = connection.renditions = RenditionBook()
    book.enter(connection.now() - 10.0, "360", "the smallest first", lambda: order)
    for ago_s, name, why in (
        (9.0, "720", "the first"),
        (5.0, "360", "too slow"),
        (1.0, "720", "it carries more"),
    ):
        words = book.switch(connection.now() - ago_s, name, why)
        connection.sender.note(LedgerKind.SWITCH, words, duration_s=4.0)
        told = threading.Event()
        connection.call_soon(told.set)
        assert told.wait(20)
    row = do(server, "connections", connection=connection.number)["connection"]
    told = row["renditions"]
    assert (row["rendition"], told["of"], told["why"]) == ("720", 2, "it carries more")
    assert (told["ups"], told["downs"], told["failed"]) == (2, 1, 0)
    assert list(told["shares"]) == ["360", "720"]
    assert sum(told["shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert "rendition 720 of 2 for " in row["why"]
    assert row["ledger"][-1]["why"] == "rendition 360 to 720: it carries more"
    events = [one["why"] for one in do(server, "events")["events"] if one["what"] == "switch"]
    assert events == ["rendition 720 to 360: too slow", "rendition 360 to 720: it carries more"]


def test_limits_when_set_are_those_of_open_and_new_connections(live, clients):
    server = live(limits=Limits.parse("1MiB,100,4s", target_delay_ms=700))
    old = clients.play(server)
    wait_for_viewers(server, 1)
    assert do(server, "limits")["soft"] == "1MiB,100,4s"
    shown = do(server, "limits", soft="2MiB,200,6s")
    expected = Limits.parse("2MiB,200,6s", target_delay_ms=700)
    assert (server.limits, shown["hard"], shown["target_delay"]) == (expected, "4MiB,400,12s", "700ms")
    assert shown["limits_from"] == "command"
    wait_until(lambda: connection_to(server, old).sender.limits == expected, "the limits of who is there")
    new = clients.play(server)
    wait_for_viewers(server, 2)
    assert connection_to(server, new).sender.limits == expected
    do(server, "limits", target_delay="off")
    assert server.limits == Limits.parse("2MiB,200,6s", target_delay_ms=0)
    with pytest.raises(ConfigError, match="hard limit of bytes"):
        do(server, "limits", hard="1MiB,100,1s")
    assert server.limits == Limits.parse("2MiB,200,6s", target_delay_ms=0)


def test_limits_when_of_one_connection_leave_the_others(live, clients):
    server = live(limits=Limits.parse("1MiB,100,4s"))
    one, two = clients.play(server), clients.play(server)
    wait_for_viewers(server, 2)
    number = connection_to(server, one).number
    do(server, "limits", connection=number, soft="9MiB,900,9s")
    wait_until(lambda: do(server, "limits", connection=number)["soft"] == "9MiB,900,9s", "its limits")
    assert connection_to(server, two).sender.limits == server.limits == Limits.parse("1MiB,100,4s")
    with pytest.raises(LocalProtocolError, match="there is no connection"):
        do(server, "limits", connection=99999999, soft="1MiB,1")


# -- bans


def test_ban_when_made_ends_whom_it_names_and_unban_lets_them_in(live, clients):
    server = live()
    clients.play(server)
    wait_for_viewers(server, 1)
    with visitor(server, "127.0.0.9"):
        wait_until(lambda: len(server.connections()) == 2, "a visitor")
        found = do(server, "ban", network="127.0.0.1", duration="1h", reason="rude")
        assert (found["cidr"], found["ended"], found["in_store"]) == (LOCAL, 1, False)
        assert found["kept"] == "until the server ends"
        wait_until(lambda: len(server.connections()) == 1, "the viewer's end")
        assert server.closed_by_reason == {CloseReason.BANNED: 1}
        assert turned_away(server, "127.0.0.1")
        assert [(item["cidr"], item["reason"]) for item in do(server, "bans")["bans"]] == [(LOCAL, "rude")]
        assert do(server, "bans", peer="192.0.2.1")["bans"] == []
        assert [item["cidr"] for item in do(server, "unban", network="127.0.0.1")["lifted"]] == [LOCAL]
        with visitor(server):
            wait_until(lambda: len(server.connections()) == 2, "who was banned before")


def test_ban_when_made_twice_lasts_as_long_as_the_longer_one(live):
    server = live()
    do(server, "ban", network=LOCAL)
    assert do(server, "ban", network=LOCAL, duration="1s")["expires"] is None
    assert len(server.admission.bans) == 1


def test_ban_when_too_wide_is_refused(live):
    with pytest.raises(ConfigError, match="the widest network that may be banned is /8"):
        do(live(), "ban", network="128.0.0.0/1")


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("127.0.0.9", "127.0.0.9/32 itself is not banned: it is part of 127.0.0.0/24, which is"),
        ("127.0.0.0/16", "127.0.0.0/16 itself is not banned: part of it is 127.0.0.0/24, which is"),
        ("192.0.2.1", "192.0.2.1/32 is not banned"),
    ],
)
def test_unban_when_it_is_not_banned_itself_names_what_is(live, network, said):
    server = live()
    do(server, "ban", network="127.0.0.0/24")
    with pytest.raises(LocalProtocolError, match=said):
        do(server, "unban", network=network)
    assert len(server.admission.bans) == 1


def test_ban_when_there_is_a_file_leaves_it_to_its_writer(live, tmp_path):
    """What a command bans is in force beside what the file says, whatever that says next, and is not written to it."""
    path = tmp_path / "bans.jsonl"
    text = '{"cidr": "127.0.0.7/32", "expires": null, "score": 4}\n'
    path.write_text(text)
    server = live(bans_file=path)
    found = do(server, "ban", network="127.0.0.9", duration="1h", reason="rude")
    assert (found["in_store"], found["kept"]) == (False, "until the server ends")
    assert path.read_text() == text
    assert {ban.cidr for ban in server.admission.bans.bans} == {"127.0.0.7/32", "127.0.0.9/32"}
    path.write_text('{"cidr": "127.0.0.8/32", "expires": null}\n')
    do(server, "reload")
    do(server, "unban", network="127.0.0.9")
    assert turned_away(server, "127.0.0.8")
    with visitor(server, "127.0.0.9"), visitor(server, "127.0.0.7"):
        wait_until(lambda: len(server.connections()) == 2, "who was let in again")
    assert [item.name for item in tmp_path.iterdir()] == ["bans.jsonl"]


# -- reload


def test_reload_when_files_changed_says_what_is_in_force_and_what_is_wrong(live, tmp_path):
    limits, bans = tmp_path / "limits.toml", tmp_path / "bans.jsonl"
    limits.write_text('version = 1\n[limits]\nsoft = "1MiB,100,4s"\n')
    server = live(limits_file=limits, bans_file=bans)
    assert do(server, "reload") == {
        "limits": {"file": str(limits), "state": "valid", "changed": False},
        "bans": {"file": str(bans), "state": "absent", "changed": False},
    }
    limits.write_text('version = 1\n[limits]\nsoft = "2MiB,100,4s"\n')
    bans.write_text('{"cidr": "127.0.0.7", "expires": null}\nx\n')
    found = do(server, "reload")
    assert found["limits"]["changed"]
    assert "soft 2.0 MiB" in found["limits"]["now"]["limits"]
    assert (found["bans"]["state"], found["bans"]["changed"]) == ("invalid", False)
    assert f"{bans}, line 2: not valid JSON" in found["bans"]["fault"]
    assert do(server, "reload")["bans"]["fault"] == found["bans"]["fault"]
    bans.write_text('{"cidr": "127.0.0.7", "expires": null}\n')
    assert do(server, "reload")["bans"]["now"]["added"] == 1
    bans.write_text("")
    assert do(server, "reload")["bans"]["now"]["lifted"] == 1


# -- changes


def test_changes_when_read_tell_who_did_what_in_order(live, tmp_path):
    bans = tmp_path / "bans.jsonl"
    server = live(bans_file=bans)
    heard = []
    server.changes.listeners.append(heard.append)
    do(server, "ban", network="192.0.2.1", reason="rude", duration="1h", origin="node-1")
    do(server, "unban", network="192.0.2.1")
    do(server, "limits", soft="1MiB,1", origin="node-2")
    bans.write_text('{"cidr": "192.0.2.2", "expires": null}\n')
    do(server, "reload")
    found = do(server, "changes")
    assert [(item["version"], item["what"], item["origin"]) for item in found["changes"]] == [
        (1, "ban", "node-1"),
        (2, "unban", ""),
        (3, "limits", "node-2"),
        (4, "bans file", ""),
    ]
    assert (found["version"], found["whole"]) == (4, True)
    assert found["changes"][0]["detail"]["reason"] == "rude"
    assert [item["version"] for item in do(server, "changes", since=3)["changes"]] == [4]
    assert [change.version for change in heard] == [1, 2, 3, 4]
    for version in range(5, 1100):
        server.changes.note("limits", {"n": version})
    assert do(server, "changes", since=4)["whole"] is False
    assert do(server, "changes", since=100)["whole"] is True
    assert do(server, "changes", since=9999)["whole"] is False  # of another run


# -- drain


def test_drain_when_told_lets_nobody_in_and_ends_within_its_time(live, clients):
    server = live()
    ended = []
    server.on_stopped = lambda: ended.append(True)
    client, publisher = clients.play(server), clients.publish(server, SyntheticSource())
    wait_for_viewers(server, 1)
    found = do(server, "drain", within="1h")
    assert (found["draining"], found["again"], found["connections"]) == (True, False, 2)
    asked = "NetConnection.Connect.ReconnectRequest"
    for told in (client.player, publisher.publisher):
        wait_until(lambda told=told: asked in [status.code for status in told.statuses], "a request to reconnect")
    wait_until(lambda: not listens(server), "the listener's end")
    assert connection_to(server, client).ended is None
    assert do(server, "stats")["server"]["drains_for_s"] > 3000
    assert do(server, "drain", within="2h")["ends_within_s"] <= 3600
    assert do(server, "drain", within=0)["again"] is True
    wait_until(lambda: ended, "the end")
    assert server.closed_by_reason[CloseReason.SHUTDOWN] == 2
    with pytest.raises(ClosedError):
        do(server, "ban", network="192.0.2.1")


def listens(server):
    try:
        with socket.create_connection(server.address, timeout=5):
            return True
    except OSError:
        return False


def test_drain_when_nobody_is_there_ends_at_once(live):
    server = live()
    ended = []
    server.on_stopped = lambda: ended.append(True)
    do(server, "drain", within="1h")
    wait_until(lambda: ended, "the end")
    assert server.stopping


def test_limits_when_of_a_stream_are_set_for_those_who_play_it_now(live, clients):
    server = live()
    clients.publish(server, SyntheticSource())
    player = clients.play(server)
    wait_for_viewers(server, 1)
    connection = connection_to(server, player)
    with visitor(server):
        wait_until(lambda: len(server.connections()) == 3, "one that takes no part")
        found = do(server, "limits", stream="live/*", soft="1MiB,100,2s")
        assert (found["connections"], found["soft"]) == (2, "1MiB,100,2s")
        wait_until(lambda: connection.sender.limits.messages.soft == 100, "the new limits")
        assert sum(item.sender.limits == server.limits for item in server.connections()) == 1
    assert do(server, "limits", stream=NAME)["soft"] == "1MiB,100,2s"
    with pytest.raises(LocalProtocolError, match="nobody plays or publishes"):
        do(server, "limits", stream="live/nothing")
    with pytest.raises(ConfigError, match="both given"):
        do(server, "limits", stream=NAME, connection=connection.number)


def test_connections_when_narrowed_down_are_those_that_fit(live, clients):
    server = live()
    clients.publish(server, SyntheticSource())
    clients.play(server)
    wait_for_viewers(server, 1)
    with visitor(server, "127.0.0.9"):
        wait_until(lambda: len(server.connections()) == 3, "one that takes no part")

        def count(**given):
            found = do(server, "connections", **given)
            assert found["found"]["connections"] == len(found["connections"])
            return len(found["connections"])

        assert [count(role=role) for role in ("publisher", "viewer", "none")] == [1, 1, 1]
        assert [count(peer=peer) for peer in ("127.0.0.9", "127.0.0.1", "127.0.0.0/8", "::/0")] == [1, 2, 3, 0]
        assert [count(protocol=name) for name in ("rtmp", "http-flv")] == [3, 0]
        assert [count(stream=name) for name in ("live/*", "other/*")] == [2, 0]
        assert (count(state="READY", role="none"), count(state="HARD_LIMIT")) == (1, 0)
        rows = [do(server, "connections", sort="open", limit=1, offset=at)["connections"][0] for at in range(3)]
        assert [row["connection"] for row in rows] == [item.number for item in server.connections()]
