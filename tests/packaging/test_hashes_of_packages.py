"""What image and package install: files with the hashes of requirements-dev.txt, and all that is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_kit import ROOT


def written(names):
    done = subprocess.run(
        [sys.executable, ROOT / "packaging" / "requirements", names], capture_output=True, text=True, check=False
    )
    return done.stdout, done.stderr, done.returncode


def needed(name, extras, found):
    """Add to `found` what a package needs here, as its installed copy says."""
    for text in requires(name) or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            key = canonicalize_name(wanted.name), *sorted(wanted.extras)
            if key not in found:
                found.add(key)
                needed(wanted.name, wanted.extras, found)
    return found


@pytest.mark.parametrize("file", ["Dockerfile", "packaging/debian/build"])
def test_pip_when_it_fetches_anything_asks_for_hashes(file):
    text = (ROOT / file).read_text().replace('"${pip[@]}"', "pip install").replace("\\\n", " ")
    calls = re.findall(r"\bpip (?:install|wheel)\b[^&\n)]*", text)
    asked = [call for call in calls if re.search(r" (-r|\.|--no-deps)", call)]
    assert len(asked) >= 2
    assert all("--require-hashes" in call or "--no-index" in call for call in asked), asked


@pytest.mark.parametrize("extras", ["admin,media", "asgi", "all"])
def test_requirements_when_written_for_extras_are_all_that_is_needed_with_hashes(extras):
    text, _, _ = written(extras)
    parts = re.split(r"(?m)^(?=\w)", text)[1:]
    assert all("--hash=sha256:" in part for part in parts)
    names = {canonicalize_name(Requirement(part.partition("\\")[0]).name) for part in parts}
    try:
        wanted = {name for name, *_ in needed("flowctl", extras.split(","), set())}
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed")
    assert wanted - {"flowctl"} <= names
    assert "pytest" not in names


def test_requirements_when_a_name_is_unknown_say_so():
    assert written("adnim") == ("", "error: 'adnim' is no extra of flowctl, and not in requirements-dev.txt\n", 1)
