"""Which commands of a server run when: streams that come, go and come back, places, failures, and settings read anew.

On a clock turned by hand, with processes that only say that they were started and asked to end.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from run_kit import Desk, Publisher, rule
from structlog.testing import capture_logs

from flowctl.live.run.commands import CommandState
from flowctl.live.settings.runs import RunWhen
from flowctl.wire.rtmp.url import Query


def test_command_when_its_stream_is_published_runs_until_that_ends():
    desk = Desk(rule(words=("-i", "{url}", "{publish_1}"), publish=("{app}/{stream}_720",), nice=3, memory=1 << 30))
    assert not desk.publish("other/bob")
    (process,) = desk.publish("live/bob")
    token = process.values["url"].partition("run_token=")[2]
    assert len(token) >= 24
    assert process.words == [
        "/bin/sh",
        "-i",
        f"rtmp://127.0.0.1:1935/live/bob?run_token={token}",
        f"rtmp://127.0.0.1:1935/live/bob_720?run_token={token}",
    ]
    assert (process.limits["nice"], process.limits["memory_bytes"]) == (3, 1 << 30)
    row = {"command": "sh", "state": "runs", "pid": 100, "starts": 1, "publishes": ["live/bob_720"], "why": ""}
    assert desk.rows() == (row,)
    assert not desk.leave("live/bob")
    assert process.asked == 1
    assert desk.commands.figures()["starts"] == 1


def test_command_when_it_starts_is_told_of_the_stream_and_of_no_secret_of_its_publisher():
    desk = Desk(rule())
    (process,) = desk.publish("live/a/bob", query=Query({"key": "SECRET", "lang": "de\n&x", "odd": "\ud800"}))
    expected = {"name": "live/a/bob", "app": "live/a", "stream": "bob", "base": "bob", "address": "192.0.2.1"}
    expected |= {"video": "avc1", "audio": "mp4a", "query": "lang=de%0A%26x&odd=%3F"}
    assert expected.items() <= process.values.items()
    assert "SECRET" not in str(process.values)


def test_command_when_its_stream_has_shown_no_codec_waits_some_seconds():
    desk = Desk(rule())
    assert not desk.publish("live/bob", codecs=False)
    assert desk.rows()[0]["why"] == "its codecs"
    assert not desk.look(2.5)
    assert desk.look(1.0)
    desk.publish("live/ann", codecs=False)
    desk.hub.find_stream("live/ann").codecs["audio"] = "mp4a"
    assert len(desk.look()) == 1
    assert len(desk.look(0.7)) == 2


def test_command_when_its_publisher_may_be_back_goes_on():
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    assert desk.leave("live/bob", grace=True) == [process]
    assert desk.publish("live/bob") == [process]
    assert process.asked == 0


@pytest.mark.parametrize("name", ["live/-i", "live/$(id)", "live/a b", "live/.x"])
def test_command_when_the_name_of_a_stream_is_not_plain_does_not_run(name):
    desk = Desk(rule())
    with capture_logs() as logs:
        assert not desk.publish(name)
    assert [line["stream"] for line in logs if "no command is run" in line["event"]] == [name]


def test_streams_of_commands_when_they_fit_a_pattern_too_start_none():
    """Else a command on ``live/*`` that publishes there would start itself for ever."""
    desk = Desk(rule(publish=("{app}/{stream}_x",)))
    assert len(desk.publish("live/bob")) == 1
    assert len(desk.publish("live/bob_x")) == 1


@pytest.mark.parametrize(
    ("rules", "streams"),
    [
        ([("live/*", "{app}/{stream}_720"), ("live/*_1080", "{app}/{base}_720")], ["live/bob_1080", "live/bob"]),
        ([("*/*", "{app}/{stream}_720"), ("live/*", "{app}/{stream}_720")], ["live/bob"]),
        ([("live/bob", "live/bob_720"), ("live/*_1080", "{app}/{base}_720")], ["live/bob_1080", "live/bob"]),
    ],
)
def test_commands_when_several_would_publish_under_one_name_are_those_of_the_first_table(rules, streams):
    """Else whoever publishes one stream would take the name from the command of another, in turns for ever."""
    desk = Desk(*(rule(on, publish=(name,)) for on, name in rules))
    with capture_logs() as logs:
        for name in streams:
            desk.publish(name)
    made = [item.values["publish_1"].partition("?")[0] for item in desk.look()]
    assert len(made) == len(set(made))
    assert "rtmp://127.0.0.1:1935/live/bob_720" in made
    assert [line["names"] for line in logs if "another one has" in line["event"]] == [["live/bob_720"]]


def test_command_when_it_fails_is_started_again_later_each_time_and_when_it_is_done_not_at_all():
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    pauses = []
    for _ in range(4):
        process.end(1)
        desk.look(0.1)
        row, began = desk.rows()[0], desk.clock()
        assert (row["state"], row["why"]) == ("waits", "exit status 1")
        while not desk.look(0.1):
            assert desk.clock() - began < 60
        pauses.append(desk.clock() - began)
        process = desk.processes[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 2 * pauses[0]
    process.end(0)
    assert not desk.look(120)
    assert (desk.rows()[0]["state"], desk.commands.figures()["failures"]) == ("done", 4)
    desk.leave("live/bob")
    desk.publish("live/bob")
    assert desk.look(15)


def test_command_when_it_is_to_publish_and_ends_is_started_again_whatever_it_says():
    """FFmpeg ends with status 0 where its input breaks off, as that of a viewer who was ended does."""
    desk = Desk(rule(publish=("{app}/{stream}_x",)))
    (process,) = desk.publish("live/bob")
    process.end(0)
    assert not desk.look(0.1)
    assert (desk.rows()[0]["state"], desk.rows()[0]["why"]) == ("waits", "exit status 0")
    assert desk.look(10)


@pytest.mark.parametrize("what", ["stream", "server"])
def test_command_when_it_ends_since_its_stream_or_the_server_ends_has_not_failed(what):
    """FFmpeg sees the end of what it views as soon as we do."""
    desk = Desk(rule(publish=("{app}/{stream}_720",)))
    (process,) = desk.publish("live/bob")
    process.end(0)
    desk.server.stopping = what == "server"
    with capture_logs() as logs:
        desk.look() if what == "server" else desk.leave("live/bob")
    assert [line["event"] for line in logs] == ["command ended"]
    assert desk.commands._failures == 0


def test_commands_when_one_of_them_raises_go_on_all_the_others(monkeypatch):
    desk, errors = Desk(rule()), []
    desk.server.groups = SimpleNamespace(groups=[SimpleNamespace(report=lambda _, error: errors.append(error))])
    desk.publish("live/ann")
    desk.publish("live/bob")
    broken, other = desk.processes
    monkeypatch.setattr(broken, "lines", lambda: 1 / 0)
    other.end(1)
    desk.look(5)
    assert len(desk.processes) == 3
    assert {type(error) for error in errors} == {ZeroDivisionError}


def test_command_when_it_cannot_be_started_is_tried_again():
    desk = Desk(rule())
    desk.fails = OSError(12, "Cannot allocate memory")
    assert not desk.publish("live/bob")
    assert "Cannot allocate memory" in desk.rows()[0]["why"]
    desk.fails = None
    assert desk.look(5)


def test_command_when_it_does_not_end_is_killed():
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    process.stubborn = True
    assert desk.leave("live/bob") == [process]
    assert not desk.look(6)
    assert process.status == -signal.SIGKILL


def test_command_when_it_has_ended_and_what_it_started_has_not_is_not_over():
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    process.end(1)
    process.silent = False  # a child has its output open
    desk.look(1)
    assert (process.asked, desk.rows()[0]["state"]) == (1, "ends")
    desk.look(5)
    assert desk.rows()[0]["state"] != "ends"


def test_pass_when_its_command_is_over_is_revoked():
    desk = Desk(rule(publish=("{app}/{stream}_x",)))
    (process,) = desk.publish("live/bob")
    assert len(desk.hub.gate.passes._passes) == 1
    process.end(1)
    desk.look(0.1)
    assert desk.hub.gate.passes._passes == {}


def test_places_when_they_are_short_are_shared_among_addresses():
    desk = Desk(rule(), run_at_once=2)
    desk.publish("live/a1", address="192.0.2.1")
    assert len(desk.publish("live/a2", address="192.0.2.1")) == 2
    assert len(desk.publish("live/a3", address="192.0.2.1")) == 2
    assert "no address has more" in desk.rows("live/a3")[0]["why"]
    desk.publish("live/b1", address="198.51.100.1")
    desk.look(1)
    assert {item.values["name"] for item in desk.processes if item.status is None} == {"live/a1", "live/b1"}
    assert desk.rows("live/a2")[0]["state"] == "waits"
    desk.leave("live/a1")
    desk.look(30)
    assert len({item.values["name"] for item in desk.processes if item.status is None}) == 2


def test_places_when_a_table_has_its_own_number_are_those():
    desk = Desk(rule(at_once=1), rule("talk/*"), run_at_once=3)
    for name in ("live/a", "live/b", "talk/a", "talk/b"):
        desk.publish(name)
    assert [item.values["name"] for item in desk.look(1)] == ["live/a", "talk/a", "talk/b"]
    desk.configure(run=(rule(at_once=1), rule("talk/*")), run_at_once=0)
    desk.leave("live/a")
    assert [item.values["name"] for item in desk.look(20)] == ["talk/a", "talk/b"]


def test_place_when_a_publisher_comes_and_goes_at_once_is_not_free_at_once():
    """Starting programs costs more than publishing does."""
    desk = Desk(rule(), run_at_once=1)
    for number in range(20):
        desk.publish(f"live/{number}")
        desk.leave(f"live/{number}")
        desk.look(0.1)
    assert len(desk.processes) == 1


def test_command_when_it_is_for_viewers_runs_while_somebody_views_what_it_makes():
    desk = Desk(rule(publish=("{app}/{stream}_720",), when=RunWhen.VIEWED))
    assert not desk.publish("live/bob")
    viewer = Publisher()
    stream = desk.hub.view("live/bob_720", viewer)
    (process,) = desk.look(0.1)
    assert desk.look(60) == [process]
    desk.hub.leave(stream, viewer)
    assert desk.look(5) == [process]
    assert not desk.look(10)
    assert desk.rows()[0]["why"] == "a viewer of what it publishes"
    desk.hub.view("live/bob_720", viewer)
    assert desk.look(5)


def test_commands_when_settings_are_read_again_are_those_of_the_settings():
    one, other = rule(publish=("{app}/{stream}_x",)), rule(words=("-v",), publish=("{app}/{stream}_x",))
    desk = Desk(one)
    (process,) = desk.publish("live/bob")
    desk.configure(run=(one,), publishers_per_address=3)
    assert process.asked == 0
    process.stubborn = True
    assert desk.configure(run=(other,)) == [process]  # the other one waits: both publish one name
    desk.look(6)
    assert [item.words[1] for item in desk.look()] == ["-v"]
    assert not desk.configure()
    assert desk.rows() == ()


@pytest.mark.parametrize("what", ["stopping", "drains", "leaving"])
def test_commands_when_the_server_gives_way_start_no_more_and_go_on_with_what_runs(what):
    """The port is the other server's then, which knows no pass of this one."""
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    if what == "leaving":
        desk.hub.leaving = True
    elif what == "drains":
        desk.server.drains_for_s = 10.0
    else:
        desk.server.stopping = True
    assert desk.publish("live/ann") == [process]
    process.end(1)
    assert not desk.look(60)
    assert desk.rows()[0]["why"] == "the server takes no new connections"


def test_output_when_it_is_much_or_holds_the_pass_is_in_the_log_cut_and_masked():
    desk = Desk(rule())
    (process,) = desk.publish("live/bob")
    token = process.values["url"].partition("run_token=")[2]
    process.said = [f"opening {token}", "\x1b[31mred", "x" * 5000, *["again"] * 500]
    with capture_logs() as logs:
        desk.look(0.1)
        desk.look(1)
    said = [line["line"] for line in logs if line["event"] == "command says"]
    assert said[0] == "opening ***"
    assert "\x1b" not in said[1]
    assert len(said[2]) <= 500
    assert len(said) < 100
    (more,) = (line for line in logs if line["event"] == "command says more")
    assert len(said) + more["lines_left_out"] == 503


def test_thread_of_commands_when_there_is_always_something_to_look_at_rests_in_between(monkeypatch):
    desk, rests = Desk(rule()), []
    desk.publish("live/bob")
    commands = desk.commands
    looks = []
    monkeypatch.setattr(commands, "look", lambda _: looks.append(len(rests)) or commands._ring())

    def rest(seconds):
        rests.append(seconds)
        commands._stopping = len(rests) == 3
        if commands._stopping:
            commands._commands.clear()

    monkeypatch.setattr("flowctl.live.run.commands.time.sleep", rest)
    commands._run()
    assert looks == [0, 1, 2]


def test_figures_when_there_are_no_commands_are_none():
    assert Desk().commands.figures() == {}
    desk = Desk(rule())
    desk.publish("live/bob")
    assert desk.commands.figures() == {state.value: int(state is CommandState.RUNS) for state in CommandState} | {
        "starts": 1,
        "failures": 0,
    }
