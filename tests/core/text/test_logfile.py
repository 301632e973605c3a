"""The log file: rotated by one of many writers, found again when it is moved, and no line lost or torn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from install_checkers import checker, folder

from flowctl.core.text.logfile import LogFile, LogFileOptions
from flowctl.core.text.logwriter import LineWriter
from flowctl.errors import ConfigError

PATIENCE_S = 30.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


def log_file(path, max_bytes=0, keep=14):
    return LogFile(path, LogFileOptions(path=path, max_bytes=max_bytes, keep=keep))


def say(file, line):
    file.look()
    assert file.write([line]) is None


def rotated(path):
    return sorted(item for item in path.parent.iterdir() if item.name.startswith(f"{path.name}."))


def run(script, *arguments, **options):
    words = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)


def test_file_when_it_is_moved_is_opened_again_and_when_emptied_written_from_its_beginning(path):
    """Both ways of logrotate: a file of the same name, or the same file without its contents (copytruncate)."""
    file = log_file(path)
    say(file, b"one\n")
    path.rename(moved := path.with_name("log.1"))
    file.write([b"two\n"])  # no look came between: it is still in the moved one
    say(file, b"three\n")
    assert (moved.read_text(), path.read_text()) == ("one\ntwo\n", "three\n")
    os.truncate(path, 0)
    say(file, b"four\n")
    assert path.read_text() == "four\n"
    file.close()


def test_file_when_it_is_large_is_renamed_and_the_newest_are_kept(path):
    file = log_file(path, max_bytes=10, keep=2)
    others = [path.with_name(name) for name in ("log.gz", "log.20260101-000000-000000.gz", "logs")]
    for other in others:
        other.write_text("another's")
    for number in range(5):
        say(file, b"%d, ten bytes\n" % number)
    ours = [item for item in rotated(path) if item not in others]
    assert [item.read_text()[0] for item in [*ours, path]] == ["2", "3", "4"]
    assert all(other.exists() for other in others)
    assert path.stat().st_mode & 0o777 == 0o640
    file.close()


def test_file_when_it_is_of_another_day_is_renamed_without_waiting_for_a_line(path):
    file = log_file(path, max_bytes=1000)
    say(file, b"yesterday\n")
    os.utime(path, (time.time() - 86_400,) * 2)
    file.look()
    file.look()
    (old,) = rotated(path)
    assert (old.read_text(), path.read_text()) == ("yesterday\n", "")
    file.close()


def test_file_when_others_rotate_it_is_left_to_them(path):
    path.write_text("long ago\n")
    os.utime(path, (0, 0))
    file = log_file(path, max_bytes=0)
    say(file, b"today\n")
    assert (path.read_text(), rotated(path)) == ("long ago\ntoday\n", [])
    file.close()


def test_file_when_many_processes_and_threads_write_it_has_all_lines_whole(path):
    """Each of three processes may find it full; nothing is lost, doubled, or mixed up, over all files."""
    script = """
        import sys, threading
        from pathlib import Path
        from flowctl.core.text.logfile import LogFile, LogFileOptions
        from flowctl.core.text.logwriter import LineWriter
        name, path = sys.argv[1], Path(sys.argv[2])
        writer = LineWriter(LogFile(path, LogFileOptions(path=path, max_bytes=20_000, keep=0)), lambda n: b"lost", list)
        def write(thread):
            for number in range(500):
                writer.put(f"{name}-{thread}-{number} {'x' * 60}\\n".encode())
                if number % 20 == 0:
                    writer.flush(20.0)
        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        sys.exit(not writer.flush(20.0))
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    processes = [subprocess.Popen([*words, name, str(path)]) for name in "abc"]
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0, 0]
    files = [*rotated(path), path]
    assert len(files) > 5
    lines = [line for item in files for line in item.read_text().splitlines()]
    wanted = {f"{name}-{thread}-{number} {'x' * 60}" for name in "abc" for thread in range(4) for number in range(500)}
    assert sorted(lines) == sorted(wanted)


