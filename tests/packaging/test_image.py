"""The container image: its Dockerfile is linted, and its steps are run, with a daemon where one is and without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess

import pytest
from image_kit import LOOPBACK, command_of, copy_context, instructions, last, script_of, stages
from install_checkers import checker
from sandbox_kit import no_sandbox, run_in_sandbox, said_in
from source_kit import ROOT

WAIT_S = 120


def test_dockerfile_when_linted_has_no_finding():
    hadolint = checker("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not here (make checkers)")
    found = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_image_when_read_is_pinned_is_no_root_and_has_a_health_check():
    found = instructions()
    bases = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z-]+", base) for base in bases)
    assert int(last("USER")) > 0
    for word, rest in found:
        if word in {"CMD", "ENTRYPOINT"}:
            assert re.fullmatch(r'\["[^"]+"(, "[^"]+")*\]', rest), rest
        assert not re.search(r"(?i)password|secret|token|PRIVATE KEY", rest)
        assert word != "ADD"
    assert re.search(r'CMD \["flowctl", "stats", "--json"\]$', last("HEALTHCHECK"))
    assert stages()[-1][-1][0] == "CMD"


def test_image_when_built_is_sent_what_it_copies_alone():
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {
        name.removeprefix("./")
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    }
    assert {line[1:] for line in kept if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


RUNS = f"""
user=$(id -u {last("USER")}) group=$(id -g {last("USER")})
cat >/tmp/run <<'EOF'
set -e
{LOOPBACK}
as() {{ setpriv --reuid "$user" --regid "$group" --clear-groups --no-new-privs "$@"; }}
as {command_of("ENTRYPOINT")} {command_of("CMD")} 2>/tmp/log &
until grep -qs '"serving"' /tmp/log; do kill -0 $! || {{ cat /tmp/log; exit 1; }}; sleep 0.1; done
flowctl publish synthetic rtmp://127.0.0.1:{last("EXPOSE")}/live/room --duration 4s --json >/tmp/published 2>&1 &
echo "== played"; flowctl play rtmp://127.0.0.1:{last("EXPOSE")}/live/room --duration 2s --json 2>/dev/null
echo "== health"; as {command_of("HEALTHCHECK")}
kill -{last("STOPSIGNAL").removeprefix("SIG")} "$(pgrep -o -u "$user")"
status=0; wait %1 || status=$?
echo "== ended"; echo "$status"
EOF
export user group
touch /tmp/run; unshare --net sh -e /tmp/run
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What the stages before the last one leave for it."""
    if no_sandbox():
        pytest.skip(no_sandbox())
    given = tmp_path_factory.mktemp("build")
    (given / "context").mkdir()
    copy_context(given / "context")
    for stage in stages()[:-1]:
        run_in_sandbox(tmp_path_factory.mktemp("stage"), script_of(stage), given=given, timeout_s=WAIT_S)
    return given


def test_image_when_its_steps_are_run_serves_as_its_user(built, tmp_path):
    script = script_of(stages()[-1]) + RUNS
    said = said_in(run_in_sandbox(tmp_path, script, given=built, timeout_s=WAIT_S).stdout)
    played = json.loads(said["played"].splitlines()[-1])
    assert played["received"]["key"] + played["received"]["inter"] > 0
    assert played["missing"]["video"] == 0
    assert json.loads(said["health"])["server"]["accepted"] == 2
    assert said["ended"] == "0"


def test_image_when_docker_is_here_is_built_and_serves():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no docker daemon is here")
    if not os.environ.get("FLOWCTL_BUILD_IMAGE"):
        pytest.skip("FLOWCTL_BUILD_IMAGE is not set: the build downloads for minutes")
    with contextlib.chdir(ROOT):
        subprocess.run([docker, "build", "--tag", "flowctl-test", "."], check=True)
    words = [docker, "run", "--rm", "flowctl-test", "version"]
    said = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "flowctl" in said.stdout
