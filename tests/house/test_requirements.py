"""The lock file of development and CI: it has everything that is declared, in one version, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements-dev.txt").read_text("utf-8")


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-").replace(".", "-")


def test_lock_when_compared_with_the_project_has_all_that_is_declared():
    """Whoever adds a dependency makes the lock anew: `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = sum(project["project"]["optional-dependencies"].values(), project["project"]["dependencies"])
    declared += project["build-system"]["requires"]
    locked = {name_of(line) for line in LOCK.splitlines() if re.match(r"[A-Za-z0-9]", line)}
    assert {name_of(item) for item in declared} - locked == {"flowctl"}  # extras name others


def test_lock_when_read_pins_every_package_with_hashes():
    entries = re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip())
    assert len(entries) > 30
    assert [entry for entry in entries if "==" not in entry.splitlines()[0] or "--hash=sha256:" not in entry] == []


def test_setup_when_it_installs_takes_the_lock():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "--require-hashes -r requirements-dev.txt" in makefile
    assert "--no-deps --no-build-isolation --editable ." in makefile
