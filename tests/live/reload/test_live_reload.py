"""Files of limits and bans that are read again: a change is taken, what is wrong changes nothing and is told once."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import structlog

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.bans import BanList
from flowctl.core.server.signals import EndSignals
from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import BusyError, ClosedError, ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.reload.reload import Reload

GOOD = 'version = 1\n[limits]\nsoft = "{size},100,4s"\n'
BAN = '{{"cidr": "127.0.0.{number}", "expires": null}}\n'
LONG_AGO = 1_000_000_000


class Taker:
    """Takes texts; refuses those that say so."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def __call__(self, text, where):
        if "bad" in text:
            raise ConfigError(f"{where}, line 1: {text!r}")
        self.taken.append(text)


@pytest.fixture
def watched(tmp_path):
    """Return a file that is watched and who takes what it says; the clock stands far behind all changes of it."""
    taker = Taker()
    return WatchedFile(tmp_path / "file", taker, 100, wall=lambda: 4e9), taker


def write(path, text, at=None):
    """Write beside and rename, as one should."""
    beside = path.with_name("beside")
    beside.write_bytes(text if isinstance(text, bytes) else text.encode())
    if at is not None:
        os.utime(beside, (at, at))
    beside.replace(path)


@pytest.mark.parametrize(
    "steps",
    [
        "look:- put:one look:- put:two look:-",
        "put:one put:one:-",  # the same contents anew are no news
        "put:one gone:- put:one",  # one that is gone is no empty one, and what comes instead is news
        "put: over:one over::- look: look:-",  # empty at first it undoes nothing; later it counts when it stays so
        "put:one over::- over:two over::- over::- look: look:-",  # touched since: begins anew
        "put:one over::- over:one:- over::- look:",  # emptied and written again by a writer in place
        "known:one:- over::- over:two",  # read before the server was made
        "known:one:- forget::- over:two",  # a signal to look again, and it is empty
    ],
)
def test_read_when_the_file_changes_takes_each_version_once(watched, steps):
    file, taker = watched
    expected, file_text = [], ""
    for at, step in enumerate(steps.split(), LONG_AGO):
        what, _, rest = step.partition(":")
        text, minus = rest.removesuffix("-").removesuffix(":"), rest.endswith("-")
        file_text = file_text if what == "look" else text
        if what == "put":
            write(file.path, text, at)
        elif what in {"over", "forget"}:
            file.path.write_text(text)
            os.utime(file.path, (at, at))
            if what == "forget":
                file.forget_contents()
        elif what == "known":
            write(file.path, text, at)
            file.count_as_taken(text)
        elif what == "gone":
            file.path.unlink()
        assert file.read() is not minus, step
        assert file.status.state == ("valid" if file.path.exists() else "absent")
        expected += [] if minus else [file_text]
    assert taker.taken == expected
    assert (file.status.applied, file.status.invalid) == (len(expected), 0)


def test_read_when_it_cannot_tell_by_the_time_looks_at_the_contents(tmp_path):
    taker = Taker()
    path = tmp_path / "file"
    path.write_text("one")
    os.utime(path, (LONG_AGO, LONG_AGO))
    file = WatchedFile(path, taker, 100, wall=lambda: LONG_AGO + 1.0)
    assert file.read() is True
    path.write_text("two")  # in place: the same inode and size
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert file.read() is True
    assert taker.taken == ["one", "two"]


def test_read_when_invalid_tells_once_and_keeps_the_rest(watched):
    file, taker = watched
    write(file.path, "one")
    file.read()
    write(file.path, "bad")
    with pytest.raises(ConfigError, match="line 1: 'bad'"):
        file.read()
    assert file.read() is False
    assert (file.status.state, file.status.invalid) == ("invalid", 1)
    assert "line 1: 'bad'" in file.status.fault
    write(file.path, "one")
    assert file.read() is True
    assert file.status.state == "valid"
    assert taker.taken == ["one", "one"]


