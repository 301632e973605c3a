"""Files of secrets: an owner's alone, or handed to a service by root or systemd."""

from __future__ import annotations

import os

import pytest

from flowctl.core.text import private
from flowctl.core.text.private import check_private
from flowctl.errors import ConfigError

OURS, ANOTHER = 4711, 4712
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return what makes a file of a mode, owner and group, and this process one of user and group OURS."""

    def make(mode, owner=None, group=None):
        path = tmp_path / "secret"
        path.write_bytes(b"x" * 32)
        if owner is not None:
            os.chown(path, owner, group)
            monkeypatch.setattr(private.os, "geteuid", lambda: OURS)
            monkeypatch.setattr(private.os, "getegid", lambda: OURS)
            monkeypatch.setattr(private.os, "getgroups", list)
        path.chmod(mode)
        return path

    return make


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "accepted"),
    [
        (0o600, OURS, OURS, True),
        (0o640, 0, OURS, True),  # root gave it to the group of the service
        (0o440, 0, OURS, True),
        (0o640, 0, ANOTHER, False),
        (0o640, OURS, OURS, False),  # a user's group may have others in it
        (0o660, 0, OURS, False),
        (0o644, 0, OURS, False),
        (0o604, OURS, OURS, False),
    ],
)
def test_secret_when_given_to_a_service_is_accepted_as_narrowly_as_that(made, mode, owner, group, accepted):
    """Mode 640 is enough where root is the owner and the group is the process's own; nothing wider ever is."""
    path = made(mode, owner, group)
    if accepted:
        check_private(path, "tls_key")
        return
    with pytest.raises(ConfigError, match=f"tls_key: .* has mode {mode:04o}: others than its owner") as caught:
        check_private(path, "tls_key")
    assert "LoadCredential" in caught.value.hint


def test_secret_when_systemd_handed_it_over_is_accepted(made, monkeypatch, tmp_path):
    """A credential of systemd has a mode of its own; the same file elsewhere is refused."""
    path = made(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    check_private(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    monkeypatch.setattr(private.os, "geteuid", lambda: OURS)
    monkeypatch.setattr(private.os, "getegid", lambda: OURS)
    monkeypatch.setattr(private.os, "getgroups", list)
    with pytest.raises(ConfigError, match="has mode 0440"):
        check_private(path)