def test_file_when_the_disk_is_full_loses_lines_that_are_counted_and_tears_none():
    """A file that may not grow stands for the disk: the line that did not fit is ended before the next one."""
    script = """
        import os, resource, sys, tempfile
        from pathlib import Path
        from flowctl.core.text.logfile import LogFile, LogFileOptions
        from flowctl.core.text.logwriter import LineWriter
        path = Path(tempfile.mkdtemp()) / "log"
        writer = LineWriter(LogFile(path, LogFileOptions(path=path)), lambda count: b"%d dropped\\n" % count, list)
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
        for line in (b"the first line\\n", b"the second line\\n", b"the third line\\n"):
            writer.put(line)
            writer.flush(10.0)
        assert "large" in str(writer.error), writer.error
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.put(b"there is room again\\n")
        assert writer.flush(10.0)
        print(path.read_text(), end="")
        path.unlink(), path.parent.rmdir()
    """
    done = run(script)
    assert done.stdout == "the first line\nthe second\nthere is room again\n2 dropped\n"
    assert done.stderr.count("cannot be written: File too large") == 1


def test_file_when_its_folder_goes_and_comes_is_there_again_and_standard_error_is_told(path, capfd):
    path = path.parent / "folder" / "log"
    path.parent.mkdir()
    file = log_file(path)
    path.unlink()
    path.parent.rmdir()
    for _ in range(3):
        say(file, b"nowhere\n")
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert f"the log file {path} cannot be rotated or opened again: No such file" in told
    path.parent.mkdir()
    say(file, b"here\n")
    assert path.read_text() == "here\n"
    path.unlink()
    path.parent.rmdir()
    say(file, b"nowhere\n")
    assert capfd.readouterr().err == told
    file.close()


def test_file_when_it_is_a_link_is_rotated_where_it_leads(path):
    real = path.parent / "disk"
    real.mkdir()
    path.symlink_to(real / "log")
    file = log_file(path, max_bytes=1)
    for line in (b"one\n", b"two\n"):
        say(file, line)
    assert path.is_symlink()
    assert path.read_text() == "two\n"
    assert [item.read_text() for item in rotated(real / "log")] == ["one\n"]
    file.close()


def test_file_when_a_link_takes_its_place_is_not_written_through_it(path, capfd):
    file = log_file(path)
    say(file, b"one\n")
    other = path.with_name("authorized_keys")
    other.write_text("mine\n")
    path.rename(moved := path.with_name("log.1"))
    path.symlink_to(other)
    say(file, b"two\n")
    assert (other.read_text(), moved.read_text()) == ("mine\n", "one\ntwo\n")
    assert "cannot be rotated or opened again" in capfd.readouterr().err
    path.unlink()
    say(file, b"three\n")
    assert path.read_text() == "three\n"
    file.close()


def test_file_when_it_is_a_pipe_or_a_folder_is_refused_and_not_waited_for(path):
    os.mkfifo(path)
    for place, why in ((path, "No such device|no regular file"), (path.parent, "Is a directory")):
        with pytest.raises(ConfigError, match=why) as caught:
            log_file(place)
        assert "LogsDirectory" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_file_when_it_may_not_be_written_is_refused(path):
    script = """
        import os, sys
        from pathlib import Path
        from flowctl.core.text.logfile import LogFile, LogFileOptions
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        LogFile(Path(sys.argv[1]), LogFileOptions())
    """
    path.parent.chmod(0o755)
    assert f"cannot write the log file {path}: Permission denied" in run(script, path).stderr


