"""What tests start has default signals and ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from process_kit import end_children
from source_kit import ROOT

SHOW = "import signal; print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT)])"
SIGNALS = f"""
import subprocess, sys
def test_child():
    shown = subprocess.run([sys.executable, "-c", {SHOW!r}], capture_output=True, text=True).stdout
    assert "SIG_IGN" not in shown, shown
"""
LEAVING = """
import os, pytest, subprocess, sys
pytestmark = pytest.mark.realtime
def test_leaves():
    # The first to start is gone at once, its own child is an orphan.
    code = "import subprocess, sys; from subprocess import DEVNULL as no; "
    code += "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=no, stderr=no).pid)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    print("orphan", done.stdout)
"""


def run_pytest(tmp_path, text, **settings):
    (tmp_path / "test_inner.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:schemathesis",
        "-p",
        "conftest",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'tests' / 'kits'}"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment, cwd=tmp_path, **settings
    )


@pytest.mark.realtime
def test_pytest_when_the_shell_ignores_signals_resets_them(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run_pytest(tmp_path, SIGNALS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stdout


@pytest.mark.realtime
def test_pytest_when_a_test_leaves_a_process_ends_it_and_fails(tmp_path):
    done = run_pytest(tmp_path, LEAVING)
    assert "processes outlived their tests" in done.stdout
    assert done.returncode == 1
    orphan = int(done.stdout.partition("orphan ")[2].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)
    assert end_children() == []


SLOW_REPORT = """
import time
def pytest_runtest_logreport(report):
    if report.when == "setup" and "late" in report.nodeid:
        time.sleep(1)
"""
LATE = """
import pytest, time
@pytest.mark.timeout(0.5)
def test_late(): time.sleep(60)
def test_next(): pass
"""


@pytest.mark.realtime
def test_pytest_when_time_is_up_while_it_reports_fails_that_test_and_goes_on(tmp_path):
    (tmp_path / "slow_report.py").write_text(SLOW_REPORT)
    done = run_pytest(tmp_path, "pytest_plugins = ['slow_report']" + LATE)
    assert "Timeout (>0.5s)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 passed in"), done.stdout
    assert done.returncode == 1