@pytest.mark.parametrize(
    ("data", "said"), [(b"x" * 101, "it has more than 100 bytes"), (b"ok\n\xff", "line 2: not valid UTF-8")]
)
def test_read_when_too_long_or_no_text_is_invalid(watched, data, said):
    file, taker = watched
    write(file.path, data)
    with pytest.raises(ConfigError, match=said):
        file.read()
    assert taker.taken == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_read_when_it_is_no_regular_file_says_so_once_and_does_not_wait(watched, make):
    """A pipe that nobody writes to would keep the thread for ever."""
    file, _ = watched
    make(file.path)
    with pytest.raises(ConfigError, match="cannot be read"):
        file.read()
    assert file.read() is False
    assert file.status.state == "invalid"


def test_read_when_the_taker_fails_is_invalid_too(tmp_path):
    def take(text, where):
        raise ZeroDivisionError("bug")

    (tmp_path / "file").write_text("one")
    file = WatchedFile(tmp_path / "file", take, 100)
    with pytest.raises(ZeroDivisionError):
        file.read()
    assert file.status.fault == "bug"


class World:
    """A `Reload` without its thread, and what it handed on."""

    def __init__(self, folder, **kwargs) -> None:
        self.limits, self.bans = folder / "limits.toml", folder / "bans.jsonl"
        self.taken: list[object] = []
        self.errors: list[str] = []
        self.refuse = ""
        self.reload = Reload(
            self._take,
            self._take,
            limits=self.limits,
            bans=self.bans,
            on_error=lambda where, error: self.errors.append(f"{where}: {error}"),
            **kwargs,
        )

    def _take(self, value):
        if self.refuse == "bug":
            raise ZeroDivisionError("bug")
        if self.refuse:
            raise ConfigError(self.refuse)
        self.taken.append(value)

    def look(self):
        """Look at the files; return what was logged."""
        with structlog.testing.capture_logs() as logs:
            self.reload._look_at_files()
        return logs


def test_reload_when_files_change_hands_on_what_they_say(tmp_path):
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    world.reload.read_first()
    write(world.bans, BAN.format(number=1))
    assert world.look() == []
    write(world.limits, GOOD.format(size=2000))
    assert world.look() == []
    assert [value.limits.size.soft for value in world.taken if isinstance(value, LimitsFile)] == [1000, 2000]
    assert [len(value) for value in world.taken if isinstance(value, BanList)] == [1]
    assert {name: status.state for name, status in world.reload.status.items()} == {"limits": "valid", "bans": "valid"}


def test_reload_when_a_file_is_not_valid_logs_it_once_and_goes_on(tmp_path):
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    world.reload.read_first()
    write(world.limits, GOOD.format(size="many"))
    write(world.bans, BAN.format(number=1))
    logs = world.look() + world.look()
    assert [(line["log_level"], line["event"]) for line in logs] == [
        ("error", "limits file is not valid, what was before stays in force")
    ]
    assert f"{world.limits}, line 3: soft bytes: 'many'" in logs[0]["fault"]
    assert len(world.taken) == 2
    assert world.reload.status["limits"].state == "invalid"


def test_reload_when_the_server_cannot_take_it_names_the_file(tmp_path):
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    world.refuse = "stuck_s does not go with this"
    with pytest.raises(ConfigError, match=rf"{world.limits}: stuck_s does not go"):
        world.reload.read_first()
    assert world.reload.status["limits"].state == "invalid"


def test_reload_when_there_is_a_bug_reports_it_and_goes_on(tmp_path):
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    world.reload.read_first()
    world.refuse = "bug"
    write(world.limits, GOOD.format(size=2000))
    world.look()
    world.refuse = ""
    write(world.bans, BAN.format(number=1))
    world.look()
    assert world.errors == ["reading the limits file again: bug"]
    assert len(world.taken) == 2


def test_reload_when_a_file_vanishes_warns_once(tmp_path):
    """What it said stays in force, and the log says so."""
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    world.reload.read_first()
    world.limits.unlink()
    logs = world.look() + world.look()
    assert [line["event"] for line in logs] == ["limits file has gone, what it said stays in force"]