def test_serve_when_the_folder_of_its_log_is_not_there_says_so_and_does_not_start(path):
    words = [sys.executable, "-m", "flowctl", "serve", "echo", "--port", "0", "--log-file", str(path / "log")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    said = f"error: cannot write the log file {path}/log: No such file or directory\nhint: name a"
    assert done.stderr.startswith(said)  # and not that the log goes on there


def test_writer_when_the_file_was_moved_opens_it_at_once_when_told(path):
    writer = LineWriter(log_file(path), lambda _: b"", list)
    writer.put(b"one\n")
    assert writer.flush(PATIENCE_S)
    path.rename(path.with_name("old"))
    writer.put(b"")
    deadline = time.monotonic() + 0.9 * PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert path.exists()
    writer.close(PATIENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_serve_when_its_workers_log_to_a_file_has_all_lines_there_and_opens_it_on_sigusr1(path, tmp_path):
    """The lines of a supervisor and two workers are in one file; moved away, it is there again after the signal."""
    settings = tmp_path / "flowctl.toml"
    settings.write_text(f'port = 0\nworkers = 2\nlog_file = "{path.name}"\n')  # beside the file of settings
    words = [sys.executable, "-m", "flowctl", "serve", "live", "--config", str(settings), "--log-json", "--json"]
    words += ["--set", f"control=ipc://{tmp_path}/c"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            json.loads(process.stdout.readline())  # said when the first of them is ready
            wait_for(lambda: path.read_text().count('"live server started"') == 2)
            moved = path.rename(tmp_path / "moved")
            process.send_signal(signal.SIGUSR1)
            wait_for(path.exists)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            told = process.stderr.read()
        finally:
            process.kill()
    before, after = ([json.loads(line) for line in item.read_text().splitlines()] for item in (moved, path))
    assert {line.get("worker") for line in before if line["event"] == "live server started"} == {1, 2}
    assert {line.get("worker") for line in after if line["event"] == "live server stopped"} == {1, 2}
    assert after[-1]["event"] == "stopped"
    assert [json.loads(line)["event"] for line in told.splitlines()] == ["the log goes on in a file"]


@pytest.mark.parametrize("how", ["copytruncate", "create"])
def test_serve_when_logrotate_rotates_its_log_writes_on_to_the_new_one(path, tmp_path, how):
    """The real program, in both ways that docs/how-to/read-the-log.md names; each line is in one of the files, once."""
    logrotate = checker("logrotate")
    if logrotate is None:
        pytest.skip("logrotate is not here: make checkers")
    tmp_path.chmod(0o755)  # it refuses folders that others may write to
    words = [sys.executable, "-m", "flowctl", "serve", "echo", "--port", "0", "--json", "--log-max-size", "0"]
    with subprocess.Popen([*words, "--log-file", str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            json.loads(process.stdout.readline())
            wait_for(lambda: "serving" in path.read_text())
            script = f"    postrotate\n        kill -USR1 {process.pid}\n    endscript\n" if how == "create" else ""
            (tmp_path / "conf").write_text(f"{path} {{\n    rotate 3\n    {how}\n{script}}}\n")
            (tmp_path / "conf").chmod(0o644)
            for number in range(1, 3):
                words = [str(logrotate), "--force", "--state", str(tmp_path / "state"), str(tmp_path / "conf")]
                environment = os.environ | {"LD_LIBRARY_PATH": str(folder() / "lib")}
                subprocess.run(words, env=environment, check=True, timeout=PATIENCE_S)
                process.send_signal(signal.SIGUSR2)
                wait_for(lambda seen=number: sum("figures" in item.read_text() for item in files(path)) == seen)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert [item.name for item in files(path)] == ["log", "log.1", "log.2"]
    lines = [line for item in files(path)[::-1] for line in item.read_text().splitlines()]
    said = [line.split("]", 1)[1].split("[")[0].strip() for line in lines]
    assert said == ["serving", "figures", "figures", "SIGTERM: ending in order", "stopped"]


def files(path):
    return sorted(path.parent.glob("log*"))


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_log_when_a_link_takes_the_place_of_its_folder_stays_where_it_was(tmp_path, capfd):
    folder, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    file = log_file(folder / "log")
    say(file, b"one\n")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(elsewhere)
    say(file, b"two\n")
    assert (tmp_path / "moved" / "log").read_bytes() == b"one\ntwo\n"
    assert list(elsewhere.iterdir()) == []
    assert f"{folder} is a link" in capfd.readouterr().err
