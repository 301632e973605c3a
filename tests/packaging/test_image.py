"""The container image: its Dockerfile is linted, and its steps are run, with a daemon where one is and without."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from image_kit import LOOPBACK, command_of, copy_context, instructions, last, script_of, stages
from install_checkers import checker
from kubernetes_kit import pod_of
from sandbox_kit import no_sandbox, run_in_sandbox, said_in
from source_kit import ROOT

DEPLOYING = ROOT / "docs" / "deploying.md"
WAIT_S = 240
pytestmark = pytest.mark.timeout(2 * WAIT_S)
PYTHON = Path(sys.prefix).resolve() / "bin" / "python"


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
cat >/mnt/run <<'EOF'
set -e
{LOOPBACK}
as() {{ setpriv --reuid "$user" --regid "$group" --clear-groups --no-new-privs "$@"; }}
as {command_of("ENTRYPOINT")} {command_of("CMD")} 2>/mnt/log &
until grep -qs '"serving"' /mnt/log; do kill -0 $! || {{ cat /mnt/log; exit 1; }}; sleep 0.1; done
flowctl publish synthetic rtmp://127.0.0.1:{last("EXPOSE")}/live/room --duration 4s --json >/mnt/published 2>&1 &
echo "== played"; flowctl play rtmp://127.0.0.1:{last("EXPOSE")}/live/room --duration 2s --json 2>/dev/null
echo "== health"; as {command_of("HEALTHCHECK")}
kill -{last("STOPSIGNAL").removeprefix("SIG")} "$(pgrep -o -u "$user")"
status=0; wait %1 || status=$?
echo "== ended"; echo "$status"
EOF
export user group
touch /mnt/run; unshare --net sh -e /mnt/run
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
        script = f"renice -n 10 -p $$ >/dev/null\n{script_of(stage)}"
        run_in_sandbox(tmp_path_factory.mktemp("stage"), script, given=given, timeout_s=WAIT_S)
    return given


def test_image_when_its_steps_are_run_serves_as_its_user(built, tmp_path):
    script = script_of(stages()[-1]) + RUNS
    said = said_in(run_in_sandbox(tmp_path, script, given=built, timeout_s=WAIT_S).stdout)
    played = json.loads(said["played"].splitlines()[-1])
    assert played["received"]["key"] + played["received"]["inter"] > 0
    assert played["missing"]["video"] == 0
    assert json.loads(said["health"])["server"]["accepted"] == 2
    assert said["ended"] == "0"


def test_pods_when_run_as_a_kubelet_does_serve_and_leave_without_losing_a_viewer(built, tmp_path):
    """The containers of the manifests, from the image: secrets as the documents make them, a read-only root, probes."""
    (block,) = [text for text in re.findall(r"```text\n(.*?)```", DEPLOYING.read_text(), re.DOTALL) if "secret" in text]
    asked = {"secret": block} | {name: pod_of(name) for name in ("origin", "edge", "server")}
    (built / "pods.json").write_text(json.dumps(asked))
    folders = ":".join(str(ROOT.resolve() / "tests" / name) for name in ("packaging", "e2e"))
    script = f"""
    rm -f /etc/resolv.conf
    printf 'nameserver 127.0.0.1\\nsearch default.svc.cluster.local\\n' >/etc/resolv.conf
    cat >/mnt/run <<'EOF'
    {LOOPBACK}
    PYTHONPATH={folders} {PYTHON} {ROOT.resolve()}/tests/packaging/run_pods.py /mnt/given
EOF
    unshare --net sh -e /mnt/run
    """
    (tmp_path / "root").mkdir()
    done = run_in_sandbox(tmp_path / "root", script_of(stages()[-1]) + script, given=built, timeout_s=WAIT_S)
    said = json.loads(said_in(done.stdout)["pods"])
    assert (said["strangers"], said["metrics"], said["no_key"], said["at_edge"]) == (401, True, 1, 1)
    assert said["played"]["received"]["key"] + said["played"]["received"]["inter"] > 0
    assert said["played"]["missing"]["video"] == 0
    assert (said["viewed"], said["alive"], said["goes_on"]) == ("HTTP/1.1 200 OK", 200, True)
    assert (said["edge_ended"], said["origin_ended"], said["server_ended"]) == (0, 0, 0)
    assert said["workers"] == ["2"]


def test_image_when_docker_is_here_is_built_and_serves():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no docker daemon is here")
    if not os.environ.get("FLOWCTL_BUILD_IMAGE"):
        pytest.skip("FLOWCTL_BUILD_IMAGE is not set: the build downloads for minutes")

    def run(*words):
        return subprocess.run([docker, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    run("build", "--tag", "flowctl-test", ".")
    container = run("run", "--detach", "--network", "none", "flowctl-test")
    try:
        deadline = time.monotonic() + WAIT_S
        while run("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, run("logs", container)
            time.sleep(0.5)
        url = f"rtmp://127.0.0.1:{last('EXPOSE')}/live/room"
        run("exec", "--detach", container, "flowctl", "publish", "synthetic", url, "--duration", "20s")
        played = json.loads(run("exec", container, "flowctl", "play", url, "--duration", "2s", "--json"))
        assert played["received"]["key"] > 0
        assert played["missing"]["video"] == 0
        run("stop", container)
        assert run("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        run("rm", "--force", container)