def test_read_first_when_the_ban_file_is_not_there_yet_says_so(tmp_path):
    """Bans may come later, but a slip of the pen in the name must not look like a list that is in force."""
    world = World(tmp_path)
    write(world.limits, GOOD.format(size=1000))
    with structlog.testing.capture_logs() as logs:
        world.reload.read_first()
    warned = [line for line in logs if line["log_level"] == "warning"]
    assert [(line["event"], line["what"]) for line in warned] == [
        ("there is no such file yet, it is watched for", "bans")
    ]
    assert warned[0]["file"] == str(world.bans)


def test_read_first_when_there_is_no_limits_file_is_an_error_and_no_ban_file_is_none(tmp_path):
    world = World(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        world.reload.read_first()
    Reload(world._take, world._take, bans=world.bans).read_first()
    assert world.taken == []


def test_reload_when_it_runs_takes_a_file_at_once_on_a_signal_and_ends_when_told(tmp_path):
    world = World(tmp_path, poll_s=3600.0)
    write(world.limits, GOOD.format(size=1000))
    world.reload.read_first()
    world.reload.start()
    write(world.limits, GOOD.format(size=2000))
    with EndSignals() as ended:
        ended.calls = {signal.SIGHUP: world.reload.look_now}
        os.kill(os.getpid(), signal.SIGHUP)
        assert not ended.wait(0.01)
    world.reload.stop()  # what was asked for before the end comes before it
    world.reload.stop()
    assert [value.limits.size.soft for value in world.taken] == [1000, 2000]


def test_with_limits_when_the_file_is_silent_keeps_what_the_server_was_started_with():
    started = LiveConfig(settings=SenderSettings(stuck_s=7.0), return_after_s=2.0)
    limits = Limits.parse("1MiB,100,1s")
    silent = started.with_limits(LimitsFile(limits=limits))
    assert (silent.limits, silent.settings, silent.return_after_s) == (limits, started.settings, 2.0)
    said = LimitsFile(limits=limits, stuck_s=3.0, soft_too_long_s=0.0, return_after_s=1.0)
    settings = started.with_limits(said).sender
    assert (settings.stuck_s, settings.soft_too_long_s, settings.return_after_s) == (3.0, 0.0, 1.0)


def test_do_when_asked_runs_jobs_one_after_the_other_on_the_thread_of_the_files(tmp_path):
    """What a job returns or raises is its caller's; one that asks for another is not waited for in vain."""
    reload = World(tmp_path).reload
    try:
        thread = reload.run_job(threading.current_thread)
        assert thread is not threading.current_thread()
        assert reload.run_job(lambda: reload.run_job(threading.current_thread)) is thread
        with pytest.raises(ZeroDivisionError):
            reload.run_job(lambda: 1 // 0)
        order = []
        callers = [threading.Thread(target=reload.run_job, args=(lambda at=at: order.append(at),)) for at in range(20)]
        for caller in callers:
            caller.start()
            caller.join(20)
        assert order == list(range(20))
    finally:
        reload.stop()
    with pytest.raises(ClosedError):
        reload.run_job(list)


def test_reload_when_jobs_come_all_the_time_looks_nevertheless():
    looked = threading.Event()
    reload = Reload(lambda limits: None, lambda bans: None, also=looked.set, poll_s=0.2)
    ended = threading.Event()

    def again():
        if not ended.wait(0.02):
            reload.run_later(again)

    try:
        reload.run_later(again)
        assert looked.wait(10.0)
    finally:
        ended.set()
        reload.stop()


def test_do_when_the_server_ends_or_is_busy_says_so(tmp_path):
    reload = World(tmp_path).reload
    begun, go = threading.Event(), threading.Event()
    first = threading.Thread(target=reload.run_job, args=(lambda: begun.set() or go.wait(20),))
    first.start()
    assert begun.wait(20)
    with pytest.raises(BusyError, match="has not come to it within"):
        reload.run_job(list, timeout_s=0.01)
    said = []

    def ask():
        try:
            reload.run_job(list)
        except ClosedError as error:
            said.append(str(error))

    second = threading.Thread(target=ask)
    second.start()
    stopper = threading.Thread(target=reload.stop)
    stopper.start()
    go.set()
    for thread in (first, second, stopper):
        thread.join(20)
        assert not thread.is_alive()
    assert said in ([], ["the server is ending, nothing of it is changed any more"])
