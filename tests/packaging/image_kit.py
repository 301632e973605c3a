"""The Dockerfile, and its steps as a shell script: what a daemon would do, on copies of this machine.

The copy stands in for the base image: Debian, with the Python that the tests run on where the image has its own, in
/usr/local. A stage is one script, and leaves what later stages copy from it in a folder that all of them are given.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from source_kit import ROOT

BASE = f"""
if [ {sys.base_prefix} = /usr ]; then ln -sf /usr/bin/python{sys.version_info.major}.{sys.version_info.minor} \\
    /usr/local/bin/python
elif [ {sys.base_prefix} != /usr/local ]; then mount --bind {sys.base_prefix} /usr/local; fi
export LD_LIBRARY_PATH=/usr/local/lib  # as ldconfig would find it
cd /
"""
LOOPBACK = """python -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x49))'"""
"""SIOCSIFFLAGS: a network namespace begins with its loopback down."""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def last(word: str) -> str:
    """Return what the last instruction of a kind says, of the stage that becomes the image."""
    return next(rest for name, rest in reversed(stages()[-1]) if name == word)


def copy_context(folder: Path) -> None:
    """Copy what the daemon would be sent: what .dockerignore leaves, which begins with leaving nothing."""
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert kept[0] == "*"
    ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in kept if line.startswith("**/")))
    for name in (line[1:] for line in kept if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def script_of(stage: list[tuple[str, str]]) -> str:
    """Return the steps of a stage as a script; /mnt/given/context is what it was sent."""
    name = stage[0][1].partition(" AS ")[2]
    lines = ["set -e", BASE]
    for word, rest in stage:
        if word in {"RUN", "WORKDIR"}:
            lines.append(rest if word == "RUN" else f"mkdir -p {rest} && cd {rest}")
        elif word in {"ENV", "ARG"}:
            lines += [f'export "{item}"' for item in shlex.split(rest)]
        elif word == "COPY":
            lines += _copies(rest.split())
        elif word not in {"FROM", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}:
            raise AssertionError(f"nothing here does {word}")
    for path in (rest.split()[1] for _, rest in instructions() if rest.startswith(f"--from={name} ")):
        lines.append(f"mkdir -p /mnt/given/{name}{path} && cp -a {path}/. /mnt/given/{name}{path}")
    return "\n".join(lines)


def _copies(words: list[str]) -> Iterator[str]:
    source = "context"
    if words[0].startswith("--from="):
        source = words.pop(0).partition("=")[2]
    *names, target = words
    yield f"mkdir -p {target}"
    for name in names:
        path = f"/mnt/given/{source}/{name.lstrip('/')}"
        yield f"if [ -d {path} ]; then cp -a {path}/. {target}; else cp -a {path} {target}; fi"


def command_of(word: str) -> str:
    """Return the command of an ENTRYPOINT, CMD or HEALTHCHECK, for a shell."""
    return shlex.join(json.loads(last(word).partition("CMD ")[2] if word == "HEALTHCHECK" else last(word)))
